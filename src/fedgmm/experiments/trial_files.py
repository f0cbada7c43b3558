"""One training of a study on images, and the files that it leaves behind.

Trainings write checkpoints, so that a study goes on where an interruption ended it. Several programs may
work on one folder at once, with different methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic

import numpy as np

from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.partition import describe
from fedgmm.experiments.image_study import ImageStudy, StudyT
from fedgmm.files import sha256_of, write_atomically, write_once
from fedgmm.model.model import FederatedModel
from fedgmm.runs.comparison import pass_on_interrupt
from fedgmm.training.checkpoint import WEIGHTS, Checkpoint
from fedgmm.training.local import train
from fedgmm.training.options import TrainingOptions

_CHOSEN = ("lr", "server_momentum", "independence", "personal_labels")
_SETTINGS = "study.json"
_DATA = "data"
_CLIENTS = "clients-"
_NO_TRIALS = (_SETTINGS, _CLIENTS)  # what begins so was not trained
_MAY_GROW = ("methods", "seeds", "device")
_ROUNDS_A_CHECKPOINT = 50
_WATCHED_ROUNDS = 5


class DamagedRecordError(ValueError):
    """A file of a trial that is not what was written: which one, and what to do."""


@dataclass(frozen=True)
class Trial(Generic[StudyT]):
    """One training of a study.

    Attributes:
        folder: of all trials.
        name: of its files.
        study: its settings.
        method: what is trained.
        seed: of the federation and of the training.
        chosen: options that were tuned.
    """

    folder: Path
    name: str
    study: StudyT
    method: str
    seed: int
    chosen: dict[str, Any]

    @property
    def options(self) -> TrainingOptions:
        """How it is trained."""
        return replace(self.study.options(self.method, self.seed), **self.chosen)

    @property
    def facts(self) -> dict[str, Any]:
        """What its file begins with."""
        return {"method": self.method, "seed": self.seed, **self.chosen}


def open_trials(trials: Path, study: ImageStudy) -> Path:
    """The folder of a study's trials: all of one study, but for what may grow.

    In an empty one no settings are written yet, see :func:`bind_trials`: a call that fails before it
    trains anything, say at a file that is not there, binds nobody.

    Raises:
        ValueError: the folder holds trials of a study with other settings, or the pretrained weights
            are not there.
    """
    _settings(study)  # weights that are not there are told before there is a folder
    trials.mkdir(parents=True, exist_ok=True)
    # drafts are what a program that was killed left of its settings
    nothing = (f"{_SETTINGS}.", _CLIENTS)
    if any(not other.name.startswith(nothing) for other in trials.iterdir()):
        bind_trials(trials, study)
    return trials


def bind_trials(trials: Path, study: ImageStudy, data: str | None = None) -> None:
    """From now on the folder is for these settings: called when data are ready, before any training.

    Of programs that begin at once with different settings the first one stays, and the others are told.

    Args:
        trials: the folder.
        study: the settings.
        data: the fingerprint of the images, where they are loaded.

    Raises:
        ValueError: another study came first, or one with other images, or the pretrained weights are not
            there any more.
    """
    file, facts = trials / _SETTINGS, _settings(study)
    if not file.exists():
        write_once(file, _as_json(facts if data is None else {**facts, _DATA: data}))
    if data is not None:
        check_data(trials, data)
    # settings that are younger than the file had their defaults
    held = {**_settings(type(study)()), WEIGHTS: facts[WEIGHTS], **_settings_on_file(file)}
    held["pretrained"] = bool(held["pretrained"])  # some files tell where the weights were
    for setting, value in facts.items():
        if held[setting] != value:
            raise ValueError(
                f"{trials} holds results of a study with {setting}={held[setting]!r}, not {value!r}; "
                f"{_remedy(trials)}."
            )


def check_data(trials: Path, data: str) -> None:
    """Raise unless the folder's trainings were on these data; older folders do not tell.

    Args:
        trials: the folder of all trials.
        data: the fingerprint of a data set as it was loaded, see :attr:`ImageData.fingerprint`. The
            encoder's weights have no part in it.
    """
    file = trials / _SETTINGS
    if file.exists() and _settings_on_file(file).get(_DATA, data) != data:
        raise ValueError(
            f"{trials} holds trainings on other images than those of this data folder; {_remedy(trials)}."
        )


def describe_clients(trials: Path, seed: int, dataset: FederatedDataset) -> None:
    """Leave a file that tells what the clients of a seed have, for the tables."""
    splits = {name: dataset.split(name) for name in SPLITS}
    owner = np.concatenate([rows.codes.cpu().numpy() for rows in splits.values()])
    labels = np.concatenate([rows.labels.cpu().numpy() for rows in splits.values()])
    sizes = ", ".join(f"{name} {len(rows):,}" for name, rows in splits.items())
    facts = {"description": f"{describe(owner, labels)}; {sizes}"}
    if on_file(trials, f"{_CLIENTS}{seed}") != facts:  # settings may have been deleted since
        _write_json(record_of(trials, f"{_CLIENTS}{seed}"), facts)


def clients_on_file(trials: Path, study: ImageStudy) -> dict[str, str]:
    """What the clients of each seed have, where it is on file: older folders do not tell."""
    found = {seed: on_file(trials, f"{_CLIENTS}{seed}", "description") for seed in study.seeds}
    return {f"seed {seed}": one["description"] for seed, one in found.items() if one is not None}


def _remedy(trials: Path) -> str:
    if any(not other.name.startswith(_NO_TRIALS) for other in trials.iterdir()):
        return "choose another folder"
    return (
        f"choose another folder or, if no other program has just begun, delete {_SETTINGS}: nothing was "
        "trained with it"
    )


def _settings(study: ImageStudy) -> dict[str, Any]:
    """What all trials of a folder have in common, as JSON gives it back.

    Pretrained weights are what their file holds, wherever it lies.
    """
    facts = {name: value for name, value in asdict(study).items() if name not in _MAY_GROW}
    facts["pretrained"] = study.pretrained is not None
    facts[WEIGHTS] = None if study.pretrained is None else _checksum(Path(study.pretrained))
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def _settings_on_file(file: Path) -> dict[str, Any]:
    try:
        return _read_json(file)
    except DamagedRecordError:
        raise DamagedRecordError(
            f"{file} is damaged, and nobody can tell whether the trials beside it are of this study. If "
            "they are of the very same settings, delete it, and it is made again; else choose another "
            "folder."
        ) from None


def _checksum(weights: Path) -> str:
    try:
        return sha256_of(weights)
    except OSError as error:
        raise ValueError(
            f"The pretrained weights {weights} cannot be read ({error.strerror}); give the file that the "
            "learners start from, wherever it lies now."
        ) from None


def _write_json(file: Path, record: dict[str, Any]) -> None:
    write_atomically(file, _as_json(record), shared=True)


def _as_json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def _read_json(file: Path, *needed: str) -> dict[str, Any]:
    """What a file holds; these entries must be among it."""
    try:
        record = json.loads(file.read_bytes())
    except ValueError:
        record = None
    if not isinstance(record, dict) or any(name not in record for name in needed):
        raise DamagedRecordError(f"{file} is damaged; delete it, and it is made again.")
    return record


def recorded(
    trials: Path,
    trial: str,
    run: Callable[[], dict[str, Any]],
    *needed: str,
    keep_checkpoint: bool = False,
) -> dict[str, Any]:
    """What a trial left behind; where it left nothing it is run. Its checkpoint goes.

    Args:
        trials: the folder of all trials.
        trial: its name.
        run: returns what is written to its file.
        *needed: entries that its file must have.
        keep_checkpoint: its checkpoint stays.

    Raises:
        DamagedRecordError: its file cannot be read, or has not got these entries.
    """
    file = record_of(trials, trial)
    if not file.is_file():
        _write_json(file, run())
    # even of a trial on file, which may have been killed just before this line
    if not keep_checkpoint:
        checkpoint_of(trials, trial).unlink(missing_ok=True)
    return _read_json(file, *needed)


def on_file(trials: Path, trial: str, *needed: str) -> dict[str, Any] | None:
    """What a trial left behind; ``None`` where that is nothing, or nothing that can be read."""
    try:
        return _read_json(record_of(trials, trial), *needed)
    except (FileNotFoundError, DamagedRecordError):
        return None


def record_of(trials: Path, trial: str) -> Path:
    """Where a trial leaves what it found."""
    return trials / f"{trial}.json"


def checkpoint_of(trials: Path, trial: str) -> Path:
    """Where a trial's training writes down its progress."""
    return trials / f"{trial}.safetensors"


def chosen_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen options in a trial's file."""
    return {name: record[name] for name in _CHOSEN if name in record}


def trained(
    trial: Trial[StudyT], dataset: FederatedDataset, until: int | None = None
) -> FederatedModel:
    """Train, or go on from the checkpoint of a trial that was interrupted, or that ended early.

    Args:
        trial: what is trained.
        dataset: the clients.
        until: the last round for now; ``None`` means the last of all.
    """
    checkpoint = Checkpoint(checkpoint_of(trial.folder, trial.name), _ROUNDS_A_CHECKPOINT)
    model = train(
        dataset,
        options=trial.options,
        checkpoint=checkpoint,
        watch_accuracy=_WATCHED_ROUNDS,
        until=until,
    )
    pass_on_interrupt(model)
    return model
