"""The federated Gaussian mixture: shared Gaussians, weights ``π_c`` that stay with the clients.

It is Algorithm 2 of the paper, and the half of FedGMM that is about inputs. The equations are in
:mod:`fedgmm.core.em` and :mod:`fedgmm.core.gaussians`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedgmm.core.dominance import common_entries
from fedgmm.core.em import (
    Aggregation,
    client_weights,
    federation_weights,
    over_learners,
    paper_moments,
    responsibilities,
    update_gaussians,
    within_clients,
)
from fedgmm.core.gaussians import (
    CovarianceType,
    Gaussians,
    Moments,
    covariance_shape,
    gaussians,
    log_densities,
    occupied,
    residuals,
    weighted_moments,
)
from fedgmm.core.moments import scatter_around_means
from fedgmm.core.sums import (
    Declaration,
    Sum,
    Sums,
    SumsError,
    check_semidefinite,
    check_sums,
    row_counts,
)
from fedgmm.data.federated import ClientRows
from fedgmm.methods.base import RoundInfo
from fedgmm.methods.centroids import Centroids, Start, local_centroids, server_means
from fedgmm.support.randomness import row_uniforms
from fedgmm.support.streaming import Block, accumulate

Assign = Callable[[Tensor | None, Tensor, slice], tuple[Tensor, Tensor]]
"""Return responsibilities ``(n, M)`` and log-evidence ``(n,)`` of a block, given its residuals
``(M, n, d)`` (``None`` without Gaussians), client codes ``(n,)`` and place among all rows."""

Assignment = Literal["nearest", "random"]
"""Responsibilities of a start: each row belongs to its nearest mean, or to all means at random."""

FARTHEST = 1e12
"""Most deviations between a row and a mean; preprocessing clips rows there."""

_LARGEST_LOG_LIKELIHOOD = 1e27  # of one row, in absolute value; follows from FARTHEST


@dataclass(frozen=True)
class MixtureShared:
    """The server's broadcast: the Gaussians and the federation's weights ``(M,)``."""

    gaussians: Gaussians
    weights: Tensor


@dataclass(frozen=True)
class GivenStart:
    """Parts of the start that the user gives: weights ``(M,)``, means ``(M, d)``, covariances."""

    weights: Tensor | None = None
    means: Tensor | None = None
    covariances: Tensor | None = None


class StartRows(Protocol):
    """The sums and centroids that a start needs of the clients' rows, wherever the rows are."""

    @property
    def columns(self) -> int:
        """``d``."""

    @property
    def device(self) -> torch.device:
        """The device on which the start is computed."""

    def overall(self) -> Gaussians:
        """Return one diagonal Gaussian over all rows."""

    def centroids(self, clusters: int, seed: int) -> Centroids:
        """Return at most ``clusters`` centroids of every client."""

    def assigned(
        self, method: FederatedGMM, current: Gaussians, assignment: Assignment, seed: int
    ) -> Sums:
        """Return :meth:`FederatedGMM.sums_of_assigned`, summed over clients."""


class _StartHere:
    """The :class:`StartRows` of clients that are all in this process."""

    def __init__(self, rows: ClientRows) -> None:
        self.rows, self.columns, self.device = rows, rows.columns, rows.device

    def overall(self) -> Gaussians:
        return overall_gaussian(self.rows)

    def centroids(self, clusters: int, seed: int) -> Centroids:
        return local_centroids(self.rows, clusters, seed)

    def assigned(
        self, method: FederatedGMM, current: Gaussians, assignment: Assignment, seed: int
    ) -> Sums:
        return method.sums_of_assigned(self.rows, current, assignment, seed)


@dataclass(frozen=True)
class FederatedGMM:
    """Shared Gaussians, private weights."""

    components: int  # ``M``
    covariance_type: CovarianceType = "full"  # see :mod:`fedgmm.core.gaussians`
    aggregation: Aggregation = "exact"  # ``"exact"`` or the paper's
    shared_weights: bool = False  # one ``π`` for all clients, the classical pooled model
    reg_covar: float = 1e-6  # added to every variance
    dtype: torch.dtype = torch.float64  # precision of the products; sums and parameters are float64

    # ------------------------------------------------------------------ the two steps of a round

    def client_step(
        self, shared: MixtureShared, personal: Tensor, rows: ClientRows, round_number: int = 1
    ) -> tuple[Tensor, Sums]:
        """Run the E-step and the M-step on every client; ``personal`` is ``π_c``, ``(C, M)``."""
        log_pi = torch.log(shared.weights.expand_as(personal) if self.shared_weights else personal)

        def e_step(difference: Tensor | None, codes: Tensor, _: slice) -> tuple[Tensor, Tensor]:
            assert difference is not None
            densities = log_densities(difference, shared.gaussians)
            return responsibilities(densities.add_(log_pi.index_select(0, codes)))

        counts, sums = self.sum_over_rows(rows, shared.gaussians, e_step)
        return client_weights(counts, rows.weight_per_client), sums

    def server_step(
        self, shared: MixtureShared, sums: Sums, round_number: int = 1
    ) -> tuple[MixtureShared, RoundInfo]:
        """Return new Gaussians and the federation's weights from the clients' sums."""
        moments = moments_in(sums)
        empty = torch.nonzero(~occupied(moments.counts)).flatten().tolist()
        current = shared.gaussians
        if len(empty) < len(moments.counts):  # otherwise the clients withheld all their moments
            if self.aggregation == "paper":
                moments = paper_moments(moments, self.covariance_type)
            current = update_gaussians(moments, current, self.reg_covar)
        new = MixtureShared(current, federation_weights(sums["counts"]))
        log_likelihood = float(sums["log_likelihood"] / sums["counts"].sum())
        return new, RoundInfo(log_likelihood, tuple(empty))

    def sum_over_rows(
        self, rows: ClientRows, current: Gaussians | None, assign: Assign, learners: int = 1
    ) -> tuple[Tensor, Sums]:
        """Pass once over all rows: responsibilities, counts and moments around ``current.means``.

        Without Gaussians (``None``) their moments are left out. ``assign`` gives the
        responsibilities of a block. With ``learners`` (``M2``) these are ``q(m1, m2)``, flattened,
        and the Gaussians see ``Σ_m2 q(m1, m2)``. Returns ``γ_c(m1, m2)`` of each client,
        ``(C, M1 · M2)``, and the sums over all clients.
        """
        device, clients = rows.device, len(rows.names)
        pairs = self.components * learners

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        def start() -> dict[str, Tensor]:
            lane = {"counts": zeros(clients, pairs), "log_likelihood": zeros()}
            if current is not None:
                m, d = current.means.shape
                lane["first"] = zeros(m, d)
                lane["second"] = zeros(*covariance_shape(current.covariance_type, m, d))
                if self.aggregation == "paper":
                    lane["client_first"] = zeros(m, clients, d)
            return lane

        def add_block(lane: dict[str, Tensor], block: Block) -> None:
            x, codes, place = rows.read(block)
            difference = None if current is None else residuals(x, current.means, self.dtype)
            q, log_evidence = (rows.weigh(one, place) for one in assign(difference, codes, place))
            rows.add_by_client(lane["counts"], q, place)
            lane["log_likelihood"].add_(log_evidence.sum())
            if current is None or difference is None:
                return
            moments, weighted = weighted_moments(
                difference, over_learners(q, learners), current.covariance_type
            )
            lane["first"].add_(moments.first)
            lane["second"].add_(moments.second)
            if "client_first" in lane:
                lane["client_first"].index_add_(1, codes, weighted.double())

        total, *others = accumulate(rows.blocks(self.components), start, add_block, device)
        for lane in others:
            for name, value in lane.items():
                total[name].add_(value)
        counts = total["counts"]
        sums = {"counts": counts.sum(0), "log_likelihood": total["log_likelihood"]}
        if current is not None:
            own = over_learners(counts, learners)
            second = total["second"]
            if "client_first" in total:
                first = total["client_first"].transpose(0, 1)
                second = within_clients(second, own, first, current.covariance_type)
            sums["gaussians/counts"] = own.sum(0)
            sums["gaussians/first"] = total["first"]
            sums["gaussians/second"] = second
        return counts, Sums(sums)

    # ------------------------------------------------------------------ the declaration of the sums

    def declare_sums(self, columns: int, pairs: int | None = None) -> dict[str, Sum]:
        """Declare the sums that clients send, see :mod:`fedgmm.core.sums`.

        ``columns`` is ``d``, and ``pairs`` is ``M1 · M2`` with learners; ``None`` means ``M``.
        """
        m, kind = self.components, self.covariance_type
        # A client's own mean lies on the other side of the shared one in the worst case.
        farthest = 2.0 if self.aggregation == "paper" else 1.0
        return {
            "counts": row_counts(pairs or m),
            "log_likelihood": Sum((), largest=_LARGEST_LOG_LIKELIHOOD),
            "gaussians/counts": row_counts(m),
            "gaussians/first": Sum(
                (m, columns),
                rows="gaussians/counts",
                largest=2 * FARTHEST,
                sensitivity=lambda clip: clip,
            ),
            "gaussians/second": Sum(
                covariance_shape(kind, m, columns),
                rows="gaussians/counts",
                pooled=kind == "tied",
                lowest=-torch.inf if kind in ("full", "tied") else 0.0,
                largest=(2 * FARTHEST) ** 2 * columns,
                rounding=self._rounding,
                semidefinite=kind in ("full", "tied"),
                sensitivity=lambda clip: (farthest * clip) ** 2,
            ),
        }

    def check(self, sums: Sums, rows: int, declaration: Declaration) -> None:
        """Raise :class:`SumsError` for sums of one client that ``rows`` rows could not have made."""
        if self.aggregation == "paper":
            # Scatters around a client's own means may be nothing but rounding errors, whose size
            # only the moments around the shared means show.
            moments = paper_moments(moments_in(sums), self.covariance_type)
            sums = Sums({**sums, "gaussians/second": moments.second})
        check_sums(sums, declaration, rows)
        check_counts(sums["counts"], rows)
        of_gaussians = sums["counts"].reshape(self.components, -1).sum(-1)
        check_moments(sums, of_gaussians, self.covariance_type, self._rounding)

    @property
    def _rounding(self) -> float:
        """Relative error of second moments."""
        return 1e-8 if self.dtype == torch.float64 else 1e-4

    # ------------------------------------------------------------------ the start

    def start(
        self, rows: ClientRows | StartRows, start: Start, seed: int, given: GivenStart | None = None
    ) -> MixtureShared:
        """Return the first Gaussians and weights, from sums and local centroids; no row is sent.

        Parts that are ``given`` are kept; with means given, every row counts for its nearest mean.
        """
        given = given or GivenStart()
        if isinstance(rows, ClientRows):
            rows = _StartHere(rows)
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
        self, rows: StartRows, centres: Tensor, whole: Gaussians, assignment: Assignment, seed: int
    ) -> MixtureShared:
        """Run one M-step from given responsibilities; an empty component gets the overall spread."""
        variances, kind = whole.covariances[0], self.covariance_type
        variances = torch.where(variances > 0, variances, 1.0)
        current = gaussians(centres, equal_covariances(variances, self.components, kind), kind)
        exact = replace(self, aggregation="exact")
        sums = rows.assigned(exact, current, assignment, seed)
        shared, _ = exact.server_step(MixtureShared(current, whole.means.new_empty(0)), sums)
        # A weight of zero could never grow again.
        weights = (sums["counts"] + 1e-3).clamp_min(0)
        return replace(shared, weights=weights / weights.sum())

    def sums_of_assigned(
        self,
        rows: ClientRows,
        current: Gaussians,
        assignment: Assignment,
        seed: int,
        fewest_rows: float = 0.0,
    ) -> Sums:
        """Return the sums of rows that belong to their nearest mean, or to all means at random.

        With ``fewest_rows``, a mean with fewer rows gets none; they belong to the nearest other mean.
        """
        assign = _nearest if assignment == "nearest" else self._random_assignment(rows, seed)
        counts, sums = self.sum_over_rows(rows, current, assign)
        while fewest_rows:
            common = common_entries(counts.sum(0), fewest_rows)
            if torch.equal(common, counts.sum(0) > 0):
                break
            assign = partial(_nearest, among=common)
            counts, sums = self.sum_over_rows(rows, current, assign)
        return sums

    def _random_assignment(self, rows: ClientRows, seed: int) -> Assign:
        codes_of_rows = rows.codes.cpu().numpy()

        def assign(difference: Tensor | None, _: Tensor, place: slice) -> tuple[Tensor, Tensor]:
            keys, positions = rows.keys[codes_of_rows[place]], rows.positions_at(place)
            draws = [row_uniforms(seed, m, keys, positions) for m in range(self.components)]
            q = torch.from_numpy(np.stack(draws, axis=-1)).to(rows.device)
            return q / q.sum(-1, keepdim=True), q.new_zeros(len(q))

        return assign

    def _means_from_centroids(
        self, rows: StartRows, whole: Gaussians, start: Start, seed: int
    ) -> Tensor:
        means = whole.means
        if self.components > 1:
            sent = rows.centroids(self.components, seed)
            found = server_means(sent, self.components, start, seed)
            means = torch.from_numpy(found).to(rows.device)
        missing = self.components - len(means)
        if missing:  # too few centroids: draw the rest from the overall mean and variances
            noise = np.random.default_rng(seed).standard_normal((missing, rows.columns))
            drawn = whole.means + whole.covariances.sqrt() * torch.from_numpy(noise).to(rows.device)
            means = torch.cat([means.reshape(-1, rows.columns), drawn])
        return means


def overall_gaussian(rows: ClientRows) -> Gaussians:
    """Return one diagonal Gaussian over all rows: its mean, then its variances around that mean."""
    mean = torch.zeros(1, rows.columns, dtype=torch.float64, device=rows.device)
    whole = gaussian_of(sums_of_all(rows, mean), mean)
    return gaussian_of(sums_of_all(rows, whole.means), whole.means)


def sums_of_all(rows: ClientRows, centre: Tensor, kind: CovarianceType = "diag") -> Sums:
    """Return the sums of one Gaussian over all rows, around ``centre``, ``(1, d)``."""
    around = gaussians(centre, equal_covariances(torch.ones_like(centre[0]), 1, kind), kind)
    return FederatedGMM(1, kind).sum_over_rows(rows, around, _all_to_one)[1]


def gaussian_of(sums: Sums, centre: Tensor) -> Gaussians:
    """Return one diagonal Gaussian from sums around ``centre``, ``(1, d)``."""
    moments = moments_in(sums)
    n = moments.counts[:, None]
    scatter = scatter_around_means(moments.counts, moments.first, moments.second, "diag")
    return Gaussians(
        centre + moments.first / n, (scatter / n).clamp_min(0.0), torch.ones_like(centre), "diag"
    )


def moments_in(sums: Sums) -> Moments:
    """Return the moments of the Gaussians among the sums."""
    return Moments(sums["gaussians/counts"], sums["gaussians/first"], sums["gaussians/second"])


def equal_covariances(variances: Tensor, components: int, kind: CovarianceType) -> Tensor:
    """Return the same variances ``(d,)`` as covariances of ``components`` Gaussians."""
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


# ---------------------------------------------------------------------- what rows can make of sums


def check_counts(counts: Tensor, rows: int) -> None:
    """Raise :class:`SumsError` unless ``γ_c``, ``(M,)``, adds up to the client's rows."""
    if abs(float(counts.sum()) - rows) > 1e-4 * rows + 1e-6:
        raise SumsError(f"its counts add up to {float(counts.sum()):.6g}, not to {rows} rows")


def check_moments(sums: Sums, counts: Tensor, kind: CovarianceType, slack: float) -> None:
    """Raise :class:`SumsError` unless the moments of a client's Gaussians agree with each other.

    ``counts`` are ``γ_c(m1)``, ``(M1,)``, as the client's responsibilities have it, and ``slack``
    is the relative rounding error of the moments.
    """
    moments = moments_in(sums)
    withheld = moments.counts == 0
    agree = withheld | ((moments.counts - counts).abs() <= 1e-6 * (1.0 + counts))
    if not bool(agree.all()):
        raise SumsError("the counts of its moments differ from those of its responsibilities")
    if kind == "identity":
        return
    # Σ q (x - μ_mc)(x - μ_mc)ᵀ around the client's own means is positive semidefinite.
    second = moments.second
    scatter = scatter_around_means(moments.counts, moments.first, second, kind)
    if kind in ("full", "tied"):
        check_semidefinite("gaussians/second", second, scatter, slack)
    elif bool((scatter < -slack * (second.abs() + 1e-12)).any()):
        raise SumsError("gaussians/second is not positive semidefinite around its mean")


def _all_to_one(_: Tensor | None, codes: Tensor, __: slice) -> tuple[Tensor, Tensor]:
    q = torch.ones(len(codes), 1, dtype=torch.float64, device=codes.device)
    return q, q.new_zeros(len(q))


def _nearest(
    difference: Tensor | None, _: Tensor, __: slice, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert difference is not None
    distances = torch.linalg.vector_norm(difference, dim=-1)
    if among is not None:
        distances = torch.where(among[:, None], distances, torch.inf)
    q = one_hot(distances.argmin(0), len(distances)).double()
    return q, q.new_zeros(len(q))
