"""Metrics of predictions: accuracy, log-loss and calibration, per client and over clients."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgmm.wording import counted

FloatArray = NDArray[np.float64]
_BINS = 15
_SMALLEST_LOG_PROBABILITY = -700.0  # so that a row with probability zero has a finite loss


@dataclass(frozen=True)
class Evaluation:
    """Metrics of every client that has rows.

    Attributes:
        clients: names of the clients.
        rows: number of rows of each, ``(C,)``.
        accuracy: share of rows whose most likely class is right, ``(C,)``.
        log_loss: mean of ``-log P_c(y|x)``, ``(C,)``.
        calibration_error: expected calibration error, ``(C,)``.
    """

    clients: tuple[Hashable, ...]
    rows: NDArray[np.int64]
    accuracy: FloatArray
    log_loss: FloatArray
    calibration_error: FloatArray

    @property
    def mean_accuracy(self) -> float:
        """Mean accuracy over clients; every client counts the same."""
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
        """Return the metrics that summarise all clients."""
        return {
            "mean_accuracy": self.mean_accuracy,
            "weighted_accuracy": self.weighted_accuracy,
            "worst_decile": self.worst_decile,
            "worst_accuracy": float(self.accuracy.min()),
            "mean_log_loss": self.mean_log_loss,
            "mean_calibration_error": float(self.calibration_error.mean()),
        }

    def __repr__(self) -> str:
        """Return one line with the main metrics."""
        return (
            f"Evaluation of {counted(len(self.clients), 'client')}: accuracy "
            f"{self.mean_accuracy:.4f} mean, "
            f"{self.weighted_accuracy:.4f} by rows, {self.worst_decile:.4f} worst decile; "
            f"log-loss {self.mean_log_loss:.4f}"
        )


def evaluate(
    log_probabilities: FloatArray,
    labels: NDArray[np.int64],
    codes: NDArray[np.int64],
    names: tuple[Hashable, ...],
) -> Evaluation:
    """Return the metrics of every client.

    Args:
        log_probabilities: ``log P_c(y|x)`` of every class, ``(n, K)``.
        labels: the true class of each row, ``(n,)``.
        codes: the client of each row, an index into ``names``, ``(n,)``.
        names: the clients.
    """
    counts = np.bincount(codes, minlength=len(names))
    present = np.flatnonzero(counts)

    def mean_of(values: FloatArray) -> FloatArray:
        return np.bincount(codes, weights=values, minlength=len(names))[present] / counts[present]

    right = (log_probabilities.argmax(-1) == labels).astype(np.float64)
    own = log_probabilities[np.arange(len(labels)), labels]
    losses = -np.maximum(own, _SMALLEST_LOG_PROBABILITY)
    return Evaluation(
        tuple(names[code] for code in present),
        counts[present],
        mean_of(right),
        mean_of(losses),
        _calibration_errors(np.exp(log_probabilities.max(-1)), right, codes, len(names))[present],
    )


def _calibration_errors(
    confidence: FloatArray, right: FloatArray, codes: NDArray[np.int64], clients: int
) -> FloatArray:
    """Return ``Σ_bins |accuracy - confidence| · share`` of each client, ``(C,)``."""
    bins = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
    cell = codes * _BINS + bins
    gaps = np.bincount(cell, weights=confidence - right, minlength=clients * _BINS)
    rows = np.bincount(codes, minlength=clients)
    summed: FloatArray = np.abs(gaps.reshape(clients, _BINS)).sum(-1)
    return summed / np.maximum(rows, 1)
