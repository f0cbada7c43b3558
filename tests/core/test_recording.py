"""When work is done as it is, recorded, and replayed; the recording itself needs a card."""

import pytest
import torch

from fedgmm.core import recording
from fedgmm.core.recording import Recorder, _Recording, forget_recordings, recorder_of


class Graph:
    """Stands for CUDA's: a replay does the work on the tensors that were there when it was recorded."""

    def __init__(self, work, given, found):
        self.replay = lambda: [out.copy_(new) for out, new in zip(found, work(given), strict=True)]


@pytest.fixture
def log(monkeypatch):
    made = []

    def record(self, work, given, kept):
        own = [value.clone() for value in given]
        found = work(own)
        made.append(kept)
        return _Recording(Graph(work, own, found), own, found, kept)

    monkeypatch.setattr(Recorder, "_record", record)
    return made


def double(values):
    return [2 * value for value in values]


def test_the_second_time_is_recorded_and_every_time_is_right(log):
    recorder = Recorder()
    for number in range(4):
        (found,) = recorder.run("a", double, [torch.full((3,), float(number))], kept="kept")
        assert found.tolist() == [2.0 * number] * 3
        assert log == (["kept"] if number else [])


def test_other_keys_shapes_and_dtypes_are_other_work(log):
    recorder = Recorder()
    for key, value in (
        ("a", torch.ones(3)),
        ("b", torch.ones(3)),
        ("a", torch.ones(4)),
        ("a", torch.ones(3).double()),
    ):
        recorder.run(key, double, [value], kept=None)
    assert log == []
    recorder.run("a", double, [torch.ones(4)], kept=None)
    assert len(log) == 1


def test_recordings_are_bounded(log, monkeypatch):
    monkeypatch.setattr(recording, "_MOST_RECORDINGS", 2)
    recorder = Recorder()
    for _ in range(3):
        for key in range(5):
            (found,) = recorder.run(key, double, [torch.ones(1) * key], kept=None)
            assert found.item() == 2.0 * key
    assert len(log) == 2


def test_a_network_has_one_recorder_and_takes_it_along():
    class Network:
        pass

    first, second = Network(), Network()
    assert recorder_of(first) is recorder_of(first)
    assert recorder_of(first) is not recorder_of(second)
    before = len(recording._RECORDERS)
    del first
    assert len(recording._RECORDERS) == before - 1


def test_recordings_can_go_before_their_network():
    class Network:
        pass

    network = Network()
    before = recorder_of(network)
    forget_recordings(network)
    forget_recordings(network)  # nothing is left to forget
    assert recorder_of(network) is not before
