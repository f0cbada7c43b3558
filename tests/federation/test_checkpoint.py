"""Checkpoints: the same state back, clear words about damage, and training that goes on exactly."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from fedgmm import training_run
from fedgmm.algorithms.fedgmm import FedGMM
from fedgmm.core.networks import network
from fedgmm.data.dataset import FederatedDataset
from fedgmm.federation import checkpoint as module
from fedgmm.federation.checkpoint import (
    FORMAT,
    FREE_OPTIONS,
    Best,
    Checkpoint,
    CheckpointError,
    Progress,
    StoredProgress,
    fingerprint,
    load_progress,
    read_checkpoint,
    save_progress,
)
from fedgmm.training import ALGORITHMS, DivergenceWarning, TrainingOptions, build, train
from supervised import federation, two_groups

SMALL = {"components": 2, "learners": 2, "batch_size": 8, "tol": None}


def facts_of(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[module._FACTS])


def content(path):
    """All that a checkpoint holds but the time it took."""
    facts = facts_of(path)
    for entry in facts["history"]:
        del entry["seconds"]
    for name in ("checksum", "options"):
        del facts[name]
    return facts, tensors_of(Path(path).read_bytes())


def assert_same_file(actual, expected):
    facts, tensors = content(actual)
    expected_facts, expected_tensors = content(expected)
    assert facts == expected_facts
    assert set(tensors) == set(expected_tensors)
    for name, value in expected_tensors.items():
        assert tensors[name].dtype == value.dtype, name
        assert torch.equal(tensors[name], value), name


def assert_same_model(actual, expected):
    for ours, theirs in (
        (actual.prediction, expected.prediction),
        (actual.prediction.gaussians, expected.prediction.gaussians),
    ):
        for name, value in ({} if theirs is None else vars(theirs)).items():
            own = getattr(ours, name)
            if isinstance(value, dict):
                assert list(own) == list(value)
                assert all(torch.equal(own[key], value[key]) for key in value), name
            elif isinstance(value, Tensor):
                assert torch.equal(own, value), name
    without_time = [
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in model.history]
        for model in (actual, expected)
    ]
    assert without_time[0] == without_time[1]
    seconds = [entry["seconds"] for entry in actual.history]
    assert seconds == sorted(seconds)
    assert actual.stopped == expected.stopped


# ---------------------------------------------------------------------- the file


@dataclass(frozen=True)
class Inner:
    matrix: Tensor
    kind: Literal["round", "square"]
    size: float | None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    learners: dict[str, Tensor]
    nothing: dict[str, Tensor]
    either: Tensor | dict[str, Tensor]
    maybe: Tensor | None
    steps: int
    name: str
    scale: float


class Scripted:
    """A method of which only the state matters."""

    training = SimpleNamespace(net=network("linear", (3,), 2), dtype=torch.float32)

    def init(self, rows, learner=None) -> tuple[Outer, Tensor | dict[str, Tensor]]:
        raise AssertionError("a checkpoint needs no start")

    def prediction(self, shared, personal):
        return SimpleNamespace(learners=shared.learners, client_weights=None)


def params(*leading):
    shapes = Scripted.training.net.parameter_shapes
    # against the order of the alphabet
    return {name: torch.randn(*leading, *shapes[name]) for name in sorted(shapes, reverse=True)}


def state(**changes):
    outer = Outer(
        Inner(torch.randn(4, 3, dtype=torch.float64), "square", 0.1),
        params(2),
        {},
        params(5, 1),
        None,
        7,
        "a/b",
        -0.0,
    )
    return replace(outer, **changes)


def assert_same_state(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name, value in expected.items():
            assert_same_state(actual[name], value)
    elif hasattr(expected, "__dict__"):
        for name, value in vars(expected).items():
            assert_same_state(getattr(actual, name), value)
    elif isinstance(expected, float):
        assert actual.hex() == expected.hex()
    else:
        assert actual == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"maybe": torch.tensor(3, dtype=torch.int64)},
        {"either": torch.zeros(0, 3)},
        {"nothing": params(1)},
        {"inner": Inner(torch.randn(3, 3, dtype=torch.float64), "round", None)},
        {"scale": math.inf},
        {"scale": math.nan},
        {"scale": 5e-324},
        {"steps": 2**70},
    ],
)
@pytest.mark.parametrize("personal", [torch.arange(5), params(5, 1)])
def test_every_kind_of_state_comes_back(tmp_path, changes, personal):
    history = [{"round": 1.0, "log_likelihood": 0.1 + 0.2, "seconds": 1e-9}, {"round": math.nan}]
    before = Progress(
        "main",
        3,
        state(**changes),
        personal,
        history,
        Best(-1 / 3, 2, state(), params(5, 1)),
        2,
        False,
        True,
        {"lr": 0.1, "tol": None, "learner": "linear"},
        "data",
    )
    save_progress(tmp_path / "deep" / "down", before)
    after = load_progress(tmp_path / "deep" / "down", Scripted())
    assert_same_state(after.shared, before.shared)
    assert_same_state(after.personal, before.personal)
    for ours, theirs in zip(after.best, before.best, strict=True):
        assert_same_state(ours, theirs)
    assert repr(after.history) == repr(before.history)
    rest = ("phase", "round", "first_round", "judged", "converged", "options", "data")
    for name in rest:
        assert getattr(after, name) == getattr(before, name)
        assert type(getattr(after, name)) is type(getattr(before, name))


@given(st.lists(st.floats(width=64), min_size=1, max_size=5))
def test_floats_come_back_to_the_bit(tmp_path, values):
    history = [{"log_likelihood": value} for value in values]
    save_progress(tmp_path / "c", Progress("warmup", 0, state(scale=values[0]), params(1), history))
    after = load_progress(tmp_path / "c", Scripted())
    assert after.phase == "warmup"
    assert [e["log_likelihood"].hex() for e in after.history] == [v.hex() for v in values]
    assert after.shared.scale.hex() == values[0].hex()


def test_tensors_lie_in_memory_as_they_did(tmp_path):
    """A product of matrices may round otherwise if one of them is stored by columns."""
    cases = [
        torch.randn(4, 3, dtype=torch.float64).mT,
        torch.randn(2, 3, 4, dtype=torch.float64).permute(2, 0, 1),
        torch.randn(4, dtype=torch.float64).expand(3, 4),
        torch.randn(4, 1, dtype=torch.float64).expand(4, 3),
        torch.randn((), dtype=torch.float64),
        torch.randn(3, 1, dtype=torch.float64).mT,
    ]
    for value in cases:
        shared = state(inner=Inner(value, "round", None))
        save_progress(tmp_path / "c", Progress("main", 0, shared, params(1)))
        back = load_progress(tmp_path / "c", Scripted()).shared.inner.matrix
        assert torch.equal(back, value)
        if min(value.shape, default=1) > 1:
            assert back.stride() == value.stride()


def test_names_are_paths_and_nothing_names_a_class(tmp_path, rng):
    path = tmp_path / "c"
    train(federation(rng), rounds=1, checkpoint=Checkpoint(path), **SMALL)
    names = set(tensors_of(path.read_bytes()))
    assert {"shared/mixture/gaussians/means", "shared/learners/0.weight", "personal"} <= names
    data = path.read_bytes()
    for word in (b"Shared", b"Gaussians", b"ServerState", b"fedgmm.", b"pickle"):
        assert word not in data


def test_what_a_checkpoint_cannot_hold(tmp_path):
    with pytest.raises(TypeError, match="shared is a set"):
        save_progress(tmp_path / "c", Progress("main", 0, set(), params(1)))
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_s_own_options():
    assert Checkpoint("some/file").path == Path("some/file")
    assert Checkpoint(Path("x")).every == 5
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        Checkpoint(Path("x"), 0)


# ---------------------------------------------------------------------- files that are no use


def method_of(**options):
    return build(TrainingOptions(**{**SMALL, **options}), network("linear", (3,), 2))


@pytest.fixture
def whole(tmp_path):
    """A checkpoint of FedGMM with everything in it."""
    path = tmp_path / "whole"
    data = federation(np.random.default_rng(3), sizes=(20, 30))
    options = {**SMALL, "server": "momentum", "patience": 3, "rounds": 2}
    train(data, checkpoint=Checkpoint(path), **options)
    return path


def rewrite(path, tensors=None, **changes):
    """The file with other facts and a checksum that fits."""
    facts = {**facts_of(path), **changes}
    tensors = tensors_of(path.read_bytes()) if tensors is None else tensors
    facts["numbers"] = module._digest_of(tensors)
    facts["checksum"] = module._checksum(facts)
    path.write_bytes(bytes_of(tensors, metadata={module._FACTS: json.dumps(facts)}))


@given(st.data())
def test_a_cut_file_is_told(whole, tmp_path, data):
    before = whole.read_bytes()
    end = data.draw(st.integers(0, len(before) - 1))
    (tmp_path / "cut").write_bytes(before[:end])
    with pytest.raises(CheckpointError, match="cut"):
        load_progress(tmp_path / "cut", method_of())


@given(st.data())
def test_a_flipped_bit_is_told_or_does_no_harm(whole, tmp_path, data):
    before = bytearray(whole.read_bytes())
    # as often in the header as in the numbers
    header = 8 + int.from_bytes(before[:8], "little")
    low, high = data.draw(st.sampled_from([(0, 8), (8, header), (header, len(before))]))
    place = data.draw(st.integers(low, high - 1))
    before[place] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "flipped").write_bytes(before)
    try:
        progress = load_progress(tmp_path / "flipped", method_of())
    except CheckpointError:
        return
    expected = load_progress(whole, method_of())
    assert_same_state(progress.shared, expected.shared)
    assert_same_state(progress.personal, expected.personal)
    assert progress.history == expected.history


@given(st.binary(max_size=200))
def test_any_bytes(tmp_path, content):
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_progress(tmp_path / "c", method_of())


def test_foreign_files(tmp_path, whole):
    path = tmp_path / "foreign"
    with pytest.raises(CheckpointError, match=r"Cannot read the checkpoint .*foreign \(No such"):
        load_progress(path, method_of())
    path.mkdir()
    with pytest.raises(CheckpointError, match="Cannot read"):
        load_progress(path, method_of())
    path.rmdir()
    for data in (
        b"",
        b"{}",
        pickle.dumps({"a": 1}),
        bytes_of({"a": torch.zeros(2)}),
        bytes_of({"a": torch.zeros(2)}, metadata={module._FACTS: "[1, 2]"}),
        bytes_of({"a": torch.zeros(2)}, metadata={module._FACTS: "[" * 100_000}),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged or not a checkpoint; remove it"):
            load_progress(path, method_of())


def test_a_newer_format(whole):
    rewrite(whole, format=FORMAT + 1)
    with pytest.raises(CheckpointError, match=rf"newer fedgmm \(format {FORMAT + 1}.*upgrade"):
        load_progress(whole, method_of())
    rewrite(whole, format="one")
    with pytest.raises(CheckpointError, match="checksum"):
        load_progress(whole, method_of())


def test_numbers_that_were_exchanged(whole):
    """Two files of one training, the facts of one and the tensors of the other."""
    facts = facts_of(whole)
    tensors = tensors_of(whole.read_bytes())
    tensors["personal"] = tensors["personal"].roll(1, 0)
    whole.write_bytes(bytes_of(tensors, metadata={module._FACTS: json.dumps(facts)}))
    with pytest.raises(CheckpointError, match="checksum of its numbers"):
        load_progress(whole, method_of())


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "local"},
        {"algorithm": "clustered"},
        {"algorithm": "pfedme"},
        {"algorithm": "fedem"},
        {"algorithm": "fedavg"},
        {"algorithm": "fedavg+"},
        {"components": 3},
        {"learners": 3},
        {"components": 1, "learners": 4},  # as many weights
        {"covariance_type": "tied"},
        {"dtype": "float64"},
    ],
)
def test_the_state_of_another_method(whole, options):
    with pytest.raises(CheckpointError, match="whole does not fit the method"):
        load_progress(whole, method_of(**options))


@pytest.mark.parametrize(
    "net", [network("mlp", (3,), 2), network("linear", (4,), 2), network("linear", (3,), 3)]
)
def test_another_network(whole, net):
    method = build(TrainingOptions(**SMALL), net)
    with pytest.raises(CheckpointError, match="does not fit the method: shared/learners"):
        load_progress(whole, method)


@pytest.mark.parametrize(
    "changes",
    [
        {"values": {}},
        {"values": []},
        {"values": None},
        {"strides": []},
        {"strides": {"personal": [1, 2, 3, 4]}},
        {"history": [3]},
        {"history": {"round": 1}},
        {"history": [{"round": "many"}]},
        {"best": {"score": "0x1p0"}},
        {"best": 3},
        {"round": "three"},
        {"options": 3},
    ],
)
def test_facts_that_make_no_sense(whole, changes):
    """With a checksum that fits: somebody wrote such a file on purpose."""
    rewrite(whole, **changes)
    with pytest.raises(CheckpointError, match="does not fit the method"):
        load_progress(whole, method_of())


def test_tensors_that_make_no_sense(whole):
    tensors = tensors_of(whole.read_bytes())
    for name in tensors:
        rest = {other: value for other, value in tensors.items() if other != name}
        rewrite(whole, rest)
        with pytest.raises(CheckpointError, match="does not fit the method"):
            load_progress(whole, method_of())


def test_a_disk_that_is_full(tmp_path, monkeypatch, rng):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedgmm.federation.checkpoint.write_atomically", full)
    with pytest.raises(CheckpointError, match=r"Cannot write .*c \(No space left on device\)"):
        train(federation(rng), checkpoint=Checkpoint(tmp_path / "c"), rounds=1, **SMALL)


# ---------------------------------------------------------------------- going on


def copies_of(tmp_path, data, algorithm, **options):
    """A training, its last checkpoint, and copies of all checkpoints on the way."""
    copies = []

    def copy_to(name):
        def copy(entry):
            copies.append(tmp_path / f"{name} {entry['round']:.0f}")
            shutil.copy(tmp_path / name, copies[-1])

        return copy

    for name, every in (("often", 1), ("rarely", 1000)):
        model = train(
            data,
            algorithm,
            checkpoint=Checkpoint(tmp_path / name, every),
            on_round=[copy_to(name)],
            **options,
        )
    # of those that are written rarely, only the starts are new
    starts = {facts_of(path)["round"]: path for path in copies if "rarely" in path.name}
    return model, tmp_path / "often", [p for p in copies if "often" in p.name], [*starts.values()]


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


def data_set(algorithm="fedgmm"):
    rng = np.random.default_rng(5)
    if algorithm == "clustered":
        return two_groups(rng, clients=5, rows=30, columns=3)  # so that clusters split
    return federation(rng, sizes=(20, 40, 17, 26, 9))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("algorithm", ["fedgmm", "fedavg+", "clustered"])
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


@pytest.mark.parametrize("server", ["momentum", "adam"])
@pytest.mark.parametrize("algorithm", ["fedgmm", "fedem", "fedavg", "clustered", "pfedme"])
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


@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
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


@pytest.mark.parametrize("algorithm", ["fedgmm", "fedavg+", "local"])
def test_ctrl_c_at_any_moment(tmp_path, algorithm):
    """In the middle of a step, of a validation or of a checkpoint: the end is the same."""
    data = data_set(algorithm)
    options = {**SMALL, "rounds": 5, "warmup": 2, "patience": 2, "tol": 1e-3, "lr": 0.5}
    kwargs = {"watch_accuracy": True, **options}
    expected = train(data, algorithm, **kwargs)
    calls = calls_until(math.inf, lambda: train(data, algorithm, **kwargs))
    outcomes = set()
    for number, after in enumerate(np.random.default_rng(1).integers(1, calls, size=25)):
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
    monkeypatch.setattr("fedgmm.algorithms.mixture.FederatedGMM.start", start)
    assert len(train(data, rounds=6, checkpoint=checkpoint, **SMALL).history) == 6


def test_how_often_it_is_written(tmp_path, rng, monkeypatch):
    written = []

    def save(path, progress):
        written.append((progress.phase, progress.round))
        save_progress(path, progress)

    monkeypatch.setattr("fedgmm.training_run.save_progress", save)
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

    monkeypatch.setattr("fedgmm.algorithms.fedgmm.FedGMM.client_step", step)
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


def test_the_same_file_for_another_training(tmp_path, rng):
    data, checkpoint = federation(rng), Checkpoint(tmp_path / "c")
    base = TrainingOptions(**{**SMALL, "rounds": 2})
    train(data, options=base, checkpoint=checkpoint)
    others = {
        "algorithm": "fedem",
        "components": 3,
        "learners": 3,
        "learner": "mlp",
        "solver": "sgd",
        "start": "split",
        "warmup": 1,
        "covariance_type": "diag",
        "aggregation": "paper",
        "server": "adam",
        "server_lr": 0.5,
        "schedule": "sqrt",
        "patience": 3,
        "tol": 0.1,
        "standardise": False,
        "seed": 1,
        "dtype": "float64",
        "precision": "mixed",
    }
    for name in TrainingOptions.__dataclass_fields__:
        if name in (*FREE_OPTIONS, "augment", "pretrained"):  # the last two are for images
            continue
        value = others.get(name)
        if value is None:  # the others are numbers
            number = getattr(base, name)
            value = number + 1 if isinstance(number, int) else number / 2 + 0.01
        with pytest.raises(
            CheckpointError, match=rf"c is of a training with {name}=.*another file"
        ):
            train(data, options=replace(base, **{name: value}), checkpoint=checkpoint)
    # plain numbers of NumPy are the same numbers
    same = replace(base, seed=np.int64(0), lr=np.float64(0.1), components=np.int32(2))
    train(data, options=same, checkpoint=checkpoint)


def test_pretrained_weights_may_lie_elsewhere(tmp_path, rng):
    from safetensors.torch import save_file

    from fedgmm.core.backbones import MobileNetV2

    for name in ("one", "two"):
        save_file(MobileNetV2(2).state_dict(), tmp_path / name)
    # two rows a client are too few for batch normalisation: gradients of a million
    pictures = rng.integers(0, 256, size=(24, 3, 32, 32)).astype(np.uint8)
    data = FederatedDataset.from_arrays(pictures, np.arange(24) % 2, np.arange(24) % 2)
    options = {"algorithm": "local", "learner": "mobilenet", "lr": 1e-4}
    options["checkpoint"] = Checkpoint(tmp_path / "c")
    train(data, pretrained=str(tmp_path / "one"), rounds=1, **options)
    (tmp_path / "one").rename(tmp_path / "moved")
    train(data, pretrained=str(tmp_path / "moved"), rounds=2, **options)
    for other in (None, str(tmp_path / "two")):
        with pytest.raises(CheckpointError, match=r"with pretrained='sha256 \w+', not .*another"):
            train(data, pretrained=other, rounds=3, **options)


def test_weights_of_an_older_checkpoint_are_known_by_their_place():
    old = StoredProgress(Path("c"), {"options": {"pretrained": "one"}, "data": "d"}, {})
    old.check_settings({"pretrained": "one", "pretrained_sha256": "1"}, "d")
    with pytest.raises(CheckpointError, match="pretrained='one', not 'two'"):
        old.check_settings({"pretrained": "two", "pretrained_sha256": "1"}, "d")


def test_the_same_file_for_other_data(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 3))
    y, who = (x[:, 0] > 0).astype(int), np.arange(60) % 3
    data = FederatedDataset.from_arrays(x, y, who)
    checkpoint = Checkpoint(tmp_path / "c")
    train(data, rounds=1, checkpoint=checkpoint, **SMALL)
    train(FederatedDataset.from_arrays(x, y, who), rounds=2, checkpoint=checkpoint, **SMALL)
    for other in (
        FederatedDataset.from_arrays(x + 1e-9, y, who),
        FederatedDataset.from_arrays(x, 1 - y, who),
        FederatedDataset.from_arrays(x, y + 1, who),
        FederatedDataset.from_arrays(x, y, who + 1),
        FederatedDataset.from_arrays(x, y, who % 2),
        FederatedDataset.from_arrays(x, y, who, features=x[:, :2]),
        FederatedDataset.from_arrays(x, y, who, seed=1),
        FederatedDataset.from_arrays(x[:-3], y[:-3], who[:-3]),
    ):
        assert fingerprint(other) != fingerprint(data)
        with pytest.raises(CheckpointError, match="on other data"):
            train(other, rounds=3, checkpoint=checkpoint, **SMALL)


def test_features_of_their_own_go_on(tmp_path, rng):
    x, seen = rng.normal(size=(90, 3)), rng.normal(size=(90, 2))
    y, who = (x[:, 0] > 0).astype(int), np.arange(90) % 3
    data = FederatedDataset.from_arrays(x, y, who, features=seen)
    other = FederatedDataset.from_arrays(x, y, who, features=seen + 1.0)
    assert fingerprint(data) != fingerprint(other)
    options = {**SMALL, "rounds": 4}
    model, _, rounds, _ = copies_of(tmp_path, data, "fedgmm", **options)
    assert_same_model(train(data, checkpoint=Checkpoint(rounds[1]), **options), model)


@pytest.mark.parametrize("patience", [None, 5])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "fedgmm"])
def test_features_are_nothing_to_methods_without_gaussians(tmp_path, rng, algorithm, patience):
    """Whoever trains them may or may not have encoded the images."""
    x, seen = rng.normal(size=(90, 3)), rng.normal(size=(90, 2))
    y, who = (x[:, 0] > 0).astype(int), np.arange(90) % 3
    plain = FederatedDataset.from_arrays(x, y, who)
    encoded = FederatedDataset.from_arrays(x, y, who, features=seen)
    options = {**SMALL, "rounds": 4, "solver": "sgd", "patience": patience}
    for first, second in ((plain, encoded), (encoded, plain)):
        model, _, rounds, _ = copies_of(tmp_path, first, algorithm, **options)
        again = train(second, algorithm, checkpoint=Checkpoint(rounds[1]), **options)
        for name, value in model.prediction.learners.items():
            assert torch.equal(value, again.prediction.learners[name])
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


@pytest.mark.parametrize("algorithm", ["fedem", "fedavg+", "local"])
def test_options_of_gaussians_are_nothing_to_methods_without_them(tmp_path, rng, algorithm):
    data, checkpoint = federation(rng), Checkpoint(tmp_path / "c")
    train(data, algorithm, rounds=1, checkpoint=checkpoint, components=2)
    others = {"components": 3, "covariance_type": "diag", "reg_covar": 0.5}
    train(data, algorithm, rounds=2, checkpoint=checkpoint, **others)


def test_an_older_checkpoint_tells_of_features_that_nobody_saw(tmp_path, rng, monkeypatch):
    x, seen = rng.normal(size=(90, 3)), rng.normal(size=(90, 2))
    y, who = (x[:, 0] > 0).astype(int), np.arange(90) % 3
    data = FederatedDataset.from_arrays(x, y, who, features=seen)
    checkpoint = Checkpoint(tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "fingerprint", lambda data, features=True: fingerprint(data))
        train(data, "fedavg", rounds=1, checkpoint=checkpoint, **SMALL)
    train(data, "fedavg", rounds=2, checkpoint=checkpoint, **SMALL)


def test_a_damaged_file_stops_training_before_it_starts(tmp_path, rng, whole):
    whole.write_bytes(whole.read_bytes()[:-1])
    seen = []
    with pytest.raises(CheckpointError, match="damaged"):
        train(federation(rng), on_round=[seen.append], checkpoint=Checkpoint(whole))
    assert not seen


def test_a_file_can_be_looked_at_without_a_method(whole):
    stored = read_checkpoint(whole)
    assert stored.phase == "main"
    assert stored.facts["round"] == 2


# ---------------------------------------------------------------------- a power cut

KILLED = """
import os, random, signal, sys, time
from pathlib import Path

import numpy as np

sys.path.insert(0, sys.argv[1])
from fedgmm.federation.checkpoint import Checkpoint, read_checkpoint
from fedgmm.training import train
from supervised import federation

path, algorithm, kills = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
lots = random.Random(kills)


def state_of_file():
    return path.stat().st_mtime_ns if path.exists() else 0


def life(last):
    data = federation(np.random.default_rng(5), sizes=(20, 40, 17, 26, 9))
    rounds = []

    def pause(entry):
        rounds.append(entry)
        if len(rounds) == 8 and not last:
            time.sleep(60)  # on a busy machine: not to the end before it is killed
        time.sleep(0.002)

    train(data, algorithm, checkpoint=Checkpoint(path, 1), on_round=[pause], OPTIONS)
    os._exit(0)


for number in range(kills + 1):
    child = os.fork()
    if not child:
        life(number == kills)
    if number < kills:
        for _ in range(lots.randint(1, 3)):  # it gets a little further every time, then it dies
            before = state_of_file()
            while state_of_file() == before:
                time.sleep(1e-4)
        time.sleep(lots.uniform(0.0, 0.012))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(read_checkpoint(path).facts["round"], os.waitstatus_to_exitcode(status))
"""


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
    script = tmp_path / "life.py"
    script.write_text(KILLED.replace("OPTIONS", f"**{options!r}"))
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, script, tests, tmp_path / "killed", algorithm, str(kills)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lives = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [code for _, code in lives] == [-9] * kills + [0]
    rounds = [number for number, _ in lives]
    assert rounds == sorted(rounds)
    assert rounds[0] < rounds[-2] < rounds[-1]  # killed in different rounds, before the end
    data = federation(np.random.default_rng(5), sizes=(20, 40, 17, 26, 9))
    train(data, algorithm, checkpoint=Checkpoint(tmp_path / "free"), **options)
    assert_same_file(tmp_path / "killed", tmp_path / "free")
