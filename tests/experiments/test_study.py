"""The engine of all studies: one federation per seed, no trial twice, one data set per folder."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from fedgmm.data.encoders import PixelEncoder
from fedgmm.experiments import study as engine
from fedgmm.experiments import tuning
from fedgmm.experiments.paper.classification import reproduce_classification
from fedgmm.experiments.settings import ImageStudy
from fedgmm.experiments.study import (
    Results,
    StudyContext,
    prepare_federation,
    run_study,
    run_trials,
)
from fedgmm.experiments.trials import StudyFolderError, TrialFolder
from tiny_images import FAST, write_femnist

pytestmark = pytest.mark.usefixtures("few_rates")
STUDY = ImageStudy(**{**FAST, "methods": ("fedavg", "fedgmm"), "seeds": (3, 5)})
FEDAVG = ImageStudy(**{**FAST, "methods": ("fedavg",)})
NAME = "classification-femnist-paper"


# ---------------------------------------------------------------------- the order of trials


class Prepared:
    """The federation of a seed."""

    def __init__(self, seed):
        self.seed = seed


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """Run trials that only return their arguments, and list the steps in their order."""
    monkeypatch.setattr(engine, "choose_options", lambda *args: {"lr": 0.25})
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
        return run_trials(TrialFolder(tmp_path), study, prepare, run, lines.append), list(lines)

    return go


def test_every_method_runs_on_one_federation_per_seed(journal):
    details, lines = journal(STUDY)
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
    assert [one["seed"] for one in details if one["method"] == "fedgmm"] == [3, 5]


def test_a_trial_on_file_is_not_run_and_needs_no_federation(journal, tmp_path):
    first, _ = journal(STUDY)
    (tmp_path / "fedgmm-5.json").unlink()
    again, lines = journal(STUDY)
    assert again == first
    assert [line for line in lines if "seed" not in line] == ["prepare 5", "run fedgmm-5"]


def test_variants_share_the_chosen_options(journal):
    class Sized(ImageStudy):
        def variants(self, method):
            return [
                (f"{method}-{m1}", f"{m1} Gaussians", replace(self, components=m1)) for m1 in (1, 4)
            ]

    study = Sized(**{**FAST, "methods": ("fedgmm",)})
    details, lines = journal(study)
    assert [one["components"] for one in details] == [1, 4]
    assert {one["lr"] for one in details} == {0.25}
    assert lines[-2:] == ["4 Gaussians, seed 0", "run fedgmm-4-0"]


def test_one_federation_is_freed_before_the_next_is_made(tmp_path, monkeypatch, collect):
    """Two may not fit into memory."""
    monkeypatch.setattr(engine, "choose_options", lambda *args: {})
    made = []

    def prepare(seed):
        collect()
        assert not any(one() for one in made)
        federation = Prepared(seed)
        made.append(weakref.ref(federation))
        return federation

    run_trials(TrialFolder(tmp_path), STUDY, prepare, lambda trial, _: trial.facts, lambda _: None)
    assert len(made) == 2


def test_a_run_that_diverged_is_named():
    rows = [
        {"method": "fedem", "seed": 0, "stopped": None},
        {"method": "fedgmm", "seed": 2, "stopped": "round 3"},
    ]

    def divergence(details):
        return Results(Path(), TrialFolder(Path()), STUDY, details).divergence()

    assert divergence(rows[:1]) == ""
    assert "FedGMM (seed 2)" in divergence(rows)
    assert "FedEM" not in divergence(rows)


# ---------------------------------------------------------------------- the clients of a seed


def test_too_few_images_for_the_features(femnist):
    """The command line has no option for the number of features."""
    study = ImageStudy(**{**FAST, "features": 121})  # of 200 images 120 are training rows
    with pytest.raises(ValueError, match="use more images") as error:
        prepare_federation(study, 0, StudyContext(femnist))
    assert "121 principal components" in str(error.value)
    assert "120 training images" in str(error.value)
    prepare_federation(replace(study, features=120), 0, StudyContext(femnist))


@pytest.mark.parametrize(("rows", "split"), [(1, "validation"), (2, "test")])
def test_clients_too_small_for_a_test_are_refused_before_training(tmp_path, rows, split):
    write_femnist(tmp_path, writers=5, rows=rows)
    with pytest.raises(ValueError, match=f"none has a {split} row"):
        prepare_federation(ImageStudy(methods=("fedavg",), **FAST), 0, StudyContext(tmp_path))


# ---------------------------------------------------------------------- one data set per folder


@pytest.fixture(scope="module")
def other_femnist(tmp_path_factory):
    """A data folder with other images."""
    folder = tmp_path_factory.mktemp("other")
    write_femnist(folder, seed=1)
    return folder


def test_a_call_that_fails_before_it_trains_does_not_lock_the_folder(tmp_path):
    """For example because images are missing; the next call may have other settings."""

    def no_data(*_):
        raise FileNotFoundError("no images")

    with pytest.raises(FileNotFoundError, match="no images"):
        run_study(tmp_path, "some", STUDY, StudyContext(), no_data, None)
    more = replace(STUDY, rounds=3)
    TrialFolder.open(tmp_path / f"some-{STUDY.label}", more).lock(more)
    with pytest.raises(StudyFolderError, match="rounds=3, not 2"):
        run_study(tmp_path, "some", STUDY, StudyContext(), no_data, None)


def test_one_folder_holds_training_runs_on_one_data_set(
    tmp_path, femnist, other_femnist, monkeypatch
):
    """Otherwise numbers of other images with the same settings would be in one table."""
    reproduce_classification(tmp_path, FEDAVG, StudyContext(femnist))
    growths = ({"methods": ("fedavg", "local")}, {"seeds": (0, 1)})
    for growth in growths:
        with pytest.raises(StudyFolderError, match="other images"):
            reproduce_classification(
                tmp_path, replace(FEDAVG, **growth), StudyContext(other_femnist)
            )
    both = replace(FEDAVG, methods=("fedavg", "fedgmm"))
    with monkeypatch.context() as patch:
        patch.setattr(PixelEncoder, "encode", None)  # other images are refused before encoding
        with pytest.raises(StudyFolderError, match="other images"):
            reproduce_classification(tmp_path, both, StudyContext(other_femnist))
    for growth in growths:
        reproduce_classification(tmp_path, replace(FEDAVG, **growth), StudyContext(femnist))


def test_deleting_the_settings_is_enough_before_the_first_trial(tmp_path, femnist, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_search", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reproduce_classification(tmp_path, FEDAVG, StudyContext(femnist))
    fewer = replace(FEDAVG, clients=4)
    with pytest.raises(StudyFolderError, match=r"delete study\.json"):
        reproduce_classification(tmp_path, fewer, StudyContext(femnist))
    settings = tmp_path / NAME / "study.json"
    settings.unlink()
    reproduce_classification(tmp_path, fewer, StudyContext(femnist))
    assert "data" in json.loads(settings.read_text())  # other images are still refused
    table = (tmp_path / f"{NAME}.md").read_text()
    assert "labels used in training: 4 clients" in table


def test_a_learner_that_does_not_suit_does_not_lock_the_folder(tmp_path, femnist):
    unfit = replace(FEDAVG, pretrained=str(tmp_path / "weights"))
    (tmp_path / "weights").write_bytes(b"for a MobileNet-V2")
    with pytest.raises(ValueError, match="mobilenet"):
        reproduce_classification(tmp_path, unfit, StudyContext(femnist))
    assert not list(tmp_path.rglob("study.json"))
    reproduce_classification(tmp_path, FEDAVG, StudyContext(femnist))


def test_results_describe_the_clients(tmp_path, femnist):
    reproduce_classification(tmp_path, FEDAVG, StudyContext(femnist))
    record = json.loads((tmp_path / f"{NAME}.json").read_text())
    description = record["clients"]["seed 0"]
    assert description.startswith("5 clients with 200 rows")
    assert "7 to 7" in description  # half of the images have other labels, hence seven of four
    assert description.endswith("; train 120, validation 40, test 40")
    assert description in (tmp_path / f"{NAME}.md").read_text()


@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_the_curve_ends_with_the_round_that_is_reported(tmp_path, femnist, rounds):
    study = replace(FEDAVG, rounds=rounds)
    outcome = reproduce_classification(tmp_path, study, StudyContext(femnist))
    curve = outcome["details"][0]["curve"]
    assert len(curve) == rounds
    assert [place for place, value in enumerate(curve, 1) if value is not None] == sorted(
        {5, rounds} if rounds > 5 else {rounds}
    )
