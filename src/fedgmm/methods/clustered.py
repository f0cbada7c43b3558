"""Clustered federated learning (Sattler et al., 2020): split the clients where their updates disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.params import Params, count_learners, flatten, take_clients, weighted_sum
from fedgmm.core.server_optimisers import ServerOptimiser, ServerState
from fedgmm.core.sums import Sum, Sums
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import LEARNERS, Prediction, RoundInfo, learners_in
from fedgmm.methods.local import FIT, OwnLearners, fit_info, fit_of_own_learners
from fedgmm.methods.local_training import LocalTraining

CLIENTS = "clients"
"""The codes of the clients among the entries of an update."""


@dataclass(frozen=True)
class ClusteredShared:
    """One learner per cluster."""

    learners: Params  # ``(G, ...)``
    clusters: Tensor  # the cluster of each client, ``(C,)``
    scale: float  # mean norm of the clients' updates in the first round; zero before it
    server: ServerState  # state of the server's optimiser, one for all clusters


@dataclass(frozen=True)
class ClusteredFL(OwnLearners[ClusteredShared, Tensor]):
    """FedAvg within clusters that are split in two by the cosine similarity of updates.

    The server needs the update of every single client, so this method works on more than sums: its
    declaration says ``gathered``, and secure aggregation cannot protect it.

    A cluster is split when its average update has become small although some client still moves:
    ``‖Σ_c w_c Δ_c‖ < eps1`` and ``max_c ‖Δ_c‖ > eps2``. Both thresholds are in units of the mean norm
    of the clients' updates in the first round, so they do not depend on the learning rate. The noise
    of small clients meets both, too, but points in all directions. So a split also requires that no
    update resembles one on the other side.
    """

    training: LocalTraining
    eps1: float = 0.2  # the cluster is nearly stationary below this
    eps2: float = 0.6  # a client still moves above this
    similarity: float = 0.3  # largest cosine similarity across the two sides of a split
    smallest: int = 4  # clusters of fewer clients are not split
    server: ServerOptimiser = field(default_factory=ServerOptimiser)  # the server's optimiser

    def init(
        self, rows: LabelledRows, learner: Params | None = None
    ) -> tuple[ClusteredShared, Tensor]:
        """Start with one cluster of all clients; ``personal`` is each client's own code, ``(C,)``."""
        codes = torch.arange(len(rows.names), device=rows.device)
        learners = self.training.initial(1, rows.device, learner)
        return ClusteredShared(learners, torch.zeros_like(codes), 0.0, ServerState()), codes

    def client_step(
        self, shared: ClusteredShared, personal: Tensor, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Tensor, Sums]:
        """Train the learner of its cluster on every client."""
        start = self._learners_of(shared, personal)
        fit = fit_of_own_learners(self.training, start, rows)
        trained = self.training.train_personal(start, rows, round_number, averaged=True)
        present = torch.nonzero(rows.features.rows_per_client > 0).flatten()
        entries = {
            CLIENTS: personal[present],
            "rows": rows.features.weight_per_client[present].double(),
            **{LEARNERS + n: v[present, 0] for n, v in trained.items()},
        }
        return personal, Sums({**fit, **entries}, gathered=entries)

    @staticmethod
    def _learners_of(shared: ClusteredShared, clients: Tensor) -> Params:
        """Return the learners of the clients' clusters, ``(A, 1, ...)``."""
        own = take_clients(shared.learners, shared.clusters[clients])
        return {name: value[:, None] for name, value in own.items()}

    def server_step(
        self, shared: ClusteredShared, sums: Sums, round_number: int = 1
    ) -> tuple[ClusteredShared, RoundInfo]:
        """Average within clusters, then split those that are stationary but disagree."""
        clients, rows = sums[CLIENTS], sums["rows"]
        order = torch.argsort(clients)  # entries lie in the order of their arrival
        trained = {name: value[:, None] for name, value in sums.below(LEARNERS).items()}
        moves = (flatten(trained) - flatten(self._learners_of(shared, clients)))[:, 0]
        scale = shared.scale or float(torch.linalg.vector_norm(moves, dim=-1)[order].mean())
        clusters = shared.clusters.clone()
        count = count_learners(shared.learners)
        average = {name: value.double().clone() for name, value in shared.learners.items()}
        parents = list(range(count))
        for cluster in range(count):
            members = order[shared.clusters[clients[order]] == cluster]
            if not len(members):
                continue
            weights = rows[members] / rows[members].sum()
            own = take_clients(trained, members)
            for name, value in weighted_sum(own, weights[:, None]).items():
                average[name][cluster] = value[0]
            halves = self._split(moves[members], weights, scale)
            if halves is not None:
                # positions within the cluster become codes of clients before they are used
                clusters[clients[members[halves]]] = len(parents)
                parents.append(cluster)
        share = self.training.rate_share(round_number)
        learners, server = self.server.step(shared.learners, average, shared.server, share)
        grown = {name: value[parents] for name, value in learners.items()}
        if len(parents) > count:
            server = ServerState()  # the averages of old clusters do not fit the new ones
        return ClusteredShared(grown, clusters, scale, server), fit_info(sums)

    def _split(self, moves: Tensor, weights: Tensor, scale: float) -> Tensor | None:
        """Return which members move to a new cluster, as a mask ``(A,)``; ``None`` without a split."""
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

    def newcomer(self, shared: ClusteredShared, learner: Params | None = None) -> Tensor:
        """Return the first code, because a broadcast holds the client's own cluster only."""
        return torch.zeros(1, dtype=torch.int64)

    def prediction(self, shared: ClusteredShared, personal: Tensor) -> Prediction:
        """Return the learner of each client's cluster; the largest cluster's is the default."""
        return Prediction(
            self.training.net,
            shared.learners,
            assignment=shared.clusters[personal],
            default_learner=self.cluster_of(shared, None),
        )

    # ------------------------------------------------------------------ sums and broadcasts

    def declare_sums(self, columns: int) -> dict[str, Sum]:
        """Declare the learners of single clients, which are not sums, and the fit."""
        learners = self.declare_learners(1, rows="rows").items()
        entries = {name: replace(one, gathered=True) for name, one in learners}
        return {**FIT, "rows": Sum((1,), lowest=0.0, gathered=True), **entries}

    def of_client(self, sums: Sums, client: int) -> Sums:
        """Add the client's code to its entries."""
        code = torch.tensor([client])
        return Sums({**sums, CLIENTS: code}, gathered=[*sums.gathered, CLIENTS])

    def cluster_of(self, shared: ClusteredShared, client: int | None) -> int:
        """Return the cluster of a client; the largest one for a client that does not take part."""
        if client is not None:
            return int(shared.clusters[client])
        counts = torch.bincount(shared.clusters, minlength=count_learners(shared.learners))
        return int(counts.argmax())

    def broadcast(self, shared: ClusteredShared, client: int | None = None) -> dict[str, Tensor]:
        """Return the learner of the client's cluster."""
        own = self.cluster_of(shared, client)
        return {LEARNERS + name: value[own : own + 1] for name, value in shared.learners.items()}

    def received(self, arrays: Mapping[str, Tensor], columns: int) -> ClusteredShared:
        """Return one cluster with the client in it."""
        clusters = torch.zeros(1, dtype=torch.int64)
        return ClusteredShared(learners_in(arrays), clusters, 0.0, ServerState())

    def admit(self, shared: ClusteredShared, clients: int) -> ClusteredShared:
        """Put new clients, which have the last codes, into the largest cluster."""
        new = clients - len(shared.clusters)
        if new <= 0:
            return shared
        largest = self.cluster_of(shared, None)
        return replace(shared, clusters=torch.cat([shared.clusters, torch.full((new,), largest)]))


def bipartition(similarity: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the two groups with the smallest largest similarity across them, as a mask ``(A,)``.

    Joining the most similar until two groups are left, which is single linkage, finds them (Sattler
    et al., algorithm 1).
    """
    from sklearn.cluster import AgglomerativeClustering

    distance = np.clip(1.0 - similarity, 0.0, 2.0)
    clustering = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="single")
    labels = clustering.fit_predict(distance)
    # the first client stays, so that the order of labels does not matter
    return np.asarray(labels != labels[0])
