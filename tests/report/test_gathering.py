"""The report shows the values of the model, and gathering them does not change the model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from pages import contents_of, named_clients
from sklearn.metrics import r2_score

from fedgmm.data.dataset import FederatedDataset
from fedgmm.report.contents import MOST_POINTS, AdaptationRecord, evenly
from fedgmm.report.gathering import distinct_names, flattened, gather, pair_names, reliability_of
from fedgmm.training.in_process import train
from supervised import images, tiny

FAST = {"rounds": 3, "components": 2, "learners": 2}


@pytest.fixture(scope="module")
def dataset():
    return tiny(clients=7, rows=80)


@pytest.fixture(scope="module")
def model(dataset):
    return train(dataset, "fedgmm", **FAST)


@pytest.fixture(scope="module")
def contents(model, dataset):
    return gather(model, dataset, title="t", history=model.history, configuration=model.options)


# ---------------------------------------------------------------------- clients


def test_the_table_holds_the_models_own_figures(contents, model, dataset):
    result = model.evaluate("test")
    table = contents.clients
    np.testing.assert_array_equal(table.accuracy, result.accuracy)
    np.testing.assert_array_equal(table.log_loss, result.log_loss)
    np.testing.assert_array_equal(table.calibration_error, result.calibration_error)
    assert table.names == tuple(map(str, dataset.names))
    splits = (dataset.train, dataset.validation, dataset.test)
    assert table.rows.sum() == sum(map(len, splits))
    assert table.train_rows.sum() == len(dataset.train)
    assert contents.mean_accuracy == pytest.approx(result.mean_accuracy)
    assert contents.evaluation.weighted_accuracy == pytest.approx(result.weighted_accuracy)
    assert table.accuracy[contents.worst_client] == result.accuracy.min()


def test_the_strongest_pair_and_its_share(contents, model):
    weights = model.client_weights.reshape(len(model.names), -1)
    assert contents.clients.strongest[3] == pair_names(2, 2)[weights[3].argmax()]
    np.testing.assert_array_equal(contents.clients.share, weights.max(-1))


def test_clients_without_test_rows_have_unknown_accuracy():
    data = named_clients(["many", "few"], rows=40)
    few = named_clients(["few"], rows=1)
    rows = {
        name: (source.train.inputs.numpy(), source.train.labels.numpy())
        for name, source in (("few", few), ("many", data.select(["many"])))
    }
    contents = contents_of(type(data).from_clients(rows))
    assert np.isnan(contents.clients.accuracy).tolist() == [True, False]
    assert contents.worst_client == 1
    assert np.isnan(contents.clients.novel_share).tolist() == [True, False]


def split_again(dataset, split):
    """Return the training rows of every client as a data set of their own."""
    rows = [dataset.train.client(code) for code in range(len(dataset.names))]
    pairs = {part.names[0]: (part.inputs.numpy(), part.labels.numpy()) for part in rows}
    return type(dataset).from_clients(pairs, split=split)


def test_no_test_rows_at_all(dataset):
    contents = contents_of(split_again(dataset, (0.8, 0.2, 0.0)))
    assert np.isnan(contents.mean_accuracy)
    assert contents.worst_client is None
    assert {"accuracy", "calibration", "densities", "adaptation"} <= set(contents.absent)


def test_no_validation_rows_means_no_flags(dataset):
    contents = contents_of(split_again(dataset, (0.8, 0.0, 0.2)))
    assert contents.densities.novel is None
    assert contents.clients.novel_share is None


def test_names_that_look_the_same_are_distinguished():
    assert distinct_names(["a", 1]) == ("a", "1")
    assert distinct_names(["1", 1]) == ("'1'", "1")


@pytest.mark.parametrize("names", [[("Rome", 1), ("Oslo", 2)], [("Rome", 1), "plain", 7]])
def test_clients_of_any_kind(names):
    contents = contents_of(named_clients(names))
    assert contents.clients.names == tuple(map(str, names))


def test_baselines_are_aligned_by_name(model, dataset):
    first, second = dataset.names[0], dataset.names[3]
    contents = gather(
        model,
        dataset,
        title="t",
        history=[],
        configuration={},
        baselines={"some": {second: 0.25, first: 0.75, "stranger": 1.0}, "full": model.evaluate()},
    )
    assert contents.baselines["some"][[0, 3]].tolist() == [0.75, 0.25]
    assert np.isnan(contents.baselines["some"][[1, 2]]).all()
    np.testing.assert_array_equal(contents.baselines["full"], model.evaluate().accuracy)
    assert contents.best_baseline == max(
        ("some", "full"), key=lambda name: np.nanmean(contents.baselines[name])
    )


def test_the_model_does_not_change(dataset):
    model = train(dataset, "fedgmm", **FAST)
    before, weights = model.prediction, model.client_weights.copy()
    gather(model, dataset, title="t", history=[], configuration={})
    assert model.prediction is before
    assert model.calibration == {}
    assert model.names == list(dataset.names)
    np.testing.assert_array_equal(model.client_weights, weights)


# ---------------------------------------------------------------------- rounds


def test_convergence_keeps_recorded_values(model, dataset):
    history = [
        {"round": 1.0, "log_likelihood": -3.0},
        {"round": 2.0, "log_likelihood": -2.0, "validation_accuracy": 0.5},
        {"round": 3.0, "log_likelihood": float("nan"), "validation_accuracy": 0.75},
    ]
    found = gather(model, dataset, title="t", history=history, configuration={}).convergence
    assert [one.values.tolist() for one in found] == [[-3.0, -2.0], [0.5, 0.75]]
    assert [one.rounds.tolist() for one in found] == [[1, 2], [2, 3]]


# ---------------------------------------------------------------------- calibration


def test_reliability_by_hand():
    confidence = np.array([0.55, 0.58, 0.95, 0.99, 1.0])
    right = np.array([True, False, True, True, False])
    found = reliability_of(confidence, right)
    np.testing.assert_allclose(found.confidence, [0.565, 0.98])
    np.testing.assert_allclose(found.accuracy, [0.5, 2 / 3])
    assert found.counts.tolist() == [2, 3]
    np.testing.assert_allclose(found.lower, [0.5, 0.9])
    assert found.error == pytest.approx(0.4 * 0.065 + 0.6 * (0.98 - 2 / 3))


# ---------------------------------------------------------------------- densities


def test_densities_are_those_of_the_rows_own_client(contents, model, dataset):
    rows = dataset.test
    x, labels = rows.inputs.numpy(), dataset.classes[rows.labels.numpy()]
    owners = np.array(dataset.names)[rows.codes.numpy()]
    np.testing.assert_allclose(contents.densities.log_x, model.score_samples(x, owners))
    np.testing.assert_allclose(
        contents.densities.log_y, model.log_conditional(x, labels, owners), atol=1e-9
    )
    copy = replace(model)
    np.testing.assert_array_equal(contents.densities.novel, copy.novelty(x).novel)
    shares = [copy.novelty(x).novel[owners == name].mean() for name in dataset.names]
    np.testing.assert_allclose(contents.clients.novel_share, shares)


def test_few_points_of_many_rows():
    shown = evenly(100_000, MOST_POINTS)
    assert len(shown) == MOST_POINTS
    assert (np.diff(shown) > 0).all()
    assert (shown[0], shown[-1]) == (0, 99_999)
    assert evenly(5, MOST_POINTS).tolist() == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------- weights and the plane


def test_the_heat_map_holds_the_weights_of_its_clients(contents, model):
    shown = contents.weights
    flat = model.client_weights.reshape(len(model.names), -1)
    np.testing.assert_array_equal(shown.values, flat[shown.clients])
    assert sorted(shown.clients.tolist()) == list(range(len(model.names)))


def test_clients_on_the_map_have_their_trained_weights(contents, model):
    """Also the client that was replayed as a new one."""
    centres = model.client_weights.sum(-1) @ model.prediction.gaussians.means.numpy()
    plane = contents.projection
    shifts = centres @ plane.axes - plane.clients  # all by the centre of the plane
    np.testing.assert_allclose(shifts, np.broadcast_to(shifts[0], shifts.shape), atol=1e-9)


def test_feature_names_must_fit(model, dataset):
    with pytest.raises(ValueError, match="feature_names"):
        gather(model, dataset, title="t", history=[], configuration={}, feature_names=["a", "b"])


# ---------------------------------------------------------------------- methods that lack a part


def test_without_a_density(dataset):
    contents = contents_of(dataset, "fedem")
    assert set(contents.absent) == {"densities", "projection"}
    assert contents.weights.pairs == ("L1", "L2")
    assert contents.adaptations
    assert contents.clients.novel_share is None


@pytest.mark.parametrize("algorithm", ["fedavg", "local", "clustered"])
def test_without_weights(algorithm, dataset):
    contents = contents_of(dataset, algorithm)
    assert set(contents.absent) == {"densities", "projection", "weights", "adaptation"}
    assert contents.clients.strongest is None
    assert contents.reliability is not None


def test_images_have_no_names_for_their_axes(rng):
    contents = contents_of(images(rng))
    assert contents.projection is not None
    assert contents.projection.axis_titles == ("direction 1", "direction 2")


def test_features_that_are_not_the_inputs(rng):
    x = rng.normal(size=(90, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    seen = x @ rng.normal(size=(3, 2)).astype(np.float32)
    clients = np.repeat(["a", "b", "c"], 30)
    data = type(tiny()).from_arrays(x, y, clients, features=seen)
    contents = contents_of(data)
    assert contents.projection.axes.shape == (2, 2)
    assert len(contents.densities.log_x) == len(data.test)


# ---------------------------------------------------------------------- a client that joins later


def test_the_replay_is_what_adapting_gives(contents, model, dataset):
    (record,) = contents.adaptations
    assert contents.replayed
    assert record.rows[0] == 0
    assert record.rows == sorted(set(record.rows))
    code = contents.clients.names.index(record.client)
    assert record.rows[-1] == contents.clients.train_rows[code]
    median = np.median(contents.clients.train_rows)
    assert contents.clients.train_rows[code] == pytest.approx(median, abs=1)
    test, name = dataset.test.client(code), dataset.names[code]
    truth = dataset.classes[test.labels.numpy()]
    whole = dataset.train.client(code)
    copy = replace(model)
    before = float((copy.predict(test.inputs.numpy()) == truth).mean())
    copy.adapt(name, whole.inputs.numpy(), dataset.classes[whole.labels.numpy()])
    after = float((copy.predict(test.inputs.numpy(), name) == truth).mean())
    assert (record.accuracy[0], record.accuracy[-1]) == (before, after)


def test_one_learner_leaves_nothing_to_adapt(dataset):
    """A flat chart would suggest that more rows might help."""
    model = train(dataset, rounds=2, components=2, learners=1, personal_labels=False)
    record = AdaptationRecord("new", [5], [0.5], [-1.0], labelled=True)
    found = gather(model, dataset, title="t", history=[], configuration={}, adaptations=[record])
    assert found.adaptations == ()
    assert "nothing to adapt with one learner" in found.absent["adaptation"]


# ---------------------------------------------------------------------- settings


def test_settings_are_flattened():
    settings = {"a": 1, "b": {"c": None, "d": {"e": True}}, "f": [1, 0.5], "g": 1e-6}
    assert flattened(settings) == {
        "a": "1",
        "b.c": "none",
        "b.d.e": "yes",
        "f": "1, 0.5",
        "g": "1e-06",
    }


def test_importing_the_page_loads_no_large_library():
    code = (
        "import sys, fedgmm.report.gathering, fedgmm.report.page;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'plotly', 'jinja2')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_have_r2_and_intervals_that_hold(rng):
    x = rng.normal(size=(240, 2))
    y = x @ [1.0, 2.0] + rng.normal(size=240)
    data = FederatedDataset.from_arrays(x, y, np.arange(240) % 3, task="regression")
    model = train(data, components=1, learners=2, rounds=10)
    found = gather(model, data, title="t", history=model.history, configuration={})
    evaluation = model.evaluate("test")
    np.testing.assert_array_equal(found.clients.accuracy, evaluation.r2)
    np.testing.assert_array_equal(found.clients.rmse, evaluation.rmse)
    at_90 = found.reliability.accuracy[-1]
    assert at_90 == pytest.approx(evaluation.pooled["coverage"])
    assert found.reliability.confidence[-1] == 0.9
    test, code = data.test, data.names.index(int(found.adaptations[0].client))
    own = test.client(code)
    predicted = model.predict(own.inputs.numpy())
    expected = r2_score(own.labels, predicted)
    assert found.adaptations[0].accuracy[0] == pytest.approx(expected)
    assert np.isfinite(found.densities.log_y).all()
