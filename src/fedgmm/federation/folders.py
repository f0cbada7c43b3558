"""The folders of server and sites: run folders, and what is kept between requests.

``federation/RUN/`` holds a site's personal part after each round that it replied to. The server says
which of them a round starts from, so a repeated request gives the same reply. The server's folder has the
shared model, and nothing from any row.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedgmm.data.dataset import FederatedDataset
from fedgmm.data.embed import Embedding
from fedgmm.data.tables.files import client_name
from fedgmm.data.tables.loading import Tables
from fedgmm.federation.job import SHARED_METRICS, Job
from fedgmm.federation.members import MOST_ROWS
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.federation.wire import Arrays
from fedgmm.files import private_folder, write_atomically
from fedgmm.methods.base import TITLES, AnyMethod
from fedgmm.model.metrics import Evaluation
from fedgmm.model.model import FederatedModel
from fedgmm.nets.devices import environment
from fedgmm.privacy.fixed_point import Elements
from fedgmm.runs.config import RunConfig, read_config
from fedgmm.runs.fitting import finish_run
from fedgmm.runs.folder import (
    RunFolder,
    fingerprints,
    read_history,
    write_history,
    write_json,
    write_metrics,
)
from fedgmm.runs.run import has_common_model
from fedgmm.training.checkpoint import (
    CheckpointError,
    Phase,
    Progress,
    StoredProgress,
    load_progress,
    read_checkpoint,
    save_progress,
)

RUN_ID = re.compile(r"[0-9a-f]{8,64}", flags=re.ASCII)
"""The form of a run's id, which is also the name of a folder."""

_LEFTOVERS = {".lock", "config.toml.part"}
_START = "federation-start.json"


def _training_of(job: Job) -> dict[str, Any]:
    """Return the options for ``config.toml``."""
    return {k: v for k, v in job.options.record().items() if k != "standardise"}


class _Folder:
    """The run folder of a server or a site."""

    def __init__(self, home: Path) -> None:
        self.run = RunFolder(home)
        self._projection = home / "projection.safetensors"

    def clear(self) -> None:
        """Delete the results of an earlier run."""
        for path in (self.run.metrics, self.run.report, self.run.history):
            path.unlink(missing_ok=True)

    def _write_setup(
        self, config: RunConfig, job: Job, facts: Mapping[str, Any], more: str = ""
    ) -> None:
        """Write ``config.toml`` with ``more`` sections, facts about the machine, and the preprocessing."""
        write_atomically(self.run.config, (config.toml() + more).encode())
        write_json(self.run.environment, {**environment(), **facts})
        write_json(self.run.preprocessing, job.preprocessing.record())

    def keep_projection(self, arrays: Arrays) -> None:
        """Keep the principal components, which travel once."""
        write_atomically(self._projection, save(arrays))

    def projection(self) -> Arrays:
        """Return the kept principal components, or no arrays."""
        try:
            return load(self._projection.read_bytes())
        except (OSError, SafetensorError):
            return {}


class SiteFolder(_Folder):
    """A site's run folder."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._states = home / "federation"

    def keep_commitment(self, purpose: str, secret: bytes, vector: Elements) -> None:
        """Keep a vector that the site committed to, so that its owner can open it in a dispute."""
        place = self.run.home / "commitments" / f"{re.sub('[^a-z0-9]+', '-', purpose)}.safetensors"
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret_bytes = np.frombuffer(secret, dtype=np.uint8)
        write_atomically(place, save({"secret": secret_bytes, "vector": vector}))

    def keep_release(self, run: str, place: int, vector: Elements, share: float) -> None:
        """Keep a noisy vector and its noise's deviation, so that a repeated request gets the same noise."""
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
        self.clear()
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

    # ------------------------------------------------------------------ the run folder

    def write_config(
        self, job: Job, path: Path, name: str, embedding: Embedding | None = None
    ) -> None:
        """Write ``config.toml``, the preprocessing, and the fingerprint of the file."""
        self._states.mkdir(parents=True, exist_ok=True)  # marks the folder as a site's
        client = None if client_name(path) == name else name
        table = replace(job.table, client=client)
        config = RunConfig((str(path.resolve()),), table, _training_of(job), embedding=embedding)
        self._write_setup(config, job, {"files": fingerprints([path.resolve()])})

    def write_model(self, model: FederatedModel, tables: Tables, notes: list[str]) -> None:
        """Write the personalised model, its weights and, last of all, the metrics."""
        assert isinstance(model.dataset, FederatedDataset)
        facts: dict[str, Any] = {"selection": None, "notes": [*tables.notes, *notes], "seconds": {}}
        finish_run(self.run, model, model.dataset, tables, facts)


class StartRecord:
    """Requests and totals before the first checkpoint, so that a restarted server asks the same.

    Sites repeat a reply only to an unchanged request. So everything that decides a request is on the disk
    before the request leaves. The totals of the start are deleted with the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _values(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._path.read_text())) if self._path.is_file() else {}
        except (ValueError, TypeError):
            raise FederationError(
                f"{self._path} is damaged; choose another folder to start again."
            ) from None

    def get(self, *path: str) -> Any:
        """Return a value by its keys; ``None`` if it is missing."""
        found: Any = self._values
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def keep(self, *path: str, value: Any) -> None:
        """Write a value under its keys."""
        *parents, last = path
        place = self._values
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
        self._write()

    def restart(self, value: Mapping[str, Any]) -> None:
        """Replace everything."""
        self._values = dict(value)
        self._write()

    def _write(self) -> None:
        private_folder(self._path.parent)
        write_atomically(self._path, json.dumps(self._values).encode())

    def forget(self) -> None:
        """Delete the file."""
        self._values = {}
        self._path.unlink(missing_ok=True)

    def recalled(self, run: str, what: str, compute: Callable[[], Arrays]) -> Arrays:
        """Return float64 arrays of a step of the start, kept by an earlier attempt or computed now."""
        known = self.get("steps", run, what)
        if known is not None:
            return {
                name: np.array(values, dtype=np.float64).reshape(shape)
                for name, (shape, values) in known.items()
            }
        found = compute()
        record = {name: (one.shape, one.ravel().tolist()) for name, one in found.items()}
        self.keep("steps", run, what, value=record)  # JSON keeps every bit of float64
        return found

    def end_start(self, run: str) -> None:
        """Delete what only the start of a run needs."""
        found = [self._values.get(what, {}).pop(run, None) for what in ("names", "steps")]
        if any(one is not None for one in found):
            self._write()


class ServerFolder(_Folder):
    """The server's run folder."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.start = StartRecord(home / _START)

    # ------------------------------------------------------------------ during the run

    def begin(self, settings: FederationSettings, job: Job) -> None:
        """Write the settings and the preprocessing that all sites agreed on."""
        import tomli_w

        self.clear()
        own = "\n" + tomli_w.dumps({"federation": settings.record()})
        self._write_setup(replace(settings.config, training=_training_of(job)), job, {}, own)
        if job.projection is not None:
            self.keep_projection(job.projection_arrays)

    def stored(self) -> StoredProgress | None:
        """Return the checkpoint of an earlier attempt, if there is one."""
        path = self.run.checkpoint
        return read_checkpoint(path) if path.is_file() else None

    def save(self, progress: Progress, history: Sequence[Mapping[str, Any]]) -> None:
        """Write the progress; the checkpoint comes last."""
        write_history(self.run.history, history)
        save_progress(self.run.checkpoint, progress)

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
        # a site, which writes no such report, starts faster without them
        from fedgmm.report.contents import ClientTable, ReportContents
        from fedgmm.report.gathering import convergence, flattened
        from fedgmm.report.page import write_report

        write_results(self.run, job.options.algorithm, model, facts, len(history), figures)
        at_home = "Rows stay with the clients, so only their own reports show it."
        absent = dict.fromkeys(
            ("calibration", "densities", "weights", "projection", "adaptation"), at_home
        )
        if not figures:
            absent["accuracy"] = "No client shared the metrics of its test rows."
        names = tuple(sorted(clients))
        rows = np.array([clients[name] for name in names], dtype=np.int64)
        scores = np.array(
            [[figures.get(n, {}).get(one, np.nan) for n in names] for one in SHARED_METRICS]
        )
        gaussians = None if model is None else model.prediction.gaussians
        contents = ReportContents(
            title=self.run.home.resolve().name,
            method=TITLES.get(job.options.algorithm, job.options.algorithm),
            classes=len(job.preprocessing.labels.classes),
            components=0 if gaussians is None else len(gaussians.means),
            learners=1 if model is None else model.n_learners,
            clients=ClientTable(names, rows, rows, *scores),
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


def write_results(
    folder: RunFolder,
    algorithm: str,
    model: FederatedModel | None,
    facts: Mapping[str, Any],
    rounds: int = 0,
    figures: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Write the shared model, if there is one, and, last of all, the metrics of a finished run."""
    if model is not None and has_common_model(model):
        model.save(folder.model)
    folder.weights.mkdir(parents=True, exist_ok=True)
    splits = {"test": _evaluation(figures).summary()} if figures else None
    write_metrics(
        folder, algorithm=algorithm, rounds=rounds, splits=splits, clients=figures, facts=facts
    )
