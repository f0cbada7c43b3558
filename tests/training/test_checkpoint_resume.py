"""Training that goes on from a checkpoint exactly, whatever stopped it."""

from __future__ import annotations

import math
import os
import random
import sys
import time
import warnings
from functools import wraps
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load as tensors_of
from torch import nn

from fedgmm.data.dataset import FederatedDataset
from fedgmm.methods.fedgmm import FedGMM
from fedgmm.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    read_checkpoint,
    save_progress,
)
from fedgmm.training.in_process import DivergenceWarning, train
from fedgmm.training.options import ALGORITHMS
from forked import five_clients, forks, slow_training
from small_checkpoints import (
    SMALL,
    assert_same_file,
    assert_same_model,
    copies_of,
    data_set,
    facts_of,
)
from supervised import federation

VARIANTS = {
    "plain": {"rounds": 4},
    "all kinds": {
        "rounds": 6,
        "warmup": 2,
        "participation": 0.6,
        "server": "adam",
        "schedule": "cosine",
        "solver": "sgd",
        "momentum": 0.5,
        "dtype": "float64",
        "covariance_type": "tied",
    },
    "patient": {"rounds": 9, "patience": 2, "lr": 0.8, "server": "momentum", "schedule": "sqrt"},
    "settled": {"rounds": 12, "tol": 0.02, "aggregation": "paper", "covariance_type": "diag"},
}


SLOW = pytest.mark.slow

# By default, these have all variants: a method with all kinds of state, and personal learners.
WHOLE = ("fedgmm", "pfedme")


@pytest.mark.parametrize(
    ("algorithm", "variant"),
    [
        pytest.param(
            *case, marks=[pytest.mark.slow] * (case[0] not in WHOLE and case[1] != "all kinds")
        )
        for case in product(ALGORITHMS, VARIANTS)
    ],
)
def test_every_method_goes_on_from_every_round_to_the_same_bits(tmp_path, algorithm, variant):
    data, options = data_set(algorithm), {**SMALL, **VARIANTS[variant]}
    model, last, rounds, starts = copies_of(tmp_path, data, algorithm, **options)
    assert_same_model(model, train(data, algorithm, **options))  # writing changes nothing
    assert len(rounds) == len(model.history)
    assert len(starts) == (2 if "warmup" in options else 1)
    for copy in [*starts, *rounds]:
        before = facts_of(copy)["round"]
        told = []
        again = train(
            data, algorithm, checkpoint=Checkpoint(copy), on_round=[told.append], **options
        )
        assert_same_model(again, model)
        assert_same_file(copy, last)
        assert [entry["round"] for entry in told] == [
            entry["round"] for entry in model.history if entry["round"] > before
        ]


@pytest.mark.parametrize(
    ("algorithm", "variant"),
    [
        pytest.param(*case, marks=[SLOW] * (case[0] != "fedgmm" and case[1] != "all kinds"))
        for case in product(("fedgmm", "fedavg+", "clustered"), VARIANTS)
    ],
)
def test_a_training_in_several_calls_ends_as_one_in_a_single_call(tmp_path, algorithm, variant):
    data, options = data_set(algorithm), {**SMALL, **VARIANTS[variant]}
    model = train(data, algorithm, **options)
    path = Checkpoint(tmp_path / "c", every=1000)
    for until, done in ((1, 1), (2, 2), (3, 3), (3, 3), (2, 3)):
        part = train(data, algorithm, checkpoint=path, until=until, **options)
        assert len(part.history) == min(done, len(model.history))
        assert np.isfinite(part.evaluate("validation").mean_log_loss)
    assert_same_model(train(data, algorithm, checkpoint=path, **options), model)


def test_a_training_that_ends_in_its_warm_up_leaves_the_shared_learner():
    options = {**SMALL, "rounds": 6, "warmup": 4, "schedule": "cooldown", "solver": "sgd"}
    part = train(data_set(), "fedem", until=3, **options)
    alone = train(data_set(), "fedavg", until=3, **options)
    assert set(part.prediction.learners) == set(alone.prediction.learners)
    for name, value in part.prediction.learners.items():
        assert torch.equal(value, alone.prediction.learners[name])
    split = train(data_set(), "fedem", until=4, **options)
    assert len(split.prediction.learners["0.weight"]) == SMALL["learners"]
    with pytest.raises(ValueError, match="until must be at least 1"):
        train(data_set(), until=0, **options)


def test_a_warm_up_that_diverges_before_its_end_is_told():
    """A training that ends early is healthy only if it got so far."""
    options = {**SMALL, "rounds": 9, "warmup": 6, "learner": "mlp", "lr": 300.0}
    with pytest.warns(DivergenceWarning, match="diverged"):
        part = train(data_set(), "fedem", until=5, **options)
    assert len(part.history) < 5
    assert "diverged" in part.stopped


def test_a_training_with_patience_that_ends_early_leaves_its_best_round():
    options = {**SMALL, **VARIANTS["patient"], "patience": 5}
    scores = [
        entry["validation_log_likelihood"]
        for entry in train(data_set(), "fedavg", **options).history
    ]
    best = int(np.argmax(scores))
    until = best + 2  # a round later
    part = train(data_set(), "fedavg", until=until, **options)
    assert len(part.history) == until
    score = -part.evaluate("validation").mean_log_loss
    assert score == pytest.approx(scores[best], abs=1e-6)
    assert score > scores[until - 1] + 1e-5


def test_the_variants_do_what_their_names_say(tmp_path):
    """Or the test above would say little."""
    data = data_set()
    patient = train(data, "fedavg", **{**SMALL, **VARIANTS["patient"]})
    settled = train(data, "fedgmm", **{**SMALL, **VARIANTS["settled"]})
    assert 2 < len(patient.history) < 9
    assert 2 < len(settled.history) < 12
    path = tmp_path / "c"
    options = {**SMALL, **VARIANTS["plain"], "lr": 0.5, "rounds": 10}
    train(data_set("clustered"), "clustered", checkpoint=Checkpoint(path), **options)
    assert len(tensors_of(path.read_bytes())["shared/learners/0.weight"]) > 1


def test_learners_of_ones_own_with_dropout_go_on_exactly(tmp_path, rng):
    data = federation(rng, sizes=(40, 50))

    def learner():
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    options = {**SMALL, "learner": learner, "rounds": 4}
    model, _, rounds, starts = copies_of(tmp_path, data, "fedgmm", **options)
    for copy in [*starts, *rounds]:
        assert_same_model(train(data, checkpoint=Checkpoint(copy), **options), model)
    options["learner"] = lambda: nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match="does not fit the method"):
        train(data, checkpoint=Checkpoint(rounds[1]), **options)


@pytest.mark.usefixtures("thin_mobilenet")
@pytest.mark.parametrize("server", [pytest.param("momentum", marks=pytest.mark.slow), "adam"])
@pytest.mark.parametrize(
    "algorithm",
    ["fedgmm", "clustered", *(pytest.param(n, marks=SLOW) for n in ("fedem", "fedavg", "pfedme"))],
)
def test_running_statistics_go_on(tmp_path, rng, algorithm, server):
    """Batch normalisation's statistics are in the learners, but not in the server's averages."""
    pictures = rng.integers(0, 256, size=(12, 3, 8, 8)).astype(np.uint8)
    data = FederatedDataset.from_arrays(
        pictures, np.arange(12) % 2, np.arange(12) // 6, features=rng.normal(size=(12, 2))
    )
    options = {**SMALL, "learner": "mobilenet", "server": server, "lr": 1e-4, "rounds": 2}
    model, _, rounds, _ = copies_of(tmp_path, data, algorithm, **options)
    assert_same_model(train(data, algorithm, checkpoint=Checkpoint(rounds[0]), **options), model)


def test_rounds_that_nobody_answers_are_lost_again(tmp_path, rng):
    data = federation(rng)
    options = {
        **SMALL,
        "rounds": 8,
        "warmup": 3,
        "answers": lambda number, name: number not in (2, 3, 4, 7, 8) and name != "oslo",
    }
    model, last, rounds, starts = copies_of(tmp_path, data, "fedgmm", **options)
    assert [entry["round"] for entry in model.history] == [1, 5, 6]
    for copy in [*starts, *rounds, last]:
        assert_same_model(train(data, checkpoint=Checkpoint(copy), **options), model)


def interrupt_in(number):
    def stop(entry):
        if entry["round"] == number:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize(
    ("algorithm", "number"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in WHOLE and case[1] != 3))
        for case in product(ALGORITHMS, (1, 2, 3, 5))
    ],
)
def test_ctrl_c_writes_the_last_finished_round(tmp_path, algorithm, number):
    data, path = data_set(algorithm), tmp_path / "c"
    options = {**SMALL, "rounds": 5, "warmup": 2, "patience": 3, "server": "momentum"}
    expected = train(data, algorithm, **options)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        train(
            data,
            algorithm,
            checkpoint=Checkpoint(path, 100),
            on_round=[interrupt_in(number)],
            **options,
        )
    facts = facts_of(path)
    assert (facts["round"], facts["phase"]) == (number, "warmup" if number <= 2 else "main")
    assert [float.fromhex(entry["round"]) for entry in facts["history"]] == list(
        range(1, number + 1)
    )
    assert_same_model(train(data, algorithm, checkpoint=Checkpoint(path), **options), expected)


@pytest.mark.parametrize(
    "algorithm", ["fedgmm", "fedavg+", pytest.param("local", marks=pytest.mark.slow)]
)
def test_ctrl_c_at_any_moment(tmp_path, algorithm):
    """In the middle of a step, of a validation or of a checkpoint: the end is the same."""
    data = data_set(algorithm)
    options = {**SMALL, "rounds": 5, "warmup": 2, "patience": 2, "tol": 1e-3, "lr": 0.5}
    kwargs = {"watch_accuracy": True, **options}
    expected = train(data, algorithm, **kwargs)
    calls = calls_until(math.inf, lambda: train(data, algorithm, **kwargs))
    outcomes = set()
    for number, after in enumerate(np.random.default_rng(1).integers(1, calls, size=10)):
        checkpoint = Checkpoint(tmp_path / str(number), 2)

        def interrupted(after=after, checkpoint=checkpoint):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                calls_until(after, lambda: train(data, algorithm, checkpoint=checkpoint, **kwargs))

        try:
            interrupted()
            outcomes.add("kept")
        except KeyboardInterrupt:  # in the start, or at the very end
            outcomes.add("out")
        if checkpoint.path.exists():
            facts = facts_of(checkpoint.path)
            outcomes.add("judged" if facts["judged"] else "not judged")
            assert len(facts["history"]) == facts["round"]
        assert_same_model(train(data, algorithm, checkpoint=checkpoint, **kwargs), expected)
    assert {"kept", "judged", "not judged"} <= outcomes


def calls_until(most, work):
    """Run ``work``, but press Ctrl-C in the call of this number; how many calls there were."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        if event == "call" and "fedgmm" in frame.f_code.co_filename:
            calls += 1
            if calls == most:
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_the_start_is_not_computed_again(tmp_path, rng, monkeypatch):
    data, checkpoint = federation(rng), Checkpoint(tmp_path / "c", 2)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        train(data, rounds=6, checkpoint=checkpoint, on_round=[interrupt_in(3)], **SMALL)

    @wraps(FedGMM.init)
    def start(*_):
        raise AssertionError("the start was computed again")

    monkeypatch.setattr(FedGMM, "init", start)
    monkeypatch.setattr("fedgmm.methods.gmm.FederatedGMM.start", start)
    assert len(train(data, rounds=6, checkpoint=checkpoint, **SMALL).history) == 6


def test_how_often_it_is_written(tmp_path, rng, monkeypatch):
    written = []

    def save(path, progress):
        written.append((progress.phase, progress.round))
        save_progress(path, progress)

    monkeypatch.setattr("fedgmm.training.in_process.save_progress", save)
    options = {"rounds": 8, "warmup": 3, **SMALL}
    train(federation(rng), checkpoint=Checkpoint(tmp_path / "c", 2), **options)
    assert written == [
        *[("warmup", 0), ("warmup", 2), ("warmup", 3)],
        *[("main", 3), ("main", 5), ("main", 7), ("main", 8)],
    ]


@pytest.mark.parametrize(
    "options", [{"rounds": 3}, {"rounds": 50, "tol": 0.05}, {"rounds": 50, "patience": 2}]
)
@pytest.mark.parametrize("algorithm", ["fedgmm", "fedavg+"])
def test_a_finished_training_is_there_at_once(tmp_path, monkeypatch, algorithm, options):
    data, checkpoint = data_set(), Checkpoint(tmp_path / "c")
    options = {**SMALL, "lr": 0.5, **options}
    model = train(data, algorithm, checkpoint=checkpoint, **options)
    before = checkpoint.path.read_bytes()

    def step(*_):
        raise AssertionError("another round")

    monkeypatch.setattr("fedgmm.methods.fedgmm.FedGMM.client_step", step)
    assert_same_model(train(data, algorithm, checkpoint=checkpoint, **options), model)
    assert checkpoint.path.read_bytes() == before
    if options["rounds"] == 50 and algorithm == "fedgmm":  # it had converged: nothing changes
        options["rounds"] = 60
        assert_same_model(train(data, algorithm, checkpoint=checkpoint, **options), model)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_rounds_than_there_were(tmp_path, algorithm):
    data, checkpoint = data_set(algorithm), Checkpoint(tmp_path / "c")
    options = {**SMALL, "server": "momentum", "participation": 0.7}
    train(data, algorithm, checkpoint=checkpoint, rounds=3, **options)
    longer = train(data, algorithm, checkpoint=checkpoint, rounds=6, **options)
    assert_same_model(longer, train(data, algorithm, rounds=6, **options))
    with pytest.raises(CheckpointError, match="already holds round 6, but rounds=5"):
        train(data, algorithm, checkpoint=checkpoint, rounds=5, **options)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("warmup", [0, 3])
def test_divergence_is_kept_and_told_again(tmp_path, warmup):
    data, checkpoint = data_set(), Checkpoint(tmp_path / "c", 1)
    options = {**SMALL, "rounds": 9, "learner": "mlp", "lr": 300.0, "warmup": warmup}
    with pytest.warns(UserWarning, match="diverged"):
        model = train(data, "fedem", checkpoint=checkpoint, **options)
    assert "diverged" in model.stopped
    assert facts_of(checkpoint.path)["round"] == len(model.history)
    with pytest.warns(UserWarning, match="diverged"):
        again = train(data, "fedem", checkpoint=checkpoint, **options)
    assert_same_model(again, model)


# ---------------------------------------------------------------------- a power cut


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
@pytest.mark.parametrize(
    ("algorithm", "kills"),
    [
        ("fedgmm", 3),
        *(pytest.param(name, 12, marks=pytest.mark.slow) for name in ALGORITHMS),
    ],
)
def test_a_process_that_is_killed_again_and_again(tmp_path, algorithm, kills):
    options = {**SMALL, "rounds": 8 * kills + 4, "warmup": 2, "server": "adam", "patience": 99}
    path, lots, rounds = tmp_path / "killed", random.Random(kills), []

    def state_of_file():
        return path.stat().st_mtime_ns if path.exists() else 0

    for number in range(kills + 1):
        last = number == kills
        # on a busy machine it pauses, so that it does not end before it is killed
        arguments = path, algorithm, options, not last
        process = forks.Process(target=slow_training, args=arguments, daemon=True)
        process.start()
        if not last:
            for _ in range(lots.randint(1, 3)):  # it gets a little further every time
                before = state_of_file()
                while state_of_file() == before:
                    assert process.is_alive()
                    time.sleep(1e-3)
            time.sleep(lots.uniform(0.0, 0.012))
            process.kill()
        process.join(100)
        assert process.exitcode == (0 if last else -9)
        rounds.append(read_checkpoint(path).facts["round"])
    assert rounds == sorted(rounds)
    assert rounds[0] < rounds[-2] < rounds[-1]  # killed in different rounds, before the end
    train(five_clients(), algorithm, checkpoint=Checkpoint(tmp_path / "free"), **options)
    assert_same_file(tmp_path / "killed", tmp_path / "free")
