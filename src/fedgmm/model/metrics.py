"""How good predictions are: per client, and over clients."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedgmm.wording import counted

FloatArray = NDArray[np.float64]
_BINS = 15


@dataclass(frozen=True)
class Evaluation:
    """Metrics of every client that has rows.

    Attributes:
        clients: their names.
        rows: how many rows each has, ``(C,)``.
        accuracy: ``(C,)``.
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
        """Mean over clients: every client counts the same."""
        return float(self.accuracy.mean())

    @property
    def weighted_accuracy(self) -> float:
        """Mean over rows."""
        return float(np.average(self.accuracy, weights=self.rows))

    @property
    def worst_decile(self) -> float:
        """Accuracy that nine of ten clients reach."""
        return float(np.quantile(self.accuracy, 0.1))

    @property
    def mean_log_loss(self) -> float:
        """Mean over clients."""
        return float(self.log_loss.mean())

    def summary(self) -> dict[str, float]:
        """The figures that stand for all clients."""
        return {
            "mean_accuracy": self.mean_accuracy,
            "weighted_accuracy": self.weighted_accuracy,
            "worst_decile": self.worst_decile,
            "worst_accuracy": float(self.accuracy.min()),
            "mean_log_loss": self.mean_log_loss,
            "mean_calibration_error": float(self.calibration_error.mean()),
        }

    def __repr__(self) -> str:
        """One line."""
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
    """Metrics from ``log P(y|x)`` ``(N, K)``, true classes ``(N,)`` and clients ``(N,)``."""
    counts = np.bincount(codes, minlength=len(names))
    present = np.flatnonzero(counts)

    def mean_of(values: FloatArray) -> FloatArray:
        return np.bincount(codes, weights=values, minlength=len(names))[present] / counts[present]

    right = (log_probabilities.argmax(-1) == labels).astype(np.float64)
    own = log_probabilities[np.arange(len(labels)), labels]
    losses = -np.maximum(own, -700.0)  # a class thought impossible costs much, not everything
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
    """``Σ_bins |accuracy - confidence| · share`` of each client, ``(C,)``."""
    bins = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
    cell = codes * _BINS + bins
    gaps = np.bincount(cell, weights=confidence - right, minlength=clients * _BINS)
    rows = np.bincount(codes, minlength=clients)
    summed: FloatArray = np.abs(gaps.reshape(clients, _BINS)).sum(-1)
    return summed / np.maximum(rows, 1)
