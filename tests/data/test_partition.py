"""How pooled rows become clients that differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.data.partition import (
    describe,
    dirichlet_by_label,
    draw_joint_shift,
    joint_shift,
    natural,
    pachinko,
    transform_images,
)


@pytest.mark.filterwarnings("error")  # overflow or NaN on the way
@given(
    n=st.integers(1, 200),
    clients=st.integers(1, 200),
    classes=st.integers(1, 6),
    alpha=st.sampled_from([5e-324, 1e-6, 1e-3, 0.4, 10.0, 1e6, float("inf")]),
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
def test_arguments_that_are_refused(clients, alpha):
    with pytest.raises(ValueError, match=r"clients|alpha"):
        dirichlet_by_label(np.zeros(10, dtype=int), clients, alpha)


# ---------------------------------------------------------------------- Pachinko allocation


@pytest.mark.filterwarnings("error")  # overflow or NaN on the way
@given(
    n=st.integers(1, 200),
    clients=st.integers(1, 200),
    coarse=st.integers(1, 5),
    fine=st.integers(1, 4),
    alphas=st.tuples(
        st.sampled_from([5e-324, 1e-6, 1e-3, 0.1, 1.0, 1e6, float("inf")]),
        st.sampled_from([5e-324, 1e-3, 10.0, 1e6, float("inf")]),
    ),
    seed=st.integers(0, 9),
)
def test_pachinko_deals_every_row_once_in_equal_parts(n, clients, coarse, fine, alphas, seed):
    clients = min(n, clients)
    labels = np.random.default_rng(seed).integers(coarse * fine, size=n)
    owner = pachinko(labels // fine, labels, clients, *alphas, seed=seed)
    counts = np.bincount(owner, minlength=clients)
    assert owner.shape == (n,)
    assert counts.shape == (clients,)
    assert np.ptp(counts) <= 1
    np.testing.assert_array_equal(owner, pachinko(labels // fine, labels, clients, *alphas, seed))


def test_pachinko_weights_follow_their_dirichlet_distributions():
    """First client, whose rows no label lacks: moments over many seeds.

    The variance of a share is (1/K)(1 - 1/K) / (Kα + 1), and that of the draws comes on top.
    """
    fine = np.repeat(np.arange(6), 200)
    coarse = fine // 3
    of_coarse, of_fine = [], []
    for seed in range(400):
        own = pachinko(coarse, fine, 6, 0.5, 2.0, seed) == 0
        size = own.sum()
        of_coarse.append((coarse[own] == 0).mean())
        if (coarse[own] == 0).sum() > 0.5 * size:
            of_fine.append((fine[own][coarse[own] == 0] == 0).mean())
    assert np.mean(of_coarse) == pytest.approx(1 / 2, abs=0.06)
    assert np.var(of_coarse) == pytest.approx((1 / 4) / (2 * 0.5 + 1), rel=0.15)
    assert np.mean(of_fine) == pytest.approx(1 / 3, abs=0.04)
    assert np.var(of_fine) == pytest.approx((2 / 9) / (3 * 2.0 + 1), rel=0.25)


def test_labels_that_run_out_are_renormalised():
    """Two clients share a coarse label of two rows; the rest of each comes from the other one."""
    coarse = np.array([0] * 2 + [1] * 8)
    for seed in range(20):
        owner = pachinko(coarse, np.arange(10), 2, 1e-6, 10.0, seed)
        first, second = (np.bincount(coarse[owner == c], minlength=2) for c in (0, 1))
        # the first takes its favourite until it is gone, so it takes all or nothing of the scarce one
        assert first.tolist() in ([2, 3], [0, 5])
        assert (first + second).tolist() == [2, 8]


def test_a_small_coarse_alpha_gives_a_client_few_superclasses():
    fine = np.repeat(np.arange(100), 60)
    coarse = fine // 5

    def superclasses(alpha):
        owner = pachinko(coarse, fine, 50, alpha)
        return np.median([len(np.unique(coarse[owner == client])) for client in range(50)])

    assert superclasses(1e-3) <= 2
    assert 2 < superclasses(0.1) < superclasses(1.0)


def test_another_seed_plays_another_pachinko():
    fine = np.arange(200) % 20
    assert (pachinko(fine // 5, fine, 10, seed=0) != pachinko(fine // 5, fine, 10, seed=1)).any()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"clients": 0}, "clients"),
        ({"clients": 11}, "clients"),
        ({"alpha_coarse": 0.0}, "alpha_coarse"),
        ({"alpha_fine": float("nan")}, "alpha_fine"),
        ({"fine": np.zeros(9, dtype=int)}, "one label per row"),
    ],
)
def test_arguments_that_pachinko_refuses(changes, problem):
    good = {"coarse": np.zeros(10, dtype=int), "fine": np.zeros(10, dtype=int), "clients": 3}
    with pytest.raises(ValueError, match=problem):
        pachinko(**(good | changes))


# ---------------------------------------------------------------------- natural, and what was made


def test_writers_keep_their_rows():
    np.testing.assert_array_equal(natural(["b", "a", "b", "c"]), [1, 0, 1, 2])
    np.testing.assert_array_equal(natural(np.array([7, 7, 3])), [1, 1, 0])
    with pytest.raises(ValueError, match="writers"):
        natural([])


def test_a_partition_is_described():
    owner = np.array([0, 0, 0, 1, 1, 4])
    labels = np.array([5, 5, 6, 5, 7, 5])
    assert describe(owner, labels) == (
        "3 clients with 6 rows; rows per client: 1 to 3 (median 2); "
        "classes per client: 1 to 2 (median 2)"
    )
    assert describe(np.zeros(1500, dtype=int), np.zeros(1500, dtype=int)).startswith(
        "1 client with 1,500 rows; rows per client: 1,500 to 1,500"
    )


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


def test_the_transform_undoes_itself(rng):
    images = rng.integers(256, size=(3, 2, 5, 5)).astype(np.uint8)
    np.testing.assert_array_equal(transform_images(transform_images(images, 255), 255), images)


def test_bytes_are_inverted_without_a_detour(rng):
    images = rng.integers(256, size=(4, 3, 6, 6)).astype(np.uint8)
    out = transform_images(images, 255.0)
    assert out.dtype == np.uint8
    wide = 255 - np.fliplr(np.rot90(images[1, 2].astype(int)))
    np.testing.assert_array_equal(out[1, 2], wide)


def test_images_that_cannot_be_transformed_are_named():
    with pytest.raises(ValueError, match="side, side"):
        transform_images(np.zeros((2, 3, 4)), 1.0)
    with pytest.raises(ValueError, match="side, side"):
        transform_images(np.zeros((4, 4)), 1.0)
    with pytest.raises(ValueError, match="largest"):
        transform_images(np.full((1, 2, 2), 17, dtype=np.uint8), 16)


@given(rows=st.integers(0, 50), classes=st.integers(1, 8), seed=st.integers(0, 5))
def test_half_of_the_rows_and_one_permutation_are_drawn(rows, classes, seed):
    changed, new_labels = draw_joint_shift(rows, classes, seed)
    assert changed.sum() == rows // 2
    assert sorted(new_labels.tolist()) == list(range(classes))
