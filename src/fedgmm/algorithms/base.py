"""What a method is: a client's step, a server's step, and the types they exchange.

``Shared`` is what the server broadcasts, ``Personal`` is what a client keeps to itself, ``Update`` is
what clients send. In one process ``Personal`` and ``Update`` hold many clients along a leading axis;
on a client's own machine the same functions see one client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from fedgmm.data.federated import ClientRows

Shared = TypeVar("Shared")
Personal = TypeVar("Personal")
Update = TypeVar("Update")


@dataclass(frozen=True)
class RoundInfo:
    """What one round tells about itself; nothing in training depends on it but the stopping rule.

    Attributes:
        log_likelihood: mean over rows under the parameters that entered the round.
        empty_components: components that no row belongs to any more.
    """

    log_likelihood: float
    empty_components: tuple[int, ...] = ()


class Method(Protocol[Shared, Personal, Update]):
    """One federated method."""

    def client_step(
        self, shared: Shared, personal: Personal, rows: ClientRows
    ) -> tuple[Personal, Update]:
        """What the clients in ``rows`` do with the broadcast parameters."""
        ...

    def server_step(self, shared: Shared, update: Update) -> tuple[Shared, RoundInfo]:
        """What the server makes of the clients' sums."""
        ...
