"""Principal components from sums, against scikit-learn on the pooled rows."""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import decomposition

from fedgmm.core.pca import FeatureMoments, fit_pca, moments_of


def rows_of(rng, n=200, d=12, offset=0.0):
    """Rows with clearly different variances along skew directions."""
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    return rng.normal(size=(n, d)) * np.geomspace(5, 0.1, d) @ basis + offset


def moments(x, centre=None):
    x = torch.from_numpy(np.ascontiguousarray(x))
    return moments_of(x, torch.zeros(x.shape[1]) if centre is None else torch.as_tensor(centre))


def up_to_sign(a, b):
    return a * np.sign((a * b).sum(1, keepdims=True))


@pytest.mark.parametrize("k", [1, 5, 12])
@pytest.mark.parametrize("offset", [0.0, 1e5])
@pytest.mark.parametrize("whiten", [False, True])
def test_it_is_scikit_learns_pca_of_the_pooled_rows(rng, k, offset, whiten):
    x = rows_of(rng, offset=offset)
    centre = x.mean(0) + 0.1  # near the mean, not on it
    clients = np.split(x, [3, 50, 50, 120])
    ours = fit_pca(reduce(add, (moments(own, centre) for own in clients)), k)
    theirs = decomposition.PCA(k, whiten=whiten, svd_solver="full").fit(x)
    tolerance = 1e-8
    np.testing.assert_allclose(ours.mean, theirs.mean_, rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(ours.variances, theirs.explained_variance_, rtol=tolerance)
    components = ours.components.numpy()
    flipped = up_to_sign(theirs.components_, components)
    np.testing.assert_allclose(components, flipped, atol=tolerance)
    actual = ours.apply(torch.from_numpy(x), whiten=whiten).numpy()
    expected = up_to_sign(theirs.transform(x).T, actual.T).T
    np.testing.assert_allclose(actual, expected, atol=tolerance)


@given(
    cuts=st.lists(st.integers(0, 60), max_size=6),
    seed=st.integers(0, 3),
    narrow=st.booleans(),
)
def test_moments_add_up_over_any_split_of_the_rows(cuts, seed, narrow):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(60, 4)) * [1, 10, 0.1, 3] + [5, 0, -2, 1]
    x = x.astype(np.float32) if narrow else x
    centre = rng.normal(size=4)
    whole = moments(x, centre)
    parts = reduce(add, (moments(own, centre) for own in np.split(x, sorted(cuts))))
    assert parts.count == whole.count == 60
    assert parts.first.dtype == parts.second.dtype == torch.float64
    torch.testing.assert_close(parts.first, whole.first, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(parts.second, whole.second, rtol=1e-12, atol=1e-10)
    x = x.astype(np.float64)
    np.testing.assert_allclose(whole.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(whole.covariance, np.cov(x.T), rtol=1e-10, atol=1e-11)


def test_many_rows_go_through_in_blocks(rng, monkeypatch):
    x = rows_of(rng, n=103)
    whole = moments(x)
    coordinates = fit_pca(whole, 3).apply(torch.from_numpy(x))
    monkeypatch.setattr("fedgmm.core.pca._BLOCK_ROWS", 10)
    blocks = moments(x)
    torch.testing.assert_close(blocks.second, whole.second, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(fit_pca(whole, 3).apply(torch.from_numpy(x)), coordinates)


def test_moments_around_different_centres_do_not_add(rng):
    x = rng.normal(size=(5, 2))
    with pytest.raises(ValueError, match="one centre"):
        moments(x, [0.0, 0.0]) + moments(x, [0.0, 1.0])


def test_the_sign_is_that_of_the_largest_entry(rng):
    components = fit_pca(moments(rows_of(rng)), 12).components.numpy()
    largest = np.abs(components).argmax(1)
    assert (components[np.arange(12), largest] > 0).all()


def test_rounding_does_not_decide_the_sign():
    # Entries of equal size: (1, -1)/√2 twice, with a hair's difference either way.
    for hair in (1e-12, -1e-12):
        second = torch.tensor([[2.0 + hair, -2.0], [-2.0, 2.0 - hair]], dtype=torch.float64)
        zero = torch.zeros(2, dtype=torch.float64)
        (component,) = fit_pca(FeatureMoments(10, zero, second, zero), 1).components.tolist()
        assert component == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_components_are_orthonormal_and_fall_in_variance(rng):
    pca = fit_pca(moments(rows_of(rng)), 7)
    np.testing.assert_allclose(pca.components @ pca.components.T, np.eye(7), atol=1e-12)
    assert (pca.variances.diff() <= 0).all()


def test_whitened_training_rows_have_unit_covariance(rng):
    x = rows_of(rng)
    z = fit_pca(moments(x), 6).apply(torch.from_numpy(x), whiten=True).numpy()
    np.testing.assert_allclose(np.cov(z.T), np.eye(6), atol=1e-10)
    np.testing.assert_allclose(z.mean(0), 0, atol=1e-10)


def test_whitening_does_not_blow_up_directions_without_spread(rng):
    x = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 20))  # two directions, and rounding
    pca = fit_pca(moments(x), 8)
    assert 0 < pca.variances[2] < 1e-12
    z = pca.apply(torch.from_numpy(x), whiten=True).numpy()
    np.testing.assert_allclose(z[:, :2].std(0, ddof=1), 1)
    assert np.abs(z[:, 2:]).max() < 1e-6
    stranger = torch.from_numpy(x[:1] + rng.normal(size=(1, 20)))  # leaves the two directions
    assert pca.apply(stranger, whiten=True).abs().max() < 10
    same = np.full((6, 3), 4.2)
    assert torch.isfinite(fit_pca(moments(same), 3).apply(torch.from_numpy(same), True)).all()


def test_float32_rows_are_projected_in_float64(rng):
    x = rows_of(rng, offset=1000.0).astype(np.float32)
    pca = fit_pca(moments(x, x.mean(0)), 3)
    narrow, wide = pca.apply(torch.from_numpy(x)), pca.apply(torch.from_numpy(x).double())
    assert narrow.dtype == torch.float64
    assert torch.equal(narrow, wide)


def test_no_rows_are_projected_to_no_rows(rng):
    assert fit_pca(moments(rows_of(rng)), 3).apply(torch.zeros(0, 12)).shape == (0, 3)


@pytest.mark.parametrize(
    ("n", "k", "message"),
    [
        (1, 1, "at least 2 rows, got 1"),
        (20, 0, "components must be at least 1"),
        (20, 5, r"components=5 is more than 20 rows of 4 columns"),
        (3, 4, "use at most 3"),
    ],
)
def test_impossible_requests_are_refused(rng, n, k, message):
    with pytest.raises(ValueError, match=message):
        fit_pca(moments(rng.normal(size=(n, 4))), k)


def test_a_value_that_is_not_a_number_is_refused(rng):
    x = rng.normal(size=(8, 2))
    x[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        fit_pca(moments(x), 1)
