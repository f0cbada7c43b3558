"""Clients that join a fitted model by their weights ``π_c`` alone; nobody else changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.em import add_likelihoods, responsibilities, towards_independence
from fedgmm.core.labels import guessed_labels, label_counts
from fedgmm.core.predictive import adapt_weights
from fedgmm.methods.base import Prediction, count_learners
from fedgmm.model.likelihoods import log_gaussians, log_learners
from fedgmm.nets.learners import at_labels

_LABEL_ROUNDS = 3  # of guessing the labels of a client that tells none
_RAISED = 1e-3  # share of the start that all pairs have alike: weights of zero could never grow


@dataclass(frozen=True)
class Adaptation:
    """A client that joined by its weights alone.

    Attributes:
        client: its name.
        weights: ``π_c(m1, m2)``, ``(M1, M2)``.
        log_likelihoods: mean log-likelihood before each iteration.
    """

    client: Hashable
    weights: NDArray[np.float64]
    log_likelihoods: list[float]


@dataclass(frozen=True)
class Newcomer:
    """What is learned of a client that joins.

    Attributes:
        weights: ``π_c(m1, m2)``, ``(M1, M2)``.
        log_likelihoods: mean log-likelihood before each iteration.
        label_rows: expected rows of its labels, ``(M1 · M2, K)``; ``None`` where they do not count, or
            are not known.
        from_labels: whether it told its labels.
    """

    weights: Tensor
    log_likelihoods: list[float]
    label_rows: Tensor | None = None
    from_labels: bool = False


def learn_from_inputs(prediction: Prediction, x: Tensor, seen: Tensor, max_rounds: int) -> Newcomer:
    """The part of ``π_c`` that inputs decide; learners keep the federation's shares of each Gaussian.

    Where label frequencies count, they are learned as well, from what the learners say of the rows, if
    that would have helped the clients that were there.

    Args:
        prediction: a mixture with Gaussians, or with label frequencies.
        x: the client's rows as learners see them, ``(n, *shape)``.
        seen: as the Gaussians see them, ``(n, d)``.
        max_rounds: most iterations.
    """
    guesses = prediction.labels is not None and prediction.labels.guess_rows > 0
    log_y = log_learners(prediction, x) if guesses else None
    return learn_from_answers(prediction, log_gaussians(prediction, seen), log_y, max_rounds)


def learn_from_answers(
    prediction: Prediction, log_x: Tensor | None, log_y: Tensor | None, max_rounds: int
) -> Newcomer:
    """:func:`learn_from_inputs` where it is known what Gaussians and learners say of the rows.

    Args:
        prediction: as there.
        log_x: ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``; ``None`` without Gaussians.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``; ``None`` where labels are not to be guessed.
        max_rounds: most iterations.
    """
    weights = _start(prediction)
    history, rows = list[float](), None
    if log_x is not None:
        marginal, history = adapt_weights(log_x, weights.sum(-1), max_rounds)
        weights = marginal[:, None] * weights / weights.sum(-1, keepdim=True)
    if log_y is not None:
        assert prediction.labels is not None
        own = weights.log().expand(len(log_y), *weights.shape).clone()
        joint = add_likelihoods(own, log_x)
        rows = guessed_labels(prediction.labels, joint, log_y, min(max_rounds, _LABEL_ROUNDS))
    return Newcomer(weights, history, rows)


def learn_from_labels(
    prediction: Prediction,
    x: Tensor,
    seen: Tensor,
    labels: Tensor,
    max_rounds: int,
    independence: float,
) -> Newcomer:
    """All of ``π_c``, from labelled rows; where label frequencies count, the labels are counted, too.

    Args:
        prediction: a mixture.
        x: the client's rows as learners see them, ``(n, *shape)``.
        seen: as the Gaussians see them, ``(n, d)``.
        labels: their classes, ``(n,)``.
        max_rounds: most iterations.
        independence: the prior that clients' weights were trained with, see
            :func:`fedgmm.core.em.towards_independence`.
    """
    weights = _start(prediction)
    log_x = log_gaussians(prediction, seen)
    log_y = at_labels(log_learners(prediction, x), labels)
    nothing = weights.new_zeros(len(x), *weights.shape)  # in place of log π_c, which is yet to come
    likelihoods = add_likelihoods(nothing, log_x, log_y).flatten(1)
    pull = None if log_x is None else _pull(count_learners(prediction), independence)
    own, history = adapt_weights(likelihoods, weights.reshape(-1), max_rounds, pull=pull)
    counts = None
    if prediction.labels is not None:
        q, _ = responsibilities(likelihoods + own.log())
        counts = torch.zeros_like(prediction.labels.federation)
        label_counts(q, labels, torch.zeros_like(labels), counts[None])
    return Newcomer(own.reshape(weights.shape), history, counts, from_labels=True)


def with_client(prediction: Prediction, place: int | None, newcomer: Newcomer) -> Prediction:
    """The same with another client; ``place`` is the code of a known one, who is learned anew.

    What a known client's label frequencies are is not guessed: without labels they stay.
    """
    table, labels = prediction.client_weights, prediction.labels
    assert table is not None
    own = newcomer.weights.reshape(-1)
    if place is None:
        table = torch.cat([table, own[None]])
    else:
        table = table.clone()
        table[place] = own
    if labels is not None and (place is None or newcomer.from_labels):
        labels = labels.with_client(place, newcomer.label_rows)
    return replace(prediction, client_weights=table, labels=labels)


def _start(prediction: Prediction) -> Tensor:
    """The federation's weights, all of them a little above zero, ``(M1, M2)``."""
    assert prediction.weights is not None
    weights = prediction.weights.reshape(-1, count_learners(prediction))
    return (weights + _RAISED / weights.numel()) / (1.0 + _RAISED)


def _pull(learners: int, independence: float) -> Callable[[Tensor], Tensor] | None:
    """What the prior makes of a client's counts ``(M1 · M2,)``."""
    if not independence:
        return None
    return lambda counts: towards_independence(counts, learners, independence)
