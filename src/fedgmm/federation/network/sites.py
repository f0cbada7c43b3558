"""The sites of a federation as streams of a gRPC server: send requests, collect replies.

gRPC runs in a thread with an event loop. The server of the federation asks from its own thread; requests
and replies pass between the two threads in queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedgmm.federation.messages import (
    LARGEST_MESSAGE,
    PROTOCOL,
    Failure,
    Message,
    MessageError,
    Notify,
    Reply,
    checked_reply,
    limits_of,
)
from fedgmm.federation.network.certificates import Tls, covers
from fedgmm.federation.network.keys import AcceptedKeys
from fedgmm.federation.network.stream import (
    COMMON_OPTIONS,
    METHOD,
    NONCE_BYTES,
    PIECE,
    SERVICE,
    Assembler,
    greeting,
    is_proven,
    pieces,
    read_greeting,
)
from fedgmm.federation.settings import FederationError

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a failed handshake would write a line to stderr
import grpc

_PROOF_TIMEOUT = 10.0  # seconds in which a new connection must prove its key
_PIECE_TIMEOUT = 30.0  # seconds until the next piece of a message
_SLOWEST = 256 * 1024  # bytes per second that a site must send at least
_MOST_UNPROVEN = 64  # connections that have not proven their key yet
_MOST_UNEXPECTED = 1000  # late replies of one connection
_LARGE_REPLIES = 4  # that are received or held at the same time
_NOTICE_EVERY = 60.0  # seconds between two lines about the same site's second client
_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_concurrent_streams", 1),
    ("grpc.max_connection_idle_ms", 30_000),  # a connection without a stream is closed
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.so_reuseport", 0),
]


@dataclass(eq=False)
class _Line:
    """The stream of one site.

    Attributes:
        node: the registered name of its key; a number without keys.
        key: its public key; empty without keys.
        instance: random text of the site's process, which a second process does not know.
        pending: the exchange whose reply is expected.
        unexpected: number of messages that no request asked for.
        request: the newest request, until it is sent.
    """

    node: str
    key: str
    instance: str
    task: asyncio.Task[Any]
    pending: int | None = None
    unexpected: int = 0
    request: Message | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class NetworkSites:
    """A gRPC server whose streams are sites; a :class:`Transport`, and a context manager.

    Args:
        tls: TLS files; ``None`` is plain text.
        keys: keys of the accepted sites; ``None`` accepts every site.
        names: host names of the certificate.
        limit_bytes: size of the largest message that is sent or read.
        notify: called with a line about connections.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: Tls | None = None,
        keys: AcceptedKeys | None = None,
        *,
        names: tuple[str, ...] = (),
        limit_bytes: int = LARGEST_MESSAGE,
        notify: Notify = lambda _: None,
    ) -> None:
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._tls, self._keys, self._names = tls, keys, names
        self._limit, self._notify = limit_bytes, notify
        self._lines: dict[str, _Line] = {}
        self._here: tuple[str, ...] = ()
        self._replies: queue.SimpleQueue[tuple[str, int, Reply, bool]] = queue.SimpleQueue()
        self._exchange = 0
        self._unproven = 0
        self._anonymous = 0
        self._noticed: dict[str, float] = {}
        self._loop = asyncio.new_event_loop()
        self._large = asyncio.Semaphore(_LARGE_REPLIES)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="grpc")

    # ------------------------------------------------------------------ start and end

    def __enter__(self) -> NetworkSites:
        _raise_file_limit()
        self._thread.start()
        try:
            self._server = self._run(self._start())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self._run(self._server.stop(1.0), timeout=10.0)
        self._end_loop()

    def _run(self, work: Any, timeout: float = 60.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    async def _start(self) -> Any:
        from grpc import aio

        server = aio.server(options=_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})]
        )
        try:
            if self._tls is None:
                bound = server.add_insecure_port(self._address)
            else:
                pair = (self._tls.key.read_bytes(), self._tls.certificate.read_bytes())
                bound = server.add_secure_port(self._address, grpc.ssl_server_credentials([pair]))
        except RuntimeError:
            bound = 0
        if not bound:
            raise FederationError(
                f"Cannot listen on {self._address}; the port is in use or not allowed: choose another "
                "--port, or another --host."
            )
        await server.start()
        return server

    # ------------------------------------------------------------------ the thread of the federation

    def nodes(self) -> list[str]:
        """Return the names of the sites that are connected now."""
        if self._keys is not None and self._keys.refresh():
            self._loop.call_soon_threadsafe(self._drop_unaccepted)
        return list(self._here)

    def ask(self, requests: Mapping[str, Message], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Send each site its request, and yield the replies as they arrive, until the deadline."""
        self._exchange += 1
        number, started = self._exchange, time.monotonic()
        waiting = limits_of(requests, timeout)
        self._loop.call_soon_threadsafe(self._post, number, dict(requests))
        while waiting:
            end = started + max(waiting.values())
            try:
                node, own, reply, large = self._replies.get(
                    timeout=max(end - time.monotonic(), 1e-3)
                )
            except queue.Empty:
                if time.monotonic() < end:
                    continue
                break
            try:
                if own == number and node in waiting:
                    del waiting[node]
                    yield node, reply
            finally:
                del reply
                if large:  # it has been used, so another one may be received
                    self._loop.call_soon_threadsafe(self._large.release)
        for node, limit in waiting.items():
            yield node, Failure(f"no reply within {limit:g} s", self._registered(node))

    def _registered(self, node: str) -> str | None:
        return None if self._keys is None else node

    # ------------------------------------------------------------------ the thread of gRPC

    def _post(self, number: int, requests: dict[str, Message]) -> None:
        for node, request in requests.items():
            line = self._lines.get(node)
            if line is None:
                self._fail(node, number, "it is not connected")
                continue
            # only the newest request of a site is kept, so a slow site holds no memory
            line.pending, line.request = number, request
            line.wake.set()

    def _fail(self, node: str, number: int, reason: str) -> None:
        self._replies.put((node, number, Failure(reason, self._registered(node)), False))

    def _drop_unaccepted(self) -> None:
        assert self._keys is not None
        for node, line in self._lines.items():
            if self._keys.names.get(line.key) != node:
                line.task.cancel()

    async def _connect(self, _: Any, context: Any) -> None:
        """Serve one stream: prove the key, then requests and replies until it ends."""
        if self._unproven >= _MOST_UNPROVEN:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many connections at the same time"
            )
        self._unproven += 1
        try:
            node, key, instance = await asyncio.wait_for(self._prove(context), _PROOF_TIMEOUT)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no proof of the key in time")
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._unproven -= 1
        await self._replace(node, instance, context)
        task = asyncio.current_task()
        assert task is not None
        line = self._lines[node] = _Line(node, key, instance, task)
        self._here = tuple(sorted(self._lines))
        writer = asyncio.ensure_future(self._write(line, context))
        try:
            await self._read(line, context)
        except (asyncio.CancelledError, grpc.RpcError, grpc.aio.AioRpcError):
            pass  # the connection is lost, or another one replaces it
        except MessageError as error:
            self._lost(line, f"its reply was dropped: {error}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            writer.cancel()
            self._lost(line, "its connection was lost")

    def _lost(self, line: _Line, reason: str) -> None:
        if self._lines.get(line.node) is line:
            del self._lines[line.node]
            self._here = tuple(sorted(self._lines))
        if line.pending is not None:
            self._fail(line.node, line.pending, reason)
            line.pending = None

    async def _prove(self, context: Any) -> tuple[str, str, str]:
        """Return the name of the site's key, the key, and the random text of its process."""
        challenge = secrets.token_hex(NONCE_BYTES)
        await context.write(greeting(protocol=PROTOCOL, challenge=challenge))
        piece = await context.read()
        if not isinstance(piece, bytes):
            raise MessageError("it sent no proof of a key.")
        facts = read_greeting(piece)
        if facts.get("protocol") != PROTOCOL:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the server has another version of fedgmm; use the same version everywhere",
            )
        instance = str(facts.get("instance"))[:100]
        if self._keys is None:
            self._anonymous += 1
            return f"node-{self._anonymous:06d}", "", instance
        key = str(facts.get("key"))
        name = self._keys.names.get(key)
        if name is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the server does not know this key"
            )
        assert name is not None
        host = facts.get("host")
        if not is_proven(facts, challenge) or not covers(self._names, str(host)):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the proof of the key is wrong")
        return name, key, instance

    async def _replace(self, node: str, instance: str, context: Any) -> None:
        """End the older stream of the same process; refuse a second process with the same key."""
        older = self._lines.get(node)
        if older is None:
            return
        if older.instance != instance:
            if time.monotonic() >= self._noticed.get(node, 0.0):
                self._noticed[node] = time.monotonic() + _NOTICE_EVERY
                self._notify(f"A second client with the key of {node} is refused.")
            await context.abort(
                grpc.StatusCode.ALREADY_EXISTS, "another client is connected with this key"
            )
        self._lost(older, "its connection was lost")
        older.task.cancel()

    async def _write(self, line: _Line, context: Any) -> None:
        """Welcome a site and send its requests; gRPC allows one write of a stream at a time."""
        try:
            await context.write(greeting(welcome=True))
            while True:
                await line.wake.wait()
                line.wake.clear()
                await self._send(line, context)
        except Exception:  # gRPC has several for a site that is gone
            line.task.cancel()  # without a writer the site would wait, so it has to reconnect

    async def _send(self, line: _Line, context: Any) -> None:
        """Send the newest request of a site; afterwards the stream does not hold it."""
        request, number, line.request = line.request, line.pending, None
        if request is not None and number is not None:
            for piece in pieces(request, number):
                await context.write(piece)

    async def _read(self, line: _Line, context: Any) -> None:
        """Put the replies of a site together until its stream ends."""
        assembler = Assembler(self._limit)
        while await self._receive(line, context, assembler):
            pass

    async def _receive(self, line: _Line, context: Any, assembler: Assembler) -> bool:
        """Read a reply and hand it over; return whether there was one. The stream does not hold it."""
        piece = await context.read()
        if not isinstance(piece, bytes):
            return False
        found = assembler.add(piece)
        late = bool(assembler.missing) and assembler.number != line.pending
        if late:
            assembler.drop()
            _count_unexpected(line)
        # a site may cut a large reply into small pieces
        large = not late and (bool(assembler.missing) or len(piece) >= PIECE)
        if large:
            await self._large.acquire()
        delivered = False
        try:
            allowed = _PIECE_TIMEOUT + assembler.missing / _SLOWEST
            deadline = self._loop.time() + allowed
            while assembler.missing:
                left = min(_PIECE_TIMEOUT, deadline - self._loop.time())
                piece = await asyncio.wait_for(context.read(), left)
                if not isinstance(piece, bytes):
                    return False
                found = assembler.add(piece)
            delivered = found is not None and self._deliver(line, *found, large)
        except TimeoutError:
            raise MessageError("it did not arrive completely.") from None
        finally:
            if large and not delivered:
                self._large.release()
        return True

    def _deliver(self, line: _Line, number: int, reply: Message, large: bool) -> bool:
        """Hand a reply over, unless it is late or no request asked for it."""
        if number != line.pending:
            _count_unexpected(line)
            return False
        line.pending = None
        checked = checked_reply(reply, self._registered(line.node))
        self._replies.put((line.node, number, checked, large))
        return True


def _count_unexpected(line: _Line) -> None:
    """Count a late reply, or a message that no request asked for."""
    line.unexpected += 1
    if line.unexpected > _MOST_UNEXPECTED:
        raise MessageError("it sends messages that no request asked for.")


def _raise_file_limit() -> None:
    """Allow as many open connections as the system does, so that idle ones cannot use them up."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
