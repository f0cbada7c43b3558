"""Clustered federated learning: planted groups are found, right indices on nested splits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from fedgmm.core.server_optimisers import ServerOptimiser
from fedgmm.core.sums import Sums
from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods.clustered import CLIENTS, ClusteredFL, bipartition
from fedgmm.methods.local_training import LocalTraining
from fedgmm.nets.networks import Dense
from fedgmm.nets.sgd import SGD
from fedgmm.training.in_process import train
from fedgmm.training.loop import Participation, Run, StackedClients, run_rounds
from supervised import federation, two_groups


def nested(rng, clients=12, rows=(80, 200)):
    """Two groups by the sign of the first column, each of two by the sign of the second."""
    data, groups = {}, []
    for c in range(clients):
        a, b = c % 2, (c // 2) % 2
        x = rng.normal(size=(int(rng.integers(*rows)), 4))
        score = 1.3 * (1 - 2 * a) * x[:, 0] + (1 - 2 * b) * x[:, 1]
        data[f"c{c}"] = (x, (score > 0).astype(int))
        groups.append((a, b))
    return FederatedDataset.from_clients(data), groups


def alike(rng, clients=12, rows=(80, 200)):
    """Clients of very different sizes that agree."""
    data = {}
    for c in range(clients):
        x = rng.normal(size=(int(rng.integers(*rows)), 4))
        data[f"c{c}"] = (x, (x[:, 0] > 0).astype(int))
    return FederatedDataset.from_clients(data)


def groups_of(keys):
    """The partition that equal keys make, whatever they are called."""
    return {tuple(i for i, key in enumerate(keys) if key == one) for one in set(keys)}


def clusters(data, rounds=40, **options):
    training = LocalTraining(Dense(4, 2), SGD(lr=0.1, batch_size=32), dtype=torch.float64)
    method = ClusteredFL(training, **options)
    run = Run(*method.init(data.train))
    run_rounds(method, run, StackedClients(data.train), last_round=rounds, tol=None)
    return run.shared


@pytest.mark.parametrize("seed", range(3))
def test_two_planted_groups_are_found(seed):
    data = two_groups(np.random.default_rng(seed), clients=8)
    found = clusters(data, rounds=20).clusters.tolist()
    assert groups_of(found) == groups_of([c % 2 for c in range(8)])


@pytest.mark.parametrize("seed", range(3))
def test_nested_groups_are_found_with_the_right_clients(seed):
    """The second split works on a part of the clients; its indices must become theirs."""
    data, groups = nested(np.random.default_rng(seed))
    shared = clusters(data, rounds=30)
    assert groups_of(shared.clusters.tolist()) == groups_of(groups)
    assert len(shared.learners["0.weight"]) == 4
    # each cluster's learner leans the way its own clients do
    for cluster, (a, b) in zip(shared.clusters.tolist(), groups, strict=True):
        odds = shared.learners["0.weight"][cluster, 1] - shared.learners["0.weight"][cluster, 0]
        assert (float(odds[0]) > 0) == (a == 0)
        assert (float(odds[1]) > 0) == (b == 0)


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_agree_stay_together(seed):
    assert set(clusters(alike(np.random.default_rng(seed))).clusters.tolist()) == {0}


def test_each_group_predicts_with_its_own_learner(rng):
    data = two_groups(rng, clients=8)
    clustered = train(data, "clustered", rounds=25, lr=0.3)
    average = train(data, "fedavg", rounds=25, lr=0.3)
    assert clustered.evaluate().mean_accuracy > 0.9
    assert average.evaluate().mean_accuracy < 0.7


def test_a_client_without_a_cluster_is_asked_of_the_largest(rng):
    x = rng.normal(size=(60, 4))
    data = FederatedDataset.from_clients({f"c{c}": (x, (x[:, 0] > 0) ^ (c >= 6)) for c in range(8)})
    model = train(data, "clustered", rounds=25, lr=0.3)
    assert model.n_learners == 2
    assert np.array_equal(model.predict_proba(x), model.predict_proba(x, "c0"))
    assert not np.array_equal(model.predict_proba(x), model.predict_proba(x, "c7"))


# ---------------------------------------------------------------------- the two criteria


def step(moves, rows=None, **options):
    """One server step of clients that move like this from a learner at zero."""
    moves = torch.tensor(moves, dtype=torch.float64)
    method = ClusteredFL(LocalTraining(Dense(moves.shape[1] - 1, 2)), smallest=2, **options)
    zero = {"w": torch.zeros(1, moves.shape[1], dtype=torch.float64)}
    start = method.init(federation(np.random.default_rng(0), sizes=(4,) * len(moves)).train)[0]
    shared = type(start)(zero, start.clusters, start.scale, start.server)
    counts = torch.ones(len(moves)) if rows is None else torch.tensor(rows)
    entries = {CLIENTS: torch.arange(len(moves)), "rows": counts.double(), "learners/w": moves}
    sums = Sums({**entries, "log_likelihood": torch.zeros(())}, gathered=entries)
    new, _ = method.server_step(shared, sums)
    return new.clusters.tolist(), new


def test_it_splits_when_the_average_rests_and_clients_move():
    assert step([[1, 0], [1, 0.1], [-1, 0], [-1, 0.1]])[0] == [0, 0, 1, 1]


def test_it_does_not_split_while_the_average_moves():
    assert step([[1, 0], [1, 0.1], [0.2, 1], [0.2, 0.9]])[0] == [0, 0, 0, 0]


def test_it_does_not_split_when_nobody_moves():
    clusters, new = step([[1, 0], [1, 0.1], [-1, 0], [-1, 0.1]], eps2=1.5)
    assert clusters == [0, 0, 0, 0]
    assert new.scale == pytest.approx(np.mean([1, 1.01**0.5] * 2))


def test_it_does_not_split_those_who_are_alike_across():
    """Four directions at right angles cannot be parted without parting neighbours."""
    moves = [[np.cos(t), np.sin(t)] for t in np.linspace(0, 2 * np.pi, 9)[:-1]]
    assert len(set(step(moves)[0])) == 1


def test_the_average_of_a_cluster_is_by_rows():
    _, new = step([[1.0, 0], [0, 1.0], [-1.0, 0.5], [0, -2.0]], rows=[1, 2, 3, 4], eps1=0.0)
    np.testing.assert_allclose(new.learners["w"][0], [(1 - 3) / 10, (2 + 1.5 - 8) / 10])


def test_a_new_cluster_starts_from_its_parent_s_average():
    _, new = step([[1, 0], [1, 0.1], [-1, 0], [-1, 0.1]])
    assert len(new.learners["w"]) == 2
    np.testing.assert_allclose(new.learners["w"][0], [0, 0.05])
    assert torch.equal(new.learners["w"][0], new.learners["w"][1])


def test_small_clusters_are_left_alone():
    assert step([[1, 0], [-1, 0]], similarity=1.0)[0] == [0, 1]
    moves = torch.tensor([[1.0, 0], [-1.0, 0], [1.0, 0.1]])
    method = ClusteredFL(LocalTraining(Dense(1, 2)), smallest=4)
    assert method._split(moves, torch.full((3,), 1 / 3), 1.0) is None


def test_server_momentum_survives_a_split(rng):
    data = two_groups(rng, clients=8)
    shared = clusters(data, rounds=10, server=ServerOptimiser("momentum", momentum=0.5))
    assert len(shared.learners["0.weight"]) == 2
    assert all(torch.isfinite(value).all() for value in shared.learners.values())


def test_clients_that_do_not_answer_keep_their_cluster(rng):
    data = two_groups(rng, clients=8)
    training = LocalTraining(Dense(4, 2), SGD(lr=0.1, batch_size=32), dtype=torch.float64)
    method = ClusteredFL(training)
    run = Run(*method.init(data.train))
    absent = {"c6", "c7"}
    some = Participation(answers=lambda _, name: name not in absent)
    run_rounds(method, run, StackedClients(data.train, some), last_round=20, tol=None)
    assert run.round == 20
    found = run.shared.clusters.tolist()
    assert groups_of(found[:6]) == groups_of([0, 1, 0, 1, 0, 1])
    assert found[6:] == [0, 0]


# ---------------------------------------------------------------------- bipartition


def largest_across(similarity, mask):
    return similarity[mask][:, ~mask].max()


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(6))
def test_the_bipartition_is_the_best_of_all(count, seed):
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(count, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    similarity = directions @ directions.T
    every = [np.array(bits, dtype=bool) for bits in product([False, True], repeat=count)]
    best = min(largest_across(similarity, mask) for mask in every if 0 < mask.sum() < count)
    found = bipartition(similarity)
    assert not found[0]
    assert found.any()
    assert largest_across(similarity, found) == pytest.approx(best)
