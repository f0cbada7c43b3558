"""The start, and one round in one process against a loop over clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from fedgmm.core.gaussians import gaussians
from fedgmm.core.sums import Total
from fedgmm.data.federated import client_rows
from fedgmm.methods.centroids import local_centroids
from fedgmm.methods.gmm import FederatedGMM, GivenStart, MixtureShared, overall_gaussian
from oracles import (
    ALL_KINDS,
    as_dict,
    assert_close,
    blobs,
    looped_em,
    ragged_ids,
    random_covariances,
)


def rows_of(clients):
    """Rows from ``{client: rows}``."""
    return client_rows(
        list(clients.values()),
        np.repeat(np.arange(len(clients)), [len(x) for x in clients.values()]),
        clients,
    )


def sorted_rows(points):
    return points[np.lexsort(np.round(points, 6).T)]


# ---------------------------------------------------------------------- local centroids


@given(st.lists(st.integers(1, 15), min_size=1, max_size=8), st.integers(1, 6), st.integers(0, 999))
def test_no_raw_row_is_sent(sizes, clusters, seed):
    rng = np.random.default_rng(seed)
    clients = {f"c{k}": rng.normal(size=(n, 3)) for k, n in enumerate(sizes)}
    sent = local_centroids(rows_of(clients), clusters, seed)
    everything = np.concatenate(list(clients.values()))
    assert len(sent.points) == len(sent.counts)
    assert (sent.counts >= 2).all()
    assert sent.counts.sum() <= sum(n for n in sizes if n > 1)
    if len(sent.points):
        assert cdist(sent.points, everything).min() > 1e-9
    assert len(sent.points) <= sum(min(clusters, n // 2) for n in sizes)


def test_a_centroid_is_the_mean_of_a_clients_own_rows(rng):
    # Two far-apart heaps in every client, at places of its own.
    clients, expected = {}, {}
    for k in range(5):
        heaps = [
            rng.normal(size=(n, 2)) + np.array([1000 * k, 100 * i]) for i, n in ((0, 4), (1, 7))
        ]
        clients[k] = rng.permutation(np.concatenate(heaps))
        expected |= {tuple(np.round(heap.mean(0), 6)): len(heap) for heap in heaps}
    sent = local_centroids(rows_of(clients), 2, seed=0)
    found = {tuple(np.round(p, 6)): n for p, n in zip(sent.points, sent.counts, strict=True)}
    assert found == expected
    assert sent.counts.sum() == sum(map(len, clients.values()))


def test_an_outlier_stays_at_home(rng):
    crowd = rng.normal(size=(20, 2))
    sent = local_centroids(rows_of({"a": np.vstack([crowd, [[1e6, 1e6]]])}), 2, seed=1)
    assert sent.counts.tolist() == [20.0]
    assert_close(sent.points[0], crowd.mean(0), 1e-10)


def test_clients_of_one_row_send_nothing(rng):
    sent = local_centroids(rows_of({k: rng.normal(size=(1, 3)) for k in range(9)}), 3, seed=0)
    assert sent.points.shape == (0, 3)
    mixed = {k: rng.normal(size=(1, 3)) for k in range(9)} | {"big": rng.normal(size=(40, 3))}
    sent, alone = (local_centroids(rows_of(c), 3, 0) for c in (mixed, {"big": mixed["big"]}))
    assert_close(sorted_rows(sent.points), sorted_rows(alone.points), 1e-12)


def test_every_local_cluster_can_have_two_rows():
    """More clusters than pairs of rows would leave single rows, which stay at home."""
    pairs = np.array([[0.0], [1.0], [50.0], [51.0]])
    sent = local_centroids(rows_of({"a": pairs}), 4, seed=0)
    assert sorted(sent.points[:, 0]) == [0.5, 50.5]
    assert sent.counts.tolist() == [2.0, 2.0]


def test_no_client_sees_another(rng):
    clients = {f"c{k}": rng.normal(size=(n, 3)) for k, n in enumerate((5, 30, 12, 2))}
    together = local_centroids(rows_of(clients), 3, seed=5)
    apart = [local_centroids(rows_of({name: x}), 3, seed=5) for name, x in clients.items()]
    assert_close(together.points, np.concatenate([part.points for part in apart]), 1e-12)
    assert_close(together.counts, np.concatenate([part.counts for part in apart]), 0)


def test_equal_rows_make_one_centroid():
    sent = local_centroids(rows_of({"a": np.ones((8, 2))}), 3, seed=0)
    assert sent.points.tolist() == [[1.0, 1.0]]
    assert sent.counts.tolist() == [8.0]


@pytest.mark.usefixtures("small_blocks", "small_chunks")
@given(seed=st.integers(0, 10_000))
def test_the_order_of_clients_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    clients = {f"c{k}": rng.normal(size=(n, 2)) for k, n in enumerate(rng.integers(1, 40, 10))}
    names = rng.permutation(list(clients)).tolist()
    here = local_centroids(rows_of(clients), 3, seed)
    there = local_centroids(rows_of({name: clients[name] for name in names}), 3, seed)
    assert_close(sorted_rows(there.points), sorted_rows(here.points), 1e-9)
    # Rows of different clients interleaved, each client's own order kept.
    ids = rng.permutation(np.repeat(list(clients), [len(x) for x in clients.values()]))
    waiting = {name: list(x) for name, x in clients.items()}
    X = np.array([waiting[name].pop(0) for name in ids])
    order = {name: code for code, name in enumerate(clients)}
    mixed = client_rows([X], np.array([order[name] for name in ids]), clients)
    interleaved = local_centroids(mixed, 3, seed)
    assert_close(sorted_rows(interleaved.points), sorted_rows(here.points), 1e-9)


def test_a_large_federation_asks_only_some_clients(rng, monkeypatch):
    clients = {f"c{k}": rng.normal(size=(6, 2)) + 100 * k for k in range(30)}
    everyone = local_centroids(rows_of(clients), 2, seed=3)
    assert everyone.counts.sum() == pytest.approx(180, abs=30)
    monkeypatch.setattr("fedgmm.methods.centroids._MOST_CENTROIDS", 20)

    some = local_centroids(rows_of(clients), 2, seed=3)
    asked = set(np.round(some.points[:, 0] / 100).astype(int).tolist())
    assert len(asked) == 10
    assert len(some.points) <= 20
    assert cdist(some.points, everyone.points).min(axis=1).max() < 1e-12
    names = rng.permutation(list(clients)).tolist()
    again = local_centroids(rows_of({name: clients[name] for name in names}), 2, seed=3)
    assert_close(sorted_rows(again.points), sorted_rows(some.points), 1e-12)
    other = local_centroids(rows_of(clients), 2, seed=4)
    assert set(np.round(other.points[:, 0] / 100).astype(int).tolist()) != asked


# ---------------------------------------------------------------------- the start


@pytest.mark.parametrize("start", ["kmeans", "k-means++", "random"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_start_is_a_valid_mixture(rng, kind, start):
    X, _ = blobs(rng, rows=200)
    rows = rows_of(as_dict(X, ragged_ids(rng, 200, 12)))
    shared = FederatedGMM(3, kind).start(rows, start, seed=0)
    assert shared.gaussians.means.shape == (3, 3)
    assert torch.isfinite(shared.gaussians.precisions_cholesky).all()
    assert shared.weights.sum().item() == pytest.approx(1.0)
    assert (shared.weights > 0).all()


def test_planted_clusters_are_found(rng):
    places = np.array([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0], [50.0, 50.0]])
    labels = rng.integers(4, size=400)
    X = places[labels] + rng.normal(size=(400, 2))
    rows = rows_of(as_dict(X, ragged_ids(rng, 400, 20)))
    shared = FederatedGMM(4).start(rows, "kmeans", seed=0)
    found = shared.gaussians.means.numpy()
    nearest = cdist(places, found).argmin(axis=1)
    assert sorted(nearest) == [0, 1, 2, 3]
    for k, m in enumerate(nearest):
        own = X[labels == k]
        assert_close(found[m], own.mean(0), 1e-9)
        assert_close(
            shared.gaussians.covariances[m], np.cov(own.T, ddof=0) + 1e-6 * np.eye(2), 1e-8
        )
        assert shared.weights[m].item() == pytest.approx(len(own) / 400, abs=1e-4)


@pytest.mark.parametrize("start", ["kmeans", "k-means++"])
def test_when_nobody_sends_a_centroid_the_start_is_drawn_from_the_overall_spread(rng, start):
    X = rng.normal(size=(50, 3)) * [1.0, 10.0, 100.0] + 1e9  # far from zero, where squares cancel
    rows = rows_of({k: X[k : k + 1] for k in range(50)})
    shared = FederatedGMM(4).start(rows, start, seed=0)
    assert torch.isfinite(shared.gaussians.means).all()
    assert (np.abs(shared.gaussians.means.numpy() - X.mean(0)) < 5 * X.std(0)).all()
    assert (np.ptp(shared.gaussians.means.numpy(), axis=0) > 0.01 * X.std(0)).all()
    again = FederatedGMM(4).start(rows, start, seed=0)
    assert torch.equal(shared.gaussians.means, again.gaussians.means)


def test_the_overall_spread_survives_an_offset(rng):
    X = rng.normal(size=(50, 3)) * [1.0, 10.0, 100.0] + 1e9
    whole = overall_gaussian(rows_of({"a": X[:20], "b": X[20:]}))
    assert_close(whole.means[0], X.mean(0), 1e-15)
    assert_close(whole.covariances[0].numpy() / X.var(0), np.ones(3), 1e-9)


def test_given_parts_are_kept(rng):
    X, _ = blobs(rng, rows=100)
    rows = rows_of({"a": X[:60], "b": X[60:]})
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    means = torch.from_numpy(X[:3] + 0.5)
    covariances = torch.from_numpy(random_covariances(rng, "full", 3, 3))
    method = FederatedGMM(3)
    full = method.start(rows, "kmeans", 0, GivenStart(weights, means, covariances))
    assert torch.equal(full.weights, weights)
    assert torch.equal(full.gaussians.means, means)
    assert torch.equal(full.gaussians.covariances, covariances)

    only_means = method.start(rows, "kmeans", 0, GivenStart(means=means))
    assert torch.equal(only_means.gaussians.means, means)
    nearest = cdist(X, means.numpy()).argmin(axis=1)
    for m in range(3):  # every row counts for its nearest mean
        own = X[nearest == m]
        expected = np.cov(own.T, ddof=0) + 1e-6 * np.eye(3)
        assert_close(only_means.gaussians.covariances[m], expected, 1e-8)
    only_weights = method.start(rows, "kmeans", 0, GivenStart(weights=weights))
    assert torch.equal(only_weights.weights, weights)
    free = method.start(rows, "kmeans", 0)
    assert torch.equal(only_weights.gaussians.means, free.gaussians.means)


def test_random_responsibilities_belong_to_rows(rng):
    X = rng.normal(size=(60, 2))
    method = FederatedGMM(3)
    here = method.start(rows_of({"a": X[:25], "b": X[25:]}), "random", seed=1)
    there = method.start(rows_of({"b": X[25:], "a": X[:25]}), "random", seed=1)
    assert_close(there.gaussians.means, here.gaussians.means, 1e-12)
    other = method.start(rows_of({"a": X[:25], "b": X[25:]}), "random", seed=2)
    assert not np.allclose(other.gaussians.means, here.gaussians.means, atol=1e-6)


# ---------------------------------------------------------------------- one round


@pytest.mark.usefixtures("small_blocks", "small_chunks")
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("aggregation", ["exact", "paper"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_stacked_round_is_a_loop_over_clients(rng, threads, kind, aggregation, number):
    threads(number)
    X, _ = blobs(rng, rows=150)
    clients = as_dict(X, ragged_ids(rng, 150, 13))
    means, covariances = X[:3] + 0.3, random_covariances(rng, kind, 3, 3)
    weights = np.array([0.2, 0.3, 0.5])
    method = FederatedGMM(3, kind, aggregation)
    shared = MixtureShared(
        gaussians(torch.from_numpy(means), torch.from_numpy(covariances), kind),
        torch.from_numpy(weights),
    )
    personal = shared.weights.expand(13, -1)
    personal, sums = method.client_step(shared, personal, rows_of(clients))
    new, info = method.server_step(shared, sums)

    expected = looped_em(
        list(clients.values()), weights, means, covariances, kind, rounds=1, aggregation=aggregation
    )
    assert_close(new.gaussians.means, expected.means, 1e-10)
    assert_close(new.gaussians.covariances, expected.covariances, 1e-10)
    assert_close(personal, expected.client_weights, 1e-10)
    assert_close(new.weights, expected.weights, 1e-10)
    assert info.log_likelihood == pytest.approx(expected.bounds[0], rel=1e-12)
    assert info.empty_components == ()


@pytest.mark.parametrize("aggregation", ["exact", "paper"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_clients_on_their_own_machines_send_the_same_sums(rng, kind, aggregation):
    # The update of a federation is the sum of the updates of its clients, asked one by one.
    X, _ = blobs(rng, rows=90)
    clients = as_dict(X, ragged_ids(rng, 90, 5))
    method = FederatedGMM(3, kind, aggregation)
    shared = method.start(rows_of(clients), "random", 0)
    pi = shared.weights[None]
    alone, total = [], Total()
    for name, x in clients.items():
        own, sums = method.client_step(shared, pi, rows_of({name: x}))
        alone.append(own)
        total.add(sums)
    apart = total.result()
    personal, together = method.client_step(shared, pi.expand(len(clients), -1), rows_of(clients))
    assert_close(personal, torch.cat(alone), 1e-12)
    assert set(together) == set(apart)
    for name, value in together.items():
        assert_close(apart[name], value, 1e-12 if "counts" in name else 1e-11)
    assert together["log_likelihood"].item() == pytest.approx(
        apart["log_likelihood"].item(), rel=1e-12
    )


def test_a_component_without_rows_is_reported(rng):
    X = rng.normal(size=(40, 2))
    means = torch.tensor([[0.0, 0.0], [1e4, 1e4]], dtype=torch.float64)
    method = FederatedGMM(2)
    shared = MixtureShared(
        gaussians(means, torch.eye(2).double().repeat(2, 1, 1), "full"),
        torch.tensor([0.5, 0.5], dtype=torch.float64),
    )
    _, sums = method.client_step(shared, shared.weights[None], rows_of({"a": X}))
    new, info = method.server_step(shared, sums)
    assert info.empty_components == (1,)
    assert torch.equal(new.gaussians.means[1], means[1])
