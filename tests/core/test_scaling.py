"""Standardising columns."""

from __future__ import annotations

import numpy as np
import torch

from fedgmm.core.scaling import scaling_of


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
