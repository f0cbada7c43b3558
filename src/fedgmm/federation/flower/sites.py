"""The sites of a federation, reached through Flower's grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedgmm.federation.flower.records import FAILURE, from_records, to_records
from fedgmm.federation.messages import (
    GREETINGS,
    LARGEST_MESSAGE,
    REPORTED,
    Failure,
    Message,
    MessageError,
    Reply,
)
from fedgmm.federation.settings import FederationError

QUESTION = "query"
"""Flower's type of all our messages."""

_POLL = 0.1
_GREETING = 5.0  # seconds that a greeting may take beside other questions
_TRIES_TO_SEND = 3
_REASONS = {
    1: "its Flower app could not be loaded: is the same version of fedgmm installed there?",
    2: "its answer failed",
    3: "its answer did not arrive whole",
    4: "it did not answer in time",
    5: "it is not connected any more",
    8: "its process ended before it had answered",
}
"""Flower's error codes in plain words."""


class FlowerSites:
    """Questions to the nodes of a grid, with a deadline.

    Args:
        grid: Flower's.
        limit_bytes: the largest message that is sent or read.
        names: of the nodes whose keys are registered; such a node cannot call itself otherwise.
        is_up: whether the engine still runs.
        refresh: called before every look at who is there, and may change ``names``.
        notify: told of answers that were dropped.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        limit_bytes: int = LARGEST_MESSAGE,
        names: Mapping[str, str] | None = None,
        is_up: Callable[[], bool] = lambda: True,
        refresh: Callable[[], None] = lambda: None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._grid = grid
        self._limit = limit_bytes
        self._names = {} if names is None else names
        self._refresh = refresh
        self._is_up = is_up
        self._tell = notify
        self._exchange = 0
        self._abandoned: dict[str, float] = {}

    def nodes(self) -> list[str]:
        """Ids of the nodes that are connected now."""
        self._check_engine()
        self._refresh()
        return sorted(str(node) for node in self._grid.get_node_ids())

    def ask(self, requests: Mapping[str, Message], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Send each node its request, and yield the replies as they arrive, until the deadline.

        Flower drops messages that are older than the deadline, so a late reply never reaches a later
        request.
        """
        self._exchange += 1
        deadline = time.monotonic() + timeout
        self._forget_abandoned()
        failures: dict[str, Reply] = {}
        working = {node for node, one in requests.items() if one.kind not in GREETINGS}
        short = min(timeout, _GREETING) if working else timeout
        greeted = time.monotonic() + short
        waiting = self._send(requests, timeout, failures)
        yield from failures.items()
        while waiting and time.monotonic() < deadline:
            for reply in self._pull(waiting):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    yield node, self._read(node, reply)
            self._check_engine()
            if not working.intersection(waiting.values()) and time.monotonic() >= greeted:
                break  # only unknown nodes are left, which are greeted again later
            if waiting:
                time.sleep(min(_POLL, max(deadline - time.monotonic(), 0.0)))
        for message_id, node in waiting.items():
            seconds = timeout if node in working else short
            self._abandoned[message_id] = time.monotonic() + 1.0
            yield node, Failure(f"no reply within {seconds:g} s", self._names.get(node))

    def _check_engine(self) -> None:
        if not self._is_up():
            raise FederationError(
                "Flower's SuperLink ended by itself; see flower/log.txt in the run folder, and start "
                "the server again: it goes on from its last checkpoint."
            )

    def _send(
        self,
        questions: Mapping[str, Message],
        timeout: float,
        answers: dict[str, Reply],
    ) -> dict[str, str]:
        """Push the questions; the nodes that are waited for, by the ids of their messages."""
        messages = {}
        for node, question in questions.items():
            messages[node] = FlowerMessage(
                to_records(question, limit_bytes=self._limit),
                dst_node_id=int(node),
                message_type=QUESTION,
                ttl=timeout,
                group_id=str(self._exchange),
            )
        ids: list[str | None] = []
        for attempt in range(_TRIES_TO_SEND if messages else 0):
            try:
                ids = list(self._grid.push_messages(list(messages.values())))
                break
            except Exception as error:  # Flower's errors are of many kinds
                self._tell(f"Sending questions failed ({_words(error)}); trying again.")
                time.sleep(attempt + 1.0)
        waiting = {}
        for place, node in enumerate(messages):
            message_id = ids[place] if place < len(ids) else None
            if message_id:
                waiting[message_id] = node
            else:
                answers[node] = Failure("the question could not be sent to it")
        return waiting

    def _pull(self, waiting: Mapping[str, str]) -> list[FlowerMessage]:
        try:
            return list(self._grid.pull_messages(list(waiting)))
        except Exception as error:  # one answer that cannot be read must not end the round
            self._tell(f"Reading answers failed ({_words(error)}); trying again.")
            return []

    def _read(self, node: str, reply: FlowerMessage) -> Reply:
        if reply.has_error():
            reason = _REASONS.get(reply.error.code, f"Flower's error {reply.error.code}")
            details = reply.error.reason if reply.error.code in (0, 2, 3) else ""
            return Failure(f"{reason}: {details}"[:500] if details else reason)
        if str(reply.metadata.src_node_id) != node:
            return Failure("another node answered in its place")
        try:
            answer = from_records(reply.content, limit_bytes=self._limit)
        except MessageError as error:
            return Failure(f"its message was dropped: {error}")
        if answer.kind == FAILURE:
            return Failure(
                REPORTED + str(answer.facts.get("reason", ""))[:500], self._names.get(node)
            )
        name, known = answer.facts.get("name"), self._names.get(node)
        if known is not None and name is not None and name != known:
            return Failure(
                f"its key is registered as {known!r}, and it calls itself {name!r}; start it with "
                f"--name {known}"
            )
        return answer

    def _forget_abandoned(self) -> None:
        """Fetch what came after its deadline, and drop it, so that Flower need not keep it."""
        over = [one for one, until in self._abandoned.items() if until < time.monotonic()]
        for message_id in over:
            del self._abandoned[message_id]
            try:
                late = list(self._grid.pull_messages([message_id]))
            except Exception:  # it is gone already
                continue
            if any(reply.has_content() for reply in late):
                self._tell("An answer that came after its deadline was dropped.")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
