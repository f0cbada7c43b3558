"""Metrics of predictions, per client and over all rows, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.predictive import NumberPredictions
from fedgmm.model.bootstrap import ScoredRows, bootstrap, bootstrap_numbers, metrics_of
from fedgmm.model.decisions import Decision, default_positive
from fedgmm.model.predictions import at_codes
from fedgmm.support.scratch import (
    counts_of,
    empty,
    gathered,
    kept,
    row_blocks,
    stable_order,
    sums_of,
)
from fedgmm.wording import counted, percent

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Values = Callable[[slice], NDArray[Any]]
"""Returns the values of a run of rows."""

RARE = 0.2
"""Share of the positive class below which average precision says more than accuracy."""

MOST_CONFUSED = 30
"""Largest number of classes for which records contain confusion matrices."""

INTERVAL = 0.9
"""Probability that the interval of a number holds it, where no other is chosen."""

_REASONS = {  # why metrics are undefined
    "auc": "all rows have the same class",
    "average_precision": "all rows have the same class",
    "sensitivity": "no row has the positive class",
    "specificity": "all rows have the positive class",
}
_BINS = 15
_ROWS_AT_ONCE = 250_000
_SMALLEST_LOG_PROBABILITY = -700.0  # so that a row with probability zero has a finite loss


@dataclass(frozen=True)
class PredictedRows:
    """Predictions of labelled rows."""

    log_probabilities: FloatArray  # ``log P_c(y|x)``, ``(n, K)``
    labels: IntArray  # class of each row; ``K`` for a label that is not a class, ``(n,)``
    codes: IntArray  # the client of each row, an index into the clients that have rows, ``(n,)``
    classes: tuple[Hashable, ...]  # names of the classes, ``(K,)``
    # turns probabilities into a class; its positive class is known if there are two classes
    decision: Decision

    @cached_property
    def decided(self) -> IntArray:
        """The predicted class of each row, ``(n,)``."""
        out = empty(len(self.labels), np.int64)
        for place in _blocks(len(out)):
            out[place] = self.decision.choose(self.log_probabilities[place])
        return out

    @cached_property
    def scored(self) -> ScoredRows:
        """The same rows, sorted for the computation of metrics."""
        n, positive, width = len(self.codes), self.decision.positive, len(self.classes) + 1
        cells = empty(n, np.int64)
        for place in row_blocks(n):
            cells[place] = self.codes[place] * width + self.labels[place]
        order = stable_order(cells, width * (1 + max(self.codes[p].max() for p in row_blocks(n))))
        ranked = tuple(range(len(self.classes))) if positive is None else (positive,)
        codes, labels, right = empty(n, np.int64), empty(n, np.int64), empty(n, np.bool_)
        loss, brier = empty(n, np.float64), empty(n, np.float64)
        scores = empty((n, len(ranked)), np.float64)
        for place in row_blocks(n):
            rows = order[place]
            log_proba, own = self.log_probabilities[rows], self.labels[rows]
            codes[place], labels[place] = self.codes[rows], own
            right[place] = self.decided[rows] == own
            loss[place] = row_losses(log_proba, own)
            scores[place] = log_proba[:, list(ranked)]
            # Σ_k (P_k - [k = y])²; with two classes both errors are equal, and one of them is counted
            proba, right_one = np.exp(log_proba), np.exp(at_codes(log_proba, own))
            errors = (proba**2).sum(-1) - right_one**2 + (1.0 - right_one) ** 2
            brier[place] = errors / (1.0 if positive is None else 2.0)
        return ScoredRows(codes, labels, right, loss, brier, scores, ranked, positive)


@dataclass(frozen=True)
class Evaluation:
    """Metrics of every client that has rows.

    Attributes:
        clients: names of the clients.
        rows: number of rows of each, ``(C,)``.
        accuracy: share of rows whose predicted class is right, ``(C,)``.
        log_loss: mean of ``-log P_c(y|x)``, ``(C,)``.
        calibration_error: expected calibration error, ``(C,)``.
        predicted: the rows, from which further metrics are computed when they are needed; ``None`` if only
            the metrics above are known.
    """

    clients: tuple[Hashable, ...]
    rows: IntArray
    accuracy: FloatArray
    log_loss: FloatArray
    calibration_error: FloatArray
    predicted: PredictedRows | None = field(default=None, repr=False, compare=False)

    @property
    def mean_accuracy(self) -> float:
        """Mean accuracy over clients."""
        return float(self.accuracy.mean())

    @property
    def weighted_accuracy(self) -> float:
        """Mean accuracy over rows."""
        return float(np.average(self.accuracy, weights=self.rows))

    @property
    def worst_decile(self) -> float:
        """Accuracy that nine of ten clients reach: the 10 % quantile over clients."""
        return float(np.quantile(self.accuracy, 0.1))

    @property
    def mean_log_loss(self) -> float:
        """Mean log-loss over clients."""
        return float(self.log_loss.mean())

    def summary(self) -> dict[str, float]:
        """Return the metrics that summarise all clients; the last three are those of all rows together."""
        pooled = ("auc", "average_precision", "base_rate")
        return {
            "mean_accuracy": self.mean_accuracy,
            "weighted_accuracy": self.weighted_accuracy,
            "worst_decile": self.worst_decile,
            "worst_accuracy": float(self.accuracy.min()),
            "mean_log_loss": self.mean_log_loss,
            "mean_calibration_error": float(self.calibration_error.mean()),
            **{name: self.pooled[name] for name in pooled if name in self.pooled},
        }

    # ------------------------------------------------------------------ further metrics

    @property
    def metrics(self) -> dict[str, FloatArray]:
        """All metrics of each client, ``(C,)`` each; NaN where a metric is undefined.

        ``accuracy``, ``balanced_accuracy``, ``auc``, ``average_precision``, ``log_loss``, ``brier``,
        ``calibration_error`` and ``base_rate``; with two classes also ``sensitivity`` and ``specificity``.
        With several classes AUC and average precision are means over the classes that a client has, each
        against the rest, and the base rate is the share of the most frequent class. With two classes it
        is the share of the positive class.
        """
        return self._computed[0]

    @property
    def pooled(self) -> dict[str, float]:
        """The same metrics of all rows together, each predicted with the weights of its client."""
        return self._computed[1]

    @cached_property
    def _computed(self) -> tuple[dict[str, FloatArray], dict[str, float]]:
        known = {
            "accuracy": self.accuracy,
            "log_loss": self.log_loss,
            "calibration_error": self.calibration_error,
        }
        rows = self.predicted
        if rows is None:
            means = {name: float(np.average(v, weights=self.rows)) for name, v in known.items()}
            del means["calibration_error"]  # the bins of all clients would be needed
            return known, means
        own, pooled = metrics_of(rows.scored)
        everything = np.broadcast_to(np.int64(0), len(rows.codes))
        own |= {**known, "base_rate": _base_rates(rows, rows.codes, len(self.clients))}
        pooled["calibration_error"] = _calibration_errors(_calibration_bins(rows, everything, 1))
        pooled["base_rate"] = _base_rates(rows, everything, 1)
        return own, {name: float(value[0]) for name, value in pooled.items()}

    @cached_property
    def _bootstrapped(self) -> tuple[dict[str, FloatArray], dict[str, FloatArray]]:
        return ({}, {}) if self.predicted is None else bootstrap(self.predicted.scored)

    @property
    def intervals(self) -> dict[str, FloatArray]:
        """95 % bootstrap intervals of the metrics of each client, ``(C, 2)``; NaN where undefined.

        Rows are resampled within each client. If all rows are right or all are wrong, resamples agree, and
        shares of rows have the exact binomial bound instead. Calibration error and base rate have no
        interval.
        """
        return self._bootstrapped[0]

    @property
    def pooled_intervals(self) -> dict[str, tuple[float, float]]:
        """95 % bootstrap intervals of the pooled metrics."""
        return {name: (float(v[0, 0]), float(v[0, 1])) for name, v in self._bootstrapped[1].items()}

    def confusion_matrix(self, client: Hashable | None = None) -> IntArray:
        """Return the number of rows of a client, or of all, by true and predicted class, ``(K, K)``.

        Rows with a label that is not a class of the model are left out.
        """
        rows = self._need_rows()
        size = len(rows.classes)
        found = np.zeros(size * size, dtype=np.int64)
        for place in _blocks(len(rows.labels)):
            labels, decided = rows.labels[place], rows.decided[place]
            here = labels < size
            if client is not None:
                here &= rows.codes[place] == self.clients.index(client)
            found += np.bincount(labels[here] * size + decided[here], minlength=size * size)
        return found.reshape(size, size)

    def _need_rows(self) -> PredictedRows:
        if self.predicted is None:
            raise ValueError("Only the metrics of the clients are known, not their rows.")
        return self.predicted

    @property
    def positive(self) -> Hashable | None:
        """Name of the positive class; ``None`` unless there are two classes."""
        if self.predicted is None or self.predicted.decision.positive is None:
            return None
        return self.predicted.classes[self.predicted.decision.positive]

    @property
    def leading_metric(self) -> str:
        """``"average_precision"`` if the positive class of two is rare, otherwise ``"accuracy"``."""
        rare = self.positive is not None and self.pooled["base_rate"] < RARE
        return "average_precision" if rare else "accuracy"

    @property
    def constant_accuracy(self) -> float:
        """Mean accuracy over clients of predicting each client's most frequent class for all its rows."""
        rows = self._need_rows()
        return float(_most_frequent(rows.labels, rows.codes, len(self.clients)).mean())

    def headline(self) -> str:
        """Return a sentence with the main metric, and with the value that a constant guess reaches."""
        if self.predicted is None:
            return f"Accuracy {percent(self.mean_accuracy)} on average over clients."
        if self.leading_metric == "average_precision":
            value = f"{self.pooled['average_precision']:.3f}"
            low, high = self.pooled_intervals.get("average_precision", (np.nan, np.nan))
            if np.isfinite(low):
                value += f" (95 % interval {low:.3f} to {high:.3f})"
            return (
                f"Average precision {value} for {self.positive!r}; a constant guess reaches "
                f"{self.pooled['base_rate']:.3f}, the base rate."
            )
        return (
            f"Accuracy {percent(self.mean_accuracy)} on average over clients; guessing each client's most "
            f"frequent class reaches {percent(self.constant_accuracy)}."
        )

    @property
    def silence(self) -> str:
        """A sentence that says that no row of the positive class is found; empty if one is."""
        if self.positive is None or self.pooled["sensitivity"] != 0:
            return ""
        return (
            f"No row of {self.positive!r} is found: its probability is nowhere large enough. Choose a "
            "lower one with --threshold, or name the --cost of missing a row."
        )

    # ------------------------------------------------------------------ records

    def record(self) -> dict[str, Any]:
        """Return all metrics as plain values, for JSON."""
        intervals = {name: list(pair) for name, pair in self.pooled_intervals.items()}
        return {
            "headline": self.headline(),
            "leading_metric": self.leading_metric,
            **self._rule(),
            "pooled": self._record(int(self.rows.sum()), self.pooled, intervals),
            "clients": self.client_records(),
        }

    def _rule(self) -> dict[str, Any]:
        """Return how predictions were made and checked, as plain values."""
        rows = self.predicted
        return {
            "positive": self.positive,
            "threshold": None if rows is None else rows.decision.threshold,
            "classes": None if rows is None else list(rows.classes),
        }

    def client_records(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of each client as plain values, for JSON."""
        bins = None
        if self.predicted is not None:
            bins = _calibration_bins(self.predicted, self.predicted.codes, len(self.clients))
        found = {}
        for i, client in enumerate(self.clients):
            own = {name: float(values[i]) for name, values in self.metrics.items()}
            intervals = {name: values[i].tolist() for name, values in self.intervals.items()}
            record = self._record(int(self.rows[i]), own, intervals, client)
            if bins is not None:
                rows, confidence, right = bins[:, i, bins[0, i] > 0]
                record["calibration"] = {
                    "rows": rows.astype(np.int64).tolist(),
                    "confidence": (confidence / rows).tolist(),
                    "accuracy": (right / rows).tolist(),
                }
            found[str(client)] = record
        return found

    def _record(
        self, rows: int, own: dict[str, float], intervals: dict[str, Any], client: Hashable = None
    ) -> dict[str, Any]:
        """Return the metrics of one client or of all, why some are undefined, and the confusion matrix."""
        record: dict[str, Any] = {"rows": rows, **own}
        if self.predicted is None and intervals:
            record["intervals"] = intervals
        if self.predicted is not None:
            undefined = {name: _REASONS[name] for name, value in own.items() if np.isnan(value)}
            record |= {"intervals": intervals, "undefined": undefined}
            if len(self.predicted.classes) <= MOST_CONFUSED:
                record["confusion_matrix"] = self.confusion_matrix(client).tolist()
        return record

    def __repr__(self) -> str:
        """Return one line with the main metrics."""
        return (
            f"Evaluation of {counted(len(self.clients), 'client')}: accuracy "
            f"{self.mean_accuracy:.4f} mean, {self.weighted_accuracy:.4f} of all rows; "
            f"log-loss {self.mean_log_loss:.4f}"
        )


# ---------------------------------------------------------------------- numbers


@dataclass(frozen=True, kw_only=True)
class RegressionEvaluation(Evaluation):
    """Metrics of predicted numbers, of every client that has rows.

    ``log_loss`` is the mean of ``-log P_c(y|x)``, a density. ``calibration_error`` is the distance of the
    coverage from ``level``. There is no accuracy, so ``accuracy`` is NaN.

    Attributes:
        level: probability that an interval holds ``y``, by the model.
        rmse: root of the mean squared error of the means, ``(C,)``.
        r2: ``1 - Σ (y - E[y|x])² / Σ (y - ȳ_c)²``, ``(C,)``; NaN if all ``y`` of a client are equal.
        coverage: share of rows whose interval holds ``y``, ``(C,)``.
        together: the same metrics of all rows together.
        row_errors: client, ``y`` and squared error of each row, sorted by client, ``(n,)`` each.
    """

    level: float
    rmse: FloatArray
    r2: FloatArray
    coverage: FloatArray
    together: dict[str, float]
    row_errors: tuple[IntArray, FloatArray, FloatArray] = field(repr=False, compare=False)

    leading_metric = "rmse"

    @property
    def metrics(self) -> dict[str, FloatArray]:
        """``rmse``, ``r2``, ``coverage`` and ``log_loss`` of each client, ``(C,)`` each."""
        names = ("rmse", "r2", "coverage", "log_loss")
        return {name: getattr(self, name) for name in names}

    @property
    def pooled(self) -> dict[str, float]:
        """The same metrics of all rows together, each predicted with the weights of its client."""
        return self.together

    @cached_property
    def _bootstrapped(self) -> tuple[dict[str, FloatArray], dict[str, FloatArray]]:
        return bootstrap_numbers(*self.row_errors)

    def summary(self) -> dict[str, float]:
        """Return the metrics that summarise all clients."""
        return {
            "mean_rmse": float(self.rmse.mean()),
            "worst_rmse": float(self.rmse.max()),
            **self.together,
            "mean_log_loss": self.mean_log_loss,
        }

    def headline(self) -> str:
        """Return a sentence with the main metrics."""
        own, (low, high) = self.together, self.pooled_intervals["rmse"]
        interval = f" (95 % interval {low:.4g} to {high:.4g})" if np.isfinite(low) else ""
        return (
            f"RMSE {own['rmse']:.4g}{interval}, R² {own['r2']:.3f}; {100 * self.level:g} % intervals hold "
            f"{percent(own['coverage'])} of the rows."
        )

    def _rule(self) -> dict[str, Any]:
        """Return the level of the intervals."""
        return {"level": self.level}

    def __repr__(self) -> str:
        """Return one line with the main metrics."""
        return f"Evaluation of {counted(len(self.clients), 'client')}: {self.headline()}"


def interval_of(predicted: NumberPredictions, level: float, z: float | None = None) -> FloatArray:
    """Return the interval of every row, ``(n, 2)``; see :meth:`NumberPredictions.interval`."""
    return np.stack([end.cpu().numpy() for end in predicted.interval(level, z)], -1)


def evaluate_numbers(
    predicted: NumberPredictions,
    numbers: Tensor,
    codes: IntArray,
    names: tuple[Hashable, ...],
) -> RegressionEvaluation:
    """Return the metrics of predictions of numbers ``y``, ``(n,)``, of every client.

    ``codes`` ``(n,)`` are indices into the ``names`` of the clients.
    """
    y = numbers.cpu().numpy()
    losses, errors, held = (empty(len(y), np.float64) for _ in range(3))
    z = predicted.normal_score(INTERVAL)
    for block in _blocks(len(y)):
        found = predicted.rows(block)
        losses[block] = -found.log_density(numbers[block].to(found.means)).cpu().numpy()
        errors[block] = (y[block] - found.mean.cpu().numpy()) ** 2
        low, high = interval_of(found, INTERVAL, z).T
        held[block] = (low <= y[block]) & (y[block] <= high)

    def metrics(codes: IntArray, groups: int) -> dict[str, FloatArray]:
        def mean_of(values: Values) -> FloatArray:
            return _means(values, codes, groups)

        mean, error = mean_of(y.__getitem__), mean_of(errors.__getitem__)
        spread = mean_of(lambda place: (y[place] - mean[codes[place]]) ** 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > 0, 1.0 - error / spread, np.nan)
        return {
            "rmse": np.sqrt(error),
            "r2": r2,
            "coverage": mean_of(held.__getitem__),
            "log_loss": mean_of(losses.__getitem__),
        }

    present, codes = _present(codes, len(names))
    own = metrics(codes, len(present))
    together = metrics(np.broadcast_to(np.int64(0), len(codes)), 1)
    order = stable_order(codes, len(present))
    return RegressionEvaluation(
        clients=tuple(names[code] for code in present),
        rows=counts_of(codes, len(present)),
        accuracy=np.full(len(present), np.nan),
        calibration_error=np.abs(own["coverage"] - INTERVAL),
        level=INTERVAL,
        together={name: float(value[0]) for name, value in together.items()},
        row_errors=(gathered(codes, order), gathered(y, order), gathered(errors, order)),
        **own,  # type: ignore[arg-type]
    )


# ---------------------------------------------------------------------- classes


def evaluate(
    log_probabilities: FloatArray,
    labels: IntArray,
    codes: IntArray,
    names: tuple[Hashable, ...],
    *,
    classes: tuple[Hashable, ...] | None = None,
    decision: Decision | None = None,
) -> Evaluation:
    """Return the metrics of predictions ``log P_c(y|x)``, ``(n, K)``, of every client.

    ``labels`` ``(n,)`` are the true classes, or ``K`` for a label that is not a class. ``codes`` ``(n,)``
    are indices into the ``names`` of the clients. Classes are numbered if they have no names. If
    ``decision`` lacks the positive class of two, :func:`~fedgmm.model.decisions.default_positive` finds it.
    """
    present, codes = _present(codes, len(names))
    known = tuple(range(log_probabilities.shape[1])) if classes is None else classes
    decision = decision or Decision()
    if len(known) == 2 and decision.positive is None:
        counts = counts_of(labels, len(known) + 1).tolist()
        decision = replace(decision, positive=default_positive(known, counts))
    rows = PredictedRows(log_probabilities, kept(labels), codes, known, decision)
    losses = empty(len(labels), np.float64)
    for block in _blocks(len(labels)):
        losses[block] = row_losses(log_probabilities[block], labels[block])
    return Evaluation(
        tuple(names[code] for code in present),
        counts_of(codes, len(present)),
        _means(lambda place: rows.decided[place] == labels[place], codes, len(present)),
        _means(losses.__getitem__, codes, len(present)),
        _calibration_errors(_calibration_bins(rows, rows.codes, len(present))),
        rows,
    )


def row_losses(log_probabilities: FloatArray, labels: IntArray) -> FloatArray:
    """Return ``-log P(y|x)`` of each row's label ``(n,)``; finite also for labels of probability zero."""
    return finite_losses(at_codes(log_probabilities, labels))


def finite_losses(log_probabilities: FloatArray) -> FloatArray:
    """Return ``-log P``, which is 700 for a probability of zero."""
    return np.asarray(-np.maximum(log_probabilities, _SMALLEST_LOG_PROBABILITY))


# ---------------------------------------------------------------------- helpers


def _present(codes: IntArray, clients: int) -> tuple[IntArray, IntArray]:
    """Return the clients that have rows, and the position of each row's client among them, ``(n,)``."""
    has_rows = counts_of(codes, clients) > 0
    return np.flatnonzero(has_rows), gathered(np.cumsum(has_rows) - 1, codes)


def _blocks(rows: int) -> Iterator[slice]:
    """Yield runs of rows, so that temporaries stay small."""
    return row_blocks(rows, _ROWS_AT_ONCE)


def _calibration_bins(rows: PredictedRows, groups: IntArray, count: int) -> FloatArray:
    """Return rows, summed confidence and right predictions by group and bin, ``(3, G, bins)``.

    Bins divide the probability of the most likely class, also if another class was predicted.
    """
    found, size = np.zeros((3, count * _BINS)), count * _BINS
    for place in _blocks(len(groups)):
        log_proba = rows.log_probabilities[place]
        confidence = np.exp(log_proba.max(-1))
        right = (log_proba.argmax(-1) == rows.labels[place]).astype(np.float64)
        bins = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
        cell = groups[place] * _BINS + bins
        found += [np.bincount(cell, one, minlength=size) for one in (None, confidence, right)]
    return found.reshape(3, count, _BINS)


def _calibration_errors(bins: FloatArray) -> FloatArray:
    """Return ``Σ_bins |accuracy - confidence| · share`` of each group, ``(G,)``."""
    rows, confidence, right = bins
    return np.asarray(np.abs(confidence - right).sum(-1) / np.maximum(rows.sum(-1), 1))


def _base_rates(rows: PredictedRows, groups: IntArray, count: int) -> FloatArray:
    """Return the share of the positive or, without one, of the most frequent class, ``(G,)``."""
    positive = rows.decision.positive
    if positive is None:
        return _most_frequent(rows.labels, groups, count)
    return _means(lambda place: rows.labels[place] == positive, groups, count)


def _means(values: Values, groups: IntArray, count: int) -> FloatArray:
    """Return the mean of each group of rows, ``(G,)``; zero without rows."""
    return np.asarray(sums_of(values, groups, count) / np.maximum(counts_of(groups, count), 1))


def _most_frequent(labels: IntArray, groups: IntArray, count: int) -> FloatArray:
    """Return the share of the most frequent class of each group, ``(G,)``."""
    found = [
        np.unique(np.stack([groups[place], labels[place]]), axis=1, return_counts=True)
        for place in _blocks(len(labels))
    ]
    pairs, sizes = (np.concatenate(parts, axis=-1) for parts in zip(*found, strict=True))
    pairs, place = np.unique(pairs, axis=1, return_inverse=True)
    largest = np.zeros(count)
    np.maximum.at(largest, pairs[0], np.bincount(place.ravel(), sizes))
    return largest / counts_of(groups, count)
