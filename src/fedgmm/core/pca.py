"""Principal components from sums over rows: exact, and additive over clients.

Clients first agree on a centre (their common mean, from counts and sums) and then send their moments
around it, so that nothing cancels. Shapes: ``n`` rows, ``d`` columns, ``k`` components.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgmm.core.moments import scatter_around_means
from fedgmm.support.checks import check_integer
from fedgmm.support.linalg import matmul, weighted_gram
from fedgmm.support.scratch import empty_beside, touched
from fedgmm.wording import counted

_BLOCK_ROWS = 4096
# Entries of a unit vector count as equally large up to this difference.
_TIE = 1e-7


@dataclass(frozen=True)
class FeatureMoments:
    """Sums over rows around a centre that all clients share, in float64."""

    count: float  # ``n``; not whole if rows have weights
    first: Tensor  # ``Σ_i (x_i - centre)``, ``(d,)``
    second: Tensor  # ``Σ_i (x_i - centre)(x_i - centre)ᵀ``, ``(d, d)``
    centre: Tensor  # ``(d,)``

    def __add__(self, other: FeatureMoments) -> FeatureMoments:
        """Return the moments of both together."""
        if not torch.equal(self.centre, other.centre):
            raise ValueError("Moments can only be added when they were taken around one centre.")
        first, second = self.first + other.first, self.second + other.second
        return FeatureMoments(self.count + other.count, first, second, self.centre)

    @property
    def mean(self) -> Tensor:
        """Mean of the rows, ``(d,)``."""
        return self.centre + self.first / self.count

    @property
    def covariance(self) -> Tensor:
        """Covariance of the rows, divided by ``n - 1``, ``(d, d)``."""
        count = torch.tensor([float(self.count)], dtype=torch.float64, device=self.first.device)
        scatter = scatter_around_means(count, self.first[None], self.second[None], "full")[0]
        return (scatter + scatter.mT) / (2 * (self.count - 1))


def moments_of(rows: Tensor, centre: Tensor, columns: Sequence[int] = ()) -> FeatureMoments:
    """Return moments of rows ``(n, d)`` around ``centre`` ``(d,)``; there may be no rows.

    With ``columns`` the rows may have further columns, which are left out.
    """
    centre, d = centre.to(rows.device, torch.float64), len(centre)
    first = torch.zeros(d, dtype=torch.float64, device=rows.device)
    second = torch.zeros(d, d, dtype=torch.float64, device=rows.device)
    for block in torch.split(rows, _BLOCK_ROWS):
        own = block[:, list(columns)] if columns else block
        shifted = own.double() - centre
        touched(block.nbytes)
        first += shifted.sum(0)
        second += weighted_gram(shifted, shifted)
    return FeatureMoments(len(rows), first, second, centre)


@dataclass(frozen=True)
class PCA:
    """The directions in which rows vary most, in float64."""

    mean: Tensor  # ``(d,)``
    # orthonormal rows, ``(k, d)``, by falling variance; see :meth:`within` for columns that are kept
    components: Tensor
    variances: Tensor  # along them, ``(k,)``; one for a column that is kept

    def apply(self, x: Tensor, whiten: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return coordinates ``(n, k)`` of rows ``(n, d)``, with variance one if whitened."""
        mean, directions = self.mean.to(x.device), self.components.to(x.device).mT
        if whiten:
            # Dividing by the rounding errors of a direction without spread would send a new row outside
            # the old rows' span to infinity, so the largest deviation is used instead.
            largest = self.variances.max()
            empty = self.variances <= largest * len(self.mean) * torch.finfo(torch.float64).eps
            deviations = torch.where(empty, largest, self.variances).sqrt()
            directions = directions / torch.where(deviations > 0, deviations, 1.0).to(x.device)
        out = empty_beside(x, (len(x), directions.shape[1]), dtype)
        for into, block in zip(
            torch.split(out, _BLOCK_ROWS), torch.split(x, _BLOCK_ROWS), strict=True
        ):
            into.copy_(matmul(block.double() - mean, directions))
            touched(into.nbytes + block.nbytes)
        return out

    def within(self, block: Sequence[int], columns: int) -> PCA:
        """Return the map of rows ``(n, columns)`` to the coordinates of a block and all other columns.

        Args:
            block: the ``d`` columns that these components reduce.
            columns: number of all columns. Those outside of the block follow the coordinates, unchanged.
        """
        others = torch.ones(columns, dtype=torch.bool)
        others[list(block)] = False
        kept = torch.eye(columns, dtype=torch.float64)[others]
        mean = torch.zeros(columns, dtype=torch.float64)
        mean[~others] = self.mean
        components = torch.zeros(len(self.components), columns, dtype=torch.float64)
        components[:, ~others] = self.components
        variances = torch.cat([self.variances, torch.ones(len(kept), dtype=torch.float64)])
        return PCA(mean, torch.cat([components, kept]), variances)


def fit_pca(moments: FeatureMoments, k: int) -> PCA:
    """Return the first ``k`` principal components of the rows behind the moments.

    The sign of each is such that its largest entry (the first of several) is positive, so that equal
    moments give equal components.
    """
    check_integer("components", k, 1)
    d = len(moments.first)
    if moments.count < 2:
        raise ValueError(f"Principal components need at least 2 rows, got {moments.count}.")
    if k > min(d, moments.count):
        raise ValueError(
            f"components={k} is more than {counted(int(moments.count), 'row')} of "
            f"{counted(d, 'column')} can have; use at most {min(d, int(moments.count))}."
        )
    mean, covariance = moments.mean.cpu(), moments.covariance.cpu()
    if not bool(torch.isfinite(covariance).all()):
        raise ValueError("The moments contain NaN or infinity; look for such values in the rows.")
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    variances = eigenvalues.flip(0)[:k].clamp_min(0.0)
    components = vectors.mT.flip(0)[:k]
    sizes = components.abs()
    largest = (sizes >= sizes.amax(1, keepdim=True) - _TIE).int().argmax(1)  # the first of these
    signs = components.gather(1, largest[:, None]).sign()
    return PCA(mean, (components * signs).contiguous(), variances.contiguous())
