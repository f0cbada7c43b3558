"""A site's folder: a run folder, and the states that the site keeps between requests.

``federation/RUN/`` holds the site's personal part after each round that it replied to. The server says
which of them a round starts from, so a repeated request gives the same reply.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.embed import Embedding
from fedgmm.data.tables.files import client_name
from fedgmm.data.tables.loading import Tables
from fedgmm.federation.job import Job
from fedgmm.federation.wire import Arrays
from fedgmm.files import write_atomically
from fedgmm.methods.base import AnyMethod
from fedgmm.model.model import FederatedModel
from fedgmm.nets.devices import environment
from fedgmm.privacy.fixed_point import Elements
from fedgmm.runs.config import RunConfig
from fedgmm.runs.fitting import finish_run
from fedgmm.runs.folder import (
    RunFolder,
    fingerprints,
    read_history,
    read_json,
    write_history,
    write_json,
    write_metrics,
)
from fedgmm.runs.run import has_common_model
from fedgmm.training.checkpoint import (
    CheckpointError,
    Phase,
    Progress,
    load_progress,
    save_progress,
)

RUN_ID = re.compile(r"[0-9a-f]{8,64}", flags=re.ASCII)
"""The form of a run's id, which is also the name of a folder."""


class SiteFolder:
    """A site's run folder."""

    def __init__(self, home: Path) -> None:
        self.run = RunFolder(home)
        self._states = home / "federation"

    def keep_commitment(self, purpose: str, secret: bytes, vector: Elements) -> None:
        """Keep a vector that the site committed to, so that its owner can open it in a dispute."""
        place = self.run.home / "commitments" / f"{re.sub('[^a-z0-9]+', '-', purpose)}.safetensors"
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret_bytes = np.frombuffer(secret, dtype=np.uint8)
        write_atomically(place, save({"secret": secret_bytes, "vector": vector}))

    def keep_release(self, run: str, place: int, vector: Elements, share: float) -> None:
        """Keep a noisy vector, so that the same noise is sent again, and the deviation of its noise."""
        numbers = {"vector": vector, "share": np.array([share])}
        write_atomically(self._release(run, place), save(numbers))

    def release(self, run: str, place: int) -> tuple[Elements, float] | None:
        """Return the kept vector of a release, and the deviation of its noise."""
        path = self._release(run, place)
        if not path.is_file():
            return None
        try:
            found = load(path.read_bytes())
            return found["vector"], float(found["share"][0])
        except (SafetensorError, LookupError):
            return None

    def _release(self, run: str, place: int) -> Path:
        return self._states / run / f"release-{place:06d}.safetensors"

    @property
    def _projection(self) -> Path:
        return self.run.home / "projection.safetensors"

    def keep_projection(self, arrays: Arrays) -> None:
        """Keep the principal components, which the server sends once."""
        write_atomically(self._projection, save(arrays))

    def projection(self) -> Arrays:
        """Return the kept principal components, or no arrays."""
        try:
            return load(self._projection.read_bytes())
        except (OSError, SafetensorError):
            return {}

    # ------------------------------------------------------------------ between requests

    def _state(self, run: str, phase: Phase, number: int) -> Path:
        return self._states / run / f"{phase}-{number:06d}.safetensors"

    def check(self) -> None:
        """Raise ``ValueError`` if the folder is in other use, so that nothing is overwritten."""
        if self.run.is_run and not self._states.is_dir():
            raise ValueError(
                f"{self.run.home} holds a run of one machine; choose another folder with --out."
            )

    def begin(self, run: str) -> None:
        """Delete the states of earlier runs when a new one begins."""
        home = self._states / run
        if home.is_dir():
            return
        shutil.rmtree(self._states, ignore_errors=True)
        self.run.metrics.unlink(missing_ok=True)
        self.run.history.unlink(missing_ok=True)
        self.run.report.unlink(missing_ok=True)
        home.mkdir(parents=True, exist_ok=True)

    def personal(self, run: str, phase: Phase, number: int, method: AnyMethod) -> Any | None:
        """Return the personal part after a round; ``None`` if the site does not have it."""
        path = self._state(run, phase, number)
        if number <= 0 or not path.is_file():
            return None
        try:
            return load_progress(path, method).personal
        except CheckpointError:
            return None

    def keep(self, run: str, progress: Progress, *since: int) -> None:
        """Write the state after a round; of older states only those after ``since`` are needed."""
        path = self._state(run, progress.phase, progress.round)
        save_progress(path, progress)
        needed = {path, *(self._state(run, progress.phase, number) for number in since)}
        for old in path.parent.glob("*.safetensors"):
            if old not in needed:
                old.unlink(missing_ok=True)

    def add_history(self, entry: dict[str, float]) -> None:
        """Add a round; a repeated round replaces its entry and those after it."""
        before = [e for e in read_history(self.run.history) if e["round"] < entry["round"]]
        write_history(self.run.history, [*before, entry])

    def history(self) -> list[dict[str, float]]:
        """Return the entries of the rounds that the site replied to."""
        return read_history(self.run.history)

    # ------------------------------------------------------------------ the run folder

    def write_config(
        self, job: Job, path: Path, name: str, embedding: Embedding | None = None
    ) -> None:
        """Write ``config.toml``, the preprocessing, and the fingerprint of the file."""
        self._states.mkdir(parents=True, exist_ok=True)  # marks the folder as a site's
        client = None if client_name(path) == name else name
        training = {k: v for k, v in job.options.record().items() if k != "standardise"}
        table = replace(job.table, client=client)
        config = RunConfig((str(path.resolve()),), table, training, embedding=embedding)
        write_atomically(self.run.config, config.toml().encode())
        write_json(self.run.environment, {**environment(), "files": fingerprints([path.resolve()])})
        write_json(self.run.preprocessing, job.preprocessing.record())

    def write_model(self, model: FederatedModel, tables: Tables, notes: list[str]) -> None:
        """Write the personalised model, its weights and, last of all, the metrics."""
        assert isinstance(model.dataset, FederatedDataset)
        facts: dict[str, Any] = {"selection": None, "notes": [*tables.notes, *notes], "seconds": {}}
        finish_run(self.run, model, model.dataset, tables, facts)

    def metrics(self) -> dict[str, Any]:
        """Return ``metrics.json``."""
        return dict(read_json(self.run.metrics))


def write_shared_model(folder: RunFolder, model: FederatedModel, facts: Mapping[str, Any]) -> None:
    """Write the model and, last of all, the metrics that mark a finished run."""
    assert has_common_model(model)
    model.save(folder.model)
    (folder.clients / "weights").mkdir(parents=True, exist_ok=True)
    write_metrics(
        folder,
        algorithm=model.algorithm,
        rounds=len(model.history),
        stopped=model.stopped,
        facts=facts,
    )
