"""The run folder: its files, its lock, and how they are read and written."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedgmm.files import private_folder, sha256_of, write_atomically


class RunError(ValueError):
    """A run folder that cannot be used; the message says what to do."""


class RunFolder:
    """The files of a run.

    ===================  ==========================================================
    ``config.toml``      the configuration; ``fedgmm fit --config`` repeats the run
    ``environment.json`` versions, and the size and checksum of each data file
    ``selection.json``   sizes of the mixture that were tried, if they were chosen
    ``history.jsonl``    one line per round
    ``checkpoint/``      the last state of training
    ``model/``           the model, safetensors and JSON
    ``clients/``         each client's weights, and the preprocessing
    ``metrics.json``     the metrics of the model; written last
    ``comparison.json``  results of ``fedgmm compare`` on the same rows
    ``report.html``      the report
    ``card.md``          the model card
    ``vectors/``         vectors of images or texts, if the run embeds them
    ===================  ==========================================================
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.config = home / "config.toml"
        self.environment = home / "environment.json"
        self.selection = home / "selection.json"
        self.history = home / "history.jsonl"
        self.checkpoint = home / "checkpoint" / "progress.safetensors"
        self.model = home / "model"
        self.clients = home / "clients"
        self.weights = self.clients / "weights"
        self.preprocessing = self.clients / "preprocessing.json"
        self.metrics = home / "metrics.json"
        self.comparison = home / "comparison.json"
        self.report = home / "report.html"
        self.card = home / "card.md"
        self.vectors = home / "vectors"

    def client(self, name: str) -> Path:
        """Return the file of one client; special characters in the name are written as ``%2F``."""
        safe = quote(name, safe=" ()+,=@")
        safe = safe.replace(".", "%2E") if safe.startswith(".") else safe
        if len(safe.encode()) > 150:  # file systems limit the length of names
            safe = safe[:60] + "-" + hashlib.sha256(name.encode()).hexdigest()[:16]
        return self.weights / f"{safe}.json"

    @property
    def is_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.is_file()

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return self.metrics.is_file()

    @property
    def has_progress(self) -> bool:
        """Whether there is a checkpoint or a model that could be lost."""
        return self.is_run and (self.checkpoint.is_file() or self.is_finished)

    @property
    def other_files(self) -> set[str]:
        """Names in the folder, without the files of a run that ended before its first step."""
        if not self.home.is_dir():
            return set()
        remains = {".lock", "config.toml.part", self.vectors.name}
        return {child.name for child in self.home.iterdir()} - remains

    def clear(self) -> None:
        """Delete the files of an earlier run."""
        # metrics.json first, config.toml last: a crash in between leaves an unfinished run
        self.metrics.unlink(missing_ok=True)
        for path in (self.checkpoint.parent, self.model, self.clients):
            shutil.rmtree(path, ignore_errors=True)
        for path in (
            self.environment,
            self.selection,
            self.history,
            self.comparison,
            self.report,
            self.card,
            self.config,
        ):
            path.unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out of the folder. The lock ends with the process, even after a crash.

        Raises:
            RunError: another process holds the lock, or the folder cannot be written.
        """
        from filelock import FileLock, Timeout

        if self.home.exists() and not self.home.is_dir():
            raise RunError(f"{self.home} is a file; choose another name for the folder.")
        held = FileLock(str(self.home / ".lock"), timeout=0)
        try:
            private_folder(self.home)
            held.acquire()
        except Timeout:
            raise RunError(
                f"Another process is working in {self.home}; wait for it, or use another folder."
            ) from None
        except OSError as error:
            raise RunError(
                f"Cannot write into {self.home} ({error.strerror or error}); choose another folder."
            ) from None
        try:
            yield
        finally:
            held.release()

    @property
    def in_use(self) -> bool:
        """Whether another process holds the lock. It is taken for an instant to find out."""
        from filelock import FileLock, Timeout

        try:
            with FileLock(str(self.home / ".lock"), timeout=0):
                return False
        except (Timeout, OSError):
            return True

    def need_run(self) -> None:
        """Raise :class:`RunError` if there is no run here."""
        if not self.home.is_dir():
            raise RunError(f"There is no folder {self.home}; train a model with fedgmm fit first.")
        if not self.is_run:
            raise RunError(f"{self.home} is not a run folder: it has no config.toml.")

    def need_finished(self) -> None:
        """Raise :class:`RunError` if the run has no model yet."""
        self.need_run()
        if self.is_finished:
            return
        if not self.has_progress:
            raise RunError(
                f"The run in {self.home} stopped before training; resume it with fedgmm resume "
                f"{self.home}, or start again with fedgmm fit."
            )
        raise RunError(
            f"The run in {self.home} is not finished; resume it with: fedgmm resume {self.home}"
        )


def write_metrics(
    folder: RunFolder,
    *,
    algorithm: str,
    rounds: int,
    stopped: str | None = None,
    splits: Mapping[str, Mapping[str, float]] | None = None,
    clients: Mapping[str, Mapping[str, float]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write ``metrics.json``, which marks a run as finished, so it must be the last file of a run.

    Args:
        folder: the run folder.
        algorithm: the method.
        rounds: number of rounds.
        stopped: why training ended early.
        splits: metrics over all clients, per split (``train``, ``validation``, ``test``).
        clients: metrics of each client.
        facts: further entries, such as ``selection``, ``notes`` and ``seconds``.
    """
    metrics = {
        "algorithm": algorithm,
        "rounds": rounds,
        "stopped": stopped,
        **(splits or {}),
        "clients": clients or {},
        "selection": None,
        **(facts or {}),
    }
    write_json(folder.metrics, metrics)


# ------------------------------------------------------------------ JSON


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, as_json(value).encode())


def as_json(value: Any) -> str:
    """Return indented JSON."""
    return json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Return the same value with ``None`` for NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Read a JSON file of a run, which must hold a value of type ``kind``.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"Cannot read {path} ({error.strerror}).") from None
    except (ValueError, RecursionError):
        raise RunError(f"{path} is damaged: it is not JSON.") from None
    if not isinstance(value, kind):
        raise RunError(f"{path} is damaged: it should hold a {kind.__name__}.")
    return value


# ------------------------------------------------------------------ history


def read_history(path: Path) -> list[dict[str, float]]:
    """Read the rounds of ``history.jsonl``, up to a line that a crash cut short."""
    entries: list[dict[str, float]] = []
    if not path.is_file():
        return entries
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not isinstance(entry, dict) or "round" not in entry:
            break
        entries.append(entry)
    return entries


def write_history(path: Path, history: Iterable[Mapping[str, Any]]) -> None:
    """Replace ``history.jsonl``."""
    write_atomically(path, "".join(map(history_line, history)).encode())


def history_line(entry: Mapping[str, Any]) -> str:
    """Return the line of ``history.jsonl`` for one round."""
    return json.dumps(finite(entry), allow_nan=False) + "\n"


# ------------------------------------------------------------------ data files


def fingerprints(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of files, to notice later changes."""
    return {str(path): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}


def is_data_file(folder: RunFolder, path: Path) -> bool:
    """Return whether a file has the content of one that the run was trained on."""
    if not folder.environment.is_file() or not path.is_file():
        return False
    known = read_json(folder.environment).get("files", {}).values()
    if path.stat().st_size not in {facts["bytes"] for facts in known}:
        return False
    return sha256_of(path) in {facts["sha256"] for facts in known}


def check_files_unchanged(folder: RunFolder) -> None:
    """Raise :class:`RunError` if a data file of the run is missing or has changed."""
    if not folder.environment.is_file():
        return  # the run ended before it had read its files
    before = read_json(folder.environment).get("files", {})
    for name in before:
        if not Path(name).is_file():
            raise RunError(f"{name} is missing; the run in {folder.home} needs it.")
    now = fingerprints(map(Path, before))
    for name, facts in before.items():
        if now[name] != facts:
            raise RunError(
                f"{name} changed since the run in {folder.home} began; train again with fedgmm fit."
            )
