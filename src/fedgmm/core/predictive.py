"""Predictions of the fitted mixture, equation (3) of the paper, and the weights of a new client.

Everything is in log space. Shapes: ``n`` rows, ``M1`` Gaussians, ``M2`` learners, ``K`` classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def log_class_probabilities(
    log_pi: Tensor, log_x: Tensor | None, log_y: Tensor, log_ratios: Tensor | None = None
) -> Tensor:
    """Return ``log P_c(y|x)`` of every class: equation (3).

    ``P_c(y|x) = Σ π_c(m1, m2) N(x; μ_m1, Σ_m1) P_θm2(y|x) / Σ π_c(m1, m2) N(x; μ_m1, Σ_m1)``

    Args:
        log_pi: ``log π_c(m1, m2)`` of each row's client, ``(n, M1, M2)``.
        log_x: ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``; ``None`` without Gaussians.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``.
        log_ratios: label frequencies of each row's client relative to the federation's,
            ``log P_c(y|m1, m2) - log P(y|m1, m2)``, ``(n, M1, M2, K)``, see :mod:`fedgmm.core.labels`;
            ``None`` makes no correction.

    Returns:
        ``(n, K)``, at most zero; the probabilities of a row sum to one.
    """
    joint = log_pi if log_x is None else log_pi + log_x.unsqueeze(-1)
    if log_ratios is not None:
        joint = joint - joint.logsumexp((-2, -1), keepdim=True)
        corrected = joint.unsqueeze(-1) + log_y.unsqueeze(-3) + log_ratios
        return torch.log_softmax(corrected.logsumexp((-3, -2)), -1)
    # log P_c(m2|x): the Gaussians decide how much each learner counts for this row
    learner = joint.logsumexp(-2)
    learner = learner - learner.logsumexp(-1, keepdim=True)
    # normalised once more, because rounding may leave a sum slightly above one
    return torch.log_softmax(torch.logsumexp(learner.unsqueeze(-1) + log_y, dim=-2), -1)


def log_marginal(log_pi: Tensor, log_x: Tensor) -> Tensor:
    """Return ``log P_c(x) = log Σ_m1 N(x; μ_m1, Σ_m1) Σ_m2 π_c(m1, m2)``, ``(n,)``.

    Args:
        log_pi: ``log π_c(m1, m2)`` of each row's client, ``(n, M1, M2)``.
        log_x: ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``.
    """
    return torch.logsumexp(log_pi.logsumexp(-1) + log_x, dim=-1)


def new_client_weights(
    log_likelihood: Tensor,
    start: Tensor,
    max_rounds: int = 200,
    tol: float = 1e-8,
    prior: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[float]]:
    """Fit the weights ``π`` of a new client by EM, with all Gaussians and learners fixed.

    ``π(m) ← 1/N Σ_i q_i(m)`` with ``q_i(m) ∝ π(m) P_m(s_i)``. Without a prior the log-likelihood never
    falls.

    Args:
        log_likelihood: ``log P_m(s_i)``, ``(n, M)``.
        start: initial weights, ``(M,)``; a weight of zero stays zero.
        max_rounds: maximal number of iterations.
        tol: stop when the mean log-likelihood changes by less.
        prior: function that adds a prior to the counts ``Σ_i q_i(m)``, ``(M,)`` to ``(M,)``.

    Returns:
        The weights ``(M,)`` and the mean log-likelihood before every iteration.
    """
    # Likelihoods relative to the row's best component need one exponential for all iterations.
    # Components of weight zero are left out, because beside them the others could underflow.
    possible = log_likelihood.masked_fill(start <= 0, -torch.inf)
    largest = possible.amax(-1, keepdim=True)
    relative = torch.exp(possible - largest)
    offset = float(largest.mean())
    weights, history = start, list[float]()
    for _ in range(max_rounds):
        joint = relative * weights
        evidence = joint.sum(-1, keepdim=True).clamp_min(torch.finfo(joint.dtype).tiny)
        history.append(float(evidence.log().mean()) + offset)
        counts = (joint / evidence).sum(0)
        weights = counts if prior is None else prior(counts)
        weights = weights / weights.sum()
        if len(history) > 1 and abs(history[-1] - history[-2]) < tol:
            break
    return weights, history
