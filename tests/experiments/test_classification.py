"""The table on images in little: the same numbers as by hand, once, and never twice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedgmm.data.images import ImageFileError
from fedgmm.experiments import classification, comparison
from fedgmm.experiments.classification import (
    ImageStudy,
    chosen_of,
    open_trials,
    prepare_federation,
    reproduce_classification,
    stopped_early,
)
from fedgmm.experiments.results import TITLES
from fedgmm.training import train
from tiny_images import FAST, write_femnist

SOME = {"methods": ("fedavg", "fedgmm"), "track": "tuned", **FAST}


@pytest.fixture
def data(tmp_path):
    write_femnist(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def trainings(monkeypatch):
    """Every training of a study and of its tuning, as it is called."""
    calls = []

    def counted(*args, **kwargs):
        calls.append((args, kwargs))
        return train(*args, **kwargs)

    monkeypatch.setattr(classification, "train", counted)
    monkeypatch.setattr(comparison, "train", counted)
    return calls


def test_all_methods_beside_the_paper(tmp_path, data):
    study = ImageStudy(track="tuned", **FAST)
    outcome = reproduce_classification(tmp_path / "out", study, data_dir=data)
    assert list(outcome.accuracy) == list(TITLES)
    name = "classification-femnist-tuned"
    record = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert record["accuracy"] == outcome.accuracy
    assert record["study"]["dataset"] == "femnist"
    table = (tmp_path / "out" / f"{name}.md").read_text()
    assert table.count("\n| ") == 9
    assert "| 79.49 |" in table
    assert 5_000 < (tmp_path / "out" / f"{name}.png").stat().st_size < 150_000
    assert not list((tmp_path / "out").rglob("*.safetensors"))  # checkpoints of finished trials


def test_the_numbers_are_those_of_a_plain_training(tmp_path, data):
    study = ImageStudy(**{**SOME, "track": "paper"})
    outcome = reproduce_classification(tmp_path / "out", study, data_dir=data)
    federation = prepare_federation(study, 0, data)
    for one in outcome.details:
        tuning = comparison.tune(
            federation,
            one["method"],
            rounds=1,
            finalists=3,
            options=study.options(one["method"], 0),
        )
        assert one["lr"] == tuning.best
        file = tmp_path / "out" / "classification-femnist-paper" / f"{one['method']}-tuning.json"
        scores = json.loads(file.read_text())["scores"]
        assert list(scores["lr"].values()) == list(tuning.scores.values())
        options = replace(study.options(one["method"], 0), **chosen_of(one))
        model = train(federation, options=options)
        assert outcome.accuracy[one["method"]] == [model.evaluate("test").mean_accuracy]


def test_rates_are_chosen_once_for_all_seeds(tmp_path, data, trainings):
    study = ImageStudy(**{**SOME, "seeds": (0, 1), "methods": ("fedavg",)})
    outcome = reproduce_classification(tmp_path / "out", study, data_dir=data)
    assert len(trainings) == len(study.grid) + 3 + 2
    assert len(outcome.accuracy["fedavg"]) == 2
    first, second = outcome.details
    assert first["lr"] == second["lr"]
    assert first["likelihood"] != second["likelihood"]  # another federation


def test_what_is_done_is_not_done_again(tmp_path, data, trainings, monkeypatch):
    study = ImageStudy(**SOME)
    first = reproduce_classification(tmp_path / "out", study, data_dir=data)
    trainings.clear()
    monkeypatch.setattr(classification, "load_images", None)  # data are not even read
    assert reproduce_classification(tmp_path / "out", study, data_dir=data) == first
    assert not trainings
    monkeypatch.undo()

    (tmp_path / "out" / "classification-femnist-tuned" / "fedgmm-0.json").unlink()
    again = reproduce_classification(tmp_path / "out", study, data_dir=data)
    assert again.accuracy == first.accuracy


def test_an_interrupted_training_goes_on(tmp_path, data, monkeypatch):
    # without a warm-up, whose length depends on that of the run
    study = ImageStudy(**{**SOME, "methods": ("fedgmm",), "track": "paper"})
    whole = reproduce_classification(tmp_path / "whole", study, data_dir=data)

    def stopped_after_a_round(dataset, *, options, **others):
        model = train(dataset, options=replace(options, rounds=1), **others)
        model.stopped = "interrupted"
        return model

    monkeypatch.setattr(classification, "train", stopped_after_a_round)
    with pytest.raises(KeyboardInterrupt):
        reproduce_classification(tmp_path / "out", study, data_dir=data)
    trials = tmp_path / "out" / "classification-femnist-paper"
    assert (trials / "fedgmm-0.safetensors").exists()
    assert not (trials / "fedgmm-0.json").exists()
    rounds = []

    def watched(*args, **kwargs):
        return train(*args, on_round=[lambda entry: rounds.append(entry["round"])], **kwargs)

    monkeypatch.setattr(classification, "train", watched)
    resumed = reproduce_classification(tmp_path / "out", study, data_dir=data)
    assert rounds == [2]
    assert resumed.accuracy == whole.accuracy


def test_one_folder_holds_one_study(tmp_path):
    study = ImageStudy(**SOME)
    open_trials(tmp_path, study)
    open_trials(tmp_path, replace(study, methods=("local",), seeds=(3, 4)))  # these may grow
    with pytest.raises(ValueError, match=r"a study with rounds=2, not 3; choose another folder\.$"):
        open_trials(tmp_path, replace(study, rounds=3))


def test_settings_younger_than_a_folder_have_their_defaults(tmp_path):
    study = ImageStudy(**SOME)
    file = open_trials(tmp_path, study) / "study.json"
    facts = json.loads(file.read_text())
    del facts["reg_covar"]
    file.write_text(json.dumps(facts))
    open_trials(tmp_path, study)
    file.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"reg_covar=0\.01, not 0\.5"):
        open_trials(tmp_path, replace(study, reg_covar=0.5))


def test_tracks():
    paper, tuned = ImageStudy(), ImageStudy(track="tuned", reg_covar=1e-3)
    assert len(paper.grid) == 6
    options = paper.options("fedgmm", 3)
    assert (options.momentum, options.server, options.warmup, options.seed) == (0, "average", 0, 3)
    assert (options.batch_size, options.local_epochs, options.rounds) == (128, 1, 200)
    for method in TITLES:
        options = tuned.options(method, 0)
        assert (options.momentum, options.server) == (0.9, "momentum")
        assert options.warmup == (100 if method in ("fedem", "fedgmm") else 0)
        assert options.reg_covar == 1e-3


def test_a_training_that_diverged_is_named():
    rows = [
        {"method": "fedem", "seed": 0, "stopped": None},
        {"method": "fedgmm", "seed": 2, "stopped": "round 3"},
    ]
    assert stopped_early(rows[:1]) == ""
    assert stopped_early(rows).endswith("kept its last good round: FedGMM (seed 2).")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "imagenet"}, "dataset must be one of"),
        ({"track": "fast"}, "track must be one of"),
        ({"methods": ("fedsgd",)}, "methods must be one of"),
        ({"methods": ()}, "methods is empty"),
        ({"seeds": ()}, "seeds is empty"),
        ({"encoder": "vgg"}, "encoder must be one of"),
        ({"covariance_type": "round"}, "covariance_type must be one of"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"features": 0}, "features must be at least 1"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        ImageStudy(**change)


def test_without_data(tmp_path):
    with pytest.raises(ImageFileError, match="femnist"):
        reproduce_classification(tmp_path / "out", ImageStudy(**SOME), data_dir=tmp_path)
