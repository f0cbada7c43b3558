"""``train``: every method with every server and learner, and clients of every kind."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import fedgmm
from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.training.in_process import train
from fedgmm.training.options import ALGORITHMS, TrainingOptions
from supervised import FAST, federation, predictions, tiny, two_groups

# ---------------------------------------------------------------------- every method


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("server", ["average", "momentum", "adam"])
def test_every_method_runs_with_every_server(rng, algorithm, server):
    data = federation(rng, sizes=(20, 40, 1), classes=3)
    model = train(data, algorithm, server=server, **FAST)
    assert model.algorithm == algorithm
    assert [entry["round"] for entry in model.history] == [1, 2]
    assert np.isfinite(predictions(model, data)).all()
    assert model.stopped is None
    assert model.evaluate().mean_accuracy >= 0


@pytest.mark.parametrize("server", ["momentum", "adam"])
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a != "local"])
def test_the_server_s_optimiser_reaches_every_method(rng, algorithm, server):
    """Not only the methods that average: an option that does nothing is a lie."""
    data = federation(rng, sizes=(20, 40, 30))
    plain = train(data, algorithm, tol=None, **{**FAST, "rounds": 3})
    other = train(data, algorithm, tol=None, server=server, **{**FAST, "rounds": 3})
    assert not np.allclose(predictions(plain, data), predictions(other, data))


@pytest.mark.parametrize("kind", ["average", "momentum", "adam"])
def test_every_server_learns_with_its_own_default_step(rng, kind):
    x = rng.normal(size=(300, 3))
    data = FederatedDataset.from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(300) % 3)
    model = train(data, "fedavg", server=kind, rounds=60, lr=0.3, tol=None)
    assert model.evaluate().mean_accuracy > 0.9
    assert model.evaluate().mean_log_loss < 0.5


@pytest.mark.parametrize(("kind", "lr"), [("momentum", 1.0), ("adam", 0.01)])
def test_the_server_s_default_step(rng, kind, lr):
    data = federation(rng)
    default, given = (
        train(data, "fedavg", server=kind, **step, **FAST) for step in ({}, {"server_lr": lr})
    )
    assert np.array_equal(predictions(default, data), predictions(given, data))


def test_fedgmm_beats_what_knows_one_rule(rng):
    data = two_groups(rng, clients=8, rows=150)
    ours = train(data, components=1, learners=2, start="random", rounds=30).evaluate()
    assert ours.mean_accuracy > 0.85
    assert train(data, "fedavg", rounds=30).evaluate().mean_accuracy < 0.7


@pytest.mark.parametrize("learner", ["linear", "mlp"])
def test_with_one_gaussian_fedgmm_is_fedem_by_default(rng, learner):
    """Also at the start: a learner that is tied to the only Gaussian would get most rows."""
    data, options = federation(rng), {"learners": 2, "learner": learner, **FAST}
    ours = train(data, "fedgmm", **{**options, "components": 1})
    assert np.allclose(predictions(ours, data), predictions(train(data, "fedem", **options), data))


def test_it_is_the_package_s_own_door(rng):
    assert fedgmm.train is train
    assert fedgmm.TrainingOptions is TrainingOptions


# ---------------------------------------------------------------------- what is left alone


def test_training_leaves_the_data_alone(rng):
    data = federation(rng)
    before = [data.split(name).inputs.clone() for name in SPLITS]
    train(data, **FAST)
    for old, name in zip(before, SPLITS, strict=True):
        assert torch.equal(old, data.split(name).inputs)


def test_test_rows_do_not_touch_training(rng):
    """Other test and validation rows: the same bits."""
    data = federation(rng)
    first = train(data, **FAST)
    data.test.inputs.mul_(-7.0)
    data.validation.inputs.add_(100.0)
    again = train(data, **FAST)
    for name, value in first.prediction.learners.items():
        assert torch.equal(value, again.prediction.learners[name])


def test_standardising_uses_the_training_rows_of_all_clients(rng):
    data = federation(rng)
    model = train(data, **FAST)
    x = data.train.inputs.numpy()
    np.testing.assert_allclose(model.scaling.mean, x.mean(0), atol=1e-9)
    np.testing.assert_allclose(model.scaling.scale, x.std(0), rtol=1e-9)
    assert train(data, standardise=False, **FAST).scaling is None


def test_selected_clients_train_as_if_there_were_no_others(rng):
    """Rows that were picked out are copies; what the Gaussians see must be scaled like the inputs."""
    pairs = {
        name: (rng.normal(size=(40, 3)) * 50 + 500, np.arange(40) % 2) for name in ("a", "b", "c")
    }
    whole = FederatedDataset.from_clients(pairs)
    some = train(whole.select(["a", "c"]), **FAST)
    del pairs["b"]
    alone = train(FederatedDataset.from_clients(pairs), **FAST)
    assert float(some.prediction.gaussians.means.abs().max()) < 5.0  # scaled
    np.testing.assert_allclose(
        some.prediction.gaussians.means, alone.prediction.gaussians.means, atol=1e-6
    )


# ---------------------------------------------------------------------- clients of every kind


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_strange_clients_are_no_problem(rng, algorithm):
    """One class only, a single row, a class that lives on one client only, a constant column."""
    x = rng.normal(size=(30, 3))
    x[:, 2] = 5.0
    clients = {
        "one class": (x, np.zeros(30, dtype=int)),
        "one row": (x[:1], np.array([1])),
        "own class": (x, np.where(x[:, 0] > 0, 2, 1)),
        "usual": (x, (x[:, 0] > 0).astype(int)),
    }
    data = FederatedDataset.from_clients(clients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # covariances of so few rows are repaired
        model = train(data, algorithm, rounds=5, components=2, learners=2, lr=0.5)
    result = model.evaluate("train")
    assert result.clients == data.names
    assert np.isfinite(result.log_loss).all()
    for name in data.names:
        np.testing.assert_allclose(model.predict_proba(x, name).sum(1), 1.0, atol=1e-9)
    test = model.evaluate("test")
    assert "one row" not in test.clients  # it has nothing to be tested on


def test_personal_weights_learn_a_client_of_one_class(rng):
    x = rng.normal(size=(80, 2))
    clients = {"usual": (x, (x[:, 0] > 0).astype(int)), "turned": (x, (x[:, 0] < 0).astype(int))}
    data = FederatedDataset.from_clients(clients)
    model = train(data, "fedem", learners=2, start="random", rounds=40, seed=1)
    assert model.evaluate().accuracy.min() > 0.85


def test_one_class_in_all_is_refused(rng):
    data = FederatedDataset.from_arrays(rng.normal(size=(20, 2)), np.full(20, "only"))
    with pytest.raises(ValueError, match=r"only one class.*only"):
        train(data)


def test_more_components_and_learners_than_rows(rng):
    data = FederatedDataset.from_arrays(rng.normal(size=(6, 2)), np.arange(6) % 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = train(data, components=8, learners=8, rounds=5)
    assert np.isfinite(model.predict_proba(rng.normal(size=(3, 2)))).all()


def test_labels_at_evaluation_that_training_never_saw(rng):
    data = tiny(3, 60)
    model = train(data, rounds=2)
    x = data.test.inputs.numpy()
    other = FederatedDataset.from_arrays(x, np.full(len(x), 8), data.test.codes.numpy())
    result = model.evaluate("train", other)
    assert result.mean_accuracy == 0.0
    assert np.isfinite(result.mean_log_loss)


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedavg"])
def test_one_client_alone_is_a_federation_too(rng, algorithm):
    x = rng.normal(size=(100, 2))
    data = FederatedDataset.from_arrays(x, (x[:, 0] > 0).astype(int))
    assert train(data, algorithm, rounds=30, lr=0.5).evaluate().mean_accuracy > 0.85
