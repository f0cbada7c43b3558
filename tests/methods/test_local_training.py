"""Which clients train side by side, and how diverged training is noticed."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods import local_training
from fedgmm.methods.base import DivergedError
from fedgmm.methods.local_training import LocalTraining, check_finite
from fedgmm.nets import devices
from fedgmm.nets.kernels.recording import recorder_of
from fedgmm.nets.networks import network
from fedgmm.nets.sgd import SGD
from fedgmm.training.in_process import train
from supervised import federation


class OnAGPU:
    """Rows that say that they are on a GPU."""

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


def test_small_images_train_in_groups_of_clients_alike_on_a_gpu(rng, monkeypatch):
    monkeypatch.setattr(local_training, "accelerator_memory", lambda _: 2**40)
    rows = OnAGPU(pictures(rng, 70).train)
    assert list(map(len, groups_of(network("cnn", (1, 8, 8), 2), rows))) == [64, 6]
    for learner in ("linear", "mlp"):  # their rounds take as long as their kernels take to start
        assert len(groups_of(network(learner, (64,), 2), rows)) == 1


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with memory for all."""
    monkeypatch.setattr(devices, "_total_memory", lambda _: 2**44)
    monkeypatch.setattr(devices, "_smaller_shares", {})


def room_for(most):
    """Return a visitor of groups with room for so many clients, and the sizes that it saw."""
    tried = []

    def visit(results, clients):
        tried.append(len(clients))
        if len(clients) > most:
            raise torch.cuda.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 520.00 MiB. GPU 0 has a total capacity of much more."
            )
        results.append((clients.tolist(), torch.rand(1).item()))

    return visit, tried


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("most", [1, 3, 10])
def test_on_a_full_gpu_groups_are_smaller_from_then_on(rng, most):
    rows = OnAGPU(pictures(rng, 10).train)
    training = LocalTraining(network("cnn", (1, 8, 8), 2))
    params = training.initial(2, torch.device("cpu"))
    before = recorder_of(training.net)
    visit, tried = room_for(most)
    warning = r"memory of cuda ran out \(.*520.00 MiB\).*at most \d clients? at a time"
    with nullcontext() if most == 10 else pytest.warns(UserWarning, match=warning):
        found = training.over_groups(rows, params, 1, visit)
    assert sorted(client for group, _ in found for client in group) == list(range(10))
    assert max(len(group) for group, _ in found) <= most
    assert tried[0] == 10
    # what recordings hold is given back, but only where memory ran out
    assert (recorder_of(training.net) is before) == (most == 10)
    tried.clear()
    assert training.over_groups(rows, params, 1, visit) == found  # dropout draws the same again
    assert max(tried) <= most


@pytest.mark.usefixtures("gpu")
def test_another_run_has_the_whole_share_again(rng):
    gpu = torch.device("cuda")
    whole = devices.accelerator_memory(gpu)
    devices.use_less_memory(gpu)
    assert devices.accelerator_memory(gpu) == whole // 2
    train(federation(rng, sizes=(20, 20)), "fedavg", rounds=1)
    assert devices.accelerator_memory(gpu) == whole


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:The memory of cuda ran out")
def test_a_gpu_without_room_for_one_client_says_what_to_do(rng):
    rows = OnAGPU(pictures(rng, 4).train)
    training = LocalTraining(network("cnn", (1, 8, 8), 2))
    visit, tried = room_for(0)
    with pytest.raises(
        torch.cuda.OutOfMemoryError,
        match=r"cuda.*\(CUDA out.*520.00 MiB\).*batch_size",
    ):
        training.over_groups(rows, training.initial(1, torch.device("cpu")), 1, visit)
    assert (tried[0], tried[-1]) == (4, 1)
    assert tried == sorted(tried, reverse=True)


def test_steps_of_small_networks_alone_stay_in_the_cache(rng, monkeypatch):
    monkeypatch.setattr(local_training, "_STEP_NUMBERS", 2 * 128 * 64)
    rows = pictures(rng, 5).train
    for learner in ("linear", "mlp"):
        assert list(map(len, groups_of(network(learner, (1, 8, 8), 2), rows))) == [2, 2, 1]
    assert len(groups_of(network("cnn", (1, 8, 8), 2), rows)) == 1


@pytest.mark.parametrize(
    ("learner", "rows_of_steps", "rows_on_a_gpu"),
    [("mobilenet", [1, 2], [8, 8]), ("cnn", [2, 1], [2, 1]), ("mlp", [2, 1], [2, 1])],
)
def test_batches_are_even_where_their_own_statistics_matter(
    rng, learner, rows_of_steps, rows_on_a_gpu
):
    rows = pictures(rng, 1, rows=5).train
    assert len(rows.inputs) == 3
    training = LocalTraining(network(learner, (3, 8, 8), 2), SGD(batch_size=2))
    for own, expected in ((rows, rows_of_steps), (OnAGPU(rows), rows_on_a_gpu)):
        plan = training.plan(own, torch.tensor([0]), [torch.arange(3)], training.sgd)
        assert [step.rows.shape[1] for step in plan.steps] == expected


@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf, 1e9])
def test_a_client_with_a_lost_number_is_named(rng, lost):
    rows = federation(rng, sizes=(20, 20, 20)).train
    clients = torch.tensor([2, 0, 1])
    params = {
        "scale": torch.ones(3, 2),  # one number per learner
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
