"""A small grid of Gaussians and learners."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from fedgmm.experiments import study as engine
from fedgmm.experiments import trials
from fedgmm.experiments.paper.sensitivity import SensitivityStudy, reproduce_sensitivity
from fedgmm.experiments.study import StudyContext, prepare_federation
from fedgmm.training.in_process import train
from tiny_images import FAST

pytestmark = pytest.mark.usefixtures("few_rates")
NAME = "sensitivity-femnist-tuned"
SMALL = SensitivityStudy(
    track="tuned", component_choices=(1, 3), learner_choices=(1, 2), **{**FAST, "rounds": 6}
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, femnist, few_rates):
    """A finished study: its folder, which tests copy, and its outcome."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, reproduce_sensitivity(folder, SMALL, StudyContext(femnist))


def test_every_cell_is_a_training_run_of_its_own(finished, femnist, monkeypatch):
    folder, outcome = finished
    accuracies = np.array(outcome["accuracy"])
    assert accuracies.shape == (1, 2, 2)
    federation = prepare_federation(SMALL, 0, StudyContext(femnist)).dataset
    ((lr, momentum),) = {(one["lr"], one["server_momentum"]) for one in outcome["details"]}
    for (_, i, j), accuracy in np.ndenumerate(accuracies):
        options = replace(
            SMALL.options("fedgmm", 0),
            lr=lr,
            server_momentum=momentum,
            components=SMALL.component_choices[i],
            learners=SMALL.learner_choices[j],
        )
        model = train(federation, options=options)
        assert accuracy == model.evaluate("test").mean_accuracy
        assert (
            outcome["details"][2 * i + j]["validation_accuracy"]
            == model.evaluate("validation").mean_accuracy
        )
    assert len({str(one["likelihood"]) for one in outcome["details"]}) == 4

    table = (folder / f"{NAME}.md").read_text()
    assert f"| 3 | {100 * accuracies[0, 1, 0]:.2f} | {100 * accuracies[0, 1, 1]:.2f} |" in table
    assert "| Gaussians | 1 learner | 2 learners |" in table
    record = json.loads((folder / f"{NAME}.json").read_text())
    np.testing.assert_array_equal(record["accuracy"], outcome["accuracy"])
    assert 3_000 < (folder / f"{NAME}.png").stat().st_size < 150_000

    monkeypatch.setattr(trials, "train", None)
    monkeypatch.setattr(engine, "load_images", None)
    again = reproduce_sensitivity(folder, SMALL, StudyContext(femnist))
    np.testing.assert_array_equal(again["accuracy"], outcome["accuracy"])


def test_validation_rows_name_the_choice(tmp_path, finished, femnist):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / NAME / "fedgmm-3x2-0.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "validation_accuracy": 1.0, "mean_accuracy": 0.125}))
    reproduce_sensitivity(tmp_path, SMALL, StudyContext(femnist))
    table = (tmp_path / f"{NAME}.md").read_text()
    assert "choose 3 Gaussians and 2 learners (12.50 % on test rows)" in table


def test_the_paper_s_grid():
    study = SensitivityStudy()
    assert study.component_choices == study.learner_choices == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "change",
    [{"methods": ("fedem",)}, {"component_choices": ()}, {"learner_choices": (0,)}],
    ids=str,
)
def test_bad_settings_are_refused_by_name(change):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        SensitivityStudy(**change)
