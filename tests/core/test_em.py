"""The equations of EM: exact arithmetic for the E-step, literal loops for the M-step and the server."""

from __future__ import annotations

from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedgmm.core.em import (
    add_likelihoods,
    average_learners,
    client_weights,
    federation_weights,
    over_learners,
    paper_moments,
    responsibilities,
    towards_independence,
    update_gaussians,
    within_clients,
)
from fedgmm.core.gaussians import Gaussians, Moments, gaussians, residuals, weighted_moments
from oracles import ALL_KINDS, KINDS, assert_close, random_covariances, reduce_covariances

mpmath.mp.dps = 60
M, D = 3, 4


# ---------------------------------------------------------------------- (E): responsibilities


def exact(log_joint):
    """Responsibilities and log-evidence with sixty digits, ``(N, M)`` and ``(N,)``."""
    q, evidence = np.empty(log_joint.shape), np.empty(len(log_joint))
    for i, row in enumerate(log_joint):
        terms = [
            mpmath.exp(mpmath.mpf(value)) if np.isfinite(value) else mpmath.mpf(0) for value in row
        ]
        total = mpmath.fsum(terms)
        q[i] = [float(term / total) for term in terms]
        evidence[i] = float(mpmath.log(total))
    return q, evidence


values = st.one_of(st.floats(-50, 50), st.floats(-1e5, 1e3), st.just(-np.inf))


@given(arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=values))
def test_responsibilities_are_bayes_rule(log_joint):
    log_joint[:, 0] = np.where(np.isneginf(log_joint[:, 0]), -3.0, log_joint[:, 0])
    q, evidence = responsibilities(torch.from_numpy(log_joint.copy()))
    expected_q, expected_evidence = exact(log_joint)
    np.testing.assert_allclose(q, expected_q, rtol=1e-10, atol=1e-300)
    np.testing.assert_allclose(evidence, expected_evidence, rtol=1e-14, atol=1e-14)


def test_moderate_values_equal_a_plain_softmax(rng):
    log_joint = rng.normal(size=(2, 3, 20, 4))
    q, evidence = responsibilities(torch.from_numpy(log_joint.copy()))
    plain = np.exp(log_joint)
    assert_close(q, plain / plain.sum(-1, keepdims=True), 1e-14)
    assert_close(evidence, np.log(plain.sum(-1)), 1e-14)


def test_underflow_everywhere_is_no_division_by_zero():
    q, evidence = responsibilities(torch.tensor([[-1e5, -1e5 - 1.0, -2e5]], dtype=torch.float64))
    sigmoid = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(q.numpy()[0], [sigmoid, 1 - sigmoid, 0.0], rtol=1e-12)
    np.testing.assert_allclose(evidence.item(), -1e5 + np.log1p(np.exp(-1.0)), rtol=1e-14)


def test_a_component_that_is_switched_off_gets_exactly_nothing():
    q, _ = responsibilities(torch.tensor([[-torch.inf, -1.0, -2.0]], dtype=torch.float64))
    assert q[0, 0].item() == 0.0
    assert abs(q.sum().item() - 1) < 1e-15


def test_the_input_is_not_changed(rng):
    log_joint = torch.from_numpy(rng.normal(size=(5, 3)))
    before = log_joint.clone()
    responsibilities(log_joint)
    assert torch.equal(log_joint, before)


def test_likelihoods_are_added_in_place_whatever_the_order_in_memory(rng):
    pi, x, y = rng.normal(size=(7, 2, 3)), rng.normal(size=(7, 2)), rng.normal(size=(7, 3))
    log_x, log_y = torch.from_numpy(x), torch.from_numpy(y)
    for joint in (
        torch.from_numpy(pi.copy()),
        torch.from_numpy(pi.copy().transpose(1, 2, 0)).permute(2, 0, 1),
    ):
        start = joint.clone()
        assert add_likelihoods(joint, None) is joint
        assert torch.equal(joint, start)
        add_likelihoods(joint, log_x)
        assert_close(joint, pi + x[:, :, None])
        add_likelihoods(joint, None, log_y)
        assert_close(joint, pi + x[:, :, None] + y[:, None, :])
        assert torch.equal(add_likelihoods(start, log_x, log_y), joint)


# ---------------------------------------------------------------------- (M): weights of a client


def test_client_weights_are_the_mean_responsibilities(rng):
    clients = [rng.dirichlet(np.ones(3), size=n) for n in (1, 7, 40)]
    counts = torch.from_numpy(np.stack([q.sum(0) for q in clients]))
    found = client_weights(counts, torch.tensor([1, 7, 40]))
    assert_close(found, np.stack([q.mean(0) for q in clients]), 1e-14)
    assert_close(found.sum(-1), np.ones(3), 1e-15)


def test_rounding_in_the_counts_is_taken_out():
    counts = torch.tensor([[3.0 + 1e-9, 1.0]], dtype=torch.float64)
    assert client_weights(counts, torch.tensor([4])).sum().item() == 1.0


def test_leading_dimensions(rng):
    counts = rng.uniform(1, 2, size=(2, 4, 3))
    found = client_weights(torch.from_numpy(counts), torch.from_numpy(counts.sum(-1)))
    assert_close(found, counts / counts.sum(-1, keepdims=True), 1e-14)


def test_learners_are_pulled_towards_independence_of_gaussians(rng):
    counts = torch.from_numpy(rng.uniform(1, 20, size=(5, 3, 2)))
    flat = counts.reshape(5, 6)
    assert_close(towards_independence(flat, 2, 0.0), flat, 1e-14)
    product = counts.sum(2, keepdim=True) * counts.sum(1, keepdim=True)
    product = (product / counts.sum((1, 2), keepdim=True)).reshape(5, 6)
    assert_close(towards_independence(flat, 2, 1e12), product, 1e-9)
    some = towards_independence(flat, 2, 7.0)
    gaussians = counts.sum(2)
    assert_close(some.reshape(5, 3, 2).sum(2), gaussians, 1e-12)  # these keep their rows
    shares = counts.sum(1) / counts.sum((1, 2))[:, None]
    expected = (counts + 7 * shares[:, None]) / (gaussians + 7)[..., None] * gaussians[..., None]
    assert_close(some, expected.reshape(5, 6), 1e-12)
    empty = torch.zeros(1, 6, dtype=torch.float64)
    assert bool(torch.isfinite(towards_independence(empty, 2, 0.0)).all())


# ---------------------------------------------------------------------- the server: μ and Σ from moments


def current(rng, kind, columns=D):
    covariances = random_covariances(rng, kind, M, columns)
    means = torch.from_numpy(rng.normal(size=(M, columns)))
    return gaussians(means, torch.from_numpy(covariances), kind)


def moments_of(x, q, shared):
    difference = residuals(torch.from_numpy(x), shared.means)
    return weighted_moments(difference, torch.from_numpy(q), shared.covariance_type)[0]


@pytest.mark.parametrize("offset", [0.0, 2.0**24])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_update_is_the_weighted_mean_and_covariance(rng, kind, offset):
    shared = current(rng, kind)
    shared = Gaussians(shared.means + offset, shared.covariances, shared.precisions_cholesky, kind)
    x = np.round(rng.normal(size=(200, 4)) @ rng.normal(size=(4, 4)) * 1024) / 1024
    q = rng.dirichlet(np.ones(M), size=200)
    new = update_gaussians(moments_of(x + offset, q, shared), shared, 1e-3)  # x + offset is exact

    counts = q.sum(0)
    expected_means = np.stack([np.average(x, axis=0, weights=q[:, m]) for m in range(M)])
    full = np.stack([np.cov(x, rowvar=False, aweights=q[:, m], ddof=0) for m in range(M)])
    assert_close(new.means - offset, expected_means, 1e-8)
    assert_close(new.covariances, reduce_covariances(full, counts, kind, 1e-3), 1e-8)
    assert new.covariance_type == kind


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_moments_may_be_taken_around_any_means(rng, kind):
    x, q = rng.normal(size=(100, 3)), rng.dirichlet(np.ones(M), size=100)
    results = []
    for _ in range(2):
        shared = current(rng, kind, 3)
        results.append(update_gaussians(moments_of(x, q, shared), shared, 0.0))
    assert_close(results[0].means, results[1].means, 1e-12)
    if kind != "identity":
        assert_close(results[0].covariances, results[1].covariances, 1e-12)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_component_without_rows_keeps_its_parameters(rng, kind):
    shared = current(rng, kind, 3)
    x = rng.normal(size=(50, 3))
    q = rng.dirichlet(np.ones(M), size=50)
    q[:, 1] = 0
    new = update_gaussians(moments_of(x, q, shared), shared, 1e-6)
    assert torch.equal(new.means[1], shared.means[1])
    assert not torch.equal(new.means[0], shared.means[0])
    if kind == "tied":  # shared by all: it is fitted to the rows of the living
        full = np.stack(
            [np.cov(x, rowvar=False, aweights=q[:, m] + 1e-300, ddof=0) for m in (0, 2)]
        )
        expected = reduce_covariances(full, q.sum(0)[[0, 2]], "tied", 1e-6)
        assert_close(new.covariances, expected)
    else:
        assert torch.equal(new.covariances[1], shared.covariances[1])
        assert_close(new.precisions_cholesky[1], shared.precisions_cholesky[1], 1e-12)


@pytest.mark.parametrize("kind", ["diag", "spherical"])
def test_rounding_cannot_make_a_variance_negative(kind):
    # Second moment a hair below the squared shift, as cancellation leaves it.
    shared = gaussians(
        torch.zeros(1, 1, dtype=torch.float64),
        torch.ones((1, 1) if kind == "diag" else 1, dtype=torch.float64),
        kind,
    )
    second = np.array([[12.0 - 1e-14]] if kind == "diag" else [12.0 - 1e-14])
    moments = Moments(*map(torch.from_numpy, (np.array([3.0]), np.array([[6.0]]), second)))
    assert update_gaussians(moments, shared, 1e-6).covariances.item() == 1e-6


# ---------------------------------------------------------------------- the server: sums of clients

SIZES = (1, 2, 17, 60)  # a client of one row has no scatter of its own


@pytest.fixture
def federation(rng):
    """Clients far from each other, and responsibilities of their rows."""
    clients = [rng.normal(size=(n, D)) + 3 * rng.normal(size=D) for n in SIZES]
    return clients, [rng.dirichlet(np.ones(M), size=n) for n in SIZES]


def parts_of(federation, shared):
    """The moments of each client around the shared means."""
    return [moments_of(x, q, shared) for x, q in zip(*federation, strict=True)]


def added(parts):
    """What the server has: sums over clients."""
    return Moments(
        sum(part.counts for part in parts),
        sum(part.first for part in parts),
        sum(part.second for part in parts),
    )


def around_own_means(part, kind):
    """What a client sends for the paper's equation: its scatter around its own means."""
    second = within_clients(part.second, part.counts[None], part.first[None], kind)
    return replace(part, second=second)


def papers_moments(parts, kind):
    return paper_moments(added([around_own_means(part, kind) for part in parts]), kind)


def paper_equations(clients, responsibilities):
    """μ_m, Σ_m and γ as Algorithm 2 writes them."""
    gammas, means, covariances = [], [], []
    for x, q in zip(clients, responsibilities, strict=True):
        gamma = np.array([sum(q[i, m] for i in range(len(x))) for m in range(M)])
        mu = np.array([sum(q[i, m] * x[i] for i in range(len(x))) / gamma[m] for m in range(M)])
        sigma = np.array(
            [
                sum(q[i, m] * np.outer(x[i] - mu[m], x[i] - mu[m]) for i in range(len(x)))
                / gamma[m]
                for m in range(M)
            ]
        )
        gammas.append(gamma)
        means.append(mu)
        covariances.append(sigma)
    gammas, means, covariances = map(np.stack, (gammas, means, covariances))
    total = gammas.sum(0)
    mu = np.einsum("cm,cmd->md", gammas, means) / total[:, None]
    sigma = np.einsum("cm,cmij->mij", gammas, covariances) / total[:, None, None]
    return mu, sigma, gammas, means


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_exact_aggregation_is_the_pooled_m_step(rng, federation, kind):
    shared = current(rng, kind)
    new = update_gaussians(added(parts_of(federation, shared)), shared, 1e-4)

    x, q = np.concatenate(federation[0]), np.concatenate(federation[1])
    means = np.stack([np.average(x, axis=0, weights=q[:, m]) for m in range(M)])
    full = np.stack([np.cov(x, rowvar=False, aweights=q[:, m], ddof=0) for m in range(M)])
    assert_close(new.means, means, 1e-12)
    assert_close(new.covariances, reduce_covariances(full, q.sum(0), kind, 1e-4), 1e-11)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_paper_aggregation_is_the_papers_equation(rng, federation, kind):
    shared = current(rng, kind)
    moments = papers_moments(parts_of(federation, shared), kind)
    new = update_gaussians(moments, shared, 1e-4)

    mu, sigma, gammas, _ = paper_equations(*federation)
    assert_close(new.means, mu, 1e-12)
    assert_close(new.covariances, reduce_covariances(sigma, gammas.sum(0), kind, 1e-4), 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_paper_drops_is_the_scatter_between_clients(rng, federation, kind):
    shared = current(rng, kind)
    parts = parts_of(federation, shared)
    exact = update_gaussians(added(parts), shared, 0.0)
    paper = update_gaussians(papers_moments(parts, kind), shared, 0.0)

    mu, _, gammas, client_means = paper_equations(*federation)
    away = client_means - mu
    scatter = np.einsum("cm,cmi,cmj->mij", gammas, away, away) / gammas.sum(0)[:, None, None]
    expected = reduce_covariances(scatter, gammas.sum(0), kind, 0.0)
    assert_close(exact.covariances - paper.covariances, expected, 1e-10)
    assert np.abs(expected).max() > 0.5  # these clients do differ


@pytest.mark.parametrize("kind", KINDS)
def test_one_client_makes_no_difference(rng, federation, kind):
    shared = current(rng, kind)
    one = [federation[0][-1]], [federation[1][-1]]
    parts = parts_of(one, shared)
    exact = update_gaussians(added(parts), shared, 0.0)
    paper = update_gaussians(papers_moments(parts, kind), shared, 0.0)
    assert_close(exact.covariances, paper.covariances, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_without_a_component_adds_nothing_to_it(rng, federation, kind):
    clients, responsibilities = federation
    responsibilities[2][:, 1] = 0.0
    shared = current(rng, kind)
    parts = parts_of(federation, shared)
    own = around_own_means(parts[2], kind)
    assert torch.isfinite(own.second).all()
    with_it = papers_moments(parts, kind)
    rest = [0, 1, 3]
    without = papers_moments([parts[c] for c in rest], kind)
    if kind != "tied":
        assert not own.second[1].any()
        assert_close(with_it.second[1], without.second[1], 1e-12)
    else:  # only the scatter of the other two components is in it
        alone = [clients[2]], [np.delete(responsibilities[2], 1, axis=1)]
        others = gaussians(shared.means[[0, 2]], shared.covariances, kind)
        (expected,) = (around_own_means(part, kind) for part in parts_of(alone, others))
        assert_close(own.second, expected.second, 1e-12)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_scatters_within_clients_may_be_taken_of_all_clients_at_once(rng, federation, kind):
    shared = current(rng, kind)
    parts = parts_of(federation, shared)
    counts = torch.stack([part.counts for part in parts])
    first = torch.stack([part.first for part in parts])
    together = within_clients(added(parts).second, counts, first, kind)
    apart = added([around_own_means(part, kind) for part in parts])
    assert_close(together, apart.second, 1e-12)


def test_federation_weights_are_the_rows_average_of_the_clients(rng):
    weights = rng.dirichlet(np.ones(M), size=len(SIZES))
    counts = torch.from_numpy(weights * np.array(SIZES)[:, None])
    found = federation_weights(counts.sum(0))
    assert_close(found, np.average(weights, axis=0, weights=SIZES), 1e-14)


# ---------------------------------------------------------------------- the server: θ


def test_learners_are_averaged_by_their_rows(rng):
    counts = rng.uniform(1, 9, size=(4, M))
    theta = {"w": rng.normal(size=(4, M, 2, 5)), "b": rng.normal(size=(4, M))}
    sums = {
        name: torch.from_numpy(np.einsum("cm,cm...->m...", counts, value))
        for name, value in theta.items()
    }
    old = {name: torch.zeros(value.shape[1:]) for name, value in theta.items()}
    found = average_learners(sums, torch.from_numpy(counts.sum(0)), old)
    for name, value in theta.items():
        for m in range(M):
            expected = np.average(value[:, m], axis=0, weights=counts[:, m])
            assert_close(found[name][m], expected, 1e-14)


@pytest.mark.parametrize("rows", [0.0, 1e-9])
def test_a_learner_without_rows_stays(rng, rows):
    old = {"w": torch.from_numpy(rng.normal(size=(2, 3))).float()}
    sums = {"w": torch.from_numpy(rng.normal(size=(2, 3))) * torch.tensor([[5.0], [rows]])}
    found = average_learners(sums, torch.tensor([5.0, rows], dtype=torch.float64), old)
    assert torch.equal(found["w"][1], old["w"][1].double())
    assert_close(found["w"][0], sums["w"][0] / 5.0, 1e-15)


@pytest.mark.parametrize("learners", [1, 2, 5])
def test_gaussians_see_the_sum_over_learners(rng, learners):
    q = rng.dirichlet(np.ones(M * learners), size=11)
    found = over_learners(torch.from_numpy(q), learners)
    assert_close(found, q.reshape(11, M, learners).sum(-1), 1e-14)
