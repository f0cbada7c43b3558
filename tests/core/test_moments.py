"""Pooled moments and standardised columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.core.moments import inverse_counts, outer, pool, scaling_of, scatter_around_means
from oracles import ALL_KINDS, assert_close, second_moments_of_kind


def test_columns_get_mean_zero_and_variance_one(rng):
    x = torch.from_numpy(rng.normal(size=(200, 4)) * [1e-3, 1.0, 50.0, 1e6] + [5.0, 0.0, -7.0, 1e8])
    scaling = scaling_of(x.mean(0), x.var(0, unbiased=False))
    z = scaling.apply(x, torch.float64)
    torch.testing.assert_close(z.mean(0), torch.zeros(4, dtype=z.dtype), atol=1e-7, rtol=0)
    torch.testing.assert_close(z.std(0, unbiased=False), torch.ones(4, dtype=z.dtype))
    assert scaling.apply(x, torch.float32).dtype == torch.float32


def test_the_volume_is_the_jacobian(rng):
    scale = rng.uniform(0.1, 9.0, size=3)
    scaling = scaling_of(torch.zeros(3, dtype=torch.float64), torch.from_numpy(scale**2))
    np.testing.assert_allclose(scaling.log_volume, np.log(np.linalg.det(np.diag(scale))))


def test_a_constant_column_is_only_shifted():
    mean = torch.tensor([1e8, 3.0], dtype=torch.float64)
    scaling = scaling_of(mean, torch.tensor([1e-12, 0.0], dtype=torch.float64))
    z = scaling.apply(mean[None], torch.float64)
    assert torch.equal(z, torch.zeros(1, 2, dtype=torch.float64))
    assert torch.equal(scaling.scale, torch.ones(2, dtype=torch.float64))


def test_an_offset_costs_no_precision_in_float32():
    x = torch.tensor([[1e6 + 0.25], [1e6 + 0.5]], dtype=torch.float64)
    scaling = scaling_of(x.mean(0), x.var(0, unbiased=False))
    np.testing.assert_allclose(scaling.apply(x, torch.float32)[:, 0], [-1.0, 1.0], rtol=1e-6)


def test_bytes_are_scaled_as_numbers():
    scaling = scaling_of(torch.tensor([100.0]).double(), torch.tensor([400.0]).double())
    z = scaling.apply(torch.tensor([[80], [140]], dtype=torch.uint8), torch.float32)
    np.testing.assert_allclose(z[:, 0], [-1.0, 2.0])


def test_pooled_moments_are_those_of_all_rows(rng):
    parts = [rng.normal(1e6, 2.0, size=(rows, 3)) for rows in (5, 0, 17, 1)]
    counts = np.array([[float(len(part))] for part in parts])
    means = np.stack([part.mean(0) if len(part) else np.zeros(3) for part in parts])
    squares = np.stack(
        [((part - mean) ** 2).sum(0) for part, mean in zip(parts, means, strict=True)]
    )
    rows = np.concatenate(parts)
    found = pool(counts, means, squares)
    np.testing.assert_allclose(found.counts, len(rows))
    np.testing.assert_allclose(found.means, rows.mean(0), rtol=1e-15)
    np.testing.assert_allclose(found.squares, ((rows - rows.mean(0)) ** 2).sum(0), rtol=1e-9)


def test_pooling_in_steps_keeps_digits_that_rounding_would_lose(rng):
    rows = 1e15 + rng.integers(0, 3, size=(1000, 1)).astype(np.float64)
    total = pool(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros((1, 1)))
    for row in rows[:, None]:
        parts = [total, (np.ones(1), row[0], np.zeros(1), np.zeros(1))]
        total = pool(*(np.stack([part[k] for part in parts]) for k in range(4)))
    exact = (rows - 1e15).mean()
    assert (total.means[0] - 1e15) + total.rests[0] == pytest.approx(exact, rel=1e-12)
    assert total.squares[0] == pytest.approx(((rows - 1e15 - exact) ** 2).sum(), rel=1e-9)


def test_scatter_around_means(rng):
    x, q = rng.normal(size=(40, 3)), rng.dirichlet([1, 1], size=40)
    counts, first = q.sum(0), np.einsum("nm,nd->md", q, x)
    second = np.einsum("nm,nd,ne->mde", q, x, x)
    centred = x[:, None] - first / counts[:, None]
    expected = np.einsum("nm,nmd,nme->mde", q, centred, centred)
    found = scatter_around_means(*(torch.from_numpy(v) for v in (counts, first, second)), "full")
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("leading", [(), (4,), (2, 3)])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_outer(rng, kind, leading):
    v, w = rng.normal(size=(*leading, 3, 4)), rng.normal(size=(*leading, 3))
    full = np.einsum("...m,...mi,...mj->...mij", w, v, v)
    found = outer(torch.from_numpy(v), torch.from_numpy(w), kind)
    assert_close(found, second_moments_of_kind(full, kind), 1e-12)


def test_where_there_are_no_rows_nothing_is_divided_by_them():
    assert inverse_counts(torch.tensor([4.0, 0.0, 0.5])).tolist() == [0.25, 0.0, 2.0]
