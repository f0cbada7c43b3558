"""The progress of a training run on disk: written atomically, read without running any code.

A checkpoint is one safetensors file. Its tensors have names like paths
(``shared/mixture/gaussians/means``); everything else is JSON in the file's metadata, with a format
number and checksums. There are no class names: the type hints of a method's ``init`` say how tensors
and values become its state again. A run that resumes from the file ends with the same bits as one that
was never interrupted. So floats are written in hexadecimal, and a tensor with another layout in memory
gets that layout again, because products of matrices may round differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedgmm.data.dataset import FederatedDataset
from fedgmm.files import write_atomically
from fedgmm.methods.base import AnyMethod
from fedgmm.support.checks import check_integer
from fedgmm.support.scratch import touched
from fedgmm.training.state_arrays import StateDecoder, StateError, hints_of, laid_out, take_apart

FORMAT = 1
"""Version of the layout; a newer one is refused."""

FREE_OPTIONS = ("rounds", "device", "personal_labels", "refit")
"""Options that may differ when a run resumes, because they do not change rounds that are done."""

DENSITY_OPTIONS = ("components", "covariance_type", "reg_covar")
"""Options that have no effect if a method has no Gaussians."""

WEIGHTS = "pretrained_sha256"
"""Name of a fact beside the options: the checksum of the ``pretrained`` file, or ``None``."""

Phase = Literal["warmup", "main"]

_FACTS = "fedgmm checkpoint"
_LARGEST_HEADER = 100_000_000  # what safetensors itself accepts
_SAMPLED_ROWS = 4096
_HASHED_BYTES = 8 * 1024 * 1024  # of a block of rows, with those between them
# RecursionError is a RuntimeError
_LOWER_LAYERS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class CheckpointError(StateError):
    """A checkpoint that cannot be written, read or resumed from, with the file and the reason."""


class OtherTrainingError(CheckpointError):
    """A checkpoint of a run with other options, other data or more rounds."""


@dataclass(frozen=True)
class Checkpoint:
    """The file of a run's progress, and how often it is written.

    Attributes:
        path: the file; a run that finds it resumes from it.
        every: rounds between two writes.
    """

    path: Path
    every: int = 5

    def __post_init__(self) -> None:
        """Check the values; a path may be given as a string."""
        object.__setattr__(self, "path", Path(self.path))
        check_integer("every", self.every, 1)


class Best(NamedTuple):
    """The best round so far, by its score on the validation rows."""

    score: float
    round: int
    shared: Any
    personal: Any


@dataclass(frozen=True)
class Progress:
    """The state of a run after a round, complete enough to resume exactly."""

    phase: Phase  # ``"warmup"`` or ``"main"``
    round: int  # number of the last finished round; before the first round of a phase, one less
    shared: Any  # the server's broadcast
    personal: Any  # the clients' own parts, along a leading axis
    # one dictionary per round, of both phases
    history: list[dict[str, float]] = field(default_factory=list)
    best: Best | None = None  # the best round, if ``patience`` is set
    first_round: int = 1  # number of the phase's first round
    judged: bool = True  # the stopping rules have seen the last round
    converged: bool = False  # a stopping rule has ended the run
    options: Mapping[str, Any] = field(default_factory=dict)  # of the run, as plain values
    data: str = ""  # the data's fingerprint


def fingerprint(dataset: FederatedDataset, features: bool = True) -> str:
    """Return a number that changes with the clients, classes, labels or rows.

    It covers the training and validation rows, but only a sample of their inputs, to be cheap.
    Features of the Gaussians that are not the inputs are covered, too, if ``features`` says so.
    """
    names = [str(name) for name in dataset.names]
    known = repr((names, dataset.classes.tolist(), dataset.input_shape))
    digest = hashlib.sha256(known.encode())
    for rows in (dataset.train, dataset.validation):
        _add_to(digest, rows.codes)
        _add_to(digest, rows.labels)
        if rows.weights is not None:
            _add_to(digest, rows.weights)
        step = 1 + len(rows) // _SAMPLED_ROWS
        _add_to(digest, rows.inputs[::step])
        if features and not rows.features_are_inputs:
            for chunk in rows.features.chunks:
                _add_to(digest, chunk[::step])
    return digest.hexdigest()


# ---------------------------------------------------------------------- writing


def save_progress(path: str | Path, progress: Progress) -> None:
    """Write progress to a file atomically: a crash leaves the old file or the new one."""
    from safetensors.torch import save as to_bytes

    path, best = Path(path), progress.best
    state = {"shared": progress.shared, "personal": progress.personal}
    if best is not None:
        state |= {"best/shared": best.shared, "best/personal": best.personal}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in state.items():
        take_apart(name, value, tensors, values)
    dense = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    plain = ("phase", "round", "first_round", "judged", "converged", "data")
    facts = {
        "format": FORMAT,
        **{name: getattr(progress, name) for name in plain},
        "history": [{n: float(v).hex() for n, v in one.items()} for one in progress.history],
        "best": None if best is None else {"score": best.score.hex(), "round": best.round},
        "options": dict(progress.options),
        "values": values,
        "strides": {n: v.stride() for n, v in tensors.items() if not v.is_contiguous()},
        "numbers": _digest_of(dense),
    }
    facts["checksum"] = _checksum(facts)
    data = to_bytes(dense, metadata={_FACTS: json.dumps(facts)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(
            f"Cannot write the checkpoint {path} ({reason}); free disk space or choose another file."
        ) from None


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
        _add_to(digest, value)
    return digest.hexdigest()


def _add_to(digest: Any, value: Tensor) -> None:
    """Hash the numbers in blocks, because a sample of mapped rows reads the pages between them, too."""
    rows = value.detach().cpu().reshape(-1) if value.dim() == 0 else value.detach().cpu()
    bytes_apart = max(1, rows.stride(0) * rows.element_size())
    for block in torch.split(rows, max(1, _HASHED_BYTES // bytes_apart)):
        digest.update(block.contiguous().numpy())
        touched(len(block) * bytes_apart)


def _checksum(facts: Mapping[str, Any]) -> str:
    """Return the checksum of all facts except the checksum itself."""
    rest = {name: value for name, value in facts.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------- reading


def load_progress(
    path: str | Path, method: AnyMethod, device: torch.device | str = "cpu"
) -> Progress:
    """Read the file that :func:`save_progress` wrote, with the state of ``method``, on ``device``.

    Raises:
        CheckpointError: a missing, damaged, unknown or newer file, or the state of another method.
    """
    return read_checkpoint(path).progress(method, device)


def read_checkpoint(path: str | Path) -> StoredProgress:
    """Read and check a file, whichever method its state belongs to."""
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(
            f"Cannot read the checkpoint {path} ({reason}); check the path and its permissions."
        ) from None
    facts = _read_facts(path, data)
    try:
        tensors = from_bytes(data)
        if facts["numbers"] != _digest_of(tensors):
            raise ValueError("the checksum of its numbers is wrong")
    except (SafetensorError, *_LOWER_LAYERS) as error:
        raise CheckpointError(f"{path} is damaged: {error}; {_START_AGAIN}.") from None
    return StoredProgress(path, facts, tensors)


_START_AGAIN = "delete it to start again, or give another file"


def _read_facts(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON in a file's metadata, checked."""
    length = int.from_bytes(data[:8], "little")
    try:
        if not 2 <= length <= min(len(data) - 8, _LARGEST_HEADER):
            raise ValueError
        facts = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_FACTS])
        number = facts["format"]
        fits = facts["checksum"] == _checksum(facts)
    except _LOWER_LAYERS:
        raise CheckpointError(f"{path} is damaged or not a checkpoint; {_START_AGAIN}.") from None
    if type(number) is int and number > FORMAT:
        raise CheckpointError(
            f"{path} was written by a newer fedgmm (format {number}, this one reads up to "
            f"{FORMAT}); upgrade fedgmm to resume from it."
        )
    if number != FORMAT or not fits:
        raise CheckpointError(
            f"{path} is damaged or was changed: its checksum is wrong; {_START_AGAIN}."
        )
    return dict(facts)


@dataclass(frozen=True)
class StoredProgress:
    """An intact file, not yet decoded into a method's state."""

    path: Path  # the file
    facts: dict[str, Any]  # its JSON
    tensors: dict[str, Tensor]  # by their names

    @property
    def phase(self) -> Phase:
        """The phase that the state belongs to."""
        return "warmup" if self.facts.get("phase") == "warmup" else "main"

    def check_settings(
        self, options: Mapping[str, Any], *data: str, free: Iterable[str] = ()
    ) -> None:
        """Raise :class:`OtherTrainingError` unless the run that resumes has the same options and data.

        ``FREE_OPTIONS`` and ``free`` ones may differ, but rounds that are done stay. Pretrained
        weights are compared by ``WEIGHTS``, not by the path of the file. ``data`` are accepted
        fingerprints.
        """
        stored = self.facts.get("options")
        stored = stored if isinstance(stored, dict) else {}
        # older checkpoints hold only the path of the file
        if WEIGHTS in stored and WEIGHTS in options:
            stored, options = _by_content(stored), _by_content(options)
        for name in sorted({*stored, *options} - {*FREE_OPTIONS, *free, WEIGHTS}):
            then, now = stored.get(name), options.get(name)
            if then != now:
                raise OtherTrainingError(
                    f"{self.path} belongs to a run with {name}={then!r}, not {now!r}; give the same "
                    f"{name} to resume, or another file to start again."
                )
        if self.facts.get("data") not in data:
            raise OtherTrainingError(
                f"{self.path} belongs to a run on other data; give the same data set to resume, or "
                "another file to start again."
            )
        done, rounds = self.facts.get("round"), options.get("rounds")
        if isinstance(done, int) and isinstance(rounds, int) and done > rounds:
            raise OtherTrainingError(
                f"{self.path} already holds round {done}, but rounds={rounds}; raise rounds, or give "
                "another file."
            )

    def progress(self, method: AnyMethod, device: torch.device | str = "cpu") -> Progress:
        """Return the progress with the state of ``method``, on ``device``."""
        try:
            return self._assemble(method, device)
        except _LOWER_LAYERS as error:
            reason = str(error) if isinstance(error, StateError) else f"{error!r}."
            raise CheckpointError(f"{self.path} does not fit the method: {reason}") from None

    def _assemble(self, method: AnyMethod, device: torch.device | str) -> Progress:
        facts, best = self.facts, self.facts["best"]
        strides = facts["strides"]
        tensors = {n: laid_out(v.to(device), strides.get(n)) for n, v in self.tensors.items()}
        hints = get_args(hints_of(type(method).init)["return"])
        decoder = StateDecoder(tensors, facts["values"], method.training.net.parameter_shapes)

        def state(prefix: str) -> tuple[Any, Any]:
            shared, personal = (
                decoder.decode(hint, prefix + part)
                for hint, part in zip(hints, ("shared", "personal"), strict=True)
            )
            method.check_state(shared, personal)
            return shared, personal

        parts = state("")
        if best is not None:
            best = Best(float.fromhex(best["score"]), int(best["round"]), *state("best/"))
        return Progress(
            self.phase,
            int(facts["round"]),
            *parts,
            [{str(n): float.fromhex(v) for n, v in entry.items()} for entry in facts["history"]],
            best,
            int(facts["first_round"]),
            bool(facts["judged"]),
            bool(facts["converged"]),
            dict(facts["options"]),
            str(facts["data"]),
        )


def _by_content(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the checksum of the file of weights in place of its name."""
    checksum = options[WEIGHTS]
    return {**options, "pretrained": None if checksum is None else f"sha256 {checksum}"}
