"""FedEM, FedAvg and FedProx: FedGMM without its density. FedAvg+ tunes FedAvg's learner at home."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedgmm.core.params import Params, expand_clients
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import Prediction, with_global_learner
from fedgmm.methods.fedgmm import FedGMM, FedGMMShared
from fedgmm.methods.gmm import FederatedGMM

NO_GAUSSIANS = FederatedGMM(1, "identity")
"""Settings of a method without a density."""


def without_density(method: FedGMM, learners: int) -> FedGMM:
    """Return FedEM with ``learners`` learners; with one learner it is FedAvg."""
    start = method.start if learners > 1 else "random"
    if start == "tied":  # there are no Gaussians to tie learners to
        start = "split"
    return replace(method, gaussians=NO_GAUSSIANS, density=False, learners=learners, start=start)


@dataclass(frozen=True)
class FedAvgPlus(FedGMM):
    """FedAvg; after the last round every client tunes the global learner on its own rows.

    ``personal`` holds FedAvg's weights ``(C, 1)`` until clients tune, then learners ``(C, 1, ...)``.
    """

    tuning_epochs: int = 1  # passes over a client's rows

    @property
    def learners_only(self) -> None:
        """None, because clients tune the global learner."""
        return

    def finish(  # type: ignore[override]
        self, shared: FedGMMShared, personal: Tensor | Params, rows: LabelledRows
    ) -> Params:
        """Tune the global learner on every client."""
        sgd = replace(self.training.sgd, epochs=self.tuning_epochs)
        start = expand_clients(shared.learners, len(rows.names))
        return self.training.train_personal(start, rows, self.training.rounds + 1, sgd)

    def prediction(self, shared: FedGMMShared, personal: Tensor | Params) -> Prediction:
        """Return each client's tuned learner, and the global one for rows without a client."""
        if isinstance(personal, Tensor):
            return super().prediction(shared, personal)
        return with_global_learner(self.training.net, personal, shared.learners)
