"""Weights of rows: a row of weight ``w`` counts like ``w`` copies of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import estimator_checks_generator

from fedgmm import FederatedDataset, FederatedGaussianMixture, FedGMMClassifier, train
from fedgmm.core.labels import PRIORS
from fedgmm.data.federated import client_rows
from fedgmm.methods.centroids import local_centroids
from fedgmm.training.options import ALGORITHMS

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def world():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(240, 3)) + 3.0 * rng.integers(0, 2, size=(240, 1))
    sites = np.repeat(["bergen", "oslo", "tromsø"], 80)
    y = (x[:, 0] + rng.normal(size=240) > 1.5) ^ (sites == "oslo")
    return x, y.astype(int), sites, rng.integers(0, 4, size=240)


def copies(world):
    x, y, sites, w = world
    return np.repeat(x, w, axis=0), np.repeat(y, w), np.repeat(sites, w)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "identity"])
@pytest.mark.parametrize("aggregation", ["exact", "paper"])
def test_a_mixture_with_weights_equals_copies(world, kind, aggregation):
    x, _, sites, w = world
    more, _, owners = copies(world)
    options = {"covariance_type": kind, "aggregation": aggregation, "means_init": x[[0, 1]]}
    model = FederatedGaussianMixture(2, max_iter=10, tol=0.0, **options)
    weighted = model.fit(x, sample_weight=w, clients=sites)
    found = {n: getattr(weighted, n) for n in ("means_", "covariances_", "client_weights_")}
    found["lower_bounds_"] = weighted.lower_bounds_
    repeated = model.fit(more, clients=owners)
    for name, value in found.items():
        np.testing.assert_allclose(value, getattr(repeated, name), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem"])
def test_exact_steps_with_weights_equal_copies(world, algorithm):
    x, y, sites, w = world
    options = {"algorithm": algorithm, "dtype": "float64", "rounds": 15, "start": "random"}
    model = FedGMMClassifier(1, 2, random_state=0, **options)
    weighted = model.fit(x, y, sample_weight=w, clients=sites).predict_proba(x, clients=sites)
    more, labels, owners = copies(world)
    repeated = model.fit(more, labels, clients=owners).predict_proba(x, clients=sites)
    np.testing.assert_allclose(weighted, repeated, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_steps_of_every_method_with_weights_equal_copies(world, algorithm):
    """One step on all rows of a client: then the order of the rows does not matter."""
    x, y, sites, w = world
    options = {"dtype": "float64", "rounds": 3, "solver": "sgd", "batch_size": 1000, "tol": None}
    options |= {"algorithm": algorithm, "components": 1, "learners": 2, "start": "random"}
    split = {"split": (1.0, 0.0, 0.0)}
    weighted = train(FederatedDataset.from_arrays(x, y, sites, sample_weight=w, **split), **options)
    repeated = train(FederatedDataset.from_arrays(*copies(world), **split), **options)
    np.testing.assert_allclose(
        weighted.predict_proba(x, clients=sites),
        repeated.predict_proba(x, clients=sites),
        rtol=1e-10,
        atol=1e-10,
    )
    for here, there in zip(weighted.history, repeated.history, strict=True):
        assert here["log_likelihood"] == pytest.approx(there["log_likelihood"], rel=1e-10)


def test_weights_of_one_change_nothing(world):
    x, y, sites, _ = world
    for solver in ("sgd", "newton"):
        model = FedGMMClassifier(2, 2, rounds=4, random_state=0, dtype="float64", solver=solver)
        plain = model.fit(x, y, clients=sites).predict_proba(x, clients=sites)
        ones = model.fit(x, y, np.ones(240), clients=sites).predict_proba(x, clients=sites)
        np.testing.assert_allclose(ones, plain, rtol=1e-12)


def test_label_frequencies_count_weights(world):
    x, y, sites, w = world
    options = {"components": 1, "learners": 1, "rounds": 3, "dtype": "float64"}
    options["personal_labels"] = False
    split = {"split": (1.0, 0.0, 0.0)}
    data = FederatedDataset.from_arrays(x, y, sites, sample_weight=w, **split)
    model = train(data, **options)
    model.learn_labels()
    same = train(FederatedDataset.from_arrays(*copies(world), **split), **options)
    same.learn_labels()
    here, there = model.prediction.labels, same.prediction.labels
    assert {here.prior_rows, there.prior_rows} <= set(PRIORS)
    torch.testing.assert_close(here.federation, there.federation, rtol=1e-8, atol=1e-8)
    for code, site in enumerate(model.names):
        own = sites == site
        counts = torch.tensor(np.bincount(y[own], weights=w[own]))
        torch.testing.assert_close(here.clients[code], here.from_counts(counts[None]))


def test_centroids_are_weighted_means():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(50, 2)), rng.random(50)
    rows = client_rows([x], np.zeros(50, dtype=np.int64), ["a"])
    found = local_centroids(rows.with_weights(torch.from_numpy(w)), 1, 0)
    np.testing.assert_allclose(found.points, np.average(x, axis=0, weights=w)[None])
    np.testing.assert_allclose(found.counts, [w.sum()])


def test_rows_of_weight_zero_are_left_out(world):
    x, y, sites, _ = world
    w = (sites != "oslo").astype(float)
    model = FedGMMClassifier(1, 1, rounds=1).fit(x, y, sample_weight=w, clients=sites)
    assert model.clients_.tolist() == ["bergen", "tromsø"]
    mixture = FederatedGaussianMixture(2).fit(x, sample_weight=w, clients=sites)
    assert mixture.clients_.tolist() == ["bergen", "tromsø"]


def test_balanced_classes_equal_scikit_learns(world):
    x, _, _, _ = world
    rng = np.random.default_rng(1)
    y = (x[:, 0] + rng.normal(size=240) > 4.5).astype(int)  # few of one class
    options = {"rounds": 60, "dtype": "float64", "ridge": 1e-6, "random_state": 0}
    model = FedGMMClassifier(1, 1, class_weight="balanced", **options).fit(x, y)
    expected = LogisticRegression(class_weight="balanced", C=1e6, tol=1e-8).fit(x, y)
    np.testing.assert_allclose(model.predict_proba(x), expected.predict_proba(x), atol=1e-3)
    weights = {0: 240 / (2 * (y == 0).sum()), 1: 240 / (2 * (y == 1).sum())}
    given = FedGMMClassifier(1, 1, class_weight=weights, **options).fit(x, y)
    np.testing.assert_allclose(given.predict_proba(x), model.predict_proba(x), rtol=1e-9)
    assert (model.predict(x) == 1).mean() > (y == 1).mean()


def test_class_weights_and_sample_weights_multiply(world):
    x, y, sites, w = world
    options = {"rounds": 3, "dtype": "float64", "random_state": 0}
    both = FedGMMClassifier(1, 1, class_weight={0: 3.0}, **options).fit(x, y, w, clients=sites)
    one = FedGMMClassifier(1, 1, **options).fit(x, y, w * np.where(y == 0, 3.0, 1.0), clients=sites)
    assert np.array_equal(both.predict_proba(x), one.predict_proba(x))


def test_weights_are_part_of_the_fingerprint(world):
    from fedgmm.training.checkpoint import fingerprint

    x, y, sites, w = world
    w = w + 1.0
    one, other = (
        FederatedDataset.from_arrays(x, y, sites, sample_weight=v) for v in (w, w[::-1].copy())
    )
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        (np.ones(239), "shape"),
        (np.full(240, np.nan), "NaN"),
        (np.full(240, -1.0), "negative"),
        (np.zeros(240), "zero"),
    ],
)
def test_bad_weights(world, weights, word):
    x, y, sites, _ = world
    for fit in (
        lambda: FedGMMClassifier().fit(x, y, weights, clients=sites),
        lambda: FederatedGaussianMixture().fit(x, None, weights, clients=sites),
        lambda: FederatedDataset.from_arrays(x, y, sites, sample_weight=weights),
    ):
        with pytest.raises(ValueError, match=word):
            fit()


def test_a_row_without_a_client_is_still_refused(world):
    x, y, _, w = world
    with pytest.raises(ValueError, match="no client"):
        FederatedDataset.from_arrays(x, y, [None] * 240, sample_weight=w + 1)


@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_check_of_weights():
    """Without a random start, weights equal copies also for scikit-learn's checks, which raise."""
    model = FedGMMClassifier(1, 1, rounds=10, dtype="float64")
    wanted = ["check_class_weight_classifiers", "check_sample_weight_equivalence_on_dense_data"]
    run = []
    for own, check in estimator_checks_generator(model):
        name = getattr(check, "func", check).__name__
        if name in wanted:
            check(own)
            run.append(name)
    assert sorted(run) == wanted
