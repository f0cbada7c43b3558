"""Kill the server and the clients of a federation again and again, and run many rounds.

Three parts, each beside an undisturbed run of the same federation:

1. restarts: the server is killed (``kill -9``) at a random time after each of its starts, every other time
   after its next round, while the clients stay. All clients must finish, and the parameters must be equal
   to 1e-10.
2. clients: a random client is killed and started again, while the server stays.
3. soak: many rounds in one go, with the memory of the server and of a client after the first rounds and at
   the end.

Example:
    python benchmarks/federation_endurance.py --restarts 200 --clients 10 --soak 500
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopback_sites import FEW_THREADS, end_all, free_port, make_keys, own_megabytes

_PROGRESS = 20.0  # seconds to wait for the next round
_EXACT = ("--min-rows", 0, "--blur", 0)  # random weights follow from the run's id


@dataclass
class Federation:
    """Processes of a federation on the loopback address, with TLS and keys.

    Attributes:
        home: folder of all files.
        tables: one per site.
        rounds: number of rounds.
    """

    home: Path
    tables: list[Path]
    rounds: int
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from fedgmm.data.examples import LABEL

        self.home.mkdir(parents=True)
        make_keys(self.home, [path.stem for path in self.tables])
        (self.home / "federation.toml").write_text(
            f'[data]\nlabel = "{LABEL}"\n\n[training]\ncomponents = 2\nlearners = 2\n'
            f'rounds = {self.rounds}\ntol = "none"\n\n[federation]\nclients = {len(self.tables)}\n'
        )

    def server(self) -> subprocess.Popen[bytes]:
        """Start the server."""
        tls = self.home / "tls"
        return self._start(
            "server", "server", "--config", self.home / "federation.toml", "--out",
            self.home / "run", "--host", "127.0.0.1", "--port", self.port, "--keys",
            self.home / "keys", "--tls-cert", tls / "server.crt", "--tls-key", tls / "server.key",
            "--tls-ca", tls / "ca.crt",
        )  # fmt: skip

    def client(self, path: Path) -> subprocess.Popen[bytes]:
        """Start the client of a table."""
        return self._start(
            path.stem, "client", "--server", f"127.0.0.1:{self.port}", "--data", path, "--out",
            self.home / path.stem, "--key", self.home / "private" / f"{path.stem}.key", "--ca",
            self.home / "tls" / "ca.crt", *_EXACT,
        )  # fmt: skip

    def _start(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        line = [str(Path(sys.executable).with_name("fedgmm")), *map(str, arguments)]
        with (self.home / f"{name}.txt").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                line, stdout=log, stderr=log, env={**os.environ, **FEW_THREADS}
            )
        return self.processes[name]

    def start_all(self) -> None:
        """Start the server and all clients."""
        self.server()
        for path in self.tables:
            self.client(path)

    def done(self) -> int:
        """Return the number of the last round in the history; -1 before the start is over."""
        path = self.home / "run" / "history.jsonl"
        if not (self.home / "run" / "checkpoint").is_dir():
            return -1
        return sum(1 for _ in path.open()) if path.is_file() else 0

    def finish(self, timeout: float) -> list[str]:
        """Wait for all processes; return what went wrong."""
        deadline, wrong = time.monotonic() + timeout, []
        for name, process in self.processes.items():
            try:
                code = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                tail = (self.home / f"{name}.txt").read_text(errors="replace")[-300:]
                wrong.append(f"{name}: exit code {code}: {tail}")
        return wrong

    def parameters(self) -> dict[str, Any]:
        """Return all arrays of the server's model and of the clients' models."""
        from safetensors.numpy import load_file

        found = {}
        for run in ("run", *(path.stem for path in self.tables)):
            (file,) = (self.home / run / "model").glob("weights-*.safetensors")
            found |= {f"{run}/{name}": value for name, value in load_file(file).items()}
        return found


def difference(one: Federation, other: Federation) -> float:
    """Return the largest difference between the parameters of two federations."""
    import numpy as np

    a, b = one.parameters(), other.parameters()
    if a.keys() != b.keys():
        raise SystemExit("The models have different arrays.")
    return max(float(np.abs(a[n].astype(float) - b[n].astype(float)).max(initial=0.0)) for n in a)


def undisturbed(home: Path, tables: list[Path], rounds: int) -> Federation:
    """Run a federation without any fault."""
    found = Federation(home, tables, rounds)
    try:
        found.start_all()
        if wrong := found.finish(600):
            raise SystemExit("\n".join(wrong))
    finally:
        end_all(found.processes.values())
    return found


def kill_servers(
    federation: Federation, restarts: int, shortest: float, longest: float, seed: int
) -> dict[str, Any]:
    """Kill the server ``restarts`` times, then let it finish."""
    chance, places = random.Random(seed), Counter[str]()
    began = time.monotonic()
    try:
        federation.start_all()
        killed = 0
        while killed < restarts:
            server = federation.processes["server"]
            time.sleep(chance.uniform(shortest, longest))
            if killed % 2:  # every other death comes after some progress
                before, deadline = federation.done(), time.monotonic() + _PROGRESS
                while federation.done() <= before and time.monotonic() < deadline:
                    if server.poll() is not None:
                        break
                    time.sleep(0.02)
            if server.poll() is not None:
                break  # all rounds are over
            server.kill()
            server.wait()
            killed += 1
            done = federation.done()
            agreed = (federation.home / "run" / "federation-start.json").is_file()
            if done < 0:
                places["in the start" if agreed else "before anything was asked"] += 1
            else:
                places["before round 1" if not done else "in the rounds"] += 1
            federation.server()
        wrong = federation.finish(600)
    finally:
        end_all(federation.processes.values())
    return {
        "restarts": killed,
        "places": dict(places),
        "wrong": wrong,
        "rounds": federation.done(),
        "seconds": round(time.monotonic() - began, 1),
    }


def kill_clients(
    federation: Federation, kills: int, shortest: float, longest: float, seed: int
) -> dict[str, Any]:
    """Kill a random client ``kills`` times and start it again, then let all finish."""
    chance, began, killed = random.Random(seed), time.monotonic(), 0
    try:
        federation.start_all()
        while killed < kills:
            time.sleep(chance.uniform(shortest, longest))
            if federation.processes["server"].poll() is not None:
                break
            path = chance.choice(federation.tables)
            process = federation.processes[path.stem]
            if process.poll() is None:
                process.kill()
                process.wait()
                killed += 1
                federation.client(path)
        wrong = federation.finish(600)
    finally:
        end_all(federation.processes.values())
    seconds = round(time.monotonic() - began, 1)
    return {"kills": killed, "wrong": wrong, "rounds": federation.done(), "seconds": seconds}


def soak(federation: Federation) -> dict[str, Any]:
    """Run many rounds, and measure the memory at a tenth of them and near the end."""
    sizes: dict[int, dict[str, float]] = {}
    site = federation.tables[0].stem
    began = time.monotonic()
    try:
        federation.start_all()
        marks = [federation.rounds * k // 10 for k in range(1, 10)]
        for mark in marks:
            while federation.done() < mark and federation.processes["server"].poll() is None:
                time.sleep(0.05)
            sizes[federation.done()] = {
                name: round(own_megabytes(federation.processes[name].pid), 1)
                for name in ("server", site)
            }
        wrong = federation.finish(600)
    finally:
        end_all(federation.processes.values())
    seconds = round(time.monotonic() - began, 1)
    return {"rounds": federation.done(), "megabytes": sizes, "wrong": wrong, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="few restarts and rounds")
    parser.add_argument("--restarts", type=int, default=200, help="deaths of the server")
    parser.add_argument("--kills", type=int, default=20, help="deaths of clients")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=300, help="of the runs with deaths")
    parser.add_argument("--soak", type=int, default=500, help="rounds of the soak")
    parser.add_argument("--between", type=float, nargs=2, default=(0.3, 4.0), metavar="SECONDS",
                        help="time from a start of the server to its death")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--home", type=Path, help="keep all files here")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    if given.quick:
        given.restarts, given.kills, given.clients, given.rounds, given.soak = 3, 2, 3, 20, 20
    with tempfile.TemporaryDirectory() as place:
        home = given.home or Path(place)
        home.mkdir(parents=True, exist_ok=True)
        tables = _tables(home, given.clients)
        results: dict[str, Any] = {"clients": given.clients}
        pool = ThreadPoolExecutor(1)
        plain = None
        if given.restarts or given.kills:  # at the same time, because deaths take long
            plain = pool.submit(undisturbed, home / "plain", tables, given.rounds)
        for name, times, run in (
            ("restarts", given.restarts, kill_servers),
            ("kills", given.kills, kill_clients),
        ):
            if times and plain is not None:
                federation = Federation(home / name, tables, given.rounds)
                found = run(federation, times, *given.between, given.seed)
                found["difference"] = (
                    None if found["wrong"] else difference(plain.result(), federation)
                )
                results[name] = found
                print(name, json.dumps(found), flush=True)
        if given.soak:
            results["soak"] = soak(Federation(home / "soak", tables, given.soak))
            print("soak", json.dumps(results["soak"]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    parts = [results[name] for name in ("restarts", "kills", "soak") if name in results]
    if any(one["wrong"] or (one.get("difference") or 0.0) > 1e-10 for one in parts):
        raise SystemExit("A client did not come back, or the parameters differ.")


def _tables(home: Path, clients: int) -> list[Path]:
    """Write one small table per client."""
    import numpy as np

    from fedgmm.data.examples import LABEL

    found = []
    for number in range(clients):
        rng = np.random.default_rng(number)
        x = rng.normal(size=(60, 3)) + 2.0 * rng.integers(2, size=(60, 1))
        labels = np.where(x.sum(1) + rng.normal(size=60) > 3.0, "ill", "well")
        lines = [f"a,b,c,{LABEL}", *(f"{a:.6f},{b:.6f},{c:.6f},{one}" for (a, b, c), one in
                                     zip(x, labels, strict=True))]  # fmt: skip
        path = home / "data" / f"site{number:02d}.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        found.append(path)
    return found


if __name__ == "__main__":
    main()
