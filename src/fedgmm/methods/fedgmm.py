"""FedGMM, and FedEM, FedAvg and FedProx as its special cases.

====================  =========  ========  ==========================================
method                Gaussians  learners  also
====================  =========  ========  ==========================================
FedGMM                M1         M2
FedEM                 none       M2
FedAvg                none       1
FedProx               none       1         proximal term in local training
====================  =========  ========  ==========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedgmm.core.em import (
    add_likelihoods,
    aggregate_weights,
    client_weights,
    responsibilities,
    towards_independence,
)
from fedgmm.core.gaussians import log_densities
from fedgmm.core.linalg import take
from fedgmm.core.newton import NewtonSums, newton_step, newton_sums
from fedgmm.core.params import Params, add_params, is_statistic
from fedgmm.core.servers import ServerOptimiser, ServerState
from fedgmm.core.streaming import Block, accumulate
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import DivergedError, Prediction, RoundInfo
from fedgmm.methods.gmm import FederatedGMM, MixtureShared, MixtureUpdate
from fedgmm.methods.local_training import LocalTraining
from fedgmm.nets.learners import log_likelihoods
from fedgmm.nets.networks import Dense
from fedgmm.nets.pixels import as_numbers

LearnerStart = Literal["tied", "split", "random"]
LEARNER_STARTS: tuple[str, ...] = get_args(LearnerStart)
Solver = Literal["sgd", "newton"]

_TIE = 0.9  # share of a Gaussian's weight that a tied start gives to its own learner


@dataclass(frozen=True)
class FedGMMShared:
    """What the server broadcasts.

    Attributes:
        mixture: the Gaussians, and the federation's weights ``π(m1, m2)`` flattened, ``(M1 · M2,)``.
        learners: ``θ_m2``, ``(M2, ...)``.
        server: state of the server's optimiser.
    """

    mixture: MixtureShared
    learners: Params
    server: ServerState


@dataclass(frozen=True)
class FedGMMUpdate:
    """What clients send, as sums over clients.

    Attributes:
        mixture: counts ``γ_c(m1, m2)``, moments and log-likelihood.
        learner_counts: ``Σ_c Σ_m1 γ_c(m1, m2)``, ``(M2,)``.
        learners: ``Σ_c γ_c(m2) θ_m2,c``, ``(M2, ...)``, from gradient steps.
        newton: gradient and Hessian sums, from exact steps.
    """

    mixture: MixtureUpdate
    learner_counts: Tensor
    learners: Params | None = None
    newton: NewtonSums | None = None


@dataclass(frozen=True)
class FedGMM:
    """``M1`` Gaussians and ``M2`` learners, shared; weights ``π_c(m1, m2)``, private.

    Attributes:
        training: local training of the learners.
        learners: ``M2``.
        gaussians: how the Gaussians are fitted; one component without ``density`` switches them off.
        density: whether the Gaussians take part in responsibilities and prediction.
        start: how the learners start: ``"tied"`` gives each Gaussian a learner of its own,
            ``"split"`` perturbs copies of one learner, ``"random"`` draws independent ones.
        solver: gradient steps, or one exact Newton step a round (linear learners).
        ridge: penalty of the exact steps.
        perturbation: size of the split, relative to each parameter tensor's spread.
        independence: how many rows a client's own shares of the learners count for within each
            Gaussian, see :func:`fedgmm.core.em.towards_independence`.
        server: the server's optimiser for the learners.
    """

    training: LocalTraining
    learners: int = 3
    gaussians: FederatedGMM = field(default_factory=lambda: FederatedGMM(3))
    density: bool = True
    start: LearnerStart = "tied"
    solver: Solver = "sgd"
    ridge: float = 1.0
    perturbation: float = 0.02
    independence: float = 0.0
    server: ServerOptimiser = field(default_factory=ServerOptimiser)

    def init(
        self, rows: LabelledRows, learner: Params | None = None
    ) -> tuple[FedGMMShared, Tensor]:
        """Gaussians from local centroids, learners as ``start`` says, the same weights everywhere."""
        seed = self.training.seed
        mixture = self.gaussians.start(rows.features, "kmeans", seed)
        m1, m2 = self.gaussians.components, self.learners
        weights = mixture.weights[:, None].expand(m1, m2) / m2
        if self.start == "tied" and m2 > 1:
            own = torch.arange(m1, device=rows.device)[:, None] % m2 == torch.arange(
                m2, device=rows.device
            )
            share = torch.where(own, _TIE + (1.0 - _TIE) / m2, (1.0 - _TIE) / m2)
            weights = mixture.weights[:, None] * share
        learners = self._initial_learners(rows.device, learner)
        mixture = replace(mixture, weights=weights.reshape(-1))
        personal = mixture.weights.expand(len(rows.names), -1)
        return FedGMMShared(mixture, learners, ServerState()), personal

    def _initial_learners(self, device: torch.device, learner: Params | None) -> Params:
        if self.start == "random" and learner is None:
            return self.training.initial(self.learners, device)
        first = self.training.initial(1, device, learner)
        copies = {
            name: value.expand(self.learners, *value.shape[1:]).clone()
            for name, value in first.items()
        }
        if self.learners > 1:
            generator = torch.Generator().manual_seed(self.training.seed + 1)
            for name, value in copies.items():
                if is_statistic(name):
                    continue
                noise = torch.randn(value.shape, generator=generator).to(value)
                value.add_(self.perturbation * (value.std() + 1e-3) * noise)
        return copies

    # ------------------------------------------------------------------ the two steps of a round

    def client_step(
        self, shared: FedGMMShared, personal: Tensor, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Tensor, FedGMMUpdate]:
        """E-step, closed-form M-step of the Gaussians and ``π_c``, training of the learners."""
        m2, net, dtype = self.learners, self.training.net, self.training.dtype
        current = shared.mixture.gaussians
        log_pi = torch.log(personal).mT.contiguous()
        learner_weights = torch.empty(m2, len(rows), dtype=dtype, device=rows.device).mT

        def e_step(difference: Tensor, codes: Tensor, place: slice) -> tuple[Tensor, Tensor]:
            # (n, M1, M2), in memory (M1, M2, n): sums over a few components run along many rows
            own = take(log_pi, codes, axis=1).reshape(-1, m2, len(codes)).permute(2, 0, 1)
            log_x = log_densities(difference, current) if self.density else None
            inputs, labels = as_numbers(rows.inputs[place], dtype), rows.labels[place]
            log_y = log_likelihoods(net, shared.learners, inputs, labels)
            q, log_evidence = responsibilities(add_likelihoods(own, log_x, log_y).flatten(1))
            learner_weights[place] = q.mT.reshape(-1, m2, len(codes)).sum(0).mT.to(dtype)
            return q, log_evidence

        mixture = self.gaussians._sum_over_rows(rows.features, current, e_step, learners=m2)
        lost = torch.nonzero(~torch.isfinite(mixture.counts).all(-1)).flatten()
        if len(lost):  # learners so large that their logits overflow
            raise DivergedError(rows.names[int(lost[0])])
        counts = mixture.counts.reshape(len(mixture.counts), -1, m2).sum(1)
        update = FedGMMUpdate(mixture, counts.sum(0))
        if self.solver == "newton":
            newton = self._newton_over_rows(shared.learners, rows, learner_weights)
            update = replace(update, newton=newton)
        else:
            sums = self.training.train_shared(
                shared.learners, rows, learner_weights if m2 > 1 else None, counts, round_number
            )
            update = replace(update, learners=sums)
        own = mixture.counts
        if self.independence:
            own = towards_independence(own, m2, self.independence)
        weights = client_weights(own, rows.features.rows_per_client.clamp_min(1))
        present = rows.features.rows_per_client[:, None] > 0
        return torch.where(present, weights, personal), update

    def _newton_over_rows(
        self, learners: Params, rows: LabelledRows, weights: Tensor
    ) -> NewtonSums:
        """Gradient and Hessian of every learner, summed over all rows."""
        net = self.training.net
        assert isinstance(net, Dense)
        assert not net.hidden

        def start() -> list[NewtonSums]:
            return []

        def add_block(total: list[NewtonSums], block: Block) -> None:
            _, _, place = rows.features.read(block)
            inputs = as_numbers(rows.inputs[place], self.training.dtype)
            sums = newton_sums(net, learners, inputs, rows.labels[place], weights[place])
            if not total:
                total.append(sums)
                return
            total[0].gradient.add_(sums.gradient)
            total[0].hessian.add_(sums.hessian)
            total[0].second.add_(sums.second)
            total[0].weight.add_(sums.weight)

        blocks = rows.features.blocks(self.learners * (net.classes - 1))
        lanes = [lane[0] for lane in accumulate(blocks, start, add_block, rows.device) if lane]
        return _newton_total(lanes)

    def server_step(
        self, shared: FedGMMShared, update: FedGMMUpdate, round_number: int = 1
    ) -> tuple[FedGMMShared, RoundInfo]:
        """Gaussians from moments, learners from weighted averages or from summed curvature."""
        mixture, info = self.gaussians.server_step(shared.mixture, update.mixture)
        mixture = replace(mixture, weights=aggregate_weights(update.mixture.counts))
        if update.newton is not None:
            net, share = self.training.net, 1.0  # exact steps have no rate
            assert isinstance(net, Dense)
            average = newton_step(net, shared.learners, update.newton, self.ridge)
        else:
            assert update.learners is not None
            share = self.training.rate_share(round_number)
            alive = update.learner_counts > 1e-9
            average = {}
            for name, value in update.learners.items():
                # θ_m2 = Σ_c γ_c(m2) θ_m2,c / Σ_c γ_c(m2); a learner without weight stays
                shape = (-1,) + (1,) * (value.dim() - 1)
                mean = value / update.learner_counts.clamp_min(1e-300).reshape(shape)
                average[name] = torch.where(
                    alive.reshape(shape), mean, shared.learners[name].double()
                )
        learners, server = self.server.step(shared.learners, average, shared.server, share)
        return FedGMMShared(mixture, learners, server), info

    def combine(self, updates: Sequence[FedGMMUpdate]) -> FedGMMUpdate:
        """Sums over clients that each sent their own."""
        learners = [update.learners for update in updates if update.learners is not None]
        newton = [update.newton for update in updates if update.newton is not None]
        return FedGMMUpdate(
            self.gaussians.combine([update.mixture for update in updates]),
            torch.stack([update.learner_counts for update in updates]).sum(0),
            add_params(learners) if learners else None,
            _newton_total(newton) if newton else None,
        )

    def newcomer(self, shared: FedGMMShared, learner: Params | None = None) -> Tensor:
        """The federation's own weights, ``(1, M1 · M2)``."""
        return shared.mixture.weights[None]

    def finish(self, shared: FedGMMShared, personal: Tensor, rows: LabelledRows) -> Tensor:
        """Nothing is left to do."""
        return personal

    def prediction(self, shared: FedGMMShared, personal: Tensor) -> Prediction:
        """Equation (3) with the clients' weights."""
        return Prediction(
            self.training.net,
            shared.learners,
            shared.mixture.gaussians if self.density else None,
            personal,
            shared.mixture.weights,
        )


def _newton_total(parts: Sequence[NewtonSums]) -> NewtonSums:
    """The sums of lanes or of clients."""
    return NewtonSums(
        torch.stack([part.gradient for part in parts]).sum(0),
        torch.stack([part.hessian for part in parts]).sum(0),
        torch.stack([part.second for part in parts]).sum(0),
        torch.stack([part.weight for part in parts]).sum(0),
    )
