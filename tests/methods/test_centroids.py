from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from fedgmm.methods.centroids import Centroids, nearest, server_means
from oracles import assert_close


def test_nearest_is_brute_force_among_the_active(rng):
    x, centres = rng.normal(size=(30, 3)), rng.normal(size=(30, 5, 3))
    active = rng.uniform(size=(30, 5)) < 0.6
    active[:, 2] = True
    index, squared = nearest(*map(torch.from_numpy, (x, centres, active)))
    for i in range(30):
        distances = np.where(active[i], cdist(x[i : i + 1], centres[i])[0] ** 2, np.inf)
        assert index[i] == distances.argmin()
        assert squared[i].item() == pytest.approx(distances.min(), rel=1e-12)


@pytest.fixture
def planted(rng):
    """Centroids around three far-apart places, and those places."""
    places = np.array([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0]])
    labels = rng.integers(3, size=60)
    points = places[labels] + rng.normal(size=(60, 2))
    counts = rng.integers(2, 50, size=60).astype(float)
    weighted = np.stack(
        [np.average(points[labels == k], axis=0, weights=counts[labels == k]) for k in range(3)]
    )
    return Centroids(points, counts), weighted


def test_the_server_finds_the_weighted_means(planted):
    sent, expected = planted
    found = server_means(sent, 3, "kmeans", seed=0)
    assert_close(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)], 1e-9)


def test_k_means_plus_plus_picks_centroids_far_apart(planted):
    sent, _ = planted
    found = server_means(sent, 3, "k-means++", seed=0)
    assert (cdist(found, sent.points).min(axis=1) == 0).all()
    assert cdist(found, found)[np.triu_indices(3, 1)].min() > 50


@pytest.mark.parametrize("start", ["kmeans", "k-means++"])
@given(seed=st.integers(0, 10_000), constant=st.booleans())
def test_the_order_of_the_answers_and_their_last_bits_do_not_matter(start, seed, constant):
    rng = np.random.default_rng(seed)
    points, counts = rng.normal(size=(40, 3)), rng.integers(2, 9, size=40).astype(float)
    if constant:
        points[:, 0] = 0.1
    order = rng.permutation(40)
    # A client's sum depends on how its rows were cut into blocks, in the last bits.
    other = points[order] * (1 + rng.choice([-2, -1, 0, 1, 2], size=points.shape) * 2.0**-52)
    here = server_means(Centroids(points, counts), 4, start, seed)
    there = server_means(Centroids(other, counts[order]), 4, start, seed)
    assert_close(there, here, 1e-9)


@pytest.mark.parametrize("start", ["kmeans", "k-means++"])
def test_few_different_centroids_come_back_once_each(start):
    points = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    found = server_means(Centroids(points, np.array([2.0, 2.0, 2.0])), 3, start, 0)
    assert np.array_equal(found, [[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize("start", ["kmeans", "k-means++"])
def test_no_centroid_at_all(start):
    found = server_means(Centroids(np.empty((0, 5)), np.empty(0)), 3, start, 0)
    assert found.shape == (0, 5)
