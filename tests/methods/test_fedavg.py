"""FedAvg, FedProx and FedAvg+ against plain loops and known limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedgmm.data.dataset import FederatedDataset
from fedgmm.training.build import build
from fedgmm.training.in_process import train
from fedgmm.training.options import TrainingOptions
from supervised import (
    batches_of,
    client_orders,
    dense_params,
    federation,
    load_dense,
    module_of,
    plain_sgd,
    rows_of,
)

SAME = {"dtype": "float64", "standardise": False, "tol": None, "seed": 2}


def start_of(data, **options):
    """The learner that a run begins with."""
    model = train(data, "fedavg", rounds=1, answers=lambda *_: False, **{**SAME, **options})
    return model.prediction.learners


def looped(data, rounds, *, lr, batch_size, epochs=1, proximal=0.0, momentum=0.0):
    """FedAvg, clients one at a time: the global learner after every round."""
    rows, widths = data.train, (data.input_shape[0], len(data.classes))
    current = {name: value[0].clone() for name, value in start_of(data).items()}
    for number in range(1, rounds + 1):
        total = {name: torch.zeros_like(value) for name, value in current.items()}
        for c in range(len(rows.names)):
            x, y = rows_of(rows, c)
            module = load_dense(module_of(widths), current)
            orders = client_orders(rows, c, SAME["seed"], number, epochs)
            batches = [b for order in orders for b in batches_of(order, batch_size)]
            plain_sgd(
                module,
                torch.from_numpy(x),
                torch.from_numpy(y),
                batches,
                lr=lr,
                proximal=proximal,
                momentum=momentum,
            )
            for name, value in dense_params(module).items():
                total[name] += len(x) / len(rows) * value
        current = total
    return current


def assert_learner(model, expected, atol=1e-10):
    for name, value in expected.items():
        torch.testing.assert_close(model.prediction.learners[name][0], value, atol=atol, rtol=0)


@pytest.mark.parametrize("classes", [2, 4])
def test_fedavg_is_a_loop_over_clients(rng, classes):
    data = federation(rng, classes=classes)
    model = train(
        data, "fedavg", rounds=2, lr=0.3, batch_size=8, local_epochs=2, momentum=0.5, **SAME
    )
    assert_learner(model, looped(data, 2, lr=0.3, batch_size=8, epochs=2, momentum=0.5))


def test_fedprox_is_a_loop_over_clients(rng):
    data = federation(rng)
    options = {"rounds": 2, "lr": 0.3, "batch_size": 8, "local_epochs": 3}
    model = train(data, "fedprox", proximal=0.8, **options, **SAME)
    expected = looped(data, 2, lr=0.3, batch_size=8, epochs=3, proximal=0.8)
    assert_learner(model, expected)
    free = train(data, "fedavg", **options, **SAME)
    assert (
        float((free.prediction.learners["0.weight"][0] - expected["0.weight"]).abs().max()) > 1e-3
    )


def test_fedprox_without_penalty_is_fedavg_to_the_bit(rng):
    data = federation(rng)
    options = {"rounds": 4, "batch_size": 8, "local_epochs": 2}
    prox = train(data, "fedprox", proximal=0.0, **options, **SAME)
    average = train(data, "fedavg", **options, **SAME)
    for name, value in average.prediction.learners.items():
        assert torch.equal(prox.prediction.learners[name], value)


def test_a_strong_penalty_holds_clients_to_the_global_learner(rng):
    data = federation(rng)
    start = start_of(data)
    model = train(data, "fedprox", proximal=1e4, lr=1e-5, rounds=1, batch_size=4, **SAME)
    free = train(data, "fedavg", lr=1e-5, rounds=1, batch_size=4, **SAME)
    for name, value in start.items():
        held = (model.prediction.learners[name] - value).abs().max()
        assert held < (free.prediction.learners[name] - value).abs().max()


@pytest.mark.parametrize("solver", ["sgd", "newton"])
def test_fedem_with_one_learner_is_fedavg_to_the_bit(rng, solver):
    data = federation(rng)
    options = {"rounds": 4, "batch_size": 8, "solver": solver}
    em = train(data, "fedem", learners=1, **options, **SAME)
    average = train(data, "fedavg", **options, **SAME)
    for name, value in average.prediction.learners.items():
        assert torch.equal(em.prediction.learners[name], value)
    x = data.test.inputs.numpy()
    assert np.array_equal(em.predict_proba(x, "oslo"), average.predict_proba(x, "oslo"))
    assert np.array_equal(em.client_weights, np.ones((4, 1, 1)))


def test_fedavg_of_one_client_with_one_batch_is_gradient_descent(rng):
    x = rng.normal(size=(50, 3))
    y = (x[:, 0] + 0.3 * rng.normal(size=50) > 0).astype(int)
    data = FederatedDataset.from_arrays(x, y, split=(1.0, 0.0, 0.0))
    model = train(data, "fedavg", rounds=20, lr=0.7, batch_size=1000, **SAME)
    start = start_of(data)
    weight, bias = start["0.weight"][0].clone(), start["0.bias"][0].clone()
    rows, labels = data.train.inputs, data.train.labels
    for _ in range(20):
        weight.requires_grad_()
        bias.requires_grad_()
        loss = cross_entropy(rows @ weight.T + bias, labels)
        gradients = torch.autograd.grad(loss, (weight, bias))
        with torch.no_grad():
            weight, bias = weight - 0.7 * gradients[0], bias - 0.7 * gradients[1]
    assert_learner(model, {"0.weight": weight.detach(), "0.bias": bias.detach()})


def test_clients_count_by_their_rows(rng):
    """Two clients with the same rows, one of them twice over: the average leans to it."""
    x = rng.normal(size=(20, 2))
    y = (x[:, 0] > 0).astype(int)
    big = (np.concatenate([x, x, x]), np.concatenate([y, y, y]))
    data = FederatedDataset.from_clients({"small": (x, 1 - y), "big": big}, split=(1.0, 0.0, 0.0))
    model = train(data, "fedavg", rounds=1, lr=1.0, batch_size=1000, **SAME)
    start = start_of(data)
    steps = []
    for name in ("small", "big"):
        alone = train(data.select([name]), "fedavg", rounds=1, lr=1.0, batch_size=1000, **SAME)
        steps.append(alone.prediction.learners["0.weight"] - start["0.weight"])
    expected = start["0.weight"] + 0.25 * steps[0] + 0.75 * steps[1]
    torch.testing.assert_close(model.prediction.learners["0.weight"], expected)


# ---------------------------------------------------------------------- FedAvg+


def test_fedavg_plus_is_fedavg_and_then_everyone_at_home(rng):
    data = federation(rng)
    options = {"rounds": 3, "lr": 0.3, "batch_size": 8, "momentum": 0.5}
    average = train(data, "fedavg", **options, **SAME)
    plus = train(data, "fedavg+", finetune_epochs=2, **options, **SAME)
    start = {name: value[0] for name, value in average.prediction.learners.items()}
    for c in range(len(data.names)):
        x, y = rows_of(data.train, c)
        orders = client_orders(data.train, c, SAME["seed"], 4, 2)
        module = plain_sgd(
            load_dense(module_of((3, 2)), start),
            torch.from_numpy(x),
            torch.from_numpy(y),
            [b for order in orders for b in batches_of(order, 8)],
            lr=0.3,
            momentum=0.5,
        )
        for name, value in dense_params(module).items():
            torch.testing.assert_close(plus.prediction.learners[name][c], value, atol=1e-10, rtol=0)
    # for everybody else there is the global learner
    x = data.test.inputs.numpy()
    np.testing.assert_allclose(plus.predict_proba(x), average.predict_proba(x), rtol=1e-12)


def test_without_tuning_fedavg_plus_is_fedavg(rng):
    data = federation(rng)
    average = train(data, "fedavg", rounds=3, **SAME)
    plus = train(data, "fedavg+", rounds=3, finetune_epochs=0, **SAME)
    x = data.test.inputs.numpy()
    for name in data.names:
        np.testing.assert_allclose(
            plus.predict_proba(x, name), average.predict_proba(x, name), atol=1e-15
        )


def test_before_they_tune_clients_have_the_global_learner(rng):
    """What the validation rows see while training goes on is not some old start."""
    data = federation(rng)
    method = build(TrainingOptions(algorithm="fedavg+", dtype="float64"), module_network(data))
    shared, personal = method.init(data.train)
    personal, sums = method.client_step(shared, personal, data.train, 1)
    shared, _ = method.server_step(shared, sums)
    prediction = method.prediction(shared, personal)
    for name, value in shared.learners.items():
        assert torch.equal(prediction.learners[name], value)


def module_network(data):
    from fedgmm.nets.networks import network

    return network("linear", data.input_shape, len(data.classes))
