"""The rounds of a run: steps, stopping rules, Ctrl-C and divergence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.data.federated import client_rows
from fedgmm.methods.base import DivergedError, RoundInfo
from fedgmm.methods.gmm import FederatedGMM
from fedgmm.training.loop import Participation, Run, StackedClients, has_converged, run_rounds
from oracles import assert_close

ROWS = client_rows([np.zeros((2, 1))], np.array([0, 1]), ["a", "b"])


class Scripted:
    """A method whose log-likelihoods are written down beforehand; its state counts the rounds."""

    def __init__(self, log_likelihoods, fails_in=None, error=KeyboardInterrupt):
        self.log_likelihoods, self.fails_in, self.error = log_likelihoods, fails_in, error

    def client_step(self, shared, personal, rows, round_number=1):
        if self.fails_in == ("client", shared + 1):
            raise self.error
        return personal + 10, rows

    def server_step(self, shared, update, round_number=1):
        if self.fails_in == ("server", shared + 1):
            raise self.error
        return shared + 1, RoundInfo(self.log_likelihoods[shared])


def run(method, **options):
    options = {"last_round": 5, "tol": 0.5, **options}
    return run_rounds(method, Run(0, 0), StackedClients(ROWS), **options)


def test_it_stops_when_the_log_likelihood_settles():
    outcome = run(Scripted([0.0, 1.0, 2.0, 2.4, 9.0]))
    assert outcome.converged
    assert not outcome.interrupted
    assert [info.log_likelihood for info in outcome.history] == [0.0, 1.0, 2.0, 2.4]
    assert (outcome.shared, outcome.personal) == (4, 40)


@pytest.mark.parametrize(
    ("gains", "ended"),
    [
        ([1.0, 0.1, 0.2, 0.1], 5),  # three rounds under 0.5, the last not larger
        ([1.0, 0.1, 0.1], None),
        ([1.0, 0.1, 0.1, 0.3, 0.4], None),  # it leaves a plateau
        ([1.0, 0.1, 0.2, 0.3, 0.4, 0.4], 7),
    ],
)
def test_several_rounds_that_stand_still(gains, ended):
    values = [0.0, *np.cumsum(gains)]
    outcome = run(Scripted(values), last_round=len(values), still_rounds=3)
    assert outcome.converged == (ended is not None)
    assert len(outcome.history) == (ended or len(values))


def test_a_fall_is_no_convergence():
    assert not run(Scripted([0.0, 5.0, 4.0, 3.0, 2.0])).converged


def test_it_stops_after_the_last_round():
    outcome = run(Scripted(range(5)), last_round=3)
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
        last_round=3,
        on_round=[
            lambda n, info: seen.append((n, info.log_likelihood)),
            lambda n, _: seen.append(n),
        ],
    )
    assert seen == [(1, 3.0), 1, (2, 5.0), 2, (3, 7.0), 3]


# ---------------------------------------------------------------------- who takes part

NAMES = tuple(f"c{k}" for k in range(20))


def test_everybody_takes_part_unless_told_otherwise():
    assert Participation().clients(NAMES, 1) is None


def test_a_fraction_is_drawn_anew_every_round_and_by_name():
    part = Participation(0.3, seed=1)
    rounds = [part.clients(NAMES, number).tolist() for number in range(1, 200)]
    assert all(len(codes) == 6 and codes == sorted(set(codes)) for codes in rounds)
    assert len({tuple(codes) for codes in rounds}) > 150
    turns = np.bincount(np.concatenate(rounds), minlength=20) / 199
    assert (np.abs(turns - 0.3) < 0.15).all()  # nobody is left out
    # The draw belongs to the name: another order asks the same clients.
    back = part.clients(NAMES[::-1], 7).tolist()
    assert {NAMES[::-1][code] for code in back} == {NAMES[code] for code in rounds[6]}
    assert Participation(0.3, seed=2).clients(NAMES, 1).tolist() != rounds[0]
    assert len(Participation(1e-9).clients(NAMES, 1)) == 1


def test_only_those_who_answer_count():
    part = Participation(answers=lambda number, name: name in ("c3", "c5") and number > 1)
    assert part.clients(NAMES, 1).tolist() == []
    assert part.clients(NAMES, 2).tolist() == [3, 5]


class Counting:
    """Clients count their own rounds; the server notes the names of those that replied."""

    def client_step(self, shared, personal, rows, round_number=1):
        return personal + 1, rows.names

    def server_step(self, shared, update, round_number=1):
        return f"{shared} {''.join(update)}", RoundInfo(float(len(shared)))


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_clients_that_do_not_answer_keep_what_they_have(as_dictionary):
    personal = torch.zeros(2)
    start = {"weights": personal} if as_dictionary else personal

    class Method(Counting):
        def client_step(self, shared, personal, rows, round_number=1):
            if as_dictionary:
                return {"weights": personal["weights"] + 1}, rows.names
            return super().client_step(shared, personal, rows)

    # In rounds 1 to 4: both, only a, nobody, only b.
    there = {1: "ab", 2: "a", 3: "", 4: "b"}
    seen = []
    part = Participation(answers=lambda number, name: name in there[number])
    outcome = run_rounds(
        Method(),
        Run("start", start),
        StackedClients(ROWS, part),
        last_round=4,
        tol=None,
        on_round=[lambda number, _: seen.append(number)],
    )
    assert outcome.shared == "start ab a b"
    assert seen == [1, 2, 4]  # a round that nobody answers is lost, and the model stays
    own = outcome.personal["weights"] if as_dictionary else outcome.personal
    assert own.tolist() == [2.0, 2.0]
    assert personal.tolist() == [0.0, 0.0]  # the start is not written over


def test_another_stopping_rule_and_a_later_first_round():
    seen = []
    outcome = run_rounds(
        Scripted(range(5)),
        Run(0, 0, round=10),
        StackedClients(ROWS),
        last_round=15,
        tol=None,
        on_round=[lambda number, _: seen.append(number)],
        stop=lambda so_far: so_far.round == 13 and len(so_far.history) == 3,
    )
    assert seen == [11, 12, 13]
    assert outcome.converged


def test_divergence_keeps_the_last_finished_round_and_names_the_client():
    outcome = run(Scripted(range(5), fails_in=("client", 3), error=DivergedError("oslo")))
    assert (outcome.shared, len(outcome.history)) == (2, 2)
    assert "round 3" in outcome.diverged
    assert "'oslo'" in outcome.diverged


def test_exact_sums_over_those_who_answer():
    # A round with some clients is a round of the federation that has only these clients.
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    codes = np.arange(60) % 3
    rows = client_rows([X], codes, ["a", "b", "c"])
    method = FederatedGMM(2)
    shared = method.start(rows, "random", 0)
    options = {"last_round": 3, "tol": None}
    without_b = StackedClients(rows, Participation(answers=lambda _, name: name != "b"))
    part = run_rounds(method, Run(shared, shared.weights.expand(3, -1)), without_b, **options)
    few = client_rows([X[codes != 1]], codes[codes != 1] // 2, ["a", "c"])
    start = Run(shared, shared.weights.expand(2, -1))
    alone = run_rounds(method, start, StackedClients(few), **options)
    assert_close(part.shared.gaussians.means, alone.shared.gaussians.means, 1e-12)
    assert_close(part.shared.gaussians.covariances, alone.shared.gaussians.covariances, 1e-12)
    assert_close(part.personal[[0, 2]], alone.personal, 1e-12)
    assert_close(part.personal[1], shared.weights, 0)


def test_numbers_too_large_to_show_a_change_do_not_count_as_converged():
    steady = [RoundInfo(-5.0), RoundInfo(-5.0)]
    assert has_converged(steady, 1e-6)
    assert not has_converged([RoundInfo(-1e27), RoundInfo(-1e27)], 1e-6)
    assert not has_converged(steady[:1], 1e-6)
