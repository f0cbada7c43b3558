"""Flower's programs as children: their environment, their folder, and their end with ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

_PATIENCE = 6.0  # seconds that a child has to end by itself
_LARGEST_LOG = 20_000_000
_LONGEST_LOOK = 200_000
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "PYTHONUNBUFFERED": "1",
}
"""Flower asks nobody for updates, tells nobody of us, and installs nothing."""


class FlowerFolder:
    """Where Flower's own files are, inside the folder of a run or of a site.

    ===============  =======================================================
    ``home/``        Flower's home
    ``log.txt``      what Flower's program said; the last one is ``log.old.txt``
    ``secret``       between our process and Flower's; of this start only
    ``lock``         one process at a time
    ===============  =======================================================
    """

    def __init__(self, out: Path) -> None:
        self.root = (out / "flower").resolve()
        self.home = self.root / "home"
        self.log = self.root / "log.txt"
        self.secret = self.root / "secret"
        self.lock = self.root / "lock"

    def make(self) -> None:
        """Create it, for nobody else's eyes."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        self.secret.unlink(missing_ok=True)
        descriptor = os.open(self.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(32).hex().encode())
        if self.log.is_file() and self.log.stat().st_size > _LARGEST_LOG:
            self.log.replace(self.root / "log.old.txt")


def prepare_environment(folder: FlowerFolder, *direct: str) -> None:
    """Set our own environment as Flower needs it; call it before Flower is imported.

    Args:
        folder: for Flower's files.
        *direct: hosts that are reached without a proxy, whatever the environment says.
    """
    os.environ.update(environment(folder, *direct))


def environment(folder: FlowerFolder, *direct: str) -> dict[str, str]:
    """What Flower's programs are told: to be quiet, and to keep to their folder."""
    own = (*_LOOPBACK, *direct)
    values = {**os.environ, **QUIET, "FLWR_HOME": str(folder.home)}
    for name in ("NO_PROXY", "no_proxy"):  # a proxy has no business between us and our children
        kept = [one for one in values.get(name, "").split(",") if one and one not in own]
        values[name] = ",".join([*kept, *own])
    return values


class Child:
    """One of Flower's programs. It ends when we do, however we end.

    Args:
        module: of this package, run with ``python -m``.
        arguments: of the program.
        folder: where its log goes.
        told: one line to its standard input, for secrets.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], folder: FlowerFolder, told: str = ""
    ) -> None:
        self.folder = folder
        with folder.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if told else log,
                stderr=log,
                env=environment(folder),
                start_new_session=True,  # Ctrl-C is for us; we end our children in order
            )
        # the child watches this pipe: its end is our end
        self._line: IO[bytes] = _present(self._process.stdin)
        if told:
            self.say(told)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it is no longer there."""
        return self._process.poll() is not None

    def say(self, line: str) -> None:
        """One more line to its standard input."""
        self._line.write(line.encode() + b"\n")
        self._line.flush()

    def next_line(self, timeout: float) -> str:
        """What it says on its standard output; empty if it ends or takes too long."""
        output = _present(self._process.stdout)
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(output.readline()), daemon=True)
        reader.start()
        reader.join(timeout)
        return found[0].decode().strip() if found else ""

    @property
    def log_end(self) -> int:
        """How long the log is now."""
        return self.folder.log.stat().st_size

    def said(self, since: int | None = None) -> str:
        """What it wrote into the log since a place of it, or since its start; the last part of it."""
        with self.folder.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start if since is None else since, end - _LONGEST_LOOK))
            return file.read().decode(errors="replace")

    def stop(self) -> None:
        """End it: kindly first."""
        if not self.ended:
            self._process.terminate()
            try:
                self._process.wait(_PATIENCE)
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
    """In a child: watch the pipe to the parent, and end when the parent has.

    Args:
        at_end: called before the end.
        on_line: called with every line that the parent says.
    """

    def watch() -> None:
        rest = b""
        while piece := os.read(0, 65_536):  # not sys.stdin, whose buffer would be locked at the end
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                on_line(line)
        try:
            at_end()
        finally:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def read_told() -> dict[str, Any]:
    """In a child: the JSON line that the parent sent, byte by byte so that the rest stays there."""
    import json

    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(1)
        line += byte
    told: dict[str, Any] = json.loads(line)
    return told


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _present(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
