"""Local training is every client on its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.training.in_process import train
from supervised import (
    batches_of,
    client_orders,
    dense_params,
    federation,
    images,
    load_dense,
    module_of,
    plain_sgd,
    rows_of,
)

SAME = {"dtype": "float64", "standardise": False, "tol": None, "seed": 1, "lr": 0.3}


def test_every_client_trains_as_if_it_were_alone(rng):
    data = federation(rng, classes=3)
    together = train(data, "local", rounds=3, batch_size=8, local_epochs=2, **SAME)
    for c, name in enumerate(data.names):
        alone = train(data.select([name]), "local", rounds=3, batch_size=8, local_epochs=2, **SAME)
        for part, value in alone.prediction.learners.items():
            torch.testing.assert_close(
                together.prediction.learners[part][c], value[0], atol=1e-12, rtol=0
            )


def test_it_is_plain_sgd(rng):
    data = federation(rng)
    model = train(data, "local", rounds=3, batch_size=8, momentum=0.9, **SAME)
    start = train(data, "local", rounds=1, answers=lambda *_: False, **SAME)
    for c in range(len(data.names)):
        x, y = rows_of(data.train, c)
        module = load_dense(module_of((3, 2)), start.prediction.learners, c)
        for number in (1, 2, 3):  # the optimiser is fresh every round
            (order,) = client_orders(data.train, c, 1, number, 1)
            plain_sgd(
                module,
                torch.from_numpy(x),
                torch.from_numpy(y),
                batches_of(order, 8),
                lr=0.3,
                momentum=0.9,
            )
        for name, value in dense_params(module).items():
            torch.testing.assert_close(
                model.prediction.learners[name][c], value, atol=1e-10, rtol=0
            )


@pytest.mark.parametrize("learner", ["linear", "cnn"])
def test_the_log_likelihood_is_that_of_the_learners_that_entered(rng, learner):
    data = images(rng)
    first = train(data, "local", rounds=1, learner=learner, **SAME)
    both = train(data, "local", rounds=2, learner=learner, **SAME)
    rows = data.train
    total = 0.0
    for c, name in enumerate(data.names):
        x, y = rows_of(rows, c)
        total += first.log_conditional(x, y, name).sum()
    np.testing.assert_allclose(both.history[1]["log_likelihood"], total / len(rows), rtol=1e-9)


def test_there_is_nobody_to_ask_without_a_client(rng):
    data = federation(rng)
    model = train(data, "local", rounds=1)
    with pytest.raises(ValueError, match="name a client"):
        model.predict(data.test.inputs.numpy())
