"""The fitted model: predictions, densities, evaluation, and new clients."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import log_loss

from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.synthetic import synthetic
from fedgmm.model.saving import load
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS
from supervised import federation, images, tiny


@pytest.fixture(scope="module")
def data():
    return tiny(6, 120, columns=2, separation=2.0)


@pytest.fixture(scope="module", params=[True, False], ids=["standardised", "as they are"])
def model(request, data):
    return train(data, rounds=8, standardise=request.param)


def rows_of_split(data, split="test"):
    rows = data.split(split)
    return rows.inputs.numpy(), data.classes[rows.labels.numpy()], rows.codes.numpy()


# ---------------------------------------------------------------------- predictions


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_probabilities_sum_to_one_and_decide(rng, algorithm):
    data = federation(rng, classes=4)
    model = train(data, algorithm, rounds=2)
    x = data.test.inputs.numpy()
    for client in ("oslo", ["kiev"] * len(x)):
        proba = model.predict_proba(x, client)
        assert proba.shape == (len(x), 4)
        np.testing.assert_allclose(proba.sum(1), 1.0, atol=1e-12)
        assert (model.predict(x, client) == model.classes[proba.argmax(1)]).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_client_or_one_a_row(rng, algorithm):
    data = federation(rng)
    model = train(data, algorithm, rounds=2, lr=0.5)
    x = np.repeat(data.test.inputs.numpy()[:1], 4, axis=0)
    each = model.predict_proba(x, ["rome", "oslo", "bonn", "kiev"])
    # learners compute in float32, and BLAS adds in an order that depends on the number of rows
    for row, name in zip(each, ["rome", "oslo", "bonn", "kiev"], strict=True):
        np.testing.assert_allclose(row, model.predict_proba(x[:1], name)[0], atol=1e-6)
    if algorithm != "local":
        mixed = model.predict_proba(x, pd.Series(["rome", None, "bonn", "kiev"]))
        np.testing.assert_allclose(mixed[1], model.predict_proba(x[:1])[0], atol=1e-6)
        np.testing.assert_allclose(mixed[[0, 2, 3]], each[[0, 2, 3]], atol=1e-6)


def test_without_a_client_the_federation_s_weights_decide(model):
    x = np.random.default_rng(0).normal(size=(5, 2))
    np.testing.assert_allclose(model.weights.sum(), 1.0)
    np.testing.assert_allclose(model.client_weights.sum((1, 2)), 1.0)
    assert model.client_weights.shape == (6, 3, 3)
    assert not np.allclose(model.predict_proba(x), model.predict_proba(x, 0))


def test_a_round_and_its_predictions_in_plain_numpy():
    """Equations (E), (M) and (3) from the rows as they are given, without any code of the package."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 2)) * [1.0, 3.0] + [5.0, -2.0]
    y, owners = (x[:, 0] + rng.normal(size=60) > 5).astype(int), np.repeat([0, 1, 2], 20)
    rows = FederatedDataset.from_arrays(x, y, owners, split=(1, 0, 0))
    options = {"components": 2, "learners": 2, "dtype": "float64", "tol": None, "reg_covar": 0.01}
    before, after = (train(rows, rounds=n, personal_labels=False, **options) for n in (3, 4))

    z = (x - x.mean(0)) / x.std(0)
    gaussians, theta = before.prediction.gaussians, before.prediction.learners
    density = np.empty((60, 2))
    for m in range(2):
        gap, covariance = z - gaussians.means[m].numpy(), gaussians.covariances[m].numpy()
        distance = (gap @ np.linalg.inv(covariance) * gap).sum(1)
        density[:, m] = np.exp(-distance / 2) / np.sqrt(np.linalg.det(2 * np.pi * covariance))
    proba = np.exp(np.einsum("nd,mkd->nmk", z, theta["0.weight"]) + theta["0.bias"].numpy())
    proba /= proba.sum(-1, keepdims=True)

    pi = before.client_weights[owners]
    mixed = np.einsum("nab,na,nbk->nk", pi, density, proba)
    mixed /= np.einsum("nab,na->n", pi, density)[:, None]
    found = before.predict_proba(x, clients=owners)
    np.testing.assert_allclose(found, mixed, rtol=0, atol=1e-12)

    q = pi * density[:, :, None] * proba[np.arange(60), :, y][:, None]
    assert after.history[-1]["log_likelihood"] == pytest.approx(np.log(q.sum((1, 2))).mean())
    q /= q.sum((1, 2), keepdims=True)
    own = q.reshape(3, 20, 2, 2).mean(1)
    np.testing.assert_allclose(after.client_weights, own, rtol=0, atol=1e-12)
    for m, r in enumerate(q.sum(2).T):
        mean = r @ z / r.sum()
        covariance = (r * (z - mean).T) @ (z - mean) / r.sum() + 0.01 * np.eye(2)
        new = after.prediction.gaussians
        np.testing.assert_allclose(new.means[m], mean, rtol=0, atol=1e-12)
        np.testing.assert_allclose(new.covariances[m], covariance, rtol=0, atol=1e-12)


def test_blocks_and_single_rows_agree(model, monkeypatch):
    x = np.random.default_rng(0).normal(size=(100, 2))
    whole, density = model.predict_proba(x, 3), model.score_samples(x, 3)
    monkeypatch.setattr("fedgmm.model.predictions._ROWS_AT_ONCE", 7)
    np.testing.assert_allclose(model.predict_proba(x, 3), whole, atol=1e-6)
    np.testing.assert_allclose(model.score_samples(x, 3), density, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_rows_make_no_predictions(rng, algorithm):
    model = train(federation(rng), algorithm, rounds=1)
    nothing = np.empty((0, 3))
    assert model.predict_proba(nothing, "oslo").shape == (0, 2)
    assert model.predict(nothing, []).shape == (0,)


@pytest.mark.parametrize(
    ("X", "client", "message"),
    [
        (np.ones((2, 3)), None, "shape"),
        (np.ones(2), None, "columns"),
        ([["a", "b"]], None, "numeric"),
        ([[1.0, np.nan]], None, "row 0, column 1"),
        ([[1.0, 2.0], [np.inf, 0.0]], None, "row 1, column 0"),
        (np.ones((2, 2)), "mars", "mars"),
        (np.ones((2, 2)), [0, 99], "99"),
        (np.ones((2, 2)), [0], "1 entry"),
    ],
)
def test_rows_that_are_refused(model, X, client, message):
    for call in (model.predict_proba, model.predict, model.score_samples):
        with pytest.raises(ValueError, match=message):
            call(X, client)


def test_integers_lists_and_tables_are_rows_too(model):
    expected = model.predict_proba(np.array([[1.0, 2.0]]), 0)
    for rows in ([[1, 2]], np.array([[1, 2]], dtype=np.uint8), pd.DataFrame({"a": [1], "b": [2]})):
        np.testing.assert_allclose(model.predict_proba(rows, 0), expected, atol=1e-6)


# ---------------------------------------------------------------------- densities


@pytest.mark.parametrize("client", [None, 2])
def test_the_density_integrates_to_one(model, client):
    """In the coordinates the user gave, whether or not training scaled them."""
    axis = np.linspace(-9, 9, 241)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    mass = np.exp(model.score_samples(grid, client)).sum() * (axis[1] - axis[0]) ** 2
    assert mass == pytest.approx(1.0, abs=1e-3)


def test_scaled_columns_have_the_density_of_their_own_units():
    """Metres or millimetres: the density of a row changes by the volume alone."""
    data = tiny(4, 150, columns=2, separation=2.0)
    x, y, codes = (
        np.concatenate(parts)
        for parts in zip(*(rows_of_split(data, s) for s in SPLITS), strict=True)
    )
    units = np.array([1000.0, 0.01])
    plain = FederatedDataset.from_arrays(x.astype(float), y, codes)
    other = FederatedDataset.from_arrays(x * units + 5.0, y, codes)
    a, b = (train(d, rounds=5, dtype="float64", components=2) for d in (plain, other))
    expected = a.score_samples(x, codes) - np.log(units).sum()
    np.testing.assert_allclose(b.score_samples(x * units + 5.0, codes), expected, atol=1e-6)
    np.testing.assert_allclose(
        b.predict_proba(x * units + 5.0, codes), a.predict_proba(x, codes), atol=1e-6
    )


def test_joint_is_conditional_plus_marginal(model, data):
    x, y, codes = rows_of_split(data)
    joint = model.log_joint(x, y, codes)
    np.testing.assert_allclose(
        joint, model.log_conditional(x, y, codes) + model.score_samples(x, codes)
    )
    proba = model.predict_proba(x, codes)
    np.testing.assert_allclose(
        np.exp(model.log_conditional(x, y, codes)), proba[np.arange(len(x)), y], rtol=1e-9
    )
    both = [model.log_joint(x, np.full(len(x), label), codes) for label in (0, 1)]
    np.testing.assert_allclose(np.logaddexp(*both), model.score_samples(x, codes), atol=1e-9)


def test_labels_that_training_never_saw_have_no_log_probability(model):
    with pytest.raises(ValueError, match="Label 7"):
        model.log_conditional(np.ones((2, 2)), [0, 7])
    with pytest.raises(ValueError, match="2 rows"):
        model.log_joint(np.ones((2, 2)), [0, 1, 1])


# ---------------------------------------------------------------------- features of their own


@pytest.fixture(scope="module")
def separate():
    """Learners see noise beside the useful column, the Gaussians see something else."""
    rng = np.random.default_rng(4)
    n = 400
    z = rng.integers(2, size=n)
    seen = rng.normal(size=(n, 2)) * 0.3 + 4.0 * z[:, None] - 20.0
    x = 50.0 + 30.0 * rng.normal(size=(n, 3))
    y = ((x[:, 0] > 50) ^ (z == 1)).astype(int)
    clients = rng.integers(4, size=n)
    data = FederatedDataset.from_arrays(x, y, clients, features=seen)
    return x, y, clients, seen, data, train(data, components=2, learners=2, rounds=20)


def test_features_decide_which_learner_counts(separate):
    x, y, clients, seen, _, model = separate
    assert (model.predict(x, clients, features=seen) == y).mean() > 0.9
    assert model.evaluate().mean_accuracy > 0.9


def test_the_density_of_features_is_in_their_own_units(separate):
    """Inputs are scaled, features are not: no Jacobian."""
    x, *_, model = separate
    axis = np.linspace(-24, -12, 241)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    rows = np.repeat(x[:1], len(grid), axis=0)
    mass = np.exp(model.score_samples(rows, features=grid)).sum() * (axis[1] - axis[0]) ** 2
    assert mass == pytest.approx(1.0, abs=1e-3)


def test_evaluation_and_prediction_agree_on_features(separate):
    *_, data, model = separate
    rows = data.test
    proba = model.predict_proba(
        rows.inputs.numpy(), rows.codes.numpy(), features=torch.cat(rows.features.chunks).numpy()
    )
    right = proba.argmax(1) == rows.labels.numpy()
    assert model.evaluate().weighted_accuracy == pytest.approx(right.mean())


def test_features_that_are_missing_or_wrong_are_refused(separate, model):
    x, _, clients, seen, data, own = separate
    with pytest.raises(ValueError, match="pass features"):
        own.predict(x, clients)
    with pytest.raises(ValueError, match="shape"):
        own.predict(x, clients, features=np.ones((400, 3)))
    bad = seen.copy()
    bad[3, 1] = np.nan
    with pytest.raises(ValueError, match="row 3, column 1"):
        own.predict(x, clients, features=bad)
    with pytest.raises(ValueError, match="do not pass features"):
        model.predict(np.ones((2, 2)), features=np.ones((2, 2)))
    inputs_only = FederatedDataset.from_arrays(x, np.arange(400) % 2, clients)
    with pytest.raises(ValueError, match="pass features"):
        own.evaluate("test", inputs_only)
    # a method without Gaussians ignores features
    train(data, "fedavg", rounds=1).predict(x, clients)


# ---------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("split", SPLITS)
def test_evaluation_is_prediction_of_each_client_s_own_rows(model, data, split):
    x, y, codes = rows_of_split(data, split)
    result = model.evaluate(split)
    proba = model.predict_proba(x, codes)
    own = proba[np.arange(len(x)), y]
    for place, c in enumerate(range(6)):
        here = codes == c
        assert result.accuracy[place] == pytest.approx((proba[here].argmax(1) == y[here]).mean())
        assert result.log_loss[place] == pytest.approx(-np.log(own[here]).mean(), rel=1e-6)
    assert result.clients == data.names


def test_evaluation_has_no_side_effects(model):
    before = {name: value.clone() for name, value in model.prediction.learners.items()}
    first, again = model.evaluate(), model.evaluate()
    assert np.array_equal(first.log_loss, again.log_loss)
    assert all(torch.equal(before[n], v) for n, v in model.prediction.learners.items())


def test_a_class_that_training_never_saw_counts_as_wrong(model, data):
    x, y, codes = rows_of_split(data)
    strange = np.where(np.arange(len(y)) % 3 == 0, 9, y)
    other = FederatedDataset.from_arrays(x, strange, codes, split=(0.0, 0.0, 1.0))
    rows = other.test
    labels = other.classes[rows.labels.numpy()]
    result = model.evaluate("test", other)
    guess = model.predict(rows.inputs.numpy(), rows.codes.numpy())
    assert result.weighted_accuracy == pytest.approx((guess == labels).mean())
    assert np.isfinite(result.log_loss).all()
    assert result.mean_log_loss > 100


def test_a_data_set_with_fewer_classes_is_evaluated_by_label(rng):
    data = federation(rng, classes=4, sizes=(60, 60))
    model = train(data, "fedavg", rounds=30)
    x = data.test.inputs.numpy()
    guess = model.predict(x, "oslo")
    keep = guess >= 2
    other = FederatedDataset.from_clients({"oslo": (x[keep], guess[keep])}, split=(1.0, 0.0, 0.0))
    assert model.evaluate("train", other).mean_accuracy == 1.0


def test_clients_of_another_data_set_are_found_by_name(rng):
    data = federation(rng)
    model = train(data, "local", rounds=20, lr=0.5)
    some = data.select(["kiev", "oslo"])
    result = model.evaluate("train", some)
    whole = model.evaluate("train")
    for name, accuracy in zip(result.clients, result.accuracy, strict=True):
        assert accuracy == whole.accuracy[whole.clients.index(name)]
    mars = FederatedDataset.from_clients({"mars": (rng.normal(size=(9, 3)), np.arange(9) % 2)})
    with pytest.raises(ValueError, match="mars"):
        model.evaluate("train", mars)


def test_names_may_be_tuples(rng):
    x = rng.normal(size=(30, 2))
    y = (x[:, 0] > 0).astype(int)
    data = FederatedDataset.from_clients({("oslo", 1): (x, y), ("oslo", 2): (x, 1 - y)})
    assert train(data, "local", rounds=20, lr=1.0).evaluate("train").mean_accuracy > 0.9


def test_a_threshold_and_costs_decide_on_the_rarer_class(rng, tmp_path):
    x = rng.normal(size=(400, 2))
    y = np.where(x[:, 0] + rng.normal(size=400) > 1.5, "fraud", "fine")
    data = FederatedDataset.from_arrays(x, y, np.repeat(["a", "b"], 200))
    model = train(data, "fedavg", rounds=3)
    assert model.positive == "fraud"
    model.save(tmp_path / "model")
    for one in (model, load(tmp_path / "model")):
        p = one.predict_proba(x, "a")[:, 1]
        assert (one.predict(x, "a", threshold=0.2) == np.where(p >= 0.2, "fraud", "fine")).all()
        assert (one.predict(x, "a", cost=4) == one.predict(x, "a", threshold=0.2)).all()
        flipped = one.predict(x, "a", threshold=0.2, positive="fine")
        assert (flipped == np.where(1 - p >= 0.2, "fine", "fraud")).all()
    usual, low = model.evaluate(), model.evaluate(threshold=0.1)
    assert low.pooled["sensitivity"] >= usual.pooled["sensitivity"]
    assert low.pooled["specificity"] < usual.pooled["specificity"]
    assert model.evaluate(positive="fine").pooled["base_rate"] == 1 - usual.pooled["base_rate"]


def test_an_empty_split_is_refused(rng):
    model = train(federation(rng, split=(1.0, 0.0, 0.0)), "fedavg", rounds=1)
    with pytest.raises(ValueError, match="test split"):
        model.evaluate()
    with pytest.raises(ValueError, match="validation split"):
        model.calibrate()


def test_rows_of_another_shape_are_refused(rng):
    model = train(federation(rng), "fedavg", rounds=1)
    with pytest.raises(ValueError, match="shape"):
        model.evaluate("test", federation(rng, columns=5))


def test_bytes_are_scaled_alike_in_training_evaluation_and_prediction(rng):
    x = rng.integers(256, size=(200, 3)).astype(np.uint8)
    y = (x[:, 0] > 128).astype(int)
    data = FederatedDataset.from_arrays(x, y, rng.integers(3, size=200))
    model = train(data, components=2, learners=2, rounds=10)
    assert float(model.prediction.gaussians.means.abs().max()) < 3.0  # scaled coordinates
    rows = data.test
    proba = model.predict_proba(rows.inputs.numpy(), rows.codes.numpy())
    right = proba.argmax(1) == rows.labels.numpy()
    assert model.evaluate().weighted_accuracy == pytest.approx(right.mean())
    assert right.mean() > 0.9


def test_images_work_with_every_method_of_the_model(rng):
    data = images(rng)
    model = train(data, learner="cnn", components=2, learners=2, rounds=6, lr=0.3)
    x, y, codes = rows_of_split(data)
    names = np.array(data.names)[codes]
    assert model.evaluate().mean_accuracy > 0.8
    assert model.score_samples(x, names).shape == (len(x),)
    model.adapt("new camera", x, y)
    assert model.predict(x, "new camera").shape == (len(x),)


def test_it_prints_itself(model):
    text = repr(model)
    assert "fedgmm, 6 clients" in text
    assert "3 Gaussians, 3 learners of 2 classes" in text
    assert len(text) < 400
    assert "8 rounds" in text


def test_a_method_without_gaussians_prints_itself(rng):
    text = repr(train(federation(rng), "local", rounds=1))
    assert "local, 4 clients with an assigned learner" in text
    assert "Gaussian" not in text


# ---------------------------------------------------------------------- clients that join later


@pytest.fixture(scope="module")
def newcomer():
    """A federation of 12 clients, and one more from the same world that did not take part."""
    truth = synthetic(13, 850, dimensions=8, separation=1.5, seed=11)
    known = truth.dataset.select(list(range(12)))
    model = train(known, rounds=15)
    new = truth.dataset.select([12])
    return truth, model, new, train(truth.dataset, rounds=15)


def test_a_new_client_is_as_well_off_as_if_it_had_taken_part(newcomer):
    truth, model, new, taken_part = newcomer
    x, y = new.train.inputs.numpy()[:500], new.train.labels.numpy()[:500]
    result = model.adapt("new", x, y)
    rows, labels = new.test.inputs.numpy(), new.test.labels.numpy()
    adapted = (model.predict(rows, "new") == labels).mean()
    member = (taken_part.predict(rows, 12) == labels).mean()
    assert adapted >= member - 0.01
    assert (np.diff(result.log_likelihoods) >= -1e-9).all()
    np.testing.assert_allclose(result.weights.sum(), 1.0)
    np.testing.assert_allclose(model.client_weights[-1], result.weights)
    # the truth: weights of the client on the Gaussians, in any order
    expected = np.sort(truth.client_weights[12])
    np.testing.assert_allclose(np.sort(result.weights.sum(1)), expected, atol=0.06)


def test_adapting_takes_milliseconds(newcomer):
    _, model, new, _ = newcomer
    x, y = new.train.inputs.numpy()[:500], new.train.labels.numpy()[:500]
    model.adapt("quick", x, y)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        model.adapt("quick", x, y)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.05


def test_labels_are_not_needed(newcomer):
    truth, model, new, _ = newcomer
    result = model.adapt("silent", new.train.inputs.numpy()[:500])
    rows, labels = new.test.inputs.numpy(), new.test.labels.numpy()
    silent = (model.predict(rows, "silent") == labels).mean()
    common = (model.predict(rows) == labels).mean()
    assert silent >= common
    expected = np.sort(truth.client_weights[12])
    np.testing.assert_allclose(np.sort(result.weights.sum(1)), expected, atol=0.06)
    # within a Gaussian the learners keep the shares that they have in the federation
    shares = result.weights / result.weights.sum(1, keepdims=True)
    common = model.weights / model.weights.sum(1, keepdims=True)
    used = result.weights.sum(1) > 1e-6
    np.testing.assert_allclose(shares[used], common[used], atol=2e-3)


def test_a_new_client_does_not_change_the_others(newcomer):
    _, model, new, _ = newcomer
    x, y = new.train.inputs.numpy()[:100], new.train.labels.numpy()[:100]
    ids = np.arange(len(x)) % 12
    before, global_before = model.predict_proba(x, ids), model.predict_proba(x)
    density = model.score_samples(x, ids)
    model.adapt("one more", x, y)
    model.adapt("and another", x)
    assert np.array_equal(model.predict_proba(x, ids), before)
    assert np.array_equal(model.predict_proba(x), global_before)
    assert np.array_equal(model.score_samples(x, ids), density)


def test_a_known_client_gets_new_weights(newcomer):
    _, model, new, _ = newcomer
    names = list(model.names)
    old = model.client_weights
    x, y = new.train.inputs.numpy()[:200], new.train.labels.numpy()[:200]
    result = model.adapt(3, x, y)
    assert model.names == names
    np.testing.assert_array_equal(model.client_weights[3], result.weights)
    others = [c for c in range(len(names)) if c != 3]
    assert np.array_equal(model.client_weights[others], old[others])


def test_a_component_that_the_federation_gave_up_can_come_back():
    """A weight of zero in the federation must not bind a new client, with labels or without."""
    rng = np.random.default_rng(0)
    data = tiny(4, 200, columns=2, separation=6.0, seed=2)
    model = train(data, components=2, learners=2, rounds=5)
    weights = model.prediction.weights.clone().reshape(2, 2)
    weights[1] = 0.0
    model.prediction = replace(model.prediction, weights=(weights / weights.sum()).reshape(-1))
    mean = model.prediction.gaussians.means[1] * model.scaling.scale + model.scaling.mean
    x = mean.numpy() + 0.1 * rng.normal(size=(50, 2))
    for labels in (None, model.predict(x, 0)):
        result = model.adapt("back", x, labels)
        np.testing.assert_allclose(result.weights.sum(), 1.0)
        assert result.weights[1].sum() > 0.7  # shrunk towards the federation's zero


def test_adapting_is_refused_without_a_mixture_or_labels(rng):
    data = federation(rng)
    x, y = data.test.inputs.numpy(), data.test.labels.numpy()
    for algorithm in ("local", "clustered", "pfedme", "fedavg+"):
        with pytest.raises(ValueError, match="mix"):
            train(data, algorithm, rounds=1).adapt("new", x, y)
    em = train(data, "fedem", rounds=1)
    with pytest.raises(ValueError, match="pass y"):
        em.adapt("new", x)
    em.adapt("new", x, y)
    with pytest.raises(ValueError, match="no rows"):
        em.adapt("new", x[:0], y[:0])
    with pytest.raises(ValueError, match="Label 5"):
        em.adapt("new", x, np.full(len(x), 5))
    with pytest.raises(ValueError, match="weights"):
        _ = train(data, "local", rounds=1).client_weights


# ---------------------------------------------------------------------- tables with column names


@pytest.fixture(scope="module")
def named():
    """A model of a table, the table, and its columns in another order."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(80, 3)) * [1, 5, 20], columns=["age", "bmi", "sbp"])
    y = (table["age"] + table["sbp"] / 10 > 0).astype(int)
    data = FederatedDataset.from_arrays(table, y, np.arange(80) % 2)
    return train(data, rounds=3, components=2, learners=2), table, y, table[["sbp", "age", "bmi"]]


def test_columns_in_another_order_are_put_in_order(named, tmp_path):
    model, table, y, other = named
    again = load(model.save(tmp_path))
    assert again.column_names == ("age", "bmi", "sbp")
    for one in (model, again):
        calls = (
            lambda X, one=one: one.predict_proba(X, 1),
            lambda X, one=one: one.predict(X, clients=np.arange(80) % 2),
            lambda X, one=one: one.log_predictions(X).log_density,
            lambda X, one=one: one.score_samples(X, client=0),
            lambda X, one=one: one.log_conditional(X, y),
            lambda X, one=one: one.log_joint(X, y),
            lambda X, one=one: one.adapt("new", X, y).weights,
            lambda X, one=one: one.adapt("new", X).weights,
        )
        for call in calls:
            np.testing.assert_array_equal(call(other), call(table))
            np.testing.assert_array_equal(call(table.to_numpy()), call(table))
    np.testing.assert_array_equal(model.novelty(other).p_values, model.novelty(table).p_values)
    assert model.client_novelty(other) == model.client_novelty(table)


def test_tables_of_other_libraries_have_names_too(named):
    pa = pytest.importorskip("pyarrow")
    model, table, _, other = named
    arrow = pa.Table.from_pandas(other)
    np.testing.assert_allclose(model.predict_proba(arrow), model.predict_proba(table))


def test_missing_and_unknown_columns_are_named(named):
    model, table, _, other = named
    for wrong, word in (
        (other.rename(columns={"age": "Age"}), "'age'.*'Age'"),
        (other.assign(site="a"), "unknown.*'site'"),
        (table[["age", "bmi"]], "'sbp'"),
        (table[["age", "bmi", "sbp", "sbp"]], "more than once.*'sbp'"),
    ):
        with pytest.raises(ValueError, match=word):
            model.predict(wrong)


def test_a_data_set_in_another_order_is_put_in_order(named):
    model, table, y, other = named
    evaluations = [
        model.evaluate("train", FederatedDataset.from_arrays(X, y, np.arange(80) % 2))
        for X in (table, other)
    ]
    np.testing.assert_array_equal(evaluations[0].log_loss, evaluations[1].log_loss)


def test_one_client_for_all_rows_or_one_per_row(named):
    model, table, _, _ = named
    each = model.predict_proba(table, clients=[1] * 80)
    np.testing.assert_array_equal(each, model.predict_proba(table, client=1))
    with pytest.raises(ValueError, match="not both"):
        model.predict(table, client=1, clients=[1] * 80)
    with pytest.raises(ValueError, match="one name per row"):
        model.predict(table, clients=1)


# ---------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem", "fedavg", "local"])
def test_probabilities_never_leave_the_unit_interval(algorithm):
    """A steep learner and many rows: without care some sums exceed one by a rounding."""
    rng = np.random.default_rng(0)
    data = federation(rng, classes=3)
    options = {"components": 2, "learners": 2} if algorithm in ("fedgmm", "fedem") else {}
    model = train(data, algorithm, rounds=2, lr=2.0, **options)
    x = rng.normal(size=(5000, 3)) * rng.choice([0.1, 1, 30, 1000], size=(5000, 1))
    log_proba = model.predict_log_proba(x, "oslo")
    proba = model.predict_proba(x, "oslo")
    assert log_proba.max() <= 0.0
    assert proba.min() >= 0.0
    assert proba.max() <= 1.0
    assert np.abs(proba.sum(1) - 1).max() <= 3 * np.finfo(proba.dtype).eps
    log_loss(rng.integers(3, size=5000), proba, labels=[0, 1, 2])


def test_rows_too_large_to_compute_with_are_refused(named):
    model, table, _, _ = named
    assert np.isfinite(model.predict_proba(table + 1e20)).all()
    for size in (1e160, 1e37):
        with pytest.raises(ValueError, match="too large"):
            model.predict_proba(table + size)


def test_arrays_in_place_of_a_data_set(data, model):
    x, y, _ = rows_of_split(data)
    for arguments in ((x, y), ("test", x)):
        with pytest.raises(TypeError, match=r"ndarray.*from_arrays"):
            model.evaluate(*arguments)
    with pytest.raises(TypeError, match="FederatedDataset"):
        model.evaluate(data)
