"""What the model says of a row, equation (3) of the paper."""

from __future__ import annotations

from torch import Tensor

from fedgmm.core.gaussians import Gaussians, log_densities, residuals


def log_joint_components(x: Tensor, shared: Gaussians, log_pi: Tensor) -> Tensor:
    """``log π(m) + log N(x_i; μ_m, Σ_m)``.

    Args:
        x: rows, ``(..., N, d)``.
        shared: the Gaussians.
        log_pi: one set of weights ``(M,)`` or one a row ``(..., N, M)``.

    Returns:
        ``(..., N, M)``.
    """
    return log_densities(residuals(x, shared.means), shared) + log_pi
