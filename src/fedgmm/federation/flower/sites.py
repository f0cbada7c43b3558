"""The sites of a federation as nodes of Flower's grid: send requests, collect replies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedgmm.federation.flower.records import from_records, to_records
from fedgmm.federation.messages import (
    LARGEST_MESSAGE,
    Failure,
    Message,
    MessageError,
    Notify,
    Reply,
    checked_reply,
    limits_of,
)

MESSAGE_TYPE = "query"
"""Flower's type of all our messages."""

_POLL = 0.1
_SEND_ATTEMPTS = 3
_REASONS = {
    1: "its Flower app could not be loaded; install the same version of fedgmm there",
    2: "its Flower app failed",
    3: "its reply did not arrive completely",
    4: "it did not reply in time",
    5: "it is not connected",
    8: "its process ended before it replied",
}
"""Reasons for Flower's error codes."""


class FlowerSites:
    """Send requests to the nodes of a grid and collect their replies until a deadline.

    Args:
        grid: Flower's grid.
        limit_bytes: size of the largest message that is sent or read.
        notify: called with a line about each dropped reply.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        limit_bytes: int = LARGEST_MESSAGE,
        notify: Notify = lambda _: None,
    ) -> None:
        self._grid = grid
        self._limit = limit_bytes
        self._notify = notify
        self._exchange = 0
        self._abandoned: dict[str, float] = {}

    def nodes(self) -> list[str]:
        """Return the ids of the nodes that are connected now."""
        return sorted(str(node) for node in self._grid.get_node_ids())

    def ask(self, requests: Mapping[str, Message], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Send each node its request, and yield the replies as they arrive, until the deadline.

        Flower drops messages after their deadline, so a late reply is never mixed up with a later one.
        """
        self._exchange += 1
        started, limits = time.monotonic(), limits_of(requests, timeout)
        self._drop_late_replies()
        waiting = self._send(requests, timeout)
        sent = set(waiting.values())
        for unsent in [node for node in requests if node not in sent]:
            yield unsent, Failure("the request could not be sent")
        while waiting:
            for reply in self._pull(waiting):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    yield node, self._read(node, reply)
            end = started + max((limits[node] for node in waiting.values()), default=0.0)
            if (left := end - time.monotonic()) <= 0:
                break  # greetings are sent again with the next requests
            time.sleep(min(_POLL, left))
        for message_id, node in waiting.items():
            self._abandoned[message_id] = time.monotonic() + 1.0
            yield node, Failure(f"no reply within {limits[node]:g} s")

    def _send(self, requests: Mapping[str, Message], timeout: float) -> dict[str, str]:
        """Send the requests, and return the nodes by the ids of the messages that were sent."""
        messages = {}
        for node, request in requests.items():
            messages[node] = FlowerMessage(
                to_records(request, limit_bytes=self._limit),
                dst_node_id=int(node),
                message_type=MESSAGE_TYPE,
                ttl=timeout,
                group_id=str(self._exchange),
            )
        ids: list[str | None] = []
        for attempt in range(_SEND_ATTEMPTS if messages else 0):
            try:
                ids = list(self._grid.push_messages(list(messages.values())))
                break
            except Exception as error:  # Flower raises errors of many classes
                self._notify(f"Sending requests failed ({_summary(error)}); trying again.")
                time.sleep(attempt + 1.0)
        return {one: node for one, node in zip(ids, messages, strict=False) if one}

    def _pull(self, waiting: Mapping[str, str]) -> list[FlowerMessage]:
        try:
            return list(self._grid.pull_messages(list(waiting)))
        except Exception as error:  # one unreadable reply must not end the round
            self._notify(f"Reading replies failed ({_summary(error)}); trying again.")
            return []

    def _read(self, node: str, reply: FlowerMessage) -> Reply:
        if reply.has_error():
            reason = _REASONS.get(reply.error.code, f"Flower's error {reply.error.code}")
            details = reply.error.reason if reply.error.code in (0, 2, 3) else ""
            return Failure(f"{reason}: {details}"[:500] if details else reason)
        if str(reply.metadata.src_node_id) != node:
            return Failure("another node replied in its place")
        try:
            message = from_records(reply.content, limit_bytes=self._limit)
        except MessageError as error:
            return Failure(f"its reply was dropped: {error}")
        return checked_reply(message, None)

    def _drop_late_replies(self) -> None:
        """Fetch and drop replies that came after their deadline, so that Flower deletes them."""
        over = [one for one, until in self._abandoned.items() if until < time.monotonic()]
        for message_id in over:
            del self._abandoned[message_id]
            try:
                late = list(self._grid.pull_messages([message_id]))
            except Exception:  # Flower has deleted it already
                continue
            if any(reply.has_content() for reply in late):
                self._notify("A reply that came after its deadline was dropped.")


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
