"""Federated equals pooled: however rows are split, scikit-learn's fit on all rows comes out."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from fedgmm import FederatedGaussianMixture
from oracles import KINDS, assert_close, blobs, ragged_ids, random_start

ROWS, M = 600, 3
# the lower bounds of thirty iterations say how every iteration before went
SOME = [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 10)), 30]
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@cache
def problem(kind):
    """Rows, and a start far enough from the goal for thirty iterations to matter."""
    rng = np.random.default_rng(7)
    X, _ = blobs(rng, rows=ROWS)
    return X, random_start(rng, X, kind, M)


@cache
def pooled(kind, iterations):
    X, start = problem(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GaussianMixture(M, covariance_type=kind, max_iter=iterations, tol=0.0, **start).fit(
            X
        )


def same_fit(model, reference, rtol=1e-8):
    assert_close(model.means_, reference.means_, rtol)
    assert_close(model.covariances_, reference.covariances_, rtol)
    assert_close(model.weights_, reference.weights_, rtol)
    assert_close(model.precisions_cholesky_, reference.precisions_cholesky_, rtol)
    assert_close(model.lower_bounds_, reference.lower_bounds_, rtol)
    assert model.lower_bound_ == pytest.approx(reference.lower_bound_, rel=rtol)
    assert model.n_iter_ == reference.n_iter_


@pytest.mark.parametrize("iterations", SOME)
@pytest.mark.parametrize("clients", [1, 2, 17, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_federated_equals_pooled(kind, clients, iterations):
    X, start = problem(kind)
    ids = ragged_ids(np.random.default_rng(clients), ROWS, clients)
    if clients > 2:
        assert (np.bincount(ids) == 1).any()  # some clients of one row
    model = FederatedGaussianMixture(
        M, covariance_type=kind, shared_weights=True, max_iter=iterations, tol=0.0, **start
    ).fit(X, clients=ids)
    same_fit(model, pooled(kind, iterations))
    assert model.client_weights_.shape == (clients, M)
    assert (model.client_weights_ == model.weights_).all()


def test_thirty_iterations_do_move():
    # The comparison above would mean little at a fixed point.
    for kind in KINDS:
        one, many = pooled(kind, 1), pooled(kind, 30)
        assert np.abs(one.means_ - many.means_).max() > 0.1
        assert np.diff(many.lower_bounds_)[-1] > 1e-9


@pytest.mark.parametrize("iterations", SOME)
@pytest.mark.parametrize("aggregation", ["exact", "paper"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_client_with_private_weights_equals_pooled(kind, aggregation, iterations):
    X, start = problem(kind)
    model = FederatedGaussianMixture(
        M, covariance_type=kind, aggregation=aggregation, max_iter=iterations, tol=0.0, **start
    ).fit(X)
    same_fit(model, pooled(kind, iterations))
    assert_close(model.client_weights_[0], model.weights_, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_contiguous_clients_as_a_dictionary(kind):
    X, start = problem(kind)
    edges = np.sort(np.random.default_rng(1).choice(np.arange(1, ROWS), 16, replace=False))
    model = FederatedGaussianMixture(
        M, covariance_type=kind, shared_weights=True, max_iter=10, tol=0.0, **start
    ).fit({f"client {k}": part for k, part in enumerate(np.split(X, edges))})
    same_fit(model, pooled(kind, 10))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_and_blocks(threads, kind, number):
    threads(number)
    X, start = problem(kind)
    model = FederatedGaussianMixture(
        M, covariance_type=kind, shared_weights=True, max_iter=3, tol=0.0, **start
    ).fit(X, clients=ragged_ids(np.random.default_rng(0), ROWS, 17))
    same_fit(model, pooled(kind, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_wide_rows_take_the_split_products(kind):
    rng = np.random.default_rng(3)
    X, _ = blobs(rng, rows=400, columns=21)
    start = random_start(rng, X, kind, M)
    options = {"covariance_type": kind, "max_iter": 8, "tol": 0.0, **start}
    model = FederatedGaussianMixture(M, shared_weights=True, **options)
    same_fit(model.fit(X, clients=ragged_ids(rng, 400, 17)), GaussianMixture(M, **options).fit(X))


def test_the_stopping_rule_is_scikit_learns():
    X, start = problem("full")
    ids = ragged_ids(np.random.default_rng(5), ROWS, 17)
    reference = GaussianMixture(M, tol=1e-3, max_iter=200, **start).fit(X)
    model = FederatedGaussianMixture(M, shared_weights=True, tol=1e-3, max_iter=200, **start)
    same_fit(model.fit(X, clients=ids), reference)
    assert model.converged_
    assert reference.converged_


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_clients(kind):
    rng = np.random.default_rng(9)
    X, _ = blobs(rng, rows=100_000, columns=17)
    options = {"covariance_type": kind, "max_iter": 30, "tol": 0.0}
    options |= random_start(rng, X, kind, M)
    ids = ragged_ids(rng, len(X), 10_000)
    model = FederatedGaussianMixture(M, shared_weights=True, **options).fit(X, clients=ids)
    same_fit(model, GaussianMixture(M, **options).fit(X))


@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(20, 120),
    columns=st.integers(1, 5),
    components=st.integers(1, 4),
    clients=st.integers(1, 20),
    iterations=st.integers(1, 6),
)
def test_federated_equals_pooled_on_random_problems(
    kind, seed, rows, columns, components, clients, iterations
):
    rng = np.random.default_rng(seed)
    X, _ = blobs(rng, rows, columns, components, separation=1.0)
    options = {
        "covariance_type": kind,
        "max_iter": iterations,
        "tol": 0.0,
        "reg_covar": 1e-2,
        **random_start(rng, X, kind, components),
    }
    model = FederatedGaussianMixture(components, shared_weights=True, **options)
    model.fit(X, clients=ragged_ids(rng, rows, clients))
    same_fit(model, GaussianMixture(components, **options).fit(X))
