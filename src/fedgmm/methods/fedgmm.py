"""FedGMM, and FedEM, FedAvg, FedProx and FedAvg+ as its special cases.

====================  =========  ========  ==========================================
method                Gaussians  learners  also
====================  =========  ========  ==========================================
FedGMM                M1         M2
FedEM                 none       M2
FedAvg                none       1
FedProx               none       1         proximal term in local training
FedAvg+               none       1         tuned on every client after the last round
====================  =========  ========  ==========================================

A round is Algorithm 1 of the paper: ``client_step`` and ``server_step`` call the equations of
:mod:`fedgmm.core.em` in its order. ``declare_sums`` lists what a client sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedgmm.core.dominance import cap_shares, common_entries
from fedgmm.core.em import (
    add_likelihoods,
    average_learners,
    client_weights,
    federation_weights,
    responsibilities,
    towards_independence,
)
from fedgmm.core.gaussians import Gaussians, covariance_shape, gaussians, log_densities
from fedgmm.core.newton import (
    LeastSquaresSums,
    NewtonSums,
    least_squares_step,
    least_squares_sums,
    newton_step,
    newton_sums,
)
from fedgmm.core.params import Params, add_params, count_learners, expand_clients, is_statistic
from fedgmm.core.server_optimisers import ServerOptimiser, ServerState
from fedgmm.core.sums import Declaration, Sum, Sums, SumsError, check_sums, row_counts
from fedgmm.data.dataset import LabelledRows
from fedgmm.methods.base import (
    LEARNERS,
    DivergedError,
    Prediction,
    RoundInfo,
    SupervisedMethod,
    learners_in,
    with_global_learner,
)
from fedgmm.methods.gmm import FARTHEST, FederatedGMM, MixtureShared, check_counts
from fedgmm.methods.local import check_log_likelihood
from fedgmm.methods.local_training import LocalTraining
from fedgmm.nets.learners import dominance_parts, log_likelihoods
from fedgmm.nets.networks import Dense, as_numbers, function_of
from fedgmm.support.linalg import take
from fedgmm.support.scratch import empty_beside
from fedgmm.support.streaming import Block, accumulate

LearnerStart = Literal["tied", "split", "random"]
LEARNER_STARTS: tuple[str, ...] = get_args(LearnerStart)
Solver = Literal["sgd", "newton"]

_TIE = 0.9  # share of a Gaussian's weight that a tied start gives to its own learner
_PERTURBATION = 0.02  # size of a split, relative to each parameter tensor's spread
_COUNTS = "learner_counts"
_SMALLEST_CURVATURE = 1e-9  # well above the rounding errors of ``diag p - p pᵀ``


@dataclass(frozen=True)
class FedGMMShared:
    """The server's broadcast and the state of its optimiser."""

    # the Gaussians, and the federation's weights ``π(m1, m2)`` flattened, ``(M1 · M2,)``
    mixture: MixtureShared
    learners: Params  # ``θ_m2``, ``(M2, ...)``
    server: ServerState  # state of the server's optimiser; it is not sent


@dataclass(frozen=True)
class FedGMM(SupervisedMethod[FedGMMShared, Tensor]):
    """``M1`` Gaussians and ``M2`` learners, shared; weights ``π_c(m1, m2)``, private."""

    training: LocalTraining  # local training of the learners
    learners: int = 3  # ``M2``
    # settings of the Gaussians; without ``density`` they have one component
    gaussians: FederatedGMM = field(default_factory=lambda: FederatedGMM(3))
    density: bool = True  # whether the Gaussians take part in responsibilities and prediction
    # start of the learners: ``"tied"`` gives each Gaussian a learner of its own, ``"split"``
    # perturbs copies of one learner, ``"random"`` draws independent ones
    start: LearnerStart = "tied"
    # gradient steps, or one exact step per round for linear learners: a Newton step for classes,
    # least squares for numbers
    solver: Solver = "sgd"
    ridge: float = 1.0  # penalty of the exact steps
    # number of rows that a client's own shares of the learners count for within each Gaussian, see
    # :func:`fedgmm.core.em.towards_independence`
    independence: float = 0.0
    # the server's optimiser for the learners
    server: ServerOptimiser = field(default_factory=ServerOptimiser)
    # for one client: no sum stands for fewer rows than this. Components with fewer rows take no
    # part in what the client sends, so that all counts add up to its rows and nothing can be
    # subtracted; rows that dominate the gradient of a learner count for less.
    fewest_rows: float = 0.0

    @property
    def mixture(self) -> FederatedGMM | None:  # type: ignore[override]
        """Settings of the Gaussians; ``None`` without a density."""
        return self.gaussians if self.density else None

    def init(
        self, rows: LabelledRows, learner: Params | None = None
    ) -> tuple[FedGMMShared, Tensor]:
        """Start Gaussians from local centroids and learners by ``start``, with equal weights."""
        m1, m2 = self.gaussians.components, self.learners
        if self.density:
            mixture = self.gaussians.start(rows.features, "kmeans", self.training.seed)
        else:
            mixture = self._without_density(rows.device, rows.features.columns)
        weights = mixture.weights[:, None].expand(m1, m2) / m2
        if self.start == "tied" and m2 > 1:
            first, second = (torch.arange(m, device=rows.device) for m in (m1, m2))
            own = first[:, None] % m2 == second
            share = torch.where(own, _TIE + (1.0 - _TIE) / m2, (1.0 - _TIE) / m2)
            weights = mixture.weights[:, None] * share
        learners = self._initial_learners(rows.device, learner)
        mixture = replace(mixture, weights=weights.reshape(-1))
        personal = mixture.weights.expand(len(rows.names), -1)
        return FedGMMShared(mixture, learners, ServerState()), personal

    def _without_density(self, device: torch.device, columns: int) -> MixtureShared:
        """Return placeholder Gaussians, which no equation uses."""
        ones = torch.ones(self.gaussians.components, dtype=torch.float64, device=device)
        means = ones.new_zeros(len(ones), columns)
        return MixtureShared(Gaussians(means, ones, ones, "identity"), ones / len(ones))

    def _initial_learners(self, device: torch.device, learner: Params | None) -> Params:
        if self.start == "random" and learner is None:
            return self.training.initial(self.learners, device)
        first = self.training.initial(1, device, learner)
        copies = {n: v.expand(self.learners, *v.shape[1:]).clone() for n, v in first.items()}
        if self.learners > 1:
            generator = torch.Generator().manual_seed(self.training.seed + 1)
            for name, value in copies.items():
                if is_statistic(name):
                    continue
                noise = torch.randn(value.shape, generator=generator).to(value)
                value.add_(_PERTURBATION * (value.std() + 1e-3) * noise)
        return copies

    # ------------------------------------------------------------------ the two steps of a round

    def client_step(
        self, shared: FedGMMShared, personal: Tensor, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Tensor, Sums]:
        """Run the E-step, the M-step of the Gaussians and ``π_c``, and train the learners."""
        m2, net, dtype = self.learners, self.training.net, self.training.dtype
        current = shared.mixture.gaussians if self.density else None
        log_pi = torch.log(personal).mT.contiguous()
        learner_weights = empty_beside(rows.inputs, (m2, len(rows)), dtype).mT
        sent_pi = personal

        def e_step(difference: Tensor | None, codes: Tensor, place: slice) -> tuple[Tensor, Tensor]:
            # (n, M1, M2), in memory (M1, M2, n), so that sums over components run along many rows
            own = take(log_pi, codes, axis=1).reshape(-1, m2, len(codes)).permute(2, 0, 1)
            log_x = None
            if current is not None and difference is not None:
                log_x = log_densities(difference, current)
            inputs, labels = as_numbers(rows.inputs[place], dtype), rows.labels[place]
            log_y = log_likelihoods(net, shared.learners, inputs, labels)
            q, log_evidence = responsibilities(add_likelihoods(own, log_x, log_y).flatten(1))
            of_rows = q.mT.reshape(-1, m2, len(codes)).sum(0).mT
            learner_weights[place] = rows.features.weigh(of_rows, place).to(dtype)
            return q, log_evidence

        counts, sums = self.gaussians.sum_over_rows(rows.features, current, e_step, learners=m2)
        lost = torch.nonzero(~torch.isfinite(counts).all(-1)).flatten()
        if len(lost):  # learners so large that their logits overflow
            raise DivergedError(rows.names[int(lost[0])])
        sent = counts
        while self.fewest_rows:
            common = common_entries(sent[0], self.fewest_rows)
            if torch.equal(common, sent[0] > 0):
                break
            sent_pi = torch.where(common, sent_pi, 0.0)
            sent_pi = sent_pi / sent_pi.sum()
            log_pi = torch.log(sent_pi).mT.contiguous()
            sent, sums = self.gaussians.sum_over_rows(rows.features, current, e_step, learners=m2)
        of_learners = sent.reshape(len(sent), -1, m2).sum(1)
        if self.fewest_rows:
            learner_weights = self._without_dominance(shared.learners, rows, learner_weights)
            of_learners = learner_weights.sum(0, keepdim=True).double()
        if self.solver == "newton":
            trained = self._exact_sums(shared.learners, rows, learner_weights)
        else:
            weights = learner_weights if m2 > 1 or self.fewest_rows else None
            trained = self.training.train_shared(
                shared.learners, rows, weights, of_learners, round_number
            )
        learned = {LEARNERS + name: value for name, value in trained.items()}
        sums = Sums({**sums, _COUNTS: of_learners.sum(0), **learned})
        if self.independence:
            counts = towards_independence(counts, m2, self.independence)
        present = rows.features.weight_per_client
        weights = client_weights(counts, torch.where(present > 0, present, 1))
        return torch.where(present[:, None] > 0, weights, personal), sums

    def _without_dominance(self, learners: Params, rows: LabelledRows, weights: Tensor) -> Tensor:
        """Return weights ``(N, M2)`` with which no row dominates a learner's gradient or curvature."""
        net, dtype, exact = self.training.net, self.training.dtype, self.solver == "newton"
        found = []
        for _, _, place in map(rows.features.read, rows.features.blocks(self.learners)):
            inputs, labels = as_numbers(rows.inputs[place], dtype), rows.labels[place]
            found.append(dominance_parts(net, learners, inputs, labels, exact))
        parts = torch.cat(found)
        rounding = parts.new_zeros(parts.shape[-1])
        if exact and net.classes:
            rounding[-1] = _SMALLEST_CURVATURE
        return cap_shares(weights.double(), parts, self.fewest_rows, rounding).to(dtype)

    def with_fewest_rows(self, rows: float) -> FedGMM:
        """Return the method whose sums stand for at least so many rows."""
        return replace(self, fewest_rows=rows)

    def _exact_sums(self, learners: Params, rows: LabelledRows, weights: Tensor) -> Params:
        """Return the sums of every learner's exact step, over all rows."""
        net, classes = self.training.net, self._linear_net.classes
        of_block = newton_sums if net.classes else least_squares_sums

        def add_block(total: dict[str, Tensor], block: Block) -> None:
            _, _, place = rows.features.read(block)
            inputs = as_numbers(rows.inputs[place], self.training.dtype)
            outputs = net.logits(learners, inputs)
            sums = vars(of_block(outputs, inputs, rows.labels[place], weights[place]))
            for name, value in sums.items():
                total[name] = total[name].add_(value) if name in total else value

        blocks = rows.features.blocks(self.learners * max(1, classes - 1))
        lanes = accumulate(blocks, dict[str, Tensor], add_block, rows.device)
        return add_params([lane for lane in lanes if lane])

    @property
    def _linear_net(self) -> Dense:
        net = function_of(self.training.net)
        assert isinstance(net, Dense)
        assert not net.hidden
        return net

    def server_step(
        self, shared: FedGMMShared, sums: Sums, round_number: int = 1
    ) -> tuple[FedGMMShared, RoundInfo]:
        """Update Gaussians from moments, and learners from averages or from summed curvature."""
        if self.density:
            mixture, info = self.gaussians.server_step(shared.mixture, sums)
        else:
            weights = federation_weights(sums["counts"])
            mixture = replace(shared.mixture, weights=weights)
            info = RoundInfo(float(sums["log_likelihood"] / sums["counts"].sum()))
        trained = sums.below(LEARNERS)
        if self.solver == "newton":
            share = 1.0  # exact steps have no learning rate
            if self.training.net.classes:
                average = newton_step(shared.learners, NewtonSums(**trained), self.ridge)
            else:
                own = LeastSquaresSums(**trained)
                average = least_squares_step(shared.learners, own, self.ridge)
        else:
            share = self.training.rate_share(round_number)
            average = average_learners(trained, sums[_COUNTS], shared.learners)
        learners, server = self.server.step(shared.learners, average, shared.server, share)
        return FedGMMShared(mixture, learners, server), info

    @property
    def learners_only(self) -> LearnersOnly | None:
        """The method that changes nothing but the learners; ``None`` unless they take exact steps."""
        return LearnersOnly(**vars(self)) if self.solver == "newton" else None

    def newcomer(self, shared: FedGMMShared, learner: Params | None = None) -> Tensor:
        """Return the federation's own weights, ``(1, M1 · M2)``."""
        return shared.mixture.weights[None]

    def prediction(self, shared: FedGMMShared, personal: Tensor) -> Prediction:
        """Return the parameters of equation (3) with the clients' weights."""
        density = shared.mixture.gaussians if self.density else None
        weights = shared.mixture.weights
        return Prediction(self.training.net, shared.learners, density, personal, weights)

    def check_state(self, shared: FedGMMShared, personal: Tensor) -> None:
        """Raise ``ValueError`` unless the state has as many Gaussians and learners as the method."""
        super().check_state(shared, personal)
        current, kind = shared.mixture.gaussians, self.gaussians.covariance_type
        if current.covariance_type != kind:
            raise ValueError(
                f"the state has covariance_type={current.covariance_type!r}, not {kind!r}."
            )
        m1, m2 = self.gaussians.components, self.learners
        sizes = {
            "components": (len(current.means), m1),
            "learners": (count_learners(shared.learners), m2),
            "weights": (shared.mixture.weights.numel(), m1 * m2),
            "weights of a client": (personal.shape[-1], m1 * m2),
        }
        for name, (here, wanted) in sizes.items():
            if here != wanted:
                raise ValueError(f"the state has {name}={here}, not {wanted}.")

    # ------------------------------------------------------------------ sums and broadcasts

    def declare_sums(self, columns: int) -> dict[str, Sum]:
        """Declare what a client sends in a round.

        That is ``counts`` (``γ_c``), ``log_likelihood``, the moments of the Gaussians
        (:meth:`FederatedGMM.declare_sums`), ``learner_counts``, and ``learners/...``: the means of
        ``θ_mc``, or the sums of exact steps.
        """
        m1, m2 = self.gaussians.components, self.learners
        found = self.gaussians.declare_sums(columns, m1 * m2)
        if not self.density:
            found = {name: found[name] for name in ("counts", "log_likelihood")}
        found[_COUNTS] = row_counts(m2)
        if self.solver != "newton":
            return {**found, **self.declare_learners(m2, rows=_COUNTS)}
        net = self._linear_net
        r, p = max(1, net.classes - 1), net.columns + 1

        def squared_length(clip: float) -> float:
            return clip**2 + 1.0  # of an input with the constant one behind it

        def matrices(size: int, sensitivity: Callable[[float], float]) -> Sum:
            return Sum(
                (m2, size, size),
                rows=_COUNTS,
                largest=FARTHEST**2,
                rounding=1e-8,
                size_of=LEARNERS + "second",  # curvature vanishes where learners are certain
                semidefinite=True,
                sensitivity=sensitivity,
            )

        counted, gradient = replace(found[_COUNTS], rows=_COUNTS), Sum((m2, r * p), rows=_COUNTS)
        exact = {"second": matrices(p, squared_length), "weight": counted}
        if self.training.net.classes:  # |p - y| ≤ √2 and ‖diag p - p pᵀ‖ ≤ √½, times the inputs
            exact["gradient"] = replace(
                gradient,
                largest=2.0 * FARTHEST,
                sensitivity=lambda clip: math.sqrt(2.0 * squared_length(clip)),
            )
            exact["hessian"] = matrices(r * p, lambda clip: math.sqrt(0.5) * squared_length(clip))
        else:  # a bound on inputs must bound residuals, too
            exact["gradient"] = replace(
                gradient,
                largest=FARTHEST**2,
                sensitivity=lambda clip: clip * math.sqrt(squared_length(clip)),
            )
            exact["squares"] = replace(
                counted, largest=FARTHEST**2, sensitivity=lambda clip: clip**2
            )
        return {**found, **{LEARNERS + name: one for name, one in exact.items()}}

    def check(self, sums: Sums, rows: int, declaration: Declaration) -> None:
        """Check each sum by itself, and that counts, moments and learners agree with each other."""
        counts = sums["counts"].reshape(-1, self.learners)
        if self.density:
            self.gaussians.check(sums, rows, declaration)
        else:
            check_sums(sums, declaration, rows)
            check_counts(sums["counts"], rows)
            check_log_likelihood(sums, rows, self.training.net)
        sent, own = sums[_COUNTS], counts.sum(0)
        # rows that dominate a learner count for less, see ``fewest_rows``
        if bool((sent - own > 1e-3 * (1.0 + own.max())).any()):
            raise SumsError("the counts of its learners exceed those of its responsibilities")
        if self.solver == "newton":
            _check_exact(sums.below(LEARNERS), sent)

    def declare_broadcast(self, columns: int) -> dict[str, Sum]:
        """Declare learners, weights, and the Gaussians if there are any."""
        m1, m2, kind = self.gaussians.components, self.learners, self.gaussians.covariance_type
        found = {**self.declare_learners(m2), "weights": Sum((m1 * m2,), lowest=0.0)}
        if self.density:
            found["means"] = Sum((m1, columns))
            shape = covariance_shape(kind, m1, columns)
            found["covariances"] = Sum(shape, semidefinite=kind in ("full", "tied"))
        return found

    def broadcast(self, shared: FedGMMShared, client: int | None = None) -> dict[str, Tensor]:
        """Return learners, weights, and the Gaussians if there are any."""
        arrays = super().broadcast(shared)
        arrays["weights"] = shared.mixture.weights
        if self.density:
            arrays["means"] = shared.mixture.gaussians.means
            arrays["covariances"] = shared.mixture.gaussians.covariances
        return arrays

    def received(self, arrays: Mapping[str, Tensor], columns: int) -> FedGMMShared:
        """Return the shared part from a broadcast, with a fresh state of the optimiser."""
        if self.density:
            kind = self.gaussians.covariance_type
            own = gaussians(arrays["means"], arrays["covariances"], kind)
        else:
            own = self._without_density(torch.device("cpu"), columns).gaussians
        mixture = MixtureShared(own, arrays["weights"])
        return FedGMMShared(mixture, learners_in(arrays), ServerState())


def _check_exact(sums: Params, counts: Tensor) -> None:
    """Raise unless the sums of an exact step are bounded by the second moments of the inputs."""
    weight, second, gradient = sums["weight"], sums["second"], sums["gradient"]
    if bool(((weight - counts).abs() > 1e-3 * (1.0 + counts.max())).any()):
        raise SumsError("the weights of its learners differ from their counts")
    if bool(((second[:, -1, -1] - weight).abs() > 1e-6 * (1.0 + weight)).any()):
        raise SumsError("learners/second does not count the rows")
    # |p - y| ≤ √2 and curvature ≤ 1/2, so Cauchy and Schwarz bound both by the inputs
    classes = gradient.shape[-1] // second.shape[-1]
    squares = second.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).repeat(1, classes)
    slack = 1e-3 * squares + 1e-6
    errors = 2.25 * weight if "hessian" in sums else 1.01 * sums["squares"]
    if bool((gradient.abs() > (errors[:, None] * squares).sqrt() + slack).any()):
        raise SumsError("learners/gradient is larger than its inputs allow")
    if "hessian" in sums and bool(
        (sums["hessian"].diagonal(dim1=-2, dim2=-1) > 0.5 * squares + slack).any()
    ):
        raise SumsError("learners/hessian is larger than its inputs allow")


@dataclass(frozen=True)
class LearnersOnly(FedGMM):
    """FedGMM whose Gaussians and weights stay as they are, so a density keeps its calibration."""

    def client_step(
        self, shared: FedGMMShared, personal: Tensor, rows: LabelledRows, round_number: int = 1
    ) -> tuple[Tensor, Sums]:
        """Run the step, and keep the weights of the clients."""
        _, sums = super().client_step(shared, personal, rows, round_number)
        return personal, sums

    def server_step(
        self, shared: FedGMMShared, sums: Sums, round_number: int = 1
    ) -> tuple[FedGMMShared, RoundInfo]:
        """Run the step, and keep the Gaussians and the weights of the federation."""
        new, info = super().server_step(shared, sums, round_number)
        return replace(new, mixture=shared.mixture), info


# ---------------------------------------------------------------------- without a density

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
