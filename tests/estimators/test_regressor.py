"""Personalised regression as a scikit-learn estimator."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator

from fedgmm import FedGMMRegressor, TrainingOptions
from fedgmm.estimators import NoClientsWarning


@pytest.fixture(scope="module")
def world():
    """Three sites; one of them has the opposite slope."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(300, 3))
    sites = np.repeat([0, 1, 2], 100)
    return x, np.where(sites == 1, -2.0, 2.0) * x[:, 0] + 0.1 * rng.normal(size=300), sites


@pytest.fixture(scope="module")
def fitted(world):
    x, y, sites = world
    model = FedGMMRegressor(1, 2, rounds=20, random_state=0)
    return model.fit(x, y, clients=sites)


def test_predictions_are_those_of_the_client(world, fitted):
    x, y, sites = world
    assert fitted.score(x, y, clients=sites) > 0.98
    low, high = fitted.predict_interval(x, 0.9, clients=sites).T
    assert 0.85 < np.mean((low <= y) & (y <= high)) < 0.95
    with pytest.warns(NoClientsWarning):
        assert fitted.predict(x[:2]).shape == (2,)
    assert fitted.score_samples(x[:2], client=1).shape == (2,)
    fitted.adapt(7, x[sites == 1][:20], y[sites == 1][:20])
    assert fitted.score(x[sites == 1], y[sites == 1], client=7) > 0.95


def test_one_learner_equals_linear_regression(world):
    x, y, _ = world
    model = FedGMMRegressor(1, 1, ridge=0.0, rounds=3, dtype="float64").fit(x, y)
    np.testing.assert_allclose(model.predict(x), LinearRegression().fit(x, y).predict(x), atol=1e-8)


def test_a_client_column_survives_cross_validation(world):
    x, y, sites = world
    model = FedGMMRegressor(1, 2, rounds=20, random_state=0, client_column=3)
    with_sites = np.column_stack([x, sites])
    shuffled = np.random.default_rng(0).permutation(len(y))
    assert cross_val_score(model, with_sites[shuffled], y[shuffled], cv=3).min() > 0.95


def test_scikit_learns_own_checks():
    model = clone(FedGMMRegressor(1, 1, rounds=2, random_state=0))
    results = check_estimator(model, on_fail=None, on_skip=None)
    failed = [r["check_name"] for r in results if r["status"] == "failed"]
    assert not failed


def test_sizes_are_chosen_by_held_out_rows(world):
    x, y, sites = world
    model = FedGMMRegressor("auto", "auto", rounds=3, random_state=0).fit(x, y, clients=sites)
    assert {type(model.model_.options[name]) for name in ("components", "learners")} == {int}


def test_a_density_alone_is_not_a_regressor(world):
    with pytest.raises(ValueError, match="algorithm"):
        FedGMMRegressor(algorithm="gmm").fit(*world[:2])


def test_all_options_of_training_are_parameters(world):
    x, y, sites = world
    renamed = {"components": "n_components", "learners": "n_learners", "seed": "random_state"}
    options = {renamed.get(field.name, field.name) for field in fields(TrainingOptions)}
    beside = {"client_column", "unknown_clients", "validation_fraction", "warm_start", "n_jobs"}
    printed = {"verbose", "verbose_interval", "on_round", "privacy"}
    assert set(FedGMMRegressor().get_params()) == options | beside | printed
    given = {"proximal": 3.0, "batch_size": 16, "schedule": "cosine", "tol": None, "server_lr": 0.5}
    model = FedGMMRegressor(1, 1, algorithm="fedprox", rounds=2, random_state=0, **given)
    model.fit(x, y, clients=sites)
    assert {name: model.model_.options[name] for name in given} == given


def test_a_warm_start_is_one_uninterrupted_run(world):
    x, y, sites = world
    seen: list[dict[str, float]] = []
    whole = FedGMMRegressor(1, 2, rounds=6, tol=None, random_state=0).fit(x, y, clients=sites)
    parts = FedGMMRegressor(1, 2, rounds=3, tol=None, random_state=0, warm_start=True)
    parts.fit(x, y, clients=sites).set_params(rounds=6, on_round=seen.append)
    parts.fit(x, y, clients=sites)
    assert [entry["round"] for entry in seen] == [4, 5, 6]
    np.testing.assert_array_equal(parts.predict(x, clients=sites), whole.predict(x, clients=sites))
