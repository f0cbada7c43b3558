"""The client of each row as a column of ``X``: scikit-learn's tools then keep it."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.inspection import permutation_importance
from sklearn.model_selection import (
    GridSearchCV,
    LeaveOneGroupOut,
    StratifiedKFold,
    cross_val_predict,
    cross_val_score,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedgmm import FederatedGaussianMixture, FedGMMClassifier
from fedgmm.estimators import NoClientsWarning
from fedgmm.estimators.base import split_column

FOLDS = StratifiedKFold(2, shuffle=True, random_state=0)


@pytest.fixture(scope="module")
def world():
    """Three sites; one of them reads the sign of the first column the other way round."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(360, 3))
    sites = np.repeat(["bergen", "oslo", "tromsø"], 120)
    return x, (x[:, 0] > 0) ^ (sites == "oslo"), sites


@pytest.fixture(scope="module")
def table(world):
    x, _, sites = world
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    frame.insert(1, "site", sites)
    return frame


def classifier(**options):
    found = {"start": "random", "rounds": 15, "random_state": 1, "client_column": "site"}
    return FedGMMClassifier(1, 2, **{**found, **options})


@pytest.fixture(scope="module")
def fitted(world, table):
    return classifier().fit(table, world[1])


# ---------------------------------------------------------------------- the same model


@pytest.mark.parametrize("column", ["site", 1, -3])
def test_the_column_of_a_table_equals_clients(world, table, column):
    x, y, sites = world
    beside = classifier(client_column=None, rounds=3).fit(x, y, clients=sites)
    inside = classifier(client_column=column, rounds=3).fit(table, y)
    assert inside.clients_.tolist() == ["bergen", "oslo", "tromsø"]
    assert inside.n_features_in_ == 4
    assert inside.feature_names_in_.tolist() == ["a", "site", "b", "c"]
    expected = beside.predict_proba(x, clients=sites)
    assert np.array_equal(inside.predict_proba(table), expected)
    np.testing.assert_allclose(inside.predict_log_proba(table), np.log(expected), atol=1e-6)
    assert np.array_equal(inside.score_samples(table), beside.score_samples(x, clients=sites))


@pytest.mark.parametrize("column", [3, -1])
def test_an_index_into_an_array_with_numbers_as_ids(world, column):
    x, y, sites = world
    numbers = np.unique(sites, return_inverse=True)[1]
    beside = classifier(client_column=None, rounds=3).fit(x, y, clients=numbers)
    inside = classifier(client_column=column, rounds=3).fit(np.column_stack([x, numbers]), y)
    assert inside.clients_.tolist() == [0, 1, 2]
    assert np.array_equal(
        inside.predict_proba(np.column_stack([x, numbers])),
        beside.predict_proba(x, clients=numbers),
    )


def test_arrays_and_lists_of_objects(world, table):
    _, y, _ = world
    expected = classifier(rounds=2).fit(table, y).predict_proba(table)
    for rows in (table.to_numpy(), table.to_numpy().tolist()):
        model = classifier(rounds=2, client_column=1).fit(rows, y)
        assert np.array_equal(model.predict_proba(rows), expected)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_mixture_takes_a_column_too(world, table):
    x, _, sites = world
    options = {"max_iter": 4, "random_state": 0}
    beside = FederatedGaussianMixture(2, **options).fit(x, clients=sites)
    inside = FederatedGaussianMixture(2, client_column="site", **options).fit(table)
    assert inside.n_features_in_ == 4
    assert np.array_equal(inside.means_, beside.means_)
    assert np.array_equal(inside.client_weights_, beside.client_weights_)
    for name in ("predict", "predict_proba", "predict_log_proba", "score_samples"):
        there = getattr(beside, name)(x, clients=sites)
        assert np.array_equal(getattr(inside, name)(table), there)
    assert inside.bic(table) == beside.bic(x, clients=sites)
    assert inside.aic(table) == beside.aic(x, clients=sites)
    assert inside.score(table) == beside.score(x, clients=sites)
    assert inside.sample(4)[0].shape == (4, 3)
    assert np.array_equal(clone(inside).fit_predict(table), beside.predict(x, clients=sites))
    broken = table.assign(b=np.nan)
    with pytest.raises(ValueError, match="column 'b'"):
        inside.fit(broken)


# ---------------------------------------------------------------------- scikit-learn's tools


def test_scorers_see_the_clients(world, table):
    _, y, _ = world
    for scoring in ("accuracy", "neg_log_loss"):
        scores = cross_val_score(classifier(), table, y, cv=FOLDS, scoring=scoring)
        assert scores.min() > (0.93 if scoring == "accuracy" else -0.3)
    predicted = cross_val_predict(classifier(), table, y, cv=FOLDS)
    assert (predicted == y).mean() > 0.93


def test_a_grid_search_sees_the_clients(world, table):
    _, y, _ = world
    grid = {"n_learners": [1, 2]}
    search = GridSearchCV(classifier(), grid, cv=FOLDS, scoring="roc_auc").fit(table, y)
    assert search.best_params_ == {"n_learners": 2}
    assert search.best_score_ > 0.95


def test_calibration_sees_the_clients(world, table):
    _, y, _ = world
    calibrated = CalibratedClassifierCV(classifier(), cv=FOLDS).fit(table, y)
    assert calibrated.score(table, y) > 0.93


def test_a_pipeline_passes_the_column_through(world, table):
    _, y, _ = world
    scale = ColumnTransformer(
        [("scale", StandardScaler(), ["a", "b", "c"])], remainder="passthrough"
    )
    arrays = make_pipeline(scale, classifier(client_column=-1)).fit(table, y)
    assert arrays.score(table, y) > 0.95
    named = clone(scale).set_output(transform="pandas")
    tables = make_pipeline(named, classifier(client_column="remainder__site")).fit(table, y)
    assert np.array_equal(tables.predict(table), arrays.predict(table))


def test_permutation_importance_shows_what_the_client_is_worth(fitted, world, table):
    found = permutation_importance(fitted, table, world[1], n_repeats=2, random_state=0)
    worth = dict(zip(table.columns, found.importances_mean, strict=True))
    assert min(worth["a"], worth["site"]) > 0.2 > max(worth["b"], worth["c"])


# ---------------------------------------------------------------------- unknown clients


def test_leave_one_client_out(world, table):
    _, y, sites = world
    model = classifier(unknown_clients="federation", rounds=5)
    scores = cross_val_score(model, table, y, groups=sites, cv=LeaveOneGroupOut())
    assert np.isfinite(scores).all()
    model.fit(table[sites != "oslo"], y[sites != "oslo"])
    strangers = table[sites == "oslo"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.predict_proba(strangers)
    nobody = strangers.assign(site=None)
    assert np.array_equal(found, model.predict_proba(nobody))
    with pytest.raises(ValueError, match=r"oslo.*unknown_clients='federation'"):
        model.set_params(unknown_clients="error").predict(strangers)


def test_unknown_clients_of_a_mixture(world):
    x, _, sites = world
    model = FederatedGaussianMixture(2, random_state=0, unknown_clients="federation", tol=0.1)
    model.fit(x, clients=sites)
    nobody = model.score_samples(x, clients=[None] * 360)
    assert np.array_equal(model.score_samples(x, client="bodø"), nobody)
    mixed = np.where(sites == "oslo", "bodø", sites)
    here = sites == "oslo"
    assert np.array_equal(model.score_samples(x, clients=mixed)[here], nobody[here])
    own = model.score_samples(x, clients=sites)[~here]
    assert np.array_equal(model.score_samples(x, clients=mixed)[~here], own)


# ---------------------------------------------------------------------- warnings and errors


def test_a_prediction_without_clients_warns_once(world):
    x, y, sites = world
    model = classifier(client_column=None, rounds=2).fit(x, y, clients=sites)
    with pytest.warns(NoClientsWarning, match="client_column"):
        model.predict(x)
    one_model = clone(model).set_params(algorithm="fedavg", personal_labels=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(x)
        model.predict(x, clients=sites)
        for quiet in (
            clone(model).fit(x, y),  # one client
            one_model.fit(x, y, clients=sites),
            FederatedGaussianMixture(2, shared_weights=True, tol=0.1).fit(x, clients=sites),
        ):
            quiet.predict(x)
    model.fit(x, y, clients=sites)
    with pytest.warns(NoClientsWarning):
        model.score(x, y)
    mixture = FederatedGaussianMixture(2, tol=0.1).fit(x, clients=sites)
    with pytest.warns(NoClientsWarning):
        mixture.predict(x)


def test_one_client_for_all_rows(fitted, world):
    x, y, sites = world
    model = classifier(client_column=None, rounds=2).fit(x, y, clients=sites)
    one = model.predict_proba(x, client="oslo")
    assert np.array_equal(one, model.predict_proba(x, clients=["oslo"] * 360))
    mixture = FederatedGaussianMixture(2, tol=0.1).fit(x, clients=sites)
    assert mixture.sample(3, client="oslo")[0].shape == (3, 3)
    for estimator in (model, mixture):
        for name in ("predict", "predict_proba", "score_samples"):
            with pytest.raises(ValueError, match="both"):
                getattr(estimator, name)(x, client="oslo", clients=sites)


@pytest.mark.parametrize(
    ("column", "message"), [("town", "'town'"), (4, "out of range"), (-5, "out of range")]
)
def test_a_column_that_is_not_there(world, table, column, message):
    with pytest.raises(ValueError, match=message):
        classifier(client_column=column).fit(table, world[1])
    with pytest.raises(ValueError, match=message):
        FederatedGaussianMixture(client_column=column).fit(table)


def test_a_name_needs_a_table(world):
    x, y, _ = world
    with pytest.raises(ValueError, match="index"):
        classifier().fit(x, y)
    with pytest.raises(ValueError, match="shape"):
        split_column(np.zeros((2, 1, 3, 3)), 0)


def test_clients_are_given_in_one_way(fitted, world, table):
    x, y, sites = world
    with pytest.raises(ValueError, match="client_column"):
        classifier().fit(table, y, clients=sites)
    with pytest.raises(ValueError, match="client_column"):
        fitted.predict(table, client="oslo")
    with pytest.raises(ValueError, match="client_column"):
        FederatedGaussianMixture(client_column=0).fit({"oslo": x})


def test_a_row_without_a_client_cannot_be_fitted(world, table):
    with pytest.raises(ValueError, match="Row 3"):
        classifier().fit(
            table.assign(site=[*table["site"][:3], None, *table["site"][4:]]), world[1]
        )


def test_a_mapping_and_sparse_rows_are_refused(world):
    x, y, _ = world
    with pytest.raises(TypeError, match="from_clients"):
        FedGMMClassifier().fit({"oslo": x}, y)
    with pytest.raises(TypeError, match="mapping"):
        FedGMMClassifier(1, 1, rounds=1).fit(x, y).predict({"oslo": x})
    for estimator in (FedGMMClassifier(), FedGMMClassifier(client_column=0)):
        with pytest.raises(TypeError, match="toarray"):
            estimator.fit(sparse.csr_array(x), y)
