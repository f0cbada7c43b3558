from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.support.linalg import cholesky_or_repair, matmul, matmul_upper, solve, weighted_gram
from oracles import assert_close

COLUMNS = [1, 2, 3, 15, 16, 17, 31, 48]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", COLUMNS)
def test_matmul_upper_is_the_plain_product(rng, columns, dtype):
    a = torch.from_numpy(rng.normal(size=(2, 3, 11, columns))).to(dtype)
    for shape in [(columns, columns), (3, columns, columns), (2, 3, columns, columns)]:
        upper = torch.from_numpy(np.triu(rng.normal(size=shape))).to(dtype)
        found = matmul_upper(a, upper)
        assert found.dtype == dtype
        assert_close(found, a.double() @ upper.double(), 1e-13 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", COLUMNS)
def test_weighted_gram_is_the_plain_product_and_symmetric(rng, columns, dtype):
    rows = torch.from_numpy(rng.normal(size=(2, 3, 11, columns))).to(dtype)
    weights = torch.from_numpy(rng.uniform(size=(2, 3, 11, 1))).to(dtype)
    found = weighted_gram(rows * weights, rows)
    expected = (rows.double() * weights.double()).mT @ rows.double()
    assert found.dtype == dtype
    assert_close(found, expected, 1e-13 if dtype == torch.float64 else 1e-5)


def test_matmul_broadcasts(rng):
    a, b = rng.normal(size=(4, 1, 5, 3)), rng.normal(size=(2, 3, 6))
    assert_close(matmul(torch.from_numpy(a), torch.from_numpy(b)), a @ b, 1e-14)


def test_products_take_strided_views(rng):
    wide = torch.from_numpy(rng.normal(size=(20, 40)))
    view = wide[::2, ::2].mT.contiguous().mT  # column-major
    upper = torch.triu(torch.from_numpy(rng.normal(size=(20, 20))))
    assert_close(matmul_upper(view, upper), view @ upper, 1e-13)
    assert_close(weighted_gram(view, view), view.mT @ view, 1e-13)


def test_cholesky_leaves_healthy_matrices_alone(rng):
    factors = rng.normal(size=(3, 5, 5))
    matrices = torch.from_numpy(factors @ np.swapaxes(factors, 1, 2) + np.eye(5))
    same, lower, repaired = cholesky_or_repair(matrices)
    assert repaired == []
    assert same is matrices
    assert_close(lower @ lower.mT, matrices, 1e-13)


def test_cholesky_repairs_only_the_sick_and_not_in_place(rng):
    matrices = torch.eye(4).double().repeat(3, 1, 1)
    matrices[1] = torch.ones(4, 4)  # rank one
    before = matrices.clone()
    mended, lower, repaired = cholesky_or_repair(matrices)
    assert repaired == [1]
    assert torch.equal(matrices, before)
    assert torch.equal(mended[[0, 2]], before[[0, 2]])
    assert_close(lower @ lower.mT, mended, 1e-13)
    assert_close(mended[1], before[1], 1e-12)


def test_a_negative_variance_is_repaired():
    matrix = torch.diag(torch.tensor([1.0, -1e-17, 2.0])).double()[None]
    mended, lower, repaired = cholesky_or_repair(matrix)
    assert repaired == [0]
    assert torch.isfinite(lower).all()
    assert_close(mended, matrix, 1e-12)


def test_a_singular_system_does_not_spoil_the_others():
    matrices = torch.stack([torch.eye(2), torch.zeros(2, 2)]).double()
    found = solve(matrices, torch.ones(2, 2).double())
    torch.testing.assert_close(found[0], torch.ones(2).double())
    assert not torch.isfinite(found[1]).all()
