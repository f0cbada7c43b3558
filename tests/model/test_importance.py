"""Which columns decide: coefficients against closed forms, shuffles against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.inspection import permutation_importance
from sklearn.metrics import log_loss

from fedgmm.data.dataset import FederatedDataset
from fedgmm.training.in_process import train
from supervised import images


def sites(rng, rows=400):
    """The first column decides in the south and the second in the north; the third is noise."""
    x = rng.normal(size=(2 * rows, 3)) * [1.0, 5.0, 1.0]
    north = np.repeat([True, False], rows)
    y = np.where(north, x[:, 1] / 5, x[:, 0]) + 0.3 * rng.normal(size=2 * rows) > 0
    return FederatedDataset.from_arrays(x, y, np.where(north, "north", "south"))


@pytest.fixture(scope="module")
def data():
    return sites(np.random.default_rng(0))


@pytest.fixture(scope="module")
def personal(data):
    return train(data, "local", rounds=40, lr=0.5, learner="linear")


def test_each_client_has_its_own_columns(personal):
    found = personal.importance()
    assert found.kind == "coefficients"
    assert found.clients == ("north", "south")
    assert found.columns == ("x0", "x1", "x2")
    assert found.values.argmax(1).tolist() == [1, 0]
    assert found.order[-1] == 2
    assert found.mean == pytest.approx(found.values.mean(0))
    assert found.spread == pytest.approx(found.values.std(0))


def test_coefficients_are_those_of_standardised_columns(personal, data):
    found = personal.importance("train")
    weight = personal.prediction.learners["0.weight"].double().numpy()
    x = (data.train.inputs.double() - personal.scaling.mean) / personal.scaling.scale
    for client in range(2):
        learner = int(personal.prediction.assignment[client])
        expected = (weight[learner, 1] - weight[learner, 0]) * x.numpy().std(0)
        sign = 1 if personal.positive else -1
        assert found.coefficients[client] == pytest.approx(sign * expected)
        assert found.values[client] == pytest.approx(abs(expected))


def test_coefficients_of_numbers_are_in_their_unit():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3)) * [1.0, 5.0, 1.0]
    y = 30.0 * x[:, 0] - 2.0 * x[:, 1] + 100.0
    numbers = FederatedDataset.from_arrays(x, y, np.repeat(["a", "b"], 300), task="regression")
    model = train(numbers, components=1, learners=1, rounds=20, ridge=1e-6)
    found = model.importance("train")
    rows = numbers.train.inputs.double().numpy()
    assert (found.kind, found.of_numbers) == ("coefficients", True)
    expected = np.array([30.0, -2.0, 0.0]) * rows.std(0)
    assert found.coefficients[0] == pytest.approx(expected, abs=0.01)
    assert found.values[0] == pytest.approx(abs(expected), abs=0.01)
    assert "log-odds" not in found.meaning
    assert model.importance(kind="permutation").kind == "permutation"


def test_columns_of_a_group_count_together(personal, data):
    found = personal.importance("train", columns={"both": [0, 1], "noise": [2]})
    learner = int(personal.prediction.assignment[0])
    weight = personal.prediction.learners["0.weight"].double().numpy()[learner]
    x = (data.train.inputs.double() - personal.scaling.mean) / personal.scaling.scale
    part = x.numpy()[:, :2] @ (weight[1] - weight[0])[:2]
    assert found.columns == ("both", "noise")
    assert found.values[0, 0] == pytest.approx(part.std())


def test_the_weights_of_a_client_mix_the_learners(data):
    model = train(data, "fedem", learners=2, rounds=3)
    shares = model.client_weights.sum(1)
    weight = model.prediction.learners["0.weight"].double().numpy()
    x = ((data.test.inputs.double() - model.scaling.mean) / model.scaling.scale).numpy()
    own = abs(weight[:, 1] - weight[:, 0]) * x.std(0)
    assert model.importance().values == pytest.approx(shares @ own)


def test_shuffles_agree_with_scikit_learn(personal, data):
    """The same mean growth of the loss, from two kinds of shuffles of one client's rows."""

    class North(ClassifierMixin, BaseEstimator):
        classes_ = np.array([False, True])

        def fit(self, x, y):
            return self

        def predict_proba(self, x):
            return personal.predict_proba(x, "north")

    found = personal.importance("train", kind="permutation", repeats=20)
    rows = data.train.client(0)
    x, y = rows.inputs.numpy(), data.classes[rows.labels.numpy()]
    theirs = permutation_importance(
        North(), x, y, scoring="neg_log_loss", n_repeats=20, random_state=0
    )
    near = 5 * theirs.importances_std.max() / np.sqrt(20)
    assert found.values[0] == pytest.approx(theirs.importances_mean, abs=near)
    before = log_loss(y, personal.predict_proba(x, "north"))
    assert found.values[0, 1] > 0.5 * before
    again = personal.importance("train", kind="permutation", repeats=20)
    assert np.array_equal(again.values, found.values)


def test_other_learners_are_shuffled_and_classes_may_be_many(rng):
    x = rng.normal(size=(240, 3))
    data = FederatedDataset.from_arrays(x, (x[:, 1] * 3).round().clip(-1, 1), ["a", "b", "c"] * 80)
    found = train(data, "fedavg", learner="mlp", rounds=15, lr=0.3).importance(repeats=2)
    assert found.kind == "permutation"
    assert found.order[0] == 1
    record = found.record()
    assert next(iter(record["columns"])) == "x1"
    assert set(record["columns"]["x1"]["clients"]) == {"a", "b", "c"}
    linear = train(data, "fedavg", rounds=5).importance()
    assert linear.order[0] == 1
    assert linear.coefficients is None


def test_a_client_with_one_row_has_no_value(rng):
    x = rng.normal(size=(41, 2))
    clients = np.array(["many"] * 40 + ["one"])
    data = FederatedDataset.from_arrays(x, x[:, 0] > 0, clients, split=(1, 0, 0))
    found = train(data, "fedavg", rounds=3).importance("train", kind="permutation")
    assert np.isnan(found.values[1]).all()
    assert found.mean == pytest.approx(found.values[0])


def test_rows_and_learners_that_do_not_fit(rng, data):
    with pytest.raises(ValueError, match="columns"):
        train(images(rng), "fedavg", rounds=1, learner="cnn").importance()
    model = train(data, "fedavg", rounds=1, learner="mlp")
    with pytest.raises(ValueError, match="linear"):
        model.importance(kind="coefficients")
    with pytest.raises(ValueError, match="kind"):
        model.importance(kind="magic")
