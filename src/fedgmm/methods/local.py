"""Local: every client trains alone. The frame for methods whose clients have learners of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgmm.core.params import Params, expand_clients, take_clients
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import Prediction, RoundInfo
from fedgmm.methods.local_training import LocalTraining
from fedgmm.nets.learners import log_likelihoods
from fedgmm.nets.pixels import as_numbers
from fedgmm.nets.sgd import plan_batches

_ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Fit:
    """How well the clients' learners fit, as sums: log-likelihood and rows."""

    log_likelihood: Tensor
    rows: int

    def info(self) -> RoundInfo:
        """The mean over rows."""
        return RoundInfo(float(self.log_likelihood) / max(self.rows, 1))


def combined_fit(fits: Sequence[Fit]) -> Fit:
    """The fit of several clients from their own."""
    total = torch.stack([fit.log_likelihood for fit in fits]).sum()
    return Fit(total, sum(fit.rows for fit in fits))


def fit_of_own_learners(training: LocalTraining, personal: Params, rows: LabelledRows) -> Fit:
    """Log-likelihood of the rows under each client's own learner, ``(C, 1, ...)``."""
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    one = {name: value[0] for name, value in personal.items()}
    order = torch.arange(len(rows), device=rows.device)
    with torch.inference_mode():
        for clients in training.groups(rows, one):
            plan = plan_batches(rows.offsets, clients, [order], _ROWS_AT_ONCE)
            own = take_clients(personal, plan.clients)
            for step in plan.steps:
                active = take_clients(own, step.clients)
                inputs = as_numbers(rows.inputs[step.rows], training.dtype)
                fit = log_likelihoods(training.net, active, inputs, rows.labels[step.rows])
                total += (fit[..., 0] * step.mask).sum()
    return Fit(total, len(rows))


@dataclass(frozen=True)
class Local:
    """No federation: the client's own rows and nothing else."""

    training: LocalTraining

    def init(self, rows: LabelledRows, learner: Params | None = None) -> tuple[None, Params]:
        """The same start for every client."""
        start = self.training.initial(1, rows.device, learner)
        return None, expand_clients(start, len(rows.names))

    def client_step(
        self, shared: None, personal: Params, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Params, Fit]:
        """Another round of training at home."""
        fit = fit_of_own_learners(self.training, personal, rows)
        return self.training.train_personal(personal, rows, round_number), fit

    def server_step(
        self, shared: None, update: Fit, round_number: int = 1
    ) -> tuple[None, RoundInfo]:
        """There is no server."""
        return None, update.info()

    def combine(self, updates: Sequence[Fit]) -> Fit:
        """The fit of all clients."""
        return combined_fit(updates)

    def newcomer(self, shared: None, learner: Params | None = None) -> Params:
        """The start that every client has, ``(1, 1, ...)``."""
        return expand_clients(self.training.initial(1, torch.device("cpu"), learner), 1)

    def finish(self, shared: None, personal: Params, rows: LabelledRows) -> Params:
        """Nothing is left to do."""
        return personal

    def prediction(self, shared: None, personal: Params) -> Prediction:
        """Each client's own learner."""
        learners = {name: value[:, 0] for name, value in personal.items()}
        clients = len(next(iter(learners.values())))
        return Prediction(self.training.net, learners, assignment=torch.arange(clients))
