"""A federation of real processes on the loopback address, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from safetensors.numpy import load_file

from fedgmm.federation.demo import free_port
from fedgmm.federation.network.certificates import trial_certificates
from fedgmm.federation.network.keys import new_pair
from small_runs import draw_rows, write_csv

SITES = ("bergen", "oslo", "tromso")
LINES = """[data]
label = "state"

[training]
components = 2
learners = 2
rounds = {rounds}
{training}

[federation]
clients = {clients}
{federation}
"""


class Federation:
    """Folders, certificates, keys and processes of a federation.

    Args:
        home: where everything is.
        sites: names; each gets a table and a key that the server knows.
    """

    def __init__(self, home: Path, sites: tuple[str, ...] = SITES) -> None:
        self.home = home
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.tls = trial_certificates(["127.0.0.1"], home / "certificates")
        for seed, name in enumerate(sites):
            self.add_site(name, seed)
        self.configure(len(sites))

    def add_site(self, name: str, seed: int) -> None:
        """A table, a private key at the site, and its public half at the server."""
        rows = draw_rows(np.random.default_rng(seed), 60 + 10 * seed, turned=seed % 2 == 1)
        write_csv(self.home / f"{name}.csv", rows)
        _, public = new_pair(name, self.home / "private")
        (self.home / "keys").mkdir(exist_ok=True)
        public.rename(self.home / "keys" / public.name)

    def configure(
        self, clients: int, rounds: int = 4, training: str = "", federation: str = ""
    ) -> None:
        """Write the settings."""
        text = LINES.format(
            clients=clients, rounds=rounds, training=training, federation=federation
        )
        if '"gmm"' in training:  # which has nothing to predict
            text = text.replace('label = "state"\n', "")
        (self.home / "federation.toml").write_text(text)

    # ------------------------------------------------------------------ processes

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process: no threads, an unused home folder and no way out."""
        return {
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.home / "nobody"),  # no process may write there
            "HTTPS_PROXY": "http://127.0.0.1:9",  # no proxy listens there, so calls outside fail
            "HTTP_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1",
        }

    @property
    def server_options(self) -> list[object]:
        """Options of a server with TLS and keys."""
        return [
            "--config", "federation.toml", "--out", "run", "--host", "127.0.0.1",
            "--port", self.port, "--tls-cert", self.tls.certificate, "--tls-key", self.tls.key,
            "--tls-ca", self.tls.authority, "--keys", "keys",
        ]  # fmt: skip

    def client_options(self, name: str) -> list[object]:
        """Options of a site's client with TLS and its key."""
        return [
            "--server", f"127.0.0.1:{self.port}", "--data", f"{name}.csv", "--out", name,
            "--key", f"private/{name}.key", "--ca", self.tls.authority,
            "--min-rows", 0, "--blur", 0,  # exact sums, to compare with one process
        ]  # fmt: skip

    def start(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a command of ``fedgmm``; what it says goes into ``NAME.txt``."""
        return self._run(name, Path(sys.executable).with_name("fedgmm"), *arguments)

    def start_program(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a Python program."""
        return self._run(name, sys.executable, *arguments)

    def _run(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        with (self.home / f"{name}.txt").open("ab") as log:
            process = subprocess.Popen(
                [str(one) for one in command],
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def server(self, *more: object, name: str = "server") -> subprocess.Popen[bytes]:
        """Start the server."""
        return self.start(name, "server", *self.server_options, *more)

    def client(self, name: str, *more: object) -> subprocess.Popen[bytes]:
        """Start the client of a site."""
        return self.start(name, "client", *self.client_options(name), *more)

    def said(self, name: str) -> str:
        """What a process has said."""
        path = self.home / f"{name}.txt"
        return path.read_text(errors="replace") if path.is_file() else ""

    def wait_for(self, name: str, words: str, timeout: float = 60.0, times: int = 1) -> None:
        """Wait until a process has said something; fail with all that it said."""
        deadline = time.monotonic() + timeout
        while self.said(name).count(words) < times:
            process = self.processes[name]
            assert process.poll() is None or self.said(name).count(words) >= times, (
                f"{name} ended without saying {words!r}:\n{self.said(name)}"
            )
            assert time.monotonic() < deadline, f"{name} never said {words!r}:\n{self.all_said()}"
            time.sleep(0.05)

    def ends(self, name: str, timeout: float = 60.0) -> int:
        """The exit code of a process that ends by itself."""
        try:
            return self.processes[name].wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} does not end:\n{self.all_said()}") from None

    def all_said(self) -> str:
        """Everything, for a failed test."""
        return "\n".join(f"--- {name}\n{self.said(name)}" for name in self.processes)

    def freeze(self, name: str) -> None:
        """Stop a process where it is, so that it answers no question."""
        self.processes[name].send_signal(signal.SIGSTOP)

    def kill(self, name: str, children: bool = True) -> list[psutil.Process]:
        """``kill -9``; the children of it are returned, and killed too if asked for."""
        process = psutil.Process(self.processes[name].pid)
        below = process.children(recursive=True)
        for one in [process, *(below if children else [])]:
            one.kill()
        self.processes[name].wait(10)
        return below

    def clean_up(self) -> None:
        """End what is left, and only what was started here."""
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for one in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.wait(10)


def parameters(home: Path) -> dict[str, NDArray[Any]]:
    """All arrays of the model in a run folder, by name."""
    (path,) = (home / "model").glob("weights-*.safetensors")
    return load_file(path)
