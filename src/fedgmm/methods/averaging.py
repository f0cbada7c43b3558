"""FedGMM without its density (FedEM, and with one learner FedAvg and FedProx), and FedAvg+."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgmm.core.params import Params, expand_clients
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import Prediction, RoundInfo
from fedgmm.methods.fedgmm import FedGMM, FedGMMShared, FedGMMUpdate
from fedgmm.methods.gmm import FederatedGMM

NO_GAUSSIANS = FederatedGMM(1, "identity")
"""A single component says nothing about rows: responsibilities do not depend on it."""


def without_density(method: FedGMM, learners: int) -> FedGMM:
    """FedEM with ``learners`` learners; with one, FedAvg."""
    start = method.start if learners > 1 else "random"
    if start == "tied":  # there is nothing to tie to
        start = "split"
    return replace(method, gaussians=NO_GAUSSIANS, density=False, learners=learners, start=start)


OwnLearners = Tensor | Params
"""FedAvg's weights ``(C, 1)`` until clients tune, then a learner each, ``(C, 1, ...)``."""


@dataclass(frozen=True)
class FedAvgPlus:
    """FedAvg, then every client tunes the global learner on its own rows.

    Attributes:
        average: FedAvg.
        epochs: of the tuning.
    """

    average: FedGMM
    epochs: int = 1

    def init(
        self, rows: LabelledRows, learner: Params | None = None
    ) -> tuple[FedGMMShared, OwnLearners]:
        """FedAvg's start."""
        return self.average.init(rows, learner)

    def client_step(
        self, shared: FedGMMShared, personal: OwnLearners, rows: LabelledRows, round_number: int = 1
    ) -> tuple[OwnLearners, FedGMMUpdate]:
        """FedAvg's round; nothing personal yet."""
        assert isinstance(personal, Tensor)
        return self.average.client_step(shared, personal, rows, round_number)

    def server_step(
        self, shared: FedGMMShared, update: FedGMMUpdate, round_number: int = 1
    ) -> tuple[FedGMMShared, RoundInfo]:
        """FedAvg's average."""
        return self.average.server_step(shared, update, round_number)

    def combine(self, updates: Sequence[FedGMMUpdate]) -> FedGMMUpdate:
        """FedAvg's sums."""
        return self.average.combine(updates)

    def newcomer(self, shared: FedGMMShared, learner: Params | None = None) -> OwnLearners:
        """Nothing personal yet."""
        return self.average.newcomer(shared)

    def finish(self, shared: FedGMMShared, personal: OwnLearners, rows: LabelledRows) -> Params:
        """Tune the global learner on every client."""
        training = self.average.training
        sgd = replace(training.sgd, epochs=self.epochs)
        start = expand_clients(shared.learners, len(rows.names))
        return training.train_personal(start, rows, training.rounds + 1, sgd)

    def prediction(self, shared: FedGMMShared, personal: OwnLearners) -> Prediction:
        """Each client's tuned learner; the global one for everybody else."""
        if isinstance(personal, Tensor):
            return self.average.prediction(shared, personal)
        clients = len(next(iter(personal.values())))
        learners = {
            name: torch.cat([value[:, 0], shared.learners[name]])
            for name, value in personal.items()
        }
        assignment: Tensor = torch.arange(clients)
        return Prediction(
            self.average.training.net, learners, assignment=assignment, default_learner=clients
        )
