"""Linear algebra on small tensors, shared by all equations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_SPLIT_FROM = 16  # columns; below, one product costs less than two smaller ones


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for matrices or stacks of matrices.

    On the CPU the product goes through NumPy, because its BLAS runs stacks of narrow matrices (tens of
    columns) up to 2.5 times faster than the one inside torch. Products with gradients stay with torch.
    """
    differentiated = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if a.device.type == "cpu" and not differentiated:
        return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))
    return a @ b


def take(values: Tensor, index: Tensor, axis: int = 0) -> Tensor:
    """Return slices of ``values`` along an axis, for a flat index; by NumPy on the CPU.

    NumPy takes a third to two thirds of torch's time if ``values`` is contiguous.
    """
    if values.device.type == "cpu" and values.is_contiguous():
        return torch.from_numpy(np.take(values.numpy(), index.numpy(), axis=axis))
    return values.index_select(axis, index)


def exp(values: Tensor) -> Tensor:
    """Return ``eˣ``, elementwise; by NumPy on the CPU, in half of torch's time."""
    if values.device.type != "cpu" or (torch.is_grad_enabled() and values.requires_grad):
        return torch.exp(values)
    return torch.from_numpy(np.exp(values.numpy()))


def matmul_upper(a: Tensor, upper: Tensor) -> Tensor:
    """Return ``a @ upper`` for upper triangular ``(..., d, d)``, without the quarter that is zero."""
    d = upper.shape[-1]
    if a.device.type != "cpu" or d < _SPLIT_FROM:
        return matmul(a, upper)
    half, left, right = d // 2, a.numpy(), upper.numpy()
    out = np.empty(left.shape, dtype=left.dtype)
    np.matmul(left[..., :half], right[..., :half, :half], out=out[..., :half])
    np.matmul(left, right[..., half:], out=out[..., half:])
    return torch.from_numpy(out)


def weighted_gram(weighted: Tensor, rows: Tensor) -> Tensor:
    """Return ``Σ_i (w_i r_i) r_iᵀ``, ``(..., d, d)``, from ``w r`` and ``r``, both ``(..., N, d)``.

    The result is symmetric, so one quarter is copied from another.
    """
    d = rows.shape[-1]
    if rows.device.type != "cpu" or d < _SPLIT_FROM:
        return matmul(weighted.mT, rows)
    half, left, right = d // 2, weighted.mT.numpy(), rows.numpy()
    out = np.empty((*left.shape[:-1], d), dtype=right.dtype)
    np.matmul(left[..., :half, :], right[..., :half], out=out[..., :half, :half])
    np.matmul(left, right[..., half:], out=out[..., half:])
    out[..., half:, :half] = np.swapaxes(out[..., :half, half:], -1, -2)
    return torch.from_numpy(out)


def solve(matrices: Tensor, right: Tensor) -> Tensor:
    """Return ``A⁻¹ b`` for matrices ``(K, p, p)`` and vectors ``(K, p)``; by NumPy on the CPU."""
    if matrices.device.type == "cpu":
        try:
            return torch.from_numpy(
                np.linalg.solve(matrices.numpy(), right.numpy()[..., None])[..., 0]
            )
        except np.linalg.LinAlgError:  # one singular matrix must not spoil the others
            return torch.linalg.solve_ex(matrices, right[..., None]).result[..., 0]  # type: ignore[no-any-return]
    return torch.linalg.solve(matrices, right)  # type: ignore[no-any-return]


def cholesky_or_repair(matrices: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Return matrices ``(K, d, d)``, their lower Cholesky factors, and the indices that were repaired.

    A matrix that is not positive definite is repaired. It counts as singular if a pivot of its
    *correlation* matrix is within rounding of zero, so columns of very different scales are not
    repaired.
    """
    d = matrices.shape[-1]
    floor = 10.0 * d * torch.finfo(matrices.dtype).eps
    factors, info = torch.linalg.cholesky_ex(matrices)
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    pivots = factors.diagonal(dim1=-2, dim2=-1).square()
    healthy = (info == 0) & (pivots > floor * diagonal).all(-1)
    repaired = torch.nonzero(~healthy).flatten().tolist()
    if repaired:
        matrices, factors = matrices.clone(), factors.clone()
        for k in repaired:
            matrices[k] = _nearest_well_conditioned(matrices[k], floor)
            factors[k] = torch.linalg.cholesky(matrices[k])
    return matrices, factors, repaired


def _nearest_well_conditioned(matrix: Tensor, floor: float) -> Tensor:
    """Raise the eigenvalues of the correlation matrix of ``matrix`` ``(d, d)`` to ``10 * floor``.

    The floor is relative to the largest eigenvalue, because a variance that consists of rounding errors
    makes "correlations" far above one.
    """
    variances = matrix.diagonal()
    largest = variances.max().clamp_min(torch.finfo(matrix.dtype).tiny ** 0.5)
    # A variance of exactly zero has no scale, so it gets one from the largest variance.
    variances = torch.where(variances > 0, variances, largest * torch.finfo(matrix.dtype).eps)
    scale = variances.sqrt()
    correlation = matrix / scale[:, None] / scale
    correlation = (correlation + correlation.mT) / 2
    correlation.diagonal().fill_(1.0)
    eigenvalues, vectors = torch.linalg.eigh(correlation)
    eigenvalues = eigenvalues.clamp_min(10.0 * floor * float(eigenvalues[-1].clamp_min(1.0)))
    repaired_matrix = (vectors * eigenvalues) @ vectors.mT * scale[:, None] * scale
    symmetric: Tensor = (repaired_matrix + repaired_matrix.mT) / 2
    return symmetric
