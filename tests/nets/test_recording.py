"""When work is run, recorded and replayed; CUDA's recording itself is replaced by a fake."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedgmm.core.params import expand_clients
from fedgmm.nets import sgd
from fedgmm.nets.kernels import recording
from fedgmm.nets.kernels.recording import Recorder, _Recording, forget_recordings, recorder_of
from fedgmm.nets.networks import Dense
from fedgmm.nets.sgd import SGD, TrainingRows, plan_batches, train_local, train_moreau
from small_learners import SIZES, drawn, rows, shuffles


class Graph:
    """A fake CUDA graph: a replay runs the work on the tensors of the recording."""

    def __init__(self, work, inputs, outputs):
        self.replay = lambda: [
            out.copy_(new) for out, new in zip(outputs, work(inputs), strict=True)
        ]


class NoWaiting(TorchDispatchMode):
    """Forbid reading a tensor's value, as CUDA does while it records."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def log(monkeypatch):
    made = []

    def record(self, work, inputs, keep_alive):
        own = [value.clone() for value in inputs]
        with NoWaiting():
            outputs = work(own)
        made.append(keep_alive)
        return _Recording(Graph(work, own, outputs), own, outputs, keep_alive)

    monkeypatch.setattr(Recorder, "_record", record)
    monkeypatch.setattr(recording, "_RECORDERS", WeakKeyDictionary())  # equal networks share one
    return made


def double(values):
    return [2 * value for value in values]


def test_the_second_run_is_recorded_and_all_results_are_right(log):
    recorder = Recorder()
    for number in range(4):
        (found,) = recorder.run("a", double, [torch.full((3,), float(number))], keep_alive="kept")
        assert found.tolist() == [2.0 * number] * 3
        assert log == (["kept"] if number else [])


def test_other_keys_shapes_and_dtypes_are_other_recordings(log):
    recorder = Recorder()
    for key, value in (
        ("a", torch.ones(3)),
        ("b", torch.ones(3)),
        ("a", torch.ones(4)),
        ("a", torch.ones(3).double()),
    ):
        recorder.run(key, double, [value], keep_alive=None)
    assert log == []
    recorder.run("a", double, [torch.ones(4)], keep_alive=None)
    assert len(log) == 1


def test_recordings_are_bounded(log, monkeypatch):
    monkeypatch.setattr(recording, "_MAX_RECORDINGS", 2)
    recorder = Recorder()
    for _ in range(3):
        for key in range(5):
            (found,) = recorder.run(key, double, [torch.ones(1) * key], keep_alive=None)
            assert found.item() == 2.0 * key
    assert len(log) == 2


def test_a_recorder_is_freed_with_its_network():
    class Network:
        pass

    first, second = Network(), Network()
    assert recorder_of(first) is recorder_of(first)
    assert recorder_of(first) is not recorder_of(second)
    before = len(recording._RECORDERS)
    del first
    assert len(recording._RECORDERS) == before - 1


def test_recordings_can_be_freed_before_their_network():
    class Network:
        pass

    network = Network()
    before = recorder_of(network)
    forget_recordings(network)
    forget_recordings(network)  # a second call has no effect
    assert recorder_of(network) is not before


# ---------------------------------------------------------------------- rounds of training


def local_rounds(net, rng, **options):
    """Return a function of the learning rate that trains from the same start with the same batches."""
    x, y, w, offsets = rows(rng)
    plan = plan_batches(offsets, torch.arange(4), shuffles(rng, SIZES, 2), 4)
    start = expand_clients(drawn(net, 2), 4)
    anchor = {name: value + 0.1 for name, value in start.items()}
    common = SGD(batch_size=4, **options)
    own = TrainingRows(x, y, w)
    return lambda rate: [train_local(net, start, own, plan, replace(common, lr=rate), anchor)]


def moreau_rounds(net, rng, **options):
    """Do the same for pFedMe, whose inner problem has another rate."""
    x, y, _, offsets = rows(rng)
    plan = plan_batches(offsets, torch.arange(4), shuffles(rng, SIZES, 1), 4)
    start = expand_clients(drawn(net, 1), 4)
    common = SGD(**options)
    return lambda rate: train_moreau(
        net, start, TrainingRows(x, y), plan, replace(common, lr=rate), 2.0, 3, rate / 2
    )


@pytest.mark.parametrize(
    "rounds",
    [
        local_rounds,
        lambda net, rng: local_rounds(net, rng, momentum=0.9),
        lambda net, rng: local_rounds(net, rng, proximal=0.5, weight_decay=0.1, momentum=0.5),
        lambda net, rng: local_rounds(net, rng, clip_norm=0.1),
        moreau_rounds,
        lambda net, rng: moreau_rounds(net, rng, clip_norm=0.1),
    ],
)
def test_one_recording_works_for_every_rate(log, rng, monkeypatch, rounds):
    net = Dense(3, 2, (4,))
    train = rounds(net, rng)
    rates = (0.3, 0.3, 0.2, 0.1, 0.05)
    expected = [train(rate) for rate in rates]
    monkeypatch.setattr(sgd, "_is_recorded", lambda *_: True)  # as on a GPU
    for rate, plain in zip(rates, expected, strict=True):
        for found, wanted in zip(train(rate), plain, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert len(log) == 1


@pytest.mark.parametrize(
    ("rounds", "change"),
    [
        (local_rounds, {"momentum": 0.5}),
        (local_rounds, {"weight_decay": 0.1}),
        (local_rounds, {"proximal": 0.5}),
        (local_rounds, {"clip_norm": 0.01}),
        (moreau_rounds, {"clip_norm": 0.01}),
    ],
)
def test_other_options_are_other_recordings(log, rng, monkeypatch, rounds, change):
    net, seed = Dense(3, 2, (4,)), rng.integers(1000)
    plain, other = (rounds(net, np.random.default_rng(seed), **o) for o in ({}, change))
    expected = other(0.3)
    monkeypatch.setattr(sgd, "_is_recorded", lambda *_: True)
    for _ in range(3):
        plain(0.3)
        for found, wanted in zip(other(0.3), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert len(log) == 2
