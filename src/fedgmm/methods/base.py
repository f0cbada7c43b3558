"""The interface of a method: a client's step, a server's step, and the sums between them.

``Shared`` is the server's broadcast, ``Personal`` stays with a client, and :class:`Sums` is what clients
send. In one process ``Personal`` holds many clients along a leading axis; on a client's own machine
the same functions see one client.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from fedgmm.core.gaussians import Gaussians
from fedgmm.core.labels import LabelFrequencies
from fedgmm.core.params import NOISE, Params, count_learners
from fedgmm.core.sums import Declaration, Sum, Sums, check_sums
from fedgmm.data.dataset import LabelledRows
from fedgmm.nets.networks import Network

if TYPE_CHECKING:
    from fedgmm.methods.gmm import FederatedGMM
    from fedgmm.methods.local_training import LocalTraining

SHARED_LEARNERS = ("fedgmm", "fedem", "fedavg", "fedprox", "clustered")
"""Methods whose learners serve several clients, so they do not know which labels a client has."""

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
Data = TypeVar("Data", bound="NamedRows", contravariant=True)

LARGEST_WEIGHT = 1e8
"""Largest absolute value of a learner's parameter; a few layers of larger ones overflow in float32."""

LEARNERS = "learners/"
"""The names of learners' parameters start with this among sums and in a broadcast."""


class NamedRows(Protocol):
    """Rows of named clients."""

    @property
    def names(self) -> tuple[Hashable, ...]:
        """Names of the clients."""

    def select(self, clients: Tensor) -> Self:
        """Return the rows of some clients, given as sorted codes."""


@dataclass(frozen=True)
class RoundInfo:
    """Diagnostics of a round, for the stopping rule, the history and warnings; no equation uses them."""

    log_likelihood: float  # mean over rows under the parameters that entered the round
    empty_components: tuple[int, ...] = ()  # components without rows


class DivergedError(ArithmeticError):
    """Training produced numbers that are not finite, on a client or in the shared model."""

    def __init__(self, client: Hashable | None = None, reason: str | None = None) -> None:
        where = "in the shared model" if client is None else f"on client {client!r}"
        super().__init__(reason or f"training diverged {where}")


class Method(Protocol[Shared, Personal, Data]):
    """The two steps of a round."""

    @abstractmethod
    def client_step(
        self, shared: Shared, personal: Personal, rows: Data, round_number: int = 1
    ) -> tuple[Personal, Sums]:
        """Run a round on the clients in ``rows``; return their personal parts and their sums."""

    @abstractmethod
    def server_step(
        self, shared: Shared, sums: Sums, round_number: int = 1
    ) -> tuple[Shared, RoundInfo]:
        """Return the new shared part from the sums over clients."""


@dataclass(frozen=True)
class Prediction:
    """All parameters that prediction needs, in the same form for every method.

    With Gaussians or several learners, a row's learners are mixed by the client's weights.
    Otherwise every client has one learner of its own, or shares one.
    """

    net: Network
    learners: Params  # stacked parameters, ``(G, ...)``
    gaussians: Gaussians | None = None  # the shared Gaussians, if the method has any
    # ``π_c(m1, m2)`` flattened, ``(C, M1 · G)``; ``None`` if clients are assigned
    client_weights: Tensor | None = None
    # the federation's own weights, ``(M1 · G,)``; ``None`` if clients are assigned
    weights: Tensor | None = None
    # the learner of each client, ``(C,)``; ``None`` if learners are mixed
    assignment: Tensor | None = None
    # the learner for rows without a client; ``None`` if there is no such learner
    default_learner: int | None = None
    # label frequencies of the clients, ``M = M1 · G``, if they are used
    labels: LabelFrequencies | None = None
    # number of rows that the federation's weights count for when a client joins, see
    # :func:`fedgmm.core.predictive.prior_strength`; ``None`` if it was not estimated
    prior_rows: float | None = None


class SupervisedMethod(Method[Shared, Personal, LabelledRows], ABC):
    """A method that learns labels."""

    training: LocalTraining  # local training of the learners
    # settings of the Gaussians that model the inputs; ``None`` without a density
    mixture: FederatedGMM | None = None
    shares_start: bool = True  # a client can make its first personal part from the broadcast alone

    @property
    def learners_only(self) -> SupervisedMethod[Shared, Personal] | None:
        """The method that trains only the learners, by exact steps; ``None`` if that is not possible."""
        return None

    # ------------------------------------------------------------------ training

    @abstractmethod
    def init(self, rows: LabelledRows, learner: Params | None = None) -> tuple[Shared, Personal]:
        """Return the start; ``learner`` is a trained one to start from, ``(...)``."""

    @abstractmethod
    def newcomer(self, shared: Shared, learner: Params | None = None) -> Personal:
        """Return a client's personal part before its first round, with a client axis of one.

        ``learner`` is the one that ``init`` was given, for methods without a shared part.
        """

    def finish(self, shared: Shared, personal: Personal, rows: LabelledRows) -> Personal:
        """Return the personal parts after the work that clients do once, after the last round."""
        return personal

    @abstractmethod
    def prediction(self, shared: Shared, personal: Personal) -> Prediction:
        """Return the fitted parameters."""

    def check_state(self, shared: Shared, personal: Personal) -> None:
        """Raise ``ValueError`` if a state that was read from a file does not fit the method."""
        for name, value in self.prediction(shared, personal).learners.items():
            if value.dtype != self.training.dtype:
                raise ValueError(f"{name} is {value.dtype}, not {self.training.dtype}.")

    # ------------------------------------------------------------------ sums and broadcasts

    def with_fewest_rows(self, rows: float) -> SupervisedMethod[Shared, Personal] | None:
        """Return the method of one client whose sums stand for at least so many rows each.

        ``None`` means that single rows may dominate what the client sends.
        """
        return None

    @abstractmethod
    def declare_sums(self, columns: int) -> dict[str, Sum]:
        """Declare the sums that a client sends in a round; ``columns`` is ``d`` of the Gaussians."""

    def check(self, sums: Sums, rows: int, declaration: Declaration) -> None:
        """Raise ``SumsError`` for sums of one client that ``rows`` rows could not have made."""
        check_sums(sums, declaration, rows)

    def of_client(self, sums: Sums, client: int) -> Sums:
        """Return sums that one client sent, with its code where the method keeps clients apart."""
        return sums

    @property
    def is_additive(self) -> bool:
        """Whether the server needs nothing but sums over clients."""
        return not any(one.gathered for one in self.declare_sums(1).values())

    def declare_broadcast(self, columns: int) -> dict[str, Sum]:
        """Declare the arrays that the server sends, in the same terms as the sums."""
        return self.declare_learners(1)

    def broadcast(self, shared: Shared, client: int | None = None) -> dict[str, Tensor]:
        """Return the arrays that the server sends to a client, given by its code.

        ``None`` stands for a client that does not take part.
        """
        learners: Params = getattr(shared, "learners", {})
        return {LEARNERS + name: value for name, value in learners.items()}

    @abstractmethod
    def received(self, arrays: Mapping[str, Tensor], columns: int) -> Shared:
        """Return the shared part from the arrays of :meth:`broadcast`, as a client sees it."""

    def admit(self, shared: Shared, clients: int) -> Shared:
        """Return a shared part that knows ``clients`` clients; new ones have the last codes."""
        return shared

    def cluster_of(self, shared: Shared, client: int | None) -> int:
        """Return a number that is equal for clients with the same broadcast."""
        return 0

    def declare_learners(self, count: int, rows: str | None = None) -> dict[str, Sum]:
        """Declare ``count`` stacked learners, or sums of them over the rows that ``rows`` counts."""
        return {
            LEARNERS + name: Sum(
                (count, *shape),
                rows=rows,
                lowest=0.0 if name == NOISE else -math.inf,
                largest=LARGEST_WEIGHT**2 if name == NOISE else LARGEST_WEIGHT,
                as_mean=True,
            )
            for name, shape in self.training.net.parameter_shapes.items()
        }


AnyMethod = SupervisedMethod[Any, Any]


def learners_in(arrays: Mapping[str, Tensor]) -> Params:
    """Return the learners' parameters among named arrays."""
    return Sums(arrays).below(LEARNERS)


def with_global_learner(net: Network, personal: Params, shared: Params) -> Prediction:
    """Return each client's own learner ``(C, 1, ...)``, and the global one for rows without a client."""
    clients = count_learners(personal)
    learners = {name: torch.cat([value[:, 0], shared[name]]) for name, value in personal.items()}
    return Prediction(net, learners, assignment=torch.arange(clients), default_learner=clients)
