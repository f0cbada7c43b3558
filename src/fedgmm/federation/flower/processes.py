"""Flower's programs as child processes: environment, folder, and a common end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_STOP_TIMEOUT = 6.0  # seconds between a request to end and a kill
_LARGEST_LOG = 20_000_000
_LOG_TAIL = 200_000
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "PYTHONUNBUFFERED": "1",
}
"""Settings that stop Flower from checking for updates, sending telemetry and installing packages."""


class FlowerFolder:
    """The folder of Flower's files inside the folder of a run or a site.

    ===============  =======================================================
    ``home/``        Flower's home
    ``log.txt``      log of Flower's program; an older one is ``log.old.txt``
    ``secret``       shared by our process and Flower's; new at every start
    ``lock``         allows one process at a time
    ===============  =======================================================
    """

    def __init__(self, out: Path) -> None:
        self.root = (out / "flower").resolve()
        self.home = self.root / "home"
        self.log = self.root / "log.txt"
        self.secret = self.root / "secret"
        self.lock = self.root / "lock"

    def make(self) -> None:
        """Create the folder, readable by its owner only, with a new secret."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        self.secret.unlink(missing_ok=True)
        descriptor = os.open(self.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(32).hex().encode())
        if self.log.is_file() and self.log.stat().st_size > _LARGEST_LOG:
            self.log.replace(self.root / "log.old.txt")


def prepare_environment(folder: FlowerFolder, *direct: str) -> None:
    """Set the environment variables of this process for Flower; call it before Flower is imported.

    Args:
        folder: folder of Flower's files.
        *direct: hosts that are reached without a proxy, regardless of the environment.
    """
    os.environ.update(environment(folder, *direct))


def environment(folder: FlowerFolder, *direct: str) -> dict[str, str]:
    """Return the environment of Flower's programs: no telemetry, no proxy, files in their folder."""
    own = (*_LOOPBACK, *direct)
    values = {**os.environ, **QUIET, "FLWR_HOME": str(folder.home)}
    for name in ("NO_PROXY", "no_proxy"):  # child processes are on this machine
        kept = [one for one in values.get(name, "").split(",") if one and one not in own]
        values[name] = ",".join([*kept, *own])
    return values


class Child:
    """One of Flower's programs as a child process, which ends with its parent in all cases.

    Args:
        module: module of this package, run with ``python -m``.
        arguments: arguments of the program.
        folder: folder of its log.
        first_line: line for its standard input, which may hold secrets.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], folder: FlowerFolder, first_line: str = ""
    ) -> None:
        self.folder = folder
        with folder.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if first_line else log,
                stderr=log,
                env=environment(folder),
                start_new_session=True,  # Ctrl-C is for the parent, which ends its children in order
            )
        # the child watches this pipe, which closes when the parent ends
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        if first_line:
            self.send_line(first_line)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def send_line(self, line: str) -> None:
        """Write a line to the standard input of the process."""
        self._stdin.write(line.encode() + b"\n")
        self._stdin.flush()

    def read_line(self, timeout: float) -> str:
        """Read a line of its standard output; empty if the process ends or the timeout passes."""
        output = self._process.stdout
        assert output is not None
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(output.readline()), daemon=True)
        reader.start()
        reader.join(timeout)
        return found[0].decode().strip() if found else ""

    @property
    def log_end(self) -> int:
        """Length of the log in bytes."""
        return self.folder.log.stat().st_size

    def log_text(self, since: int | None = None) -> str:
        """Return the end of the log, from a position or from the start of the process on."""
        with self.folder.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start if since is None else since, end - _LOG_TAIL))
            return file.read().decode(errors="replace")

    def stop(self) -> None:
        """End the process; kill it if it does not end in time."""
        if not self.ended:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def end_with_parent(
    at_end: Callable[[], None] = lambda: None, on_line: Callable[[bytes], None] = lambda _: None
) -> None:
    """In a child process: end when the parent ends.

    Args:
        at_end: called before the end.
        on_line: called with every line that the parent sends.
    """

    def watch() -> None:
        rest = b""
        while piece := os.read(0, 65_536):  # sys.stdin's buffer would be locked at exit
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                on_line(line)
        try:
            at_end()
        finally:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def read_first_line() -> dict[str, Any]:
    """In a child process: return the parent's first line, which is JSON, and leave the rest unread."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(1)
        line += byte
    values: dict[str, Any] = json.loads(line)
    return values


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
