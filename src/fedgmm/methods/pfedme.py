"""pFedMe (T. Dinh et al., 2020): personal learners as Moreau envelopes around a global one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedgmm.core.em import average_learners
from fedgmm.core.params import Params, add_params, expand_clients, weighted_sum
from fedgmm.core.server_optimisers import ServerOptimiser, ServerState
from fedgmm.core.sums import Sum, Sums, row_counts
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import LEARNERS, Prediction, RoundInfo, learners_in, with_global_learner
from fedgmm.methods.local import FIT, OwnLearners, fit_info, fit_of_own_learners
from fedgmm.methods.local_training import LocalTraining, check_finite
from fedgmm.nets.sgd import train_moreau

_COUNTS = "learner_counts"


@dataclass(frozen=True)
class PFedMeShared:
    """The global learner ``w``, ``(1, ...)``, and the state of the server's optimiser."""

    learners: Params
    server: ServerState


@dataclass(frozen=True)
class PFedMe(OwnLearners[PFedMeShared, Params]):
    """Bi-level personalisation."""

    training: LocalTraining  # local training; its ``lr`` is ``η`` of the local learners
    penalty: float = 15.0  # ``λ``, which ties a personal learner to the local one
    inner_steps: int = 5  # gradient steps towards the proximal point on each batch
    mixing: float = 1.0  # ``β``: the server moves to ``(1 - β) w + β · average``
    # further optimiser of the server
    server: ServerOptimiser = field(default_factory=ServerOptimiser)

    def init(
        self, rows: LabelledRows, learner: Params | None = None
    ) -> tuple[PFedMeShared, Params]:
        """Return one global learner; personal learners start as copies of it."""
        start = self.training.initial(1, rows.device, learner)
        return PFedMeShared(start, ServerState()), expand_clients(start, len(rows.names))

    def client_step(
        self, shared: PFedMeShared, personal: Params, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Params, Sums]:
        """Run local rounds of proximal points."""
        training = self.training
        options = training.options(round_number)
        # gradient steps on f + λ/2 ‖·‖² are stable below 1 / (λ + curvature of f)
        inner_lr = min(options.lr, 0.5 / self.penalty)
        counts = rows.features.weight_per_client.double()
        orders = training.orders(rows, round_number, options)
        moved = {name: value.clone() for name, value in personal.items()}

        def visit(sums: list[Params], clients: Tensor) -> None:
            plan = training.plan(rows, clients, orders, options)
            start = expand_clients(shared.learners, len(clients))
            local, own = train_moreau(
                training.net,
                start,
                training.weighted(rows),
                plan,
                options,
                self.penalty,
                self.inner_steps,
                inner_lr,
            )
            check_finite(own, plan.clients, rows)
            check_finite(local, plan.clients, rows)
            own = training.with_noise(own, rows, plan.clients)
            local = training.with_noise(local, rows, plan.clients, at=start)
            sums.append(weighted_sum(local, counts[plan.clients, None]))
            for name, value in own.items():
                moved[name][plan.clients] = value  # groups do not overlap

        total = add_params(training.over_groups(rows, shared.learners, round_number, visit))
        sums = fit_of_own_learners(training, moved, rows)
        sums[_COUNTS] = counts.sum()[None]
        return moved, Sums({**sums, **{LEARNERS + name: value for name, value in total.items()}})

    def server_step(
        self, shared: PFedMeShared, sums: Sums, round_number: int = 1
    ) -> tuple[PFedMeShared, RoundInfo]:
        """Move to ``w ← (1 - β) w + β Σ_c N_c w_c / Σ_c N_c``."""
        average = average_learners(sums.below(LEARNERS), sums[_COUNTS], shared.learners)
        target = {
            name: (1.0 - self.mixing) * shared.learners[name].double() + self.mixing * value
            for name, value in average.items()
        }
        share = self.training.rate_share(round_number)
        learners, server = self.server.step(shared.learners, target, shared.server, share)
        return PFedMeShared(learners, server), fit_info(sums)

    def newcomer(self, shared: PFedMeShared, learner: Params | None = None) -> Params:
        """Return the global learner, ``(1, 1, ...)``."""
        return expand_clients(shared.learners, 1)

    def prediction(self, shared: PFedMeShared, personal: Params) -> Prediction:
        """Return each client's personal learner, and the global one for rows without a client."""
        return with_global_learner(self.training.net, personal, shared.learners)

    def declare_sums(self, columns: int) -> dict[str, Sum]:
        """Declare ``Σ_c N_c w_c``, ``Σ_c N_c``, and the fit of the personal learners."""
        return {**FIT, _COUNTS: row_counts(1), **self.declare_learners(1, rows=_COUNTS)}

    def received(self, arrays: Mapping[str, Tensor], columns: int) -> PFedMeShared:
        """Return the global learner from a broadcast."""
        return PFedMeShared(learners_in(arrays), ServerState())
