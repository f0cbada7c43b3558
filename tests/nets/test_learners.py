"""Learners: likelihoods, and parameters as vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedgmm.core.params import add_params, expand_clients, flatten, take_clients, weighted_sum
from fedgmm.nets.learners import log_likelihoods
from fedgmm.nets.networks import Dense
from small_learners import drawn

# ---------------------------------------------------------------------- likelihoods


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("clients", [(), (3,)])
def test_log_likelihoods_are_minus_the_cross_entropy(rng, classes, clients):
    net = Dense(4, classes)
    count = 3 if clients else 1
    params = {
        name: value.reshape(*clients, 2, *value.shape[1:])
        for name, value in drawn(net, 2 * count).items()
    }
    x = torch.from_numpy(rng.normal(size=(*clients, 11, 4)))
    y = torch.from_numpy(rng.integers(classes, size=(*clients, 11)))

    actual = log_likelihoods(net, params, x, y)

    logits = net.logits(params, x)
    for m in range(2):
        expected = -cross_entropy(
            logits[..., m, :].reshape(-1, classes), y.reshape(-1), reduction="none"
        )
        torch.testing.assert_close(actual[..., m].reshape(-1), expected, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("classes", [2, 3])
def test_steep_learners_keep_their_log_likelihood(classes):
    net = Dense(1, classes)
    params = {"0.weight": torch.zeros(1, classes, 1), "0.bias": torch.zeros(1, classes)}
    params["0.weight"][0, 1] = 1e4
    x = torch.tensor([[3.0], [-3.0]])
    actual = log_likelihoods(net, params, x, torch.tensor([0, 1]))
    np.testing.assert_allclose(actual[:, 0], [-3e4, -3e4], rtol=1e-4)  # not -inf, not zero


# ---------------------------------------------------------------------- parameters


def test_sums_and_vectors_of_parameters_with_a_single_number(rng):
    params = {
        "scale": torch.from_numpy(rng.normal(size=(3, 2))),
        "weight": torch.from_numpy(rng.normal(size=(3, 2, 4, 5))),
    }
    w = torch.from_numpy(rng.random((3, 2)))
    total = weighted_sum(params, w)
    for name, value in params.items():
        expected = sum(w[c].reshape(-1, *[1] * (value.dim() - 2)) * value[c] for c in range(3))
        torch.testing.assert_close(total[name], expected)
    assert flatten(params).shape == (3, 2, 21)
    assert torch.equal(
        flatten(params)[1, 1],
        torch.cat([params["scale"][1, 1, None], params["weight"][1, 1].flatten()]),
    )


def test_expanded_copies_do_not_share_memory():
    params = expand_clients({"a": torch.zeros(2, 3)}, 4)
    params["a"][1, 0, 0] = 1.0
    assert float(params["a"].sum()) == 1.0


def test_adding_and_taking(rng):
    params = {"a": torch.from_numpy(rng.normal(size=(4, 2)))}
    halves = [take_clients(params, slice(0, 2)), take_clients(params, torch.tensor([2, 3]))]
    torch.testing.assert_close(add_params(halves)["a"], params["a"][:2] + params["a"][2:])
