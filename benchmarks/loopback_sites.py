"""Processes on the loopback address for measurements: clients that echo, a proxy that counts bytes.

Used by ``federation_rounds.py`` and ``federation_scale.py``.
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


def reply_of(name: str, request: Any) -> Any:
    """Return the numbers plus the site's own number, so that each reply can be checked."""
    from fedgmm.federation.messages import Message

    arrays = {key: value + site_number(name) for key, value in request.arrays.items()}
    return Message("reply", arrays, {"name": name})


def site_number(name: str) -> int:
    """Return 4 for ``site00003``."""
    return int(name.removeprefix("site")) + 1


class Echo:
    """A site that sends back as many bytes as it receives."""

    finished = False
    refused: str | None = None
    unusable: str | None = None

    def __init__(self, name: str) -> None:
        self._name = name

    def reply(self, request: Any) -> Any:
        """Reply to one request."""
        self.finished = request.kind == "stop"
        return reply_of(self._name, request)


def echo_client(home: str, name: str, port: int) -> None:
    """Run a client; called in its own process."""
    end_with_parent()
    os.environ.update(FEW_THREADS)
    from fedgmm.federation.network.client import Connection, take_part

    place = Path(home)
    connection = Connection(
        "127.0.0.1", port, place / "tls" / "ca.crt", place / "private" / f"{name}.key"
    )
    take_part(Echo(name), connection, place / name, notify=lambda _: None)


def count_bytes(front: int, back: int, counted: Any) -> None:
    """Run a proxy from one port to another; ``counted`` holds the bytes to and from the back."""
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
                    near.close()  # the server does not listen yet
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


def listening(home: Path, port: int) -> Any:
    """Return a server for the keys of :func:`make_keys`, as a context manager."""
    from fedgmm.federation.network.certificates import Tls
    from fedgmm.federation.network.keys import AcceptedKeys
    from fedgmm.federation.network.sites import NetworkSites

    tls = Tls(*(home / "tls" / file for file in ("server.crt", "server.key", "ca.crt")))
    keys = AcceptedKeys(home / "keys")
    return NetworkSites("127.0.0.1", port, tls, keys, names=("127.0.0.1",))


@contextlib.contextmanager
def echoing_sites(home: Path, names: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Start a server, and clients that echo through a proxy that counts bytes, as processes."""
    from fedgmm.federation.messages import Message

    make_keys(home, names)
    context = multiprocessing.get_context("spawn")
    counted = context.Array("q", 2)
    front, back = free_port(), free_port()
    workers = [context.Process(target=count_bytes, args=(front, back, counted))]
    workers += [context.Process(target=echo_client, args=(str(home), n, front)) for n in names]
    try:
        with listening(home, back) as sites:
            for worker in workers:
                worker.start()
            deadline = time.monotonic() + MOST_SECONDS
            while len(sites.nodes()) < len(names):
                if time.monotonic() > deadline:
                    raise SystemExit(
                        f"Only {len(sites.nodes())} of {len(names)} clients connected."
                    )
                time.sleep(0.2)
            yield sites, counted
            list(sites.ask({node: Message("stop") for node in sites.nodes()}, 60.0))
            for worker in workers[1:]:
                worker.join(60)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()


def exchange(sites: Any, counted: Any, size: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of an exchange of ``size`` bytes each way, and its bytes on the wire."""
    import numpy as np

    from fedgmm.federation.messages import Message

    nodes, rng = sites.nodes(), np.random.default_rng(size)
    seconds, before = [], list(counted)
    for _ in range(repeats):
        payload = rng.random(size // 4, dtype=np.float32)  # new numbers, as after every round
        began, replied = time.perf_counter(), 0
        for node, reply in sites.ask({n: Message("echo", {"x": payload}) for n in nodes}, 120.0):
            # looked at and dropped, as sums are; the ends and the size stand for the whole
            if not isinstance(reply, Message):
                raise RuntimeError(f"{node} did not reply: {reply}")
            x, own = reply.arrays["x"], site_number(reply.facts["name"])
            if x.shape != payload.shape or x[0] != payload[0] + own or x[-1] != payload[-1] + own:
                raise RuntimeError(f"{reply.facts['name']} sent wrong numbers.")
            replied += 1
        seconds.append(time.perf_counter() - began)
        if replied != len(nodes):
            raise RuntimeError(f"{replied} of {len(nodes)} sites replied.")
    share = len(nodes) * repeats
    return {
        "bytes": size,
        "seconds": statistics.median(seconds),
        "wire_to_server": (counted[0] - before[0]) / share,
        "wire_to_client": (counted[1] - before[1]) / share,
    }


# ---------------------------------------------------------------------- processes


def end_with_parent() -> None:
    """End this worker when the benchmark has ended, for any reason."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def make_keys(home: Path, names: Sequence[str]) -> None:
    """Write a certificate for the loopback address, and a key pair for each name."""
    from fedgmm.federation.network.certificates import trial_certificates
    from fedgmm.federation.network.keys import new_pair

    trial_certificates(["127.0.0.1"], home / "tls")
    (home / "keys").mkdir()
    for name in names:
        _, public = new_pair(name, home / "private")
        public.rename(home / "keys" / public.name)


def family(pid: int) -> list[Any]:
    """Return a process and its children."""
    import psutil

    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its children until now."""
    return sum(sum(one.cpu_times()[:2]) for one in family(pid))


def own_megabytes(pid: int) -> float:
    """Return the megabytes that a process and its children do not share with others."""
    return sum(one.memory_full_info().uss for one in family(pid)) / 1e6


def end_all(processes: Any) -> None:
    """End the processes that are still running."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
