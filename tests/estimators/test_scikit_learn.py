"""The conventions of scikit-learn."""

from __future__ import annotations

import doctest
import inspect
import pickle
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import fedgmm.estimators.gaussian_mixture as module
from fedgmm import FederatedGaussianMixture
from oracles import assert_close, blobs

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def trained():
    X, _ = blobs(np.random.default_rng(0), rows=120)
    ids = np.array(["oslo", "bergen", "bodø"])[np.arange(120) % 3]
    return FederatedGaussianMixture(3, random_state=0, max_iter=5).fit(X, clients=ids), X, ids


@pytest.fixture
def fitted(trained):
    """A copy that a test may change."""
    return deepcopy(trained)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator",
    [
        FederatedGaussianMixture(),
        FederatedGaussianMixture(2, covariance_type="tied", shared_weights=True, max_iter=10),
        FederatedGaussianMixture(
            2, covariance_type="diag", aggregation="paper", n_init=2, max_iter=5
        ),
        pytest.param(
            FederatedGaussianMixture(2, covariance_type="spherical", init_params="k-means++"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            FederatedGaussianMixture(covariance_type="identity", init_params="random"),
            marks=pytest.mark.slow,
        ),
        FederatedGaussianMixture(dtype="float32", warm_start=True),
    ],
    ids=lambda estimator: f"{estimator.covariance_type}-{estimator.dtype}",
)
def test_check_estimator(estimator):
    # the random start depends on the order of the rows, which this check changes; see
    # test_sample_weight.py for starts that do not
    several = estimator.n_components > 1
    expected = {"check_sample_weight_equivalence_on_dense_data": "random start"} if several else {}
    results = check_estimator(
        estimator, on_skip=None, on_fail=None, expected_failed_checks=expected
    )
    assert len(results) > 30
    failed = {
        result["check_name"]: (result["status"], result["exception"])
        for result in results
        if result["status"] not in ("passed", "skipped", "xfail")
    }
    assert failed == {}
    assert {r["check_name"] for r in results if r["expected_to_fail"]} == set(expected)
    skipped = {r["check_name"] for r in results if r["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}  # needs an environment variable


def test_the_signature_is_the_published_one():
    parameters = inspect.signature(FederatedGaussianMixture).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    assert defaults == {
        "n_components": 1,
        "covariance_type": "full",
        "shared_weights": False,
        "aggregation": "exact",
        "tol": 1e-3,
        "reg_covar": 1e-6,
        "max_iter": 100,
        "n_init": 1,
        "init_params": "kmeans",
        "weights_init": None,
        "means_init": None,
        "precisions_init": None,
        "random_state": None,
        "warm_start": False,
        "device": "cpu",
        "dtype": "float64",
        "verbose": 0,
        "verbose_interval": 10,
        "client_column": None,
        "unknown_clients": "error",
        "n_jobs": None,
        "on_round": None,
        "privacy": None,
    }
    positional = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == ["n_components"]
    for method in ("fit", "score_samples", "score", "predict", "predict_proba", "sample", "bic"):
        clients = inspect.signature(getattr(FederatedGaussianMixture, method)).parameters["clients"]
        assert clients.kind is clients.KEYWORD_ONLY
        assert clients.default is None


def test_fitted_attributes(fitted):
    model, *_ = fitted
    assert model.means_.shape == (3, 3)
    assert model.covariances_.shape == model.precisions_cholesky_.shape == (3, 3, 3)
    assert model.weights_.shape == (3,)
    assert model.client_weights_.shape == (3, 3)
    assert model.clients_.tolist() == ["bergen", "bodø", "oslo"]
    assert model.n_iter_ == len(model.lower_bounds_)
    assert model.lower_bound_ == model.lower_bounds_[-1]
    assert isinstance(model.converged_, bool)
    assert model.n_features_in_ == 3
    assert not hasattr(model, "feature_names_in_")
    for name in ("means_", "covariances_", "weights_", "client_weights_"):
        assert isinstance(getattr(model, name), np.ndarray)
        assert getattr(model, name).flags.owndata
    np.testing.assert_allclose(model.weights_, model.client_weights_.mean(axis=0))  # equal sizes


def test_clone_has_the_parameters_but_not_the_fit(fitted):
    model, X, ids = fitted
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(X)
    copy.fit(X, clients=ids)
    assert np.array_equal(copy.predict_proba(X, clients=ids), model.predict_proba(X, clients=ids))


def test_pickle_predicts_the_same_bits(fitted):
    model, X, ids = fitted
    again = pickle.loads(pickle.dumps(model))
    for name in ("predict", "predict_proba", "score_samples"):
        here, there = (getattr(m, name)(X, clients=ids) for m in (model, again))
        assert np.array_equal(here, there)
    assert np.array_equal(again.sample(5)[0], model.sample(5)[0])
    assert again.bic(X, clients=ids) == model.bic(X, clients=ids)


def test_set_params_asks_for_a_new_fit_but_leaves_the_old_one_whole(fitted):
    model, X, ids = fitted
    before = model.predict_proba(X, clients=ids)
    model.set_params(n_components=2, covariance_type="diag")
    assert np.array_equal(model.predict_proba(X, clients=ids), before)
    assert model.sample(4)[0].shape == (4, 3)
    model.fit(X, clients=ids)
    assert model.covariances_.shape == (2, 3)
    with pytest.raises(ValueError, match="clusters"):
        model.set_params(clusters=3)


@pytest.mark.parametrize(
    "name", ["predict", "predict_proba", "score_samples", "score", "bic", "aic"]
)
def test_not_fitted(name):
    with pytest.raises(NotFittedError):
        getattr(FederatedGaussianMixture(), name)(np.zeros((3, 2)))


def test_sample_and_a_fit_that_failed_are_not_fitted_either():
    model = FederatedGaussianMixture()
    with pytest.raises(NotFittedError):
        model.sample()
    with pytest.raises(ValueError, match="NaN"):
        model.fit([[np.nan, 1.0]])
    with pytest.raises(NotFittedError):
        model.predict([[0.0, 1.0]])


def test_data_frames(fitted):
    model, X, ids = fitted
    frame = pd.DataFrame(X, columns=["a", "b", "c"], index=np.arange(120)[::-1])
    series = pd.Series(ids, index=frame.index)
    tables = FederatedGaussianMixture(3, random_state=0, max_iter=5).fit(frame, clients=series)
    assert tables.feature_names_in_.tolist() == ["a", "b", "c"]
    assert np.array_equal(tables.means_, model.means_)
    assert np.array_equal(tables.predict(frame, clients=series), model.predict(X, clients=ids))
    with pytest.raises(ValueError, match="feature names"):
        tables.predict(frame[["b", "a", "c"]])
    frame.iloc[3, 1] = np.nan  # row 3 belongs to oslo
    with pytest.raises(ValueError, match="oslo"):
        tables.fit(frame, clients=series)


def test_data_frames_of_clients(fitted):
    model, X, ids = fitted
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    clients = dict(iter(frame.groupby(ids)))
    tables = FederatedGaussianMixture(3, random_state=0, max_iter=5).fit(clients)
    assert tables.feature_names_in_.tolist() == ["a", "b", "c"]
    assert_close(tables.means_, model.means_, 1e-10)
    with pytest.raises(ValueError, match="columns"):
        tables.predict({"oslo": frame[["c", "b", "a"]]})
    # Plain arrays afterwards: the old names must not outlive their fit.
    tables.fit({name: x.to_numpy()[:, :2] for name, x in clients.items()})
    assert not hasattr(tables, "feature_names_in_")
    assert tables.n_features_in_ == 2


def test_pipeline_routes_clients(fitted):
    _, X, ids = fitted
    with config_context(enable_metadata_routing=True):
        mixture = FederatedGaussianMixture(3, random_state=0, max_iter=5)
        mixture.set_fit_request(clients=True).set_predict_request(clients=True)
        pipe = make_pipeline(StandardScaler(), mixture).fit(X, clients=ids)
        labels = pipe.predict(X, clients=ids)
    scaled = StandardScaler().fit_transform(X)
    direct = FederatedGaussianMixture(3, random_state=0, max_iter=5).fit(scaled, clients=ids)
    assert pipe[-1].clients_.tolist() == ["bergen", "bodø", "oslo"]
    assert np.array_equal(pipe[-1].means_, direct.means_)
    assert np.array_equal(labels, direct.predict(scaled, clients=ids))


def test_grid_search_routes_clients(rng):
    places = np.array([[0.0, 0.0], [30.0, 0.0], [0.0, 30.0]])
    X = np.repeat(places, 40, axis=0) + rng.normal(size=(120, 2))
    ids = np.arange(120) % 3
    with config_context(enable_metadata_routing=True):
        mixture = FederatedGaussianMixture(random_state=0)
        mixture.set_fit_request(clients=True).set_score_request(clients=True)
        search = GridSearchCV(
            mixture, {"n_components": [1, 2, 3]}, cv=KFold(3, shuffle=True, random_state=0)
        ).fit(X, clients=ids)
    assert search.best_params_ == {"n_components": 3}
    assert search.best_estimator_.clients_.tolist() == [0, 1, 2]


def test_grid_search_without_clients(rng):
    X = np.concatenate([rng.normal(size=(60, 2)), rng.normal(size=(60, 2)) + 20])
    search = GridSearchCV(
        FederatedGaussianMixture(random_state=0),
        {"n_components": [1, 2]},
        cv=KFold(3, shuffle=True),
    ).fit(X)
    assert search.best_params_ == {"n_components": 2}


def test_fit_predict(fitted):
    model, X, ids = fitted
    labels = FederatedGaussianMixture(3, random_state=0, max_iter=5).fit_predict(X, clients=ids)
    assert np.array_equal(labels, model.predict(X, clients=ids))
    pairs = ((name, X[ids == name]) for name in np.unique(ids))  # a generator is read once
    labels = FederatedGaussianMixture(3, random_state=0, max_iter=5).fit_predict(pairs)
    assert len(labels) == 120


def test_the_example_in_the_docstring():
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
