"""The server's equations against literal loops over clients, components and rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.core.em import aggregate_gaussians, aggregate_weights, within_client_moments
from fedgmm.core.gaussians import Moments, gaussians, residuals, weighted_moments
from oracles import ALL_KINDS, KINDS, assert_close, random_covariances, reduce_covariances

M, D = 3, 4
SIZES = (1, 2, 17, 60)  # a client of one row has no scatter of its own


@pytest.fixture
def federation(rng):
    """Clients far from each other, and responsibilities of their rows."""
    clients = [rng.normal(size=(n, D)) + 3 * rng.normal(size=D) for n in SIZES]
    return clients, [rng.dirichlet(np.ones(M), size=n) for n in SIZES]


def current(rng, kind):
    covariances = random_covariances(rng, kind, M, D)
    return gaussians(torch.from_numpy(rng.normal(size=(M, D))), torch.from_numpy(covariances), kind)


def sums(federation, shared):
    """Moments summed over clients, and every client's counts and first moments."""
    parts = [
        weighted_moments(
            residuals(torch.from_numpy(x), shared.means),
            torch.from_numpy(q),
            shared.covariance_type,
        )[0]
        for x, q in zip(*federation, strict=True)
    ]
    total = Moments(
        sum(part.counts for part in parts),
        sum(part.first for part in parts),
        sum(part.second for part in parts),
    )
    counts = torch.stack([part.counts for part in parts])
    return total, counts, torch.stack([part.first for part in parts])


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
    moments, *_ = sums(federation, shared)
    new = aggregate_gaussians(moments, shared, 1e-4)

    x, q = np.concatenate(federation[0]), np.concatenate(federation[1])
    means = np.stack([np.average(x, axis=0, weights=q[:, m]) for m in range(M)])
    full = np.stack([np.cov(x, rowvar=False, aweights=q[:, m], ddof=0) for m in range(M)])
    assert_close(new.means, means, 1e-12)
    assert_close(new.covariances, reduce_covariances(full, q.sum(0), kind, 1e-4), 1e-11)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_paper_aggregation_is_the_papers_equation(rng, federation, kind):
    shared = current(rng, kind)
    moments = within_client_moments(*sums(federation, shared), kind)
    new = aggregate_gaussians(moments, shared, 1e-4)

    mu, sigma, gammas, _ = paper_equations(*federation)
    assert_close(new.means, mu, 1e-12)
    assert_close(new.covariances, reduce_covariances(sigma, gammas.sum(0), kind, 1e-4), 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_paper_drops_is_the_scatter_between_clients(rng, federation, kind):
    shared = current(rng, kind)
    total, counts, first = sums(federation, shared)
    exact = aggregate_gaussians(total, shared, 0.0)
    paper = aggregate_gaussians(within_client_moments(total, counts, first, kind), shared, 0.0)

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
    total, counts, first = sums(one, shared)
    exact = aggregate_gaussians(total, shared, 0.0)
    paper = aggregate_gaussians(within_client_moments(total, counts, first, kind), shared, 0.0)
    assert_close(exact.covariances, paper.covariances, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_without_a_component_adds_nothing_to_it(rng, federation, kind):
    clients, responsibilities = federation
    responsibilities[2][:, 1] = 0.0
    shared = current(rng, kind)
    total, counts, first = sums(federation, shared)
    with_it = within_client_moments(total, counts, first, kind)
    assert torch.isfinite(with_it.second).all()
    rest = [0, 1, 3]
    without = within_client_moments(
        *sums(([clients[c] for c in rest], [responsibilities[c] for c in rest]), shared), kind
    )
    if kind != "tied":
        assert_close(with_it.second[1], without.second[1], 1e-12)


def test_federation_weights_are_the_rows_average_of_the_clients(rng):
    weights = rng.dirichlet(np.ones(M), size=len(SIZES))
    counts = torch.from_numpy(weights * np.array(SIZES)[:, None])
    assert_close(aggregate_weights(counts), np.average(weights, axis=0, weights=SIZES), 1e-14)
