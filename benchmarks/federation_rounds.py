"""A round over the network beside the same round in one process, and the bytes on the wire.

Three measurements, all on this machine:

1. One FedGMM training run of four hospitals, in one process (``fedgmm fit``) and as a federation of real
   processes on the loopback address with TLS and keys (``fedgmm server``, ``fedgmm client``). Both must
   end with the same parameters before their times are compared.
2. Bytes to and from a client in a round, for every method, as the server counts them. Sites in memory
   replace the processes, and the count of FedGMM is compared with that of the real run.
3. Exchanges of growing payloads between a server and real clients that send them back. A proxy
   counts the bytes on the wire, with TLS and HTTP/2.

    python benchmarks/federation_rounds.py            # a few minutes
    python benchmarks/federation_rounds.py --quick    # under a minute
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loopback_sites import (
    FEW_THREADS,
    MOST_SECONDS,
    cpu_seconds,
    echoing_sites,
    end_all,
    exchange,
    free_port,
    make_keys,
    own_megabytes,
)

METHODS = ("fedgmm", "fedem", "fedavg", "fedprox", "fedavg+", "local", "clustered", "pfedme")
SIZE = {"components": 3, "learners": 3}


@dataclass
class Side:
    """Measurements of one side: one process, or a federation.

    Attributes:
        startup: seconds until the first round begins; for the federation, with all processes.
        rounds: seconds of each round.
        cpu_round: CPU seconds per round, of all processes together.
        cpu: CPU seconds of the whole run.
        megabytes: unshared memory by process.
    """

    startup: float
    rounds: list[float]
    cpu_round: float
    cpu: float
    megabytes: dict[str, float] = field(default_factory=dict)

    @property
    def round(self) -> float:
        """Median seconds of a round."""
        return statistics.median(self.rounds)


def write_files(home: Path, clients: int) -> list[Path]:
    """Write the tables of the given number of hospitals."""
    from fedgmm.data.examples import write_hospitals

    tables = [path for path in write_hospitals(home / "data") if path.name.startswith("site_")]
    return tables[:clients]


# ---------------------------------------------------------------------- 1. both sides of a training run


def in_process(files: Sequence[Path], out: Path, rounds: int) -> Side:
    """Run ``fit`` in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return Side(**pool.apply(_fit, ([str(path) for path in files], str(out), rounds)))


def _fit(files: list[str], out: str, rounds: int) -> dict[str, Any]:
    os.environ.update(FEW_THREADS)
    began = time.perf_counter()
    import torch

    torch.set_num_threads(1)
    from fedgmm.data.examples import LABEL
    from fedgmm.runs import fit

    marks = [(time.perf_counter(), time.process_time())]

    def note(*_: Any) -> None:
        marks.append((time.perf_counter(), time.process_time()))

    fit(files, LABEL, out, rounds=rounds, tol=None, on_round=[note], **SIZE)
    walls = [wall for wall, _ in marks]
    later = [after - before for before, after in itertools.pairwise(walls[1:])]
    return {
        "startup": walls[1] - began - statistics.median(later),
        "rounds": later,
        "cpu_round": (marks[-1][1] - marks[1][1]) / len(later),
        "cpu": time.process_time(),
    }


@dataclass
class Federation:
    """Processes of a federation on the loopback address, with TLS and keys.

    Attributes:
        home: folder of all files.
        tables: one per site.
        rounds: number of rounds.
    """

    home: Path
    tables: Sequence[Path]
    rounds: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self) -> Side:
        """Train, and measure the processes."""
        self._prepare()
        began = time.perf_counter()
        port = free_port()
        tls = [f"--tls-{one}={self.home}/tls/{file}" for one, file in
               (("cert", "server.crt"), ("key", "server.key"), ("ca", "ca.crt"))]  # fmt: skip
        try:
            self._start("server", "--config", self.home / "federation.toml", "--out",
                        self.home / "run", "--host", "127.0.0.1", "--port", port, *tls, "--keys",
                        self.home / "keys")  # fmt: skip
            for path in self.tables:
                self._start("client", "--server", f"127.0.0.1:{port}", "--data", path, "--out",
                            self.home / path.stem, "--key", self.home / "private" / f"{path.stem}.key",
                            "--ca", self.home / "tls" / "ca.crt", "--min-rows", 0, "--blur", 0,
                            name=path.stem)  # fmt: skip
            return self._measured(began)
        finally:
            end_all(self.processes.values())

    def _prepare(self) -> None:
        from fedgmm.data.examples import LABEL

        make_keys(self.home, [path.stem for path in self.tables])
        (self.home / "federation.toml").write_text(
            f'[data]\nlabel = "{LABEL}"\n\n[training]\ncomponents = {SIZE["components"]}\n'
            f'learners = {SIZE["learners"]}\nrounds = {self.rounds}\ntol = "none"\n\n'
            f"[federation]\nclients = {len(self.tables)}\n"
        )

    def _start(self, command: str, *arguments: object, name: str = "") -> None:
        line = [str(Path(sys.executable).with_name("fedgmm")), command, *map(str, arguments)]
        with (self.home / f"{name or command}.txt").open("wb") as log:
            self.processes[name or command] = subprocess.Popen(
                line, stdout=log, stderr=log, env={**os.environ, **FEW_THREADS}
            )

    def _measured(self, began: float) -> Side:
        self._wait_for("round 1: log-likelihood")
        first = time.perf_counter()
        cpu_then = sum(self._cpu().values())
        self._wait_for(f"round {self.rounds}: log-likelihood")
        cpu_now = self._cpu()
        megabytes = {name: own_megabytes(one.pid) for name, one in self.processes.items()}
        for name, process in self.processes.items():
            if process.wait(MOST_SECONDS):
                raise SystemExit(f"{name} failed:\n{self._output(name)}")
        lines = (self.home / "run" / "history.jsonl").read_text().splitlines()
        totals = [json.loads(line)["seconds"] for line in lines]
        rounds = [totals[0], *(b - a for a, b in itertools.pairwise(totals))]
        return Side(
            startup=first - began - rounds[0],
            rounds=rounds[1:],
            cpu_round=(sum(cpu_now.values()) - cpu_then) / (self.rounds - 1),
            cpu=sum(cpu_now.values()),
            megabytes=megabytes,
        )

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_seconds(one.pid) for name, one in self.processes.items()}

    def _output(self, name: str) -> str:
        return (self.home / f"{name}.txt").read_text(errors="replace")

    def _wait_for(self, words: str) -> None:
        deadline = time.monotonic() + MOST_SECONDS
        while words not in self._output("server"):
            gone = [name for name, one in self.processes.items() if one.poll()]
            if gone or time.monotonic() > deadline:
                raise SystemExit(
                    f"The run stopped: {[self._output(n) for n in gone or ['server']]}"
                )
            time.sleep(0.05)

    def bytes_per_round(self) -> tuple[float, float]:
        """Return the bytes to and from each client in the last round, as the server counted them."""
        entry = json.loads((self.home / "run" / "history.jsonl").read_text().splitlines()[-1])
        clients = len(entry["bytes"])
        return entry["bytes_sent"] / clients, entry["bytes_received"] / clients


def check_same_model(here: Path, there: Path) -> float:
    """Return the largest difference between the parameters of two runs."""
    import numpy as np
    from safetensors.numpy import load_file

    (one,), (two,) = (list((run / "model").glob("weights-*.safetensors")) for run in (here, there))
    a, b = load_file(one), load_file(two)
    apart = max(
        float(np.abs(a[name].astype(float) - b[name].astype(float)).max())
        for name in a
        if a[name].size and name in b and a[name].shape == b[name].shape
    )
    if apart > 1e-5:
        raise SystemExit(f"The two sides disagree: parameters differ by {apart:.3g}.")
    return apart


# ---------------------------------------------------------------------- 2. bytes of every method


class SitesInMemory:
    """Sites that reply at once, in this process."""

    def __init__(self, files: Sequence[Path], home: Path) -> None:
        from fedgmm.federation.site import Site, SiteSettings

        self._sites = {
            path.stem: Site(SiteSettings((path,), home / "sites" / path.stem, min_rows=0, blur=0.0))
            for path in files
        }

    def nodes(self) -> list[str]:
        """Return the names of the sites."""
        return list(self._sites)

    def ask(self, requests: Mapping[str, Any], timeout: float) -> Iterator[tuple[str, Any]]:
        """Yield the replies of the sites."""
        for node, request in requests.items():
            yield node, self._sites[node].reply(request)


def bytes_of(files: Sequence[Path], home: Path, **training: Any) -> tuple[float, float]:
    """Return the bytes to and from a client in a round of a method, from the server's history."""
    from fedgmm.data.examples import LABEL
    from fedgmm.data.tables.preprocessing import TableOptions
    from fedgmm.federation.server import run_federation
    from fedgmm.federation.settings import FederationSettings
    from fedgmm.runs.config import RunConfig

    precision = training.pop("wire", "float32")
    unlabelled = training["algorithm"] == "gmm"
    table = TableOptions(None, ignore=(LABEL,)) if unlabelled else TableOptions(LABEL)
    config = RunConfig((), table, {**SIZE, "rounds": 2, "tol": None, **training})
    settings = FederationSettings(config, len(files), precision=precision)
    run_federation(settings, SitesInMemory(files, home), home / "run")
    entry = json.loads((home / "run" / "history.jsonl").read_text().splitlines()[-1])
    return entry["bytes_sent"] / len(files), entry["bytes_received"] / len(files)


# ---------------------------------------------------------------------- tables


def main() -> None:
    from rich.console import Console

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    quick = arguments.quick
    clients, rounds, repeats = (2, 3, 2) if quick else (4, 30, 5)
    sizes = (10_000, 1_000_000) if quick else (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: dict[str, Any] = {"clients": clients}
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        files = write_files(home, clients)
        (home / "federation").mkdir()
        here = in_process(files, home / "here", rounds)
        federation = Federation(home / "federation", files, rounds)
        there = federation.run()
        apart = check_same_model(home / "here", home / "federation" / "run")
        results |= {"in_process": asdict(here), "federation": asdict(there), "apart": apart}
        console.print(_training_table(here, there, clients, rounds, apart))

        variants = {name: {"algorithm": name} for name in METHODS}
        variants["gmm"] = {"algorithm": "gmm"}  # no learners, and no labels
        more = {"algorithm": "fedgmm", "learner": "mlp"}
        variants |= {"fedgmm, mlp": more, "fedgmm, mlp, float16": {**more, "wire": "float16"}}
        counts = {}
        for number, (title, training) in enumerate(variants.items()):
            counts[title] = bytes_of(files, home / f"bytes-{number}", **training)
            shutil.rmtree(home / f"bytes-{number}")
        results["bytes"] = counts
        real = federation.bytes_per_round()
        console.print(_bytes_table(counts, real))
        if any(abs(a - b) > 200 for a, b in zip(counts["fedgmm"], real, strict=True)):
            raise SystemExit(f"Sites in memory count {counts['fedgmm']}, processes {real}.")

        (home / "echo").mkdir()
        names = [f"site{number}" for number in range(clients)]
        with echoing_sites(home / "echo", names) as (sites, counted):
            exchange(sites, counted, 1000, 2)  # warms up
            payloads = [exchange(sites, counted, size, repeats) for size in sizes]
        results["payloads"] = payloads
        console.print(_payload_table(payloads, clients))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    print(f"overhead: {there.round - here.round:.2f} s per round, {there.round / here.round:.1f}x")


def _training_table(here: Side, there: Side, clients: int, rounds: int, apart: float) -> Any:
    from rich.table import Table

    table = Table(
        title=f"FedGMM 3x3, {clients} hospitals, {rounds} rounds; parameters agree to {apart:.0e}"
    )
    for column in ("", "start-up s", "s per round", "slowest", "CPU s per round", "CPU s in total"):
        table.add_column(column, justify="right" if column else "left")
    for name, side in (("one process", here), ("federation", there)):
        table.add_row(name, f"{side.startup:.1f}", f"{side.round:.3f}", f"{max(side.rounds):.3f}",
                      f"{side.cpu_round:.3f}", f"{side.cpu:.1f}")  # fmt: skip
    table.add_row("overhead", f"{there.startup - here.startup:.1f}",
                  f"{there.round - here.round:.3f}", "", f"{there.cpu_round - here.cpu_round:.3f}",
                  f"{there.cpu - here.cpu:.1f}")  # fmt: skip
    table.add_row("ratio", "", f"{there.round / here.round:.0f}x", "",
                  f"{there.cpu_round / here.cpu_round:.0f}x", "")  # fmt: skip
    table.caption = "memory, MB: " + ", ".join(
        f"{name} {size:.0f}" for name, size in there.megabytes.items()
    )
    return table


def _bytes_table(counts: Mapping[str, tuple[float, float]], real: tuple[float, float]) -> Any:
    from rich.table import Table

    table = Table(title="Bytes to and from a client in a round (sites in memory)")
    for column in ("method", "to a client", "from a client"):
        table.add_column(column, justify="right" if column != "method" else "left")
    for title, (sent, received) in counts.items():
        table.add_row(title, f"{sent:.0f}", f"{received:.0f}")
    table.add_row("fedgmm, real processes", f"{real[0]:.0f}", f"{real[1]:.0f}")
    return table


def _payload_table(payloads: Sequence[Mapping[str, float]], clients: int) -> Any:
    from rich.table import Table

    table = Table(title=f"An exchange with {clients} clients, by bytes to and from each")
    for column in (
        "bytes",
        "seconds",
        "MB/s through the server",
        "on the wire to a client",
        "from it",
    ):
        table.add_column(column, justify="right")
    for one in payloads:
        speed = 2 * one["bytes"] * clients / one["seconds"] / 1e6
        table.add_row(f"{one['bytes']:.0f}", f"{one['seconds']:.2f}", f"{speed:.2f}",
                      f"{one['wire_to_client']:.0f}", f"{one['wire_to_server']:.0f}")  # fmt: skip
    return table


if __name__ == "__main__":
    main()
