"""Membership inference: can someone who has a released model say which rows it was trained on?

The attacks take a matrix of statistics, one row per model and one column per row of data, such as
``log P(x, y)`` under each model. The rows of data that a model was trained on are known for all models but
the one under attack. Each model is attacked in turn, with the others as its shadow models.

- The threshold attack (Yeom et al., 2018) calls a row a member if the model fits it well.
- The likelihood-ratio attack (Carlini et al., 2022) compares how well the model fits a row with models
  that had the row and with models that had not. It is the strongest attack that needs only outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

FALSE_ALARMS = 0.01
"""Share of rows outside the training data that may be called members, for the second measure."""

_PRIOR = 4.0  # shadow models that the mean variance counts for
_FEWEST = 2  # shadow models with, and without, a row


@dataclass(frozen=True)
class Success:
    """Measures of an attack that looks for members.

    Attributes:
        auc: probability that a member gets a higher score than another row; 0.5 is chance.
        found: share of members that are found with a false-alarm rate of ``FALSE_ALARMS``, which is
            also its value by chance.
    """

    auc: float
    found: float


def success(scores: FloatArray, members: BoolArray) -> Success:
    """Return the success of scores ``(N,)``, which should be higher for members."""
    from sklearn.metrics import roc_auc_score

    others = np.sort(scores[~members])
    cut = others[int(np.ceil((1 - FALSE_ALARMS) * len(others))) - 1]
    return Success(float(roc_auc_score(members, scores)), float((scores[members] > cut).mean()))


def likelihood_ratios(target: FloatArray, shadows: FloatArray, members: BoolArray) -> FloatArray:
    """Return the scores of the likelihood-ratio attack, ``(N,)``.

    For each row, the statistic of a model is normal with one mean if the row was in the training data
    and with another if it was not, and one variance. Few shadow models cannot estimate the variance of
    each row, so it is drawn towards the mean variance of all rows.

    Args:
        target: statistic of every row under the model that is attacked, ``(N,)``.
        shadows: likewise under other models, ``(S, N)``.
        members: whether each of these models was trained on each row, ``(S, N)``.
    """
    with_row, without = members.sum(0), (~members).sum(0)
    if min(with_row.min(), without.min()) < _FEWEST:
        raise ValueError(
            f"Each row must be among the training data of {_FEWEST} shadow models or more, and not among "
            f"those of {_FEWEST} or more; train more shadow models."
        )
    inside = np.where(members, shadows, 0.0).sum(0) / with_row
    outside = np.where(members, 0.0, shadows).sum(0) / without
    squares = ((shadows - np.where(members, inside, outside)) ** 2).sum(0)
    freedom = len(shadows) - 2
    variance = (squares + _PRIOR * squares.mean() / freedom) / (freedom + _PRIOR)
    difference: FloatArray = (target - outside) ** 2 - (target - inside) ** 2
    return np.asarray(difference / (2 * np.maximum(variance, np.finfo(float).tiny)))


def attack_all(statistics: FloatArray, members: BoolArray) -> dict[str, Success]:
    """Attack every model, with the others as shadow models; return the mean success of each attack.

    Args:
        statistics: of every row under every model, ``(S, N)``; higher where the model fits better.
        members: whether each model was trained on each row, ``(S, N)``.
    """
    found: dict[str, list[Success]] = {"threshold": [], "likelihood ratio": []}
    for place, (target, own) in enumerate(zip(statistics, members, strict=True)):
        others = np.arange(len(statistics)) != place
        ratios = likelihood_ratios(target, statistics[others], members[others])
        found["threshold"].append(success(target, own))
        found["likelihood ratio"].append(success(ratios, own))
    return {
        name: Success(
            float(np.mean([one.auc for one in each])), float(np.mean([one.found for one in each]))
        )
        for name, each in found.items()
    }


def random_halves(models: int, rows: int, seed: int) -> BoolArray:
    """Return which rows each model is trained on, ``(models, rows)``: every row is in half of them."""
    generator = np.random.default_rng(seed)
    order = generator.random((models, rows)).argsort(0)
    return np.asarray(order < models // 2)
