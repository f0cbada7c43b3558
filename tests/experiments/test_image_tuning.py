"""Options are chosen on validation rows, by trainings that an interruption does not undo."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedgmm.experiments import comparison, image_tuning, trial_files
from fedgmm.experiments.classification import reproduce_classification
from fedgmm.experiments.image_study import ImageStudy
from fedgmm.experiments.sensitivity import SensitivityStudy, reproduce_sensitivity
from fedgmm.training import train
from tiny_images import FAST

STUDY = ImageStudy(methods=("fedgmm",), track="tuned", **FAST)
FOLDER = "classification-femnist-tuned"


@pytest.fixture
def rounds(monkeypatch):
    """Every round of a whole training, and of a short one, by learning rate and independence."""
    seen = {"whole": [], "short": []}

    def watched(kind):
        def run(*args, options, **kwargs):
            rate = kwargs.get("lr", options.lr)

            def note(entry):
                seen[kind].append((round(rate, 4), options.independence, entry["round"]))

            return train(*args, options=options, on_round=[note], **kwargs)

        return run

    monkeypatch.setattr(trial_files, "train", watched("whole"))
    monkeypatch.setattr(comparison, "train", watched("short"))
    return seen


def rates_of(folder, name=FOLDER):
    """Learning rates that FedGMM was trained with in full."""
    record = json.loads((folder / name / "fedgmm-tuning.json").read_text())
    return list(record["scores"]["lr"]["whole"])


class PowerCutError(Exception):
    """As if by a power cut."""


def interrupted_after(monkeypatch, calls):
    """Let so many files of trials be written, then stop."""
    plain, left = trial_files._write_json, [calls]

    def write(file, record):
        if file.name == "study.json":
            return plain(file, record)
        if not left[0]:
            raise PowerCutError
        left[0] -= 1
        return plain(file, record)

    monkeypatch.setattr(trial_files, "_write_json", write)


def test_whatever_is_finished_is_not_run_again(tmp_path, femnist, monkeypatch, rounds):
    """Stopped before each file that is written, the study takes no more rounds in all than at once."""
    expected = reproduce_classification(tmp_path / "whole", STUDY, data_dir=femnist)
    once = {kind: sorted(entries) for kind, entries in rounds.items()}
    assert len(once["whole"]) == (len(rates_of(tmp_path / "whole")) + 1) * STUDY.rounds
    written = len(list((tmp_path / "whole" / FOLDER).glob("*.json"))) - 1
    for entries in rounds.values():
        entries.clear()
    for _ in range(written - 1):
        with monkeypatch.context() as patch:
            interrupted_after(patch, 1)
            with pytest.raises(PowerCutError):
                reproduce_classification(tmp_path / "parts", STUDY, data_dir=femnist)
    outcome = reproduce_classification(tmp_path / "parts", STUDY, data_dir=femnist)
    assert outcome.accuracy == expected.accuracy
    assert sorted(rounds["whole"]) == once["whole"]
    # the first file to be lost is that of the short runs
    assert set(rounds["short"]) == set(once["short"])
    assert not list((tmp_path / "parts").rglob("*.safetensors"))


def test_a_checkpoint_that_was_handed_on_is_found_again(tmp_path, femnist, monkeypatch, rounds):
    """Stopped between the choice and the first trial: the winner is not trained a second time."""
    with monkeypatch.context() as patch:
        patch.setattr(image_tuning, "_tidy", lambda *args: (_ for _ in ()).throw(PowerCutError))
        with pytest.raises(PowerCutError):
            reproduce_classification(tmp_path, STUDY, data_dir=femnist)
    before = len(rounds["whole"])
    reproduce_classification(tmp_path, STUDY, data_dir=femnist)
    assert len(rounds["whole"]) == before
    assert not list(tmp_path.rglob("*.safetensors"))


def test_rates_that_diverge_in_full_make_room_for_the_next(tmp_path, femnist, monkeypatch):
    study = replace(STUDY, methods=("fedavg",))
    ranked = []

    def score(model):
        ranked.append(model.options["lr"])
        return -float("inf") if len(ranked) <= 2 else -1.0 - len(ranked)

    monkeypatch.setattr(image_tuning, "validation_accuracy", score)
    outcome = reproduce_classification(tmp_path, study, data_dir=femnist)
    written = json.loads((tmp_path / FOLDER / "fedavg-tuning.json").read_text())
    short = written["scores"]["lr"]["short"]
    order = sorted(short, key=lambda value: -short[value])
    assert [f"{lr:.6g}" for lr in ranked] == order[:4]
    assert f"{outcome.details[0]['lr']:.6g}" == order[2]
    assert list(written["scores"]["lr"]["whole"].values()) == [None, None, -4.0, -5.0]


@pytest.mark.parametrize(
    ("scores", "trained"),
    [
        ((4, 5, 0, 9, 9), (2, 1, 3)),  # the best of two is better than its other neighbour
        ((1, 4, 5, 9, 8), (2, 1, 3, 4, 5)),  # better and better
        ((9, 8, 7, 1, 1), (2, 1)),  # the end of the grid
    ],
)
def test_neighbours_of_the_best_rate_are_trained_too(
    tmp_path, femnist, monkeypatch, scores, trained
):
    """Short runs prefer the second and the first of five rates; whole trainings have their own mind."""
    grid = sorted(STUDY.grid)
    short = dict(zip(grid, (3.0, 4.0, 2.0, 1.0, 0.0), strict=True))
    monkeypatch.setattr(
        image_tuning, "tune", lambda *args, **kwargs: comparison.Tuning(grid[1], short)
    )
    whole = dict(zip(grid, map(float, scores), strict=True))
    seen = []

    def score(model):
        seen.append(grid.index(model.options["lr"]) + 1)
        return whole[model.options["lr"]]

    monkeypatch.setattr(image_tuning, "validation_accuracy", score)
    outcome = reproduce_classification(
        tmp_path, replace(STUDY, methods=("fedavg",)), data_dir=femnist
    )
    assert tuple(seen) == trained
    assert outcome.details[0]["lr"] == max((grid[k - 1] for k in trained), key=whole.__getitem__)


def test_a_rate_that_diverged_in_its_short_run_is_no_neighbour(tmp_path, femnist, monkeypatch):
    grid = sorted(STUDY.grid)
    short = dict(zip(grid, (3.0, 4.0, -float("inf"), 1.0, 0.0), strict=True))
    monkeypatch.setattr(
        image_tuning, "tune", lambda *args, **kwargs: comparison.Tuning(grid[1], short)
    )
    seen = []

    def score(model):
        seen.append(grid.index(model.options["lr"]) + 1)
        return -float(len(seen))

    monkeypatch.setattr(image_tuning, "validation_accuracy", score)
    reproduce_classification(tmp_path, replace(STUDY, methods=("fedavg",)), data_dir=femnist)
    assert seen == [2, 1, 4]  # those beside it are neighbours then


def test_a_method_that_diverges_with_every_rate_says_so(tmp_path, femnist, monkeypatch):
    monkeypatch.setattr(image_tuning, "validation_accuracy", lambda model: -float("inf"))
    study = replace(STUDY, methods=("fedgmm",))
    with pytest.raises(ValueError, match=r"FedGMM diverged with every lr of .*0\.316"):
        reproduce_classification(tmp_path, study, data_dir=femnist)
    assert not list(tmp_path.rglob("*independence*"))  # nothing more was tried


def test_choices_of_another_search_are_refused(tmp_path, femnist):
    reproduce_classification(tmp_path, STUDY, data_dir=femnist)
    file = tmp_path / FOLDER / "fedgmm-tuning.json"
    record = json.loads(file.read_text())
    for change in ({"search": None}, {"chosen": {"lr": 0.1}}):
        file.write_text(json.dumps({**record, **change}))
        with pytest.raises(ValueError, match="chosen in another way"):
            reproduce_classification(tmp_path, STUDY, data_dir=femnist)
    file.unlink()
    ranking = tmp_path / FOLDER / "fedgmm-lr-ranking-0.json"
    ranking.write_text(json.dumps({"scores": [-1.0, -2.0, -3.0]}))  # of a shorter grid
    with pytest.raises(ValueError, match="chosen in another way"):
        reproduce_classification(tmp_path, STUDY, data_dir=femnist)
    ranking.unlink()
    for final in (tmp_path / FOLDER).glob("fedgmm-lr-0*.json"):
        final.write_text(json.dumps({"score": -1.0}))
    with pytest.raises(ValueError, match="chosen in another way"):
        reproduce_classification(tmp_path, STUDY, data_dir=femnist)


@pytest.mark.parametrize(("choices", "extra"), [((2,), 1), ((1,), 2)])
def test_a_study_of_several_cells_uses_the_training_that_won(
    tmp_path, femnist, rounds, choices, extra
):
    """If its own numbers are in the grid; otherwise the checkpoint goes."""
    study = SensitivityStudy(
        track="tuned", component_choices=choices, learner_choices=(2,), **{**FAST, "components": 2}
    )
    reproduce_sensitivity(tmp_path, study, data_dir=femnist)
    cells = len(rates_of(tmp_path, "sensitivity-femnist-tuned")) - 1 + extra
    assert len(rounds["whole"]) == cells * study.rounds
    assert not list(tmp_path.rglob("*.safetensors"))
