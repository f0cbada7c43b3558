from __future__ import annotations

import numpy as np
import pytest

from fedgmm.algorithms.base import RoundInfo
from fedgmm.data.federated import client_rows
from fedgmm.federation.loop import run_rounds

ROWS = client_rows([np.zeros((2, 1))], np.array([0, 1]), ["a", "b"])


class Scripted:
    """A method whose log-likelihoods are written down beforehand; its state counts the rounds."""

    def __init__(self, log_likelihoods, fails_in=None, error=KeyboardInterrupt):
        self.log_likelihoods, self.fails_in, self.error = log_likelihoods, fails_in, error

    def client_step(self, shared, personal, rows, round_number=1):
        if self.fails_in == ("client", shared + 1):
            raise self.error
        return personal + 10, rows

    def server_step(self, shared, update):
        if self.fails_in == ("server", shared + 1):
            raise self.error
        return shared + 1, RoundInfo(self.log_likelihoods[shared])


def run(method, **options):
    options = {"max_rounds": 5, "tol": 0.5, **options}
    return run_rounds(method, 0, 0, ROWS, **options)


def test_it_stops_when_the_log_likelihood_settles():
    outcome = run(Scripted([0.0, 1.0, 2.0, 2.4, 9.0]))
    assert outcome.converged
    assert not outcome.interrupted
    assert [info.log_likelihood for info in outcome.history] == [0.0, 1.0, 2.0, 2.4]
    assert (outcome.shared, outcome.personal) == (4, 40)


def test_a_fall_is_no_convergence():
    assert not run(Scripted([0.0, 5.0, 4.0, 3.0, 2.0])).converged


def test_it_stops_after_max_rounds():
    outcome = run(Scripted(range(5)), max_rounds=3)
    assert not outcome.converged
    assert outcome.shared == len(outcome.history) == 3


def test_zero_tolerance_runs_all_rounds_even_if_nothing_moves():
    outcome = run(Scripted([1.0] * 5), tol=0.0)
    assert len(outcome.history) == 5
    assert not outcome.converged


@pytest.mark.parametrize("where", ["client", "server"])
def test_ctrl_c_keeps_the_last_finished_round(where):
    outcome = run(Scripted(range(5), fails_in=(where, 3)))
    assert outcome.interrupted
    assert (outcome.shared, outcome.personal, len(outcome.history)) == (2, 20, 2)


def test_ctrl_c_in_the_first_round_keeps_the_start():
    outcome = run(Scripted(range(5), fails_in=("client", 1)))
    assert outcome.interrupted
    assert (outcome.shared, outcome.personal, outcome.history) == (0, 0, [])


def test_ctrl_c_in_a_callback_keeps_the_round_just_finished():
    def stop(number, info):
        if number == 2:
            raise KeyboardInterrupt

    outcome = run(Scripted(range(5)), on_round=[stop])
    assert outcome.interrupted
    assert (outcome.shared, len(outcome.history)) == (2, 2)


def test_other_errors_come_out():
    with pytest.raises(ZeroDivisionError):
        run(Scripted(range(5), fails_in=("server", 2), error=ZeroDivisionError))


def test_callbacks_see_every_round_in_order():
    seen = []
    run(
        Scripted([3.0, 5.0, 7.0]),
        max_rounds=3,
        on_round=[lambda n, info: seen.append((n, info.log_likelihood)), lambda n, _: seen.append(n)],
    )
    assert seen == [(1, 3.0), 1, (2, 5.0), 2, (3, 7.0), 3]
