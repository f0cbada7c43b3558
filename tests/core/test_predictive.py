"""Equation (3) against Bayes' rule by brute force, and a new client's weights against plain EM."""

from __future__ import annotations

from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from fedgmm.core.gaussians import gaussians
from fedgmm.core.moments import Scaling
from fedgmm.core.predictive import (
    NumberPredictions,
    log_class_probabilities,
    log_marginal,
    new_client_weights,
)
from fedgmm.data.synthetic import synthetic
from fedgmm.methods.base import Prediction
from fedgmm.model.model import FederatedModel
from fedgmm.model.predictions import probabilities
from fedgmm.nets.networks import Dense
from supervised import log_softmax

M1, M2, K = 3, 2, 4


def parts(rng, n=20, spread=3.0):
    """Weights, log-densities and log-probabilities of learners, of no special kind."""
    pi = rng.dirichlet(np.ones(M1 * M2), size=n).reshape(n, M1, M2)
    log_x = spread * rng.normal(size=(n, M1))
    log_y = log_softmax(spread * rng.normal(size=(n, M2, K)))
    return pi, log_x, log_y


def by_bayes(pi, log_x, log_y):
    """``P(y|x)`` and ``log P(x)`` with sixty digits, in probability space."""
    with mpmath.workdps(60):
        proba, evidence = [], []
        for w, lx, ly in zip(pi, log_x, log_y, strict=True):
            joint = [mpmath.mpf(0)] * K
            total = mpmath.mpf(0)
            for m1 in range(len(lx)):
                for m2 in range(len(ly)):
                    weight = mpmath.mpf(float(w[m1, m2])) * mpmath.exp(mpmath.mpf(float(lx[m1])))
                    total += weight
                    for k in range(K):
                        joint[k] += weight * mpmath.exp(mpmath.mpf(float(ly[m2, k])))
            proba.append([float(j / total) for j in joint])
            evidence.append(float(mpmath.log(total)))
    return np.array(proba), np.array(evidence)


@pytest.mark.parametrize("offset", [0.0, -900.0])
def test_class_probabilities_are_bayes_rule(rng, offset):
    pi, log_x, log_y = parts(rng)
    log_x = log_x + offset  # in 32 dimensions the densities themselves underflow
    expected, evidence = by_bayes(pi, log_x, log_y)
    tensors = [torch.from_numpy(a) for a in (np.log(pi), log_x, log_y)]
    actual = log_class_probabilities(*tensors)
    np.testing.assert_allclose(actual.exp(), expected, atol=1e-12)
    np.testing.assert_allclose(actual.exp().sum(-1), 1.0, atol=1e-12)
    np.testing.assert_allclose(log_marginal(*tensors[:2]), evidence, rtol=1e-13)


def test_the_weights_enter_as_logarithms(rng):
    """The published code adds π itself to the log-densities: odds of 98 to 1 become 2.6 to 1."""
    log_pi = torch.tensor([[[0.98, 0.0], [0.0, 0.02]]]).double().log().nan_to_num(neginf=-np.inf)
    log_y = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).double().clamp_min(1e-300).log()
    actual = log_class_probabilities(log_pi, torch.zeros(1, 2).double(), log_y).exp()
    np.testing.assert_allclose(actual[0], [0.98, 0.02], atol=1e-12)


def test_without_gaussians_the_weights_alone_mix(rng):
    pi, _, log_y = parts(rng)
    actual = log_class_probabilities(torch.from_numpy(np.log(pi)), None, torch.from_numpy(log_y))
    expected = np.einsum("nm,nmk->nk", pi.sum(1), np.exp(log_y))
    np.testing.assert_allclose(actual.exp(), expected, atol=1e-12)


def test_a_weight_of_zero_switches_its_pair_off(rng):
    pi, log_x, log_y = parts(rng)
    pi[:, 1] = 0.0
    with np.errstate(divide="ignore"):
        tensors = [torch.from_numpy(a) for a in (np.log(pi), log_x, log_y)]
    expected, evidence = by_bayes(pi[:, [0, 2]], log_x[:, [0, 2]], log_y)
    np.testing.assert_allclose(log_class_probabilities(*tensors).exp(), expected, atol=1e-12)
    np.testing.assert_allclose(log_marginal(*tensors[:2]), evidence, rtol=1e-12)


# ---------------------------------------------------------------------- the truth plugged in


@pytest.mark.parametrize("standardised", [False, True])
def test_with_the_true_parameters_a_client_predicts_by_bayes_rule(standardised):
    """The paper's generator, its own Gaussians and labels: the model must be the generator."""
    truth = synthetic(5, 40, dimensions=4, seed=3)
    (components,) = truth.components
    data = truth.dataset
    # labels are steps: linear learners so steep that every row is far from the edge
    steep = 1e7
    weight = np.stack([np.zeros_like(components.directions), steep * components.directions], 1)
    bias = weight[:, 1] * components.means
    params = {
        "0.weight": torch.from_numpy(weight),
        "0.bias": torch.from_numpy(np.stack([np.zeros(3), -bias.sum(-1)], 1)),
    }
    scaling, means, covariances = None, components.means, np.stack([np.eye(4)] * 3)
    if standardised:  # the same densities in other coordinates
        from fedgmm.core.moments import Scaling

        scale, centre = np.array([0.5, 2.0, 1.0, 3.0]), np.array([1.0, -1.0, 0.0, 0.5])
        scaling = Scaling(torch.from_numpy(centre), torch.from_numpy(scale))
        means = (means - centre) / scale
        covariances = covariances / np.outer(scale, scale)
        params["0.bias"] = params["0.bias"] + params["0.weight"] @ torch.from_numpy(centre)
        params["0.weight"] = params["0.weight"] * torch.from_numpy(scale)
    # component m of the generator is the pair (m, m) of the model
    pi = np.zeros((5, 3, 3))
    pi[:, range(3), range(3)] = truth.client_weights
    model = FederatedModel(
        "fedgmm",
        Prediction(
            Dense(4, 2),
            params,
            gaussians(torch.from_numpy(means), torch.from_numpy(covariances), "full"),
            torch.from_numpy(pi.reshape(5, 9)),
            torch.from_numpy(pi.mean(0).reshape(9)),
        ),
        list(data.names),
        data.classes,
        (4,),
        scaling,
    )
    x, codes = data.test.inputs.numpy(), data.test.codes.numpy()

    # Bayes' rule in probability space: Σ π N 1{label} / Σ π N
    difference = x[:, None].astype(float) - components.means
    density = np.exp(-0.5 * (difference**2).sum(-1)) / (2 * np.pi) ** 2
    joint = truth.client_weights[codes] * density
    positive = (difference * components.directions).sum(-1) > 0
    expected = (joint * positive).sum(-1) / joint.sum(-1)

    actual = model.predict_proba(x, codes)
    np.testing.assert_allclose(actual[:, 1], expected, atol=1e-10)
    np.testing.assert_allclose(actual, truth.bayes_probabilities(data.test), atol=1e-10)
    np.testing.assert_allclose(model.score_samples(x, codes), np.log(joint.sum(-1)), atol=1e-10)
    right = model.evaluate("test", data).mean_accuracy
    assert right == pytest.approx(truth.bayes_accuracy())


# ---------------------------------------------------------------------- weights of a new client


def plain_em(likelihood, weights, rounds):
    """Rows one at a time, in probability space."""
    history = []
    for _ in range(rounds):
        gamma, total = np.zeros_like(weights), 0.0
        for row in likelihood:
            evidence = (weights * row).sum()
            gamma += weights * row / evidence
            total += np.log(evidence)
        history.append(total / len(likelihood))
        weights = gamma / len(likelihood)
    return weights, history


def test_new_weights_are_those_of_plain_em(rng):
    log_likelihood = rng.normal(size=(50, 4)) * 2
    start = rng.dirichlet(np.ones(4))
    expected, bounds = plain_em(np.exp(log_likelihood), start, 25)
    actual, history = new_client_weights(
        torch.from_numpy(log_likelihood), torch.from_numpy(start), max_rounds=25, tol=-1.0
    )
    np.testing.assert_allclose(actual, expected, atol=1e-12)
    np.testing.assert_allclose(history, bounds, atol=1e-12)


@given(
    n=st.integers(1, 20),
    m=st.integers(1, 5),
    spread=st.sampled_from([0.1, 5.0, 300.0, 1e5]),
    seed=st.integers(0, 50),
    off=st.booleans(),
)
def test_the_likelihood_never_falls_and_zeros_stay(n, m, spread, seed, off):
    rng = np.random.default_rng(seed)
    log_likelihood = torch.from_numpy(spread * rng.normal(size=(n, m)))
    start = rng.dirichlet(np.ones(m))
    if off and m > 1:
        start[0] = 0.0
        start /= start.sum()
    weights, history = new_client_weights(log_likelihood, torch.from_numpy(start))
    assert np.isfinite(history).all()
    assert (np.diff(history) >= -1e-10 * (1 + np.abs(history[:-1]))).all()
    np.testing.assert_allclose(weights.sum(), 1.0, atol=1e-12)
    assert (weights >= 0).all()
    if off and m > 1:
        assert weights[0] == 0.0


def test_a_row_that_only_a_switched_off_component_explains_still_counts():
    """Its likelihood under the others underflows beside the best one, which may not have it."""
    log_likelihood = torch.tensor([[0.0, -2000.0, -3000.0], [0.0, -1.0, -1.0]]).double()
    start = torch.tensor([0.0, 0.5, 0.5]).double()
    weights, history = new_client_weights(log_likelihood, start, max_rounds=1)
    np.testing.assert_allclose(weights, [0.0, 0.75, 0.25], atol=1e-12)
    np.testing.assert_allclose(history, [(-2000.0 - 1.0 + np.log(0.5)) / 2])


def test_it_stops_when_nothing_is_gained(rng):
    log_likelihood = torch.from_numpy(rng.normal(size=(30, 1)))
    _, history = new_client_weights(log_likelihood, torch.ones(1).double())
    assert len(history) == 2


@given(
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 3.0, 100.0, 1e6]),
    sure=st.sampled_from([0.1, 3.0, 30.0, 800.0]),
    labels=st.booleans(),
)
def test_probabilities_are_in_the_unit_interval_and_sum_to_one(seed, spread, sure, labels):
    rng = np.random.default_rng(seed)
    log_pi = np.log(rng.dirichlet(np.full(M1 * M2, 0.3), size=300).reshape(-1, M1, M2) + 1e-300)
    log_x, log_y = spread * rng.normal(size=(300, M1)), sure * rng.normal(size=(300, M2, K))
    ratios = torch.from_numpy(5 * rng.normal(size=(300, M1, M2, K))) if labels else None
    log_proba = log_class_probabilities(
        *(torch.from_numpy(a) for a in (log_pi, log_x, log_softmax(log_y))), ratios
    ).numpy()
    proba = probabilities(log_proba)
    assert log_proba.max() <= 0.0
    assert proba.min() >= 0.0
    assert proba.max() <= 1.0
    np.testing.assert_allclose(proba.sum(-1), 1.0, rtol=4 * np.finfo(float).eps)


# ---------------------------------------------------------------------- numbers


def test_numbers_are_a_mixture_of_normals(rng):
    n, m = 5, 3
    weights = rng.dirichlet(np.ones(m), size=n)
    means, deviations = 3 * rng.normal(size=(n, m)), 0.1 + rng.random((n, m))
    found = NumberPredictions(
        *map(torch.from_numpy, (np.log(weights), means, deviations**2))
    ).unscaled(Scaling(torch.tensor(5.0), torch.tensor(2.0)))
    means, deviations = 2 * means + 5, 2 * deviations
    which = np.array([rng.choice(m, size=200_000, p=own) for own in weights])
    draws = np.take_along_axis(means, which, 1) + np.take_along_axis(
        deviations, which, 1
    ) * rng.normal(size=which.shape)
    np.testing.assert_allclose(found.mean, draws.mean(1), atol=0.1)
    np.testing.assert_allclose(found.variance, draws.var(1), rtol=0.05)
    y = rng.normal(size=n)
    density = (weights * norm.pdf(y[:, None], means, deviations)).sum(1)
    np.testing.assert_allclose(found.log_density(torch.from_numpy(y)), np.log(density))
    for share in (0.001, 0.05, 0.5, 0.95):
        quantile = found.quantile(share).numpy()[:, None]
        below = (weights * norm.cdf(quantile, means, deviations)).sum(1)
        np.testing.assert_allclose(below, share, rtol=1e-9)
    below = (weights * norm.cdf(y[:, None], means, deviations)).sum(1)
    np.testing.assert_allclose(found.normal_scores(torch.from_numpy(y)), norm.ppf(below), rtol=1e-6)


def test_intervals_are_calibrated_by_the_scores_of_held_out_rows():
    one = NumberPredictions(torch.zeros(1, 1), torch.zeros(1, 1).double(), torch.ones(1, 1))
    held_out = torch.tensor([*np.linspace(-3.0, 2.9, 19)], dtype=torch.float64)
    wanted = np.sort(np.abs(held_out.numpy()))[18 - 1]  # ⌈20 · 0.9⌉
    low, high = (float(end) for end in replace(one, held_out=held_out).interval(0.9))
    assert (-low, high) == pytest.approx((wanted, wanted), rel=1e-6)
    for few in (None, held_out[:8]):  # eight rows cannot vouch for 90 %
        assert float(replace(one, held_out=few).interval(0.9)[1]) == pytest.approx(1.6449, abs=1e-4)
