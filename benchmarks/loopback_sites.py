"""Processes on the loopback address for measurements: clients that echo, a proxy that counts.

Not a benchmark of its own: ``flower_rounds.py`` and ``federation_scale.py`` use it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FEW_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
MOST_SECONDS = 300.0


def answer_of(name: str, question: Any) -> Any:
    """What comes back: the same numbers plus the site's own, as Flower sends equal arrays only once."""
    from fedgmm.federation.messages import Message

    arrays = {key: value + site_number(name) for key, value in question.arrays.items()}
    return Message("answer", arrays, {"name": name})


def site_number(name: str) -> int:
    """``site00003`` has the number 4."""
    return int(name.removeprefix("site")) + 1


class Echo:
    """A site that sends back as much as it gets."""

    finished = False
    refused: str | None = None
    unusable: str | None = None

    def __init__(self, name: str) -> None:
        self._name = name

    def answer(self, question: Any) -> Any:
        """Answer one question."""
        self.finished = question.kind == "stop"
        return answer_of(self._name, question)


def echo_client(home: str, name: str, port: int) -> None:
    """A client of its own process."""
    end_with_parent()
    os.environ.update(FEW_THREADS)
    from fedgmm.federation.flower.client import Connection, take_part

    place = Path(home)
    connection = Connection(
        "127.0.0.1", port, place / "tls" / "ca.crt", place / "private" / f"{name}.key"
    )
    take_part(Echo(name), connection, place / name, notify=lambda _: None)


def count_bytes(front: int, back: int, counted: Any) -> None:
    """A proxy from one port to another; ``counted`` has the bytes to and from the back."""
    end_with_parent()
    lines = selectors.DefaultSelector()
    door = socket.create_server(("127.0.0.1", front))
    lines.register(door, selectors.EVENT_READ, None)
    while True:
        for key, _ in lines.select():
            if key.data is None:
                near, _ = door.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", back))
                except OSError:
                    near.close()  # nobody is there yet
                    continue
                for line in (near, far):
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                lines.register(near, selectors.EVENT_READ, (far, 0))
                lines.register(far, selectors.EVENT_READ, (near, 1))
                continue
            line, (other, way) = key.fileobj, key.data
            assert isinstance(line, socket.socket)
            with contextlib.suppress(OSError):
                if data := line.recv(1 << 20):
                    counted[way] += len(data)
                    other.sendall(data)
                    continue
            for one in (line, other):
                with contextlib.suppress(KeyError, ValueError):  # closed already
                    lines.unregister(one)
                one.close()


@contextlib.contextmanager
def echoing_sites(home: Path, names: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """A server with clients that echo, through a proxy that counts; both as processes."""
    from fedgmm.federation.flower.certificates import Tls
    from fedgmm.federation.flower.keys import read_public_keys
    from fedgmm.federation.flower.processes import FlowerFolder, prepare_environment

    make_keys(home, names)
    prepare_environment(FlowerFolder(home / "server"))
    from fedgmm.federation.flower.link import open_sites
    from fedgmm.federation.messages import Message

    context = multiprocessing.get_context("spawn")
    counted = context.Array("q", 2)
    front, back = free_port(), free_port()
    tls = Tls(*(home / "tls" / file for file in ("server.crt", "server.key", "ca.crt")))
    workers = [context.Process(target=count_bytes, args=(front, back, counted))]
    workers += [context.Process(target=echo_client, args=(str(home), n, front)) for n in names]
    try:
        with open_sites(
            home / "server", "127.0.0.1", back, tls, read_public_keys(home / "keys")
        ) as sites:
            for worker in workers:
                worker.start()
            deadline = time.monotonic() + MOST_SECONDS
            while len(sites.nodes()) < len(names):
                if time.monotonic() > deadline:
                    raise SystemExit(f"Only {len(sites.nodes())} of {len(names)} clients came.")
                time.sleep(0.2)
            yield sites, counted
            sites.ask({node: Message("stop") for node in sites.nodes()}, 60.0)
            for worker in workers[1:]:
                worker.join(60)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()


def exchange(sites: Any, counted: Any, size: int, repeats: int) -> dict[str, float]:
    """Median seconds of an exchange of so many bytes each way, and what it takes on the wire."""
    import numpy as np

    from fedgmm.federation.messages import Message

    nodes, rng = sites.nodes(), np.random.default_rng(size)
    seconds, before = [], list(counted)
    for _ in range(repeats):
        payload = rng.random(size // 4, dtype=np.float32)  # new numbers, as after every round
        began = time.perf_counter()
        answers = sites.ask({node: Message("echo", {"x": payload}) for node in nodes}, 120.0)
        seconds.append(time.perf_counter() - began)
        for answer in answers.values():
            if not isinstance(answer, Message):
                raise RuntimeError(f"A client did not answer: {answer}")
            wanted = payload + site_number(answer.facts["name"])
            if not np.array_equal(answer.arrays["x"], wanted):
                raise RuntimeError(f"{answer.facts['name']} did not send what it should.")
    share = len(nodes) * repeats
    return {
        "bytes": size,
        "seconds": statistics.median(seconds),
        "wire_to_server": (counted[0] - before[0]) / share,
        "wire_to_client": (counted[1] - before[1]) / share,
    }


# ---------------------------------------------------------------------- processes


def end_with_parent() -> None:
    """In a worker: end when the benchmark has, however it ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def make_keys(home: Path, names: Sequence[str]) -> None:
    """A certificate for the loopback address, and a key pair for each name."""
    from fedgmm.federation.flower.certificates import try_out_certificates
    from fedgmm.federation.flower.keys import new_pair

    try_out_certificates(["127.0.0.1"], home / "tls")
    (home / "keys").mkdir()
    for name in names:
        _, public = new_pair(name, home / "private")
        public.rename(home / "keys" / public.name)


def family(pid: int) -> list[Any]:
    """A process and its children."""
    import psutil

    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its children until now."""
    return sum(sum(one.cpu_times()[:2]) for one in family(pid))


def own_megabytes(pid: int) -> float:
    """Memory of a process and its children that nobody else uses."""
    return sum(one.memory_full_info().uss for one in family(pid)) / 1e6


def end_all(processes: Any) -> None:
    """End processes that have not ended."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
