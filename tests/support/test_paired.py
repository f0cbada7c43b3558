"""Intervals and paired tests, against SciPy and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedgmm.support.paired import over_resamples, over_splits


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


def test_resamples_give_percentiles(rng):
    values = rng.normal(1.0, 1.0, size=3999)
    found = over_resamples(1.1, np.append(values, np.nan))
    assert found.mean == 1.1
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    assert found.p_value == pytest.approx(2 * (1 + (values <= 0).sum()) / 4000)
    assert found.within_noise
    assert not over_resamples(5.0, values + 4).within_noise
    assert over_resamples(0.0, np.zeros(9)).p_value == 1.0
    assert over_resamples(0.3, np.full(9, np.nan)).within_noise
