"""Federated mixtures. Here: the federated Gaussian mixture, the paper's unsupervised algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedgmm.core.em import (
    Aggregation,
    aggregate_gaussians,
    aggregate_weights,
    client_weights,
    responsibilities,
    within_client_moments,
)
from fedgmm.core.gaussians import (
    CovarianceType,
    Gaussians,
    Moments,
    gaussians,
    log_densities,
    occupied,
    residuals,
    weighted_moments,
)
from fedgmm.core.initialise import Centroids, Start, server_means
from fedgmm.core.randomness import row_uniforms
from fedgmm.core.streaming import Block, accumulate
from fedgmm.data.federated import ClientRows
from fedgmm.methods.base import RoundInfo
from fedgmm.methods.centroids import local_centroids

Assign = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]
"""Responsibilities ``(n, M)`` and log-evidence ``(n,)`` of a block from its residuals ``(M, n, d)``,
client codes ``(n,)`` and place among all rows."""

Assignment = Literal["nearest", "random"]
"""How a start assigns rows: to the nearest mean, or by lot."""


@dataclass(frozen=True)
class MixtureShared:
    """What the server broadcasts: the Gaussians and the federation's weights ``(M,)``."""

    gaussians: Gaussians
    weights: Tensor


@dataclass(frozen=True)
class GivenStart:
    """Parts of the start that the user gives: weights ``(M,)``, means ``(M, d)``, covariances."""

    weights: Tensor | None = None
    means: Tensor | None = None
    covariances: Tensor | None = None


@dataclass(frozen=True)
class MixtureUpdate:
    """What clients send, as sums; stacked clients share one sum of moments.

    Attributes:
        counts: ``γ_c(m)``, ``(C, M)``.
        moments: around the current means, summed over the clients.
        log_likelihood: summed over rows, a scalar.
    """

    counts: Tensor
    moments: Moments
    log_likelihood: Tensor


class StartRows(Protocol):
    """What a start needs of the clients' rows, wherever they are: sums and centroids, never a row."""

    @property
    def columns(self) -> int:
        """``d``."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the start is computed."""
        ...

    def overall(self) -> Gaussians:
        """One diagonal Gaussian over all rows."""
        ...

    def centroids(self, clusters: int, seed: int) -> Centroids:
        """At most ``clusters`` centroids of every client."""
        ...

    def assigned(
        self, method: FederatedGMM, current: Gaussians, assignment: Assignment, seed: int
    ) -> MixtureUpdate:
        """:meth:`FederatedGMM.sums_of_assigned`, summed over clients."""
        ...


@dataclass(frozen=True)
class RowsAtHand:
    """Rows of clients that are all in this process."""

    rows: ClientRows

    @property
    def columns(self) -> int:
        """``d``."""
        return self.rows.columns

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.rows.device

    def overall(self) -> Gaussians:
        """One diagonal Gaussian over all rows."""
        return FederatedGMM(1).overall(self.rows)

    def centroids(self, clusters: int, seed: int) -> Centroids:
        """At most ``clusters`` centroids of every client."""
        return local_centroids(self.rows, clusters, seed)

    def assigned(
        self, method: FederatedGMM, current: Gaussians, assignment: Assignment, seed: int
    ) -> MixtureUpdate:
        """Sums over the rows."""
        return method.sums_of_assigned(self.rows, current, assignment, seed)


@dataclass(frozen=True)
class _Sums:
    """Accumulator of one lane; tensors are added to in place."""

    counts: Tensor
    first: Tensor
    second: Tensor
    log_likelihood: Tensor
    client_first: Tensor | None


@dataclass(frozen=True)
class FederatedGMM:
    """Shared Gaussians, private weights.

    Attributes:
        components: ``M``.
        covariance_type: see :mod:`fedgmm.core.gaussians`.
        aggregation: ``"exact"`` or the paper's.
        shared_weights: one ``π`` for all clients, the classical pooled model.
        reg_covar: added to every variance.
        dtype: precision of the products; sums and parameters are float64.
    """

    components: int
    covariance_type: CovarianceType = "full"
    aggregation: Aggregation = "exact"
    shared_weights: bool = False
    reg_covar: float = 1e-6
    dtype: torch.dtype = torch.float64

    # ------------------------------------------------------------------ the two steps of a round

    def client_step(
        self, shared: MixtureShared, personal: Tensor, rows: ClientRows, round_number: int = 1
    ) -> tuple[Tensor, MixtureUpdate]:
        """E-step and M-step on every client in ``rows``; ``personal`` is ``π_c``, ``(C, M)``."""
        log_pi = torch.log(shared.weights.expand_as(personal) if self.shared_weights else personal)

        def e_step(difference: Tensor, codes: Tensor, _: slice) -> tuple[Tensor, Tensor]:
            densities = log_densities(difference, shared.gaussians)
            return responsibilities(densities.add_(log_pi.index_select(0, codes)))

        update = self._sum_over_rows(rows, shared.gaussians, e_step)
        return client_weights(update.counts, rows.rows_per_client), update

    def server_step(
        self, shared: MixtureShared, update: MixtureUpdate, round_number: int = 1
    ) -> tuple[MixtureShared, RoundInfo]:
        """New Gaussians and the federation's weights from the clients' sums."""
        moments = update.moments
        mean_log_likelihood = float(update.log_likelihood / update.counts.sum())
        empty = torch.nonzero(~occupied(moments.counts)).flatten().tolist()
        current = shared.gaussians
        if len(empty) < len(moments.counts):  # else clients withheld all their moments
            current = aggregate_gaussians(moments, current, self.reg_covar)
        new = MixtureShared(current, aggregate_weights(update.counts))
        return new, RoundInfo(mean_log_likelihood, tuple(empty))

    def _sum_over_rows(
        self, rows: ClientRows, current: Gaussians, assign: Assign, learners: int = 1
    ) -> MixtureUpdate:
        """One pass over all rows: responsibilities, counts and moments around ``current.means``.

        With ``learners`` the responsibilities are ``q(m1, m2)``, flattened; the Gaussians see
        ``Σ_m2 q(m1, m2)``.
        """
        kind, device = current.covariance_type, rows.device
        clients, (m, d) = len(rows.names), current.means.shape
        second_shape = {"full": (m, d, d), "tied": (d, d), "diag": (m, d)}.get(kind, (m,))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        def start() -> _Sums:
            own = zeros(m, clients, d) if self.aggregation == "paper" else None
            return _Sums(
                zeros(clients, m * learners), zeros(m, d), zeros(*second_shape), zeros(), own
            )

        def add_block(sums: _Sums, block: Block) -> None:
            x, codes, place = rows.read(block)
            difference = residuals(x, current.means, self.dtype)
            q, log_evidence = assign(difference, codes, place)
            moments, weighted = weighted_moments(difference, _over_learners(q, learners), kind)
            rows.add_by_client(sums.counts, q, place)
            sums.first.add_(moments.first)
            sums.second.add_(moments.second)
            sums.log_likelihood.add_(log_evidence.sum())
            if sums.client_first is not None:
                sums.client_first.index_add_(1, codes, weighted.double())

        total, *others = accumulate(rows.blocks(m), start, add_block, device)
        for lane in others:
            total.counts.add_(lane.counts)
            total.first.add_(lane.first)
            total.second.add_(lane.second)
            total.log_likelihood.add_(lane.log_likelihood)
            if total.client_first is not None and lane.client_first is not None:
                total.client_first.add_(lane.client_first)
        own_counts = _over_learners(total.counts, learners)
        moments = Moments(own_counts.sum(0), total.first, total.second)
        if total.client_first is not None:
            own_first = total.client_first.transpose(0, 1)
            moments = within_client_moments(moments, own_counts, own_first, kind)
        return MixtureUpdate(total.counts, moments, total.log_likelihood)

    def combine(self, updates: Sequence[MixtureUpdate]) -> MixtureUpdate:
        """One update from those of single clients, in the order of their names."""
        own_counts = torch.stack([update.moments.counts for update in updates])
        own_first = torch.stack([update.moments.first for update in updates])
        second = torch.zeros_like(updates[0].moments.second)
        for update in updates:
            second += update.moments.second
        moments = Moments(own_counts.sum(0), own_first.sum(0), second)
        if self.aggregation == "paper":
            moments = within_client_moments(moments, own_counts, own_first, self.covariance_type)
        fit = torch.stack([update.log_likelihood for update in updates]).sum()
        return MixtureUpdate(torch.cat([update.counts for update in updates]), moments, fit)

    # ------------------------------------------------------------------ the start

    def start(
        self, rows: ClientRows | StartRows, start: Start, seed: int, given: GivenStart | None = None
    ) -> MixtureShared:
        """Shared Gaussians and weights from sums and local centroids; no raw row is sent.

        What is ``given`` is kept; with means given, every row counts for its nearest mean.
        """
        given = given or GivenStart()
        if isinstance(rows, ClientRows):
            rows = RowsAtHand(rows)
        weights, means, covariances = given.weights, given.means, given.covariances
        if self.covariance_type == "identity":
            covariances = torch.ones(self.components, dtype=torch.float64, device=rows.device)
        if weights is None or means is None or covariances is None:
            whole = rows.overall()
            assignment: Assignment = "nearest"
            if means is not None:
                centres = means
            elif start == "random":
                centres = whole.means.expand(self.components, -1)
                assignment = "random"
            else:
                centres = self._means_from_centroids(rows, whole, start, seed)
            found = self._from_assignment(rows, centres, whole, assignment, seed)
            weights = found.weights if weights is None else weights
            means = found.gaussians.means if means is None else means
            covariances = found.gaussians.covariances if covariances is None else covariances
        return MixtureShared(gaussians(means, covariances, self.covariance_type), weights)

    def _from_assignment(
        self,
        rows: StartRows,
        centres: Tensor,
        whole: Gaussians,
        assignment: Assignment,
        seed: int,
    ) -> MixtureShared:
        """One M-step from given responsibilities; an empty component gets the overall spread."""
        current = gaussians(
            centres, _spread(whole, self.components, self.covariance_type), self.covariance_type
        )
        exact = replace(self, aggregation="exact")
        update = rows.assigned(exact, current, assignment, seed)
        shared, _ = exact.server_step(MixtureShared(current, whole.means.new_empty(0)), update)
        # A weight of zero could never grow again.
        weights = (update.counts.sum(0) + 1e-3).clamp_min(0)
        return replace(shared, weights=weights / weights.sum())

    def overall(self, rows: ClientRows) -> Gaussians:
        """One diagonal Gaussian over all rows: its mean, then its variances around that mean."""
        one = FederatedGMM(1, "diag")
        ones = torch.ones(1, rows.columns, dtype=torch.float64, device=rows.device)
        current = Gaussians(torch.zeros_like(ones), ones, ones, "diag")
        for _ in range(2):  # the second pass takes the variances around the mean of the first
            moments = one._sum_over_rows(rows, current, _everything_to_one).moments
            shift = moments.first / moments.counts[:, None]
            variances = moments.second / moments.counts[:, None] - shift.square()
            current = Gaussians(current.means + shift, variances.clamp_min(0.0), ones, "diag")
        return current

    def sums_of_assigned(
        self, rows: ClientRows, current: Gaussians, assignment: Assignment, seed: int
    ) -> MixtureUpdate:
        """Counts and moments where each row belongs to its nearest mean, or by lot to all of them."""
        nearest = assignment == "nearest"
        assign = _nearest_component if nearest else self._random_assignment(rows, seed)
        return self._sum_over_rows(rows, current, assign)

    def _random_assignment(self, rows: ClientRows, seed: int) -> Assign:
        codes_of_rows = rows.codes.cpu().numpy()

        def assign(difference: Tensor, codes: Tensor, place: slice) -> tuple[Tensor, Tensor]:
            keys, positions = rows.keys[codes_of_rows[place]], rows.positions_at(place)
            draws = [row_uniforms(seed, m, keys, positions) for m in range(self.components)]
            q = torch.from_numpy(np.stack(draws, axis=-1)).to(difference.device)
            return q / q.sum(-1, keepdim=True), q.new_zeros(len(q))

        return assign

    def _means_from_centroids(
        self, rows: StartRows, whole: Gaussians, start: Start, seed: int
    ) -> Tensor:
        means = torch.from_numpy(
            server_means(rows.centroids(self.components, seed), self.components, start, seed)
            if self.components > 1
            else whole.means.cpu().numpy()
        ).to(rows.device)
        missing = self.components - len(means)
        if missing:  # too few centroids: draw the rest from the overall mean and variances
            noise = np.random.default_rng(seed).standard_normal((missing, rows.columns))
            drawn = whole.means + whole.covariances.sqrt() * torch.from_numpy(noise).to(rows.device)
            means = torch.cat([means.reshape(-1, rows.columns), drawn])
        return means


def _over_learners(joint: Tensor, learners: int) -> Tensor:
    """``Σ_m2 q(m1, m2)``: ``(..., M1 · M2)`` to ``(..., M1)``."""
    if learners == 1:
        return joint
    rows_last = joint.mT  # responsibilities lie in memory this way: sums then run along many rows
    return rows_last.reshape(-1, learners, rows_last.shape[-1]).sum(1).mT


def _everything_to_one(difference: Tensor, _: Tensor, __: slice) -> tuple[Tensor, Tensor]:
    q = torch.ones(difference.shape[-2], 1, dtype=torch.float64, device=difference.device)
    return q, q.new_zeros(len(q))


def _nearest_component(difference: Tensor, _: Tensor, __: slice) -> tuple[Tensor, Tensor]:
    distances = torch.linalg.vector_norm(difference, dim=-1)
    q = one_hot(distances.argmin(0), len(distances)).double()
    return q, q.new_zeros(len(q))


def _spread(whole: Gaussians, components: int, kind: CovarianceType) -> Tensor:
    """The overall variances as covariances of ``components`` Gaussians."""
    variances = whole.covariances[0]
    variances = torch.where(variances > 0, variances, 1.0)
    match kind:
        case "full":
            return torch.diag(variances).expand(components, -1, -1)
        case "tied":
            return torch.diag(variances)
        case "diag":
            return variances.expand(components, -1)
        case "spherical":
            return variances.mean().expand(components)
        case _:
            return torch.ones(components, dtype=variances.dtype, device=variances.device)
