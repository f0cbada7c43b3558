"""Limits of one federation server: clients, payloads, memory, polling.

Two measurements:

1. The server's own work, without a network. Many sites send copies of the replies of one real site.
   Every reply is checked and added as in a real run. Each size runs in its own process; memory is
   the peak of that process without the imports.
2. Flower's SuperLink behind TLS and keys, with many light nodes in one other process. They sign, poll,
   fetch and reply like real nodes, but hold no rows. Measured are the seconds of an exchange, and the
   CPU share of polling while the nodes are idle.

    python benchmarks/federation_scale.py            # some minutes
    python benchmarks/federation_scale.py --quick    # under a minute
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loopback_sites import (
    FEW_THREADS,
    MOST_SECONDS,
    end_with_parent,
    exchange,
    free_port,
    make_keys,
    reply_of,
)

POLL = 0.3  # seconds between two polls of a busy client, as in fedgmm.federation.flower.supernode
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
        sites = Copies(Site(SiteSettings((home / "site00000.csv",), home / "site")), load.clients)
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


# ---------------------------------------------------------------------- 2. Flower with many nodes


def light_nodes(home: str, names: Sequence[str], port: int) -> None:
    """Run many nodes in one process, one thread each, with the network traffic of SuperNodes."""
    from fedgmm.federation.flower.supernode import poll_faster

    end_with_parent()
    poll_faster()
    threads = [threading.Thread(target=_light_node, args=(Path(home), n, port)) for n in names]
    for thread in threads:
        thread.start()
        time.sleep(0.02)  # not all at once
    for thread in threads:
        thread.join()


def _light_node(home: Path, name: str, port: int) -> None:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.app import Message as FlowerMessage
    from flwr.app.message import remove_content_from_message
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supernode.fleet_http_connection import http_request_response

    from fedgmm.federation.flower.records import from_records, to_records

    key = load_ssh_private_key((home / "private" / f"{name}.key").read_bytes(), None)
    authority = (home / "tls" / "ca.crt").read_bytes()
    keys: Any = (key, key.public_key())
    with http_request_response(f"127.0.0.1:{port}", False, authority, keys) as line:
        _, receive, send, _, _, pull_object, push_object, confirm = line
        while True:
            received = receive()
            if received is None:
                time.sleep(POLL)
                continue
            request, tree = received
            run, number = request.metadata.run_id, request.metadata.message_id
            pieces = {
                one.object_id: _fetched(pull_object, run, one.object_id)
                for one in iterate_object_tree(tree)
            }
            confirm(run, number)
            whole: Any = inflate_object_from_contents(number, pieces)
            message = from_records(whole.content)
            content = to_records(reply_of(name, message))
            reply = FlowerMessage(content, reply_to=request)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects = get_all_nested_objects(reply)
            missing, session = send(remove_content_from_message(reply), get_object_tree(reply), 0.0)
            for piece in missing:
                push_object(run, session, piece, objects[piece].deflate())
            if message.kind == "stop":
                return


def _fetched(pull_object: Any, run: int, piece: str) -> Any:
    """Return a part of a request, which may be announced before it is available."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

    while True:
        try:
            return pull_object(run, piece)
        except ObjectUnavailableError:
            time.sleep(0.05)


@contextlib.contextmanager
def many_nodes(home: Path, clients: int) -> Iterator[tuple[Any, Any]]:
    """Start a server with light nodes; yield its sites and the process of its SuperLink."""
    import psutil

    from fedgmm.federation.flower.certificates import Tls
    from fedgmm.federation.flower.keys import read_public_keys
    from fedgmm.federation.flower.processes import FlowerFolder, prepare_environment
    from fedgmm.federation.messages import Message

    names = [f"site{number:05d}" for number in range(clients)]
    make_keys(home, names)
    prepare_environment(FlowerFolder(home / "server"))
    from fedgmm.federation.flower.server import open_sites

    port = free_port()
    tls = Tls(*(home / "tls" / file for file in ("server.crt", "server.key", "ca.crt")))
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=light_nodes, args=(str(home), names, port))
    keys = read_public_keys(home / "keys")
    try:
        with open_sites(home / "server", "127.0.0.1", port, tls, keys) as sites:
            (link,) = [
                one
                for one in psutil.Process().children()
                if "fedgmm.federation.flower.superlink" in one.cmdline()
            ]
            worker.start()
            deadline = time.monotonic() + MOST_SECONDS
            while len(sites.nodes()) < clients:
                if time.monotonic() > deadline or not worker.is_alive():
                    raise SystemExit(f"Only {len(sites.nodes())} of {clients} nodes connected.")
                time.sleep(0.5)
            yield sites, link
            list(sites.ask({node: Message("stop") for node in sites.nodes()}, 60.0))
            worker.join(30)
    finally:
        if worker.is_alive():
            worker.kill()


def with_flower(home: Path, clients: int, sizes: Sequence[int], idle: float) -> dict[str, Any]:
    """Measure polling, exchanges and memory of a SuperLink with the given number of nodes."""

    def cpu(link: Any) -> float:
        return float(sum(link.cpu_times()[:2]))

    with many_nodes(home, clients) as (sites, link):
        with contextlib.suppress(RuntimeError):
            exchange(sites, (0, 0), 1000, 1)  # warms up
        before = cpu(link)
        time.sleep(idle)
        polling = (cpu(link) - before) / idle
        found: dict[str, Any] = {"clients": clients, "polling": polling, "exchanges": []}
        for size in sizes:
            before = cpu(link)
            try:
                seconds = exchange(sites, (0, 0), size, REPEATS)["seconds"]
            except RuntimeError as error:  # more nodes than the SuperLink can handle
                print(f"{clients} nodes, {size} bytes: {error}", file=sys.stderr)
                seconds = float("nan")
            found["exchanges"].append(
                {
                    "bytes": size,
                    "seconds": seconds,
                    "cpu_seconds": (cpu(link) - before) / REPEATS,
                    "megabytes": link.memory_info().rss / 1e6,
                }
            )
            print(clients, "nodes:", found["exchanges"][-1], file=sys.stderr)
    return found


# ---------------------------------------------------------------------- tables


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--part", choices=("server", "flower"), help="only one of the two")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    quick = arguments.quick
    wide = {"columns": 1300, "learner": "mlp"}
    loads = [Load(20), Load(20, 50, "mlp")] if quick else [
        *(Load(count) for count in (10, 100, 1_000, 10_000)),
        *(Load(count, **wide) for count in (10, 100, 1_000)),
    ]  # fmt: skip
    nodes: dict[int, tuple[int, ...]] = (
        {5: (5_000,)}
        if quick
        else {
            10: (5_000, 1_000_000),
            25: (5_000, 1_000_000),
            50: (5_000,),
            100: (5_000,),
        }
    )
    console = Console(width=None if sys.stdout.isatty() else 140)

    alone = [server_alone(load) for load in loads if arguments.part != "flower"]
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

    carried = []
    for clients, sizes in nodes.items() if arguments.part != "server" else ():
        with tempfile.TemporaryDirectory() as place:
            carried.append(with_flower(Path(place), clients, sizes, 2.0 if quick else 10.0))
    table = Table(title=f"Flower's SuperLink with light nodes that poll every {POLL:g} s")
    for column in ("nodes", "CPU share of polling", "CPU ms per poll", "bytes each way", "s per exchange",
                   "CPU s of the SuperLink", "its memory, MB"):  # fmt: skip
        table.add_column(column, justify="right")
    for one in carried:
        for own in one["exchanges"]:
            table.add_row(f"{one['clients']}", f"{100 * one['polling']:.0f} %",
                          f"{one['polling'] * POLL / one['clients'] * 1e3:.1f}", f"{own['bytes']}",
                          f"{own['seconds']:.2f}", f"{own['cpu_seconds']:.2f}",
                          f"{own['megabytes']:.0f}")  # fmt: skip
    if carried:
        console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"alone": alone, "nodes": carried}, indent=1))
    for one in carried[-1:]:
        print(f"polling: {100 * one['polling']:.0f} % of a core with {one['clients']} nodes")


if __name__ == "__main__":
    main()
