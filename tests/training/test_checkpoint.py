"""Checkpoints: the same state back, and clear words about damage."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from fedgmm.nets.networks import network
from fedgmm.training import checkpoint as module
from fedgmm.training.build import build
from fedgmm.training.checkpoint import (
    FORMAT,
    Best,
    Checkpoint,
    CheckpointError,
    Progress,
    load_progress,
    read_checkpoint,
    save_progress,
)
from fedgmm.training.in_process import train
from fedgmm.training.options import TrainingOptions
from small_checkpoints import SMALL, facts_of
from supervised import federation

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

    def check_state(self, shared, personal):
        """Accept every state."""


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
        with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
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

    monkeypatch.setattr("fedgmm.training.checkpoint.write_atomically", full)
    with pytest.raises(CheckpointError, match=r"Cannot write .*c \(No space left on device\)"):
        train(federation(rng), checkpoint=Checkpoint(tmp_path / "c"), rounds=1, **SMALL)


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
