from __future__ import annotations

import math
import os

import numpy as np
import pytest
from scipy import stats

from fedgmm.privacy.fixed_point import from_fixed, to_fixed
from fedgmm.privacy.noise import (
    discrete_gaussian,
    grid_sensitivity,
    noise_elements,
    noisy,
    share_of,
)


def seeded(seed):
    return np.random.default_rng(seed).bytes


def test_noise_is_a_discrete_gaussian():
    sigma = 1234.5
    drawn = discrete_gaussian(sigma, 200_000, seeded(0))
    # a continuous normal rounded to whole numbers is the same up to exp(-2π²σ²)
    edges = np.floor(sigma * np.linspace(-3, 3, 61)) + 0.5
    cells = np.diff(stats.norm.cdf(edges, scale=sigma), prepend=0, append=1)
    cells[0], cells[-1] = (
        stats.norm.cdf(edges[0], scale=sigma),
        stats.norm.sf(edges[-1], scale=sigma),
    )
    seen = np.bincount(np.searchsorted(edges, drawn), minlength=len(edges) + 1)
    assert stats.chisquare(seen, cells * len(drawn)).pvalue > 1e-3
    assert drawn.dtype == np.int64


def test_low_bits_are_uniform():
    # gaps of floating-point noise would show here
    drawn = discrete_gaussian(2.0**30, 50_000, seeded(1))
    seen = np.bincount(drawn & 255, minlength=256)
    assert stats.chisquare(seen).pvalue > 1e-3


def test_small_and_large_values_have_the_right_probabilities():
    drawn = discrete_gaussian(1000.0, 200_000, seeded(2))
    assert abs((drawn > 0).mean() - (drawn < 0).mean()) < 0.01
    tail = stats.norm.sf(3) * 2 * len(drawn)
    assert abs((np.abs(drawn) > 3000).sum() - tail) < 5 * math.sqrt(tail)


def test_noise_is_never_seeded():
    np.random.seed(0)  # noqa: NPY002
    first = noise_elements(8, 1.0)
    np.random.seed(0)  # noqa: NPY002
    assert not np.array_equal(first, noise_elements(8, 1.0))


def test_noise_is_on_the_grid():
    total = np.array([1e6, -3.25, 0.1])
    value = noisy(total, 2.0)
    np.testing.assert_array_equal(from_fixed(to_fixed(value)), value)
    assert np.abs(value - total).max() < 2.0 * 9


def test_parts_of_sites_make_the_whole_noise_without_the_tolerated_ones():
    sites, tolerated, sigma = 10, 3, 0.01
    part = share_of(sigma, sites, tolerated)
    parts = [noise_elements(20_000, part, seeded(10 + site)) for site in range(sites - tolerated)]
    total = from_fixed(np.sum(parts, axis=0, dtype=np.uint64))
    assert stats.kstest(total / sigma, "norm").pvalue > 1e-3
    assert share_of(2.0, 4) == 1.0
    with pytest.raises(ValueError, match="tolerated"):
        share_of(1.0, 3, 3)


def test_a_deviation_of_few_steps_is_refused():
    with pytest.raises(ValueError, match="grid"):
        discrete_gaussian(10.0, 1)


def test_rounding_adds_to_the_sensitivity():
    assert grid_sensitivity(1.0, 0) == 1.0
    a, b = np.full(100, 0.4999), np.full(100, 0.5001)
    step = 2.0**-24
    moved = from_fixed(to_fixed(a * step)) - from_fixed(to_fixed(b * step))
    assert np.linalg.norm(moved) <= grid_sensitivity(float(np.linalg.norm(a - b)) * step, 100)


def test_the_source_can_be_replaced():
    def counting(count):
        counting.bytes += count
        return os.urandom(count)

    counting.bytes = 0
    discrete_gaussian(5000.0, 10, counting)
    assert counting.bytes > 80
