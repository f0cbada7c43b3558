"""The start of the Gaussians where the rows are elsewhere: two exchanges with the sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fedgmm.core.gaussians import CovarianceType, Gaussians, Moments
from fedgmm.core.initialise import FEWEST_ROWS_SENT, Centroids
from fedgmm.federation.messages import Message
from fedgmm.federation.updates import Received, UpdateError, checked_counts, checked_moments
from fedgmm.federation.wire import Arrays, as_array, as_tensor
from fedgmm.methods.gmm import Assignment, FederatedGMM, MixtureUpdate
from fedgmm.wording import counted

_FARTHEST = 1e12  # deviations; preprocessing clips there


@dataclass(frozen=True)
class SiteStart:
    """What one site told for the start, checked.

    Attributes:
        rows: training rows.
        mean: ``(d,)``.
        variances: ``(d,)``.
        centroids: of its rows.
    """

    rows: int
    mean: NDArray[np.float64]
    variances: NDArray[np.float64]
    centroids: Centroids


def checked_start(answer: Message, rows: int, columns: int, clusters: int) -> SiteStart:
    """What a site told for the start.

    Raises:
        UpdateError: numbers that no rows could have made.
    """
    given = Received(answer.arrays)
    mean = given.take("overall/mean", (columns,))
    variances = given.take("overall/variances", (columns,))
    count = given.shape_of("centroids/counts")[0] if given.shape_of("centroids/counts") else -1
    if not 0 <= count <= clusters:
        raise UpdateError(f"it sent {counted(count, 'centroid')}, not up to {clusters}")
    counts = given.take("centroids/counts", (count,))
    points = given.take("centroids/points", (count, columns))
    given.done()
    if (variances < 0).any() or (variances > _FARTHEST**2).any():
        raise UpdateError("a variance is negative or beyond all bounds")
    if max(np.abs(mean).max(), np.abs(points).max(initial=0.0)) > _FARTHEST:
        raise UpdateError("a mean or a centroid is beyond all bounds")
    if (counts < FEWEST_ROWS_SENT).any() or counts.sum() > rows + 1e-6:
        raise UpdateError(
            f"its centroids stand for more than the {counted(rows, 'row')} that it declared"
        )
    return SiteStart(rows, mean, variances, Centroids(points, counts))


def checked_assigned(
    answer: Message, rows: int, components: int, kind: CovarianceType, columns: int, exact: bool
) -> MixtureUpdate:
    """A site's sums of the rows nearest to each mean of the start.

    Raises:
        UpdateError: numbers that no rows could have made.
    """
    given = Received(answer.arrays)
    counts = checked_counts(given.tensor("counts", (components,)), rows)
    moments = checked_moments(given, kind, counts, columns, exact=exact)
    given.done()
    return MixtureUpdate(counts[None], moments, torch.zeros((), dtype=torch.float64))


@dataclass
class RemoteRows:
    """Rows of sites, as the start of the Gaussians needs them.

    Attributes:
        columns: ``d``.
        told: what each site told in the first exchange, in the order of their names.
        ask_assigned: the second exchange: sums of the sites, given the arrays of the question.
    """

    columns: int
    told: list[SiteStart]
    ask_assigned: Callable[[Arrays], list[MixtureUpdate]]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def overall(self) -> Gaussians:
        """One diagonal Gaussian over all rows, from the sites' own means and variances.

        With ``n = Σ_c n_c``: ``mean = Σ_c n_c mean_c / n`` and
        ``variance = Σ_c n_c [variance_c + (mean_c - mean)²] / n``.
        """
        rows = np.array([site.rows for site in self.told], dtype=np.float64)
        means = np.stack([site.mean for site in self.told])
        own = np.stack([site.variances for site in self.told])
        mean = (rows[:, None] * means).sum(0) / rows.sum()
        variances = (rows[:, None] * (own + (means - mean) ** 2)).sum(0) / rows.sum()
        ones = torch.ones(1, self.columns, dtype=torch.float64)
        return Gaussians(as_tensor(mean)[None], as_tensor(variances)[None], ones, "diag")

    def centroids(self, clusters: int, seed: int) -> Centroids:
        """All sites' centroids, which came with the first exchange."""
        return Centroids(
            np.concatenate([site.centroids.points for site in self.told]),
            np.concatenate([site.centroids.counts for site in self.told]),
        )

    def assigned(
        self, method: FederatedGMM, current: Gaussians, assignment: Assignment, seed: int
    ) -> MixtureUpdate:
        """Sums over the sites' rows, each of which belongs to its nearest mean."""
        assert assignment == "nearest"
        return method.combine(self.ask_assigned({"means": as_array(current.means)}))


@dataclass
class UnseenRows:
    """Rows of which a method without a density needs to know nothing at its start.

    Attributes:
        columns: ``d``.
    """

    columns: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def overall(self) -> Gaussians:
        """Standardised columns have mean zero and variance one."""
        ones = torch.ones(1, self.columns, dtype=torch.float64)
        return Gaussians(torch.zeros_like(ones), ones, ones, "diag")

    def centroids(self, clusters: int, seed: int) -> Centroids:
        """None are wanted."""
        return Centroids(np.empty((0, self.columns)), np.empty(0))

    def assigned(
        self, method: FederatedGMM, current: Gaussians, assignment: Assignment, seed: int
    ) -> MixtureUpdate:
        """One row at the mean of each component."""
        ones = torch.ones(method.components, dtype=torch.float64)
        nothing = torch.zeros(method.components, self.columns, dtype=torch.float64)
        return MixtureUpdate(ones[None], Moments(ones, nothing, 0.0 * ones), ones.sum())


@dataclass(frozen=True)
class StartingRows:
    """What ``init`` of a method sees of the sites.

    Attributes:
        features: what the start of the Gaussians needs.
        names: the sites.
    """

    features: RemoteRows | UnseenRows
    names: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        """Where the start is computed."""
        return self.features.device
