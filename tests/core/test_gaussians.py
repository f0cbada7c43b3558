from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from sklearn.mixture import GaussianMixture

from fedgmm.core.em import update_gaussians
from fedgmm.core.gaussians import (
    CovarianceRepairWarning,
    Gaussians,
    covariance_parameters,
    gaussians,
    inverse_of_precisions,
    log_densities,
    occupied,
    residuals,
    weighted_moments,
)
from oracles import (
    ALL_KINDS,
    KINDS,
    assert_close,
    full_covariances,
    random_covariances,
    second_moments_of_kind,
)

M = 3


def make(rng, kind, columns, components=M):
    means = rng.normal(size=(components, columns))
    covariances = random_covariances(rng, kind, components, columns)
    shared = gaussians(torch.from_numpy(means), torch.from_numpy(covariances), kind)
    return shared, means, full_covariances(covariances, kind, components, columns)


# ---------------------------------------------------------------------- densities


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_log_densities_are_scipys(rng, kind, columns):
    shared, means, full = make(rng, kind, columns)
    x = rng.normal(size=(40, columns)) * 2
    expected = np.stack(
        [multivariate_normal(means[m], full[m]).logpdf(x) for m in range(M)], axis=-1
    )
    found = log_densities(residuals(torch.from_numpy(x), shared.means), shared)
    assert found.dtype == torch.float64
    assert_close(found, expected, 1e-11)


@pytest.mark.parametrize("columns", [3, 20])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_leading_dimensions_are_independent(rng, kind, columns):
    shared, means, full = make(rng, kind, columns)
    x = rng.normal(size=(2, 4, 7, columns))
    found = log_densities(residuals(torch.from_numpy(x), shared.means), shared)
    assert found.shape == (2, 4, 7, M)
    for m in range(M):
        assert_close(found[..., m], multivariate_normal(means[m], full[m]).logpdf(x), 1e-11)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_distant_origin_costs_no_precision(rng, kind):
    shared, means, _ = make(rng, kind, 4)
    x = rng.normal(size=(30, 4))
    # An offset that float64 holds exactly: the same problem, elsewhere.
    offset = 2.0**27
    x, means = np.round(x * 1024) / 1024, np.round(means * 1024) / 1024
    near = Gaussians(torch.from_numpy(means), *_parameters(shared), kind)
    far = Gaussians(torch.from_numpy(means + offset), *_parameters(shared), kind)
    here = log_densities(residuals(torch.from_numpy(x), near.means), near)
    there = log_densities(residuals(torch.from_numpy(x + offset), far.means), far)
    assert torch.equal(here, there)


def _parameters(shared):
    return shared.covariances, shared.precisions_cholesky


@pytest.mark.parametrize("columns", [3, 17])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_float32_products(rng, kind, columns):
    shared, *_ = make(rng, kind, columns)
    x = torch.from_numpy(rng.normal(size=(50, columns)))
    exact = log_densities(residuals(x, shared.means), shared)
    rounded = log_densities(residuals(x, shared.means, torch.float32), shared)
    assert rounded.dtype == torch.float64
    assert 0 < (exact - rounded).abs().max() < 1e-4


def test_an_offset_costs_float32_rows_no_precision():
    # In float32, 1e8 + 1 is 1e8: the difference would be zero.
    means = torch.tensor([[1e8 - 1.0]], dtype=torch.float64)
    difference = residuals(torch.tensor([[1e8]], dtype=torch.float32), means, torch.float32)
    assert difference.dtype == torch.float32
    assert difference.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_densities_stay_finite_however_far_and_narrow(kind, dtype):
    columns = 3
    covariances = {
        "full": torch.eye(columns).double().expand(2, -1, -1) * 1e-200,
        "tied": torch.eye(columns).double() * 1e-200,
        "diag": torch.full((2, columns), 1e-200, dtype=torch.float64),
        "spherical": torch.full((2,), 1e-200, dtype=torch.float64),
    }[kind]
    shared = gaussians(torch.zeros(2, columns, dtype=torch.float64), covariances, kind)
    x = torch.tensor([[0.0, 0.0, 0.0], [1e14, -1e14, 1e14]], dtype=torch.float64)
    found = log_densities(residuals(x, shared.means, dtype), shared)
    assert torch.isfinite(found).all()
    assert (found[0] > 0).all()
    assert (found[1] < -1e30).all()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_whiteners_and_determinants(rng, kind):
    shared, _, full = make(rng, kind, 5)
    w = shared.precisions_cholesky.numpy()
    determinants = np.broadcast_to(shared.log_determinants.numpy(), (M,))
    for m in range(M):
        own = w if kind == "tied" else w[m]
        own = own if own.ndim == 2 else np.diag(np.broadcast_to(own, 5))
        assert_close(own @ own.T, np.linalg.inv(full[m]), 1e-10)
        assert_close(determinants[m], -0.5 * np.linalg.slogdet(full[m])[1], 1e-10)


# ---------------------------------------------------------------------- moments


@pytest.mark.parametrize("leading", [(), (2, 3)])
@pytest.mark.parametrize("columns", [1, 4, 16, 19])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_weighted_moments_are_plain_sums(rng, kind, columns, leading):
    x = rng.normal(size=(*leading, 25, columns))
    means = rng.normal(size=(M, columns))
    q = rng.dirichlet(np.ones(M), size=(*leading, 25))
    difference = residuals(torch.from_numpy(x), torch.from_numpy(means))
    moments, weighted = weighted_moments(difference, torch.from_numpy(q), kind)

    r = x[..., None, :, :] - means[:, None, :]
    second = np.einsum("...nm,...mni,...mnj->...mij", q, r, r)
    expected = second_moments_of_kind(second, kind)
    assert_close(moments.counts, q.sum(-2), 1e-12)
    assert_close(moments.first, np.einsum("...nm,...mni->...mi", q, r), 1e-12)
    assert_close(moments.second, expected, 1e-12)
    assert_close(weighted, np.swapaxes(q, -1, -2)[..., None] * r, 1e-12)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_moments_of_float32_residuals_are_float64_sums(rng, kind):
    difference = torch.from_numpy(rng.normal(size=(M, 60, 17))).float()
    q = torch.from_numpy(rng.dirichlet(np.ones(M), size=60))
    found, _ = weighted_moments(difference, q, kind)
    exact, _ = weighted_moments(difference.double(), q, kind)
    for name in ("counts", "first", "second"):
        assert getattr(found, name).dtype == torch.float64
        assert_close(getattr(found, name), getattr(exact, name), 1e-5)


def test_occupied_knows_rounding_from_rows():
    counts = torch.tensor([100.0, 0.0, 1e-17, 1e-3], dtype=torch.float64)
    assert occupied(counts).tolist() == [True, False, False, True]


# ---------------------------------------------------------------------- repair


def singular(kind, columns=3):
    """Parameters of three components of which number 1 (or the shared one) is singular."""
    flat = np.eye(columns)
    flat[0, 0] = 0.0
    return {
        "full": np.stack([np.eye(columns), flat, 2 * np.eye(columns)]),
        "tied": flat,
        "diag": np.stack([np.ones(columns), np.diag(flat), np.full(columns, 2.0)]),
        "spherical": np.array([1.0, 0.0, 2.0]),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_singular_covariance_is_repaired_and_the_warning_names_it(kind):
    given = singular(kind)
    with pytest.warns(CovarianceRepairWarning) as caught:
        shared = gaussians(torch.zeros(3, 3).double(), torch.from_numpy(given), kind)
    text = "\n".join(str(warning.message) for warning in caught)
    assert ("shared by all components" if kind == "tied" else "of component 1 ") in text
    assert "component 0" not in text
    assert "component 2" not in text
    assert len(caught) == 1
    assert torch.isfinite(shared.precisions_cholesky).all()
    full = full_covariances(shared.covariances.numpy(), kind, 3, 3)
    assert (np.linalg.eigvalsh(full) > 0).all()
    assert_close(shared.covariances, given, 1e-10)  # the nearest one, not another one
    if kind != "tied":
        assert torch.equal(shared.covariances[0], torch.from_numpy(given)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_all_zero_covariances_are_repaired(kind):
    zeros = torch.zeros(
        {"full": (2, 3, 3), "tied": (3, 3), "diag": (2, 3)}.get(kind, (2,))
    ).double()
    with pytest.warns(CovarianceRepairWarning):
        shared = gaussians(torch.zeros(2, 3).double(), zeros, kind)
    found = log_densities(residuals(torch.zeros(4, 3).double(), shared.means), shared)
    assert torch.isfinite(found).all()


def test_repair_gives_a_matrix_that_is_not_repaired_again():
    with pytest.warns(CovarianceRepairWarning):
        first = gaussians(torch.zeros(3, 3).double(), torch.from_numpy(singular("full")), "full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = gaussians(first.means, first.covariances, "full")
    assert torch.equal(first.covariances, second.covariances)


@pytest.mark.parametrize("kind", KINDS)
def test_very_different_scales_are_no_reason_for_a_repair(kind):
    variances = torch.tensor([1e-16, 1.0, 1e16], dtype=torch.float64)
    given = {
        "full": torch.diag(variances).expand(2, -1, -1),
        "tied": torch.diag(variances),
        "diag": variances.expand(2, -1),
        "spherical": variances[:2],
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared = gaussians(torch.zeros(2, 3).double(), given, kind)
    assert torch.equal(shared.covariances, given)


@given(
    noise=st.floats(1e-40, 1e-18),
    overlap=st.floats(-1e-8, 1e-8),
    seed=st.integers(0, 1000),
)
def test_a_variance_that_is_only_rounding_can_be_repaired(noise, overlap, seed):
    # "Correlations" far above one: the repaired matrix must still have a Cholesky factor.
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(4, 2))
    matrix = factor @ factor.T
    matrix[0], matrix[:, 0] = overlap, overlap
    matrix[0, 0] = noise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CovarianceRepairWarning)
        shared = gaussians(torch.zeros(1, 4).double(), torch.from_numpy(matrix)[None], "full")
    assert torch.isfinite(shared.precisions_cholesky).all()
    assert not torch.linalg.cholesky_ex(shared.covariances[0]).info
    scale = shared.covariances[0].diagonal().sqrt()
    correlation = shared.covariances[0] / scale / scale[:, None]
    # eigenvalues have rounding errors of their own, and the smallest may be as small
    assert (torch.linalg.eigvalsh(correlation) > -4 * torch.finfo(torch.float64).eps).all()


@given(
    constant=st.floats(-1e6, 1e6),
    column=st.integers(0, 4),
    copied=st.booleans(),
    seed=st.integers(),
)
def test_a_repair_for_one_column_leaves_the_others(constant, column, copied, seed):
    # A constant column far from zero has a variance of pure rounding; a copied one has no pivot.
    rng = np.random.default_rng(abs(seed))
    x = rng.normal(size=(60, 5)) @ rng.normal(size=(5, 5))
    if copied:
        x[:, column - 1] = 2 * x[:, column - 2]
    x[:, column] = constant
    shared = Gaussians(
        torch.from_numpy(x[:1].copy()), torch.eye(5).double()[None], torch.eye(5)[None], "full"
    )
    difference = residuals(torch.from_numpy(x), shared.means)
    moments, _ = weighted_moments(difference, torch.ones(60, 1).double(), "full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CovarianceRepairWarning)
        new = update_gaussians(moments, shared, 0.0)
    assert torch.isfinite(new.precisions_cholesky).all()
    assert_close(new.covariances[0], np.cov(x, rowvar=False, ddof=0), 1e-9)


# ---------------------------------------------------------------------- size


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_counts_are_scikit_learns(rng, kind):
    reference = GaussianMixture(M, covariance_type=kind).fit(rng.normal(size=(50, 4)))
    means_and_weights = M * 4 + M - 1
    assert covariance_parameters(kind, M, 4) + means_and_weights == reference._n_parameters()


def test_identity_has_no_covariance_parameters():
    assert covariance_parameters("identity", M, 4) == 0


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_inverse_of_precisions(rng, kind):
    covariances = random_covariances(rng, kind, 3, 4)
    precisions = np.linalg.inv(covariances) if kind in ("full", "tied") else 1 / covariances
    assert_close(inverse_of_precisions(precisions, kind), covariances, 1e-12)
