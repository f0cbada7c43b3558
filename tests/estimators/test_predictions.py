"""Predictions of a fitted mixture, with and without clients, against brute force."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
from scipy.special import logsumexp, softmax
from sklearn.mixture import GaussianMixture

from fedgmm import FederatedGaussianMixture
from oracles import (
    ALL_KINDS,
    KINDS,
    as_dict,
    assert_close,
    blobs,
    full_covariances,
    log_joint,
    random_start,
)

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
NAMES = ["bergen", "bodø", "oslo"]
M = 3


@pytest.fixture(scope="module", params=ALL_KINDS)
def trained(request):
    """A model of three very different clients, new rows, and their ids."""
    rng = np.random.default_rng(0)
    X, labels = blobs(rng, rows=240, separation=3.0)
    own = np.where(rng.uniform(size=240) < 0.7, labels, rng.integers(3, size=240))
    model = FederatedGaussianMixture(
        M, covariance_type=request.param, random_state=0, max_iter=10
    ).fit(X, clients=np.array(NAMES)[own])
    assert np.ptp(model.client_weights_, axis=0).max() > 0.3
    new = blobs(rng, rows=50, separation=3.0)[0]
    return model, new, np.array(NAMES)[rng.integers(3, size=50)]


@pytest.fixture
def fitted(trained):
    """A copy that a test may change."""
    return deepcopy(trained)


def expected_joint(model, X, weights):
    components, columns = model.means_.shape
    full = full_covariances(model.covariances_, model.covariance_type, components, columns)
    return log_joint(X, np.ones(components), model.means_, full) + np.log(weights)


def weights_of(model, ids):
    """One row of weights an id, looked up one by one; no id means the federation's."""
    lookup = dict(zip(model.clients_.tolist(), model.client_weights_, strict=True))
    return np.stack([lookup.get(name, model.weights_) for name in ids])


def check(model, X, weights, **how):
    joint = expected_joint(model, X, weights)
    assert_close(model.score_samples(X, **how), logsumexp(joint, axis=1), 1e-10)
    assert_close(model.predict_proba(X, **how), softmax(joint, axis=1), 1e-10)
    assert np.array_equal(model.predict(X, **how), joint.argmax(axis=1))
    assert model.score(X, **how) == pytest.approx(logsumexp(joint, axis=1).mean(), rel=1e-10)


def test_one_id_a_row(fitted):
    model, X, ids = fitted
    check(model, X, weights_of(model, ids), clients=ids)
    check(model, X, weights_of(model, ids), clients=ids.tolist())


def test_no_clients_means_the_federations_weights(fitted):
    model, X, _ = fitted
    check(model, X, model.weights_)
    check(model, X, model.weights_, clients=None)


def test_one_id_for_all(fitted):
    model, X, _ = fitted
    check(model, X, model.client_weights_[2], clients="oslo")


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA], ids=["None", "NaN", "NA"])
def test_rows_without_an_id_use_the_federations_weights(fitted, missing):
    model, X, ids = fitted
    mixed = np.array(ids, dtype=object)
    mixed[::3] = missing
    lookup = ["" if row % 3 == 0 else name for row, name in enumerate(ids)]
    check(model, X, weights_of(model, lookup), clients=mixed)
    check(model, X, weights_of(model, lookup), clients=list(mixed))
    check(model, X, model.weights_, clients=missing)
    check(model, X, model.weights_, clients=[missing] * len(X))


def test_dictionaries_and_pairs(fitted):
    model, X, ids = fitted
    order = np.argsort(ids, kind="stable")
    clients = as_dict(X, ids)
    check_with = weights_of(model, ids[order])
    joint = expected_joint(model, X[order], check_with)
    for form in (clients, list(clients.items())):
        assert_close(model.score_samples(form), logsumexp(joint, axis=1), 1e-10)
    assert np.array_equal(model.predict(iter(clients.items())), joint.argmax(axis=1))
    # Rows without a client in a dictionary.
    joint = expected_joint(model, X, model.weights_)
    assert_close(model.score_samples({None: X}), logsumexp(joint, axis=1), 1e-10)


def test_a_part_of_the_clients_in_another_order(fitted):
    model, X, _ = fitted
    ids = np.where(np.arange(len(X)) % 2, "oslo", "bergen")
    check(model, X, weights_of(model, ids), clients=ids)


@pytest.mark.usefixtures("small_blocks")
def test_many_blocks_and_lanes(fitted, threads):
    threads(2)
    model, X, ids = fitted
    check(model, X, weights_of(model, ids), clients=ids)


def test_numbers_as_ids(rng):
    X = rng.normal(size=(30, 2))
    ids = np.array([7, 3, 3] * 10)
    model = FederatedGaussianMixture(2, random_state=0, max_iter=3).fit(X, clients=ids)
    assert model.clients_.tolist() == [3, 7]
    check(model, X, model.client_weights_[0], clients=3)
    check(model, X, model.client_weights_[(ids == 7).astype(int)], clients=ids.astype(float))
    check(model, X, model.client_weights_[1], clients=np.int64(7))


# ---------------------------------------------------------------------- against scikit-learn


@pytest.mark.parametrize("kind", KINDS)
def test_one_client_is_scikit_learn(rng, kind):
    X, _ = blobs(rng, rows=200)
    options = {"covariance_type": kind, "max_iter": 10, **random_start(rng, X, kind, M)}
    reference = GaussianMixture(M, **options).fit(X)
    model = FederatedGaussianMixture(M, **options).fit(X)
    new = rng.normal(size=(40, 3)) * 3
    for clients in (None, 0):
        assert_close(model.score_samples(new, clients=clients), reference.score_samples(new))
        assert_close(model.predict_proba(new, clients=clients), reference.predict_proba(new))
        assert np.array_equal(model.predict(new, clients=clients), reference.predict(new))
        for name in ("score", "bic", "aic"):
            expected = getattr(reference, name)(new)
            assert getattr(model, name)(new, clients=clients) == pytest.approx(expected, rel=1e-8)


# ---------------------------------------------------------------------- criteria


def test_private_weights_are_counted(fitted):
    model, X, ids = fitted
    covariances = {"full": M * 6, "tied": 6, "diag": M * 3, "spherical": M, "identity": 0}
    shared = covariances[model.covariance_type] + M * 3
    per_row = logsumexp(expected_joint(model, X, weights_of(model, ids)), axis=1)
    private = shared + 3 * (M - 1)
    bic, aic = -2 * per_row.sum() + private * np.log(50), -2 * per_row.sum() + 2 * private
    assert model.bic(X, clients=ids) == pytest.approx(bic, rel=1e-10)
    assert model.aic(X, clients=ids) == pytest.approx(aic, rel=1e-10)
    assert model.bic(as_dict(X, ids)) == pytest.approx(bic, rel=1e-10)
    assert model.aic(iter(as_dict(X, ids).items())) == pytest.approx(aic, rel=1e-10)

    per_row = logsumexp(expected_joint(model, X, model.weights_), axis=1)
    bic = -2 * per_row.sum() + (shared + M - 1) * np.log(50)
    assert model.bic(X) == pytest.approx(bic, rel=1e-10)


def test_shared_weights_are_counted_once(rng):
    X, _ = blobs(rng, rows=90)
    ids = np.arange(90) % 9
    model = FederatedGaussianMixture(2, shared_weights=True, random_state=0).fit(X, clients=ids)
    assert model.bic(X, clients=ids) == pytest.approx(model.bic(X), rel=1e-12)
    assert model.aic(X, clients=ids) == pytest.approx(model.aic(X), rel=1e-12)


# ---------------------------------------------------------------------- sampling


def test_samples_have_the_moments_of_the_model(fitted):
    model, *_ = fitted
    rows, labels = model.set_params(random_state=1).sample(40_000)
    assert rows.shape == (40_000, 3)
    components, columns = model.means_.shape
    full = full_covariances(model.covariances_, model.covariance_type, components, columns)
    assert_close(np.bincount(labels, minlength=M) / 40_000, model.weights_, 0.03)
    for m in range(M):
        own = rows[labels == m]
        deviation = np.sqrt(np.diag(full[m]) / len(own))
        assert (np.abs(own.mean(0) - model.means_[m]) < 5 * deviation).all()
        assert_close(np.cov(own.T), full[m], 0.08)


def test_samples_of_clients(fitted):
    model, *_ = fitted
    _, labels = model.sample(20_000, clients="oslo")
    assert_close(np.bincount(labels, minlength=M) / 20_000, model.client_weights_[2], 0.03)
    ids = np.repeat(["bergen", "oslo"], 10_000)
    rows, labels = model.sample(20_000, clients=ids)
    assert rows.shape == (20_000, 3)
    for name, code in (("bergen", 0), ("oslo", 2)):
        share = np.bincount(labels[ids == name], minlength=M) / 10_000
        assert_close(share, model.client_weights_[code], 0.04)
    _, labels = model.sample(20_000, clients=[None] * 20_000)
    assert_close(np.bincount(labels, minlength=M) / 20_000, model.weights_, 0.03)


def test_the_seed_decides_the_sample(fitted):
    model, *_ = fitted
    assert np.array_equal(model.sample(7)[0], model.sample(7)[0])
    assert not np.array_equal(model.sample(7)[0], model.set_params(random_state=5).sample(7)[0])
    generator = np.random.RandomState(0)
    model.set_params(random_state=generator)
    assert not np.array_equal(model.sample(7)[0], model.sample(7)[0])


def test_bad_samples(fitted):
    model, *_ = fitted
    with pytest.raises(ValueError, match="n_samples"):
        model.sample(0)
    with pytest.raises(TypeError, match="n_samples"):
        model.sample(2.5)
    with pytest.raises(ValueError, match="paris"):
        model.sample(3, clients="paris")
    with pytest.raises(ValueError, match="paris"):
        model.sample(2, clients=["oslo", "paris"])
    with pytest.raises(ValueError, match="2 entries"):
        model.sample(3, clients=["oslo", "oslo"])
