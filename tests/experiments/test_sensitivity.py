"""The grid of Gaussians and learners in little."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fedgmm.experiments import trial_files, workplace
from fedgmm.experiments.image_study import prepare_federation
from fedgmm.experiments.sensitivity import SensitivityStudy, reproduce_sensitivity
from fedgmm.experiments.workplace import Workplace
from fedgmm.training.local import train
from tiny_images import FAST

NAME = "sensitivity-femnist-tuned"
SMALL = SensitivityStudy(
    track="tuned", component_choices=(1, 3), learner_choices=(1, 2), **{**FAST, "rounds": 6}
)


@pytest.mark.usefixtures("painted")
def test_every_cell_is_a_training_of_its_own(tmp_path, femnist, monkeypatch):
    outcome = reproduce_sensitivity(tmp_path / "out", SMALL, Workplace(femnist))
    assert outcome.accuracy.shape == (1, 2, 2)
    federation = prepare_federation(SMALL, 0, Workplace(femnist)).dataset
    (lr,) = {one["lr"] for one in outcome.details}
    for (_, i, j), accuracy in np.ndenumerate(outcome.accuracy):
        options = replace(
            SMALL.options("fedgmm", 0),
            lr=lr,
            components=SMALL.component_choices[i],
            learners=SMALL.learner_choices[j],
        )
        model = train(federation, options=options)
        assert accuracy == model.evaluate("test").mean_accuracy
        assert outcome.validation[0, i, j] == model.evaluate("validation").mean_accuracy
    assert len({str(one["likelihood"]) for one in outcome.details}) == 4

    table = (tmp_path / "out" / f"{NAME}.md").read_text()
    assert (
        f"| 3 | {100 * outcome.accuracy[0, 1, 0]:.2f} | {100 * outcome.accuracy[0, 1, 1]:.2f} |"
        in table
    )
    assert "| Gaussians | 1 learner | 2 learners |" in table
    record = json.loads((tmp_path / "out" / f"{NAME}.json").read_text())
    np.testing.assert_array_equal(record["accuracy"], outcome.accuracy)
    assert 3_000 < (tmp_path / "out" / f"{NAME}.png").stat().st_size < 150_000

    monkeypatch.setattr(trial_files, "train", None)
    monkeypatch.setattr(workplace, "load_images", None)
    again = reproduce_sensitivity(tmp_path / "out", SMALL, Workplace(femnist))
    np.testing.assert_array_equal(again.accuracy, outcome.accuracy)


def test_validation_rows_name_the_choice(tmp_path, femnist):
    reproduce_sensitivity(tmp_path, SMALL, Workplace(femnist))
    file = tmp_path / NAME / "fedgmm-3x2-0.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "validation_accuracy": 1.0, "mean_accuracy": 0.125}))
    reproduce_sensitivity(tmp_path, SMALL, Workplace(femnist))
    table = (tmp_path / f"{NAME}.md").read_text()
    assert "choose 3 Gaussians and 2 learners (12.50 % on test rows)" in table


def test_the_paper_s_grid():
    study = SensitivityStudy()
    assert study.component_choices == study.learner_choices == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("fedem",)}, "methods must be"),
        ({"component_choices": ()}, "component_choices is empty"),
        ({"learner_choices": (0,)}, "learner_choices must be at least 1"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        SensitivityStudy(**change)
