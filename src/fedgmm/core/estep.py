"""The E-step, equation (E) of the paper."""

from __future__ import annotations

from torch import Tensor

from fedgmm.core.linalg import exp


def add_likelihoods(log_pi: Tensor, log_x: Tensor | None, log_y: Tensor | None = None) -> Tensor:
    """``log π_c(m1, m2) + log N(x_i; μ_m1, Σ_m1) + log P_θm2(y_i|x_i)``, as far as it is told.

    Args:
        log_pi: ``log π_c(m1, m2)`` of each row's client, ``(n, M1, M2)``. The sum is written over it,
            in its order in memory: every E-step would wait for new tensors.
        log_x: ``log N(x_i; μ_m1, Σ_m1)``, ``(n, M1)``; ``None`` without Gaussians.
        log_y: ``log P_θm2(y_i|x_i)``, ``(n, M2)``; ``None`` where labels take no part.

    Returns:
        ``log_pi``.
    """
    if log_x is not None:
        log_pi += log_x.unsqueeze(-1)
    if log_y is not None:
        log_pi += log_y.unsqueeze(-2)
    return log_pi


def responsibilities(log_joint: Tensor) -> tuple[Tensor, Tensor]:
    """``q_i(m) ∝ π_c(m) · P_m(s_i)``, normalised in log space.

    Args:
        log_joint: ``log π_c(m) + log P_m(s_i)``, ``(..., N, M)``; with learners the last axis runs
            over the pairs ``(m1, m2)``.

    Returns:
        ``q``, ``(..., N, M)``, and ``log Σ_m π_c(m) P_m(s_i)``, ``(..., N)``.
    """
    largest = log_joint.amax(-1, keepdim=True)
    q = exp(log_joint - largest)
    total = q.sum(-1, keepdim=True)
    return q.div_(total), total.log_().add_(largest).squeeze(-1)
