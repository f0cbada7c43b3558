"""The folder of a study's trials: it belongs to one study, and damaged files are named."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from fedgmm.experiments.settings import ImageStudy
from fedgmm.experiments.trials import (
    DamagedRecordError,
    StudyFolderError,
    Trial,
    TrialFolder,
)
from tiny_images import FAST

STUDY = ImageStudy(**{**FAST, "methods": ("fedavg", "fedgmm"), "seeds": (3, 5)})


def lock(path, study):
    """Lock a folder for a study and return the file of its settings."""
    TrialFolder.open(path, study).lock(study)
    return path / "study.json"


def finish_a_trial(path):
    """Write the result of one trial of STUDY."""
    TrialFolder(path).run_once("fedavg-3", lambda: {"method": "fedavg", "seed": 3})


# ---------------------------------------------------------------------- one study per folder


def test_a_trial_is_trained_with_the_chosen_options(tmp_path):
    chosen = {"lr": 0.25, "independence": 30.0}
    trial = Trial(TrialFolder(tmp_path), "fedgmm-5", STUDY, "fedgmm", 5, chosen)
    assert trial.options == replace(STUDY.options("fedgmm", 5), lr=0.25, independence=30.0)


def test_a_draft_of_settings_does_not_lock_the_folder(tmp_path):
    """A program may be killed before it renames the draft."""
    (tmp_path / "study.json.7.part").write_bytes(b"{")
    TrialFolder.open(tmp_path, STUDY)
    lock(tmp_path, replace(STUDY, rounds=3))


def test_one_folder_holds_one_study(tmp_path):
    lock(tmp_path, STUDY)
    finish_a_trial(tmp_path)
    TrialFolder.open(tmp_path, replace(STUDY, methods=("local",), seeds=(3, 4)))  # may differ
    with pytest.raises(StudyFolderError, match="rounds=2, not 3; choose another folder") as error:
        TrialFolder.open(tmp_path, replace(STUDY, rounds=3))
    assert "delete" not in str(error.value)


def test_the_first_of_two_studies_that_start_at_once_keeps_the_folder(tmp_path):
    """All have found the folder empty."""
    one, two, three = STUDY, replace(STUDY, rounds=3), replace(STUDY, methods=("local",))
    for study in (one, two, three):
        folder = TrialFolder.open(tmp_path, study)
    folder.lock(one)
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(StudyFolderError, match=r"rounds=2, not 3.*delete study\.json"):
        folder.lock(two)
    folder.lock(three)  # the same settings
    assert (tmp_path / "study.json").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["study.json"]


def test_the_first_of_two_data_sets_keeps_the_folder(tmp_path):
    """Both programs have found the folder empty, with the same settings."""
    one, two = TrialFolder.open(tmp_path, STUDY), TrialFolder.open(tmp_path, STUDY)
    one.lock(STUDY, "some images")
    with pytest.raises(StudyFolderError, match="other images"):
        two.lock(STUDY, "others")
    two.lock(STUDY, "some images")


def lock_at_once(path, rounds, barrier, failures):
    """Run in a process of its own."""
    study = ImageStudy(rounds=rounds)
    folder = TrialFolder.open(path, study)
    barrier.wait()
    try:
        folder.lock(study)
    except StudyFolderError as error:
        failures.put((rounds, str(error)))


def test_processes_that_lock_at_once(tmp_path):
    """Those with the settings on file may continue, the others fail."""
    processes = multiprocessing.get_context("fork")  # imports nothing again
    numbers = [7, 8, 7, 8]
    barrier, failures = processes.Barrier(len(numbers)), processes.Queue()
    started = [
        processes.Process(target=lock_at_once, args=(tmp_path / "trials", n, barrier, failures))
        for n in numbers
    ]
    for process in started:
        process.start()
    refused = [failures.get(timeout=60) for _ in range(2)]
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    assert failures.empty()
    (file,) = (tmp_path / "trials").iterdir()
    assert file.name == "study.json"
    first = json.loads(file.read_text())["rounds"]
    for rounds, message in refused:
        assert rounds != first
        assert f"rounds={first}, not {rounds}" in message


def test_a_checkpoint_is_a_trial(tmp_path):
    lock(tmp_path, STUDY)
    TrialFolder(tmp_path).checkpoint("fedavg-lr-0.1-3").touch()
    with pytest.raises(StudyFolderError, match="rounds=2, not 3") as error:
        TrialFolder.open(tmp_path, replace(STUDY, rounds=3))
    assert "delete" not in str(error.value)


def test_settings_newer_than_a_folder_have_their_defaults(tmp_path):
    file = lock(tmp_path, STUDY)
    finish_a_trial(tmp_path)
    settings = json.loads(file.read_text())
    del settings["reg_covar"]
    file.write_text(json.dumps(settings))
    TrialFolder.open(tmp_path, STUDY)
    with pytest.raises(StudyFolderError, match=r"reg_covar=0\.01, not 0\.5"):
        TrialFolder.open(tmp_path, replace(STUDY, reg_covar=0.5))


# ---------------------------------------------------------------------- pretrained weights


@pytest.fixture
def weights(tmp_path):
    """Two files that stand for pretrained weights."""
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path / "one", tmp_path / "two"


def test_pretrained_weights_are_identified_by_their_content(tmp_path, weights):
    one, two = weights
    study = replace(STUDY, pretrained=str(one))
    lock(tmp_path / "trials", study)
    elsewhere = one.rename(tmp_path / "elsewhere")
    TrialFolder.open(tmp_path / "trials", replace(study, pretrained=str(elsewhere)))
    with pytest.raises(StudyFolderError, match="pretrained_sha256"):
        TrialFolder.open(tmp_path / "trials", replace(study, pretrained=str(two)))
    with pytest.raises(StudyFolderError, match="pretrained=True, not False"):
        TrialFolder.open(tmp_path / "trials", STUDY)


def test_missing_weights_are_named(tmp_path):
    study = replace(STUDY, pretrained=str(tmp_path / "nope.safetensors"))
    with pytest.raises(ValueError, match=r"nope\.safetensors"):
        TrialFolder.open(tmp_path / "trials", study)
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize("written", [True, "somewhere/else.safetensors"])
def test_older_folders_hold_no_checksum_of_the_weights(tmp_path, weights, written):
    study = replace(STUDY, pretrained=str(weights[0]))
    file = lock(tmp_path / "trials", study)
    finish_a_trial(file.parent)
    settings = json.loads(file.read_text())
    del settings["pretrained_sha256"]
    file.write_text(json.dumps({**settings, "pretrained": written}))
    for path in weights:
        TrialFolder.open(tmp_path / "trials", replace(study, pretrained=str(path)))
    with pytest.raises(StudyFolderError, match="pretrained=True, not False"):
        TrialFolder.open(tmp_path / "trials", STUDY)


# ---------------------------------------------------------------------- damaged and left files


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"{}"])
def test_a_damaged_record_is_named(tmp_path, content):
    folder = TrialFolder(tmp_path)
    folder.record_file("fedavg-tuning").write_bytes(content)
    with pytest.raises(DamagedRecordError, match=r"fedavg-tuning\.json .* delete it"):
        folder.run_once("fedavg-tuning", dict, "chosen")
    assert folder.read("fedavg-tuning", "chosen") is None


def test_damaged_settings_are_named(tmp_path):
    file = lock(tmp_path, STUDY)
    finish_a_trial(tmp_path)
    file.write_text("")
    # without this file the folder accepts any settings, so the error must warn
    with pytest.raises(DamagedRecordError, match=r"study\.json .* if you know"):
        TrialFolder.open(tmp_path, STUDY)
    file.unlink()
    TrialFolder.open(tmp_path, STUDY)
    assert json.loads(file.read_text())["rounds"] == 2


class KilledError(BaseException):
    """The process ends here."""


def test_a_checkpoint_that_a_killed_trial_left_is_deleted_by_the_next_run(tmp_path, monkeypatch):
    folder = TrialFolder(tmp_path)
    checkpoint = folder.checkpoint("fedgmm-5")

    def run():
        checkpoint.write_bytes(b"progress")
        return {"score": 0.5}

    def not_again():
        raise AssertionError("the result is on file")

    def killed(*args, **options):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KilledError):
            folder.run_once("fedgmm-5", run)
    assert folder.record_file("fedgmm-5").is_file()
    assert checkpoint.is_file()
    assert folder.run_once("fedgmm-5", not_again, keep_checkpoint=True) == {"score": 0.5}
    assert checkpoint.is_file()
    assert folder.run_once("fedgmm-5", not_again) == {"score": 0.5}
    assert not checkpoint.exists()
