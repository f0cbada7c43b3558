"""Partial, incomplete and unreadable replies do not delay the replies of other nodes."""

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

from fedgmm.federation.flower.flower_internals import _CarefulGrid
from fedgmm.federation.flower.records import to_records
from fedgmm.federation.flower.sites import FlowerSites
from fedgmm.federation.messages import Failure, Message

RUN = 1


class SuperLink:
    """A fake SuperLink: replies, and the parts of them that have arrived."""

    def __init__(self):
        self.replies = {}
        self.parts = {}
        self.requested = []
        self.confirmed = []

    def reply(self, request_id, node, size=5, without=0, broken=False):
        """Add the reply of a node; some parts may be missing or broken."""
        request = FlowerMessage(
            to_records(Message("round")), dst_node_id=node, message_type="query"
        )
        request.metadata.__dict__["_message_id"] = request_id
        content = to_records(Message("answer", {"x": np.arange(size) + node}, {"node": node}))
        reply = FlowerMessage(content, reply_to=request)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        parts = {key: one.deflate() for key, one in get_all_nested_objects(reply).items()}
        keys = list(parts)
        for key in keys[:without]:
            del parts[key]
        if broken:
            parts[keys[0]] = b"\x80\x04nonsense"
        self.parts |= parts
        announced = message_to_proto(remove_content_from_message(reply))
        self.replies[request_id] = (announced, get_object_tree(reply))
        return {key: get_all_nested_objects(reply)[key].deflate() for key in keys[:without]}

    def PullMessages(self, request):  # noqa: N802
        self.requested.append(set(request.message_ids))
        found = [self.replies.pop(one) for one in request.message_ids if one in self.replies]
        return PullAppMessagesResponse(
            messages_list=[announced for announced, _ in found],
            message_object_trees=[tree for _, tree in found],
        )

    def PullObject(self, request):  # noqa: N802
        part = self.parts.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=part is not None, object_content=part or b""
        )

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.confirmed.append(request.message_object_id)


class Grid(_CarefulGrid):
    run = SimpleNamespace(run_id=RUN)


@pytest.fixture
def superlink():
    return SuperLink()


@pytest.fixture
def grid(superlink):
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, 1
    grid = Grid("127.0.0.1:1", insecure=True, token="t")
    grid._client = superlink
    return grid


def names(messages):
    return {m.metadata.reply_to_message_id for m in messages}


def test_complete_replies_are_returned_at_once(grid, superlink):
    superlink.reply("q1", 11)
    superlink.reply("q2", 22)

    found = list(grid.pull_messages(["q1", "q2", "q3"]))

    assert names(found) == {"q1", "q2"}
    assert all(message.has_content() for message in found)
    assert len(superlink.confirmed) == 2


def test_an_incomplete_reply_does_not_delay_others(grid, superlink):
    superlink.reply("q1", 11, without=2)
    superlink.reply("q2", 22)

    for _ in range(3):
        found = list(grid.pull_messages(["q1", "q2"]))
        if found:
            assert names(found) == {"q2"}

    assert "q1" not in set().union(
        *superlink.requested[1:]
    )  # Flower has forgotten it and would return an error
    assert list(grid.pull_messages(["q9"])) == []  # its deadline has passed
    assert grid._partial == ()


def test_a_reply_whose_parts_come_later_is_read_then(grid, superlink):
    late = superlink.reply("q1", 11, without=3)
    assert list(grid.pull_messages(["q1"])) == []

    superlink.parts |= late

    (found,) = grid.pull_messages(["q1"])
    assert found.has_content()
    assert found.metadata.src_node_id == 11


def test_an_unreadable_reply_is_an_error_of_its_sender_only(grid, superlink):
    superlink.reply("q1", 11, broken=True)
    superlink.reply("q2", 22)

    found = {m.metadata.reply_to_message_id: m for m in grid.pull_messages(["q1", "q2"])}

    assert found["q1"].has_error()
    assert found["q2"].has_content()
    sites = FlowerSites(grid)
    assert isinstance(sites._read("11", found["q1"]), Failure)
    assert isinstance(sites._read("22", found["q2"]), Message)


def test_a_reply_that_is_too_large_is_not_fetched_completely(grid, superlink):
    grid.limit_bytes = 1_000_000
    large = 70_000_000  # bytes, in parts of 5 MB
    superlink.reply("q1", 11, size=large // 8)
    superlink.reply("q2", 22)
    fetched, pull = [], superlink.PullObject
    superlink.PullObject = lambda request: fetched.append(pull(request)) or fetched[-1]

    found = {m.metadata.reply_to_message_id: m for m in grid.pull_messages(["q1", "q2"])}

    assert "largest message" in found["q1"].error.reason
    assert found["q2"].has_content()
    assert sum(len(one.object_content) for one in fetched) < large + 1_000_000
    assert len(superlink.confirmed) == 2  # Flower may delete both


def test_a_reply_with_too_many_parts_is_not_fetched_at_all(grid, superlink):
    grid.limit_bytes = 1_000_000
    superlink.reply("q1", 11)
    announced, tree = superlink.replies["q1"]
    for number in range(200):
        tree.children.add(object_id=f"{number:064d}")
    superlink.replies["q1"] = (announced, tree)
    superlink.PullObject = None

    (found,) = grid.pull_messages(["q1"])

    assert "too many" in found.error.reason
