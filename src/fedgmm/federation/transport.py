"""What the server of a federation expects of whatever carries its questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fedgmm.federation.messages import Message

REPORTED = "the client reports: "
"""How the transport begins the reason of a failure that the site itself explained."""


@dataclass(frozen=True)
class Failure:
    """Why there is no answer, such as ``no answer within 60 s``.

    Attributes:
        reason: in words.
        who: the name that the node's key is registered under, where the transport knows it.
    """

    reason: str
    who: str | None = None


class Sites(Protocol):
    """The transport: nodes that can be asked."""

    def nodes(self) -> list[str]:
        """Ids of the nodes that are connected now; late ones appear here."""
        ...

    def ask(self, questions: Mapping[str, Message], timeout: float) -> dict[str, Message | Failure]:
        """Send each node its question at once.

        Returns when all have answered or when ``timeout`` seconds have passed; a node without an
        answer then gets a :class:`Failure`. A late answer to an older question is never mixed in.
        Greetings (``GREETINGS``) that go with other questions may be given up sooner, so that a node
        that nobody knows does not hold up those who work.
        """
        ...
