from __future__ import annotations

import numpy as np
import pytest

from fedgmm import ComponentSelection, FederatedGaussianMixture, select_components
from oracles import as_dict, ragged_ids


@pytest.fixture
def planted(rng):
    """Three far-apart heaps over five clients that see them in different shares."""
    places = np.array([[0.0, 0.0], [30.0, 0.0], [0.0, 30.0]])
    X = np.repeat(places, 60, axis=0) + rng.normal(size=(180, 2))
    return X, ragged_ids(rng, 180, 5)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # 5 for 3 heaps
@pytest.mark.parametrize("criterion", ["bic", "aic"])
@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_the_planted_number_is_chosen(planted, kind, criterion):
    X, ids = planted
    chosen = select_components(
        X,
        clients=ids,
        candidates=range(1, 6),
        criterion=criterion,
        covariance_type=kind,
        shared_weights=True,
        random_state=0,
        max_iter=300,
    )
    assert isinstance(chosen, ComponentSelection)
    if criterion == "bic":
        assert chosen.n_components == 3
    assert chosen.criterion == criterion
    assert sorted(chosen.scores) == [1, 2, 3, 4, 5]
    assert chosen.scores[chosen.n_components] == min(chosen.scores.values())
    # The winner is fitted, and its score is its own.
    assert chosen.best.n_components == chosen.n_components
    own = getattr(chosen.best, criterion)(X, clients=ids)
    assert own == chosen.scores[chosen.n_components]
    assert chosen.best.get_params()["covariance_type"] == kind


def test_private_weights(planted):
    X, ids = planted
    chosen = select_components(X, clients=ids, candidates=(5, 1, 3), random_state=0, max_iter=300)
    assert chosen.n_components == 3
    assert chosen.best.client_weights_.shape == (5, 3)
    refit = FederatedGaussianMixture(1, random_state=0).fit(X, clients=ids)
    assert chosen.scores[1] == pytest.approx(refit.bic(X, clients=ids), rel=1e-12)


def test_dictionaries_and_generators(planted):
    X, ids = planted
    clients = as_dict(X, ids)
    options = {"candidates": (1, 3), "random_state": 0}
    direct = select_components(X, clients=ids, **options)
    for form in (clients, iter(clients.items()), list(clients.items())):
        chosen = select_components(form, **options)
        assert chosen.n_components == direct.n_components
        assert chosen.scores == pytest.approx(direct.scores, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"candidates": []}, ValueError, "candidates is empty"),
        ({"candidates": [0, 2]}, ValueError, "candidates must be at least 1, got 0"),
        ({"candidates": [2.5]}, TypeError, r"candidates must be an integer, got 2\.5"),
        ({"candidates": ["3"]}, TypeError, "candidates must be an integer, got '3'"),
        ({"criterion": "mdl"}, ValueError, r"criterion must be one of \['bic', 'aic'\], got 'mdl'"),
        ({"n_components": 3}, ValueError, "pass candidates instead"),
    ],
)
def test_errors_come_before_any_fit(planted, monkeypatch, options, error, message):
    monkeypatch.setattr(
        FederatedGaussianMixture, "fit", lambda *_, **__: pytest.fail("a model was fitted")
    )
    with pytest.raises(error, match=message):
        select_components(planted[0], **options)


def test_candidates_must_be_numbers_that_can_be_tried(planted):
    X, _ = planted
    with pytest.raises(ValueError, match="n_components=181 rows"):
        select_components(X, candidates=[181])
    with pytest.raises(TypeError, match="candidates"):
        select_components(X, candidates=3)
    with pytest.raises(TypeError, match="candidates"):
        select_components(X, candidates=[1, "3"])
