"""Which samples are unlike anything seen, and how sure are we?

Scores stand alone: the log-density of a row does not depend on the other rows. A threshold comes from
held-out rows of the federation's own clients by split-conformal p-values, so the false-alarm rate
that is asked for holds on new rows of the same kind, whatever the model.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedgmm.wording import counted

FloatArray = NDArray[np.float64]


def conformal_p_values(calibration: ArrayLike, scores: ArrayLike) -> FloatArray:
    """``p = (1 + #{calibration ≤ score}) / (1 + n)``: small when a score is lower than usual.

    Args:
        calibration: scores of held-out known rows, ``(n,)``; high means familiar.
        scores: scores of the rows in question, ``(k,)``.

    Returns:
        ``(k,)``; for known rows ``P(p ≤ α) ≤ α``.
    """
    held_out = np.sort(np.asarray(calibration, dtype=np.float64))
    if not len(held_out):
        raise ValueError("There are no calibration scores; hold out some rows for them.")
    below = np.searchsorted(held_out, np.asarray(scores, dtype=np.float64), side="right")
    return np.asarray((1.0 + below) / (1.0 + len(held_out)))


@dataclass(frozen=True)
class NoveltyMetrics:
    """How well scores tell novel rows (positive) from known ones."""

    auroc: float
    average_precision: float
    max_f1: float


def novelty_metrics(known: ArrayLike, novel: ArrayLike) -> NoveltyMetrics:
    """AUROC, average precision and Max-F1 of scores that are low for novel rows."""
    from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

    known, novel = np.asarray(known, dtype=np.float64), np.asarray(novel, dtype=np.float64)
    truth = np.concatenate([np.zeros(len(known)), np.ones(len(novel))])
    strangeness = -np.concatenate([known, novel])
    precision, recall, _ = precision_recall_curve(truth, strangeness)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    return NoveltyMetrics(
        float(roc_auc_score(truth, strangeness)),
        float(average_precision_score(truth, strangeness)),
        float(f1.max()),
    )


@dataclass(frozen=True)
class NoveltyResult:
    """Rows that were looked at.

    Attributes:
        scores: high means familiar, ``(n,)``.
        p_values: split-conformal, ``(n,)``.
        novel: ``p ≤ false_alarm_rate``, ``(n,)``.
        false_alarm_rate: what was asked for.
    """

    scores: FloatArray
    p_values: FloatArray
    novel: NDArray[np.bool_]
    false_alarm_rate: float


def detect(calibration: ArrayLike, scores: ArrayLike, false_alarm_rate: float) -> NoveltyResult:
    """Flag the rows whose conformal p-value is at most ``false_alarm_rate``."""
    if not 0.0 < false_alarm_rate < 1.0:
        raise ValueError(f"false_alarm_rate must lie between 0 and 1, got {false_alarm_rate!r}.")
    p_values = conformal_p_values(calibration, scores)
    rows = len(np.asarray(calibration))
    if 1.0 / (1.0 + rows) > false_alarm_rate:  # as p-values are compared with it
        warnings.warn(
            f"No row can be flagged: with {counted(rows, 'held-out row')} no p-value is below "
            f"{1.0 / (1.0 + rows):.3g}, and false_alarm_rate is {false_alarm_rate:g}; hold out more rows, "
            "or ask for a higher rate.",
            UserWarning,
            stacklevel=3,
        )
    return NoveltyResult(
        np.asarray(scores, dtype=np.float64),
        p_values,
        p_values <= false_alarm_rate,
        false_alarm_rate,
    )
