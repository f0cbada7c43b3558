"""A demonstration of a federation on this machine: one server and four hospitals, one process each.

It uses TLS, one key and one file per hospital, as on five machines. The hospitals mask their sums, so the
server sees totals only. Run it with ``make federation-demo``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedgmm.data.examples import LABEL, NEWCOMER, SITES, write_hospitals
from fedgmm.federation.network.certificates import trial_certificates
from fedgmm.federation.network.keys import new_pair
from fedgmm.runs.folder import read_json

_TIMEOUT = 600.0
_PHASES = {
    "Listening on": "server started",
    "agreed on": "hospitals connected, columns agreed on",
    "round 1:": "started and first round done",
    "handing out the model": "all rounds done",
    "finished:": "models sent to hospitals, report written",
}
"""Texts in the server's log, and the phases that end with them."""


_SETTINGS = """[data]
label = "{label}"
ignore = ["admitted"]

[training]
algorithm = "fedgmm"
components = 3
learners = 3
rounds = {rounds}

[federation]
clients = {sites}

[privacy]
secure_aggregation = true

[privacy.bounds]
age = [0, 120]
systolic = [50, 250]
heart_rate = [20, 220]
glucose = [0, 30]
cholesterol = [0, 15]
bmi = [10, 70]

[privacy.categories]
smoker = ["no", "yes"]
ward = ["emergency", "medical", "surgical"]
{label} = ["healthy", "ill"]
"""
"""The server's settings. Public knowledge declares the columns, because masked sites send no texts."""


@dataclass
class FederationDemo:
    """Folders, commands and times of the demonstration.

    Attributes:
        out: output folder; an earlier demonstration in it is replaced.
        seconds: duration of each phase.
    """

    out: Path
    sites: int = 4
    rounds: int = 15
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the hospitals that take part."""
        return list(SITES)[: self.sites]

    def run(self) -> dict[str, Any]:
        """Run the demonstration, and return the metrics of every hospital by name."""
        started = time.perf_counter()
        self._prepare()
        self.seconds["files, certificate and keys made"] = time.perf_counter() - started
        port = free_port()
        with ExitStack() as stack:
            processes = {"server": self._start(stack, "server", *self._server_arguments(port))}
            for name in self.names:
                processes[name] = self._start(stack, name, *self._client_arguments(name, port))
            self._watch(processes["server"])
            for name, process in processes.items():
                self._wait_for(name, process, 60)
        self._join_later(port)
        found = {name: read_json(self.out / name / "metrics.json") for name in self.names}
        self.seconds["in all"] = time.perf_counter() - started
        return found

    # ------------------------------------------------------------------ commands

    def _prepare(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        write_hospitals(self.out / "data")
        trial_certificates(["127.0.0.1"], self.out / "certificates")
        (self.out / "keys").mkdir()
        for name in [*self.names, NEWCOMER]:
            _, public = new_pair(name, self.out / name)
            # a hospital sends its public key to the administrator of the server
            shutil.copy(public, self.out / "keys")
        (self.out / "federation.toml").write_text(
            _SETTINGS.format(label=LABEL, rounds=self.rounds, sites=self.sites),
            encoding="utf-8",
        )

    def _server_arguments(self, port: int) -> list[str]:
        place = "certificates"
        files = ["--tls-cert", f"{place}/server.crt", "--tls-key", f"{place}/server.key"]
        files += ["--tls-ca", f"{place}/ca.crt", "--keys", "keys"]
        where = ["--host", "127.0.0.1", "--port", str(port)]
        return ["server", "--config", "federation.toml", "--out", "run", *where, *files]

    def _client_arguments(self, name: str, port: int) -> list[str]:
        data = f"data/{name}.csv" if name == NEWCOMER else f"data/site_{name}.csv"
        who = ["--key", f"{name}/{name}.key", "--ca", "certificates/ca.crt"]
        who += ["--peers", "keys", "--min-sites", "3"]
        return ["client", "--server", f"127.0.0.1:{port}", "--data", data, "--out", name, *who]

    def _join_later(self, port: int) -> None:
        """Let a new hospital join: it receives the finished model and learns its own weights."""
        started = time.perf_counter()
        with ExitStack() as stack:
            self._start(stack, "server_again", *self._server_arguments(port))
            arguments = [*self._client_arguments(NEWCOMER, port), "--adapt-only"]
            self._wait_for(NEWCOMER, self._start(stack, NEWCOMER, *arguments), _TIMEOUT)
        self.seconds[f"{NEWCOMER} joined the finished federation"] = time.perf_counter() - started

    # ------------------------------------------------------------------ processes

    def _start(self, stack: ExitStack, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command; the stack ends it if it is still running."""
        print("$ fedgmm", shlex.join(arguments), flush=True)
        log = stack.enter_context((self.out / f"{name}.txt").open("wb"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # six processes share this machine
        command = [sys.executable, "-c", "from fedgmm.cli import main; main()", *arguments]
        process = subprocess.Popen(command, cwd=self.out, stdout=log, stderr=log, env=environment)
        stack.callback(_end, process)
        return process

    def _watch(self, server: subprocess.Popen[bytes]) -> None:
        """Print the server's log, and measure its phases."""
        since = time.perf_counter()
        deadline, line = time.monotonic() + _TIMEOUT, ""
        with (self.out / "server.txt").open(encoding="utf-8", errors="replace") as log:
            while (ended := server.poll() is not None) or time.monotonic() < deadline:
                for part in log:
                    line += part
                    if not line.endswith("\n"):  # the rest is not written yet
                        continue
                    print("  ", line, end="", flush=True)
                    for mark, phase in _PHASES.items():
                        if mark in line and phase not in self.seconds:
                            now = time.perf_counter()
                            self.seconds[phase], since = now - since, now
                    line = ""
                if ended:
                    return
                time.sleep(0.1)
        raise RuntimeError(
            f"The federation does not end within {_TIMEOUT:g} s; see {self.out}/*.txt."
        )

    def _wait_for(self, name: str, process: subprocess.Popen[bytes], seconds: float) -> None:
        if process.wait(seconds):
            raise RuntimeError(f"{name} failed:\n{self._log(name)}")

    def _log(self, name: str) -> str:
        return (self.out / f"{name}.txt").read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    """Run the demonstration and print its times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("federation-demo"))
    parser.add_argument("--sites", type=int, default=4, choices=range(3, len(SITES) + 1))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    demo = FederationDemo(options.out, options.sites, options.rounds)
    found = demo.run()
    print("\nAccuracy on test rows, each hospital with its own model:")
    for name, metrics in found.items():
        print(f"  {name:<12} {100 * metrics['test']['mean_accuracy']:5.1f} %")
    print("\nSeconds:")
    for phase, seconds in demo.seconds.items():
        print(f"  {seconds:6.1f}  {phase}")
    print(f"\nThe server's report: {options.out / 'run' / 'report.html'}")


if __name__ == "__main__":
    main()
