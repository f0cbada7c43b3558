"""Membership inference on models whose leak is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from fedgmm.privacy.attacks import attack_all, likelihood_ratios, random_halves, success


def leaky(rng, models, rows, leak, spread=1.0):
    """Statistics that are higher by ``leak`` for members; rows differ in how well they fit."""
    members = random_halves(models, rows, 0)
    easy = rng.normal(0, 5, rows)
    return easy + leak * members + spread * rng.normal(size=(models, rows)), members


def test_every_row_is_in_half_of_the_models():
    halves = random_halves(8, 50, 1)
    assert (halves.sum(0) == 4).all()
    assert 0 < halves[0].sum() < 50


def test_nothing_is_found_without_a_leak(rng):
    for found in attack_all(*leaky(rng, 8, 2000, 0.0)).values():
        assert found.auc == pytest.approx(0.5, abs=0.02)
        assert found.found == pytest.approx(0.01, abs=0.01)


def test_the_likelihood_ratio_reaches_the_best_possible_test(rng):
    """With many shadow models it is the test of Neyman and Pearson, with power in closed form."""
    found = attack_all(*leaky(rng, 40, 3000, 2.0))
    ratio, threshold = found["likelihood ratio"], found["threshold"]
    assert ratio.auc == pytest.approx(norm.cdf(2.0 / np.sqrt(2)), abs=0.02)
    assert ratio.found == pytest.approx(norm.sf(norm.isf(0.01) - 2.0), abs=0.05)
    assert threshold.auc < 0.65  # easy rows look like members


def test_measures_of_known_scores():
    members = np.repeat([True, False], 1000)
    perfect = success(members.astype(float), members)
    assert (perfect.auc, perfect.found) == (1.0, 1.0)
    order = np.tile(np.arange(1000.0), 2)
    assert success(order, members).found == pytest.approx(0.01)
    assert success(order, members).auc == pytest.approx(0.5)


def test_too_few_shadow_models_are_refused(rng):
    statistics, members = leaky(rng, 3, 10, 1.0)
    with pytest.raises(ValueError, match="shadow"):
        likelihood_ratios(statistics[0], statistics[1:], members[1:])
