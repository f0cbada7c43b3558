"""How long a node waits before it looks for the next question."""

import pytest

pytest.importorskip("flwr")

from fedgmm.federation.flower import pace


class Clock:
    """A clock that only sleeping and :meth:`pass_by` move."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def test_a_quick_server_is_asked_often(clock):
    sleeper = pace._Sleeper()
    clock.pass_by(0.01)
    sleeper.sleep(3.0)
    assert clock.slept == [pace._POLL]


def test_a_busy_server_is_left_alone_but_never_longer_than_flower_would(clock):
    sleeper = pace._Sleeper()
    for spent, expected in ((0.2, 0.8), (0.5, 2.0), (10.0, 3.0), (0.01, pace._POLL)):
        clock.pass_by(spent)
        sleeper.sleep(3.0)
        assert clock.slept[-1] == pytest.approx(expected)


def test_without_work_it_looks_less_often(clock):
    sleeper = pace._Sleeper()
    clock.pass_by(0.01)
    sleeper.sleep(0.5)
    assert clock.slept == [0.1]
    while clock.now < pace._IDLE_AFTER + 1:
        sleeper.sleep(3.0)
    sleeper.sleep(3.0)
    assert clock.slept[-1] == pace._IDLE_POLL
