"""The personalised classifier as a scikit-learn estimator."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from fedgmm import FedGMMClassifier
from fedgmm.methods.base import SHARED_LEARNERS
from fedgmm.model.saving import load
from fedgmm.support.streaming import _lanes
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from supervised import images


@pytest.fixture(scope="module")
def world():
    """Three sites; one of them reads the sign of the first column the other way round."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(360, 3))
    sites = np.repeat(["bergen", "oslo", "tromsø"], 120)
    y = np.where((x[:, 0] > 0) ^ (sites == "oslo"), "sick", "well")
    return x, y, sites


@pytest.fixture(scope="module")
def fitted(world):
    x, y, sites = world
    return FedGMMClassifier(1, 2, start="random", rounds=40, random_state=1).fit(
        x, y, clients=sites
    )


RANDOM_ORDER = {
    # starts and batches depend on the order of the rows, which this check changes; see
    # test_sample_weight.py for a model without random choices
    "check_sample_weight_equivalence_on_dense_data": "random start and batches"
}


def test_scikit_learn_is_satisfied():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            FedGMMClassifier(2, 2, rounds=3),
            on_fail=None,
            on_skip=None,
            expected_failed_checks=RANDOM_ORDER,
        )
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed
    assert len([r for r in results if r["status"] == "passed"]) > 40


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedem", "fedavg", "clustered", "pfedme", "fedavg+"])
def test_scikit_learn_is_satisfied_with_other_methods(algorithm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            FedGMMClassifier(rounds=30, lr=0.5, algorithm=algorithm, batch_size=16),
            on_fail=None,
            on_skip=None,
            expected_failed_checks=RANDOM_ORDER,
        )
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed


def test_sites_have_rules_of_their_own(fitted, world):
    x, y, sites = world
    assert fitted.score(x, y, clients=sites) > 0.95
    assert fitted.score(x, y) < 0.8  # the federation's own weights know one rule at best
    assert fitted.classes_.tolist() == ["sick", "well"]
    assert fitted.clients_.tolist() == ["bergen", "oslo", "tromsø"]
    assert fitted.n_features_in_ == 3
    assert 1 <= fitted.n_iter_ <= 40
    assert fitted.model_.dataset is None  # rows are not kept


def test_probabilities_and_densities(fitted, world):
    x, _, sites = world
    proba = fitted.predict_proba(x, clients=sites)
    np.testing.assert_allclose(proba.sum(1), 1.0, atol=1e-9)
    assert (fitted.predict(x, clients=sites) == fitted.classes_[proba.argmax(1)]).all()
    one = fitted.predict_proba(x[:5], clients="oslo")
    np.testing.assert_allclose(one, fitted.predict_proba(x[:5], clients=["oslo"] * 5))
    density = fitted.score_samples(x, clients=sites)
    assert density.shape == (360,)
    assert fitted.score_samples(np.full((1, 3), 30.0))[0] < density.min()


def test_weights_of_rows_count_in_the_score(fitted, world):
    x, y, _ = world
    right = fitted.predict(x) == y
    w = np.random.default_rng(0).random(360)
    assert fitted.score(x, y, sample_weight=w) == pytest.approx(np.average(right, weights=w))


def test_labels_as_a_column_are_scored_row_by_row(fitted, world):
    x, y, sites = world
    expected = fitted.score(x, y, clients=sites)
    assert fitted.score(x, y[:, None], clients=sites) == expected
    for few in (y[:1], y[:10]):
        with pytest.raises(ValueError, match="inconsistent"):
            fitted.score(x, few, clients=sites)


def test_a_site_can_join_later(fitted, world):
    x, y, sites = world
    twin = pickle.loads(pickle.dumps(fitted))
    turned = np.where(y == "sick", "well", "sick")
    here = sites != "oslo"
    assert twin.adapt("bodø", x[here][:100], turned[here][:100]) is twin
    assert twin.clients_.tolist() == ["bergen", "oslo", "tromsø", "bodø"]
    assert twin.score(x[here], turned[here], clients="bodø") > 0.95
    np.testing.assert_array_equal(
        twin.predict_proba(x, clients=sites), fitted.predict_proba(x, clients=sites)
    )
    twin.adapt("unlabelled", x[:50])
    twin.predict(x[:5], clients="unlabelled")


def test_a_site_that_cannot_change_anything_is_a_warning(skewed):
    x, y, sites = skewed
    model = FedGMMClassifier(1, 1, rounds=2, personal_labels=False).fit(x, y, clients=sites)
    with pytest.warns(UserWarning, match="Nothing can change"):
        model.adapt("ward", x[:9], y[:9])
    model.set_params(personal_labels=True).fit(x, y, clients=sites)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.adapt("ward", x[:9], y[:9])


def test_tables_have_named_columns(world):
    x, y, sites = world
    table = pd.DataFrame(x, columns=["a", "b", "c"])
    model = FedGMMClassifier(2, 2, rounds=3, random_state=0)
    model.fit(table, pd.Series(y), clients=pd.Series(sites))
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    expected = clone(model).fit(x, y, clients=sites).predict_proba(x, clients=sites)
    np.testing.assert_array_equal(model.predict_proba(table, clients=pd.Series(sites)), expected)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table[["b", "a", "c"]])


def test_the_same_random_state_gives_the_same_bits(world):
    x, y, sites = world
    a, b, c = (
        FedGMMClassifier(2, 2, rounds=3, random_state=s, start="random").fit(x, y, clients=sites)
        for s in (3, 3, 4)
    )
    assert np.array_equal(a.predict_proba(x), b.predict_proba(x))
    assert not np.array_equal(a.predict_proba(x), c.predict_proba(x))


def test_it_can_be_cloned_and_pickled(fitted, world):
    x, _, sites = world
    fresh = clone(fitted)
    assert fresh.get_params() == fitted.get_params()
    with pytest.raises(NotFittedError):
        fresh.predict(x)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(
        again.predict_proba(x, clients=sites), fitted.predict_proba(x, clients=sites)
    )


def test_pictures_and_their_pickle():
    rng = np.random.default_rng(0)
    data = images(rng, rows=30)
    x, y = data.train.inputs.numpy(), data.train.labels.numpy()
    model = FedGMMClassifier(2, 2, learner="cnn", rounds=4, lr=0.3, random_state=0)
    model.fit(x, y, clients=data.train.codes.numpy())
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict(x), model.predict(x))


def test_it_works_in_a_pipeline_and_in_cross_validation(world):
    x, y, _ = world
    model = make_pipeline(StandardScaler(), FedGMMClassifier(2, 2, rounds=5, random_state=0))
    assert cross_val_score(model, x, y == "sick", cv=3).shape == (3,)


def test_a_grid_search_passes_the_clients_on(world):
    x, y, sites = world
    with config_context(enable_metadata_routing=True):
        model = (
            FedGMMClassifier(1, rounds=30, start="random", random_state=1)
            .set_fit_request(clients=True)
            .set_score_request(clients=True)
        )
        folds = StratifiedKFold(3, shuffle=True, random_state=0)
        search = GridSearchCV(model, {"n_learners": [1, 2]}, cv=folds)
        search.fit(x, y, clients=sites)
    assert search.best_params_ == {"n_learners": 2}
    assert search.best_score_ > 0.9


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_method_can_be_used(world, algorithm):
    x, y, sites = world
    model = FedGMMClassifier(2, 2, algorithm=algorithm, rounds=2, random_state=0)
    model.fit(x, y, clients=sites)
    assert model.predict(x, clients=sites).shape == y.shape
    assert hasattr(model, "score_samples") == (algorithm == "fedgmm")


def test_a_method_without_a_density_has_no_score_samples(world):
    x, y, _ = world
    model = FedGMMClassifier(algorithm="fedavg", rounds=1).fit(x, y)
    with pytest.raises(AttributeError, match="score_samples") as error:
        model.score_samples(x)
    assert "'fedavg' has no density" in str(error.value.__cause__)


@pytest.fixture(scope="module")
def skewed():
    """Two classes that overlap; nine in ten rows are sick at one site, one in ten at the other."""
    rng = np.random.default_rng(7)
    sites = np.repeat(["clinic", "village"], 400)
    sick = rng.random(800) < np.where(sites == "clinic", 0.9, 0.1)
    x = rng.normal(size=(800, 2)) + 0.7 * sick[:, None]
    return x, np.where(sick, "sick", "well"), sites


@pytest.mark.parametrize("algorithm", SHARED_LEARNERS)
def test_sites_may_have_label_frequencies_of_their_own(skewed, tmp_path, algorithm):
    x, y, sites = skewed
    train, test = slice(None, None, 2), slice(1, None, 2)
    options = {"algorithm": algorithm, "rounds": 4, "random_state": 0}  # one learner: no other way
    plain = FedGMMClassifier(1, 1, personal_labels=False, **options)
    plain.fit(x[train], y[train], clients=sites[train])
    own = FedGMMClassifier(1, 1, personal_labels=True, **options)
    own.fit(x[train], y[train], clients=sites[train])
    gain = own.score(x[test], y[test], clients=sites[test])
    assert gain > plain.score(x[test], y[test], clients=sites[test]) + 0.1
    np.testing.assert_allclose(
        own.predict_proba(x), plain.predict_proba(x)
    )  # rows without a client
    assert clone(own).personal_labels is True
    expected = own.predict_proba(x, clients=sites)
    default = FedGMMClassifier(1, 1, **options).fit(x[train], y[train], clients=sites[train])
    np.testing.assert_array_equal(default.predict_proba(x, clients=sites), expected)
    again = clone(own).fit(x[train], y[train], clients=sites[train])
    np.testing.assert_array_equal(again.predict_proba(x, clients=sites), expected)
    pickled = pickle.loads(pickle.dumps(own))
    np.testing.assert_array_equal(pickled.predict_proba(x, clients=sites), expected)
    saved = load(own.model_.save(tmp_path / "model"))
    np.testing.assert_array_equal(saved.predict_proba(x, sites), expected)


def test_sites_with_the_same_labels_get_no_frequencies_of_their_own(skewed):
    x, y, _ = skewed
    model = FedGMMClassifier(1, 1, rounds=4, random_state=0)
    few = slice(0, 140)
    for rows in (slice(None), few):
        model.fit(x[rows], y[rows], clients=np.arange(len(x))[rows] % 4)
        assert model.model_.prediction.labels is None
    skew = np.where(y == "sick", "clinic", "village")
    model.fit(x[::6], y[::6], clients=skew[::6])  # too few rows to decide
    assert model.model_.prediction.labels is None


def test_a_site_that_joins_later_has_label_frequencies_too(skewed):
    x, y, sites = skewed
    here = sites == "clinic"
    model = FedGMMClassifier(1, 1, rounds=4, personal_labels=True, random_state=0)
    model.fit(x, y, clients=sites).adapt("ward", x[here][::2], y[here][::2])
    rows, truth = x[here][1::2], y[here][1::2]
    assert model.score(rows, truth, clients="ward") > model.score(rows, truth) + 0.1


def test_label_frequencies_are_refused_for_personal_learners(world):
    x, y, _ = world
    with pytest.raises(ValueError, match="personal_labels"):
        FedGMMClassifier(algorithm="local", personal_labels=True).fit(x, y)


def test_patience_holds_rows_out(world):
    x, y, sites = world
    model = FedGMMClassifier(2, 2, rounds=60, patience=3, validation_fraction=0.25, random_state=0)
    model.fit(x, y, clients=sites)
    assert all("validation_log_likelihood" in entry for entry in model.model_.history)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"n_components": 0}, ValueError),
        ({"n_learners": 1.5}, TypeError),
        ({"algorithm": "gmm"}, ValueError),
        ({"rounds": 0}, ValueError),
        ({"lr": -1.0}, ValueError),
        ({"learner": "tree"}, ValueError),
        ({"covariance_type": "round"}, ValueError),
        ({"personal_labels": "no"}, TypeError),
        ({"validation_fraction": 1.0}, ValueError),
        ({"device": "gpu"}, ValueError),
        ({"n_learners": "many"}, TypeError),
        ({"proximal": -1.0}, ValueError),
        ({"verbose_interval": 0}, ValueError),
        ({"warm_start": 1}, TypeError),
    ],
)
def test_a_bad_parameter_is_named(world, options, error):
    x, y, _ = world
    ((name, value),) = options.items()
    with pytest.raises(error, match=f"{name}.*{re.escape(repr(value))}"):
        FedGMMClassifier(**options).fit(x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y, c: (x, y, c[:-1]), "359 entries"),
        (lambda x, y, c: (x, y, [None, *c[1:]]), "Row 0"),
        (lambda x, y, c: (np.where(x == x[3, 1], np.nan, x), y, c), "NaN"),
        (lambda x, y, c: (x, np.full(360, "a"), c), "one class"),
        (lambda x, y, c: (x, x[:, 0], c), "Unknown label type"),
    ],
)
def test_bad_rows_are_refused(world, change, message):
    x, y, clients = change(*world)
    with pytest.raises(ValueError, match=message):
        FedGMMClassifier(rounds=1).fit(x, y, clients=clients)


def test_an_unknown_client_is_named(fitted, world):
    with pytest.raises(ValueError, match="mars"):
        fitted.predict(world[0], clients="mars")


# ---------------------------------------------------------------------- all options of training


def test_every_option_of_train_is_a_parameter():
    parameters = inspect.signature(FedGMMClassifier).parameters
    names = {"components": "n_components", "learners": "n_learners", "seed": "random_state"}
    for field in dataclasses.fields(TrainingOptions):
        assert names.get(field.name, field.name) in parameters
    differ = {
        field.name
        for field in dataclasses.fields(TrainingOptions)
        if parameters[names.get(field.name, field.name)].default != field.default
    }
    assert differ == {"seed", "device"}


def test_options_reach_the_training_run(world):
    x, y, sites = world
    given = {"proximal": 3.0, "batch_size": 16, "schedule": "cosine", "tol": None, "server_lr": 0.5}
    model = FedGMMClassifier(1, 1, algorithm="fedprox", rounds=2, random_state=0, **given)
    model.fit(x, y, clients=sites)
    assert {name: model.model_.options[name] for name in given} == given
    strong = clone(model).set_params(proximal=0.0).fit(x, y, clients=sites)
    assert not np.array_equal(strong.predict_proba(x), model.predict_proba(x))


def test_sizes_are_chosen_by_held_out_rows(world):
    x, y, sites = world
    model = FedGMMClassifier(1, "auto", rounds=10, random_state=0, start="random")
    model.fit(x, y, clients=sites)
    assert model.n_learners == "auto"
    assert model.model_.options["learners"] > 1
    assert model.score(x, y, clients=sites) > 0.9


def test_callbacks_and_printed_rounds(world, capsys):
    x, y, sites = world
    seen: list[dict[str, float]] = []
    model = FedGMMClassifier(1, 1, rounds=3, tol=None, verbose=1, verbose_interval=2)
    model.set_params(on_round=seen.append, n_jobs=1).fit(x, y, clients=sites)
    assert seen == model.history_
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "round 1",
        "round 2",
    ]
    model.set_params(verbose=0, on_round=None).fit(x, y, clients=sites)
    assert capsys.readouterr().out == ""


def test_threads_are_given_back(world):
    x, y, _ = world
    before = torch.get_num_threads()
    used = []
    options = {
        "rounds": 1,
        "on_round": lambda _: used.append(_lanes.get() or torch.get_num_threads()),
    }
    FedGMMClassifier(1, 1, n_jobs=before + 1, **options).fit(x, y)
    assert used == [before + 1]
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------- more rounds


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedavg", "local"])
def test_a_warm_start_continues_as_if_it_had_not_stopped(world, algorithm):
    x, y, sites = world
    options = {"algorithm": algorithm, "tol": None, "random_state": np.random.RandomState(0)}
    model = FedGMMClassifier(1, 2, rounds=2, warm_start=True, **options)
    model.fit(x, y, clients=sites)
    assert model.n_iter_ == 2
    model = pickle.loads(pickle.dumps(model))
    seen: list[dict[str, float]] = []
    model.set_params(rounds=5, on_round=seen.append).fit(x, y, clients=sites)
    assert (model.n_iter_, len(seen)) == (5, 3)
    options["random_state"] = np.random.RandomState(0)
    whole = FedGMMClassifier(1, 2, rounds=5, **options).fit(x, y, clients=sites)
    assert np.array_equal(
        model.predict_proba(x, clients=sites), whole.predict_proba(x, clients=sites)
    )


def test_a_warm_start_needs_the_same_rows_and_options(world):
    x, y, sites = world
    model = FedGMMClassifier(1, 1, rounds=1, warm_start=True).fit(x, y, clients=sites)
    for change in (
        lambda: model.set_params(rounds=2).fit(x[:-1], y[:-1], clients=sites[:-1]),
        lambda: model.set_params(ridge=2.0).fit(x, y, clients=sites),
    ):
        with pytest.raises(ValueError, match="warm_start=False"):
            change()
    model.set_params(warm_start=False).fit(x[:-1], y[:-1], clients=sites[:-1])
    assert not hasattr(model, "_progress")
