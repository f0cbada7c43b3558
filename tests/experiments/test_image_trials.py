"""The trials of a study: what they share, when they are run, and what they leave behind."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from fedgmm.data.embeddings import PixelEncoder
from fedgmm.experiments import image_trials, image_tuning
from fedgmm.experiments.classification import reproduce_classification
from fedgmm.experiments.image_study import ImageStudy, Variant
from fedgmm.experiments.image_trials import of_method, run_study, run_trials, stopped_early
from fedgmm.experiments.trial_files import (
    Trial,
    bind_trials,
    checkpoint_of,
    open_trials,
    record_of,
    recorded,
)
from fedgmm.experiments.workplace import Workplace
from tiny_images import FAST, write_femnist

SOME = ImageStudy(**{**FAST, "methods": ("fedavg", "fedgmm"), "seeds": (3, 5)})


class Prepared:
    """The federation of a seed."""

    def __init__(self, seed):
        self.seed = seed


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """Runs trials that only say what they are given, and what happened in which order."""
    monkeypatch.setattr(image_trials, "chosen_options", lambda *args: {"lr": 0.25})
    lines = []

    def prepare(seed):
        lines.append(f"prepare {seed}")
        return Prepared(seed)

    def run(trial, federation):
        assert federation.seed == trial.seed
        lines.append(f"run {trial.name}")
        return {**trial.facts, "components": trial.study.components}

    def go(study):
        lines.clear()
        return run_trials(tmp_path, study, prepare, run, lines.append), list(lines)

    return go


def test_every_method_runs_on_one_federation_a_seed(journal):
    details, lines = journal(SOME)
    assert lines == [
        "FedAvg, seed 3",
        "prepare 3",
        "run fedavg-3",
        "FedGMM, seed 3",
        "run fedgmm-3",
        "FedAvg, seed 5",
        "prepare 5",
        "run fedavg-5",
        "FedGMM, seed 5",
        "run fedgmm-5",
    ]
    assert details[2] == {"method": "fedavg", "seed": 5, "lr": 0.25, "components": 2}
    assert [one["seed"] for one in of_method(details, "fedgmm")] == [3, 5]


def test_what_is_on_file_is_not_run_and_needs_no_federation(journal, tmp_path):
    first, _ = journal(SOME)
    (tmp_path / "fedgmm-5.json").unlink()
    again, lines = journal(SOME)
    assert again == first
    assert [line for line in lines if "seed" not in line] == ["prepare 5", "run fedgmm-5"]


def test_variants_share_the_chosen_options(journal):
    class Sized(ImageStudy):
        def variants(self, method):
            return [
                Variant(f"{method}-{m1}", f"{m1} Gaussians", replace(self, components=m1))
                for m1 in (1, 4)
            ]

    study = Sized(**{**FAST, "methods": ("fedgmm",)})
    details, lines = journal(study)
    assert [one["components"] for one in details] == [1, 4]
    assert {one["lr"] for one in details} == {0.25}
    assert lines[-2:] == ["4 Gaussians, seed 0", "run fedgmm-4-0"]


def test_one_federation_is_gone_before_the_next_is_made(tmp_path, monkeypatch):
    """Two at a time may not fit into memory."""
    monkeypatch.setattr(image_trials, "chosen_options", lambda *args: {})
    made = []

    def prepare(seed):
        gc.collect()
        assert not any(one() for one in made)
        federation = Prepared(seed)
        made.append(weakref.ref(federation))
        return federation

    run_trials(tmp_path, SOME, prepare, lambda trial, _: trial.facts, lambda _: None)
    assert len(made) == 2


def test_a_trial_is_trained_with_what_was_chosen(tmp_path):
    trial = Trial(tmp_path, "fedgmm-5", SOME, "fedgmm", 5, {"lr": 0.25, "independence": 30.0})
    assert trial.options == replace(SOME.options("fedgmm", 5), lr=0.25, independence=30.0)


def begin(folder, study):
    """A study whose data are ready; returns the file of its settings."""
    bind_trials(open_trials(folder, study), study)
    return folder / "study.json"


def finish_a_trial(folder):
    """One of SOME, as far as a folder can tell."""
    recorded(folder, "fedavg-3", lambda: {"method": "fedavg", "seed": 3})


def test_a_draft_of_settings_binds_nobody(tmp_path):
    """A program may be killed before its settings have their name."""
    (tmp_path / "study.json.7.part").write_bytes(b"{")
    open_trials(tmp_path, SOME)
    bind_trials(open_trials(tmp_path, replace(SOME, rounds=3)), replace(SOME, rounds=3))


def test_one_folder_holds_one_study(tmp_path):
    begin(tmp_path, SOME)
    finish_a_trial(tmp_path)
    open_trials(tmp_path, replace(SOME, methods=("local",), seeds=(3, 4)))  # these may grow
    with pytest.raises(ValueError, match=r"a study with rounds=2, not 3; choose another folder\.$"):
        open_trials(tmp_path, replace(SOME, rounds=3))


def test_a_call_that_fails_before_it_trains_binds_nobody(tmp_path):
    """Say at a file that is not there; the next call asks for something else."""

    def no_data(*_):
        raise FileNotFoundError("no images")

    with pytest.raises(FileNotFoundError, match="no images"):
        run_study(tmp_path, "some", SOME, Workplace(), no_data, None)
    file = begin(tmp_path / f"some-{SOME.label}", replace(SOME, rounds=3))
    assert json.loads(file.read_text())["rounds"] == 3
    with pytest.raises(ValueError, match="a study with rounds=3, not 2"):
        run_study(tmp_path, "some", SOME, Workplace(), no_data, None)


def test_of_two_studies_that_begin_at_once_the_first_stays(tmp_path):
    """Both have found the folder empty; whose data are ready first has it."""
    one, two, three = SOME, replace(SOME, rounds=3), replace(SOME, methods=("local",))
    for study in (one, two, three):
        open_trials(tmp_path, study)
    bind_trials(tmp_path, one)
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(ValueError, match=r"rounds=2, not 3; .* delete study\.json: nothing was tr"):
        bind_trials(tmp_path, two)
    bind_trials(tmp_path, three)  # the same settings
    assert (tmp_path / "study.json").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["study.json"]


BEGINNER = """
import sys, time
from pathlib import Path
from fedgmm.experiments.image_study import ImageStudy
from fedgmm.experiments.trial_files import bind_trials, open_trials

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
study = ImageStudy(rounds=rounds)
trials = open_trials(folder / "trials", study)
print("ready", flush=True)
while not (folder / "go").exists():
    time.sleep(0.001)
bind_trials(trials, study)
"""


def test_programs_that_begin_at_once(tmp_path):
    """Those with the settings that are on file go on, the others end."""
    numbers = [7, 8, 7]
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", BEGINNER, str(tmp_path), str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rounds in numbers
    ]
    for program in programs:
        assert program.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    errors = [program.communicate()[1] for program in programs]
    files = list((tmp_path / "trials").iterdir())
    assert [file.name for file in files] == ["study.json"]
    first = json.loads(files[0].read_text())["rounds"]
    for rounds, program, error in zip(numbers, programs, errors, strict=True):
        assert program.returncode == (rounds != first), error
        assert (f"a study with rounds={first}, not {rounds}" in error) == (rounds != first)


def test_a_checkpoint_binds_as_well(tmp_path):
    begin(tmp_path, SOME)
    checkpoint_of(tmp_path, "fedavg-lr-0.1-3").touch()
    with pytest.raises(ValueError, match=r"a study with rounds=2, not 3; choose another folder\.$"):
        open_trials(tmp_path, replace(SOME, rounds=3))


def test_settings_younger_than_a_folder_have_their_defaults(tmp_path):
    file = begin(tmp_path, SOME)
    finish_a_trial(tmp_path)
    facts = json.loads(file.read_text())
    del facts["reg_covar"]
    file.write_text(json.dumps(facts))
    open_trials(tmp_path, SOME)
    file.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"reg_covar=0\.01, not 0\.5"):
        open_trials(tmp_path, replace(SOME, reg_covar=0.5))


@pytest.fixture
def weights(tmp_path):
    """Two files of weights, as far as a folder can tell."""
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path / "one", tmp_path / "two"


def test_pretrained_weights_are_known_by_what_they_hold(tmp_path, weights):
    one, two = weights
    study = replace(SOME, pretrained=str(one))
    begin(tmp_path / "trials", study)
    elsewhere = one.rename(tmp_path / "elsewhere")
    open_trials(tmp_path / "trials", replace(study, pretrained=str(elsewhere)))
    with pytest.raises(ValueError, match=r"pretrained_sha256='.*', not '.*'; choose another"):
        open_trials(tmp_path / "trials", replace(study, pretrained=str(two)))
    with pytest.raises(ValueError, match="pretrained=True, not False"):
        open_trials(tmp_path / "trials", SOME)


def test_weights_that_are_not_there_are_told(tmp_path):
    study = replace(SOME, pretrained=str(tmp_path / "nope.safetensors"))
    with pytest.raises(ValueError, match=r"nope\.safetensors cannot be read \(No such file"):
        open_trials(tmp_path / "trials", study)
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize("written", [True, "somewhere/else.safetensors"])
def test_older_folders_do_not_tell_which_weights(tmp_path, weights, written):
    study = replace(SOME, pretrained=str(weights[0]))
    file = begin(tmp_path / "trials", study)
    finish_a_trial(file.parent)
    facts = json.loads(file.read_text())
    del facts["pretrained_sha256"]
    file.write_text(json.dumps({**facts, "pretrained": written}))
    for path in weights:
        open_trials(tmp_path / "trials", replace(study, pretrained=str(path)))
    with pytest.raises(ValueError, match="pretrained=True, not False"):
        open_trials(tmp_path / "trials", SOME)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"{}"])
def test_a_damaged_record_is_named_with_its_remedy(tmp_path, content):
    record_of(tmp_path, "fedavg-tuning").write_bytes(content)
    message = r"fedavg-tuning\.json is damaged; delete it, and it is made again\.$"
    with pytest.raises(ValueError, match=message):
        recorded(tmp_path, "fedavg-tuning", dict, "chosen")


def test_a_damaged_study_is_named_with_its_remedy(tmp_path):
    file = begin(tmp_path, SOME)
    finish_a_trial(tmp_path)
    file.write_text("")
    # deleting it lets any settings in: whoever does so has to know
    with pytest.raises(
        ValueError, match=r"study\.json is damaged, .* the very same settings, delete"
    ):
        open_trials(tmp_path, SOME)
    file.unlink()
    open_trials(tmp_path, SOME)
    assert json.loads(file.read_text())["rounds"] == 2


class Killed(BaseException):
    """The process ends here."""


def test_a_checkpoint_that_a_killed_trial_left_behind_goes_with_the_next_run(tmp_path, monkeypatch):
    checkpoint = checkpoint_of(tmp_path, "fedgmm-5")

    def run():
        checkpoint.write_bytes(b"progress")
        return {"score": 0.5}

    def not_again():
        raise AssertionError("it is on file")

    def killed(*args, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(Killed):
            recorded(tmp_path, "fedgmm-5", run)
    assert record_of(tmp_path, "fedgmm-5").is_file()
    assert checkpoint.is_file()
    assert recorded(tmp_path, "fedgmm-5", not_again, keep_checkpoint=True) == {"score": 0.5}
    assert checkpoint.is_file()
    assert recorded(tmp_path, "fedgmm-5", not_again) == {"score": 0.5}
    assert not checkpoint.exists()


def test_a_training_that_diverged_is_named():
    rows = [
        {"method": "fedem", "seed": 0, "stopped": None},
        {"method": "fedgmm", "seed": 2, "stopped": "round 3"},
    ]
    assert stopped_early(rows[:1]) == ""
    assert stopped_early(rows).endswith("kept its last good round: FedGMM (seed 2).")


@pytest.mark.parametrize("growth", [{"methods": ("fedavg", "local")}, {"seeds": (0, 1)}])
def test_one_folder_holds_trainings_on_the_same_data(tmp_path, growth):
    """Figures of other images under the same settings would stand in one table."""
    study = ImageStudy(**{**FAST, "methods": ("fedavg",)})
    write_femnist(tmp_path / "data")
    reproduce_classification(tmp_path / "out", study, Workplace(tmp_path / "data"))
    write_femnist(tmp_path / "other", seed=1)
    more = replace(study, **growth)
    with pytest.raises(ValueError, match="on other images than those of this data folder; choose"):
        reproduce_classification(tmp_path / "out", more, Workplace(tmp_path / "other"))
    reproduce_classification(tmp_path / "out", more, Workplace(tmp_path / "data"))


def test_other_images_are_told_before_they_are_encoded(tmp_path, monkeypatch):
    study = ImageStudy(**{**FAST, "methods": ("fedavg",)})
    write_femnist(tmp_path / "data")
    reproduce_classification(tmp_path / "out", study, Workplace(tmp_path / "data"))
    write_femnist(tmp_path / "other", seed=1)
    monkeypatch.setattr(PixelEncoder, "encode", None)
    more = replace(study, methods=("fedavg", "fedgmm"))
    with pytest.raises(ValueError, match="on other images than those of this data folder"):
        reproduce_classification(tmp_path / "out", more, Workplace(tmp_path / "other"))


def test_what_the_remedy_names_is_enough(tmp_path, monkeypatch):
    """Stopped before the first training: whoever deletes the settings may begin with others."""
    write_femnist(tmp_path)
    study = ImageStudy(**{**FAST, "methods": ("fedavg",)})
    with monkeypatch.context() as patch:
        patch.setattr(image_tuning, "_search", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reproduce_classification(tmp_path / "out", study, Workplace(tmp_path))
    fewer = replace(study, clients=4)
    with pytest.raises(ValueError, match=r"delete study\.json: nothing was trained with it"):
        reproduce_classification(tmp_path / "out", fewer, Workplace(tmp_path))
    settings = tmp_path / "out" / "classification-femnist-paper" / "study.json"
    settings.unlink()
    reproduce_classification(tmp_path / "out", fewer, Workplace(tmp_path))
    assert "data" in json.loads(settings.read_text())  # other images are still told
    table = (tmp_path / "out" / "classification-femnist-paper.md").read_text()
    assert "train with: 4 clients" in table


def test_a_learner_that_does_not_suit_binds_nobody(tmp_path):
    write_femnist(tmp_path)
    study = ImageStudy(**{**FAST, "methods": ("fedavg",)})
    unfit = replace(study, pretrained=str(tmp_path / "weights"))
    (tmp_path / "weights").write_bytes(b"for a MobileNet-V2")
    with pytest.raises(ValueError, match="needs learner='mobilenet', got 'mlp'"):
        reproduce_classification(tmp_path, unfit, Workplace(tmp_path))
    assert not list(tmp_path.rglob("study.json"))
    reproduce_classification(tmp_path, study, Workplace(tmp_path))


def test_results_say_what_the_clients_have(tmp_path):
    write_femnist(tmp_path)
    study = ImageStudy(**{**FAST, "methods": ("fedavg",)})
    reproduce_classification(tmp_path, study, Workplace(tmp_path))
    # half of the images have other labels, hence seven of four
    facts = (
        "5 clients with 200 rows; rows per client: 40 to 40 (median 40); classes per client: 7 to 7"
    )
    assert facts in (tmp_path / "classification-femnist-paper.md").read_text()
    record = json.loads((tmp_path / "classification-femnist-paper.json").read_text())
    assert record["clients"]["seed 0"].startswith(facts)
    assert record["clients"]["seed 0"].endswith("; train 120, validation 40, test 40")


@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_the_curve_ends_with_the_round_that_is_reported(tmp_path, rounds):
    write_femnist(tmp_path)
    study = ImageStudy(**{**FAST, "methods": ("fedavg",), "rounds": rounds})
    outcome = reproduce_classification(tmp_path, study, Workplace(tmp_path))
    curve = outcome.details[0]["curve"]
    assert len(curve) == rounds
    assert [place for place, value in enumerate(curve, 1) if value is not None] == sorted(
        {5, rounds} if rounds > 5 else {rounds}
    )
