"""The server's folder: a run folder with the shared model, and nothing from any row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedgmm.federation.job import SHARED_METRICS, Job
from fedgmm.federation.members import MOST_ROWS
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.federation.wire import Arrays
from fedgmm.files import private_folder, write_atomically
from fedgmm.methods.base import TITLES
from fedgmm.model.metrics import Evaluation
from fedgmm.model.model import FederatedModel
from fedgmm.nets.devices import environment
from fedgmm.report.contents import ClientTable, ReportContents
from fedgmm.report.gathering import convergence, flattened
from fedgmm.report.page import write_report
from fedgmm.runs.config import read_config
from fedgmm.runs.folder import RunFolder, read_history, write_history, write_json, write_metrics
from fedgmm.runs.run import has_common_model
from fedgmm.training.checkpoint import (
    CheckpointError,
    Progress,
    StoredProgress,
    read_checkpoint,
    save_progress,
)

_LEFTOVERS = {".lock", "config.toml.part"}
_START = "federation-start.json"


Arrays64 = dict[str, NDArray[np.float64]]


class StartRecord:
    """Requests and totals before the first checkpoint, so that a restarted server asks the same.

    Sites repeat a reply only to an unchanged request. So everything that decides a request is on the disk
    before the request leaves. The totals of the start are deleted with the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] | None = None

    def _values(self) -> dict[str, Any]:
        if self._known is None:
            self._known = {}
            if self._path.is_file():
                try:
                    self._known = dict(json.loads(self._path.read_text()))
                except (ValueError, TypeError):
                    raise FederationError(
                        f"{self._path} is damaged; choose another folder to start again."
                    ) from None
        return self._known

    def get(self, *path: str) -> Any:
        """Return a value by its keys; ``None`` if it is missing."""
        found: Any = self._values()
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def keep(self, *path: str, value: Any) -> None:
        """Write a value under its keys; ``None`` deletes it."""
        place = self._values()
        for key in path[:-1]:
            place = place.setdefault(key, {})
        if value is None:
            if path[-1] not in place:
                return
            del place[path[-1]]
        else:
            place[path[-1]] = value
        private_folder(self._path.parent)
        write_atomically(self._path, json.dumps(self._values()).encode())

    def restart(self, value: Mapping[str, Any]) -> None:
        """Replace everything."""
        self._known = {}
        for key, one in value.items():
            self.keep(key, value=one)

    def forget(self) -> None:
        """Delete the file."""
        self._known = {}
        self._path.unlink(missing_ok=True)

    def arrays(self, run: str, what: str) -> Arrays64 | None:
        """Return the arrays of a step of the start."""
        found = self.get("steps", run, what)
        if found is None:
            return None
        return {
            name: np.array(values, dtype=np.float64).reshape(shape)
            for name, (shape, values) in found.items()
        }

    def keep_arrays(self, run: str, what: str, arrays: Mapping[str, NDArray[np.float64]]) -> None:
        """Write the arrays of a step of the start; JSON keeps every bit of float64."""
        record = {name: (one.shape, one.ravel().tolist()) for name, one in arrays.items()}
        self.keep("steps", run, what, value=record)


class ServerFolder:
    """The server's run folder."""

    def __init__(self, home: Path) -> None:
        self.run = RunFolder(home)
        self.start = StartRecord(home / _START)

    # ------------------------------------------------------------------ during the run

    def begin(self, settings: FederationSettings, job: Job) -> None:
        """Write the settings and the preprocessing that all sites agreed on."""
        for path in (self.run.metrics, self.run.report, self.run.history):
            path.unlink(missing_ok=True)
        training = {k: v for k, v in job.options.record().items() if k != "standardise"}
        config = replace(settings.config, training=training)
        import tomli_w

        text = config.toml() + "\n" + tomli_w.dumps({"federation": settings.record()})
        write_atomically(self.run.config, text.encode())
        write_json(self.run.environment, environment())
        write_json(self.run.preprocessing, job.preprocessing.record())
        if job.projection is not None:
            write_atomically(self._projection, save(job.projection_arrays))

    @property
    def _projection(self) -> Path:
        return self.run.home / "projection.safetensors"

    def projection(self) -> Arrays:
        """Return the arrays of the principal components; empty without ``pca``."""
        try:
            return load(self._projection.read_bytes()) if self._projection.is_file() else {}
        except SafetensorError as error:
            raise CheckpointError(f"{self._projection} is damaged: {error}.") from None

    def stored(self) -> StoredProgress | None:
        """Return the checkpoint of an earlier attempt, if there is one."""
        path = self.run.checkpoint
        return read_checkpoint(path) if path.is_file() else None

    def save(self, progress: Progress, history: Sequence[Mapping[str, Any]]) -> None:
        """Write the progress; the checkpoint comes last."""
        write_history(self.run.history, history)
        save_progress(self.run.checkpoint, progress)

    def history(self, last: int) -> list[dict[str, Any]]:
        """Return the entries of rounds up to ``last``."""
        return [dict(e) for e in read_history(self.run.history) if e["round"] <= last]

    # ------------------------------------------------------------------ the end

    def finish(
        self,
        model: FederatedModel | None,
        job: Job,
        history: Sequence[Mapping[str, Any]],
        figures: Mapping[str, Mapping[str, float]],
        clients: Mapping[str, int],
        facts: Mapping[str, Any],
    ) -> None:
        """Write the shared model, if there is one, metrics and report.

        ``figures`` are the metrics that sites shared, ``clients`` has the training rows of all sites.
        """
        if model is not None and has_common_model(model):
            model.save(self.run.model)
        (self.run.clients / "weights").mkdir(parents=True, exist_ok=True)
        write_metrics(
            self.run,
            algorithm=job.options.algorithm,
            rounds=len(history),
            splits={"test": _evaluation(figures).summary()} if figures else None,
            clients=figures,
            facts=facts,
        )
        at_home = "Rows stay with the clients, so only their own reports show it."
        absent = dict.fromkeys(
            ("calibration", "densities", "weights", "projection", "adaptation"), at_home
        )
        if not figures:
            absent["accuracy"] = "No client shared the metrics of its test rows."
        names = tuple(sorted(clients))
        scores = np.array(
            [
                [figures.get(name, {}).get(figure, np.nan) for name in names]
                for figure in SHARED_METRICS
            ]
        )
        table = ClientTable(
            names,
            np.array([clients[name] for name in names], dtype=np.int64),
            np.array([clients[name] for name in names], dtype=np.int64),
            *scores,
        )
        gaussians = None if model is None else model.prediction.gaussians
        contents = ReportContents(
            title=self.run.home.resolve().name,
            method=TITLES.get(job.options.algorithm, job.options.algorithm),
            classes=len(job.preprocessing.labels.classes),
            components=0 if gaussians is None else len(gaussians.means),
            learners=1 if model is None else model.n_learners,
            clients=table,
            convergence=convergence([numbers_of(entry) for entry in history], absent),
            configuration=flattened(read_config(self.run.config)),
            environment=flattened(environment()),
            notes=tuple(facts.get("notes", ())),
            absent=absent,
        )
        write_report(contents, self.run.report)
        self.start.forget()


def numbers_of(entry: Mapping[str, Any], *, times: bool = True) -> dict[str, float]:
    """Return the plain numbers of a round's entry, with or without ``seconds``."""
    return {k: v for k, v in entry.items() if isinstance(v, float) and (times or k != "seconds")}


def _evaluation(figures: Mapping[str, Mapping[str, float]]) -> Evaluation:
    names = tuple(sorted(figures))
    accuracy, loss, error = (np.array([figures[n][f] for n in names]) for f in SHARED_METRICS)
    rows = np.array([int(figures[name]["rows"]) for name in names], dtype=np.int64)
    return Evaluation(names, rows, accuracy, loss, error)


def checked_metrics(record: Any) -> dict[str, float] | None:
    """Return a site's metrics of its test rows; ``None`` if they are impossible."""
    if not isinstance(record, Mapping):
        return None
    found: dict[str, float] = {}
    for name in ("rows", *SHARED_METRICS):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            return None
        found[name] = float(value)
    return found if found["accuracy"] <= 1 and 1 <= found["rows"] <= MOST_ROWS else None


def check_home(folder: RunFolder) -> None:
    """Raise unless a folder is empty, or holds an earlier attempt of a federation."""
    if folder.home.exists() and not folder.home.is_dir():
        raise FederationError(f"{folder.home} is a file; choose a folder.")
    if folder.is_run and not read_config(folder.config)["federation"]:
        raise FederationError(f"{folder.home} holds a run of one machine; choose another folder.")
    if folder.is_run or not folder.home.is_dir():
        return
    here = {child.name for child in folder.home.iterdir()} - _LEFTOVERS
    if _START in here:
        return
    if any(not name.startswith((".", "flower", "federation")) for name in here):
        raise FederationError(
            f"{folder.home} is not empty and does not hold a federation; choose another folder."
        )
