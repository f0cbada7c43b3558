"""The client's M-step, equation (M) of the paper: mixture weights in closed form.

The Gaussians' moments are :func:`fedgmm.core.gaussians.weighted_moments`.
"""

from __future__ import annotations

from torch import Tensor


def client_weights(counts: Tensor, rows: Tensor) -> Tensor:
    """``π_c(m) = γ_c(m) / N_c`` with ``γ_c(m) = Σ_i q_i(m)``.

    Args:
        counts: ``γ_c(m)``, ``(..., C, M)``.
        rows: ``N_c``, ``(..., C)``, positive.

    Returns:
        ``π_c``, ``(..., C, M)``; each row sums to one.
    """
    weights = counts / rows.unsqueeze(-1)
    # Rounding in the responsibilities must not accumulate over rounds.
    return weights / weights.sum(-1, keepdim=True)
