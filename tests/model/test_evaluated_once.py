"""Rows of a fitted model: the Gaussians of each row are evaluated once per call."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from fedgmm.model import predictions
from fedgmm.training.in_process import train
from supervised import tiny


@pytest.fixture(scope="module")
def data():
    return tiny(6, 60, columns=2, separation=2.0)


@pytest.fixture(scope="module")
def trained(data):
    model = train(data, rounds=3, components=3, learners=2)
    model.calibrate()
    return model


@pytest.fixture
def model(trained):
    """A copy that a test may change."""
    return replace(trained, prediction=deepcopy(trained.prediction))


@pytest.fixture
def evaluated(monkeypatch):
    """The number of rows in each evaluation of the Gaussians."""
    rows = []
    original = predictions.log_densities

    def counted(difference, gaussians):
        rows.append(difference.shape[-2])
        return original(difference, gaussians)

    monkeypatch.setattr(predictions, "log_densities", counted)
    return rows


def rows_of_split(data, split="test"):
    rows = data.split(split)
    return rows.inputs.numpy(), data.classes[rows.labels.numpy()], rows.codes.numpy()


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x, y, codes: model.predict(x, codes),
        lambda model, x, y, codes: model.predict_proba(x, codes),
        lambda model, x, y, codes: model.predict_log_proba(x, codes),
        lambda model, x, y, codes: model.log_predictions(x, codes),
        lambda model, x, y, codes: model.score_samples(x, codes),
        lambda model, x, y, codes: model.log_conditional(x, y, codes),
        lambda model, x, y, codes: model.log_joint(x, y, codes),
        lambda model, x, y, codes: model.novelty_scores(x, y, codes, score="joint"),
        lambda model, x, y, codes: model.novelty(x, y, score="joint", batch=True),
        lambda model, x, y, codes: model.client_novelty(x),
        lambda model, x, y, codes: model.adapt("new", x),
        lambda model, x, y, codes: model.adapt("new", x, y),
        lambda model, x, y, codes: model.evaluate("test"),
    ],
)
@pytest.mark.parametrize("block", [7, 4096])
def test_each_row_is_evaluated_once(model, data, evaluated, monkeypatch, call, block):
    monkeypatch.setattr(predictions, "_ROWS_AT_ONCE", block)
    x, y, codes = rows_of_split(data)
    call(model, x, y, codes)
    assert sum(evaluated) == len(x)
    assert max(evaluated) <= block


def test_calibration_evaluates_each_row_once(model, data, evaluated):
    model.calibrate()
    assert sum(evaluated) == len(data.train) + len(data.validation)


def test_label_frequencies_evaluate_each_row_once(model, data, evaluated):
    model.learn_labels()
    assert sum(evaluated) == len(data.train) + len(data.validation)
    assert model.prediction.labels is not None


def test_log_predictions_are_the_single_predictions(model, data):
    x, _, codes = rows_of_split(data)
    found = model.log_predictions(x, codes)
    np.testing.assert_array_equal(found.log_proba, model.predict_log_proba(x, codes))
    np.testing.assert_array_equal(
        predictions.probabilities(found.log_proba), model.predict_proba(x, codes)
    )
    np.testing.assert_array_equal(found.log_density, model.score_samples(x, codes))
    without_gaussians = train(data, "fedem", rounds=1)
    assert without_gaussians.log_predictions(x, codes).log_density is None


def test_the_batch_p_value_is_that_of_the_rows_as_a_client(model, data):
    x, _, _ = rows_of_split(data)
    assert model.novelty(x).batch_p_value is None
    assert model.novelty(x, batch=True).batch_p_value == model.client_novelty(x)
    with pytest.raises(ValueError, match="one row"):
        model.client_novelty(x[:0])
    without_gaussians = train(data, "fedem", rounds=1)
    assert without_gaussians.novelty(x, score="confidence", batch=True).batch_p_value > 0


def test_probabilities_that_underflow_stay_apart_in_log_space(model, data):
    """Steep learners: the probability of the other class is zero, its logarithm is not."""
    for value in model.prediction.learners.values():
        value.mul_(1e4)
    x, _, codes = rows_of_split(data)
    log_proba = model.predict_log_proba(x, codes)
    lost = np.exp(log_proba) == 0.0
    assert lost.any()
    assert np.isfinite(log_proba[lost]).all()
