"""How long a SuperNode waits before it polls again."""

import subprocess
import sys

import pytest

pytest.importorskip("flwr")

from fedgmm.federation.flower import supernode


class Clock:
    """A clock that moves only by :meth:`sleep` and :meth:`advance`."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(supernode, "time", clock)
    return clock


def test_a_fast_server_is_polled_often(clock):
    sleeper = supernode._Sleeper()
    clock.advance(0.01)
    sleeper.sleep(3.0)
    assert clock.slept == [supernode._POLL]


def test_a_busy_server_is_polled_less_often_but_as_often_as_flower_would(clock):
    sleeper = supernode._Sleeper()
    for spent, expected in ((0.2, 0.8), (0.5, 2.0), (10.0, 3.0), (0.01, supernode._POLL)):
        clock.advance(spent)
        sleeper.sleep(3.0)
        assert clock.slept[-1] == pytest.approx(expected)


def test_without_work_it_polls_less_often(clock):
    sleeper = supernode._Sleeper()
    clock.advance(0.01)
    sleeper.sleep(0.5)
    assert clock.slept == [0.1]
    while clock.now < supernode._IDLE_AFTER + 1:
        sleeper.sleep(3.0)
    sleeper.sleep(3.0)
    assert clock.slept[-1] == supernode._IDLE_POLL


ENDS_WITH_A_THREAD = """
import threading, time
import flwr.supernode.cli as cli
from fedgmm.federation.flower import supernode

def flower_supernode():
    threading.Thread(target=time.sleep, args=(300,)).start()  # like Flower's web server
    raise KeyboardInterrupt

cli.flower_supernode = flower_supernode
supernode.main()
"""


def test_the_process_ends_with_the_main_thread_and_logs_the_reason():
    with subprocess.Popen(
        [sys.executable, "-c", ENDS_WITH_A_THREAD], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.wait(120) == 1
        assert b"KeyboardInterrupt" in process.stderr.read()
