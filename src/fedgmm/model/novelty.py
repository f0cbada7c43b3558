"""The novelty threshold: split-conformal p-values of rows that may be unlike anything seen before.

The score of a row does not depend on other rows. The threshold comes from held-out rows of the
federation's own clients, so the chosen false-alarm rate holds for new rows drawn like them, however well
the model fits.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedgmm.wording import counted

FloatArray = NDArray[np.float64]

Score = Literal["x", "y", "joint", "confidence"]
"""``log P(x)``, ``log P(y|x)``, ``log P(x, y)``, or the largest ``log P(y|x)`` of any class."""

SCORES: tuple[str, ...] = get_args(Score)


@dataclass(frozen=True)
class NoveltyResult:
    """Rows that were tested for novelty.

    Attributes:
        scores: ``(n,)``; high means familiar.
        p_values: split-conformal p-values, ``(n,)``.
        novel: ``p_values <= false_alarm_rate``, ``(n,)``.
        false_alarm_rate: share of ordinary rows that may be flagged.
        batch_p_value: p-value of all rows as one new client; ``None`` if it was not requested.
    """

    scores: FloatArray
    p_values: FloatArray
    novel: NDArray[np.bool_]
    false_alarm_rate: float
    batch_p_value: float | None = None


def flag_novel_rows(
    calibration: ArrayLike, scores: ArrayLike, false_alarm_rate: float
) -> NoveltyResult:
    """Flag the rows whose conformal p-value is at most ``false_alarm_rate``.

    Warns if there are too few held-out rows for any row to be flagged.

    Args:
        calibration: scores of held-out rows, ``(m,)``; high means familiar.
        scores: scores of the rows to test, ``(n,)``.
        false_alarm_rate: between 0 and 1.
    """
    if not 0.0 < false_alarm_rate < 1.0:
        raise ValueError(f"false_alarm_rate must lie between 0 and 1, got {false_alarm_rate!r}.")
    p_values = conformal_p_values(calibration, scores)
    held_out = len(np.asarray(calibration))
    smallest = 1.0 / (1.0 + held_out)
    if smallest > false_alarm_rate:
        warnings.warn(
            f"No row can be flagged: with {counted(held_out, 'held-out row')} the smallest p-value is "
            f"{smallest:.3g}, but false_alarm_rate is {false_alarm_rate:g}; hold out more rows or raise "
            "the rate.",
            UserWarning,
            stacklevel=3,
        )
    return NoveltyResult(
        np.asarray(scores, dtype=np.float64),
        p_values,
        p_values <= false_alarm_rate,
        false_alarm_rate,
    )


def conformal_p_values(calibration: ArrayLike, scores: ArrayLike) -> FloatArray:
    """Return ``p = (1 + #{calibration ≤ score}) / (1 + m)``, small for scores that are lower than usual.

    Args:
        calibration: scores of held-out rows, ``(m,)``; high means familiar.
        scores: scores of the rows to test, ``(n,)``.

    Returns:
        ``(n,)``; rows drawn like the held-out ones have ``P(p ≤ α) ≤ α``.
    """
    held_out = np.sort(np.asarray(calibration, dtype=np.float64))
    if not len(held_out):
        raise ValueError("There are no calibration scores; hold out some rows for calibration.")
    below = np.searchsorted(held_out, np.asarray(scores, dtype=np.float64), side="right")
    return np.asarray((1.0 + below) / (1.0 + len(held_out)))


@dataclass(frozen=True)
class NoveltyMetrics:
    """Quality of scores that separate novel rows, the positive class, from known ones."""

    auroc: float
    average_precision: float
    max_f1: float


def novelty_metrics(known: ArrayLike, novel: ArrayLike) -> NoveltyMetrics:
    """Return AUROC, average precision and Max-F1 of scores that are low for novel rows."""
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
