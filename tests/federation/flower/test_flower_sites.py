"""Questions over a grid, without processes: deadlines, late answers, errors, and answers of others."""

import time

import numpy as np
import pytest
from flwr.app import Context, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedgmm.federation.flower import sites as sites_module
from fedgmm.federation.flower.records import failure, to_records
from fedgmm.federation.flower.sites import FlowerSites
from fedgmm.federation.messages import Failure, Message
from fedgmm.federation.settings import FederationError


@pytest.fixture(autouse=True)
def _task():
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


class FakeGrid(Grid):
    """Nodes are functions from a message to an answer, or to nothing."""

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
            raise ConnectionError("no line")
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
        answers = []
        for number in message_ids:
            if number not in self.sent:
                continue
            when, message = self.sent[number]
            node = message.metadata.dst_node_id
            if time.monotonic() - when < self.delays.get(node, 0.0):
                continue
            answer = self.nodes[node](message)
            if answer is not None:
                del self.sent[number]
                answers.append(answer)
        return answers


def echo(message):
    return FlowerMessage(
        to_records(Message("answer", {"x": np.ones(2)}, {"name": "oslo"})), reply_to=message
    )


def with_error(code, reason="because"):
    return lambda message: FlowerMessage(Error(code, reason), reply_to=message)


def replies(content):
    return lambda message: FlowerMessage(content, reply_to=message)


def asked(grid, timeout=1.0, **options):
    sites = FlowerSites(grid, **options)
    return sites.ask({node: Message("round") for node in sites.nodes()}, timeout)


def test_every_node_gets_its_own_question_and_all_answer():
    seen = {}

    def node(message):
        seen[message.metadata.dst_node_id] = message.content["words"]["facts"]
        return echo(message)

    sites = FlowerSites(FakeGrid({11: node, 22: node}))

    answers = sites.ask(
        {"11": Message("round", {}, {"a": 1}), "22": Message("round", {}, {"a": 2})}, 1
    )

    assert {k: v.facts for k, v in answers.items()} == {
        "11": {"name": "oslo"},
        "22": {"name": "oslo"},
    }
    assert seen == {11: '{"a": 1}', 22: '{"a": 2}'}


def test_a_round_closes_at_its_deadline_without_those_that_are_missing():
    start = time.monotonic()

    answers = asked(FakeGrid({1: echo, 2: lambda _: None}), timeout=0.5)

    assert 0.4 < time.monotonic() - start < 2.0
    assert isinstance(answers["1"], Message)
    assert answers["2"] == Failure("no answer within 0.5 s")


def test_a_message_lives_no_longer_than_its_round():
    grid = FakeGrid({1: lambda _: None})

    asked(grid, timeout=0.3)

    assert [m.metadata.ttl for _, m in grid.sent.values()] == [0.3]


def test_a_late_answer_is_fetched_and_dropped(monkeypatch):
    lines = []
    grid = FakeGrid({1: echo}, delays={1: 0.4})
    sites = FlowerSites(grid, notify=lines.append)
    assert isinstance(sites.ask({"1": Message("round")}, 0.2)["1"], Failure)
    grid.delays = {}
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 5)

    second = sites.ask({"1": Message("round", {}, {"second": True})}, 1)

    assert isinstance(second["1"], Message)
    assert grid.pulls[-2:] == [["m0"], ["m1"]]  # the late one alone, then the new one alone
    assert any("after its deadline" in line for line in lines)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (with_error(5), "not connected any more"),
        (with_error(8), "process ended"),
        (with_error(2, "ZeroDivisionError"), "ZeroDivisionError"),
        (with_error(99), "error 99"),
        (replies(RecordDict({})), "not a message of fedgmm"),
        (replies(to_records(failure("no such file"))), "the client reports: no such file"),
        (replies(to_records(Message("answer", {"x": np.ones(20_000)}))), "at most 65536"),
    ],
)
def test_what_goes_wrong_at_one_node_is_told_in_words_and_hurts_no_other(node, words):
    answers = asked(FakeGrid({1: echo, 2: node}), limit_bytes=65536)

    assert isinstance(answers["1"], Message)
    assert words in answers["2"].reason


def test_an_answer_of_another_node_is_refused():
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

    assert "another node" in asked(FakeGrid({1: impostor}))["1"].reason


def test_a_registered_node_cannot_take_the_name_of_another():
    answers = asked(FakeGrid({1: echo, 2: echo}), names={"1": "oslo", "2": "bergen"})

    assert isinstance(answers["1"], Message)
    assert "registered as 'bergen', and it calls itself 'oslo'" in answers["2"].reason


def test_a_node_that_left_and_a_line_that_is_down_for_a_moment():
    grid = FakeGrid({1: echo})
    grid.fails_to_push = 1
    lines = []

    answers = FlowerSites(grid, notify=lines.append).ask(
        {"1": Message("round"), "7": Message("round")}, 5
    )

    assert isinstance(answers["1"], Message)
    assert "could not be sent" in answers["7"].reason
    assert "trying again" in lines[0]


def test_nobody_waits_for_an_engine_that_is_gone():
    with pytest.raises(FederationError, match="ended by itself"):
        asked(FakeGrid({1: lambda _: None}), timeout=60, is_up=lambda: False)


def test_a_silent_stranger_does_not_hold_up_those_who_work(monkeypatch):
    monkeypatch.setattr(sites_module, "_GREETING", 0.2)
    sites = FlowerSites(FakeGrid({1: echo, 2: lambda _: None}, delays={1: 0.4}))
    start = time.monotonic()

    answers = sites.ask({"1": Message("round"), "2": Message("hello")}, 30)

    assert time.monotonic() - start < 3  # and not 30
    assert isinstance(answers["1"], Message)
    assert answers["2"] == Failure("no answer within 0.2 s")


def test_a_greeting_alone_is_waited_for(monkeypatch):
    monkeypatch.setattr(sites_module, "_GREETING", 0.1)

    answers = FlowerSites(FakeGrid({1: echo}, delays={1: 0.5})).ask({"1": Message("hello")}, 5)

    assert isinstance(answers["1"], Message)


def test_a_failure_says_whose_key_it_is():
    nodes = {1: lambda _: None, 2: replies(to_records(failure("no label")))}

    answers = asked(FakeGrid(nodes), timeout=0.2, names={"1": "oslo", "2": "bergen"})

    assert {answer.who for answer in answers.values()} == {"oslo", "bergen"}


def test_names_may_change_while_the_server_runs():
    names, looks = {"1": "bergen"}, []

    def refresh():
        looks.append(names.update({"1": "oslo"}))

    sites = FlowerSites(FakeGrid({1: echo}), names=names, refresh=refresh)
    assert "registered as 'bergen'" in sites.ask({"1": Message("round")}, 1)["1"].reason

    sites.nodes()

    assert isinstance(sites.ask({"1": Message("round")}, 1)["1"], Message)


def test_no_questions_need_no_time():
    assert FlowerSites(FakeGrid({})).ask({}, 60) == {}


def test_the_client_app_says_what_its_node_lacks():
    from fedgmm.federation.flower.client_app import app
    from fedgmm.federation.flower.records import from_records

    question = FlowerMessage(to_records(Message("hello")), dst_node_id=3, message_type="query")
    context = Context(1, 3, {}, RecordDict(), {})

    reply = app(question, context)

    assert "--node-config" in from_records(reply.content).facts["reason"]
