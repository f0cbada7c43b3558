"""The E-step, equation (E) of the paper."""

from __future__ import annotations

from torch import Tensor

from fedgmm.core.linalg import exp


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
