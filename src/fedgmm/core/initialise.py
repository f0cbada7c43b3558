"""A start without pooled data: local centroids with counts become the shared Gaussians.

One exchange, in the manner of k-FED: every client clusters its own rows and sends a few centroids
with their counts; the server clusters the centroids. A centroid of a single row would *be* that row,
so it stays at home, and so does a client that has only one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

Start = Literal["kmeans", "k-means++", "random"]
STARTS: tuple[str, ...] = get_args(Start)

FEWEST_ROWS_SENT = 2
"""A centroid that stands for fewer rows is not sent."""


@dataclass(frozen=True)
class Centroids:
    """What clients send for the start: centroids ``(K, d)`` and the rows behind each, ``(K,)``."""

    points: NDArray[np.float64]
    counts: NDArray[np.float64]


def local_clusters(rows: Tensor, most: int) -> Tensor:
    """How many clusters a client of ``N_c`` rows looks for: at least two rows each, ``(C,)``."""
    return (rows // FEWEST_ROWS_SENT).clamp(1, most)


def nearest(x: Tensor, centres: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centre of each row among its own candidates.

    Args:
        x: rows, ``(N, d)``.
        centres: candidates of each row, ``(N, k, d)``.
        active: which candidates count, ``(N, k)``.

    Returns:
        The index ``(N,)`` and the squared distance ``(N,)``.
    """
    distances = (x.unsqueeze(-2) - centres).square_().sum(-1)
    distances.masked_fill_(~active, torch.inf)
    smallest = distances.min(-1)
    return smallest.indices, smallest.values


def server_means(sent: Centroids, components: int, start: Start, seed: int) -> NDArray[np.float64]:
    """Means for the shared Gaussians from the clients' centroids.

    Args:
        sent: all clients' centroids.
        components: ``M``.
        start: ``"kmeans"`` clusters the centroids; ``"k-means++"`` picks among them, far apart.
        seed: for the clustering's own draws.

    Returns:
        Up to ``M`` means ``(k, d)``; fewer where the clients sent fewer different centroids.
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
    # On several threads scikit-learn adds up in whatever order they finish; one gives the same bits.
    with threadpool_limits(limits=1, user_api="openmp"):
        clustering = KMeans(components, n_init=10, random_state=seed)
        clustering.fit(points, sample_weight=counts)
    return np.asarray(clustering.cluster_centers_, dtype=np.float64)


def _fixed_order(points: NDArray[np.float64]) -> NDArray[np.intp]:
    """An order of the centroids ``(K, d)`` that does not depend on who answered first.

    Nor may it hang on the last bits of the clients' sums, as it would where a column is constant but
    for rounding: columns are compared in coarse steps first.
    """
    if not len(points):
        return np.arange(0)
    # An odd step keeps round numbers away from its edges.
    step = np.pi * (1e-6 * np.ptp(points, axis=0) + 1e-12 * np.abs(points).max(0))
    coarse = np.rint(points / np.where(step > 0, step, 1.0))
    return np.lexsort([*points.T[::-1], *coarse.T[::-1]])
