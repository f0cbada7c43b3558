"""How much one server of a federation carries: clients, payloads, memory, polling.

Two measurements:

1. The server's own work, without any network: so many sites, all of which send copies of what one
   real site answers. Every answer is checked, kept and combined as in a real run. Each size runs in a
   process of its own; memory is its peak, less that of one which has only imported the package.
2. Flower's SuperLink behind TLS and keys, with many light nodes in one other process: they sign, poll,
   fetch and answer like real ones, but hold no rows. Seconds of an exchange, and the CPU share that
   polling takes while nothing happens.

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
    answer_of,
    end_with_parent,
    exchange,
    free_port,
    make_keys,
)

POLL = 0.3  # seconds between two looks of a busy client, as in fedgmm.federation.flower.pace
ROUNDS = 4
REPEATS = 3


@dataclass(frozen=True)
class Load:
    """What a server is given to carry.

    Attributes:
        clients: how many.
        columns: of the table; with ``learner`` they decide the payload.
        learner: of the training.
    """

    clients: int
    columns: int = 9
    learner: str = "linear"


# ---------------------------------------------------------------------- 1. the server alone


class Copies:
    """One real site, and many that answer the same in another name."""

    def __init__(self, site: Any, clients: int) -> None:
        self._site = site
        self._names = [f"site{number:05d}" for number in range(clients)]
        self.waited = 0.0

    def nodes(self) -> list[str]:
        """Names of all."""
        return self._names

    def ask(self, questions: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Answers of all; each has arrays of its own, as after a journey."""
        began, answers, made = time.perf_counter(), {}, {}
        for node, question in questions.items():
            kind = (question.kind, question.facts.get("most_rows"))
            if kind not in made:
                made[kind] = self._site.answer(question)
            told = made[kind]
            facts = {**told.facts, "name": node, "ticket": question.facts["ticket"]}
            arrays = {name: value.copy() for name, value in told.arrays.items()}
            answers[node] = replace(told, arrays=arrays, facts=facts)
        self.waited += time.perf_counter() - began
        return answers


def server_alone(load: Load) -> dict[str, float]:
    """Seconds and memory of the server's part of a round, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_serve, (load,))


def _serve(load: Load) -> dict[str, float]:
    os.environ.update(FEW_THREADS)
    import torch

    torch.set_num_threads(1)
    import sklearn.cluster  # noqa: F401 - the start needs it

    from fedgmm.data.tables.preprocessing import TableOptions
    from fedgmm.federation.settings import FederationSettings
    from fedgmm.federation.server import run_federation
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
    """Many nodes in one process, a thread each: all that a SuperNode does on the wire."""
    from fedgmm.federation.flower.pace import look_sooner

    end_with_parent()
    look_sooner()
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
            asked = receive()
            if asked is None:
                time.sleep(POLL)
                continue
            question, tree = asked
            run, number = question.metadata.run_id, question.metadata.message_id
            pieces = {
                one.object_id: _fetched(pull_object, run, one.object_id)
                for one in iterate_object_tree(tree)
            }
            confirm(run, number)
            whole: Any = inflate_object_from_contents(number, pieces)
            told = from_records(whole.content)
            content = to_records(answer_of(name, told))
            answer = FlowerMessage(content, reply_to=question)
            answer.metadata.__dict__["_message_id"] = answer.object_id
            objects = get_all_nested_objects(answer)
            missing, session = send(
                remove_content_from_message(answer), get_object_tree(answer), 0.0
            )
            for piece in missing:
                push_object(run, session, piece, objects[piece].deflate())
            if told.kind == "stop":
                return


def _fetched(pull_object: Any, run: int, piece: str) -> Any:
    """A piece of a question, which may be announced before it is there."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

    while True:
        try:
            return pull_object(run, piece)
        except ObjectUnavailableError:
            time.sleep(0.05)


@contextlib.contextmanager
def many_nodes(home: Path, clients: int) -> Iterator[tuple[Any, Any]]:
    """A server with light nodes; its sites, and the process of its SuperLink."""
    import psutil

    from fedgmm.federation.flower.certificates import Tls
    from fedgmm.federation.flower.keys import read_public_keys
    from fedgmm.federation.flower.processes import FlowerFolder, prepare_environment
    from fedgmm.federation.messages import Message

    names = [f"site{number:05d}" for number in range(clients)]
    make_keys(home, names)
    prepare_environment(FlowerFolder(home / "server"))
    from fedgmm.federation.flower.link import open_sites

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
                    raise SystemExit(f"Only {len(sites.nodes())} of {clients} nodes came.")
                time.sleep(0.5)
            yield sites, link
            sites.ask({node: Message("stop") for node in sites.nodes()}, 60.0)
            worker.join(30)
    finally:
        if worker.is_alive():
            worker.kill()


def with_flower(home: Path, clients: int, sizes: Sequence[int], idle: float) -> dict[str, Any]:
    """Polling, exchanges and memory of a SuperLink with so many nodes."""

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
            except RuntimeError as error:  # this is where it breaks
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
    for column in ("clients", "bytes to a client", "from it", "s a round", "ms a client", "MB",
                   "x what came in"):  # fmt: skip
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
    table = Table(title=f"Flower's SuperLink with light nodes that look every {POLL:g} s")
    for column in ("nodes", "CPU share of polling", "CPU ms a poll", "bytes each way", "s an exchange",
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
