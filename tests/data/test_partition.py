"""How pooled rows become clients that differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.data.partition import dirichlet_by_label, joint_shift, transform_images


@given(
    n=st.integers(1, 200),
    clients=st.integers(1, 200),
    classes=st.integers(1, 6),
    alpha=st.sampled_from([1e-6, 1e-3, 0.4, 10.0, 1e6]),
    seed=st.integers(0, 9),
)
def test_every_row_has_a_client_and_every_client_a_row(n, clients, classes, alpha, seed):
    clients = min(n, clients)
    labels = np.random.default_rng(seed).integers(classes, size=n)
    owner = dirichlet_by_label(labels, clients, alpha, seed)
    assert owner.shape == (n,)
    assert sorted(np.unique(owner).tolist()) == list(range(clients))
    assert (owner == dirichlet_by_label(labels, clients, alpha, seed)).all()


def test_another_seed_deals_otherwise():
    labels = np.arange(500) % 5
    assert (dirichlet_by_label(labels, 10, seed=0) != dirichlet_by_label(labels, 10, seed=1)).any()


@pytest.mark.parametrize("alpha", [0.4, 5.0])
def test_shares_of_a_class_follow_the_dirichlet_distribution(alpha):
    """Moments over many classes: mean 1/C, variance (1/C)(1 - 1/C) / (Cα + 1)."""
    classes, clients, rows = 400, 4, 500
    labels = np.repeat(np.arange(classes), rows)
    owner = dirichlet_by_label(labels, clients, alpha, seed=2)
    shares = np.stack(
        [np.bincount(owner[labels == k], minlength=clients) / rows for k in range(classes)]
    )
    np.testing.assert_allclose(shares.sum(1), 1.0)
    np.testing.assert_allclose(shares.mean(0), 1 / clients, atol=0.04)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    np.testing.assert_allclose(shares.var(0).mean(), variance, rtol=0.15)


def test_a_tiny_alpha_gives_a_class_to_one_client_and_a_large_one_deals_evenly():
    labels = np.repeat(np.arange(10), 1000)
    narrow = dirichlet_by_label(labels, 5, 1e-6)
    for k in range(10):
        assert np.bincount(narrow[labels == k], minlength=5).max() >= 995
    even = dirichlet_by_label(labels, 5, 1e6)
    for k in range(10):
        assert np.ptp(np.bincount(even[labels == k], minlength=5)) <= 4


@pytest.mark.parametrize(("clients", "alpha"), [(0, 1.0), (11, 1.0), (3, 0.0), (3, -1.0)])
def test_what_cannot_be_dealt_is_named(clients, alpha):
    with pytest.raises(ValueError, match=r"clients must lie|alpha must be positive"):
        dirichlet_by_label(np.zeros(10, dtype=int), clients, alpha)


# ---------------------------------------------------------------------- the paper's T


def test_an_image_is_turned_flipped_and_inverted():
    image = np.array([[1.0, 2.0], [3.0, 4.0]])
    # turned by 90 degrees against the clock: [[2, 4], [1, 3]]; flipped left to right:
    # [[4, 2], [3, 1]]; taken from 10:
    np.testing.assert_array_equal(transform_images(image[None], 10.0)[0], [[6.0, 8.0], [7.0, 9.0]])


def test_every_channel_is_transformed_alike(rng):
    images = rng.random((2, 3, 4, 4))
    out = transform_images(images, 1.0)
    assert out.flags.c_contiguous
    for n in range(2):
        for channel in range(3):
            expected = 1.0 - np.fliplr(np.rot90(images[n, channel]))
            np.testing.assert_array_equal(out[n, channel], expected)


@pytest.mark.parametrize("n", [10, 11])
def test_half_of_the_rows_shift_in_inputs_and_labels(rng, n):
    images = rng.random((n, 1, 4, 4))
    labels = np.arange(n) % 5
    new_images, new_labels, changed = joint_shift(images, labels, 1.0, seed=3)
    assert changed.sum() == n // 2
    np.testing.assert_array_equal(new_images[~changed], images[~changed])
    np.testing.assert_array_equal(new_labels[~changed], labels[~changed])
    np.testing.assert_array_equal(new_images[changed], transform_images(images[changed], 1.0))
    # one permutation for all: the same old label has the same new one, and no two meet
    pairs = set(zip(labels[changed].tolist(), new_labels[changed].tolist(), strict=True))
    assert len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs)


def test_bytes_stay_bytes():
    images = np.array([[[0, 255], [10, 20]]] * 4, dtype=np.uint8)
    out, _, changed = joint_shift(images, np.zeros(4, dtype=int), 255.0)
    assert out.dtype == np.uint8
    np.testing.assert_array_equal(out[changed][0], [[235, 0], [245, 255]])


def test_the_shift_belongs_to_its_seed(rng):
    images, labels = rng.random((20, 1, 4, 4)), np.arange(20) % 5
    first, again, other = (joint_shift(images, labels, 1.0, seed=s) for s in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[2] != other[2]).any()
