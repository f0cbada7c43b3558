"""The table on images in little: the same numbers as by hand, once, and never twice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedgmm.data.images.files import ImageFileError
from fedgmm.experiments import image_study, trial_files, workplace
from fedgmm.experiments.classification import reproduce_classification
from fedgmm.experiments.image_study import ImageStudy, prepare_federation
from fedgmm.experiments.workplace import Workplace
from fedgmm.methods.base import TITLES
from fedgmm.runs import comparison
from fedgmm.training.local import train
from tiny_images import FAST

SOME = {"methods": ("fedavg", "fedgmm"), "track": "tuned", **FAST}


@pytest.fixture
def trainings(monkeypatch):
    """Every training of a study and of its tuning, as it is called."""
    calls = []

    def counted(*args, **kwargs):
        calls.append((args, kwargs))
        return train(*args, **kwargs)

    monkeypatch.setattr(trial_files, "train", counted)
    monkeypatch.setattr(comparison, "train", counted)
    return calls


@pytest.mark.usefixtures("painted")
def test_all_methods_beside_the_paper(tmp_path, femnist):
    study = ImageStudy(track="tuned", **FAST)
    outcome = reproduce_classification(tmp_path / "out", study, Workplace(femnist))
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
    study = ImageStudy(**{**SOME, "track": "paper", "rounds": 8, "tuning_rounds": 1})
    outcome = reproduce_classification(tmp_path / "out", study, Workplace(femnist))
    federation = prepare_federation(study, 0, Workplace(femnist)).dataset
    for one in outcome.details:
        options = study.options(one["method"], 0)

        def scores(rates, rounds, judge, options=options):
            models = {lr: train(federation, options=options, lr=lr, until=rounds) for lr in rates}
            return {lr: judge(model) for lr, model in models.items()}

        short = scores(study.grid, 1, comparison.validation_score)
        middle = scores(
            sorted(short, key=lambda lr: -short[lr])[:3], 2, comparison.validation_accuracy
        )
        whole = scores(
            sorted(middle, key=lambda lr: -middle[lr])[:2], 8, comparison.validation_accuracy
        )
        best = max(whole, key=lambda lr: whole[lr])
        file = tmp_path / "out" / "classification-femnist-paper" / f"{one['method']}-tuning.json"
        (written,) = json.loads(file.read_text())["scores"]
        for stage, expected in {"short": short, "middle": middle, "whole": whole}.items():
            assert written[stage] == {f"lr {lr:.6g}": score for lr, score in expected.items()}
        assert one["lr"] == best
        accuracy = train(federation, options=options, lr=best).evaluate("test").mean_accuracy
        assert outcome.accuracy[one["method"]] == [accuracy]


def test_what_is_chosen_among_whole_trainings_at_the_best_rate(tmp_path, femnist):
    study = ImageStudy(**{**SOME, "methods": ("fedgmm",)})
    outcome = reproduce_classification(tmp_path / "out", study, Workplace(femnist))
    trials = tmp_path / "out" / "classification-femnist-tuned"
    written = json.loads((trials / "fedgmm-tuning.json").read_text())
    (one,) = outcome.details
    assert written["chosen"] == trial_files.chosen_of(one)
    table = (tmp_path / "out" / "classification-femnist-tuned.md").read_text()
    momentum, independence = one["server_momentum"], one["independence"]
    counted = ", own label frequencies" if one["personal_labels"] else ""
    assert (
        f"| {one['lr']:.3g}, server momentum {momentum:g}, independence {independence:g}{counted} |"
        in table
    )
    rates, pulls, labels = written["scores"]
    assert len(rates["short"]) == 2 * len(study.grid)
    assert set(pulls) == {"whole"}
    assert set(pulls["whole"]) == {"independence 0", "independence 10000"}
    assert pulls["whole"]["independence 0"] == max(rates["whole"].values())  # not trained again
    federation = prepare_federation(study, 0, Workplace(femnist)).dataset
    options = replace(study.options("fedgmm", 0), lr=one["lr"], server_momentum=momentum)
    for label, score in pulls["whole"].items():
        pull = float(label.split()[1])
        model = train(federation, options=options, independence=pull)
        assert comparison.validation_accuracy(model) == score
        if pull == independence:
            assert score == labels["whole"]["personal_labels 0"] == max(pulls["whole"].values())
            tests = [model.evaluate("test").mean_accuracy]
            model.learn_labels()
            tests.append(model.evaluate("test").mean_accuracy)
            assert comparison.validation_accuracy(model) == labels["whole"]["personal_labels 1"]
            assert outcome.accuracy["fedgmm"] == [tests[one["personal_labels"]]]
    assert one["personal_labels"] == (
        labels["whole"]["personal_labels 1"] > labels["whole"]["personal_labels 0"]
    )


def trained_rounds(monkeypatch):
    """A list that grows by the number of every round that a trial trains from now on."""
    rounds = []

    def watched(*args, **kwargs):
        return train(*args, on_round=[lambda entry: rounds.append(entry["round"])], **kwargs)

    monkeypatch.setattr(trial_files, "train", watched)
    return rounds


def test_the_rest_of_a_study_does_not_train_the_winner_again(tmp_path, femnist, monkeypatch):
    rounds = trained_rounds(monkeypatch)
    study = ImageStudy(**{**SOME, "methods": ("fedavg",)})
    outcome = reproduce_classification(tmp_path / "out", study, Workplace(femnist))
    assert len(rounds) == 2 * len(study.grid) + 2 * (
        study.rounds - 1
    )  # two of the short runs go on
    assert len(outcome.details[0]["curve"]) == study.rounds


def test_rates_are_chosen_once_for_all_seeds(tmp_path, femnist, trainings):
    study = ImageStudy(**{**SOME, "seeds": (0, 1), "methods": ("fedavg",)})
    outcome = reproduce_classification(tmp_path / "out", study, Workplace(femnist))
    # all for a while, half of them for longer, two to the end, with labels or not, and one a seed
    assert len(trainings) == 2 * len(study.grid) + 5 + 2 + 2 + 2
    assert len(outcome.accuracy["fedavg"]) == 2
    first, second = outcome.details
    assert first["lr"] == second["lr"]
    assert first["likelihood"] != second["likelihood"]  # another federation


def test_what_is_done_is_not_done_again(tmp_path, femnist, trainings, monkeypatch):
    study = ImageStudy(**SOME)
    first = reproduce_classification(tmp_path / "out", study, Workplace(femnist))
    trainings.clear()
    monkeypatch.setattr(workplace, "load_images", None)  # data are not even read
    assert reproduce_classification(tmp_path / "out", study, Workplace(femnist)) == first
    assert not trainings
    monkeypatch.undo()

    file = tmp_path / "out" / "classification-femnist-tuned" / "fedgmm-0.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "lr": 0.5}))
    with pytest.raises(ValueError, match=r"fedgmm-0.json was trained with .*0.5.*delete it"):
        reproduce_classification(tmp_path / "out", study, Workplace(femnist))
    file.unlink()
    again = reproduce_classification(tmp_path / "out", study, Workplace(femnist))
    assert again.accuracy == first.accuracy


def test_methods_without_gaussians_need_no_encoder(tmp_path, femnist, monkeypatch):
    study = ImageStudy(**{**SOME, "methods": ("fedavg",)})
    monkeypatch.setattr(image_study, "encoder", None)
    alone = reproduce_classification(tmp_path / "alone", study, Workplace(femnist))
    monkeypatch.undo()
    both = reproduce_classification(tmp_path / "both", ImageStudy(**SOME), Workplace(femnist))
    assert alone.accuracy["fedavg"] == both.accuracy["fedavg"]


def test_an_interrupted_training_goes_on(tmp_path, femnist, monkeypatch):
    study = ImageStudy(**{**SOME, "methods": ("fedgmm",), "rounds": 3, "tuning_rounds": 2})
    whole = reproduce_classification(tmp_path / "whole", study, Workplace(femnist))

    def stopped_after_a_round(dataset, *, until, **others):
        model = train(dataset, until=1, **others)
        model.stopped = "interrupted"
        return model

    monkeypatch.setattr(trial_files, "train", stopped_after_a_round)
    with pytest.raises(KeyboardInterrupt):
        reproduce_classification(tmp_path / "out", study, Workplace(femnist))
    trials = tmp_path / "out" / "classification-femnist-tuned"
    assert len(list(trials.glob("fedgmm-lr-*.safetensors"))) == 1  # of the first choice
    assert not (trials / "fedgmm-0.json").exists()
    rounds = trained_rounds(monkeypatch)
    resumed = reproduce_classification(tmp_path / "out", study, Workplace(femnist))
    assert rounds == [2, *[1, 2] * 9, 3, 3, 1, 2, 3]  # choices, two of them, another independence
    assert resumed.accuracy == whole.accuracy


def test_methods_may_join_after_an_interruption(tmp_path, femnist, monkeypatch):
    """FedGMM's features are nothing to the training of FedAvg that goes on beside it."""
    alone = ImageStudy(**{**SOME, "methods": ("fedavg",), "rounds": 3, "tuning_rounds": 2})

    def stopped_after_a_round(dataset, *, until, **others):
        model = train(dataset, until=1, **others)
        model.stopped = "interrupted"
        return model

    with monkeypatch.context() as patch:
        patch.setattr(trial_files, "train", stopped_after_a_round)
        with pytest.raises(KeyboardInterrupt):
            reproduce_classification(tmp_path / "out", alone, Workplace(femnist))
    assert list((tmp_path / "out").rglob("fedavg-lr-*.safetensors"))
    both = replace(alone, methods=("fedavg", "fedgmm"))
    grown = reproduce_classification(tmp_path / "out", both, Workplace(femnist))
    whole = reproduce_classification(tmp_path / "whole", both, Workplace(femnist))
    assert grown.accuracy == whole.accuracy


def methods_in_files(folder, name="classification-femnist-paper"):
    """Those of the JSON, which must be those of the table."""
    record = json.loads((folder / f"{name}.json").read_text())
    methods = record["study"]["methods"]
    assert list(record["accuracy"]) == methods
    table = (folder / f"{name}.md").read_text()
    assert [line.split(" | ")[0][2:] for line in table.splitlines() if line.startswith("| ")][
        1:
    ] == [TITLES[method] for method in methods]
    return methods


def test_every_method_that_is_whole_on_file_is_in_the_table(tmp_path, femnist, monkeypatch):
    """Whichever program ends last tells of all that share the folder."""
    study = ImageStudy(**{**SOME, "track": "paper", "methods": ("local",)})
    alone = reproduce_classification(tmp_path, study, Workplace(femnist))
    later = replace(study, methods=("clustered", "fedavg"))
    outcome = reproduce_classification(tmp_path, later, Workplace(femnist))
    assert methods_in_files(tmp_path) == ["local", "fedavg", "clustered"]  # in the usual order
    assert outcome.accuracy["local"] == alone.accuracy["local"]
    assert [one["method"] for one in outcome.details] == ["local", "fedavg", "clustered"]

    monkeypatch.setattr(trial_files, "train", None)
    assert reproduce_classification(tmp_path, study, Workplace(femnist)) == outcome


def test_what_is_not_whole_on_file_is_not_in_the_table(tmp_path, femnist):
    study = ImageStudy(**{**SOME, "track": "paper", "methods": ("local", "fedavg", "clustered")})
    reproduce_classification(tmp_path, study, Workplace(femnist))
    trials = tmp_path / "classification-femnist-paper"
    (trials / "fedavg-0.json").write_text("")
    record = json.loads((trials / "clustered-0.json").read_text())
    (trials / "clustered-0.json").write_text(json.dumps({**record, "lr": 7.0}))
    reproduce_classification(tmp_path, replace(study, methods=("local",)), Workplace(femnist))
    assert methods_in_files(tmp_path) == ["local"]


def test_all_seeds_of_a_table_are_the_same(tmp_path, femnist):
    study = ImageStudy(**{**SOME, "track": "paper", "methods": ("local",)})
    reproduce_classification(tmp_path, study, Workplace(femnist))
    more = replace(study, methods=("fedavg",), seeds=(0, 1))
    assert list(reproduce_classification(tmp_path, more, Workplace(femnist)).accuracy) == ["fedavg"]
    assert methods_in_files(tmp_path) == ["fedavg"]


def test_without_data(tmp_path):
    with pytest.raises(ImageFileError, match="femnist"):
        reproduce_classification(tmp_path / "out", ImageStudy(**SOME), Workplace(tmp_path))
