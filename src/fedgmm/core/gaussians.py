"""The shared Gaussians: densities and weighted moments.

:func:`~fedgmm.core.em.update_gaussians` turns moments into ``μ`` and ``Σ``. Shapes: ``N`` rows, ``d``
columns, ``M`` components; ``residuals``, ``log_densities`` and ``weighted_moments`` take any leading
dimensions. Covariances have the shapes of scikit-learn:

=============  =================  ==============================================
type           ``covariances``    shared between components or columns
=============  =================  ==============================================
``full``       ``(M, d, d)``      nothing
``tied``       ``(d, d)``         one matrix for all components
``diag``       ``(M, d)``         nothing; off-diagonal entries are zero
``spherical``  ``(M,)``           one variance for all columns
``identity``   ``(M,)``           fixed at one, the setting of the paper's theorem
=============  =================  ==============================================

Means and covariances are float64. Rows may be float32: only the difference to a mean is rounded, so
an offset of the data does not cost precision.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.support.linalg import cholesky_or_repair, matmul_upper, weighted_gram

CovarianceType = Literal["full", "tied", "diag", "spherical", "identity"]
COVARIANCE_TYPES: tuple[str, ...] = get_args(CovarianceType)

_FARTHEST = 1e150  # deviations; its square is still a float64


class CovarianceRepairWarning(UserWarning):
    """A covariance was not positive definite, so eigenvalues of its correlations were raised."""


@dataclass(frozen=True)
class Gaussians:
    """``M`` Gaussians in ``d`` dimensions."""

    means: Tensor  # ``μ``, ``(M, d)``
    covariances: Tensor  # ``Σ``, shaped by ``covariance_type`` (see the module's table)
    # ``W`` with ``W Wᵀ = Σ⁻¹``, shaped like ``covariances``; the whitened residual of a row is
    # ``(x - μ) W``. For diag and spherical it is one over the deviation.
    precisions_cholesky: Tensor
    covariance_type: CovarianceType  # one of ``COVARIANCE_TYPES``

    @cached_property
    def narrow_whiteners(self) -> Tensor:
        """``W`` in float32, clamped, because infinity times zero would be NaN."""
        widest = torch.finfo(torch.float32).max ** 0.5
        return self.precisions_cholesky.clamp(-widest, widest).float()

    @cached_property
    def log_determinants(self) -> Tensor:
        """``log |W_m| = -½ log |Σ_m|``: ``(M,)``, or ``(1,)`` for tied."""
        whiteners = self.precisions_cholesky
        match self.covariance_type:
            case "full" | "tied":
                return whiteners.diagonal(dim1=-2, dim2=-1).log().sum(-1).reshape(-1)
            case "diag":
                return whiteners.log().sum(-1)
            case _:
                return self.means.shape[-1] * whiteners.log()


@dataclass(frozen=True)
class Moments:
    """Weighted sums over rows, around the means of the last round.

    They add up over rows and over clients. Differences to a nearby mean are small, so no digits are
    lost when large numbers are subtracted.
    """

    counts: Tensor  # ``Σ_i q_i(m)``, ``(..., M)``
    first: Tensor  # ``Σ_i q_i(m) (x_i - μ_m)``, ``(..., M, d)``
    # ``Σ_i q_i(m) (x_i - μ_m)(x_i - μ_m)ᵀ``: ``(..., M, d, d)`` for full, summed over components
    # ``(..., d, d)`` for tied, its diagonal ``(..., M, d)`` for diag, the trace ``(..., M)`` for
    # spherical and identity
    second: Tensor


def gaussians(means: Tensor, covariances: Tensor, covariance_type: CovarianceType) -> Gaussians:
    """Return Gaussians from means ``(M, d)`` and covariances, which are repaired if necessary."""
    if covariance_type in ("full", "tied"):
        stack = covariances if covariance_type == "full" else covariances[None]
        stack, factors, repaired = cholesky_or_repair(stack)
        # W = L⁻ᵀ: one triangular solve per round, so that every row costs one product.
        identity = torch.eye(stack.shape[-1], dtype=stack.dtype, device=stack.device)
        whiteners = torch.linalg.solve_triangular(factors, identity, upper=False).mT.contiguous()
        if covariance_type == "tied":
            stack, whiteners = stack[0], whiteners[0]
    else:
        limits = torch.finfo(covariances.dtype)
        bad = ~(covariances > limits.tiny)
        floor = covariances.max().clamp_min(limits.tiny**0.5) * limits.eps
        stack = torch.where(bad, floor, covariances) if bool(bad.any()) else covariances
        repaired = torch.nonzero(bad.reshape(len(bad), -1).any(-1)).flatten().tolist()
        whiteners = stack.rsqrt()
    for component in repaired:
        tied = covariance_type == "tied"
        owner = "shared by all components" if tied else f"of component {component}"
        warnings.warn(
            f"The covariance {owner} was not positive definite and was repaired; the component "
            "may sit on too few distinct rows. Fewer components or a larger reg_covar avoid this.",
            CovarianceRepairWarning,
            stacklevel=3,
        )
    return Gaussians(means, stack, whiteners, covariance_type)


def residuals(x: Tensor, means: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x_i - μ_m`` for rows ``(..., N, d)`` and means ``(M, d)``: ``(..., M, N, d)``."""
    if x.dtype == dtype != means.dtype:
        # The mean has two parts: numbers of similar size subtract exactly, then the small rest.
        coarse = means.to(dtype)
        rest = (means - coarse).to(dtype)
        return (x.unsqueeze(-3) - coarse.unsqueeze(-2)).sub_(rest.unsqueeze(-2))
    difference = x.unsqueeze(-3) - means.unsqueeze(-2)
    return difference if dtype is None else difference.to(dtype)


def log_normal(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return ``log N(y; μ, σ²)`` of single numbers; the shapes are broadcast."""
    return -0.5 * ((y - mean).square() / variance + torch.log(2.0 * math.pi * variance))


def log_densities(difference: Tensor, shared: Gaussians) -> Tensor:
    """Return ``log N(x_i; μ_m, Σ_m)``, ``(..., N, M)`` float64, from ``x_i - μ_m``, ``(..., M, N, d)``."""
    d = difference.shape[-1]
    narrow = difference.dtype == torch.float32
    whiteners = shared.narrow_whiteners if narrow else shared.precisions_cholesky
    # ‖(x - μ) W‖² = (x - μ)ᵀ Σ⁻¹ (x - μ)
    match shared.covariance_type:
        case "full" | "tied":
            norms = torch.linalg.vector_norm(matmul_upper(difference, whiteners), dim=-1)
        case "diag":
            norms = torch.linalg.vector_norm(difference * whiteners.unsqueeze(-2), dim=-1)
        case _:
            norms = torch.linalg.vector_norm(difference, dim=-1) * whiteners.unsqueeze(-1)
    # A log density stays finite however far the row is, because -inf for all components has no softmax.
    distances = norms.to(torch.float64).clamp_max_(_FARTHEST).square_()
    # log N = -½ (‖(x - μ) W‖² + d log 2π) + log |W|
    constants = shared.log_determinants - 0.5 * d * math.log(2.0 * math.pi)
    log_density: Tensor = distances.mul_(-0.5).add_(constants.unsqueeze(-1)).mT
    return log_density


def weighted_moments(
    difference: Tensor, weights: Tensor, covariance_type: CovarianceType
) -> tuple[Moments, Tensor]:
    """Return sums over rows of ``q``, ``q (x - μ)`` and ``q (x - μ)(x - μ)ᵀ``, in float64.

    From ``x_i - μ_m``, ``(..., M, N, d)``, and ``q_i(m)``, ``(..., N, M)``. The second value is the
    weighted residuals ``q_i(m) (x_i - μ_m)``, ``(..., M, N, d)``.
    """
    weighted = difference * weights.mT.unsqueeze(-1).to(difference.dtype)
    match covariance_type:
        case "full":
            second = weighted_gram(weighted, difference)
        case "tied":
            second = weighted_gram(weighted, difference).sum(-3)
        case "diag":
            second = (weighted * difference).sum(-2)
        case _:
            second = (weighted * difference).sum((-2, -1))
    return Moments(weights.sum(-2), weighted.sum(-2).double(), second.double()), weighted


def occupied(counts: Tensor) -> Tensor:
    """Return which components have rows, ``(M,)``: more than rounding errors could leave."""
    return counts > counts.sum() * torch.finfo(torch.float64).eps


def covariance_shape(kind: CovarianceType, components: int, columns: int) -> tuple[int, ...]:
    """Return the shape of covariances and of second moments, see the module's table."""
    m, d = components, columns
    return {"full": (m, d, d), "tied": (d, d), "diag": (m, d)}.get(kind, (m,))


def covariance_parameters(covariance_type: CovarianceType, components: int, columns: int) -> int:
    """Return the number of free parameters of the covariances."""
    m, d = components, columns
    triangle = d * (d + 1) // 2
    free = {"full": m * triangle, "tied": triangle, "diag": m * d, "spherical": m, "identity": 0}
    return free[covariance_type]


def log_densities_without(log_x: Tensor, shared: Gaussians, counts: Tensor, q: Tensor) -> Tensor:
    """Return ``log N(x_i; μ_m, Σ_m)`` of Gaussians from which row ``i`` itself was taken out, ``(n, M)``.

    Rows look too familiar to Gaussians that were fitted to them. With ``n' = n - q`` and
    ``D = (x - μ)ᵀ Σ⁻¹ (x - μ)``, removing the share ``q`` of a row from ``μ`` and ``Σ`` gives::

        D' = n/n' · D / (1 - q D / n')        log |Σ'| = log |Σ| + d log (n/n') + log (1 - q D / n')

    This is exact for full covariances, and slightly too large a correction for the others.
    ``log_x`` and the responsibilities ``q`` are ``(n, M)``; ``counts`` are the rows that each
    Gaussian was fitted to, ``(M,)``.
    """
    d = shared.means.shape[-1]
    peak = shared.log_determinants - d / 2 * math.log(2 * math.pi)  # the log-density at the mean
    distance = 2 * (peak - log_x)
    rest = (counts - q).clamp_min(1.0)
    kept = (1 - q * distance / rest).clamp_min(0.05)  # a row is never all of a Gaussian's width
    distance = counts / rest * distance / kept
    return peak - (d * torch.log(counts / rest) + kept.log() + distance) / 2


def inverse_of_precisions(
    precisions: NDArray[np.float64], covariance_type: str
) -> NDArray[np.float64]:
    """Return the covariances of precisions, which must be positive definite; the shape is kept."""
    if covariance_type in ("diag", "spherical"):
        if (precisions <= 0).any():
            kind = f"'{covariance_type} precision'"
            raise ValueError(f"{kind} should be positive; check precisions_init.")
        return 1.0 / precisions
    needs = f"'{covariance_type} precision' should be symmetric, positive-definite"
    if not np.allclose(precisions, np.swapaxes(precisions, -1, -2)):
        raise ValueError(f"{needs}, but precisions_init is not symmetric.")
    try:
        np.linalg.cholesky(precisions)
    except np.linalg.LinAlgError:
        raise ValueError(f"{needs}, but precisions_init is not positive definite.") from None
    return np.asarray(np.linalg.inv(precisions))
