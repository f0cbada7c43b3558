"""Which clients train side by side, and how a training that is lost is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.algorithms import local_training
from fedgmm.algorithms.base import DivergedError
from fedgmm.algorithms.local_training import LocalTraining, check_finite
from fedgmm.core.networks import network
from fedgmm.core.sgd import SGD
from fedgmm.data.dataset import FederatedDataset
from supervised import federation


class OnACard:
    """Rows that say that they are on a card."""

    def __init__(self, rows):
        self.features, self.inputs, self.offsets = rows.features, rows.inputs, rows.offsets
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


def test_steps_of_small_networks_alone_stay_in_the_cache(rng, monkeypatch):
    monkeypatch.setattr(local_training, "_STEP_NUMBERS", 2 * 128 * 64)
    rows = pictures(rng, 5).train
    for learner in ("linear", "mlp"):
        assert list(map(len, groups_of(network(learner, (1, 8, 8), 2), rows))) == [2, 2, 1]
    assert len(groups_of(network("cnn", (1, 8, 8), 2), rows)) == 1


@pytest.mark.parametrize(
    ("learner", "rows_of_steps", "rows_on_a_card"),
    [("mobilenet", [1, 2], [8, 8]), ("cnn", [2, 1], [2, 1]), ("mlp", [2, 1], [2, 1])],
)
def test_batches_are_even_where_their_own_statistics_matter(
    rng, learner, rows_of_steps, rows_on_a_card
):
    rows = pictures(rng, 1, rows=5).train
    assert len(rows.inputs) == 3
    training = LocalTraining(network(learner, (3, 8, 8), 2), SGD(batch_size=2))
    for own, expected in ((rows, rows_of_steps), (OnACard(rows), rows_on_a_card)):
        plan = training.plan(own, torch.tensor([0]), [torch.arange(3)], training.sgd)
        assert [step.rows.shape[1] for step in plan.steps] == expected


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
