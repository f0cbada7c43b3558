"""Data that break careless code: no NaN, no crash, and the right answer where there is one."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from fedgmm import FederatedGaussianMixture
from fedgmm.core.gaussians import CovarianceRepairWarning
from oracles import KINDS, assert_close, assert_finite, blobs, ragged_ids, random_start

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    # NumPy's "invalid value" and "overflow" are the first sign of trouble.
    pytest.mark.filterwarnings("error::RuntimeWarning"),
]


def base(rows=120, columns=4):
    rng = np.random.default_rng(11)
    return blobs(rng, rows, columns)[0]


def cases():
    X = base()
    scales = np.array([1e-8, 1e8, 1.0, 1e3])
    few = np.random.default_rng(12).normal(size=(7, 25))
    return {
        "offset": X + 1e6,
        "scales": X * scales,
        "offset and scales": (X + 100) * scales,
        "duplicates": np.repeat(X[:6], 20, axis=0),
        "one row many times": np.tile(X[0], (40, 1)),
        "zeros": np.zeros((30, 3)),
        "constant column": np.column_stack([X[:, :3], np.full(len(X), 1e6 + 0.1)]),
        "constant first column": np.column_stack([np.full(len(X), 0.1), X]),
        "copied column": np.column_stack([X, X[:, 0], X[:, 1] - X[:, 2]]),
        "fewer rows than columns": few,
        "tiny": X * 1e-30,
        "outlier": np.vstack([X, np.full(4, 1e9)]),
    }


# harder ones of the same kind stay: "offset and scales"
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("offset", "scales")))
    for name in cases()
]


def clients_of(X):
    """Seven rows a client, and the last three rows each a client of their own."""
    ids = np.arange(len(X)) // 7
    ids[-3:] = [901, 902, 903]
    return ids


@pytest.mark.filterwarnings("ignore::fedgmm.core.gaussians.CovarianceRepairWarning")
@pytest.mark.parametrize(
    ("kind", "shared_weights", "reg_covar"),
    [  # without regularisation it is harder
        pytest.param(*one, marks=[pytest.mark.slow] * (one[2] > 0 or (one[1] and one[0] != "full")))
        for one in product(KINDS, (False, True), (0.0, 1e-6))
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_finite_parameters_and_predictions(case, kind, shared_weights, reg_covar):
    X = cases()[case]
    ids = clients_of(X)
    for dtype, aggregation in (("float64", "exact"), ("float64", "paper"), ("float32", "exact")):
        model = FederatedGaussianMixture(
            3,
            covariance_type=kind,
            shared_weights=shared_weights,
            aggregation=aggregation,
            reg_covar=reg_covar,
            dtype=dtype,
            max_iter=3,
            tol=0.0,
            random_state=0,
        ).fit(X, clients=ids)
        assert_finite(model)
        assert np.isfinite(model.score_samples(X, clients=ids)).all()
        proba = model.predict_proba(X)
        np.testing.assert_allclose(proba.sum(axis=1), 1.0, rtol=1e-9)
        assert np.isfinite(model.sample(5)[0]).all()


@pytest.mark.filterwarnings("ignore::fedgmm.core.gaussians.CovarianceRepairWarning")
@pytest.mark.parametrize("init", [pytest.param("k-means++", marks=pytest.mark.slow), "random"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_other_starts(case, kind, init):
    X = cases()[case]
    model = FederatedGaussianMixture(
        3,
        covariance_type=kind,
        init_params=init,
        reg_covar=0.0,
        max_iter=8,
        tol=0.0,
        random_state=1,
    ).fit(X, clients=clients_of(X))
    assert_finite(model)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_of_one_row_only(kind):
    X = base()
    model = FederatedGaussianMixture(2, covariance_type=kind, max_iter=10, tol=0.0, random_state=0)
    model.fit(X, clients=np.arange(len(X)))
    assert_finite(model)
    assert model.client_weights_.shape == (len(X), 2)


@pytest.mark.filterwarnings("ignore::fedgmm.core.gaussians.CovarianceRepairWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_components_as_rows(kind):
    X = base(rows=6)
    for reg_covar in (1e-6, 0.0):
        model = FederatedGaussianMixture(
            6, covariance_type=kind, reg_covar=reg_covar, max_iter=10, tol=0.0, random_state=0
        )
        assert_finite(model.fit(X, clients=[0, 0, 1, 1, 2, 3]))


# ---------------------------------------------------------------------- the right answer


@pytest.mark.parametrize("shared_weights", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_offset_changes_nothing_but_the_means(kind, shared_weights):
    X = np.round(base() * 2**20) / 2**20
    offset = 2.0**20  # about 1e6, and X + offset is exact
    ids = ragged_ids(np.random.default_rng(0), len(X), 9)
    options = {
        "covariance_type": kind,
        "shared_weights": shared_weights,
        "max_iter": 20,
        "tol": 0.0,
        "random_state": 0,
    }
    here = FederatedGaussianMixture(3, **options).fit(X, clients=ids)
    there = FederatedGaussianMixture(3, **options).fit(X + offset, clients=ids)
    assert_close(there.means_ - offset, here.means_, 1e-7)
    assert_close(there.covariances_, here.covariances_, 1e-7)
    assert_close(there.client_weights_, here.client_weights_, 1e-7)
    assert_close(there.lower_bounds_, here.lower_bounds_, 1e-8)


@pytest.mark.parametrize("shared_weights", [False, True])
@pytest.mark.parametrize("kind", ["full", "tied", "diag"])
def test_units_of_the_columns_change_nothing_but_the_units(kind, shared_weights):
    rng = np.random.default_rng(1)
    X, scales = base(), 2.0 ** np.array([-27, 27, 0, 10])  # about 1e-8 and 1e8
    start = random_start(rng, X, kind, 3)
    outer = scales if kind == "diag" else np.outer(scales, scales)
    square = scales**2 if kind == "diag" else outer
    scaled = {
        "weights_init": start["weights_init"],
        "means_init": start["means_init"] * scales,
        "precisions_init": start["precisions_init"] / square,
    }
    ids = ragged_ids(rng, len(X), 9)
    options = {
        "covariance_type": kind,
        "shared_weights": shared_weights,
        "reg_covar": 0.0,
        "max_iter": 15,
        "tol": 0.0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", CovarianceRepairWarning)
        here = FederatedGaussianMixture(3, **options, **start).fit(X, clients=ids)
        there = FederatedGaussianMixture(3, **options, **scaled).fit(X * scales, clients=ids)
    assert_close(there.means_ / scales, here.means_, 1e-8)
    assert_close(there.covariances_ / square, here.covariances_, 1e-8)
    assert_close(there.client_weights_, here.client_weights_, 1e-8)
    jacobian = np.log(scales).sum()
    assert_close(np.array(there.lower_bounds_) + jacobian, here.lower_bounds_, 1e-8)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("shared_weights", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_near_float64(kind, shared_weights, offset):
    X = base(rows=300, columns=5)
    ids = ragged_ids(np.random.default_rng(2), 300, 20)
    fits = [
        FederatedGaussianMixture(
            3,
            covariance_type=kind,
            shared_weights=shared_weights,
            dtype=dtype,
            max_iter=12,
            tol=0.0,
            random_state=0,
        ).fit(X + offset, clients=ids)
        for dtype in ("float64", "float32")
    ]
    exact, rounded = fits
    assert rounded.means_.dtype == np.float64
    assert_close(rounded.means_ - offset, exact.means_ - offset, 1e-3)
    assert_close(rounded.covariances_, exact.covariances_, 1e-3)
    assert_close(rounded.client_weights_, exact.client_weights_, 1e-3)
    assert_close(rounded.lower_bounds_, exact.lower_bounds_, 1e-3)
    assert_close(rounded.score_samples(X + offset), exact.score_samples(X + offset), 1e-3)
    assert (rounded.means_ != exact.means_).any()  # it did run in another precision


@pytest.mark.parametrize("kind", KINDS)
def test_512_columns(kind):
    rng = np.random.default_rng(3)
    labels = rng.integers(2, size=300)
    X = rng.normal(size=(300, 512)) + 3 * labels[:, None]
    with warnings.catch_warnings():
        # Fewer rows than columns: full covariances live on reg_covar alone, and are not repaired.
        warnings.simplefilter("error", CovarianceRepairWarning)
        model = FederatedGaussianMixture(2, covariance_type=kind, max_iter=2, random_state=0).fit(
            X, clients=np.arange(300) % 7
        )
    assert_finite(model)
    found = model.predict(X)
    assert max((found == labels).mean(), (found != labels).mean()) == 1.0


def test_512_columns_without_regularisation():
    X = np.random.default_rng(4).normal(size=(80, 512))
    with pytest.warns(CovarianceRepairWarning, match="component 0"):
        model = FederatedGaussianMixture(1, reg_covar=0.0, max_iter=2, tol=0.0).fit(X)
    assert_finite(model)
    assert_close(model.covariances_[0], np.cov(X.T, ddof=0), 1e-9)


# ---------------------------------------------------------------------- repair and death


def two_heaps():
    """A healthy heap, and one row many times far away."""
    rng = np.random.default_rng(5)
    return np.concatenate([rng.normal(size=(60, 3)), np.full((30, 3), 50.0)])


@pytest.mark.parametrize("shared_weights", [False, True])
@pytest.mark.parametrize("kind", ["full", "diag", "spherical"])
def test_a_repair_names_the_component(kind, shared_weights):
    X = two_heaps()
    means = np.array([[0.0] * 3, [50.0] * 3])
    for sick in (0, 1):
        with pytest.warns(CovarianceRepairWarning) as caught:
            model = FederatedGaussianMixture(
                2,
                covariance_type=kind,
                shared_weights=shared_weights,
                reg_covar=0.0,
                means_init=means if sick == 1 else means[::-1],
                max_iter=3,
                tol=0.0,
            ).fit(X, clients=np.arange(90) % 4)
        text = " ".join(
            str(w.message) for w in caught if issubclass(w.category, CovarianceRepairWarning)
        )
        assert f"component {sick}" in text
        assert f"component {1 - sick}" not in text
        assert_finite(model)
        assert_close(model.means_[sick], [50.0] * 3, 1e-12)


def test_a_tied_repair_says_that_it_is_shared():
    X = np.column_stack([base(), np.full(120, 2.0)])
    with pytest.warns(CovarianceRepairWarning, match="shared"):
        FederatedGaussianMixture(
            2, covariance_type="tied", reg_covar=0.0, max_iter=2, random_state=0
        ).fit(X)


@pytest.mark.parametrize("case", ["duplicates", "constant column", "fewer rows than columns"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_regularisation_nothing_needs_repair(case, kind):
    X = cases()[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CovarianceRepairWarning)
        FederatedGaussianMixture(2, covariance_type=kind, max_iter=5, random_state=0).fit(X)


@pytest.mark.parametrize("shared_weights", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_component_that_dies(kind, shared_weights):
    X = base()
    far = np.full(4, 1e6)
    start = {
        "means_init": np.vstack([X[:2], far]),
        "weights_init": [0.4, 0.4, 0.2],
        "precisions_init": random_start(np.random.default_rng(0), X, kind, 3)["precisions_init"],
    }
    model = FederatedGaussianMixture(
        3, covariance_type=kind, shared_weights=shared_weights, max_iter=10, tol=0.0, **start
    )
    with pytest.warns(ConvergenceWarning, match=r"\[2\]"):
        model.fit(X, clients=np.arange(len(X)) % 5)
    assert_finite(model)
    assert (model.means_[2] == far).all()  # parameters are kept
    assert model.weights_[2] == 0.0
    assert model.predict_proba(X)[:, 2].max() == 0.0
    labels = model.sample(300)[1]
    assert (labels != 2).all()


def test_a_weight_of_zero_at_the_start_stays_zero():
    X = base()
    model = FederatedGaussianMixture(
        2, means_init=X[:2], weights_init=[1.0, 0.0], max_iter=5, tol=0.0
    ).fit(X, clients=np.arange(len(X)) % 5)
    assert_finite(model)
    assert model.weights_.tolist() == [1.0, 0.0]
    assert_close(model.means_[0], X.mean(0), 1e-12)


@pytest.mark.filterwarnings("ignore::fedgmm.core.gaussians.CovarianceRepairWarning")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_far_row_still_has_responsibilities(dtype):
    X = base() * 1e-6
    model = FederatedGaussianMixture(2, dtype=dtype, reg_covar=0.0, random_state=0).fit(X)
    far = np.full((1, 4), 1e14)
    assert np.isfinite(model.score_samples(far)).all()
    assert model.predict_proba(far).sum() == pytest.approx(1.0)
    farther = np.full((1, 4), 1e150)
    if dtype == "float64":
        assert np.isfinite(model.score_samples(farther)).all()
        assert model.predict_proba(farther).sum() == pytest.approx(1.0)
    else:
        with pytest.raises(ValueError, match="float32"):
            model.predict(farther)
