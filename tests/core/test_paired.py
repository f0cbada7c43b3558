"""Intervals and paired tests, against SciPy and against a plain bootstrap over rows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedgmm.core.paired import over_rows, over_splits


def test_independent_splits_give_the_t_test(rng):
    values = rng.normal(0.4, 1.0, size=6)
    found, expected = over_splits(values), stats.ttest_1samp(values, 0.0)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    assert found.within_noise == (expected.pvalue > 0.05)


def test_overlapping_splits_widen_the_interval(rng):
    values = rng.normal(0.4, 1.0, size=5)
    plain, corrected = over_splits(values), over_splits(values, 1 / 3)
    assert corrected.mean == plain.mean
    width = (corrected.high - corrected.low) / (plain.high - plain.low)
    assert width == pytest.approx(np.sqrt((1 / 5 + 1 / 3) / (1 / 5)))
    assert corrected.p_value > plain.p_value


def test_equal_values_have_no_spread():
    assert over_splits(np.zeros(3)).within_noise
    assert not over_splits(np.full(3, 0.5)).within_noise
    assert over_splits(np.array([0.5])).within_noise  # one split says nothing


def test_rows_are_drawn_within_their_clients(rng):
    clients = np.repeat([3, 5, 9], [20, 50, 7])
    values = rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.6, 0.3], size=77)
    found = over_rows(values, clients)
    own = [values[clients == c] for c in (3, 5, 9)]
    assert found.mean == pytest.approx(np.mean([v.mean() for v in own]))
    plain = [np.mean([rng.choice(v, len(v)).mean() for v in own]) for _ in range(4000)]
    np.testing.assert_allclose(
        [found.low, found.high], np.quantile(plain, [0.025, 0.975]), atol=0.03
    )


def test_rows_that_agree_are_a_tie_and_the_test_keeps_its_size(rng):
    clients = np.arange(200) % 4
    assert over_rows(np.zeros(200), clients).within_noise
    false = [
        not over_rows(rng.choice([-1.0, 0, 1], p=[0.15, 0.7, 0.15], size=200), clients).within_noise
        for _ in range(200)
    ]
    assert np.mean(false) < 0.1
    better = rng.choice([-1.0, 0, 1], p=[0.02, 0.78, 0.2], size=200)
    assert over_rows(better, clients).p_value < 0.01
