"""``fedgmm watch``: a live page about a run, served from its folder by the standard library.

The page polls ``/state``, which reads only the files of the run folder. So a run needs no option to be
watched, and the page works before the first round, after the last one and after a crash.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedgmm.methods.base import TITLES
from fedgmm.report.page import render_watch
from fedgmm.runs.config import read_config
from fedgmm.runs.folder import RunFolder, as_json, read_history, read_json

PORT = 8642
"""Port of the page, if it is free."""

_QUIET = 10.0  # seconds without a change, after which the lock shows whether a process is at work
_MOST_ROUNDS = 400  # points of a curve
_SHOWN = ("round", "log_likelihood", "validation_accuracy", "seconds", "answered", "epsilon")


def state_of(home: Path) -> dict[str, Any]:
    """Return what the files of a run folder say about the run, for JSON.

    ``status`` is ``"waiting"`` (no run yet), ``"preparing"``, ``"training"``, ``"stopped"`` (no process is
    at work) or ``"finished"``. ``history`` has at most ``_MOST_ROUNDS`` rounds, the last one among them.
    """
    folder = RunFolder(home)
    sections = _or_empty(lambda: read_config(folder.config) if folder.is_run else {})
    metrics = _or_empty(lambda: read_json(folder.metrics) if folder.is_finished else {})
    history: list[dict[str, Any]] = read_history(folder.history)
    training = sections.get("training", {})
    step = max(1, -(-len(history) // _MOST_ROUNDS))
    # every step-th round, counted from the last one
    shown = history[(len(history) - 1) % step :: step] if history else []
    algorithm = str(training.get("algorithm", "fedgmm"))
    reached = metrics.get("test", {}).get("mean_accuracy")  # a server has no headline
    accuracy = None if reached is None else f"Accuracy on test rows: {100 * reached:.1f} %."
    return {
        "name": home.resolve().name,
        "status": _status(folder, metrics, history),
        "method": TITLES.get(algorithm, algorithm) if training else None,
        "rounds": training.get("rounds"),
        "federated": bool(sections.get("federation")),
        "budget": sections.get("privacy", {}).get("epsilon"),
        "history": [
            {name: entry[name] for name in _SHOWN if name in entry} | {"bytes": _bytes_of(entry)}
            for entry in shown
        ],
        "bytes": sum(map(_bytes_of, history)),
        "clients": _clients(history),
        "stopped": metrics.get("stopped"),
        "test": metrics.get("headline") or accuracy,
    }


def _or_empty(read: Any) -> dict[str, Any]:
    """Return what is read, or nothing if the file is being replaced or is damaged."""
    try:
        return dict(read())
    except (OSError, ValueError):
        return {}


def _status(folder: RunFolder, metrics: Mapping[str, Any], history: Sequence[object]) -> str:
    if metrics:
        return "finished"
    files = (
        folder.config,
        folder.history,
        folder.checkpoint,
        folder.selection,
        folder.home / ".lock",
    )
    changed = [path.stat().st_mtime for path in files if path.exists()]
    if not changed:
        return "waiting"
    if time.time() - max(changed) > _QUIET and not folder.in_use:
        return "stopped" if folder.is_run or history else "waiting"
    return "training" if history else "preparing"


def _bytes_of(entry: Mapping[str, Any]) -> float:
    return float(entry.get("bytes_sent") or 0) + float(entry.get("bytes_received") or 0)


def _clients(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rounds, bytes and the last problem of every client of a federation."""
    found: dict[str, dict[str, Any]] = {}
    for entry in history:
        dropped = entry.get("dropped", {})
        for name in {**entry.get("bytes", {}), **dropped}:
            own = found.setdefault(
                name, {"name": name, "answered": 0, "last": None, "bytes": 0, "problem": None}
            )
            sent, received = entry.get("bytes", {}).get(name, (0, 0))
            own["bytes"] += sent + received
            if name in dropped:
                own["problem"] = f"round {entry['round']:.0f}: {dropped[name]}"
            elif received:
                own["answered"] += 1
                own["last"] = entry["round"]
    return [found[name] for name in sorted(found)]


class WatchServer(ThreadingHTTPServer):
    """Serves the page of one run folder.

    Args:
        home: the run folder, which may not exist yet.
        host: address to listen on.
        port: to listen on; ``None`` means ``PORT``, or another one if it is taken.
    """

    daemon_threads = True

    def __init__(self, home: Path, host: str = "127.0.0.1", port: int | None = None) -> None:
        self.home, self.host = home, host
        self.page, self.policy = render_watch(home.resolve().name)
        try:
            super().__init__((host, PORT if port is None else port), _Handler)
        except OSError:
            if port is not None:
                raise
            super().__init__((host, 0), _Handler)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{self.host}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = 10.0  # seconds in which a request must arrive, so that none holds a thread for ever

    def do_GET(self) -> None:
        """Answer a request for the page or the state, and refuse everything else."""
        # A page of another site can make its name lead to this machine, but not change the Host header.
        names = (self.server.host, "localhost", self.connection.getsockname()[0])
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in names}:
            self._send(403, "text/plain", "This address does not belong to the page.\n")
        elif self.path == "/":
            self._send(200, "text/html", self.server.page)
        elif self.path == "/state":
            self._send(200, "application/json", as_json(state_of(self.server.home)))
        else:
            self._send(404, "text/plain", "There is nothing here.\n")

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self.server.policy,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "fedgmm"

    def log_message(self, *_: Any) -> None:
        """Log nothing, because the page asks every second."""
