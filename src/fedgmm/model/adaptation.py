"""The weights ``π_c`` of a client that joins a fitted model; all other parameters stay fixed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.em import add_likelihoods, responsibilities, towards_independence
from fedgmm.core.labels import add_label_counts, guess_label_counts
from fedgmm.core.params import count_learners
from fedgmm.core.predictive import new_client_weights
from fedgmm.methods.base import Prediction
from fedgmm.nets.learners import at_labels

_GUESS_ROUNDS = 3  # iterations that guess label frequencies
_RAISED = 1e-3  # share of the start that is uniform, because a weight of zero could never grow


@dataclass(frozen=True)
class Adaptation:
    """The weights of a client that joined a fitted model.

    Attributes:
        client: name of the client.
        weights: ``π_c(m1, m2)``, ``(M1, M2)``.
        log_likelihoods: mean log-likelihood before each iteration.
    """

    client: Hashable
    weights: NDArray[np.float64]
    log_likelihoods: list[float]


@dataclass(frozen=True)
class NewClient:
    """Everything that was learned about a client from its rows.

    Attributes:
        weights: ``π_c(m1, m2)``, ``(M1, M2)``.
        log_likelihoods: mean log-likelihood before each iteration.
        label_counts: expected rows ``n_c(m, y)``, ``(M1 · M2, K)``; ``None`` if unknown, or if the model
            has no label frequencies.
        labelled: whether the counts come from given labels and not from guesses.
    """

    weights: Tensor
    log_likelihoods: list[float]
    label_counts: Tensor | None = None
    labelled: bool = False


def can_guess_labels(prediction: Prediction) -> bool:
    """Return whether the label frequencies of a client without labels may be guessed."""
    return prediction.labels is not None and prediction.labels.guess_rows > 0


def adapt_without_labels(
    prediction: Prediction, log_x: Tensor | None, log_y: Tensor | None, max_rounds: int
) -> NewClient:
    """Learn the weights of the Gaussians; within each, learners keep the federation's shares.

    Args:
        prediction: a mixture with Gaussians, or with label frequencies that can be guessed.
        log_x: ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``; ``None`` without Gaussians.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``, to guess label frequencies; ``None`` leaves that out.
        max_rounds: maximal number of iterations.
    """
    weights, history, counts = _initial_weights(prediction), list[float](), None
    if log_x is not None:
        marginal, history = new_client_weights(log_x, weights.sum(-1), max_rounds)
        weights = marginal[:, None] * weights / weights.sum(-1, keepdim=True)
    if log_y is not None:
        assert prediction.labels is not None
        joint = add_likelihoods(weights.log().expand(len(log_y), -1, -1).clone(), log_x)
        rounds = min(max_rounds, _GUESS_ROUNDS)
        counts = guess_label_counts(prediction.labels, joint, log_y, rounds)
    return NewClient(weights, history, counts)


def adapt_with_labels(
    prediction: Prediction,
    log_x: Tensor | None,
    log_y: Tensor,
    labels: Tensor,
    max_rounds: int,
    independence: float,
) -> NewClient:
    """Learn all of ``π_c`` from labelled rows, and count their labels.

    Args:
        prediction: a mixture.
        log_x: ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``; ``None`` without Gaussians.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``.
        labels: ``y_i``, ``(n,)``.
        max_rounds: maximal number of iterations.
        independence: strength of the prior that the other clients were trained with, in rows, see
            :func:`fedgmm.core.em.towards_independence`.
    """
    weights, learners = _initial_weights(prediction), count_learners(prediction.learners)
    zeros = weights.new_zeros(len(labels), *weights.shape)
    log_likelihood = add_likelihoods(zeros, log_x, at_labels(log_y, labels)).flatten(1)

    def prior(counts: Tensor) -> Tensor:
        return towards_independence(counts, learners, independence)

    own, history = new_client_weights(
        log_likelihood,
        weights.reshape(-1),
        max_rounds,
        prior=prior if independence and log_x is not None else None,
    )
    counts = None
    if prediction.labels is not None:
        q, _ = responsibilities(log_likelihood + own.log())
        counts = torch.zeros_like(prediction.labels.federation)
        add_label_counts(counts[None], q, labels, torch.zeros_like(labels))
    return NewClient(own.reshape(weights.shape), history, counts, labelled=True)


def with_client(prediction: Prediction, code: int | None, client: NewClient) -> Prediction:
    """Return a copy with a new client, or with new weights of the known client ``code``.

    A known client without labels keeps its label frequencies, because counts are better than guesses.
    """
    table, labels = prediction.client_weights, prediction.labels
    assert table is not None
    own = client.weights.reshape(-1)
    if code is None:
        table = torch.cat([table, own[None]])
    else:
        table = table.clone()
        table[code] = own
    if labels is not None and (code is None or client.labelled):
        labels = labels.with_client(code, client.label_counts)
    return replace(prediction, client_weights=table, labels=labels)


def _initial_weights(prediction: Prediction) -> Tensor:
    """Return the federation's weights, mixed with a few uniform ones, ``(M1, M2)``."""
    assert prediction.weights is not None
    weights = prediction.weights.reshape(-1, count_learners(prediction.learners))
    return (weights + _RAISED / weights.numel()) / (1.0 + _RAISED)
