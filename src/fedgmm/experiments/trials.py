"""The folder of a study's trials: its settings, one JSON file per trial, and checkpoints.

Training runs write checkpoints, so an interrupted study resumes. Several programs may work on one folder at
the same time with different methods. Files of one folder:

- ``study.json``: the settings and the fingerprint of the images, which lock the folder;
- ``clients-SEED.json``: a description of the clients of a seed;
- ``METHOD-tuning.json``: the options that were chosen; scores of the search have a file each;
- ``METHOD-SEED.json``: the result of a trial, with its checkpoint ``METHOD-SEED.safetensors`` until then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, Self

import numpy as np

from fedgmm.data.dataset import SPLITS, FederatedDataset
from fedgmm.data.partition import describe
from fedgmm.experiments.settings import ImageStudy, StudyT
from fedgmm.files import sha256_of, write_atomically, write_once
from fedgmm.model.model import FederatedModel
from fedgmm.runs.comparison import pass_on_interrupt
from fedgmm.training.checkpoint import WEIGHTS, Checkpoint
from fedgmm.training.in_process import train
from fedgmm.training.options import TrainingOptions

_SETTINGS = "study.json"
_CLIENTS = "clients-"
_DATA = "data"
_TUNED_OPTIONS = ("lr", "server_momentum", "independence", "personal_labels")
_MAY_DIFFER = ("methods", "seeds", "device")  # between programs that share a folder
_CHECKPOINT_ROUNDS = 50
_ACCURACY_ROUNDS = 5

Record = dict[str, Any]
"""The content of a trial's JSON file."""


class StudyFolderError(ValueError):
    """The folder holds results that this study cannot continue."""


class DamagedRecordError(StudyFolderError):
    """A file of the folder cannot be read, or lacks a field."""


class Federation(Protocol):
    """The data that a study prepares for a seed."""

    @property
    def dataset(self) -> FederatedDataset:
        """The clients that train."""
        ...


# ---------------------------------------------------------------------- the folder


@dataclass(frozen=True)
class TrialFolder:
    """The files of a study's trials."""

    path: Path  # the folder; results have the same name

    @classmethod
    def open(cls, path: Path, study: ImageStudy) -> Self:
        """Create the folder, or check that its trials belong to this study.

        An empty folder is not locked yet (see :meth:`lock`), so a call that fails before it trains, for
        example because images are missing, does not prevent a call with other settings.

        Raises:
            StudyFolderError: the folder holds trials of a study with other settings.
            ValueError: the pretrained weights cannot be read.
        """
        _settings(study)  # raises before the folder is created
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        # drafts of settings are left by a program that was killed
        if folder._holds_more_than(f"{_SETTINGS}.", _CLIENTS):
            folder.lock(study)
        return folder

    def lock(self, study: ImageStudy, data: str | None = None) -> None:
        """Write the settings, or check them; called when the data are ready and before any training.

        If several programs start at once with different settings, the first one keeps the folder.

        Args:
            study: the settings.
            data: fingerprint of the loaded images (see :attr:`ImageData.fingerprint`), if known.

        Raises:
            StudyFolderError: the folder belongs to a study with other settings or other images.
            ValueError: the pretrained weights cannot be read.
        """
        file, settings = self.path / _SETTINGS, _settings(study)
        if not file.exists():
            write_once(file, _as_json(settings if data is None else {**settings, _DATA: data}))
        if data is not None:
            self.check_data(data)
        # a setting that is newer than the file had its default value
        held = {**_settings(type(study)()), WEIGHTS: settings[WEIGHTS], **self._held_settings()}
        held["pretrained"] = bool(held["pretrained"])  # older files hold the path of the weights
        for name, value in settings.items():
            if held[name] != value:
                raise StudyFolderError(
                    f"{self.path} holds results of a study with {name}={held[name]!r}, not {value!r}; "
                    f"{self._remedy()}."
                )

    def check_data(self, data: str) -> None:
        """Raise if the folder's trials used images with another fingerprint; older folders have none."""
        if (self.path / _SETTINGS).exists() and self._held_settings().get(_DATA, data) != data:
            raise StudyFolderError(
                f"{self.path} holds training runs on other images than those in the data folder; "
                f"{self._remedy()}."
            )

    def _held_settings(self) -> dict[str, Any]:
        file = self.path / _SETTINGS
        try:
            return _read(file)
        except DamagedRecordError:
            raise DamagedRecordError(
                f"{file} is damaged, so the settings of the trials beside it are unknown. Delete it if "
                "you know that they are the same as now, and it is written again; otherwise choose "
                "another folder."
            ) from None

    def _holds_more_than(self, *prefixes: str) -> bool:
        return any(not file.name.startswith(prefixes) for file in self.path.iterdir())

    def _remedy(self) -> str:
        if self._holds_more_than(_SETTINGS, _CLIENTS):
            return "choose another folder"
        return (
            "choose another folder or, if no other program has just started, delete "
            f"{_SETTINGS}, because no trial was trained with it"
        )

    def describe_clients(self, seed: int, dataset: FederatedDataset) -> None:
        """Write a description of the clients of a seed, for the tables."""
        splits = {name: dataset.split(name) for name in SPLITS}
        owner = np.concatenate([rows.codes.cpu().numpy() for rows in splits.values()])
        labels = np.concatenate([rows.labels.cpu().numpy() for rows in splits.values()])
        sizes = ", ".join(f"{name} {len(rows):,}" for name, rows in splits.items())
        record = {"description": f"{describe(owner, labels)}; {sizes}"}
        if self.read(f"{_CLIENTS}{seed}") != record:
            _write_json(self.record_file(f"{_CLIENTS}{seed}"), record)

    def clients(self, study: ImageStudy) -> dict[str, str]:
        """Return the descriptions of the clients by seed; older folders may lack some."""
        found = {seed: self.read(f"{_CLIENTS}{seed}", "description") for seed in study.seeds}
        return {f"seed {seed}": one["description"] for seed, one in found.items() if one}

    def record_file(self, name: str) -> Path:
        """Return the path of a trial's result."""
        return self.path / f"{name}.json"

    def checkpoint(self, name: str) -> Path:
        """Return the path of a trial's checkpoint."""
        return self.path / f"{name}.safetensors"

    def read(self, name: str, *fields: str) -> Record | None:
        """Return a trial's result; ``None`` if its file is missing, damaged, or lacks a field."""
        try:
            return _read(self.record_file(name), *fields)
        except (FileNotFoundError, DamagedRecordError):
            return None

    def run_once(
        self,
        name: str,
        run: Callable[[], Record],
        *fields: str,
        keep_checkpoint: bool = False,
    ) -> Record:
        """Return a trial's result, running the trial only if it has no file yet.

        Args:
            name: name of the trial.
            run: runs the trial and returns its result.
            *fields: fields that the result must have.
            keep_checkpoint: whether to keep the trial's checkpoint.

        Raises:
            DamagedRecordError: the file cannot be read, or lacks a field.
        """
        file = self.record_file(name)
        if not file.is_file():
            _write_json(file, run())
        # also if the file existed, because the program may have been killed before this line
        if not keep_checkpoint:
            self.checkpoint(name).unlink(missing_ok=True)
        return _read(file, *fields)


def _settings(study: ImageStudy) -> dict[str, Any]:
    """Return the settings that all trials of a folder share, as JSON returns them.

    Pretrained weights are identified by the content of their file, so the file may be moved.
    """
    settings = {name: value for name, value in asdict(study).items() if name not in _MAY_DIFFER}
    settings["pretrained"] = study.pretrained is not None
    settings[WEIGHTS] = None
    if study.pretrained is not None:
        try:
            settings[WEIGHTS] = sha256_of(Path(study.pretrained))
        except OSError as error:
            raise ValueError(
                f"The pretrained weights {study.pretrained} cannot be read ({error.strerror}); give "
                "the path of the file that the learners start from."
            ) from None
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _as_json(record: Record) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def _write_json(file: Path, record: Record) -> None:
    write_atomically(file, _as_json(record), shared=True)


def _read(file: Path, *fields: str) -> Record:
    try:
        record = json.loads(file.read_bytes())
    except ValueError:
        record = None
    if not isinstance(record, dict) or any(name not in record for name in fields):
        raise DamagedRecordError(f"{file} is damaged; delete it, and it is computed again.")
    return record


# ---------------------------------------------------------------------- one trial


def tuned_options(record: Mapping[str, Any], *further: str) -> dict[str, Any]:
    """Return the tuned options in a trial's result: those of most studies, and further ones."""
    names = dict.fromkeys((*_TUNED_OPTIONS, *further))
    return {name: record[name] for name in names if name in record}


@dataclass(frozen=True)
class Trial(Generic[StudyT]):
    """One training run of a study."""

    folder: TrialFolder  # the folder of all trials
    name: str  # name of its files
    study: StudyT  # its settings
    method: str  # name of the method
    seed: int  # seed of the federation and of the training run
    chosen: dict[str, Any]  # the tuned options

    @property
    def options(self) -> TrainingOptions:
        """The training options, including the tuned ones."""
        return replace(self.study.options(self.method, self.seed), **self.chosen)

    @property
    def facts(self) -> Record:
        """The first fields of its result."""
        return {"method": self.method, "seed": self.seed, **self.chosen}

    @property
    def checkpoint(self) -> Path:
        """The path of its checkpoint."""
        return self.folder.checkpoint(self.name)

    def train(self, dataset: FederatedDataset, until: int | None = None) -> FederatedModel:
        """Train, or resume from the checkpoint.

        Args:
            dataset: the clients.
            until: round to stop after; ``None`` means the last round.

        Raises:
            KeyboardInterrupt: training was interrupted, so the whole study stops.
        """
        model = train(
            dataset,
            options=self.options,
            checkpoint=Checkpoint(self.checkpoint, _CHECKPOINT_ROUNDS),
            watch_accuracy=_ACCURACY_ROUNDS,
            until=until,
        )
        pass_on_interrupt(model)
        return model
