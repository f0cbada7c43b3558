"""Answers that arrive in pieces, never arrive whole, or cannot be read hold nobody up."""

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedgmm.federation.flower.inner import _CarefulGrid
from fedgmm.federation.flower.records import to_records
from fedgmm.federation.flower.sites import FlowerSites
from fedgmm.federation.messages import Failure, Message

RUN = 1


class Engine:
    """As much of a SuperLink as a grid sees: answers, and the pieces that have arrived."""

    def __init__(self):
        self.answers = {}
        self.pieces = {}
        self.asked = []
        self.confirmed = []

    def answer(self, question, node, size=5, without=0, broken=False):
        """A node answers; some of the pieces do not come, or are not what they should be."""
        asked = FlowerMessage(to_records(Message("round")), dst_node_id=node, message_type="query")
        asked.metadata.__dict__["_message_id"] = question
        content = to_records(Message("answer", {"x": np.arange(size) + node}, {"node": node}))
        reply = FlowerMessage(content, reply_to=asked)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        pieces = {key: one.deflate() for key, one in get_all_nested_objects(reply).items()}
        keys = list(pieces)
        for key in keys[:without]:
            del pieces[key]
        if broken:
            pieces[keys[0]] = b"\x80\x04nonsense"
        self.pieces |= pieces
        told = message_to_proto(remove_content_from_message(reply))
        self.answers[question] = (told, get_object_tree(reply))
        return {key: get_all_nested_objects(reply)[key].deflate() for key in keys[:without]}

    def PullMessages(self, request):  # noqa: N802
        self.asked.append(set(request.message_ids))
        found = [self.answers.pop(one) for one in request.message_ids if one in self.answers]
        return PullAppMessagesResponse(
            messages_list=[told for told, _ in found],
            message_object_trees=[tree for _, tree in found],
        )

    def PullObject(self, request):  # noqa: N802
        piece = self.pieces.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=piece is not None, object_content=piece or b""
        )

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.confirmed.append(request.message_object_id)


class Grid(_CarefulGrid):
    run = SimpleNamespace(run_id=RUN)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def grid(engine):
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, 1
    grid = Grid("127.0.0.1:1", insecure=True, token="t")
    grid._client = engine
    return grid


def names(messages):
    return {m.metadata.reply_to_message_id for m in messages}


def test_whole_answers_come_at_once(grid, engine):
    engine.answer("q1", 11)
    engine.answer("q2", 22)

    found = list(grid.pull_messages(["q1", "q2", "q3"]))

    assert names(found) == {"q1", "q2"}
    assert all(message.has_content() for message in found)
    assert len(engine.confirmed) == 2


def test_an_answer_that_never_arrives_whole_holds_nobody_up(grid, engine):
    engine.answer("q1", 11, without=2)
    engine.answer("q2", 22)

    for _ in range(3):
        found = list(grid.pull_messages(["q1", "q2"]))
        if found:
            assert names(found) == {"q2"}

    assert "q1" not in set().union(*engine.asked[1:])  # Flower has forgotten it, and would say so
    assert list(grid.pull_messages(["q9"])) == []  # after the deadline nobody waits for it
    assert grid._arriving == ()


def test_an_answer_whose_pieces_come_later_is_read_then(grid, engine):
    late = engine.answer("q1", 11, without=3)
    assert list(grid.pull_messages(["q1"])) == []

    engine.pieces |= late

    (found,) = grid.pull_messages(["q1"])
    assert found.has_content()
    assert found.metadata.src_node_id == 11


def test_an_answer_that_cannot_be_read_is_an_error_of_its_sender_alone(grid, engine):
    engine.answer("q1", 11, broken=True)
    engine.answer("q2", 22)

    found = {m.metadata.reply_to_message_id: m for m in grid.pull_messages(["q1", "q2"])}

    assert found["q1"].has_error()
    assert found["q2"].has_content()
    sites = FlowerSites(grid)
    assert isinstance(sites._read("11", found["q1"]), Failure)
    assert isinstance(sites._read("22", found["q2"]), Message)


def test_an_answer_that_is_too_large_is_not_fetched_to_its_end(grid, engine):
    grid.limit_bytes = 1_000_000
    large = 70_000_000  # bytes, in pieces of 5 MB
    engine.answer("q1", 11, size=large // 8)
    engine.answer("q2", 22)
    fetched, pull = [], engine.PullObject
    engine.PullObject = lambda request: fetched.append(pull(request)) or fetched[-1]

    found = {m.metadata.reply_to_message_id: m for m in grid.pull_messages(["q1", "q2"])}

    assert "larger than the largest message" in found["q1"].error.reason
    assert found["q2"].has_content()
    assert sum(len(one.object_content) for one in fetched) < large + 1_000_000
    assert len(engine.confirmed) == 2  # nobody keeps its pieces


def test_an_answer_in_very_many_pieces_is_not_fetched_at_all(grid, engine):
    grid.limit_bytes = 1_000_000
    engine.answer("q1", 11)
    told, tree = engine.answers["q1"]
    for number in range(200):
        tree.children.add(object_id=f"{number:064d}")
    engine.answers["q1"] = (told, tree)
    engine.PullObject = None

    (found,) = grid.pull_messages(["q1"])

    assert "too many pieces" in found.error.reason
