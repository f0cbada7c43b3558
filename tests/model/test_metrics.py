"""Metrics of every client against brute force."""

from __future__ import annotations

import json
import time
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    brier_score_loss,
    confusion_matrix,
    log_loss,
    r2_score,
    recall_score,
    roc_auc_score,
)

from fedgmm.model import bootstrap
from fedgmm.model.bootstrap import bootstrap_numbers, resample_r2
from fedgmm.model.decisions import Decision
from fedgmm.model.metrics import Evaluation, evaluate
from fedgmm.runs.folder import as_json
from fedgmm.wording import percent
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


# ---------------------------------------------------------------------- further metrics


def expected_metrics(log_p, labels, positive=1):
    """scikit-learn's metrics of two classes; NaN where they are undefined."""
    truth, p = labels == positive, np.exp(log_p[:, positive])
    guess = log_p.argmax(1) == positive
    both = 0 < truth.mean() < 1
    return {
        "auc": roc_auc_score(truth, p) if both else np.nan,
        "average_precision": average_precision_score(truth, p) if both else np.nan,
        "log_loss": log_loss(truth, p, labels=[False, True]),
        "brier": brier_score_loss(truth, p),
        "accuracy": accuracy_score(truth, guess),
        "sensitivity": recall_score(truth, guess) if truth.any() else np.nan,
        "specificity": recall_score(~truth, ~guess) if not truth.all() else np.nan,
        "base_rate": truth.mean(),
    }


@given(seed=st.integers(0, 30), n=st.integers(1, 80), rounded=st.booleans())
def test_every_metric_of_two_classes_is_scikit_learn_s(seed, n, rounded):
    rng = np.random.default_rng(seed)
    log_p = log_softmax(np.round(rng.normal(size=(n, 2)), 0 if rounded else 9))  # with ties
    labels, codes = (rng.random(n) < 0.3).astype(int), rng.integers(2, size=n)
    result = evaluate(log_p, labels, codes, NAMES, decision=Decision(1))
    for place, name in enumerate(result.clients):
        here = codes == NAMES.index(name)
        for metric, value in expected_metrics(log_p[here], labels[here]).items():
            assert result.metrics[metric][place] == pytest.approx(value, nan_ok=True), metric
    for metric, value in expected_metrics(log_p, labels).items():
        assert result.pooled[metric] == pytest.approx(value, nan_ok=True), metric
    recalls = [(log_p.argmax(1) == labels)[labels == k].mean() for k in np.unique(labels)]
    assert result.pooled["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    assert result.pooled["calibration_error"] == pytest.approx(calibration(log_p, labels))


def test_several_classes_are_averaged(rng):
    log_p, labels, codes = predictions(rng, 300)
    result = evaluate(log_p, labels, codes, NAMES)
    p, truth = np.exp(log_p), np.eye(3)[labels]
    assert result.pooled["auc"] == pytest.approx(roc_auc_score(labels, p, multi_class="ovr"))
    assert result.pooled["average_precision"] == pytest.approx(average_precision_score(truth, p))
    assert result.pooled["brier"] == pytest.approx(brier_score_loss(labels, p))
    guess = log_p.argmax(1)
    assert result.pooled["balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(labels, guess)
    )
    assert result.pooled["base_rate"] == pytest.approx(np.bincount(labels).max() / 300)
    assert (result.confusion_matrix() == confusion_matrix(labels, guess)).all()
    own = confusion_matrix(labels[codes == 2], guess[codes == 2])
    assert (result.confusion_matrix("c") == own).all()
    assert result.positive is None
    assert "sensitivity" not in result.metrics


def test_a_client_of_one_class_has_no_auc_but_a_reason():
    log_p = log_softmax(np.arange(12.0).reshape(6, 2) % 5)
    labels, codes = np.array([0, 0, 0, 1, 0, 1]), np.array([0, 0, 0, 1, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = evaluate(log_p, labels, codes, NAMES).record()
    own = record["clients"]["a"]
    assert np.isnan([own["auc"], own["average_precision"], own["sensitivity"]]).all()
    assert set(own["undefined"]) == {"auc", "average_precision", "sensitivity"}
    assert own["specificity"] == own["accuracy"]
    assert record["clients"]["b"]["undefined"] == {}
    assert json.loads(as_json(record))["clients"]["a"]["auc"] is None


def test_a_threshold_decides(rng):
    log_p, labels, codes = predictions(rng, 200, classes=2)
    result = evaluate(log_p, labels, codes, NAMES, decision=Decision(1, 0.2))
    guess = np.exp(log_p[:, 1]) >= 0.2
    assert result.pooled["sensitivity"] == pytest.approx(guess[labels == 1].mean())
    assert result.pooled["specificity"] == pytest.approx(1 - guess[labels == 0].mean())
    assert result.weighted_accuracy == pytest.approx((guess == labels).mean())
    assert (result.confusion_matrix() == confusion_matrix(labels, guess)).all()
    usual = evaluate(log_p, labels, codes, NAMES, decision=Decision(1))
    assert result.calibration_error == pytest.approx(usual.calibration_error)
    assert result.pooled["auc"] == usual.pooled["auc"]


def test_a_label_that_is_not_a_class_counts_as_wrong(rng):
    log_p, labels, codes = predictions(rng, 90, classes=2)
    labels[:30] = 2
    log_p = np.hstack([log_p, np.full((90, 1), -np.inf)])
    result = evaluate(log_p, labels, codes, NAMES, classes=("no", "yes"), decision=Decision(1))
    right = log_p.argmax(1) == labels
    assert result.pooled["accuracy"] == pytest.approx(right.mean())
    assert result.pooled["auc"] == pytest.approx(roc_auc_score(labels == 1, log_p[:, 1]))
    assert result.confusion_matrix().sum() == 60
    assert result.positive == "yes"


# ---------------------------------------------------------------------- intervals


def test_a_few_rows_without_error_do_not_prove_perfection():
    """All resamples agree, so the interval is the exact binomial one: 0.025 = p^n."""
    labels, codes = np.array([0, 0, 0, 0, 1, 1, 0]), np.array([0, 0, 0, 0, 0, 0, 1])
    result = evaluate(np.log(np.where(np.eye(2)[labels], 0.9, 0.1)), labels, codes, NAMES)
    low = result.pooled_intervals
    assert low["accuracy"] == pytest.approx((0.025 ** (1 / 7), 1.0))
    assert low["sensitivity"] == pytest.approx((0.025 ** (1 / 2), 1.0))
    assert result.intervals["accuracy"][1] == pytest.approx([0.025, 1.0])
    assert np.isnan(low["auc"]).all()
    assert "interval" not in result.headline()
    wrong = evaluate(np.log(np.tile([0.9, 0.1], (7, 1))), labels, codes, NAMES)
    assert wrong.pooled_intervals["sensitivity"] == pytest.approx((0.0, 1 - 0.025 ** (1 / 2)))
    assert "threshold" in wrong.silence
    assert result.silence == ""
    alarm = evaluate(np.log(np.where(np.eye(2)[1 - labels], 0.9, 0.1)), labels, codes, NAMES)
    assert "threshold" in alarm.silence  # positive rows are predicted, but the wrong ones


@pytest.fixture
def all_resamples(monkeypatch):
    """As many resamples as outside the tests."""
    monkeypatch.setattr("fedgmm.model.bootstrap.RESAMPLES", 1000)


@pytest.mark.usefixtures("all_resamples")
def test_intervals_agree_with_a_loop_over_resamples(rng):
    """The same percentiles from scikit-learn's metrics of resampled rows, up to the noise of resampling."""
    log_p = log_softmax(rng.normal(size=(150, 2)))
    labels, codes = (
        (rng.random(150) < np.exp(log_p[:, 1])).astype(int),
        np.repeat([0, 1], [50, 100]),
    )
    result = evaluate(log_p, labels, codes, NAMES, decision=Decision(1))
    drawn = []
    for _ in range(50):
        rows = np.concatenate([rng.integers(50, size=50), 50 + rng.integers(100, size=100)])
        drawn.append(expected_metrics(log_p[rows], labels[rows]))
    for name, (low, high) in result.pooled_intervals.items():
        if name in drawn[0]:
            values = np.array([one[name] for one in drawn])
            near = 0.8 * values.std()
            assert np.quantile(values, [0.025, 0.975]) == pytest.approx([low, high], abs=near)
        assert low < result.pooled[name] < high
        lows, highs = result.intervals[name].T
        assert ((lows < result.metrics[name]) & (result.metrics[name] < highs)).all()
    again = evaluate(log_p, labels, codes, NAMES, decision=Decision(1))
    assert again.pooled_intervals == result.pooled_intervals


@pytest.mark.usefixtures("all_resamples")
def test_resampled_r2_agrees_with_scikit_learn(rng):
    """The same percentiles from a loop over rows that are drawn within each client."""
    y, codes = rng.normal(40, 3, size=150), np.repeat([0, 1], [50, 100])
    predicted = y + rng.normal(size=150)
    found = resample_r2(codes, y, (y - predicted) ** 2)
    drawn = []
    for _ in range(400):
        rows = np.concatenate([rng.integers(50, size=50), 50 + rng.integers(100, size=100)])
        drawn.append(r2_score(y[rows], predicted[rows]))
    ends = [0.025, 0.975]
    assert np.quantile(found, ends) == pytest.approx(np.quantile(drawn, ends), abs=0.01)


@pytest.mark.usefixtures("all_resamples")
def test_intervals_of_numbers_agree_with_separate_resamples(rng):
    codes = np.repeat([0, 1, 2], [60, 40, 1])
    y = rng.normal(size=101) + codes
    predicted = y + 0.5 * rng.normal(size=101)
    own, pooled = bootstrap_numbers(codes, y, (y - predicted) ** 2)
    rows = {0: codes == 0, 1: codes == 1, "all": np.ones(101, dtype=bool)}
    for name, mine in rows.items():
        chosen = np.concatenate(
            [
                rng.choice(here := np.flatnonzero(mine & (codes == c)), (len(here), 2000))
                for c in range(3)
            ]
        )  # a column for each resample
        rmse = np.sqrt(np.mean((y - predicted)[chosen] ** 2, axis=0))
        r2 = r2_score(y[chosen], predicted[chosen], multioutput="raw_values")
        expected = np.quantile([rmse, r2], [0.025, 0.975], axis=1)
        for column, metric in enumerate(("rmse", "r2")):
            found = pooled[metric][0] if name == "all" else own[metric][name]
            assert found == pytest.approx(expected[:, column], abs=0.03)
    assert np.isnan([own["rmse"][2], own["r2"][2]]).all()


def test_equal_numbers_have_no_r2():
    codes, y = np.repeat([0, 1], 10), np.repeat([0.1, 5.3], 10)
    own, pooled = bootstrap_numbers(codes, y, np.linspace(0, 1, 20))
    assert np.isnan(own["r2"]).all()
    assert np.isfinite([*own["rmse"], *pooled["rmse"], *pooled["r2"]]).all()


@pytest.mark.usefixtures("all_resamples")
def test_intervals_of_accuracy_cover_as_they_say(rng):
    """The share of right predictions of 200 clients with 60 rows each: 95 % cover the true 0.7."""
    labels = np.zeros(200 * 60, dtype=int)
    right = rng.random(len(labels)) < 0.7
    log_p = np.log(np.where(right[:, None], [0.8, 0.2], [0.2, 0.8]))
    result = evaluate(log_p, labels, np.repeat(np.arange(200), 60), tuple(range(200)))
    low, high = result.intervals["accuracy"].T
    assert 0.89 <= ((low <= 0.7) & (high >= 0.7)).mean() <= 0.98


@pytest.mark.slow
def test_many_rows_are_quick(rng):
    log_p = log_softmax(rng.normal(size=(100_000, 2)))
    labels, codes = rng.integers(2, size=100_000), rng.integers(30, size=100_000)
    started = time.process_time()
    result = evaluate(log_p, labels, codes, tuple(range(30)))
    assert result.pooled_intervals["auc"][0] < 0.5 < result.pooled_intervals["auc"][1]
    assert time.process_time() - started < 5.0  # 0.7 seconds on an idle core


# ---------------------------------------------------------------------- headline


def rare_rows(rng, clients=30, rows=200, rate=0.01):
    """One percent of positive rows, most of which have high scores."""
    labels = (rng.random(clients * rows) < rate).astype(int)
    z = rng.normal(size=len(labels)) + 3.0 * labels - 5.0
    log_p = log_softmax(np.stack([np.zeros_like(z), z], axis=1))
    return log_p, labels, np.repeat(np.arange(clients), rows)


def test_a_rare_class_leads_with_average_precision(rng):
    result = evaluate(*rare_rows(rng), tuple(range(30)), classes=("fine", "fraud"))
    assert result.positive == "fraud"
    assert result.leading_metric == "average_precision"
    line = result.headline()
    assert line.startswith(f"Average precision {result.pooled['average_precision']:.3f}")
    assert f"{result.pooled['base_rate']:.3f}, the base rate" in line


def test_frequent_classes_lead_with_accuracy(rng):
    log_p, labels, codes = predictions(rng, 200, classes=2)
    result = evaluate(log_p, labels, codes, NAMES)
    assert result.leading_metric == "accuracy"
    constant = np.mean(
        [np.bincount(labels[codes == c]).max() / (codes == c).sum() for c in range(4)]
    )
    assert result.constant_accuracy == pytest.approx(constant)
    assert percent(result.mean_accuracy) in result.headline()
    assert percent(constant) in result.headline()


def test_metrics_without_rows_are_those_that_are_known(rng):
    log_p, labels, codes = predictions(rng, 200)
    whole = evaluate(log_p, labels, codes, NAMES)
    result = Evaluation(whole.clients, whole.rows, whole.accuracy, whole.log_loss, whole.accuracy)
    assert set(result.metrics) == {"accuracy", "log_loss", "calibration_error"}
    assert result.pooled["accuracy"] == pytest.approx(whole.pooled["accuracy"])
    assert result.record()["clients"]["a"].keys() == {"rows", *result.metrics}
    assert result.intervals == result.pooled_intervals == {}
    with pytest.raises(ValueError, match="rows"):
        result.confusion_matrix()


@pytest.mark.parametrize("classes", [2, 3])
def test_metrics_of_many_rows_are_computed_in_blocks(rng, monkeypatch, classes):
    log_p, labels, codes = predictions(rng, 200, classes)
    log_p = log_p.round(1)  # some scores are equal
    labels[codes == 3] = 1  # a client without other classes has no ranks
    monkeypatch.setattr(bootstrap, "RESAMPLES", 500)
    whole = evaluate(log_p, labels, codes, NAMES)
    expected = whole.metrics, whole.pooled
    intervals, constant = whole.pooled_intervals, whole.constant_accuracy
    matrices = [whole.confusion_matrix(client) for client in (None, "b")]
    monkeypatch.setattr("fedgmm.model.metrics._ROWS_AT_ONCE", 7)
    monkeypatch.setattr(bootstrap, "_MOST_PLANNED", 31)
    found = evaluate(log_p, labels, codes, NAMES)
    for name, values in expected[0].items():
        np.testing.assert_allclose(found.metrics[name], values, rtol=1e-12, atol=1e-14)
        assert found.pooled[name] == pytest.approx(expected[1][name], rel=1e-12, abs=1e-14)
    assert found.constant_accuracy == constant
    for client, matrix in zip((None, "b"), matrices, strict=True):
        np.testing.assert_array_equal(found.confusion_matrix(client), matrix)
    assert found.pooled_intervals.keys() == intervals.keys() - {"auc", "average_precision"}
    for name, ends in found.pooled_intervals.items():
        assert ends == pytest.approx(intervals[name], abs=0.03)


def test_resamples_of_many_rows_are_drawn_in_parts(rng, monkeypatch):
    """A part gets as many draws as chance gives it, and each client as many as it has rows."""
    codes = np.repeat([0, 1, 2], [5, 40, 15])
    drawn = {}
    for most in (10**6, 7):
        monkeypatch.setattr(bootstrap, "_MOST_PLANNED", most)
        resamples = [list(parts) for parts in bootstrap._draws(codes, 800)]
        weights = [np.concatenate([own for _, own in parts], axis=1) for parts in resamples]
        drawn[most] = np.concatenate(weights)
        assert drawn[most].shape == (800, 60)
        counts = np.add.reduceat(drawn[most], [0, 5, 45], axis=1)
        np.testing.assert_array_equal(counts, np.tile([5, 40, 15], (800, 1)))
        assert drawn[most].mean(0) == pytest.approx(1.0, abs=0.15)
    first = [own[:, 5:25].sum(1) for own in drawn.values()]  # half of a client
    assert np.std(first, axis=1) == pytest.approx(np.sqrt(40 / 4), rel=0.08)
    assert [len(list(parts)) for parts in bootstrap._draws(codes, 1)] == [9]


def test_metrics_of_many_numbers_are_computed_in_blocks(rng, monkeypatch):
    import torch

    from fedgmm.core.predictive import NumberPredictions
    from fedgmm.model.metrics import evaluate_numbers

    shares = torch.from_numpy(log_softmax(rng.normal(size=(50, 2))))
    means, variances = (torch.from_numpy(rng.normal(size=(50, 2)) ** 2) for _ in range(2))
    predicted = NumberPredictions(shares, means, 1 + variances)
    numbers, codes = torch.from_numpy(rng.normal(size=50)), np.arange(50) % 3
    whole = evaluate_numbers(predicted, numbers, codes, NAMES)
    monkeypatch.setattr("fedgmm.model.metrics._ROWS_AT_ONCE", 7)
    found = evaluate_numbers(predicted, numbers, codes, NAMES)
    monkeypatch.setattr(bootstrap, "_MOST_PLANNED", 7)
    for name, (low, high) in found.pooled_intervals.items():
        assert (low, high) == pytest.approx(whole.pooled_intervals[name], rel=0.15)
    for name, values in whole.metrics.items():
        np.testing.assert_allclose(found.metrics[name], values, rtol=1e-12)
