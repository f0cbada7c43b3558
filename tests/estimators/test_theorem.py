"""The paper's theorem: the total log-likelihood never falls, for any data and clients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import logsumexp

from fedgmm import FederatedGaussianMixture
from oracles import KINDS, assert_close, blobs, full_covariances, log_joint, ragged_ids

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def assert_never_falls(bounds, last):
    bounds = np.array([*bounds, last])
    assert np.isfinite(bounds).all()
    assert (np.diff(bounds) >= -1e-10 * (1 + np.abs(bounds[1:]))).all(), np.diff(bounds).min()


def brute_force_score(model, X, ids):
    """Mean log-likelihood of rows under their clients' weights, by SciPy."""
    components, columns = model.means_.shape
    full = full_covariances(model.covariances_, model.covariance_type, components, columns)
    joint = log_joint(X, np.ones(components), model.means_, full)
    rows = np.searchsorted(model.clients_, ids)
    with np.errstate(divide="ignore"):
        return logsumexp(joint + np.log(model.client_weights_[rows]), axis=1).mean()


numbers = st.floats(-100, 100, allow_subnormal=False)
matrices = arrays(
    np.float64, st.tuples(st.integers(2, 40), st.integers(1, 4)), elements=numbers, fill=numbers
)


@given(
    X=matrices,
    data=st.data(),
    components=st.integers(1, 5),
    init=st.sampled_from(["kmeans", "k-means++", "random"]),
    shared_weights=st.booleans(),
    aggregation=st.sampled_from(["exact", "paper"]),
    seed=st.integers(0, 1000),
)
def test_identity_covariances_any_data_any_clients(
    X, data, components, init, shared_weights, aggregation, seed
):
    components = min(components, len(X))
    ids = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(X), max_size=len(X))))
    model = FederatedGaussianMixture(
        components,
        covariance_type="identity",
        shared_weights=shared_weights,
        aggregation=aggregation,
        init_params=init,
        max_iter=12,
        tol=0.0,
        random_state=seed,
    ).fit(X, clients=ids)
    last = brute_force_score(model, X, ids)
    assert last == pytest.approx(model.score(X, clients=ids), rel=1e-9, abs=1e-9)
    assert_never_falls(model.lower_bounds_, last)
    assert (model.covariances_ == 1).all()


@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 30),
    components=st.integers(1, 4),
    shared_weights=st.booleans(),
)
def test_exact_aggregation_of_the_whole_model(kind, seed, clients, components, shared_weights):
    # Enough rows a component for the likelihood to be bounded along the way; nothing is added to
    # the covariances, so EM's promise holds to the letter.
    rng = np.random.default_rng(seed)
    X, _ = blobs(rng, rows=160, columns=2, components=components)
    ids = ragged_ids(rng, 160, clients)
    model = FederatedGaussianMixture(
        components,
        covariance_type=kind,
        shared_weights=shared_weights,
        reg_covar=0.0,
        max_iter=15,
        tol=0.0,
        random_state=seed % 1000,
    ).fit(X, clients=ids)
    assert_never_falls(model.lower_bounds_, brute_force_score(model, X, ids))


def test_one_round_of_the_papers_aggregation_can_fall():
    # Two clients whose heaps lie apart: the paper's covariance forgets the distance between them,
    # which is why the exact aggregation is the default.
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.normal(size=(100, 2)) - 5, rng.normal(size=(100, 2)) + 5])
    ids = np.repeat([0, 1], 100)
    options = {
        "means_init": [[0.0, 0.0]],
        "precisions_init": [np.eye(2) / 26],
        "weights_init": [1.0],
        "max_iter": 1,
        "tol": 0.0,
    }
    exact, paper = (
        FederatedGaussianMixture(1, aggregation=aggregation, **options).fit(X, clients=ids)
        for aggregation in ("exact", "paper")
    )
    assert exact.score(X, clients=ids) > exact.lower_bound_
    assert paper.score(X, clients=ids) < paper.lower_bound_ - 1
    assert_close(exact.means_, paper.means_, 1e-12)
