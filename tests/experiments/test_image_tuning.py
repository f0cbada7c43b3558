"""Options are chosen on validation rows, by trainings that an interruption does not undo."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedgmm.experiments import image_study, image_tuning, trial_files
from fedgmm.experiments.classification import reproduce_classification
from fedgmm.experiments.image_study import ImageStudy, prepare_federation
from fedgmm.experiments.sensitivity import SensitivityStudy, reproduce_sensitivity
from fedgmm.experiments.workplace import Workplace
from fedgmm.training.checkpoint import Checkpoint
from fedgmm.training.local import train
from tiny_images import FAST

STUDY = ImageStudy(methods=("fedgmm",), track="tuned", **FAST)
LONG = replace(STUDY, methods=("local",), rounds=12)  # its rates alone are chosen
FOLDER = "classification-femnist-tuned"
LOST = -float("inf")


@pytest.fixture
def rounds(monkeypatch):
    """Every round of every training, with what was chosen."""
    seen = []

    def watched(*args, options, **kwargs):
        def note(entry):
            chosen = options.lr, options.server_momentum, options.independence
            seen.append((*chosen, entry["round"]))

        return train(*args, options=options, on_round=[note], **kwargs)

    monkeypatch.setattr(trial_files, "train", watched)
    return seen


@pytest.fixture
def judged(monkeypatch):
    """Which rates a study looks at, after how many rounds; scores are set by hand.

    Returns a dictionary of scores, by the place of a rate in the grid and then by stage (short, middle,
    whole), and the list of looks.
    """
    table, looks = {}, []
    # rates with which nothing diverges but by these scores
    monkeypatch.setattr(image_study, "_TUNED_GRID", tuple(rate / 10 for rate in LONG.grid))

    def judge(stage):
        def score(model):
            place = sorted(LONG.grid).index(model.options["lr"]) + 1
            looks.append((place, len(model.history)))
            late = stage if len(model.history) < LONG.rounds else 2
            return float(table[place][late])

        return score

    for stage, name in enumerate(("validation_score", "validation_accuracy")):
        score = judge(stage)
        score.__name__ = name
        monkeypatch.setattr(image_tuning, name, score)
    return table, looks


class PowerCutError(Exception):
    """As if by a power cut."""


def interrupted_after(monkeypatch, calls):
    """Let so many files of trials be written, then stop."""
    plain, left = trial_files._write_json, [calls]

    def write(file, record):
        if not left[0]:
            raise PowerCutError
        left[0] -= 1
        return plain(file, record)

    monkeypatch.setattr(trial_files, "_write_json", write)


def test_whatever_is_finished_is_not_run_again(tmp_path, femnist, monkeypatch, rounds):
    """Stopped before each file that is written, the study takes no more rounds in all than at once."""
    study = replace(STUDY, rounds=4, tuning_rounds=1)
    expected = reproduce_classification(tmp_path / "whole", study, Workplace(femnist))
    once = sorted(rounds)
    # ten choices for a round, of which two go on to the end, and another independence
    assert len(once) == len(set(once)) == 10 + 2 * 3 + 4
    # the settings are written in another way
    written = len(list((tmp_path / "whole" / FOLDER).glob("*.json"))) - 1
    rounds.clear()
    for _ in range(written - 1):
        with monkeypatch.context() as patch:
            interrupted_after(patch, 1)
            with pytest.raises(PowerCutError):
                reproduce_classification(tmp_path / "parts", study, Workplace(femnist))
    outcome = reproduce_classification(tmp_path / "parts", study, Workplace(femnist))
    assert outcome.accuracy == expected.accuracy
    assert sorted(rounds) == once
    assert not list((tmp_path / "parts").rglob("*.safetensors"))


def test_a_checkpoint_that_was_handed_on_is_found_again(tmp_path, femnist, monkeypatch, rounds):
    """Stopped between the choice and the first trial: the winner is not trained a second time."""
    with monkeypatch.context() as patch:
        patch.setattr(image_tuning, "_tidy", lambda *args: (_ for _ in ()).throw(PowerCutError))
        with pytest.raises(PowerCutError):
            reproduce_classification(tmp_path, STUDY, Workplace(femnist))
    before = len(rounds)
    reproduce_classification(tmp_path, STUDY, Workplace(femnist))
    assert len(rounds) == before
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_best_go_on_and_the_best_of_those_to_the_end(tmp_path, femnist, judged, rounds):
    table, looks = judged
    table |= {1: (3, 1, 0), 2: (9, 2, 6), 3: (5, 7, 5), 4: (1, 9, 9), 5: (0, 9, 9)}
    outcome = reproduce_classification(tmp_path, LONG, Workplace(femnist))
    short, middle, whole = looks[:5], looks[5:8], looks[8:]  # after 1, a quarter, and all
    assert {place for place, _ in short} == {1, 2, 3, 4, 5}
    assert {after for _, after in short} == {LONG.tuning_rounds}
    assert middle == [(2, 3), (3, 3), (1, 3)]
    assert whole == [(3, 12), (2, 12)]
    assert outcome.details[0]["lr"] == sorted(LONG.grid)[1]
    assert len(rounds) == 5 * 1 + 3 * 2 + 2 * 9  # nothing is trained twice


def test_rates_that_diverge_make_room_for_the_next(tmp_path, femnist, judged):
    table, looks = judged
    table |= {1: (9, LOST, 0), 2: (8, 5, LOST), 3: (LOST, 9, 9), 4: (7, 6, 2), 5: (6, 4, 3)}
    outcome = reproduce_classification(tmp_path, LONG, Workplace(femnist))
    assert looks[5:] == [(1, 3), (2, 3), (4, 3), (5, 3), (4, 12), (2, 12), (5, 12)]
    assert outcome.details[0]["lr"] == sorted(LONG.grid)[4]
    written = json.loads((tmp_path / FOLDER / "local-tuning.json").read_text())
    assert list(written["scores"][0]["whole"].values()) == [2.0, None, 3.0]


def test_rates_that_were_left_behind_come_last(tmp_path, femnist, judged):
    """Whatever went on diverges in full; the fourth of the short runs does not."""
    table, looks = judged
    table |= {k: (k, k, LOST) for k in (5, 4, 3)} | {2: (2, 0, 2), 1: (1, 0, 1)}
    outcome = reproduce_classification(tmp_path, LONG, Workplace(femnist))
    assert [place for place, after in looks if after == LONG.rounds] == [5, 4, 3, 2, 1]
    assert outcome.details[0]["lr"] == sorted(LONG.grid)[1]


def test_rates_out_of_the_race_leave_no_checkpoints(tmp_path, femnist, judged, monkeypatch):
    """When a stage begins, those that do not go on are gone; later ones that take a place start anew."""
    table, _ = judged
    table |= {k: (k, k, LOST if k > 3 else k) for k in (5, 4, 3, 2, 1)}
    kept, plain = [], trial_files.trained

    def watched(trial, dataset, until=None):
        there = {file.stem for file in trial.folder.glob("*.safetensors")}
        kept.append((until, [k for k, name in enumerate(names, 1) if name in there]))
        return plain(trial, dataset, until)

    names = [f"local-lr-{rate:.6g}-0" for rate in sorted(LONG.grid)]
    monkeypatch.setattr(image_tuning, "trained", watched)
    outcome = reproduce_classification(tmp_path, LONG, Workplace(femnist))
    assert kept[5:8] == [(3, [3, 4, 5])] * 3
    # the best two are lost at the end: the third and the fourth take their places
    assert kept[8:] == [(12, [4, 5]), (12, [4, 5]), (12, [4, 5]), (12, [3, 4, 5])]
    assert outcome.details[0]["lr"] == sorted(LONG.grid)[2]


def test_a_search_may_be_as_long_as_the_training(tmp_path, femnist, judged, rounds):
    table, looks = judged
    table |= {k: (k, k, k) for k in range(1, 6)}
    study = replace(LONG, tuning_rounds=99)
    reproduce_classification(tmp_path, study, Workplace(femnist))
    assert {after for _, after in looks} == {LONG.rounds}
    assert len(rounds) == 5 * LONG.rounds


# ---------------------------------------------------------------------- what another search left


@pytest.mark.parametrize(
    ("track", "change", "reason"),
    [
        ("paper", {}, "it is past round 1 already"),
        ("tuned", {}, "it is past round 1 already"),
        ("tuned", {"schedule": "constant"}, "schedule='constant'"),
    ],
)
def test_trainings_of_another_search_are_refused(tmp_path, femnist, track, change, reason):
    study = replace(LONG, track=track)
    rate = study.grid[0]
    dataset = prepare_federation(study, 0, Workplace(femnist)).dataset
    file = tmp_path / f"classification-femnist-{track}" / f"local-lr-{rate:.6g}-0.safetensors"
    options = replace(study.options("local", 0), lr=rate, **change)
    train(dataset, options=options, checkpoint=Checkpoint(file), until=5)
    message = f"holds a training of another search; choose another folder.*{reason}"
    with pytest.raises(ValueError, match=message):
        reproduce_classification(tmp_path, study, Workplace(femnist))
    assert not list(file.parent.glob("local*.json"))  # nothing was judged by it
    file.unlink()
    reproduce_classification(tmp_path, study, Workplace(femnist))


def test_a_trial_that_is_on_file_gets_no_checkpoint(tmp_path, femnist, monkeypatch):
    """The winner's checkpoint would stay forever, since nothing is trained from it."""
    reproduce_classification(tmp_path, LONG, Workplace(femnist))
    record = json.loads((tmp_path / FOLDER / "local-tuning.json").read_text())
    winner = tmp_path / FOLDER / f"{record['winner']}.safetensors"
    winner.touch()  # as if it had not been tidied away
    monkeypatch.setattr(trial_files, "train", None)
    reproduce_classification(tmp_path, LONG, Workplace(femnist))
    assert not list(tmp_path.rglob("*.safetensors"))


# ---------------------------------------------------------------------- how it ends


def test_a_method_that_diverges_with_every_rate_says_so(tmp_path, femnist, monkeypatch):
    monkeypatch.setattr(image_tuning, "validation_accuracy", lambda model: -float("inf"))
    study = replace(STUDY, methods=("fedgmm",))
    with pytest.raises(ValueError, match=r"FedGMM diverged with every choice .*lr 0\.316"):
        reproduce_classification(tmp_path, study, Workplace(femnist))
    assert not list(tmp_path.rglob("*independence*"))  # nothing more was tried


def test_choices_of_another_search_are_refused(tmp_path, femnist):
    reproduce_classification(tmp_path, STUDY, Workplace(femnist))
    file = tmp_path / FOLDER / "fedgmm-tuning.json"
    record = json.loads(file.read_text())
    for change in ({"search": None}, {"chosen": {"lr": 0.1}}):
        file.write_text(json.dumps({**record, **change}))
        with pytest.raises(ValueError, match="chosen in another way"):
            reproduce_classification(tmp_path, STUDY, Workplace(femnist))


def test_damaged_choices_are_made_again_once_they_are_deleted(tmp_path, femnist):
    expected = reproduce_classification(tmp_path, LONG, Workplace(femnist))
    for name in ("local-tuning", "local-0"):
        file = tmp_path / FOLDER / f"{name}.json"
        record = json.loads(file.read_text())
        record.pop("winner", None)
        file.write_text(json.dumps(record) if name == "local-tuning" else "")
        with pytest.raises(ValueError, match=rf"{name}\.json is damaged; delete it"):
            reproduce_classification(tmp_path, LONG, Workplace(femnist))
        file.unlink()
        again = reproduce_classification(tmp_path, LONG, Workplace(femnist))
        assert again.accuracy == expected.accuracy


@pytest.mark.parametrize(("choices", "extra"), [((2,), 0), ((1,), 1)])
def test_a_study_of_several_cells_uses_the_training_that_won(
    tmp_path, femnist, rounds, choices, extra
):
    """If its own numbers are in the grid; otherwise the checkpoint goes."""
    study = SensitivityStudy(
        track="tuned", component_choices=choices, learner_choices=(2,), **{**FAST, "components": 2}
    )
    reproduce_sensitivity(tmp_path, study, Workplace(femnist))
    # ten choices for one of two rounds, the best two to the end, and the cell
    assert len(rounds) == 10 + 2 + 2 * extra
    assert not list(tmp_path.rglob("*.safetensors"))
