"""A small Table 2 on images: its numbers are those of plain training runs, and no trial runs twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from fedgmm.data.images.files import ImageFileError
from fedgmm.experiments import settings, trials
from fedgmm.experiments import study as engine
from fedgmm.experiments.paper.classification import reproduce_classification
from fedgmm.experiments.settings import ImageStudy
from fedgmm.experiments.study import StudyContext, prepare_federation
from fedgmm.experiments.trials import StudyFolderError, tuned_options
from fedgmm.methods.base import TITLES
from fedgmm.runs import comparison
from fedgmm.training.in_process import train
from tiny_images import FAST

pytestmark = pytest.mark.usefixtures("few_rates")
SOME = {"methods": ("fedavg", "fedgmm"), "track": "tuned", **FAST}


@pytest.fixture
def runs(monkeypatch):
    """List the arguments of every training run of a study and of its tuning."""
    calls = []

    def counted(*args, **kwargs):
        calls.append((args, kwargs))
        return train(*args, **kwargs)

    monkeypatch.setattr(trials, "train", counted)
    monkeypatch.setattr(comparison, "train", counted)
    return calls


@pytest.mark.usefixtures("painted")
def test_all_methods_beside_the_paper(tmp_path, femnist):
    study = ImageStudy(track="tuned", **FAST)
    outcome = reproduce_classification(tmp_path / "out", study, StudyContext(femnist))
    assert list(outcome["accuracy"]) == list(TITLES)
    name = "classification-femnist-tuned"
    record = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert record["accuracy"] == outcome["accuracy"]
    assert record["study"]["dataset"] == "femnist"
    table = (tmp_path / "out" / f"{name}.md").read_text()
    assert table.count("\n| ") == 9
    assert "| 79.49 |" in table
    assert 5_000 < (tmp_path / "out" / f"{name}.png").stat().st_size < 150_000
    assert not list(
        (tmp_path / "out").rglob("*.safetensors")
    )  # finished trials need no checkpoints


def test_the_numbers_are_those_of_a_plain_training_run(tmp_path, femnist, monkeypatch):
    monkeypatch.setattr(settings, "PAPER_GRID", tuple(10.0**-k for k in (0.5, 1.0, 1.5, 2.0, 2.5)))
    study = ImageStudy(**{**SOME, "track": "paper", "rounds": 8, "tuning_rounds": 1})
    outcome = reproduce_classification(tmp_path / "out", study, StudyContext(femnist))
    federation = prepare_federation(study, 0, StudyContext(femnist)).dataset
    for one in outcome["details"]:
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
        assert outcome["accuracy"][one["method"]] == [accuracy]


def test_later_options_are_chosen_among_complete_runs_at_the_best_rate(tmp_path, femnist):
    study = ImageStudy(**{**SOME, "methods": ("fedgmm",)})
    outcome = reproduce_classification(tmp_path / "out", study, StudyContext(femnist))
    folder = tmp_path / "out" / "classification-femnist-tuned"
    written = json.loads((folder / "fedgmm-tuning.json").read_text())
    (one,) = outcome["details"]
    assert written["chosen"] == tuned_options(one)
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
    federation = prepare_federation(study, 0, StudyContext(femnist)).dataset
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
            assert outcome["accuracy"]["fedgmm"] == [tests[one["personal_labels"]]]
    assert one["personal_labels"] == (
        labels["whole"]["personal_labels 1"] > labels["whole"]["personal_labels 0"]
    )


def trained_rounds(monkeypatch):
    """Return a list that grows by the number of every round that a trial trains from now on."""
    rounds = []

    def watched(*args, **kwargs):
        return train(*args, on_round=[lambda entry: rounds.append(entry["round"])], **kwargs)

    monkeypatch.setattr(trials, "train", watched)
    return rounds


def test_the_rest_of_a_study_does_not_train_the_winner_again(tmp_path, femnist, monkeypatch):
    rounds = trained_rounds(monkeypatch)
    study = ImageStudy(**{**SOME, "methods": ("fedavg",)})
    outcome = reproduce_classification(tmp_path / "out", study, StudyContext(femnist))
    # two of the short runs continue
    assert len(rounds) == 2 * len(study.grid) + 2 * (study.rounds - 1)
    assert len(outcome["details"][0]["curve"]) == study.rounds


def test_rates_are_chosen_once_for_all_seeds(tmp_path, femnist, runs):
    study = ImageStudy(**{**SOME, "seeds": (0, 1), "methods": ("fedavg",)})
    outcome = reproduce_classification(tmp_path / "out", study, StudyContext(femnist))
    # all rates, half of them for longer, two to the end, with labels or not, and one per seed
    assert len(runs) == 2 * len(study.grid) + 2 + 2 + 2 + 2
    assert len(outcome["accuracy"]["fedavg"]) == 2
    first, second = outcome["details"]
    assert first["lr"] == second["lr"]
    assert first["likelihood"] != second["likelihood"]  # another federation


@pytest.fixture(scope="module")
def finished(tmp_path_factory, femnist, few_rates):
    """A finished study on FedAvg and FedGMM: its folder, which tests copy, and its outcome."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, reproduce_classification(folder, ImageStudy(**SOME), StudyContext(femnist))


def test_names_of_files_and_fields_stay_the_same(finished):
    """Folders of version 0.1 must resume, so their files may not be renamed."""
    folder = finished[0] / "classification-femnist-tuned"
    names = {file.name for file in folder.iterdir()}
    for method in ("fedavg", "fedgmm"):
        assert {f"{method}-tuning.json", f"{method}-0.json"} <= names
        assert f"{method}-lr-0.316228-server_momentum-0.9-0-validation_score-1.json" in names
    assert "fedgmm-independence-10000-0-validation_accuracy-2.json" in names
    assert {"study.json", "clients-0.json"} <= names
    fields = {
        "study.json": "dataset track rounds tuning_rounds clients fraction shift encoder image_size "
        "features encoder_dtype learner pretrained components learners covariance_type reg_covar "
        "pretrained_sha256 data",
        "clients-0.json": "description",
        "fedgmm-tuning.json": "search chosen seed winner scores",
        "fedgmm-0.json": "method seed lr server_momentum independence personal_labels mean_accuracy "
        "weighted_accuracy worst_decile worst_accuracy mean_log_loss mean_calibration_error rounds "
        "stopped seconds environment curve likelihood auc average_precision base_rate",
    }
    for name, expected in fields.items():
        assert set(json.loads((folder / name).read_text())) == set(expected.split()), name


def test_finished_trials_are_not_run_again(tmp_path, femnist, finished, runs, monkeypatch):
    study, (folder, first) = ImageStudy(**SOME), finished
    shutil.copytree(folder, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "load_images", None)  # data are not even read
        assert reproduce_classification(tmp_path / "out", study, StudyContext(femnist)) == first
    assert not runs

    file = tmp_path / "out" / "classification-femnist-tuned" / "fedgmm-0.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "lr": 0.5}))
    with pytest.raises(StudyFolderError, match=r"fedgmm-0\.json .*0\.5.*delete"):
        reproduce_classification(tmp_path / "out", study, StudyContext(femnist))
    file.unlink()
    again = reproduce_classification(tmp_path / "out", study, StudyContext(femnist))
    assert again["accuracy"] == first["accuracy"]


def test_methods_without_gaussians_need_no_encoder(tmp_path, femnist, finished, monkeypatch):
    study, (_, both) = ImageStudy(**{**SOME, "methods": ("fedavg",)}), finished
    monkeypatch.setattr(engine, "encoder", None)
    alone = reproduce_classification(tmp_path / "alone", study, StudyContext(femnist))
    assert alone["accuracy"]["fedavg"] == both["accuracy"]["fedavg"]


def test_an_interrupted_run_resumes(tmp_path, femnist, monkeypatch):
    study = ImageStudy(**{**SOME, "methods": ("fedgmm",), "rounds": 3, "tuning_rounds": 2})
    whole = reproduce_classification(tmp_path / "whole", study, StudyContext(femnist))

    def stopped_after_a_round(dataset, *, until, **others):
        model = train(dataset, until=1, **others)
        model.stopped = "interrupted"
        return model

    monkeypatch.setattr(trials, "train", stopped_after_a_round)
    with pytest.raises(KeyboardInterrupt):
        reproduce_classification(tmp_path / "out", study, StudyContext(femnist))
    folder = tmp_path / "out" / "classification-femnist-tuned"
    assert len(list(folder.glob("fedgmm-lr-*.safetensors"))) == 1  # of the first choice
    assert not (folder / "fedgmm-0.json").exists()
    rounds = trained_rounds(monkeypatch)
    resumed = reproduce_classification(tmp_path / "out", study, StudyContext(femnist))
    assert rounds == [2, *[1, 2] * 3, 3, 3, 1, 2, 3]  # choices, two of them, another independence
    assert resumed["accuracy"] == whole["accuracy"]


def test_methods_may_join_after_an_interruption(tmp_path, femnist, monkeypatch):
    """FedAvg resumes although its data set now has features for FedGMM."""
    alone = ImageStudy(**{**SOME, "methods": ("fedavg",), "rounds": 3, "tuning_rounds": 2})

    def stopped_after_a_round(dataset, *, until, **others):
        model = train(dataset, until=1, **others)
        model.stopped = "interrupted"
        return model

    with monkeypatch.context() as patch:
        patch.setattr(trials, "train", stopped_after_a_round)
        with pytest.raises(KeyboardInterrupt):
            reproduce_classification(tmp_path / "out", alone, StudyContext(femnist))
    assert list((tmp_path / "out").rglob("fedavg-lr-*.safetensors"))
    both = replace(alone, methods=("fedavg", "fedgmm"))
    grown = reproduce_classification(tmp_path / "out", both, StudyContext(femnist))
    whole = reproduce_classification(tmp_path / "whole", alone, StudyContext(femnist))
    assert grown["accuracy"]["fedavg"] == whole["accuracy"]["fedavg"]
    assert list(grown["accuracy"]) == ["fedavg", "fedgmm"]


def methods_in_files(folder, name="classification-femnist-paper"):
    """Return the methods in the JSON file, which must be those in the table."""
    record = json.loads((folder / f"{name}.json").read_text())
    methods = record["study"]["methods"]
    assert list(record["accuracy"]) == methods
    table = (folder / f"{name}.md").read_text()
    assert [line.split(" | ")[0][2:] for line in table.splitlines() if line.startswith("| ")][
        1:
    ] == [TITLES[method] for method in methods]
    return methods


def test_every_complete_method_is_in_the_table(tmp_path, femnist, monkeypatch):
    """The last program writes the results of all programs that share the folder."""
    study = ImageStudy(**{**SOME, "track": "paper", "methods": ("local",)})
    alone = reproduce_classification(tmp_path, study, StudyContext(femnist))
    later = replace(study, methods=("clustered", "fedavg"))
    outcome = reproduce_classification(tmp_path, later, StudyContext(femnist))
    assert methods_in_files(tmp_path) == ["local", "fedavg", "clustered"]  # in the usual order
    assert outcome["accuracy"]["local"] == alone["accuracy"]["local"]
    assert [one["method"] for one in outcome["details"]] == ["local", "fedavg", "clustered"]

    monkeypatch.setattr(trials, "train", None)
    assert reproduce_classification(tmp_path, study, StudyContext(femnist)) == outcome


def test_incomplete_methods_are_not_in_the_table(tmp_path, femnist):
    study = ImageStudy(**{**SOME, "track": "paper", "methods": ("local", "fedavg", "clustered")})
    reproduce_classification(tmp_path, study, StudyContext(femnist))
    folder = tmp_path / "classification-femnist-paper"
    (folder / "fedavg-0.json").write_text("")
    record = json.loads((folder / "clustered-0.json").read_text())
    (folder / "clustered-0.json").write_text(json.dumps({**record, "lr": 7.0}))
    reproduce_classification(tmp_path, replace(study, methods=("local",)), StudyContext(femnist))
    assert methods_in_files(tmp_path) == ["local"]


def test_all_seeds_of_a_table_are_the_same(tmp_path, femnist):
    study = ImageStudy(**{**SOME, "track": "paper", "methods": ("local",)})
    reproduce_classification(tmp_path, study, StudyContext(femnist))
    more = replace(study, methods=("fedavg",), seeds=(0, 1))
    assert list(reproduce_classification(tmp_path, more, StudyContext(femnist))["accuracy"]) == [
        "fedavg"
    ]
    assert methods_in_files(tmp_path) == ["fedavg"]


def test_without_data(tmp_path):
    with pytest.raises(ImageFileError, match="femnist"):
        reproduce_classification(tmp_path / "out", ImageStudy(**SOME), StudyContext(tmp_path))
