"""Metrics of every client against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss

from fedgmm.model.metrics import evaluate
from supervised import log_softmax

NAMES = ("a", "b", "c", "d")


def predictions(rng, n=60, classes=3, clients=4):
    log_p = log_softmax(2 * rng.normal(size=(n, classes)))
    return log_p, rng.integers(classes, size=n), rng.integers(clients, size=n)


def calibration(log_p, labels, bins=15):
    """Expected calibration error of one client: confidence against accuracy, bin by bin."""
    confidence = np.exp(log_p.max(1))
    right = log_p.argmax(1) == labels
    error = 0.0
    for b in range(bins):
        here = (confidence >= b / bins) & (confidence < (b + 1) / bins)
        if b == bins - 1:
            here |= confidence >= 1.0
        if here.any():
            error += here.mean() * abs(confidence[here].mean() - right[here].mean())
    return error


@given(seed=st.integers(0, 30), n=st.integers(1, 60), classes=st.integers(2, 5))
def test_every_client_s_metrics(seed, n, classes):
    rng = np.random.default_rng(seed)
    log_p, labels, codes = predictions(rng, n, classes)
    result = evaluate(log_p, labels, codes, NAMES)
    present = [c for c in range(4) if (codes == c).any()]
    assert result.clients == tuple(NAMES[c] for c in present)
    for place, c in enumerate(present):
        here = codes == c
        assert result.rows[place] == here.sum()
        truth, guess = labels[here], log_p[here].argmax(1)
        assert result.accuracy[place] == pytest.approx(accuracy_score(truth, guess))
        expected = log_loss(truth, np.exp(log_p[here]), labels=range(classes))
        assert result.log_loss[place] == pytest.approx(expected)
        assert result.calibration_error[place] == pytest.approx(calibration(log_p[here], truth))


def test_the_figures_that_stand_for_all(rng):
    log_p, labels, codes = predictions(rng, 200)
    result = evaluate(log_p, labels, codes, NAMES)
    right = log_p.argmax(1) == labels
    own = [right[codes == c].mean() for c in range(4)]
    summary = result.summary()
    assert summary["mean_accuracy"] == pytest.approx(np.mean(own)) == result.mean_accuracy
    assert summary["weighted_accuracy"] == pytest.approx(right.mean())
    assert summary["worst_accuracy"] == pytest.approx(min(own))
    assert summary["worst_decile"] == pytest.approx(np.quantile(own, 0.1))
    assert summary["mean_log_loss"] == pytest.approx(result.log_loss.mean())
    assert summary["mean_calibration_error"] == pytest.approx(result.calibration_error.mean())
    assert f"{result.mean_accuracy:.4f} mean" in repr(result)


def test_nine_of_ten_clients_reach_the_worst_decile():
    accuracy = np.linspace(0, 1, 11)
    labels = np.concatenate([(np.arange(10) < 10 * a).astype(int) for a in accuracy])
    codes = np.repeat(np.arange(11), 10)
    log_p = np.log(np.tile([0.2, 0.8], (110, 1)))
    result = evaluate(log_p, labels, codes, tuple(range(11)))
    assert result.worst_decile == pytest.approx(0.1)
    assert (result.accuracy >= result.worst_decile - 1e-12).sum() == 10


def test_a_class_thought_impossible_costs_much_but_not_everything():
    log_p = np.array([[0.0, -np.inf], [0.0, -np.inf]])
    result = evaluate(log_p, np.array([1, 0]), np.zeros(2, dtype=int), ("a",))
    assert result.log_loss[0] == pytest.approx(350.0)
    assert result.accuracy[0] == 0.5


def test_perfect_confidence_falls_into_the_last_bin():
    log_p = np.array([[0.0, -np.inf]] * 4)
    result = evaluate(log_p, np.array([0, 0, 0, 1]), np.zeros(4, dtype=int), ("a",))
    assert result.calibration_error[0] == pytest.approx(0.25)
