"""Initial Gaussians without pooled data, from local centroids with counts.

It needs one exchange, as in k-FED: every client clusters its own rows and sends a few centroids with
their counts; the server clusters the centroids. A centroid of a single row would *be* that row, so it
is not sent, and a client with one row sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

Start = Literal["kmeans", "k-means++", "random"]
STARTS: tuple[str, ...] = get_args(Start)

FEWEST_ROWS_SENT = 2
"""A centroid that stands for fewer rows is not sent."""


@dataclass(frozen=True)
class Centroids:
    """Centroids of clients, ``(K, d)``, and the number of rows behind each, ``(K,)``."""

    points: NDArray[np.float64]
    counts: NDArray[np.float64]


def local_clusters(rows: Tensor, most: int) -> Tensor:
    """Return the number of clusters of clients with ``N_c`` rows, ``(C,)``: at least two rows each."""
    return (rows // FEWEST_ROWS_SENT).clamp(1, most)


def nearest(x: Tensor, centres: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index and the squared distance of each row's nearest centre, ``(N,)`` each.

    Rows are ``(N, d)``, and each has candidates of its own, ``(N, k, d)``, of which ``active``,
    ``(N, k)``, are used.
    """
    distances = (x.unsqueeze(-2) - centres).square_().sum(-1)
    distances.masked_fill_(~active, torch.inf)
    smallest = distances.min(-1)
    return smallest.indices, smallest.values


def server_means(sent: Centroids, components: int, start: Start, seed: int) -> NDArray[np.float64]:
    """Return means for the shared Gaussians from the clients' centroids, ``(k, d)``.

    ``"kmeans"`` clusters the centroids; ``"k-means++"`` picks centroids that are far apart. There
    are fewer than ``components`` means if the clients sent fewer different centroids.
    """
    from sklearn.cluster import KMeans, kmeans_plusplus

    order = _fixed_order(sent.points)
    points, counts = sent.points[order], sent.counts[order]
    distinct = len(np.unique(points, axis=0))
    if distinct <= components:
        return np.unique(points, axis=0)
    if start == "k-means++":
        means, _ = kmeans_plusplus(points, components, sample_weight=counts, random_state=seed)
        return np.asarray(means)
    # On several threads the order of scikit-learn's sums varies; one thread always gives the same bits.
    with _openmp().limit(limits=1, user_api="openmp"):
        clustering = KMeans(components, n_init=10, random_state=seed)
        clustering.fit(points, sample_weight=counts)
    return np.asarray(clustering.cluster_centers_, dtype=np.float64)


@cache
def _openmp() -> ThreadpoolController:
    """Return the libraries of threads, which take milliseconds to find, after scikit-learn's are loaded."""
    return ThreadpoolController()


# ---------------------------------------------------------------------- a start from counts alone

_CELLS_PER_DIRECTION = {1: 64, 2: 24, 3: 12}
_REACH = 3.0  # deviations that the grid covers; rows beyond count for its outer cells
MOST_DIRECTIONS = max(_CELLS_PER_DIRECTION)


def grid_size(directions: int) -> int:
    """Return the number of cells of a grid in so many directions."""
    return int(_CELLS_PER_DIRECTION[directions] ** directions)


def grid_cells(y: Tensor) -> Tensor:
    """Return the cell of each row ``(n,)``, given its place in deviations, ``(n, k)``."""
    per = _CELLS_PER_DIRECTION[y.shape[1]]
    places = ((y + _REACH) * (per / (2 * _REACH))).long().clamp(0, per - 1)
    powers = per ** torch.arange(y.shape[1] - 1, -1, -1, device=y.device)
    return (places * powers).sum(-1)


def grid_points(directions: int) -> NDArray[np.float64]:
    """Return the middles of all cells in deviations, ``(cells, k)``."""
    per = _CELLS_PER_DIRECTION[directions]
    middles = (np.arange(per) + 0.5) * (2 * _REACH / per) - _REACH
    grid = np.meshgrid(*[middles] * directions, indexing="ij")
    return np.stack([axis.reshape(-1) for axis in grid], axis=-1)


def leading_directions(
    covariance: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the projection on the leading directions with unit variance, and the way back.

    From the covariance of all rows, ``(d, d)``: ``P`` and ``A``, ``(d, k)`` each, with at most
    three directions. A row ``x`` around the mean has the place ``y = xᵀ P``, and ``A y`` is the
    nearest point to ``x`` in these directions.
    """
    values, vectors = np.linalg.eigh(covariance)
    count = int(min(MOST_DIRECTIONS, max(1, (values > 1e-9 * max(values[-1], 1e-300)).sum())))
    lengths = np.sqrt(np.maximum(values[::-1][:count], 1e-12))
    axes = vectors[:, ::-1][:, :count]
    return axes / lengths, axes * lengths


def _fixed_order(points: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return an order of the centroids ``(K, d)`` that does not depend on the order of arrival.

    It must not depend on the last bits of the clients' sums either, as it would if a column is constant
    except for rounding. So columns are compared in coarse steps first.
    """
    if not len(points):
        return np.arange(0)
    # An odd step keeps round numbers away from its edges.
    step = np.pi * (1e-6 * np.ptp(points, axis=0) + 1e-12 * np.abs(points).max(0))
    coarse = np.rint(points / np.where(step > 0, step, 1.0))
    return np.lexsort([*points.T[::-1], *coarse.T[::-1]])
