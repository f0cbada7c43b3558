"""Clustered federated learning (Sattler et al., 2020): split the clients where their updates disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.params import Params, flatten, take_clients, weighted_sum
from fedgmm.core.servers import ServerOptimiser, ServerState
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import Prediction, RoundInfo
from fedgmm.methods.local import Fit, combined_fit, fit_of_own_learners
from fedgmm.methods.local_training import LocalTraining


@dataclass(frozen=True)
class ClusteredShared:
    """One learner a cluster, ``(G, ...)``; the cluster of each client by name order is personal.

    Attributes:
        learners: ``(G, ...)``.
        clusters: the cluster of each client, ``(C,)``.
        scale: mean norm of the clients' updates in the first round; zero before it.
        server: state of the server's optimiser, one for all clusters.
    """

    learners: Params
    clusters: Tensor
    scale: float
    server: ServerState


@dataclass(frozen=True)
class ClusteredUpdate:
    """What the server needs of every client: codes ``(A,)``, learners ``(A, 1, ...)``, rows ``(A,)``."""

    clients: Tensor
    learners: Params
    rows: Tensor
    fit: Fit


@dataclass(frozen=True)
class ClusteredFL:
    """FedAvg within clusters that are split in two by the cosine similarity of updates.

    A cluster is split when its average update has become small although some client still moves:
    ``‖Σ_c w_c Δ_c‖ < eps1`` and ``max_c ‖Δ_c‖ > eps2``. Both thresholds are in units of the mean norm
    of the clients' updates in the first round, so they do not depend on the learning rate. The noise
    of small clients meets both, too, but points everywhere: a split must also leave nobody whose
    update is like one on the other side.

    Attributes:
        training: local training.
        eps1: the cluster is nearly stationary below this.
        eps2: a client still moves above this.
        similarity: largest cosine similarity across the two sides of a split.
        smallest: clusters of fewer clients are not split.
        server: the server's optimiser.
    """

    training: LocalTraining
    eps1: float = 0.2
    eps2: float = 0.6
    similarity: float = 0.3
    smallest: int = 4
    server: ServerOptimiser = field(default_factory=ServerOptimiser)

    def init(
        self, rows: LabelledRows, learner: Params | None = None
    ) -> tuple[ClusteredShared, Tensor]:
        """One cluster with everybody in it; ``personal`` is each client's own code, ``(C,)``."""
        codes = torch.arange(len(rows.names), device=rows.device)
        learners = self.training.initial(1, rows.device, learner)
        return ClusteredShared(learners, torch.zeros_like(codes), 0.0, ServerState()), codes

    def client_step(
        self, shared: ClusteredShared, personal: Tensor, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Tensor, ClusteredUpdate]:
        """Every client trains the learner of its cluster."""
        start = {
            name: value[:, None]
            for name, value in take_clients(shared.learners, shared.clusters[personal]).items()
        }
        fit = fit_of_own_learners(self.training, start, rows)
        trained = self.training.train_personal(start, rows, round_number)
        present = torch.nonzero(rows.features.rows_per_client > 0).flatten()
        return personal, ClusteredUpdate(
            personal[present],
            take_clients(trained, present),
            rows.features.rows_per_client[present].double(),
            fit,
        )

    def server_step(
        self, shared: ClusteredShared, update: ClusteredUpdate, round_number: int = 1
    ) -> tuple[ClusteredShared, RoundInfo]:
        """Average within clusters, then split those that are stationary but not of one mind."""
        before = {
            name: value[:, None]
            for name, value in take_clients(
                shared.learners, shared.clusters[update.clients]
            ).items()
        }
        moves = (flatten(update.learners) - flatten(before))[:, 0]
        scale = shared.scale or float(torch.linalg.vector_norm(moves, dim=-1).mean())
        clusters = shared.clusters.clone()
        count = len(next(iter(shared.learners.values())))
        average = {name: value.double().clone() for name, value in shared.learners.items()}
        parents = list(range(count))
        for cluster in range(count):
            members = torch.nonzero(shared.clusters[update.clients] == cluster).flatten()
            if not len(members):
                continue
            weights = update.rows[members] / update.rows[members].sum()
            own = take_clients(update.learners, members)
            for name, value in weighted_sum(own, weights[:, None]).items():
                average[name][cluster] = value[0]
            halves = self._split(moves[members], weights, scale)
            if halves is not None:
                # positions within the cluster become codes of clients before they are used
                clusters[update.clients[members[halves]]] = len(parents)
                parents.append(cluster)
        share = self.training.rate_share(round_number)
        learners, server = self.server.step(shared.learners, average, shared.server, share)
        grown = {name: value[parents] for name, value in learners.items()}
        if len(parents) > count:
            server = ServerState()  # the averages of old clusters do not fit the new ones
        return ClusteredShared(grown, clusters, scale, server), update.fit.info()

    def _split(self, moves: Tensor, weights: Tensor, scale: float) -> Tensor | None:
        """Which members leave for a new cluster, as a mask ``(A,)``; ``None`` if nobody does."""
        if len(moves) < self.smallest:
            return None
        norms = torch.linalg.vector_norm(moves, dim=-1)
        together = torch.linalg.vector_norm((weights[:, None] * moves).sum(0))
        if not (float(together) < self.eps1 * scale and float(norms.max()) > self.eps2 * scale):
            return None
        directions = moves / norms.clamp_min(1e-12)[:, None]
        alike = (directions @ directions.mT).cpu().numpy()
        leaves = bipartition(alike)
        if alike[leaves][:, ~leaves].max() > self.similarity:
            return None
        return torch.from_numpy(leaves).to(moves.device)

    def combine(self, updates: Sequence[ClusteredUpdate]) -> ClusteredUpdate:
        """The learners of all clients beside each other."""
        learners = {
            name: torch.cat([update.learners[name] for update in updates])
            for name in updates[0].learners
        }
        return ClusteredUpdate(
            torch.cat([update.clients for update in updates]),
            learners,
            torch.cat([update.rows for update in updates]),
            combined_fit([update.fit for update in updates]),
        )

    def newcomer(self, shared: ClusteredShared, learner: Params | None = None) -> Tensor:
        """The first code; a client that is told of its own cluster only knows no other."""
        return torch.zeros(1, dtype=torch.int64)

    def finish(self, shared: ClusteredShared, personal: Tensor, rows: LabelledRows) -> Tensor:
        """Nothing is left to do."""
        return personal

    def prediction(self, shared: ClusteredShared, personal: Tensor) -> Prediction:
        """The learner of the client's cluster; the largest cluster's for everybody else."""
        count = len(next(iter(shared.learners.values())))
        largest = int(torch.bincount(shared.clusters, minlength=count).argmax())
        return Prediction(
            self.training.net,
            shared.learners,
            assignment=shared.clusters[personal],
            default_learner=largest,
        )


def bipartition(similarity: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The two groups with the smallest largest similarity across them, as a mask ``(A,)``.

    Joining the most similar until two groups are left, which is single linkage, finds them (Sattler
    et al., algorithm 1).
    """
    from sklearn.cluster import AgglomerativeClustering

    distance = np.clip(1.0 - similarity, 0.0, 2.0)
    clustering = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="single")
    labels = clustering.fit_predict(distance)
    # the first client stays, so that the order of labels means nothing
    return np.asarray(labels != labels[0])
