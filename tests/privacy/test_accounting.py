"""The accountant, against the definition, dp-accounting and known cases."""

from __future__ import annotations

import math
import sys

import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.stats import norm

from fedgmm.privacy.accounting import (
    Release,
    compose,
    delta_of,
    epsilon_of,
    mu_of,
    spent,
)


@pytest.mark.parametrize(("mu", "epsilon"), [(0.3, 0.5), (1.0, 0.0), (2.0, 4.0)])
def test_delta_is_the_likelihood_ratio_tests_excess(mu, epsilon):
    cut = epsilon / mu - mu / 2  # the test that rejects for likelihood ratios above e^ε
    excess = norm.sf(cut) - math.exp(epsilon) * norm.sf(cut + mu)
    assert delta_of(mu, epsilon) == pytest.approx(excess, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "releases"), [(0.1, 1), (1.0, 1), (4.0, 22), (8.0, 22)])
def test_closed_form_agrees_with_privacy_loss_distributions(epsilon, releases):
    mu = mu_of(epsilon, 1e-5) / math.sqrt(releases)
    loss = from_gaussian_mechanism(1 / mu).self_compose(releases)
    assert loss.get_epsilon_for_delta(1e-5) == pytest.approx(epsilon, rel=1e-3)
    assert spent([Release(mu, times=releases)], 1e-5) == pytest.approx(epsilon, rel=1e-9)


def test_unequal_releases_agree_with_privacy_loss_distributions():
    mus = [0.05, 0.3, 0.2, 0.6]
    loss = from_gaussian_mechanism(1 / mus[0])
    for mu in mus[1:]:
        loss = loss.compose(from_gaussian_mechanism(1 / mu))
    found = epsilon_of(compose(mus), 1e-6)
    assert found == pytest.approx(loss.get_epsilon_for_delta(1e-6), rel=1e-3)
    assert spent(map(Release, mus), 1e-6) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 50.0, 5000.0])
def test_inverses_never_claim_too_much_privacy(epsilon, delta):
    mu = mu_of(epsilon, delta)
    assert delta_of(mu, epsilon) <= delta
    assert delta_of(mu * (1 + 1e-6), epsilon) > delta
    back = epsilon_of(mu, delta)
    assert back == pytest.approx(epsilon, rel=1e-6)
    assert delta_of(mu, back) <= delta


def test_nothing_costs_nothing():
    assert epsilon_of(0.0, 1e-5) == spent([], 1e-5) == compose([]) == 0.0
    assert epsilon_of(1e-9, 1e-5) == 0.0  # δ alone covers it


def test_sampling_costs_less_and_agrees_with_dp_accounting():
    releases = [Release(0.5, 0.05, 10), Release(0.1)]
    loss = from_gaussian_mechanism(2.0, sampling_prob=0.05).self_compose(10)
    loss = loss.compose(from_gaussian_mechanism(10.0))
    found = spent(releases, 1e-5)
    assert found == pytest.approx(loss.get_epsilon_for_delta(1e-5), rel=1e-3)
    assert found < 0.5 * spent([Release(0.5, times=10), Release(0.1)], 1e-5)


@pytest.mark.parametrize(
    ("function", "values", "word"),
    [
        (mu_of, (0.0, 1e-5), "epsilon"),
        (mu_of, (1.0, 0.0), "delta"),
        (mu_of, (1.0, 1.0), "delta"),
        (epsilon_of, (-1.0, 1e-5), "mu"),
        (epsilon_of, (math.inf, 1e-5), "mu"),
        (Release, (0.0,), "mu"),
        (Release, (1.0, 1.5), "sampling"),
        (Release, (1.0, 1.0, 0), "times"),
    ],
)
def test_impossible_values_are_refused(function, values, word):
    with pytest.raises(ValueError, match=word):
        function(*values)


def test_sampling_without_the_extra_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    assert spent([Release(0.2)], 1e-5) > 0
    with pytest.raises(ImportError, match="privacy"):
        spent([Release(0.2, 0.5)], 1e-5)
