"""Stacked equals looped: the batched run against a plain loop over clients, several rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgmm import FederatedGaussianMixture
from oracles import ALL_KINDS, as_dict, assert_close, blobs, looped_em, ragged_ids, random_start

M = 3
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def compare(X, ids, start, kind, rounds, rtol=1e-8, **options):
    if kind == "identity":
        start = {k: v for k, v in start.items() if k != "precisions_init"}
        covariances = np.ones(len(start["means_init"]))
    else:
        precisions = start["precisions_init"]
        covariances = np.linalg.inv(precisions) if kind in ("full", "tied") else 1 / precisions
    components = len(start["means_init"])
    model = FederatedGaussianMixture(
        components, covariance_type=kind, max_iter=rounds, tol=0.0, **start, **options
    ).fit(X, clients=ids)
    expected = looped_em(
        list(as_dict(X, ids).values()),
        start["weights_init"],
        start["means_init"],
        covariances,
        kind,
        rounds=rounds,
        **options,
    )
    assert_close(model.means_, expected.means, rtol)
    assert_close(model.covariances_, expected.covariances, rtol)
    assert_close(model.client_weights_, expected.client_weights, rtol)
    assert_close(model.weights_, expected.weights, rtol)
    assert_close(model.lower_bounds_, expected.bounds, rtol)
    assert model.clients_.tolist() == sorted(as_dict(X, ids))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shared_weights", [False, True])
@pytest.mark.parametrize("aggregation", ["exact", "paper"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_stacked_equals_looped(rng, kind, aggregation, shared_weights):
    X, _ = blobs(rng, rows=90)
    ids = ragged_ids(rng, 90, 6)
    compare(
        X,
        ids,
        random_start(rng, X, "full" if kind == "identity" else kind, M),
        kind,
        rounds=4,
        aggregation=aggregation,
        shared_weights=shared_weights,
    )


@given(
    kind=st.sampled_from(ALL_KINDS),
    aggregation=st.sampled_from(["exact", "paper"]),
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(12, 60),
    columns=st.integers(1, 4),
    components=st.integers(1, 4),
    clients=st.integers(1, 12),
)
def test_stacked_equals_looped_on_random_problems(
    kind, aggregation, seed, rows, columns, components, clients
):
    rng = np.random.default_rng(seed)
    X, _ = blobs(rng, rows, columns, components, separation=1.0)
    start = random_start(rng, X, "full" if kind == "identity" else kind, components)
    ids = ragged_ids(rng, rows, clients)
    compare(X, ids, start, kind, rounds=3, aggregation=aggregation, reg_covar=1e-2)


def test_private_weights_and_the_scatter_make_a_difference(rng):
    # Otherwise the comparisons above could not distinguish the modes.
    X, labels = blobs(rng, rows=180, separation=4.0)
    ids = np.where(rng.uniform(size=180) < 0.8, labels, rng.integers(3, size=180))
    start = random_start(rng, X, "full", M)
    fits = [
        FederatedGaussianMixture(M, max_iter=6, tol=0.0, **start, **options).fit(X, clients=ids)
        for options in ({}, {"aggregation": "paper"}, {"shared_weights": True})
    ]
    for other in fits[1:]:
        assert np.abs(fits[0].covariances_ - other.covariances_).max() > 1e-3
    assert np.ptp(fits[0].client_weights_, axis=0).max() > 0.5
