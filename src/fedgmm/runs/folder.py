"""The layout of a run folder, and who may write into it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedgmm.files import sha256_of, write_atomically


class RunError(ValueError):
    """A run folder that cannot be used, with what to do."""


class RunFolder:
    """Where everything of a run is.

    ===================  ==========================================================
    ``config.toml``      what was asked for; ``fedgmm fit --config`` repeats it
    ``environment.json`` versions, and the files' sizes and checksums
    ``selection.json``   sizes of the mixture that were tried, where ``auto`` was asked for
    ``history.jsonl``    one line a round
    ``checkpoint/``      the last state of the training
    ``model/``           the model, safetensors and JSON
    ``clients/``         each client's weights, and the preprocessing of all
    ``metrics.json``     how good the model is; written last
    ``comparison.json``  baselines on the same rows, where ``fedgmm compare`` was asked
    ``report.html``      the report
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
        self.preprocessing = self.clients / "preprocessing.json"
        self.metrics = home / "metrics.json"
        self.comparison = home / "comparison.json"
        self.report = home / "report.html"

    def client(self, name: str) -> Path:
        """The file of one client; characters that file systems dislike are written as ``%2F``."""
        safe = quote(name, safe=" ()+,=@")
        safe = safe.replace(".", "%2E") if safe.startswith(".") else safe
        if len(safe.encode()) > 150:  # file names have an end
            safe = safe[:60] + "-" + hashlib.sha256(name.encode()).hexdigest()[:16]
        return self.clients / "weights" / f"{safe}.json"

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.is_file()

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.metrics.is_file()

    @property
    def has_progress(self) -> bool:
        """Whether there is something to lose: a training that began, or a model."""
        return self.is_run and (self.checkpoint.is_file() or self.is_finished)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out of the folder; the lock goes with the process, however it ends.

        Raises:
            RunError: another process is at work here, or the folder cannot be written.
        """
        from filelock import FileLock, Timeout

        if self.home.exists() and not self.home.is_dir():
            raise RunError(f"{self.home} is a file; choose another name for the folder.")
        held = FileLock(str(self.home / ".lock"), timeout=0)
        try:
            self.home.mkdir(parents=True, exist_ok=True)
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
                f"The run in {self.home} is not finished, and its training never began; if it was "
                f"interrupted, go on with fedgmm resume {self.home}, else start again with fedgmm fit."
            )
        raise RunError(
            f"The run in {self.home} is not finished; go on with: fedgmm resume {self.home}"
        )


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, as_json(value).encode())


def as_json(value: Any) -> str:
    """JSON as people can read it."""
    return json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The same value with ``None`` for numbers that JSON has no words for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Read a JSON file of a run, which must hold a ``dict``, or what ``kind`` says.

    Raises:
        RunError: a file that is missing or damaged.
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


def read_history(path: Path) -> list[dict[str, float]]:
    """The rounds of ``history.jsonl``, up to a line that a crash cut short."""
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
    """Write ``history.jsonl`` anew."""
    write_atomically(path, "".join(map(history_line, history)).encode())


def history_line(entry: Mapping[str, Any]) -> str:
    """One round, as ``history.jsonl`` has it."""
    return json.dumps(finite(dict(entry)), allow_nan=False) + "\n"


def check_files_unchanged(folder: RunFolder) -> None:
    """Raise :class:`RunError` if a file of the training is gone or has changed since."""
    if not folder.environment.is_file():
        return  # the run ended before it had read its files
    before = read_json(folder.environment).get("files", {})
    for name in before:
        if not Path(name).is_file():
            raise RunError(f"{name} is gone; the run in {folder.home} needs it.")
    now = fingerprints(Path(name) for name in before)
    for name, facts in before.items():
        if now[name] != facts:
            raise RunError(
                f"{name} changed since the run in {folder.home} began; train again with fedgmm fit."
            )


def fingerprints(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size and checksum of files, to see later whether they changed."""
    return {str(path): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
