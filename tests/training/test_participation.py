"""Who takes part: the aggregate is over those that answered, the others keep what they have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedgmm.methods.base import DivergedError
from fedgmm.methods.fedgmm import FedGMM
from fedgmm.methods.gmm import FederatedGMM
from fedgmm.methods.local_training import LocalTraining
from fedgmm.nets.networks import Dense
from fedgmm.nets.sgd import SGD
from fedgmm.training.in_process import train
from fedgmm.training.loop import Participation, Run, StackedClients, run_rounds
from fedgmm.training.options import ALGORITHMS
from supervised import federation

NAMES = tuple(f"c{i}" for i in range(10))


# ---------------------------------------------------------------------- the draw


def test_everybody_by_default():
    assert Participation().clients(NAMES, 1) is None


@pytest.mark.parametrize(("fraction", "asked"), [(0.3, 3), (0.25, 2), (0.01, 1), (0.99, 10)])
def test_a_fraction_of_the_clients(fraction, asked):
    for number in range(1, 20):
        codes = Participation(fraction).clients(NAMES, number)
        assert len(codes) == asked
        assert (np.diff(codes) > 0).all()


def test_everybody_comes_up_equally_often():
    seen = np.zeros(10)
    for number in range(1, 1001):
        seen[Participation(0.3, seed=5).clients(NAMES, number)] += 1
    assert np.abs(seen / 1000 - 0.3).max() < 0.05


def test_the_draw_belongs_to_seed_round_and_name():
    first = Participation(0.3, seed=1)
    draws = [tuple(first.clients(NAMES, n).tolist()) for n in range(1, 30)]
    assert draws == [tuple(first.clients(NAMES, n).tolist()) for n in range(1, 30)]
    assert len(set(draws)) > 10
    others = [tuple(Participation(0.3, seed=2).clients(NAMES, n).tolist()) for n in range(1, 30)]
    assert draws != others
    turned = NAMES[::-1]
    for n, draw in enumerate(draws, start=1):
        assert {turned[c] for c in first.clients(turned, n)} == {NAMES[c] for c in draw}


def test_those_who_do_not_answer_are_left_out():
    part = Participation(answers=lambda number, name: name != "c3" and number < 5)
    assert part.clients(NAMES, 1).tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert len(part.clients(NAMES, 5)) == 0
    asked = []
    Participation(0.3, answers=lambda _, name: asked.append(name) or True).clients(NAMES, 1)
    assert len(asked) == 3  # only who was asked can answer


# ---------------------------------------------------------------------- what a round makes of it


def method(**changes):
    training = LocalTraining(
        Dense(3, 2), SGD(lr=0.2, batch_size=8, epochs=2), seed=4, dtype=torch.float64
    )
    return FedGMM(training, 2, FederatedGMM(2, reg_covar=1e-3), **changes)


def rounds(method, state, rows, part=None, *, tol=None, **options):
    """Run rounds with the clients that take part."""
    clients = StackedClients(rows, part or Participation())
    return run_rounds(method, state, clients, tol=tol, **options)


def assert_same_state(actual, expected):
    for name, value in expected.learners.items():
        assert torch.equal(actual.learners[name], value)
    for part in ("means", "covariances"):
        assert torch.equal(
            getattr(actual.mixture.gaussians, part), getattr(expected.mixture.gaussians, part)
        )
    assert torch.equal(actual.mixture.weights, expected.mixture.weights)


@pytest.mark.parametrize("solver", ["sgd", "newton"])
@pytest.mark.parametrize("who", [{"oslo", "kiev"}, {"bonn"}])
def test_the_aggregate_is_over_those_that_answered(rng, solver, who):
    """The round is the one that these clients would have had among themselves."""
    data = federation(rng, sizes=(20, 40, 17, 26))
    algorithm = method(solver=solver)
    shared, personal = algorithm.init(data.train)
    # clients differ before the round
    warm = rounds(algorithm, Run(shared, personal), data.train, last_round=2)

    part = Participation(answers=lambda _, name: name in who)
    state = Run(warm.shared, warm.personal, round=2)
    run = rounds(algorithm, state, data.train, part, last_round=3)

    few = data.select(sorted(who))
    codes = [data.names.index(name) for name in few.names]
    state = Run(warm.shared, warm.personal[codes], round=2)
    alone = rounds(algorithm, state, few.train, last_round=3)
    assert_same_state(run.shared, alone.shared)
    assert torch.equal(run.personal[codes], alone.personal)
    others = [c for c in range(4) if c not in codes]
    assert torch.equal(run.personal[others], warm.personal[others])
    assert not torch.equal(run.personal[codes], warm.personal[codes])


def test_a_round_in_which_nobody_answers_is_lost(rng):
    data = federation(rng)
    algorithm = method()
    shared, personal = algorithm.init(data.train)
    seen = []
    run = rounds(
        algorithm,
        Run(shared, personal),
        data.train,
        Participation(answers=lambda number, _: number != 2),
        last_round=3,
        on_round=[lambda number, _: seen.append(number)],
    )
    assert seen == [1, 3]
    assert len(run.history) == 2
    after_one = rounds(algorithm, Run(shared, personal), data.train, last_round=1)
    state = Run(after_one.shared, after_one.personal, round=2)
    after_three = rounds(algorithm, state, data.train, last_round=3)
    assert_same_state(run.shared, after_three.shared)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_without_any_answer_is_the_start(rng, algorithm):
    data = federation(rng)
    model = train(data, algorithm, rounds=2, answers=lambda *_: False, finetune_epochs=0)
    assert model.history == []
    assert np.isfinite(model.predict_proba(data.test.inputs.numpy(), "oslo")).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_method_survives_clients_that_come_and_go(rng, algorithm):
    data = federation(rng, sizes=(20, 40, 17, 26, 30))
    model = train(
        data,
        algorithm,
        rounds=8,
        participation=0.6,
        tol=None,
        answers=lambda number, name: (number + len(name) + ord(name[0])) % 3 > 0,
    )
    assert 1 <= len(model.history) <= 8
    for name in data.names:
        assert np.isfinite(model.predict_proba(data.test.inputs.numpy(), name)).all()


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "clustered", "pfedme", "fedavg+"])
def test_if_only_some_ever_answer_the_global_learner_is_theirs(rng, algorithm):
    data = federation(rng, sizes=(20, 40, 17, 26, 30))
    who = ["oslo", "riga"]
    options = {"rounds": 4, "dtype": "float64", "standardise": False, "batch_size": 8, "tol": None}
    some = train(data, algorithm, answers=lambda _, name: name in who, **options)
    alone = train(data.select(who), algorithm, **options)
    x = data.test.inputs.numpy()
    assert np.array_equal(some.predict_proba(x), alone.predict_proba(x))
    if algorithm == "pfedme":
        assert np.array_equal(some.predict_proba(x, "oslo"), alone.predict_proba(x, "oslo"))


# ---------------------------------------------------------------------- the end of a run


class Counter:
    """A method that counts; it can fail in a round of choice."""

    def __init__(self, bad=None, error=None):
        self.bad, self.error = bad, error

    def client_step(self, shared, personal, rows, round_number=1):
        if round_number == self.bad:
            raise self.error
        return personal + 1, None

    def server_step(self, shared, update, round_number=1):
        from fedgmm.methods.base import RoundInfo

        return shared + 1, RoundInfo(-1.0 / (shared + 1))


@pytest.mark.parametrize(
    ("error", "field"),
    [(KeyboardInterrupt(), "interrupted"), (DivergedError("oslo"), "diverged")],
)
def test_the_last_good_round_is_kept(rng, error, field):
    data = federation(rng)
    run = rounds(Counter(3, error), Run(0, torch.zeros(4)), data.train, last_round=9)
    assert run.shared == 2
    assert run.personal.tolist() == [2.0] * 4
    assert len(run.history) == 2
    assert getattr(run, field)
    if field == "diverged":
        assert run.diverged == "round 3: training diverged on client 'oslo'"


def test_other_errors_are_not_hidden(rng):
    with pytest.raises(ZeroDivisionError):
        rounds(
            Counter(2, ZeroDivisionError()),
            Run(0, torch.zeros(4)),
            federation(rng).train,
            last_round=9,
        )


def test_it_stops_when_the_likelihood_settles(rng):
    state = Run(0, torch.zeros(4))
    run = rounds(Counter(), state, federation(rng).train, last_round=99, tol=0.01)
    # 1/n - 1/(n+1) < 0.01 first at n = 10
    assert len(run.history) == 11
    assert run.converged


def test_a_rule_of_ones_own_ends_the_run(rng):
    run = rounds(
        Counter(),
        Run(0, torch.zeros(4)),
        federation(rng).train,
        last_round=99,
        stop=lambda run: run.shared == 5,
    )
    assert len(run.history) == 5
