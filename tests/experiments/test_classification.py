"""The table on images in little: the same numbers as by hand, once, and never twice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedgmm.data.images import ImageFileError
from fedgmm.experiments import comparison, image_study, image_trials
from fedgmm.experiments.classification import reproduce_classification
from fedgmm.experiments.image_study import ImageStudy, prepare_federation
from fedgmm.experiments.image_trials import chosen_of
from fedgmm.experiments.results import TITLES
from fedgmm.training import train
from tiny_images import FAST

SOME = {"methods": ("fedavg", "fedgmm"), "track": "tuned", **FAST}


@pytest.fixture
def trainings(monkeypatch):
    """Every training of a study and of its tuning, as it is called."""
    calls = []

    def counted(*args, **kwargs):
        calls.append((args, kwargs))
        return train(*args, **kwargs)

    monkeypatch.setattr(image_trials, "train", counted)
    monkeypatch.setattr(comparison, "train", counted)
    return calls


def test_all_methods_beside_the_paper(tmp_path, femnist):
    study = ImageStudy(track="tuned", **FAST)
    outcome = reproduce_classification(tmp_path / "out", study, data_dir=femnist)
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


def test_the_numbers_are_those_of_a_plain_training(tmp_path, femnist):
    study = ImageStudy(**{**SOME, "track": "paper"})
    outcome = reproduce_classification(tmp_path / "out", study, data_dir=femnist)
    federation = prepare_federation(study, 0, femnist).dataset
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


def test_rates_are_chosen_once_for_all_seeds(tmp_path, femnist, trainings):
    study = ImageStudy(**{**SOME, "seeds": (0, 1), "methods": ("fedavg",)})
    outcome = reproduce_classification(tmp_path / "out", study, data_dir=femnist)
    assert len(trainings) == len(study.grid) + 3 + 2
    assert len(outcome.accuracy["fedavg"]) == 2
    first, second = outcome.details
    assert first["lr"] == second["lr"]
    assert first["likelihood"] != second["likelihood"]  # another federation


def test_what_is_done_is_not_done_again(tmp_path, femnist, trainings, monkeypatch):
    study = ImageStudy(**SOME)
    first = reproduce_classification(tmp_path / "out", study, data_dir=femnist)
    trainings.clear()
    monkeypatch.setattr(image_study, "load_images", None)  # data are not even read
    assert reproduce_classification(tmp_path / "out", study, data_dir=femnist) == first
    assert not trainings
    monkeypatch.undo()

    (tmp_path / "out" / "classification-femnist-tuned" / "fedgmm-0.json").unlink()
    again = reproduce_classification(tmp_path / "out", study, data_dir=femnist)
    assert again.accuracy == first.accuracy


def test_an_interrupted_training_goes_on(tmp_path, femnist, monkeypatch):
    # without a warm-up, whose length depends on that of the run
    study = ImageStudy(**{**SOME, "methods": ("fedgmm",), "track": "paper"})
    whole = reproduce_classification(tmp_path / "whole", study, data_dir=femnist)

    def stopped_after_a_round(dataset, *, options, **others):
        model = train(dataset, options=replace(options, rounds=1), **others)
        model.stopped = "interrupted"
        return model

    monkeypatch.setattr(image_trials, "train", stopped_after_a_round)
    with pytest.raises(KeyboardInterrupt):
        reproduce_classification(tmp_path / "out", study, data_dir=femnist)
    trials = tmp_path / "out" / "classification-femnist-paper"
    assert (trials / "fedgmm-0.safetensors").exists()
    assert not (trials / "fedgmm-0.json").exists()
    rounds = []

    def watched(*args, **kwargs):
        return train(*args, on_round=[lambda entry: rounds.append(entry["round"])], **kwargs)

    monkeypatch.setattr(image_trials, "train", watched)
    resumed = reproduce_classification(tmp_path / "out", study, data_dir=femnist)
    assert rounds == [2]
    assert resumed.accuracy == whole.accuracy


def test_without_data(tmp_path):
    with pytest.raises(ImageFileError, match="femnist"):
        reproduce_classification(tmp_path / "out", ImageStudy(**SOME), data_dir=tmp_path)
