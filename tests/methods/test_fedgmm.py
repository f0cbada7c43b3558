"""A round of FedGMM against the paper's equations in a plain loop, and what must not matter."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch import nn

from fedgmm.core.gaussians import gaussians
from fedgmm.core.newton import newton_step, newton_sums
from fedgmm.core.params import stack
from fedgmm.core.server_optimisers import ServerOptimiser, ServerState
from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods.base import DivergedError
from fedgmm.methods.fedgmm import LEARNER_STARTS, FedGMM, FedGMMShared, without_density
from fedgmm.methods.gmm import FederatedGMM, MixtureShared
from fedgmm.methods.local_training import LocalTraining
from fedgmm.nets.networks import Dense
from fedgmm.nets.sgd import SGD
from fedgmm.training.in_process import train
from fedgmm.training.loop import Run, StackedClients, run_rounds
from fedgmm.training.options import ALGORITHMS
from oracles import full_covariances, random_covariances, reduce_covariances
from supervised import (
    batches_of,
    client_orders,
    dense_params,
    federation,
    images,
    load_dense,
    module_of,
    plain_sgd,
    rows_of,
    two_groups,
)

M1, M2, COLUMNS = 2, 3, 3
SGD_OPTIONS = SGD(lr=0.2, momentum=0.5, weight_decay=0.01, batch_size=7, epochs=2)


def method(net, **changes):
    options = {
        "training": LocalTraining(net, SGD_OPTIONS, seed=4, dtype=torch.float64),
        "learners": M2,
        "gaussians": FederatedGMM(M1, reg_covar=1e-3),
    }
    return FedGMM(**{**options, **changes})


def state(rng, net, clients, kind="full"):
    """Parameters and private weights of no special kind."""
    generator = torch.Generator().manual_seed(9)
    params = stack([net.initial(generator) for _ in range(M2)])
    means = rng.normal(size=(M1, COLUMNS))
    covariances = random_covariances(rng, kind, M1, COLUMNS)
    personal = torch.from_numpy(rng.dirichlet(np.ones(M1 * M2), size=clients))
    shared = FedGMMShared(
        MixtureShared(
            gaussians(torch.from_numpy(means), torch.from_numpy(covariances), kind),
            personal.mean(0),
        ),
        {name: value.double() for name, value in params.items()},
        ServerState(),
    )
    return shared, personal


def by_the_paper(rows, shared, personal, widths, kind, aggregation):
    """Algorithm 1, clients one at a time, rows as they are."""
    means = shared.mixture.gaussians.means.numpy()
    covariances = full_covariances(shared.mixture.gaussians.covariances, kind, M1, COLUMNS)
    clients = [rows_of(rows, c) for c in range(len(rows.names))]
    evidence, gammas, qs, thetas, own_means, own_covs, weights = 0.0, [], [], [], [], [], []
    for c, (x, y) in enumerate(clients):
        pi = personal[c].numpy().reshape(M1, M2)
        # E-step: q(m1, m2) ∝ π_c(m1, m2) N(x; μ_m1, Σ_m1) P_θm2(y|x)
        log_q = np.empty((len(x), M1, M2))
        for m2 in range(M2):
            module = load_dense(module_of(widths), shared.learners, m2)
            with torch.no_grad():
                log_p = torch.log_softmax(module(torch.from_numpy(x)), -1).numpy()
            for m1 in range(M1):
                density = multivariate_normal(means[m1], covariances[m1]).logpdf(x).reshape(-1)
                log_q[:, m1, m2] = np.log(pi[m1, m2]) + density + log_p[np.arange(len(y)), y]
        total = logsumexp(log_q, axis=(1, 2))
        q = np.exp(log_q - total[:, None, None])
        # M-step
        gamma = q.sum(0)
        weights.append(gamma / len(x))
        mu = np.stack(
            [(q[:, m1].sum(-1)[:, None] * x).sum(0) / gamma[m1].sum() for m1 in range(M1)]
        )
        sigma = np.stack(
            [
                sum(q[i, m1].sum() * np.outer(x[i] - mu[m1], x[i] - mu[m1]) for i in range(len(x)))
                / gamma[m1].sum()
                for m1 in range(M1)
            ]
        )
        own = []
        for m2 in range(M2):
            module = load_dense(module_of(widths), shared.learners, m2)
            orders = client_orders(rows, c, 4, 1, SGD_OPTIONS.epochs)
            plain_sgd(
                module,
                torch.from_numpy(x),
                torch.from_numpy(y),
                [b for order in orders for b in batches_of(order, SGD_OPTIONS.batch_size)],
                lr=SGD_OPTIONS.lr,
                momentum=SGD_OPTIONS.momentum,
                weight_decay=SGD_OPTIONS.weight_decay,
                weights=torch.from_numpy(q[:, :, m2].sum(1)),
            )
            own.append(dense_params(module))
        evidence += total.sum()
        gammas.append(gamma)
        qs.append(q)
        thetas.append(own)
        own_means.append(mu)
        own_covs.append(sigma)
    # the server
    n = sum(len(x) for x, _ in clients)
    by_gaussian = [g.sum(1) for g in gammas]
    counts = sum(by_gaussian)
    mu = sum(g[:, None] * m for g, m in zip(by_gaussian, own_means, strict=True)) / counts[:, None]
    if aggregation == "paper":
        sigma = sum(g[:, None, None] * s for g, s in zip(by_gaussian, own_covs, strict=True))
    else:
        sigma = np.zeros((M1, COLUMNS, COLUMNS))
        for (x, _), q in zip(clients, qs, strict=True):
            for m1 in range(M1):
                centred = x - mu[m1]
                sigma[m1] += (q[:, m1].sum(-1)[:, None] * centred).T @ centred
    sigma = reduce_covariances(sigma / counts[:, None, None], counts, kind, 1e-3)
    theta = {}
    for name in thetas[0][0]:
        theta[name] = torch.stack(
            [
                sum(g[:, m2].sum() * own[m2][name] for g, own in zip(gammas, thetas, strict=True))
                / sum(g[:, m2].sum() for g in gammas)
                for m2 in range(M2)
            ]
        )
    pi = sum(gammas) / n
    return mu, sigma, theta, np.stack(weights), pi, evidence / n, qs


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize(("classes", "hidden"), [(2, ()), (4, (5,))], ids=["linear", "mlp"])
@pytest.mark.parametrize("aggregation", ["exact", "paper"])
def test_a_round_is_the_paper_s_algorithm(rng, small_blocks, kind, classes, hidden, aggregation):
    data = federation(rng, sizes=(3, 30, 12, 1), columns=COLUMNS, classes=classes)
    rows, net = data.train, Dense(COLUMNS, classes, hidden)
    algorithm = method(net, gaussians=FederatedGMM(M1, kind, aggregation, reg_covar=1e-3))
    shared, personal = state(rng, net, len(rows.names), kind)

    own, sums = algorithm.client_step(shared, personal, rows, 1)
    new, info = algorithm.server_step(shared, sums)

    mu, sigma, theta, weights, pi, evidence, _ = by_the_paper(
        rows, shared, personal, net.widths, kind, aggregation
    )
    np.testing.assert_allclose(new.mixture.gaussians.means, mu, atol=1e-8)
    np.testing.assert_allclose(new.mixture.gaussians.covariances, sigma, atol=1e-8)
    np.testing.assert_allclose(own.reshape(-1, M1, M2), weights, atol=1e-8)
    np.testing.assert_allclose(new.mixture.weights.reshape(M1, M2), pi, atol=1e-8)
    np.testing.assert_allclose(info.log_likelihood, evidence, atol=1e-8)
    for name, value in theta.items():
        np.testing.assert_allclose(new.learners[name], value, atol=1e-8)


def test_an_exact_round_is_one_newton_step_on_the_pooled_rows(rng, small_blocks):
    data = federation(rng, sizes=(3, 60, 17, 26, 1), columns=COLUMNS, classes=3)
    rows, net = data.train, Dense(COLUMNS, 3)
    algorithm = method(net, solver="newton", ridge=0.5)
    shared, personal = state(rng, net, len(rows.names))
    _, sums = algorithm.client_step(shared, personal, rows, 1)
    new, _ = algorithm.server_step(shared, sums)
    *_, qs = by_the_paper(rows, shared, personal, net.widths, "full", "exact")
    q = torch.from_numpy(np.concatenate(qs).sum(1))
    logits = net.logits(shared.learners, rows.inputs)
    sums = newton_sums(logits, rows.inputs, rows.labels, q)
    expected = newton_step(shared.learners, sums, 0.5)
    for name, value in expected.items():
        np.testing.assert_allclose(new.learners[name], value, atol=1e-8)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
@pytest.mark.parametrize("solver", ["sgd", "newton"])
def test_the_server_s_optimiser_moves_the_learners(rng, kind, solver):
    """Whatever the clients' steps: the target is what the server would otherwise take."""
    rows, net = federation(rng).train, Dense(COLUMNS, 2)
    plain = method(net, solver=solver)
    server = ServerOptimiser(kind, lr=0.1)
    shared, personal = state(rng, net, len(rows.names))
    _, sums = plain.client_step(shared, personal, rows, 1)
    target, _ = plain.server_step(shared, sums)
    moved, _ = replace(plain, server=server).server_step(shared, sums)
    expected, _ = server.step(shared.learners, target.learners, ServerState())
    for name, value in expected.items():
        torch.testing.assert_close(moved.learners[name], value)
        assert not torch.equal(value, target.learners[name])


@pytest.mark.parametrize(("solver", "share"), [("sgd", 1 / 3), ("newton", 1.0)])
def test_the_server_knows_how_far_the_rate_has_fallen(rng, solver, share):
    """Exact steps have no rate, and so nothing that could fall."""
    rows, net = federation(rng).train, Dense(COLUMNS, 2)
    plain = method(net, solver=solver)
    training = replace(plain.training, schedule="cooldown", rounds=10)
    server = ServerOptimiser("momentum")
    cooling = replace(plain, training=training, server=server)
    shared, personal = state(rng, net, len(rows.names))
    _, sums = cooling.client_step(shared, personal, rows, 10)
    target, _ = plain.server_step(shared, sums)
    moved, _ = cooling.server_step(shared, sums, 10)
    expected = server.step(shared.learners, target.learners, ServerState(), share)[1]
    for name, value in expected.first.items():
        torch.testing.assert_close(moved.server.first[name], value)


def test_a_learner_that_nobody_uses_stays(rng):
    rows, net = federation(rng).train, Dense(COLUMNS, 2)
    for solver in ("sgd", "newton"):
        algorithm = method(net, solver=solver)
        shared, personal = state(rng, net, len(rows.names))
        personal = personal.reshape(-1, M1, M2)
        personal[:, :, 1] = 0.0
        personal = (personal / personal.sum((1, 2), keepdim=True)).reshape(-1, M1 * M2)
        own, sums = algorithm.client_step(shared, personal, rows, 1)
        new, _ = algorithm.server_step(shared, sums)
        assert (own.reshape(-1, M1, M2)[:, :, 1] == 0).all()
        for name, value in new.learners.items():
            assert torch.isfinite(value).all()
            odds = value[1, 1] - value[1, 0]
            torch.testing.assert_close(
                odds, shared.learners[name][1, 1] - shared.learners[name][1, 0]
            )


@pytest.mark.parametrize("solver", ["sgd", "newton"])
def test_learners_whose_logits_overflow_are_reported_with_the_client(rng, solver):
    rows, net = federation(rng).train, Dense(COLUMNS, 3)
    algorithm = method(net, solver=solver)
    shared, personal = state(rng, net, len(rows.names))
    lost = {name: value * 1e308 for name, value in shared.learners.items()}
    with pytest.raises(DivergedError, match="diverged on client 'rome'"):
        algorithm.client_step(replace(shared, learners=lost), personal, rows)


def test_responsibilities_follow_their_rows(rng):
    """The client's rows in another order, with the batches of the same rows: the same round."""
    data = federation(rng, sizes=(40,), split=(1.0, 0.0, 0.0))
    rows, net = data.train, Dense(COLUMNS, 2)
    algorithm = method(net)
    shared, personal = state(rng, net, 1)
    order = rows.shuffled(4, 1, 0)
    mixed = torch.from_numpy(rng.permutation(40))
    other = FederatedDataset.from_clients(
        {"rome": (rows.inputs[mixed].numpy(), rows.labels[mixed].numpy())}, split=(1.0, 0.0, 0.0)
    ).train
    place = torch.argsort(mixed)
    # the same rows in the same batches
    object.__setattr__(other, "shuffled", lambda s, r, e: place[rows.shuffled(s, r, e)])
    expected, _ = algorithm.server_step(shared, algorithm.client_step(shared, personal, rows)[1])
    actual, _ = algorithm.server_step(shared, algorithm.client_step(shared, personal, other)[1])
    assert not torch.equal(order, place[order])
    for name, value in expected.learners.items():
        torch.testing.assert_close(actual.learners[name], value, atol=1e-12, rtol=0)


# ---------------------------------------------------------------------- starts


@pytest.mark.parametrize("start", LEARNER_STARTS)
def test_the_start_of_weights_and_learners(rng, start):
    rows, net = federation(rng, sizes=(60, 50)).train, Dense(COLUMNS, 2)
    shared, personal = method(net, start=start).init(rows)
    pi = personal.reshape(2, M1, M2)
    torch.testing.assert_close(pi.sum((1, 2)), torch.ones(2, dtype=torch.float64))
    assert torch.equal(pi[0], pi[1])
    spread = shared.learners["0.weight"].std(0).mean()
    if start == "tied":  # learner m has most of Gaussian m
        for m in range(M1):
            assert pi[0, m].argmax() == m
            assert pi[0, m, m] > 0.9 * pi[0, m].sum()
    else:
        torch.testing.assert_close(pi[0], pi[0].mean(1, keepdim=True).expand(M1, M2))
    assert (spread > 0.1) == (start == "random")
    assert float(spread) > 0


@pytest.mark.parametrize("start", LEARNER_STARTS)
def test_a_given_learner_is_split_into_slightly_different_copies(rng, start):
    rows, net = federation(rng).train, Dense(COLUMNS, 2)
    given = net.initial(torch.Generator().manual_seed(5))
    shared, _ = method(net, start=start).init(rows, given)
    for name, value in shared.learners.items():
        gap = (value - given[name].double()).abs()
        assert 0 < float(gap.max()) < 0.2 * float(given[name].std()) + 0.01
    assert not torch.equal(shared.learners["0.weight"][0], shared.learners["0.weight"][1])


def test_one_learner_starts_exactly_at_the_given_one(rng):
    rows, net = federation(rng).train, Dense(COLUMNS, 2)
    given = net.initial(torch.Generator().manual_seed(5))
    shared, _ = method(net, learners=1, start="split").init(rows, given)
    for name, value in shared.learners.items():
        assert torch.equal(value[0], given[name].double())


# ---------------------------------------------------------------------- what must not matter


def clients_of(data):
    """``{client: (X, y)}`` of a data set's training rows."""
    return {name: rows_of(data.train, code) for code, name in enumerate(data.names)}


@pytest.mark.parametrize(
    ("algorithm", "solver"),
    [*product(ALGORITHMS, ["sgd"]), *product(["fedgmm", "fedem", "fedavg"], ["newton"])],
)
def test_the_order_of_clients_changes_nothing(rng, algorithm, solver):
    data = two_groups(rng, clients=8) if algorithm == "clustered" else federation(rng, classes=3)
    pairs = list(clients_of(data).items())
    options = {
        "rounds": 6,
        "local_epochs": 2,
        "batch_size": 8,
        "dtype": "float64",
        "participation": 0.8,
        "solver": solver,
        "tol": None,
        "components": 2,
    }
    models = []
    for order in (range(len(pairs)), rng.permutation(len(pairs))):
        mixed = FederatedDataset.from_clients([pairs[i] for i in order], split=(0.8, 0.1, 0.1))
        models.append(train(mixed, algorithm, **options))
    assert models[0].names != models[1].names
    for name, (x, _) in pairs:
        expected = models[0].predict_proba(x, name)
        np.testing.assert_allclose(models[1].predict_proba(x, name), expected, atol=1e-8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_seed_gives_the_same_bits(rng, algorithm, threads, small_blocks):
    threads(2)
    data = federation(rng, sizes=(30, 70, 1, 25))
    first, again, other = (
        train(data, algorithm, rounds=3, batch_size=8, seed=seed, components=2, solver="sgd")
        for seed in (3, 3, 4)
    )
    x = data.test.inputs.numpy()
    for name in data.names:
        assert np.array_equal(first.predict_proba(x, name), again.predict_proba(x, name))
    for name, value in first.prediction.learners.items():
        assert torch.equal(value, again.prediction.learners[name])
    same = all(
        torch.equal(value, other.prediction.learners[name])
        for name, value in first.prediction.learners.items()
    )
    assert not same


def test_groups_that_train_side_by_side_change_nothing(rng):
    """Less memory means more and smaller groups of clients."""
    data = federation(rng, sizes=(3, 40, 17, 26))
    net = Dense(COLUMNS, 2)
    shared, personal = state(rng, net, 4)
    wide = method(net)
    narrow = replace(wide, training=replace(wide.training, memory=1))
    assert len(narrow.training.groups(data.train, shared.learners)) == 4
    expected, _ = wide.server_step(shared, wide.client_step(shared, personal, data.train)[1])
    actual, _ = narrow.server_step(shared, narrow.client_step(shared, personal, data.train)[1])
    for name, value in expected.learners.items():
        torch.testing.assert_close(actual.learners[name], value, atol=1e-12, rtol=0)


def test_the_random_state_of_the_program_is_left_alone(rng):
    before = torch.random.get_rng_state()
    train(images(rng), rounds=1, learner="cnn", components=2, learners=2, solver="sgd")
    assert torch.equal(before, torch.random.get_rng_state())


_SEEDS_SEEN = []


class Dropping(nn.Module):
    """Has dropout, and records which seed it draws from."""

    def __init__(self):
        super().__init__()
        self.hidden, self.drop, self.out = nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x):
        if self.training:
            _SEEDS_SEEN.append(torch.initial_seed())
        return self.out(self.drop(self.hidden(x)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dropout_is_new_every_round_and_belongs_to_the_seed(rng, algorithm):
    data = federation(rng, sizes=(20, 30))
    options = {"learner": Dropping, "rounds": 2, "components": 2, "learners": 2, "tol": None}
    options |= {"finetune_epochs": 0}
    before = torch.random.get_rng_state()
    _SEEDS_SEEN.clear()
    first = train(data, algorithm, seed=3, **options)
    assert len(set(_SEEDS_SEEN) - {0}) == 2  # a round each, and 0 of the trial before training
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(5)  # other work of the program in between
    again = train(data, algorithm, seed=3, **options)
    for name, value in first.prediction.learners.items():
        assert torch.equal(value, again.prediction.learners[name])


# ---------------------------------------------------------------------- special cases


@pytest.mark.parametrize("solver", ["sgd", "newton"])
def test_with_one_gaussian_it_is_fedem(rng, solver):
    """A common factor of all pairs says nothing about labels."""
    rows, net = federation(rng, sizes=(30, 40, 25)).train, Dense(COLUMNS, 2)
    one = method(net, gaussians=FederatedGMM(1), start="random", solver=solver)
    plain = without_density(one, M2)
    runs = []
    for algorithm in (one, plain):
        run = Run(*algorithm.init(rows))
        runs.append(run_rounds(algorithm, run, StackedClients(rows), last_round=8, tol=None))
    torch.testing.assert_close(runs[0].personal, runs[1].personal, atol=1e-8, rtol=0)
    assert float(runs[0].personal.std(0).max()) > 1e-3  # clients did become different
    for name, value in runs[0].shared.learners.items():
        torch.testing.assert_close(value, runs[1].shared.learners[name], atol=1e-8, rtol=0)


def test_the_likelihood_rises_with_exact_steps(rng):
    """Rounds of EM with one Newton step a learner: no fall beyond what the ridge allows."""
    data = two_groups(rng, rows=120)
    model = train(data, components=2, learners=2, rounds=30, dtype="float64", ridge=1e-3, tol=None)
    values = np.array([entry["log_likelihood"] for entry in model.history])
    assert values[-1] > values[0] + 0.1
    assert np.diff(values).min() > -1e-2
