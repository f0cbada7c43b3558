"""What a method is: a client's step, a server's step, and the types they exchange.

``Shared`` is what the server broadcasts, ``Personal`` is what a client keeps to itself, ``Update`` is
what clients send. In one process ``Personal`` and ``Update`` hold many clients along a leading axis;
on a client's own machine the same functions see one client.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from torch import Tensor

from fedgmm.core.gaussians import Gaussians
from fedgmm.core.labels import LabelFrequencies
from fedgmm.core.params import Params
from fedgmm.data.dataset import LabelledRows
from fedgmm.nets.networks import Network

SHARED_LEARNERS = ("fedgmm", "fedem", "fedavg", "fedprox", "clustered")
"""Methods whose learners serve several clients, and know nothing of which labels a client has."""

TITLES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedavg+": "FedAvg+",
    "clustered": "Clustered FL",
    "pfedme": "pFedMe",
    "fedem": "FedEM",
    "fedgmm": "FedGMM",
}
"""The methods in the order of the paper's tables."""

DENSITY = "gmm"
"""The federated Gaussian mixture: FedGMM without learners, for rows without labels."""

Shared = TypeVar("Shared")
Personal = TypeVar("Personal")
Update = TypeVar("Update")
Data = TypeVar("Data", bound="Clients", contravariant=True)


class Clients(Protocol):
    """Rows of named clients, some of which can be picked."""

    @property
    def names(self) -> tuple[Hashable, ...]:
        """The clients."""
        ...

    def select(self, clients: Tensor) -> Self:
        """Only some clients, given as sorted codes."""
        ...


@dataclass(frozen=True)
class RoundInfo:
    """What one round tells about itself; nothing in training depends on it but the stopping rule.

    Attributes:
        log_likelihood: mean over rows under the parameters that entered the round.
        empty_components: components that no row belongs to any more.
    """

    log_likelihood: float
    empty_components: tuple[int, ...] = ()


class DivergedError(ArithmeticError):
    """Training produced numbers that are not finite; says on which client."""

    def __init__(self, client: Hashable) -> None:
        super().__init__(f"training diverged on client {client!r}")
        self.client = client


class Method(Protocol[Shared, Personal, Update, Data]):
    """One federated method."""

    def client_step(
        self, shared: Shared, personal: Personal, rows: Data, round_number: int = 1
    ) -> tuple[Personal, Update]:
        """What the clients in ``rows`` do with the broadcast parameters."""
        ...

    def server_step(
        self, shared: Shared, update: Update, round_number: int = 1
    ) -> tuple[Shared, RoundInfo]:
        """What the server makes of the clients' sums."""
        ...


@dataclass(frozen=True)
class Prediction:
    """All that prediction needs, the same for every method.

    With Gaussians or several learners, a row's learners are mixed by the client's weights. Otherwise
    every client has one learner of its own, or shares one.

    Attributes:
        net: the network.
        learners: stacked parameters, ``(G, ...)``.
        gaussians: the shared Gaussians, if the method has any.
        client_weights: ``π_c(m1, m2)`` flattened, ``(C, M1 · G)``; ``None`` if clients are assigned.
        weights: the federation's own weights, ``(M1 · G,)``; ``None`` if clients are assigned.
        assignment: the learner of each client, ``(C,)``; ``None`` if learners are mixed.
        default_learner: whom to ask for a row without a client; ``None`` if there is nobody.
        labels: how frequent labels are at the clients, ``M = M1 · G``, where that is to count.
    """

    net: Network
    learners: Params
    gaussians: Gaussians | None = None
    client_weights: Tensor | None = None
    weights: Tensor | None = None
    assignment: Tensor | None = None
    default_learner: int | None = None
    labels: LabelFrequencies | None = None


def count_learners(prediction: Prediction) -> int:
    """``M2``, or the number of assigned learners."""
    return len(next(iter(prediction.learners.values())))


class SupervisedMethod(Method[Shared, Personal, Update, LabelledRows], Protocol):
    """A method that learns labels."""

    def init(self, rows: LabelledRows, learner: Params | None = None) -> tuple[Shared, Personal]:
        """The start; ``learner`` is a trained one to start from, ``(...)`` without a learner axis."""
        ...

    def combine(self, updates: Sequence[Update]) -> Update:
        """One update from those of single clients, in the order of their names."""
        ...

    def newcomer(self, shared: Shared, learner: Params | None = None) -> Personal:
        """What a client keeps before its first round, with a client axis of one.

        ``learner`` is what ``init`` was given, for methods that share nothing.
        """
        ...

    def finish(self, shared: Shared, personal: Personal, rows: LabelledRows) -> Personal:
        """What clients do once after the last round."""
        ...

    def prediction(self, shared: Shared, personal: Personal) -> Prediction:
        """The fitted model."""
        ...
