"""The start of the Gaussians: what a site computes from its rows, and the server from the replies.

Without masks the first exchange asks for sums and centroids, the second for the sums of the rows
nearest to each of the means that the server made of them. Masks hide the centroids of single sites. So
with masks the first exchange asks for the moments of all rows, and another one for the numbers of rows
in a grid of cells in the leading directions. The cells take the place of the centroids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.gaussians import CovarianceType, Gaussians, gaussians
from fedgmm.core.sums import Declaration, Sums, row_counts
from fedgmm.data.dataset import LabelledRows
from fedgmm.federation.members import Member
from fedgmm.federation.messages import Message, MessageError
from fedgmm.federation.wire import Arrays, WireError, as_array, as_tensor
from fedgmm.methods.centroids import (
    FEWEST_ROWS_A_CLUSTER,
    FEWEST_ROWS_SENT,
    MOST_DIRECTIONS,
    Centroids,
    grid_counts,
    grid_points,
    grid_size,
    leading_directions,
    local_centroids,
    start_sample,
)
from fedgmm.methods.gmm import (
    FARTHEST,
    Assignment,
    FederatedGMM,
    equal_covariances,
    gaussian_of,
    moments_in,
    sums_of_all,
)
from fedgmm.support.randomness import client_keys
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.federation.job import Job
    from fedgmm.federation.remote import RemoteTraining

_CENTROIDS = ("centroids/points", "centroids/counts")


# ---------------------------------------------------------------------- at a site


def overall_sums(rows: LabelledRows, columns: int, *, masked: bool) -> tuple[Sums, Declaration]:
    """Return sums of all columns, with their products if there are masks."""
    kind: CovarianceType = "full" if masked else "diag"
    zero = torch.zeros(1, columns, dtype=torch.float64, device=rows.device)
    return sums_of_all(rows.features, zero, kind), FederatedGMM(1, kind).declare_sums(columns)


def centroid_arrays(request: Message, job: Job, rows: LabelledRows, own: int, least: int) -> Arrays:
    """Return local centroids of at least ``least`` rows; ``own`` are the ``min_rows`` of the site."""
    clusters, most = request.whole("clusters"), request.whole("most_rows")
    if clusters > job.options.sizes[0]:
        raise MessageError("it asks for more centroids than the run has Gaussians.")
    points, counts = np.empty((0, job.features)), np.empty(0)
    if own:
        if 0 < most < FEWEST_ROWS_A_CLUSTER * clusters:  # zero asks for no centroids
            raise MessageError(
                "it asks for centroids of so few rows that they could be recognised."
            )
        clusters = min(clusters, len(rows) // own)
    if clusters > 1 and most > 0:
        sent = local_centroids(rows.features, clusters, job.options.seed, most)
        enough = sent.counts >= least
        if own:
            enough &= separable(sent.counts, len(rows), own)
        points, counts = sent.points[enough], sent.counts[enough]
    both = (np.ascontiguousarray(one, dtype=np.float64) for one in (points, counts))
    return dict(zip(_CENTROIDS, both, strict=True))


def separable(counts: NDArray[np.float64], rows: int, fewest: int) -> NDArray[np.bool_]:
    """Return which centroids may be sent without giving away the few rows that have none.

    The sum of all rows is known, so either no row lacks a centroid or at least ``fewest`` rows do.
    """
    sent = counts >= fewest
    for smallest in np.argsort(counts, kind="stable"):
        left = rows - counts[sent].sum()
        if left < 1e-6 or left >= fewest:
            break
        sent[smallest] = False
    return sent


def cell_sums(request: Message, job: Job, rows: LabelledRows) -> tuple[Sums, Declaration]:
    """Return counts of rows in the grid of a request."""
    mean, projection = (request.arrays.get(name) for name in ("mean", "projection"))
    k = 0 if projection is None or projection.ndim != 2 else projection.shape[1]
    if mean is None or projection is None or mean.shape != (job.features,):
        raise MessageError("the grid of the start is missing or has the wrong shape.")
    if not 1 <= k <= MOST_DIRECTIONS or len(projection) != job.features:
        raise MessageError("the grid of the start has the wrong shape.")
    grid = (as_tensor(one).double().to(rows.device) for one in (mean, projection))
    counts = grid_counts(rows.features, *grid)
    return Sums({"cells": counts}), {"cells": row_counts(len(counts))}


def assigned_sums(
    request: Message, job: Job, rows: LabelledRows, own: int
) -> tuple[Sums, Declaration]:
    """Return sums of the rows nearest to each mean of a request; ``own`` are the site's ``min_rows``."""
    if job.method.mixture is None:
        raise MessageError("the method has no Gaussians to start.")
    method = replace(job.method.mixture, aggregation="exact")
    means = request.arrays.get("means")
    if means is None or means.shape != (method.components, job.features):
        raise MessageError("the means of the start are missing or have the wrong shape.")
    kind = method.covariance_type
    # only the means decide which one is nearest
    spread = equal_covariances(torch.ones(job.features).double(), len(means), kind)
    current = gaussians(as_tensor(means).double(), spread, kind)
    sums = method.sums_of_assigned(rows.features, current, "nearest", job.options.seed, own)
    return sums, method.declare_sums(job.features)


# ---------------------------------------------------------------------- at the server


class RemoteRows:
    """Rows at the sites, as the start of the Gaussians needs them.

    The first exchange asks for sums and centroids; the second for the sums of the rows nearest to
    each of the means that the server made of them.
    """

    def __init__(self, training: RemoteTraining) -> None:
        self.columns, self.device = training.job.features, torch.device("cpu")
        self._training = training
        members = training.members
        known = members.record.get("names", members.run)
        if known is None:
            known = list(members.names)
            members.record.keep("names", members.run, value=known)
        self._names = tuple(known)  # after a restart, those of the first attempt

    def overall(self) -> Gaussians:
        """Return one diagonal Gaussian over all rows, after the first exchange."""
        found = self._training.recalled("overall", self._asked_overall)
        self._known = Centroids(found["points"], found["counts"])
        mean, variances = (torch.from_numpy(found[name]) for name in ("mean", "variances"))
        return Gaussians(mean, variances, torch.ones_like(mean), "diag")

    def _asked_overall(self) -> Arrays:
        training, job = self._training, self._training.job
        names, clusters = self._names, job.options.sizes[0]
        sample, most = start_sample(client_keys(names), clusters, job.options.seed)
        asked = {names[code] for code in sample.tolist()}
        centroids: dict[str, Centroids] = {}

        def request(name: str) -> Message:
            facts = {"clusters": clusters, "most_rows": most if name in asked else 0}
            return training.message("start", {}, facts)

        def look(
            member: Member, reply: Message, sums: Sums, weight: float
        ) -> tuple[Sums, dict[str, Tensor]]:
            own = _checked_centroids(reply, sums, self.columns, clusters)
            centroids[member.name] = replace(own, counts=weight * own.counts)
            return sums, {}

        found = training.summed(
            "start",
            request,
            FederatedGMM(1, "diag"),
            self.columns,
            self._chosen,
            look,
            extra=_CENTROIDS,
        )
        whole = gaussian_of(found, torch.zeros(1, self.columns).double())
        # the rows of a bounded site are elsewhere, and so are its centroids
        sent = [centroids[name] for name in sorted(centroids.keys() - training.bounded.keys())]
        return {
            "mean": as_array(whole.means),
            "variances": as_array(whole.covariances),
            "points": np.concatenate([own.points for own in sent]),
            "counts": np.concatenate([own.counts for own in sent]),
        }

    def _chosen(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self._names)

    def centroids(self, clusters: int, seed: int) -> Centroids:
        """Return all sites' centroids, which came with the first exchange."""
        return self._known

    def assigned(
        self, method: FederatedGMM, current: Gaussians, assignment: Assignment, seed: int
    ) -> Sums:
        """Return sums over the sites' rows, each of which belongs to its nearest mean."""
        assert assignment == "nearest"
        arrays = self._training.recalled("means", lambda: {"means": as_array(current.means)})
        return self._opened("assigned", arrays, method)

    def _opened(self, kind: str, arrays: Arrays, method: FederatedGMM) -> Sums:
        """Return the total of a request's sums; a restarted server recalls it, for masks open it once."""
        training = self._training

        def ask() -> Arrays:
            request = training.message(kind, arrays, {})
            found = training.summed("start", lambda _: request, method, self.columns, self._chosen)
            return {name: as_array(value) for name, value in found.items()}

        return Sums({n: as_tensor(one) for n, one in training.recalled(kind, ask).items()})


class MaskedRows(RemoteRows):
    """Rows at sites that send masked sums, so that no site's centroids are known.

    The first exchange asks for the moments of all rows, the second for the numbers of rows in a grid of
    cells in the leading directions. The cells take the place of the centroids.
    """

    def overall(self) -> Gaussians:
        """Return one diagonal Gaussian over all rows, after the first exchange."""
        moments = moments_in(self._opened("start", {}, FederatedGMM(1, "full")))
        mean = moments.first / moments.counts
        self._mean = mean[0]
        self._covariance = moments.second[0] / moments.counts - torch.outer(mean[0], mean[0])
        variances = self._covariance.diagonal().clamp_min(0.0)[None]
        return Gaussians(mean, variances, torch.ones_like(variances), "diag")

    def centroids(self, clusters: int, seed: int) -> Centroids:
        """Return the middles of the cells that have rows, after the second exchange."""
        training = self._training
        projection, back = leading_directions(self._covariance.numpy())
        k = projection.shape[1]
        made = {
            "mean": as_array(self._mean),
            "projection": np.ascontiguousarray(projection),
            "back": np.ascontiguousarray(back),
        }
        arrays = training.recalled("grid", lambda: made)
        back = arrays.pop("back")
        request = training.message("cells", arrays, {})

        def ask() -> Arrays:
            declared = {"cells": row_counts(grid_size(k))}
            return {
                "cells": training.masked_sums("start", lambda _: request, declared)["cells"].numpy()
            }

        counts = training.recalled("cells", ask)["cells"]
        here = counts >= 0.5
        points = self._mean.numpy() + grid_points(k)[here] @ back.T
        return Centroids(points, counts[here])


def _checked_centroids(reply: Message, sums: Sums, columns: int, clusters: int) -> Centroids:
    """Return the centroids of a site, or raise ``WireError``."""
    rows = reply.facts["rows"]
    points, counts = (reply.arrays.get(name) for name in _CENTROIDS)
    if points is None or counts is None:
        raise WireError("its centroids are missing")
    if counts.ndim != 1 or points.shape != (len(counts), columns) or len(counts) > clusters:
        raise WireError(
            f"its centroids have shape {points.shape}, not (at most {clusters}, {columns})"
        )
    for array in (points, counts):
        if array.dtype != np.float64 or not np.isfinite(array).all():
            raise WireError("its centroids are not finite float64")
    if np.abs(points).max(initial=0.0) > FARTHEST:
        raise WireError("a centroid is too far away")
    if (counts < FEWEST_ROWS_SENT).any() or counts.sum() > rows + 1e-6:
        raise WireError(f"its centroids stand for more than its {counted(rows, 'row')}")
    squares = (counts[:, None] * points**2).sum(0)
    most = sums["gaussians/second"][0].numpy()
    if (squares > 1.001 * most + 1e-3).any():
        raise WireError("its centroids are farther away than its rows")
    return Centroids(points, counts)
