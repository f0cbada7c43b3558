"""The gRPC server with scripted sites in this process: deadlines, limits, lost and second connections."""

import asyncio
import json
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from itertools import chain

import grpc
import numpy as np
import psutil
import pytest

from fedgmm.federation.demo import free_port
from fedgmm.federation.messages import PROTOCOL, Failure, Message
from fedgmm.federation.network import sites as sites_module
from fedgmm.federation.network.certificates import trial_certificates
from fedgmm.federation.network.client import Connection, RefusedError, take_part
from fedgmm.federation.network.keys import (
    AcceptedKeys,
    check_private_key,
    new_pair,
    read_private_key,
)
from fedgmm.federation.network.sites import NetworkSites
from fedgmm.federation.network.stream import PIECE, Assembler, greeting, pieces, read_greeting, sign
from fedgmm.federation.settings import FederationError, SiteSettings
from fedgmm.federation.site import Site
from small_runs import draw_rows, write_csv

PATH = "/fedgmm.Federation/Connect"
APART = [("grpc.use_local_subchannel_pool", 1)]  # each channel has its own connection


class Peer:
    """The other end of a stream, under full control of a test."""

    def __init__(self, channel, more=()):
        self.out = queue.SimpleQueue()
        self.call = channel.stream_stream(PATH)(chain(iter(self.out.get, None), more))
        self.channel = channel
        self.assembler = Assembler(10**8)

    def greet(self, **facts):
        challenge = read_greeting(next(self.call))["challenge"]
        if "key" in facts:
            path, host = facts.pop("key"), facts.get("host", "127.0.0.1")
            proof = sign(read_private_key(path), challenge, host)
            facts = {"key": check_private_key(path).pem, "host": host, "proof": proof} | facts
        self.out.put(greeting(**{"protocol": PROTOCOL, "instance": "one", **facts}))
        assert read_greeting(next(self.call)) == {"welcome": True}
        return self

    def receive(self):
        while (found := self.assembler.add(next(self.call))) is None:
            pass
        return found

    def send(self, number, **facts):
        for piece in pieces(Message("reply", {}, facts), number):
            self.out.put(piece)

    def close(self):
        self.out.put(None)
        self.call.cancel()
        self.channel.close()

    def refusal(self):
        with pytest.raises(grpc.RpcError) as caught:
            list(self.call)
        return caught.value.code()


@pytest.fixture
def plain():
    """A server without TLS, and a function that connects a peer."""
    port, peers = free_port(), []
    with NetworkSites("127.0.0.1", port, limit_bytes=1_000_000) as sites:

        def connect():
            peers.append(Peer(grpc.insecure_channel(f"127.0.0.1:{port}", APART)))
            return peers[-1]

        yield sites, connect, port
        for peer in peers:
            peer.close()


def wait_for(condition, timeout=5.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask(sites, timeout=5.0, kind="round", **facts):
    return dict(sites.ask({node: Message(kind, {}, facts) for node in sites.nodes()}, timeout))


def in_background(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_every_site_gets_its_request_and_all_reply(plain):
    sites, connect, _ = plain
    peers = [connect().greet(), connect().greet()]
    wait_for(lambda: len(sites.nodes()) == 2)

    def reply(peer):
        number, request = peer.receive()
        peer.send(number, echo=request.facts["x"])

    for peer in peers:
        in_background(lambda peer=peer: reply(peer))
    first, second = sites.nodes()
    found = dict(
        sites.ask(
            {first: Message("round", {}, {"x": 1}), second: Message("round", {}, {"x": 2})}, 5
        )
    )
    assert {node: one.facts["echo"] for node, one in found.items()} == {first: 1, second: 2}


def test_a_round_ends_at_its_deadline_and_late_replies_are_dropped(plain):
    sites, connect, _ = plain
    peer = connect().greet()
    wait_for(sites.nodes)

    (failure,) = ask(sites, 0.2).values()
    assert failure == Failure("no reply within 0.2 s")
    number, _ = peer.receive()
    peer.send(number, late=True)

    def reply():
        own, _ = peer.receive()
        assert own != number
        peer.send(own, late=False)

    in_background(reply)
    (answer,) = ask(sites).values()
    assert answer.facts == {"late": False}


def test_only_the_newest_request_waits_for_a_slow_site(plain):
    """A site that reads nothing does not make the server hold old requests."""
    sites, connect, _ = plain
    peer = connect().greet()
    wait_for(sites.nodes)
    for k in range(3):
        ask(sites, 0.05, k=k)
    seen = [peer.receive()[1].facts["k"]]
    while seen[-1] != 2:
        seen.append(peer.receive()[1].facts["k"])
    assert seen == sorted(seen)


def test_a_lost_connection_is_a_failure_at_once(plain):
    sites, connect, _ = plain
    peer = connect().greet()
    wait_for(sites.nodes)
    threading.Timer(0.1, peer.close).start()
    started = time.monotonic()

    (failure,) = ask(sites, 30).values()

    assert time.monotonic() - started < 5
    assert "connection was lost" in failure.reason
    wait_for(lambda: not sites.nodes())
    assert (
        "not connected"
        in dict(sites.ask({"node-000001": Message("round")}, 5))["node-000001"].reason
    )


def test_a_greeting_without_reply_does_not_delay_a_round(plain, monkeypatch):
    monkeypatch.setattr("fedgmm.federation.messages.GREETING_TIMEOUT", 0.2)
    sites, connect, _ = plain
    peer, _silent = connect().greet(), connect().greet()
    wait_for(lambda: len(sites.nodes()) == 2)
    worker, new = sites.nodes()
    in_background(lambda: peer.send(peer.receive()[0]))
    started = time.monotonic()

    found = dict(sites.ask({worker: Message("round"), new: Message("hello")}, 30))

    assert time.monotonic() - started < 5
    assert isinstance(found[worker], Message)
    assert found[new] == Failure("no reply within 0.2 s")


@pytest.mark.parametrize("size", [2_000_000, 10**12])
def test_a_message_that_is_too_large_ends_the_connection(plain, size):
    sites, connect, _ = plain
    peer = connect().greet()
    wait_for(sites.nodes)
    peer.out.put(size.to_bytes(8, "big") + bytes(8) + b"0" * 100)

    (failure,) = ask(sites, 5).values()

    assert "at most 1000000 are allowed" in failure.reason or "lost" in failure.reason
    assert peer.refusal() == grpc.StatusCode.INVALID_ARGUMENT


def test_messages_that_no_request_asked_for_end_the_connection(plain, monkeypatch):
    monkeypatch.setattr(sites_module, "_MOST_UNEXPECTED", 5)
    sites, connect, _ = plain
    peer = connect().greet()
    wait_for(sites.nodes)
    for _ in range(10):
        peer.send(77)

    assert peer.refusal() == grpc.StatusCode.INVALID_ARGUMENT
    assert sites._replies.empty()


@pytest.mark.parametrize(
    ("limit", "total"),
    [
        (1_000_000, 10**9),
        (400_000_000, 10**8),
        pytest.param(400_000_000, 10**9, marks=pytest.mark.slow),
    ],
    ids=["too large", "not asked for", "a gigabyte not asked for"],
)
def test_zeros_take_no_memory(secured, limit, total):
    """A registered site sends the same chunk again and again, within the limit or beyond it."""
    home, tls = secured
    port, chunk = free_port(), bytes(PIECE)
    names, sent = ("127.0.0.1",), 0

    def zeros():
        nonlocal sent
        while sent < total:
            if sent % (320 * PIECE) == 0:  # a message of 84 MB
                size = 320 * PIECE - 16 if limit > 10**8 else 10**9
                yield size.to_bytes(8, "big") + (77).to_bytes(8, "big") + chunk[:-16]
            else:
                yield chunk
            sent += PIECE

    keys = AcceptedKeys(home / "keys")
    with NetworkSites("127.0.0.1", port, tls, keys, names=names, limit_bytes=limit):
        credentials = grpc.ssl_channel_credentials(tls.authority.read_bytes())
        peer = Peer(grpc.secure_channel(f"127.0.0.1:{port}", credentials, APART), zeros())
        peer.greet(key=home / "oslo.key")
        process, most = psutil.Process(), 0
        before = process.memory_info().rss
        peer.out.put(None)  # the zeros follow
        deadline = time.monotonic() + 240
        while peer.call.is_active() and sent < total and time.monotonic() < deadline:
            most = max(most, process.memory_info().rss - before)
            time.sleep(0.005)
        assert most < 60e6
        if limit < 10**8:
            assert peer.refusal() == grpc.StatusCode.INVALID_ARGUMENT
            assert sent < 10**8
        else:
            assert sent >= total
        peer.close()


@pytest.mark.parametrize("first", [10**6, 100])
def test_large_replies_are_received_a_few_at_a_time(plain, monkeypatch, first):
    monkeypatch.setattr(sites_module, "PIECE", 1000)
    sites, connect, _ = plain
    peers = [connect().greet() for _ in range(8)]
    wait_for(lambda: len(sites.nodes()) == 8)

    def reply(peer):
        number, _ = peer.receive()
        start, *rest = pieces(Message("reply", {"x": np.zeros(40_000)}, {}), number)
        for piece in filter(None, [start[:first], start[first:], *rest]):
            peer.out.put(piece)

    for peer in peers:
        in_background(lambda peer=peer: reply(peer))
    most, count = 0, 0
    for _, answer in sites.ask({node: Message("round") for node in sites.nodes()}, 10):
        time.sleep(0.02)  # the others wait meanwhile
        most = max(most, sites._replies.qsize())
        assert isinstance(answer, Message)
        count += 1
    assert count == 8
    assert most <= sites_module._LARGE_REPLIES


def test_streams_hold_neither_the_last_request_nor_the_last_reply(plain):
    sites, connect, _ = plain
    peer = connect().greet()
    wait_for(lambda: sites.nodes())

    def reply():
        number, _ = peer.receive()
        for piece in pieces(Message("reply", {"x": np.zeros(40_000)}, {}), number):
            peer.out.put(piece)

    in_background(reply)
    requests = {node: Message("round", {"x": np.ones(40_000)}) for node in sites.nodes()}
    held = [weakref.ref(one.arrays["x"]) for one in requests.values()]
    for _, answer in sites.ask(requests, 10):
        held.append(weakref.ref(answer.arrays["x"]))
    del answer, requests
    wait_for(lambda: not any(one() is not None for one in held))


@pytest.mark.parametrize("first", [b"", b"[]", b"{" * 9, b"x" * 9000])
def test_a_connection_without_a_proof_is_refused(plain, first):
    sites, connect, _ = plain
    peer = connect()
    next(peer.call)
    peer.out.put(first)
    assert peer.refusal() == grpc.StatusCode.INVALID_ARGUMENT
    assert sites.nodes() == []


def test_another_version_is_refused(plain):
    _, connect, _ = plain
    peer = connect()
    next(peer.call)
    peer.out.put(greeting(protocol=1))
    assert peer.refusal() == grpc.StatusCode.FAILED_PRECONDITION


def test_silent_connections_are_closed_and_do_not_keep_sites_out(plain, monkeypatch):
    monkeypatch.setattr(sites_module, "_PROOF_TIMEOUT", 0.3)
    monkeypatch.setattr(sites_module, "_MOST_UNPROVEN", 3)
    sites, connect, port = plain
    lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(1012)]  # half open
    silent = [connect() for _ in range(5)]
    codes = {peer.refusal() for peer in silent}
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}

    connect().greet()

    wait_for(lambda: len(sites.nodes()) == 1)
    for line in lines:
        line.close()


def test_a_port_in_use_is_reported(plain):
    _, _, port = plain
    with pytest.raises(FederationError, match="choose another"), NetworkSites("127.0.0.1", port):
        pass


def test_compressed_messages_are_refused(plain):
    """A megabyte of zeros would be a kilobyte on the wire."""
    sites, _, port = plain
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", APART, compression=grpc.Compression.Gzip)
    peer = Peer(channel)
    assert peer.refusal() == grpc.StatusCode.UNIMPLEMENTED
    assert sites.nodes() == []
    peer.close()


# ---------------------------------------------------------------------- keys


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    home = tmp_path_factory.mktemp("secured")
    tls = trial_certificates(["127.0.0.1"], home / "tls")
    for name in ("oslo", "stranger"):
        new_pair(name, home)
    (home / "keys").mkdir()
    (home / "oslo.pub").rename(home / "keys" / "oslo.pub")
    return home, tls


@pytest.fixture
def secure(secured, monkeypatch):
    monkeypatch.setattr("fedgmm.federation.network.keys._WATCH_INTERVAL", 0.0)
    home, tls = secured
    port, peers, lines = free_port(), [], []
    keys = AcceptedKeys(home / "keys", lines.append)
    with NetworkSites(
        "127.0.0.1", port, tls, keys, names=("127.0.0.1",), notify=lines.append
    ) as sites:

        def connect():
            credentials = grpc.ssl_channel_credentials(tls.authority.read_bytes())
            peers.append(Peer(grpc.secure_channel(f"127.0.0.1:{port}", credentials, APART)))
            return peers[-1]

        yield sites, connect, home, lines
        for peer in peers:
            peer.close()


def test_half_open_connections_without_a_key_do_not_keep_sites_out(secure):
    """As many as a machine has ports for one program; some send bytes that are not TLS."""
    sites, connect, home, lines = secure
    port = int(sites._address.rpartition(":")[2])
    halves = [socket.create_connection(("127.0.0.1", port)) for _ in range(1012)]
    for half in halves[::10]:
        half.sendall(bytes(100))
    peer = connect().greet(key=home / "oslo.key")
    wait_for(lambda: sites.nodes() == ["oslo"], 30)
    in_background(lambda: peer.send(peer.receive()[0], name="oslo"))
    (answer,) = ask(sites, 30).values()
    for half in halves:
        half.close()
    assert answer.facts["name"] == "oslo"
    assert lines == []


@pytest.mark.slow
def test_failed_handshakes_write_no_log(secured):
    """In a process of its own, because gRPC reads how much to log when it is imported."""
    _, tls = secured
    program = """
import socket, sys, time
from pathlib import Path
from fedgmm.federation.network.certificates import Tls
from fedgmm.federation.network.sites import NetworkSites
port = int(sys.argv[1])
with NetworkSites("127.0.0.1", port, Tls(*map(Path, sys.argv[2:]))):
    halves = [socket.create_connection(("127.0.0.1", port)) for _ in range(1012)]
    for half in halves[::10]:
        half.sendall(bytes(100))
    time.sleep(12)  # the handshakes time out after 10 s
"""
    files = [str(one) for one in (tls.certificate, tls.key, tls.authority)]
    done = subprocess.run(
        [sys.executable, "-c", program, str(free_port()), *files], capture_output=True, check=True
    )
    assert done.stdout + done.stderr == b""


def test_a_site_has_the_name_of_its_key(secure):
    sites, connect, home, _ = secure
    peer = connect().greet(key=home / "oslo.key")
    wait_for(lambda: sites.nodes() == ["oslo"])
    in_background(lambda: peer.send(peer.receive()[0], name="bergen"))
    (failure,) = ask(sites).values()
    assert "registered as 'oslo'" in failure.reason


@pytest.mark.parametrize(
    "change",
    [
        {"host": "other.org"},
        {"proof": "00"},
        {"proof": None},
        {"host": None},
        {"key": "stranger.key"},
    ],
)
def test_a_wrong_proof_is_refused(secure, change):
    sites, connect, home, _ = secure
    peer = connect()
    challenge = read_greeting(next(peer.call))["challenge"]
    path = home / change.get("key", "oslo.key")
    host = change.get("host", "127.0.0.1")
    facts = {
        "protocol": PROTOCOL,
        "instance": "one",
        "key": check_private_key(path).pem,
        "host": host,
        "proof": sign(read_private_key(path), challenge, str(host)),
    }
    peer.out.put(json.dumps(facts | {k: v for k, v in change.items() if k != "key"}).encode())
    assert peer.refusal() == grpc.StatusCode.UNAUTHENTICATED
    assert sites.nodes() == []


def test_a_second_process_with_the_same_key_is_refused_and_reported_once(secure):
    sites, connect, home, lines = secure
    connect().greet(key=home / "oslo.key")
    wait_for(sites.nodes)
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            connect().greet(key=home / "oslo.key", instance="two")
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert lines.count("A second client with the key of oslo is refused.") == 1
    assert sites.nodes() == ["oslo"]


def test_the_same_process_replaces_its_older_connection(secure):
    sites, connect, home, _ = secure
    connect().greet(key=home / "oslo.key")
    wait_for(sites.nodes)
    peer = connect().greet(key=home / "oslo.key")
    wait_for(sites.nodes)
    in_background(lambda: peer.send(peer.receive()[0], name="oslo"))
    (answer,) = ask(sites).values()
    assert answer.facts["name"] == "oslo"


def test_a_removed_key_loses_its_connection(secure, secured):
    sites, connect, home, lines = secure
    new_pair("bergen", home / "more")
    shutil_target = home / "keys" / "bergen.pub"
    shutil_target.write_bytes((home / "more" / "bergen.pub").read_bytes())
    wait_for(lambda: (sites.nodes(), "The key of bergen is now accepted." in lines)[1])
    peer = connect().greet(key=home / "more" / "bergen.key")
    wait_for(lambda: sites.nodes() == ["bergen"])
    shutil_target.unlink()
    wait_for(lambda: sites.nodes() == [])
    with pytest.raises((grpc.RpcError, StopIteration)):
        next(peer.call)


def test_a_client_logs_a_refused_plan_once_and_with_the_remedy(plain, tmp_path):
    sites, _, port = plain
    write_csv(tmp_path / "oslo.csv", draw_rows(np.random.default_rng(0), 40))
    lines, ends = [], []

    def client():
        site = Site(SiteSettings((tmp_path / "oslo.csv",), tmp_path / "oslo"))
        connection = Connection("127.0.0.1", port, None, None)
        try:
            take_part(site, connection, tmp_path / "oslo", notify=lines.append)
        except RefusedError as error:
            ends.append(str(error))

    def greet(rounds):
        plan = {"algorithm": "fedgmm", "rounds": rounds, "trials": False}
        (reply,) = ask(sites, kind="hello", protocol=PROTOCOL, agree=False, plan=plan).values()
        return reply

    thread = in_background(client)
    wait_for(sites.nodes, 20.0)
    assert greet(3).facts["name"] == "oslo"
    for _ in range(3):  # a server asks again until it has a reply
        assert "another plan" in greet(4).reason
    assert greet(3).facts["name"] == "oslo"  # the site is still here for the plan of its owner
    assert "another plan" in greet(4).reason  # a new refusal after a reply is logged again
    ask(sites, kind="refused", protocol=PROTOCOL, reason="the end")
    thread.join(20.0)

    logged = [line for line in lines if "another plan" in line]
    assert len(logged) == 2
    assert all("--forget" in line for line in logged)
    assert "the end" in ends[0]


def test_a_request_waits_until_the_site_is_welcome():
    """gRPC allows one write of a stream at a time; a second one would end the task that writes."""
    sites = NetworkSites("127.0.0.1", 0)

    class Context:
        sent, busy = [], False
        proofs = iter([greeting(protocol=PROTOCOL, instance="one")])

        async def write(self, piece):
            assert not self.busy
            self.busy = True
            if len(self.sent) == 1:  # the welcome
                sites._post(1, {node: Message("round") for node in sites.nodes()})
            await asyncio.sleep(0.001)
            self.busy = False
            self.sent.append(piece)

        async def read(self):
            proof = next(self.proofs, None)
            await asyncio.sleep(0 if proof else 0.05)
            return proof

    asyncio.run(sites._connect(None, Context()))
    sites._loop.close()
    assert len(Context.sent) == 3


def test_a_stream_ends_if_nothing_can_be_written():
    """Otherwise the site would count as connected and hear nothing."""
    sites = NetworkSites("127.0.0.1", 0)

    class Context:
        pieces = iter([greeting(protocol=PROTOCOL, instance="one")])
        written = 0

        async def write(self, piece):
            self.written += 1
            if self.written > 1:  # the welcome
                raise RuntimeError("the site is gone")

        async def read(self):
            piece = next(self.pieces, None)
            if piece is None:
                await asyncio.sleep(60)
            return piece

    begun = time.monotonic()
    asyncio.run(asyncio.wait_for(sites._connect(None, Context()), 10))
    sites._loop.close()
    assert time.monotonic() - begun < 5  # not by the limit
    assert not sites.nodes()
