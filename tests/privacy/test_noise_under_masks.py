"""Noise that the sites share out under masks, with as many dropouts as are tolerated."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kstest

from fedgmm.privacy.fixed_point import from_fixed, to_fixed
from fedgmm.privacy.noise import noise_elements, share_of
from masked_rounds import Federation

SITES, TOLERATED, SIGMA, NUMBERS = 6, 2, 3.0, 6_000


@pytest.fixture(scope="module")
def masked_noise():
    """Noise of the opened total, by number of dropouts and by the sites' share."""

    def draw(dropped, share):
        rows = np.random.default_rng(0).normal(0, 50, (SITES, NUMBERS))
        noised = np.stack([to_fixed(one) + noise_elements(NUMBERS, share) for one in rows])
        federation = Federation(SITES).join()
        server = federation.masked(federation.shared(), noised, dropped=range(dropped))
        return from_fixed(federation.opened(server)) - rows[dropped:].sum(0)

    return draw


@pytest.mark.parametrize("dropped", range(TOLERATED + 1))
def test_the_total_has_the_declared_noise(masked_noise, dropped):
    """With all tolerated dropouts it is exact, with fewer there is a little more than needed."""
    noise = masked_noise(dropped, share_of(SIGMA, SITES, TOLERATED))
    expected = SIGMA * np.sqrt((SITES - dropped) / (SITES - TOLERATED))
    assert kstest(noise, "norm", (0.0, expected)).pvalue > 1e-6
    assert noise.std() > 0.95 * SIGMA


def test_shares_that_count_on_every_site_are_caught(masked_noise):
    noise = masked_noise(TOLERATED, share_of(SIGMA, SITES, 0))
    assert kstest(noise, "norm", (0.0, SIGMA)).pvalue < 1e-9
    assert noise.std() < 0.95 * SIGMA
