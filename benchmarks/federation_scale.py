"""Limits of one federation server: clients, payloads, memory.

Two measurements:

1. The server's own work, without a network. Many sites send copies of the replies of one real site.
   Every reply is checked and added as in a real run. Each size runs in its own process; memory is
   the peak of that process without the imports.
2. The gRPC server behind TLS and keys, with many light sites in two other processes. They prove their
   keys and reply like real sites, but hold no rows. Measured are the seconds of an exchange, the CPU
   seconds and the memory of the server's process.

    python benchmarks/federation_scale.py            # some minutes
    python benchmarks/federation_scale.py --quick    # under a minute
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loopback_sites import (
    FEW_THREADS,
    MOST_SECONDS,
    end_with_parent,
    exchange,
    free_port,
    listening,
    make_keys,
    reply_of,
)

ROUNDS = 4
REPEATS = 3


@dataclass(frozen=True)
class Load:
    """The load of a server.

    Attributes:
        clients: number of clients.
        columns: number of columns of the table; with ``learner`` they decide the payload.
        learner: kind of learner.
    """

    clients: int
    columns: int = 9
    learner: str = "linear"


# ---------------------------------------------------------------------- 1. the server alone


class Copies:
    """One real site, and many copies that reply the same under other names."""

    def __init__(self, site: Any, clients: int) -> None:
        self._site = site
        self._names = [f"site{number:05d}" for number in range(clients)]
        self.waited = 0.0

    def nodes(self) -> list[str]:
        """Return the names of all sites."""
        return self._names

    def ask(self, requests: Mapping[str, Any], timeout: float) -> Iterator[tuple[str, Any]]:
        """Yield the replies of all sites, each with its own arrays, as after a transfer."""
        made: dict[Any, Any] = {}
        for node, request in requests.items():
            began = time.perf_counter()
            kind = (request.kind, request.facts.get("most_rows"))
            if kind not in made:
                self._site._policy.forget()  # it stands for sites that are asked differently
                made[kind] = self._site.reply(request)
            reply = made[kind]
            facts = {**reply.facts, "name": node, "ticket": request.facts["ticket"]}
            arrays = {name: value.copy() for name, value in reply.arrays.items()}
            self.waited += time.perf_counter() - began
            yield node, replace(reply, arrays=arrays, facts=facts)


def server_alone(load: Load) -> dict[str, float]:
    """Measure seconds and memory of the server's part of a round, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_serve, (load,))


def _serve(load: Load) -> dict[str, float]:
    os.environ.update(FEW_THREADS)
    import torch

    torch.set_num_threads(1)
    import sklearn.cluster  # noqa: F401 - the start needs it

    from fedgmm.data.tables.preprocessing import TableOptions
    from fedgmm.federation.server import run_federation
    from fedgmm.federation.settings import FederationSettings
    from fedgmm.federation.site import Site, SiteSettings
    from fedgmm.runs.config import RunConfig

    imported = _peak()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        _write_table(home / "site00000.csv", load.columns)
        training = {
            "components": 3, "learners": 3, "rounds": ROUNDS, "tol": None, "learner": load.learner,
            "covariance_type": "full" if load.columns < 50 else "diag",
        }  # fmt: skip
        sites = Copies(
            Site(SiteSettings((home / "site00000.csv",), home / "site", min_rows=0, blur=0.0)),
            load.clients,
        )
        config = RunConfig((), TableOptions("label"), training)
        waits: list[tuple[float, float]] = []

        def notify(line: str) -> None:
            if line.startswith("round "):
                waits.append((sites.waited, time.process_time()))

        run_federation(FederationSettings(config, load.clients), sites, home / "run", notify=notify)
        entries = [json.loads(line) for line in (home / "run" / "history.jsonl").open()]
    totals = [entry["seconds"] for entry in entries]
    own = [
        totals[at] - totals[at - 1] - (waits[at][0] - waits[at - 1][0])
        for at in range(1, len(totals))
    ]
    return {
        "clients": load.clients,
        "bytes_sent": entries[-1]["bytes_sent"] / load.clients,
        "bytes_received": entries[-1]["bytes_received"] / load.clients,
        "seconds": statistics.median(own),
        "megabytes": _peak() - imported,
    }


def _write_table(path: Path, columns: int) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    values = rng.normal(size=(200, columns))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{number}" for number in range(columns)), "label"])
        for row in values.round(4).tolist():
            writer.writerow([*row, "yes" if row[0] > 0 else "no"])


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------------- 2. many sites on the network


def light_sites(home: str, names: Sequence[str], port: int) -> None:
    """Run many sites in one process, one stream each, until the server sends ``stop``."""
    end_with_parent()
    asyncio.run(_all_sites(Path(home), names, port))


async def _all_sites(home: Path, names: Sequence[str], port: int) -> None:
    few = asyncio.Semaphore(32)  # handshakes at the same time
    await asyncio.gather(*(_light_site(home, name, port, few) for name in names))


async def _light_site(home: Path, name: str, port: int, few: asyncio.Semaphore) -> None:
    import grpc
    from grpc import aio

    from fedgmm.federation.messages import LARGEST_MESSAGE, PROTOCOL
    from fedgmm.federation.network.keys import check_private_key, read_private_key
    from fedgmm.federation.network.stream import (
        COMMON_OPTIONS,
        METHOD,
        SERVICE,
        Assembler,
        greeting,
        pieces,
        read_greeting,
        sign,
    )

    key, host = home / "private" / f"{name}.key", "127.0.0.1"
    credentials = grpc.ssl_channel_credentials((home / "tls" / "ca.crt").read_bytes())
    options = [*COMMON_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with aio.secure_channel(f"{host}:{port}", credentials, options) as channel:
        async with few:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            challenge = read_greeting(await call.read())["challenge"]
            await call.write(
                greeting(
                    protocol=PROTOCOL,
                    instance=name,
                    key=check_private_key(key).pem,
                    host=host,
                    proof=sign(read_private_key(key), challenge, host),
                )
            )
            read_greeting(await call.read())
        assembler = Assembler(LARGEST_MESSAGE)
        while True:
            found = assembler.add(await call.read())
            if found is None:
                continue
            number, request = found
            for piece in pieces(reply_of(name, request), number):
                await call.write(piece)
            if request.kind == "stop":
                await call.done_writing()
                return


@contextlib.contextmanager
def many_sites(home: Path, clients: int) -> Iterator[Any]:
    """Start a server with light sites; yield its sites."""
    from fedgmm.federation.messages import Message

    names = [f"site{number:05d}" for number in range(clients)]
    make_keys(home, names)
    port = free_port()
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=light_sites, args=(str(home), names[part::2], port))
        for part in range(2)
    ]
    try:
        with listening(home, port) as sites:
            for worker in workers:
                worker.start()
            deadline = time.monotonic() + MOST_SECONDS
            while len(sites.nodes()) < clients:
                if time.monotonic() > deadline or not all(one.is_alive() for one in workers):
                    raise SystemExit(f"Only {len(sites.nodes())} of {clients} sites connected.")
                time.sleep(0.1)
            yield sites
            list(sites.ask({node: Message("stop") for node in sites.nodes()}, 60.0))
            for worker in workers:
                worker.join(30)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()


def on_network(clients: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Measure exchanges and memory with the given number of sites, in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_exchanges, clients, tuple(sizes)).result()


def _exchanges(clients: int, sizes: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"clients": clients, "exchanges": []}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place, many_sites(Path(place), clients) as sites:
        found["connected"] = time.perf_counter() - began
        exchange(sites, (0, 0), 1000, 1)  # warms up
        for size in sizes:
            before = time.process_time()
            seconds = exchange(sites, (0, 0), size, REPEATS)["seconds"]
            cpu = (time.process_time() - before) / REPEATS
            found["exchanges"].append(
                {"bytes": size, "seconds": seconds, "cpu_seconds": cpu, "megabytes": _peak()}
            )
            print(clients, "sites:", found["exchanges"][-1], file=sys.stderr)
    return found


# ---------------------------------------------------------------------- tables


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--part", choices=("server", "network"), help="only one of the two")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    quick = arguments.quick
    wide = {"columns": 1300, "learner": "mlp"}
    loads = [Load(20), Load(20, 50, "mlp")] if quick else [
        *(Load(count) for count in (10, 100, 1_000, 10_000)),
        *(Load(count, **wide) for count in (10, 100, 1_000)),
    ]  # fmt: skip
    counts: dict[int, tuple[int, ...]] = (
        {20: (5_000,)}
        if quick
        else {
            10: (5_000, 1_000_000, 10_000_000),
            100: (5_000, 1_000_000, 10_000_000),
            1_000: (5_000, 100_000),
        }
    )
    console = Console(width=None if sys.stdout.isatty() else 140)

    alone = [server_alone(load) for load in loads if arguments.part != "network"]
    table = Table(title="The server's own part of a FedGMM round (no network), one thread")
    for column in ("clients", "bytes to a client", "from it", "s per round", "ms per client",
                   "MB", "MB / MB received"):  # fmt: skip
        table.add_column(column, justify="right")
    for one in alone:
        came = one["clients"] * one["bytes_received"] / 1e6
        table.add_row(f"{one['clients']:.0f}", f"{one['bytes_sent']:.0f}",
                      f"{one['bytes_received']:.0f}", f"{one['seconds']:.3f}",
                      f"{one['seconds'] / one['clients'] * 1e3:.2f}", f"{one['megabytes']:.0f}",
                      f"{one['megabytes'] / came:.1f}")  # fmt: skip
    if alone:
        console.print(table)

    carried = [on_network(*one) for one in counts.items() if arguments.part != "server"]
    table = Table(title="One server with light sites over gRPC, TLS and keys, all on this machine")
    for column in ("sites", "bytes each way", "s per exchange", "CPU s of the server",
                   "its peak memory, MB"):  # fmt: skip
        table.add_column(column, justify="right")
    for one in carried:
        for own in one["exchanges"]:
            table.add_row(f"{one['clients']}", f"{own['bytes']}", f"{own['seconds']:.3f}",
                          f"{own['cpu_seconds']:.3f}", f"{own['megabytes']:.0f}")  # fmt: skip
    if carried:
        console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"alone": alone, "sites": carried}, indent=1))
    for one in carried[-1:]:
        print(f"{one['clients']} sites: {one['exchanges'][0]['seconds']:.3f} s per exchange")


if __name__ == "__main__":
    main()
