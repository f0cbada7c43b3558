"""Means, variances and covariances of columns, pooled from the sums of clients.

The update of the mixture's own ``μ_m`` and ``Σ_m`` is :func:`fedgmm.core.em.update_gaussians`.

Moments are taken around a centre near the data, so that nothing cancels, and they add up over rows,
over batches and over clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.support.scratch import blocks_in, empty_beside

FloatArray = NDArray[np.float64]


class Pooled(NamedTuple):
    """Moments of rows that several parts hold together, each ``(d,)``.

    Attributes:
        counts: ``n``, the number of rows.
        means: the mean, rounded to float64.
        squares: ``Σ (x - mean)²``.
        rests: the part of the mean that rounding left out; it matters for numbers far from zero,
            whose means differ in their last digits only.
    """

    counts: FloatArray
    means: FloatArray
    squares: FloatArray
    rests: FloatArray


def pool(
    counts: FloatArray, means: FloatArray, squares: FloatArray, rests: FloatArray | None = None
) -> Pooled:
    """Return the moments of all rows from the moments of each part (Chan, Golub and LeVeque 1979).

    With ``n = Σ_c n_c``: ``mean = Σ_c n_c mean_c / n`` and
    ``Σ (x - mean)² = Σ_c [squares_c + n_c (mean_c - mean)²]``. Means enter as distances from the
    first non-empty part, so none of their digits is lost. All arrays are ``(C, d)``; counts may be
    ``(C, 1)``, a part without rows does not count, and ``rests`` of ``None`` are zero.
    """
    counts = np.broadcast_to(counts, means.shape)
    present = counts > 0
    first = present.argmax(0)[None]
    start = np.take_along_axis(means, first, 0)
    gaps = np.where(present, (means - start) + (0.0 if rests is None else rests), 0.0)
    total = counts.sum(0)
    gap = (counts * gaps).sum(0) / np.maximum(total, 1.0)
    mean = start[0] + gap
    between = np.where(present, squares + counts * (gaps - gap) ** 2, 0.0)
    return Pooled(total, mean, between.sum(0), gap - (mean - start[0]))


def outer(vectors: Tensor, weights: Tensor, covariance_type: str) -> Tensor:
    """Return ``w_m v_m v_mᵀ`` in the shape of a second moment, for ``(..., M, d)`` and ``(..., M)``.

    ``"full"`` gives ``(..., M, d, d)``, ``"tied"`` their sum ``(..., d, d)``, ``"diag"`` the
    diagonals ``(..., M, d)``, any other type the traces ``(..., M)``.
    """
    weighted = vectors * weights.unsqueeze(-1)
    match covariance_type:
        case "full":
            return weighted.unsqueeze(-1) * vectors.unsqueeze(-2)
        case "tied":
            return weighted.mT @ vectors
        case "diag":
            return weighted * vectors
        case _:
            return (weighted * vectors).sum(-1)


def inverse_counts(counts: Tensor) -> Tensor:
    """Return ``1 / n``, and zero where there are no rows."""
    return torch.where(counts > 0, 1.0 / counts.clamp_min(1e-300), 0.0)


def scatter_around_means(
    counts: Tensor, first: Tensor, second: Tensor, covariance_type: str
) -> Tensor:
    """Return ``Σ q (x - x̄)(x - x̄)ᵀ`` from moments around another centre.

    ``Σ q (x - x̄)(x - x̄)ᵀ = Σ q (x - c)(x - c)ᵀ - n δ δᵀ`` with ``δ = Σ q (x - c) / n``.
    ``counts`` are ``n``, ``(..., M)``, ``first`` is ``(..., M, d)``, and ``second`` has the shape
    of :func:`outer`.
    """
    return second - outer(first, inverse_counts(counts), covariance_type)


@dataclass(frozen=True)
class Scaling:
    """``z = (x - mean) / scale``, column by column; ``(d,)`` float64 each, the scale is positive."""

    mean: Tensor
    scale: Tensor

    def apply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return scaled rows, ``(..., d)``."""
        return ((x.double() - self.mean.to(x.device)) / self.scale.to(x.device)).to(dtype)

    @property
    def log_volume(self) -> float:
        """``Σ log scale``: the log density of ``x`` is that of ``z`` less this number."""
        return float(self.scale.log().sum())


def scaled(x: Tensor, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    """Return ``scaling.apply(x, dtype)`` in blocks, in a scratch file if ``x`` is in one."""
    if x.device.type != "cpu":
        return scaling.apply(x, dtype)
    out = empty_beside(x, tuple(x.shape), dtype)
    for into, block in zip(blocks_in(out), blocks_in(x), strict=True):
        into.copy_(scaling.apply(block, dtype))
    return out


def scaling_of(mean: Tensor, variance: Tensor) -> Scaling:
    """Return the scaling to mean zero and variance one; a constant column is only shifted."""
    constant = variance <= 1e-24 * (1.0 + mean.square())
    return Scaling(mean, torch.where(constant, 1.0, variance.clamp_min(1e-300).sqrt()))
