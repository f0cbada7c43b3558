"""Which clients train side by side, and how a training that is lost is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.algorithms import local_training
from fedgmm.algorithms.base import DivergedError
from fedgmm.algorithms.local_training import LocalTraining, check_finite
from fedgmm.core.networks import network
from fedgmm.data.dataset import FederatedDataset
from supervised import federation


class OnACard:
    """Rows that say that they are on a card."""

    def __init__(self, rows):
        self.features, self.inputs = rows.features, rows.inputs
        self.device = torch.device("cuda")


def pictures(rng, clients, rows=2):
    total = clients * rows
    images = rng.integers(0, 256, size=(total, 1, 8, 8)).astype(np.uint8)
    return FederatedDataset.from_arrays(images, np.arange(total) % 2, np.arange(total) // rows)


def groups_of(net, rows, memory=2**40):
    training = LocalTraining(net, memory=memory)
    params = training.initial(2, torch.device("cpu"))
    return [group.tolist() for group in training.groups(rows, params)]


def test_the_largest_clients_come_first_and_empty_ones_not_at_all(rng):
    rows = federation(rng, sizes=(20, 50, 1, 30, 50)).validation
    counts = rows.features.rows_per_client.tolist()
    assert counts[2] == 0
    net = network("linear", (3,), 2)
    (whole,) = groups_of(net, rows)
    present = [client for client in range(5) if counts[client]]
    assert whole == sorted(present, key=lambda client: -counts[client])
    one = sum(4 * 4 * np.prod(shape) for shape in net.parameter_shapes.values()) * 2
    assert groups_of(net, rows, memory=2 * int(one)) == [whole[:2], whole[2:]]


def test_small_images_train_in_groups_of_clients_alike_on_a_card(rng, monkeypatch):
    monkeypatch.setattr(local_training, "accelerator_memory", lambda _: 2**40)
    rows = OnACard(pictures(rng, 70).train)
    assert list(map(len, groups_of(network("cnn", (1, 8, 8), 2), rows))) == [64, 6]
    for learner in ("linear", "mlp"):  # their rounds take as long as their kernels take to start
        assert len(groups_of(network(learner, (64,), 2), rows)) == 1


@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf, 1e9])
def test_a_client_with_a_lost_number_is_named(rng, lost):
    rows = federation(rng, sizes=(20, 20, 20)).train
    clients = torch.tensor([2, 0, 1])
    params = {
        "scale": torch.ones(3, 2),  # one number a learner
        "weight": torch.ones(3, 2, 4, 5),
        "nothing": torch.ones(3, 2, 0),
    }
    check_finite(params, clients, rows)
    params["weight"][1, 1, 3, 4] = lost
    with pytest.raises(DivergedError, match=str(rows.names[0])):
        check_finite(params, clients, rows)
    params["weight"][1, 1, 3, 4], params["scale"][2, 0] = 1.0, lost
    with pytest.raises(DivergedError, match=str(rows.names[1])):
        check_finite(params, clients, rows)
