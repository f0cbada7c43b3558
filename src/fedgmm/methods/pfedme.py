"""pFedMe (T. Dinh et al., 2020): personal learners as Moreau envelopes around a global one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedgmm.core.params import Params, add_params, expand_clients, weighted_sum
from fedgmm.core.servers import ServerOptimiser, ServerState
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import Prediction, RoundInfo
from fedgmm.methods.local import Fit, combined_fit, fit_of_own_learners
from fedgmm.methods.local_training import LocalTraining, check_finite
from fedgmm.nets.sgd import train_moreau


@dataclass(frozen=True)
class PFedMeShared:
    """The global learner ``w``, ``(1, ...)``, and the server optimiser's state."""

    learners: Params
    server: ServerState


@dataclass(frozen=True)
class PFedMeUpdate:
    """``Σ_c N_c w_c``, ``(1, ...)``, ``Σ_c N_c``, and the fit of the personal learners."""

    learners: Params
    rows: Tensor
    fit: Fit


@dataclass(frozen=True)
class PFedMe:
    """Bi-level personalisation.

    Attributes:
        training: ``lr`` is ``η`` of the local learners.
        penalty: ``λ``, how strongly a personal learner is held to the local one.
        inner_steps: gradient steps towards the proximal point on each batch.
        inner_lr: their size; ``None`` takes the largest that ``λ`` allows, up to the learning rate.
        mixing: ``β``: the server moves to ``(1 - β) w + β · average``.
        server: further optimiser of the server.
    """

    training: LocalTraining
    penalty: float = 15.0
    inner_steps: int = 5
    inner_lr: float | None = None
    mixing: float = 1.0
    server: ServerOptimiser = field(default_factory=ServerOptimiser)

    def init(
        self, rows: LabelledRows, learner: Params | None = None
    ) -> tuple[PFedMeShared, Params]:
        """One global learner; personal learners start there."""
        start = self.training.initial(1, rows.device, learner)
        return PFedMeShared(start, ServerState()), expand_clients(start, len(rows.names))

    def client_step(
        self, shared: PFedMeShared, personal: Params, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Params, PFedMeUpdate]:
        """Local rounds of proximal points."""
        training = self.training
        options = training.options(round_number)
        # gradient steps on f + λ/2 ‖·‖² are stable below 1 / (λ + curvature of f)
        inner_lr = self.inner_lr or min(options.lr, 0.5 / self.penalty)
        counts = rows.features.rows_per_client.double()
        orders = training.orders(rows, round_number, options)
        moved = {name: value.clone() for name, value in personal.items()}

        def visit(sums: list[Params], clients: Tensor) -> None:
            plan = training.plan(rows, clients, orders, options)
            local, own = train_moreau(
                training.net,
                expand_clients(shared.learners, len(clients)),
                rows.inputs,
                rows.labels,
                plan,
                options,
                self.penalty,
                self.inner_steps,
                inner_lr,
            )
            check_finite(own, plan.clients, rows)
            check_finite(local, plan.clients, rows)
            sums.append(weighted_sum(local, counts[plan.clients, None]))
            for name, value in own.items():
                moved[name][plan.clients] = value  # groups do not overlap

        total = add_params(training.over_groups(rows, shared.learners, round_number, visit))
        fit = fit_of_own_learners(training, moved, rows)
        return moved, PFedMeUpdate(total, counts.sum(), fit)

    def server_step(
        self, shared: PFedMeShared, update: PFedMeUpdate, round_number: int = 1
    ) -> tuple[PFedMeShared, RoundInfo]:
        """``w ← (1 - β) w + β Σ_c N_c w_c / Σ_c N_c``."""
        target = {
            name: (1.0 - self.mixing) * shared.learners[name].double()
            + self.mixing * value / update.rows
            for name, value in update.learners.items()
        }
        share = self.training.rate_share(round_number)
        learners, server = self.server.step(shared.learners, target, shared.server, share)
        return PFedMeShared(learners, server), update.fit.info()

    def combine(self, updates: Sequence[PFedMeUpdate]) -> PFedMeUpdate:
        """Sums over clients that each sent their own."""
        return PFedMeUpdate(
            add_params([update.learners for update in updates]),
            torch.stack([update.rows for update in updates]).sum(),
            combined_fit([update.fit for update in updates]),
        )

    def newcomer(self, shared: PFedMeShared, learner: Params | None = None) -> Params:
        """The global learner, ``(1, 1, ...)``."""
        return expand_clients(shared.learners, 1)

    def finish(self, shared: PFedMeShared, personal: Params, rows: LabelledRows) -> Params:
        """Nothing is left to do."""
        return personal

    def prediction(self, shared: PFedMeShared, personal: Params) -> Prediction:
        """Each client's personal learner; the global one for everybody else."""
        clients = len(next(iter(personal.values())))
        learners = {
            name: torch.cat([value[:, 0], shared.learners[name]])
            for name, value in personal.items()
        }
        return Prediction(
            self.training.net,
            learners,
            assignment=torch.arange(clients),
            default_learner=clients,
        )
