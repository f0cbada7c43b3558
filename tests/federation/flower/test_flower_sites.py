"""Requests over a fake grid: deadlines, late replies, errors, and replies of other nodes."""

import time

import numpy as np
import pytest
from flwr.app import Context, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedgmm.federation.flower.records import from_records, to_records
from fedgmm.federation.flower.sites import FlowerSites
from fedgmm.federation.messages import Failure, Message


@pytest.fixture(autouse=True)
def _task():
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


class FakeGrid(Grid):
    """A grid whose nodes are functions from a message to a reply or ``None``."""

    def __init__(self, nodes, delays=None):
        self.nodes = nodes
        self.delays = delays or {}
        self.sent = {}
        self.pulls = []
        self.count = -1
        self.fails_to_push = 0

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *_, **__):
        raise NotImplementedError

    def send_and_receive(self, *_, **__):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        if self.fails_to_push:
            self.fails_to_push -= 1
            raise ConnectionError("no connection")
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in self.nodes:
                ids.append(None)
                continue
            self.count += 1
            number = f"m{self.count}"
            message.metadata.__dict__["_message_id"] = number
            self.sent[number] = (time.monotonic(), message)
            ids.append(number)
        return ids

    def pull_messages(self, message_ids):
        self.pulls.append(list(message_ids))
        replies = []
        for number in message_ids:
            if number not in self.sent:
                continue
            when, message = self.sent[number]
            node = message.metadata.dst_node_id
            if time.monotonic() - when < self.delays.get(node, 0.0):
                continue
            reply = self.nodes[node](message)
            if reply is not None:
                del self.sent[number]
                replies.append(reply)
        return replies


def echo(message):
    return FlowerMessage(
        to_records(Message("answer", {"x": np.ones(2)}, {"name": "oslo"})), reply_to=message
    )


def with_error(code, reason="because"):
    return lambda message: FlowerMessage(Error(code, reason), reply_to=message)


def replying(content):
    return lambda message: FlowerMessage(content, reply_to=message)


def ask_all(grid, timeout=1.0, **options):
    sites = FlowerSites(grid, **options)
    return dict(sites.ask({node: Message("round") for node in sites.nodes()}, timeout))


def test_every_node_gets_its_own_request_and_all_reply():
    seen = {}

    def node(message):
        seen[message.metadata.dst_node_id] = message.content["words"]["facts"]
        return echo(message)

    sites = FlowerSites(FakeGrid({11: node, 22: node}))

    replies = dict(
        sites.ask({"11": Message("round", {}, {"a": 1}), "22": Message("round", {}, {"a": 2})}, 1)
    )

    assert {k: v.facts for k, v in replies.items()} == {
        "11": {"name": "oslo"},
        "22": {"name": "oslo"},
    }
    assert seen == {11: '{"a": 1}', 22: '{"a": 2}'}


def test_a_round_ends_at_its_deadline_without_the_missing_replies():
    start = time.monotonic()

    replies = ask_all(FakeGrid({1: echo, 2: lambda _: None}), timeout=0.5)

    assert 0.4 < time.monotonic() - start < 2.0
    assert isinstance(replies["1"], Message)
    assert replies["2"] == Failure("no reply within 0.5 s")


def test_a_message_expires_with_its_round():
    grid = FakeGrid({1: lambda _: None})

    ask_all(grid, timeout=0.3)

    assert [m.metadata.ttl for _, m in grid.sent.values()] == [0.3]


def test_a_late_reply_is_fetched_and_dropped(monkeypatch):
    lines = []
    grid = FakeGrid({1: echo}, delays={1: 0.4})
    sites = FlowerSites(grid, notify=lines.append)
    assert isinstance(dict(sites.ask({"1": Message("round")}, 0.2))["1"], Failure)
    grid.delays = {}
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 5)

    second = dict(sites.ask({"1": Message("round", {}, {"second": True})}, 1))

    assert isinstance(second["1"], Message)
    assert grid.pulls[-2:] == [["m0"], ["m1"]]  # the late one alone, then the new one alone
    assert any("deadline" in line for line in lines)


@pytest.mark.parametrize(
    ("node", "word"),
    [
        (with_error(5), "not connected"),
        (with_error(8), "process ended"),
        (with_error(2, "ZeroDivisionError"), "ZeroDivisionError"),
        (with_error(99), "error 99"),
        (replying(RecordDict({})), "not a message"),
        (
            replying(to_records(Message("failure", {}, {"reason": "no such file"}))),
            "the client reports: no such file",
        ),
        (replying(to_records(Message("answer", {"x": np.ones(20_000)}))), "at most 65536"),
    ],
)
def test_an_error_of_one_node_has_a_reason_and_does_not_affect_others(node, word):
    replies = ask_all(FakeGrid({1: echo, 2: node}), limit_bytes=65536)

    assert isinstance(replies["1"], Message)
    assert word in replies["2"].reason


def test_a_reply_of_another_node_is_refused():
    def impostor(message):
        metadata = Metadata(
            run_id=1,
            message_id="",
            src_node_id=666,
            dst_node_id=1,
            reply_to_message_id=message.metadata.message_id,
            group_id="",
            created_at=time.time(),
            ttl=10,
            message_type="query",
        )
        return make_message(metadata, to_records(Message("answer")))

    assert "another node" in ask_all(FakeGrid({1: impostor}))["1"].reason


def test_a_disconnected_node_and_an_interrupted_connection():
    grid = FakeGrid({1: echo})
    grid.fails_to_push = 1
    lines = []

    replies = dict(
        FlowerSites(grid, notify=lines.append).ask(
            {"1": Message("round"), "7": Message("round")}, 5
        )
    )

    assert isinstance(replies["1"], Message)
    assert "could not be sent" in replies["7"].reason
    assert "trying again" in lines[0]


def test_a_greeting_without_reply_does_not_delay_a_round(monkeypatch):
    monkeypatch.setattr("fedgmm.federation.messages.GREETING_TIMEOUT", 0.2)
    sites = FlowerSites(FakeGrid({1: echo, 2: lambda _: None}, delays={1: 0.4}))
    start = time.monotonic()

    replies = dict(sites.ask({"1": Message("round"), "2": Message("hello")}, 30))

    assert time.monotonic() - start < 3  # less than the timeout of 30 s
    assert isinstance(replies["1"], Message)
    assert replies["2"] == Failure("no reply within 0.2 s")


def test_a_greeting_alone_has_the_full_timeout(monkeypatch):
    monkeypatch.setattr("fedgmm.federation.messages.GREETING_TIMEOUT", 0.1)

    replies = dict(
        FlowerSites(FakeGrid({1: echo}, delays={1: 0.5})).ask({"1": Message("hello")}, 5)
    )

    assert isinstance(replies["1"], Message)


def test_without_requests_ask_returns_at_once():
    assert dict(FlowerSites(FakeGrid({})).ask({}, 60)) == {}


def test_the_client_app_reports_missing_settings():
    from fedgmm.federation.flower.client_app import app

    request = FlowerMessage(to_records(Message("hello")), dst_node_id=3, message_type="query")
    context = Context(1, 3, {}, RecordDict(), {})

    reply = app(request, context)

    assert "--node-config" in from_records(reply.content).facts["reason"]
