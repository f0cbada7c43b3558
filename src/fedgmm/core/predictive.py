"""What the model says of a row, equation (3) of the paper, in log space.

Shapes: ``n`` rows, ``M1`` Gaussians, ``M2`` learners, ``K`` classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def log_marginal(log_pi: Tensor, log_x: Tensor) -> Tensor:
    """``log P_c(x) = log Σ_m1 N(x; μ_m1, Σ_m1) Σ_m2 π_c(m1, m2)``.

    Args:
        log_pi: ``log π_c(m1, m2)`` of each row's client, ``(n, M1, M2)``.
        log_x: ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``.

    Returns:
        ``(n,)``.
    """
    return torch.logsumexp(log_pi.logsumexp(-1) + log_x, dim=-1)


def log_class_probabilities(
    log_pi: Tensor, log_x: Tensor | None, log_y: Tensor, log_ratios: Tensor | None = None
) -> Tensor:
    """``log P_c(y|x)`` of every class, equation (3).

    ``P_c(y|x) = Σ π_c(m1, m2) N(x; μ_m1, Σ_m1) P_θm2(y|x) / Σ π_c(m1, m2) N(x; μ_m1, Σ_m1)``

    Args:
        log_pi: ``log π_c(m1, m2)`` of each row's client, ``(n, M1, M2)``.
        log_x: ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``; ``None`` without Gaussians.
        log_y: ``log P_θm2(y|x_i)``, ``(n, M2, K)``.
        log_ratios: how much more frequent labels are at each row's client,
            ``log P_c(y|m1, m2) - log P(y|m1, m2)``, ``(n, M1, M2, K)``; ``None`` leaves that out.

    Returns:
        ``(n, K)``; the classes' probabilities sum to one.
    """
    joint = log_pi if log_x is None else log_pi + log_x.unsqueeze(-1)
    if log_ratios is not None:
        joint = joint - joint.logsumexp((-2, -1), keepdim=True)
        corrected = joint.unsqueeze(-1) + log_y.unsqueeze(-3) + log_ratios
        return torch.log_softmax(corrected.logsumexp((-3, -2)), -1)
    # weight of each learner for this row: the Gaussians decide who is asked
    learner = joint.logsumexp(-2)
    learner = learner - learner.logsumexp(-1, keepdim=True)
    return torch.logsumexp(learner.unsqueeze(-1) + log_y, dim=-2)


def adapt_weights(
    log_likelihood: Tensor,
    start: Tensor,
    max_rounds: int = 200,
    tol: float = 1e-8,
    pull: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[float]]:
    """EM on a new client's weights alone; everything else is fixed.

    ``π ← 1/N Σ_i q_i`` with ``q_i(m) ∝ π(m) P_m(s_i)``. The log-likelihood never falls.

    Args:
        log_likelihood: ``log P_m(s_i)``, ``(n, M)``.
        start: weights to begin with, ``(M,)``, positive where they may grow.
        max_rounds: most iterations.
        tol: stop when the mean log-likelihood gains less.
        pull: what a prior makes of the counts ``Σ_i q_i``, ``(M,)``; the log-likelihood may then fall
            a little.

    Returns:
        The weights ``(M,)`` and the mean log-likelihood before every iteration.
    """
    # one exponential for all iterations: likelihoods relative to each row's best component, among
    # those that take part, so that no row is lost to a component that may not have it
    possible = log_likelihood.masked_fill(start <= 0, -torch.inf)
    largest = possible.amax(-1, keepdim=True)
    relative = torch.exp(possible - largest)
    offset = float(largest.mean())
    weights, history = start, []
    for _ in range(max_rounds):
        joint = relative * weights
        evidence = joint.sum(-1, keepdim=True).clamp_min(torch.finfo(joint.dtype).tiny)
        history.append(float(evidence.log().mean()) + offset)
        counts = (joint / evidence).sum(0)
        weights = counts if pull is None else pull(counts)
        weights = weights / weights.sum()
        if len(history) > 1 and abs(history[-1] - history[-2]) < tol:
            break
    return weights, history
