"""The client's M-step, equation (M) of the paper: mixture weights in closed form.

The Gaussians' moments are :func:`fedgmm.core.gaussians.weighted_moments`.
"""

from __future__ import annotations

from torch import Tensor


def towards_independence(counts: Tensor, learners: int, rows: float) -> Tensor:
    """Counts ``γ_c(m1, m2)`` with the learners of a Gaussian pulled towards those of the client.

    ``π_c(m2|m1) = (γ_c(m1, m2) + a π_c(m2)) / (γ_c(m1) + a)``: a Gaussian that owns few of a client's
    rows says little about learners. With ``a = 0`` nothing changes; with ``a → ∞`` learners do not
    depend on Gaussians, and for labels that is FedEM.

    Args:
        counts: ``γ_c(m1, m2)``, flattened, ``(..., C, M1 · M2)``.
        learners: ``M2``.
        rows: ``a``, how many rows the client's own shares count for.

    Returns:
        Counts of the same shape and with the same sums over learners.
    """
    joint = counts.reshape(*counts.shape[:-1], -1, learners)
    of_gaussians = joint.sum(-1, keepdim=True)
    of_learners = joint.sum(-2, keepdim=True)
    shares = of_learners / of_learners.sum(-1, keepdim=True).clamp_min(1e-300)
    pulled = (joint + rows * shares) * of_gaussians / (of_gaussians + rows).clamp_min(1e-300)
    return pulled.reshape(counts.shape)


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
