"""Options are chosen on validation rows, by training runs that survive an interruption."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedgmm.experiments import settings, trials, tuning
from fedgmm.experiments.paper import classification
from fedgmm.experiments.paper.classification import reproduce_classification
from fedgmm.experiments.paper.sensitivity import SensitivityStudy, reproduce_sensitivity
from fedgmm.experiments.settings import ImageStudy
from fedgmm.experiments.study import StudyContext, prepare_federation
from fedgmm.experiments.trials import DamagedRecordError, StudyFolderError, Trial
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.in_process import train
from tiny_images import FAST

STUDY = ImageStudy(methods=("fedgmm",), track="tuned", **FAST)
LONG = replace(STUDY, methods=("local",), rounds=12)  # only its rate is tuned
FOLDER = "classification-femnist-tuned"
LOST = -float("inf")


@pytest.fixture
def rounds(monkeypatch):
    """List every round of every training run, with the tuned options."""
    seen = []

    def watched(*args, options, **kwargs):
        def note(entry):
            chosen = options.lr, options.server_momentum, options.independence
            seen.append((*chosen, entry["round"]))

        return train(*args, options=options, on_round=[note], **kwargs)

    monkeypatch.setattr(trials, "train", watched)
    return seen


@pytest.fixture
def judged(monkeypatch):
    """Set the scores of rates by hand and list which rates are judged, after how many rounds.

    Returns a dictionary of scores, by the place of a rate in the grid and then by stage (short, middle,
    whole), and the list of judgements.
    """
    table, looks = {}, []
    # with these rates no run diverges by itself
    monkeypatch.setattr(settings, "_TUNED_GRID", tuple(rate / 10 for rate in LONG.grid))

    def judge(stage):
        def score(model):
            place = sorted(LONG.grid).index(model.options["lr"]) + 1
            looks.append((place, len(model.history)))
            late = stage if len(model.history) < LONG.rounds else 2
            return float(table[place][late])

        return score

    for stage, name in enumerate(("validation_score", "validation_accuracy")):
        monkeypatch.setattr(tuning, name, judge(stage))
    return table, looks


@pytest.fixture
def few_rates(monkeypatch):
    """Try two rates, each with and without momentum at the server."""
    monkeypatch.setattr(settings, "_TUNED_GRID", (10.0**-0.5, 0.1))


class PowerCutError(Exception):
    """Stands for a power cut."""


def interrupted_after(monkeypatch, calls):
    """Let a number of files be written, then stop."""
    plain, left = trials._write_json, [calls]

    def write(file, record):
        if not left[0]:
            raise PowerCutError
        left[0] -= 1
        return plain(file, record)

    monkeypatch.setattr(trials, "_write_json", write)


@pytest.mark.usefixtures("few_rates")
def test_finished_steps_are_not_run_again(tmp_path, femnist, monkeypatch, rounds):
    """Stopped before each file, the study takes as many rounds in total as without a stop."""
    study = replace(STUDY, rounds=4, tuning_rounds=1)
    federation = prepare_federation(study, 0, StudyContext(femnist))
    monkeypatch.setattr(classification, "prepare_federation", lambda *_: federation)
    expected = reproduce_classification(tmp_path / "whole", study, StudyContext(femnist))
    once = sorted(rounds)
    # four choices for a round, two of them to the end, and another independence
    assert len(once) == len(set(once)) == 4 + 2 * 3 + 4
    # the settings are not written by _write_json
    written = len(list((tmp_path / "whole" / FOLDER).glob("*.json"))) - 1
    rounds.clear()
    for _ in range(written - 1):
        with monkeypatch.context() as patch:
            interrupted_after(patch, 1)
            with pytest.raises(PowerCutError):
                reproduce_classification(tmp_path / "parts", study, StudyContext(femnist))
    outcome = reproduce_classification(tmp_path / "parts", study, StudyContext(femnist))
    assert outcome["accuracy"] == expected["accuracy"]
    assert sorted(rounds) == once
    assert not list((tmp_path / "parts").rglob("*.safetensors"))


@pytest.mark.usefixtures("few_rates")
def test_the_winner_s_checkpoint_is_found_after_a_stop(tmp_path, femnist, monkeypatch, rounds):
    """Stopped between the choice and the first trial, the study does not train the winner again."""

    def cut(*_):
        raise PowerCutError

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_hand_over_checkpoint", cut)
        with pytest.raises(PowerCutError):
            reproduce_classification(tmp_path, STUDY, StudyContext(femnist))
    before = len(rounds)
    reproduce_classification(tmp_path, STUDY, StudyContext(femnist))
    assert len(rounds) == before
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_better_half_continues_and_its_best_two_to_the_end(tmp_path, femnist, judged, rounds):
    table, looks = judged
    table |= {1: (3, 1, 0), 2: (9, 2, 6), 3: (5, 7, 5), 4: (1, 9, 9), 5: (0, 9, 9)}
    outcome = reproduce_classification(tmp_path, LONG, StudyContext(femnist))
    short, middle, whole = looks[:5], looks[5:8], looks[8:]  # after 1, a quarter, and all
    assert {place for place, _ in short} == {1, 2, 3, 4, 5}
    assert {after for _, after in short} == {LONG.tuning_rounds}
    assert middle == [(2, 3), (3, 3), (1, 3)]
    assert whole == [(3, 12), (2, 12)]
    assert outcome["details"][0]["lr"] == sorted(LONG.grid)[1]
    assert len(rounds) == 5 * 1 + 3 * 2 + 2 * 9  # nothing is trained twice


def test_rates_that_diverge_are_replaced_by_the_next(tmp_path, femnist, judged):
    table, looks = judged
    table |= {1: (9, LOST, 0), 2: (8, 5, LOST), 3: (LOST, 9, 9), 4: (7, 6, 2), 5: (6, 4, 3)}
    outcome = reproduce_classification(tmp_path, LONG, StudyContext(femnist))
    assert looks[5:] == [(1, 3), (2, 3), (4, 3), (5, 3), (4, 12), (2, 12), (5, 12)]
    assert outcome["details"][0]["lr"] == sorted(LONG.grid)[4]
    written = json.loads((tmp_path / FOLDER / "local-tuning.json").read_text())
    assert list(written["scores"][0]["whole"].values()) == [2.0, None, 3.0]


def test_rates_that_were_dropped_come_last(tmp_path, femnist, judged):
    """All rates that continued diverge in the end; the fourth of the short runs does not."""
    table, looks = judged
    table |= {k: (k, k, LOST) for k in (5, 4, 3)} | {2: (2, 0, 2), 1: (1, 0, 1)}
    outcome = reproduce_classification(tmp_path, LONG, StudyContext(femnist))
    assert [place for place, after in looks if after == LONG.rounds] == [5, 4, 3, 2, 1]
    assert outcome["details"][0]["lr"] == sorted(LONG.grid)[1]


def test_dropped_rates_leave_no_checkpoints(tmp_path, femnist, judged, monkeypatch):
    """When a stage starts, other checkpoints are deleted; a rate that is needed later starts again."""
    table, _ = judged
    table |= {k: (k, k, LOST if k > 3 else k) for k in (5, 4, 3, 2, 1)}
    kept, plain = [], Trial.train

    def watched(trial, dataset, until=None):
        there = {file.stem for file in trial.folder.path.glob("*.safetensors")}
        kept.append((until, [k for k, name in enumerate(names, 1) if name in there]))
        return plain(trial, dataset, until)

    names = [f"local-lr-{rate:.6g}-0" for rate in sorted(LONG.grid)]
    monkeypatch.setattr(Trial, "train", watched)
    outcome = reproduce_classification(tmp_path, LONG, StudyContext(femnist))
    assert kept[5:8] == [(3, [3, 4, 5])] * 3
    # the best two diverge at the end, so the third and the fourth replace them
    assert kept[8:-1] == [(12, [4, 5]), (12, [4, 5]), (12, [4, 5]), (12, [3, 4, 5])]
    assert kept[-1] == (None, [])  # the winner's checkpoint now has the name of the trial
    assert outcome["details"][0]["lr"] == sorted(LONG.grid)[2]


def test_a_search_may_be_as_long_as_the_training_run(tmp_path, femnist, judged, rounds):
    table, looks = judged
    table |= {k: (k, k, k) for k in range(1, 6)}
    study = replace(LONG, tuning_rounds=99)
    reproduce_classification(tmp_path, study, StudyContext(femnist))
    assert {after for _, after in looks} == {LONG.rounds}
    assert len(rounds) == 5 * LONG.rounds


# ---------------------------------------------------------------------- files of another search


@pytest.mark.parametrize(
    ("track", "change", "reason"),
    [
        ("paper", {}, "past round 1"),
        ("tuned", {}, "past round 1"),
        ("tuned", {"schedule": "constant"}, "schedule"),
    ],
)
def test_checkpoints_of_another_search_are_refused(tmp_path, femnist, track, change, reason):
    study = replace(LONG, track=track)
    rate = study.grid[0]
    dataset = prepare_federation(study, 0, StudyContext(femnist)).dataset
    file = tmp_path / f"classification-femnist-{track}" / f"local-lr-{rate:.6g}-0.safetensors"
    options = replace(study.options("local", 0), lr=rate, **change)
    train(dataset, options=options, checkpoint=Checkpoint(file), until=5)
    with pytest.raises(StudyFolderError, match=f"another search.*{reason}"):
        reproduce_classification(tmp_path, study, StudyContext(femnist))
    assert not list(file.parent.glob("local*.json"))  # it was not used for a score
    file.unlink()
    reproduce_classification(tmp_path, study, StudyContext(femnist))


@pytest.mark.usefixtures("few_rates")
def test_a_trial_that_is_on_file_gets_no_checkpoint(tmp_path, femnist, monkeypatch):
    """Otherwise the winner's checkpoint would stay, because no run resumes from it."""
    reproduce_classification(tmp_path, LONG, StudyContext(femnist))
    record = json.loads((tmp_path / FOLDER / "local-tuning.json").read_text())
    winner = tmp_path / FOLDER / f"{record['winner']}.safetensors"
    winner.touch()  # as if it had not been deleted
    monkeypatch.setattr(trials, "train", None)
    reproduce_classification(tmp_path, LONG, StudyContext(femnist))
    assert not list(tmp_path.rglob("*.safetensors"))


# ---------------------------------------------------------------------- the chosen options


@pytest.mark.usefixtures("few_rates")
def test_a_method_that_diverges_with_every_rate_is_named(tmp_path, femnist, monkeypatch):
    monkeypatch.setattr(tuning, "validation_accuracy", lambda model: -float("inf"))
    study = replace(STUDY, methods=("fedgmm",))
    with pytest.raises(ValueError, match=r"FedGMM diverged .*lr 0\.316"):
        reproduce_classification(tmp_path, study, StudyContext(femnist))
    assert not list(tmp_path.rglob("*independence*"))  # no further option was tried


@pytest.mark.usefixtures("few_rates")
def test_choices_of_another_search_are_refused(tmp_path, femnist):
    reproduce_classification(tmp_path, STUDY, StudyContext(femnist))
    file = tmp_path / FOLDER / "fedgmm-tuning.json"
    record = json.loads(file.read_text())
    for change in ({"search": None}, {"chosen": {"lr": 0.1}}):
        file.write_text(json.dumps({**record, **change}))
        with pytest.raises(StudyFolderError, match="another search"):
            reproduce_classification(tmp_path, STUDY, StudyContext(femnist))


@pytest.mark.usefixtures("few_rates")
def test_damaged_choices_are_made_again_after_they_are_deleted(tmp_path, femnist):
    expected = reproduce_classification(tmp_path, LONG, StudyContext(femnist))
    for name in ("local-tuning", "local-0"):
        file = tmp_path / FOLDER / f"{name}.json"
        record = json.loads(file.read_text())
        record.pop("winner", None)
        file.write_text(json.dumps(record) if name == "local-tuning" else "")
        with pytest.raises(DamagedRecordError, match=rf"{name}\.json"):
            reproduce_classification(tmp_path, LONG, StudyContext(femnist))
        file.unlink()
        again = reproduce_classification(tmp_path, LONG, StudyContext(femnist))
        assert again["accuracy"] == expected["accuracy"]


@pytest.mark.usefixtures("few_rates")
@pytest.mark.parametrize(("choices", "extra"), [((2,), 0), ((1,), 1)])
def test_a_study_of_several_cells_uses_the_run_that_won(tmp_path, femnist, rounds, choices, extra):
    """If its own numbers are in the grid; otherwise the checkpoint is deleted."""
    study = SensitivityStudy(
        track="tuned", component_choices=choices, learner_choices=(2,), **{**FAST, "components": 2}
    )
    reproduce_sensitivity(tmp_path, study, StudyContext(femnist))
    # four choices for one of two rounds, the best two to the end, and the cell
    assert len(rounds) == 4 + 2 + 2 * extra
    assert not list(tmp_path.rglob("*.safetensors"))
