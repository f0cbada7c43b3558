"""The start of the Gaussians without pooled data, from local centroids with counts.

It needs one exchange, as in k-FED: every client clusters its own rows and sends a few centroids with
their counts; the server clusters the centroids. A centroid of a single row would *be* that row, so it
is not sent, and a client with one row sends nothing.

Centroids are not sums. Under masks clients send the counts of a grid's cells instead, and the server
clusters the middles of the cells.
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

from fedgmm.data.federated import ClientRows
from fedgmm.support.randomness import row_uniforms
from fedgmm.support.scratch import empty, row_blocks
from fedgmm.support.streaming import Block, accumulate

Start = Literal["kmeans", "k-means++", "random"]
STARTS: tuple[str, ...] = get_args(Start)

FEWEST_ROWS_SENT = 2
"""A centroid that stands for fewer rows is not sent."""


@dataclass(frozen=True)
class Centroids:
    """Centroids of clients, ``(K, d)``, and the number of rows behind each, ``(K,)``."""

    points: NDArray[np.float64]
    counts: NDArray[np.float64]


# The start uses about this many local centroids and rows at most, drawn at random. They suffice for any
# M, and its time and memory do not grow with the federation.
_MOST_CENTROIDS = 20_000
_MOST_START_ROWS = 200_000
FEWEST_ROWS_A_CLUSTER = 10
"""A client draws at least this many rows per centroid."""
_LLOYD_ITERATIONS = 10
_CLIENT_STREAM, _ROW_STREAM = 0, 1_000_000
_ROWS_AT_ONCE = 65_536


# ---------------------------------------------------------------------- the clients


def local_centroids(
    rows: ClientRows, clusters: int, seed: int, most_rows: int | None = None
) -> Centroids:
    """Return at most ``clusters`` centroids of every client's own rows; all clients are clustered at once.

    Draws depend on a client's name and row, so the order of clients does not matter. ``most_rows``
    is the largest number of rows that a client uses, see :func:`start_sample`, if ``rows`` hold
    only some clients of the federation; ``None`` if they hold all.
    """
    rows = _sample(rows, clusters, seed, most_rows)
    # every cluster can have two rows
    wanted = (rows.rows_per_client // FEWEST_ROWS_SENT).clamp(1, clusters)
    active = torch.arange(clusters, device=rows.device) < wanted[:, None]
    centres, active = _far_apart_rows(rows, active, seed)
    for _ in range(_LLOYD_ITERATIONS):
        sums, weights, counts = _lloyd_step(rows, centres, active)
        means = sums / torch.where(weights > 0, weights, 1)[..., None]
        moved = torch.where(weights[..., None] > 0, means, centres)
        unchanged = torch.equal(moved, centres)
        centres = moved
        if unchanged:
            break
    sent = counts >= FEWEST_ROWS_SENT
    return Centroids(centres[sent].cpu().numpy(), weights[sent].cpu().numpy())


def start_sample(
    keys: NDArray[np.uint64], clusters: int, seed: int
) -> tuple[NDArray[np.int64], int]:
    """Return sorted codes of the clients of the start, ``(A,)``, and the largest number of rows of each.

    ``keys`` are those of the names of all clients, ``(C,)``; ``clusters`` are the centroids per
    client.
    """
    most = max(1, _MOST_CENTROIDS // clusters)
    chosen = np.arange(len(keys))
    if len(keys) > most:  # drawn by their names
        draws = row_uniforms(seed, _CLIENT_STREAM, keys, np.zeros_like(chosen))
        chosen = np.sort(np.argsort(draws, kind="stable")[:most])
    return chosen, max(FEWEST_ROWS_A_CLUSTER * clusters, _MOST_START_ROWS // len(chosen))


def _sample(rows: ClientRows, clusters: int, seed: int, most_rows: int | None) -> ClientRows:
    """Draw some clients of a large federation, and some rows of a large client."""
    if most_rows is None:
        chosen, most = start_sample(rows.keys, clusters, seed)
    else:
        chosen, most = np.arange(len(rows.names)), most_rows
    share = np.zeros(len(rows.names))
    share[chosen] = most / np.maximum(rows.rows_per_client.cpu().numpy()[chosen], 1)
    if share.min() >= 1.0:
        return rows
    codes = rows.codes.cpu().numpy()
    wanted = empty(len(rows), np.bool_)
    for place in row_blocks(len(rows), _ROWS_AT_ONCE):
        own = codes[place]
        draws = row_uniforms(seed, _ROW_STREAM, rows.keys[own], rows.positions_at(place))
        wanted[place] = draws < share[own]
    kept = rows.keep(torch.from_numpy(wanted).to(rows.device))
    new_code = torch.zeros(len(rows.names), dtype=torch.int64)
    new_code[torch.from_numpy(chosen)] = torch.arange(len(chosen))
    names = tuple(rows.names[code] for code in chosen.tolist())
    return ClientRows(kept.chunks, new_code.to(rows.device)[kept.codes], names, kept.weights)


def _far_apart_rows(rows: ClientRows, active: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Run k-means++ within every client: draw rows in proportion to their squared distance.

    Returns the centres ``(C, k, d)`` and which of them are used ``(C, k)``; a client with fewer
    different rows than clusters uses fewer.
    """
    clients, clusters = active.shape
    codes = rows.codes.cpu().numpy()
    keys = rows.keys[codes]
    centres = torch.zeros(clients, clusters, rows.columns, dtype=torch.float64, device=rows.device)
    active = active.clone()
    squared = torch.full((len(rows),), 1.0, dtype=torch.float64, device=rows.device)
    every = slice(0, len(rows))
    for j in range(clusters):
        uniform = torch.from_numpy(row_uniforms(seed, j + 1, keys, rows.positions)).to(rows.device)
        # argmax of log D² + Gumbel noise is a draw with probability proportional to D²
        score = rows.weigh(squared, every).log() - (-uniform.log()).log()
        best = torch.full((clients,), -torch.inf, dtype=torch.float64, device=rows.device)
        best.scatter_reduce_(0, rows.codes, score, "amax")
        is_best = (score == best[rows.codes]) & (score > -torch.inf)
        winners = torch.nonzero(is_best).flatten()
        chosen = torch.zeros(clients, dtype=torch.int64, device=rows.device)
        chosen[rows.codes[winners]] = winners
        active[:, j] &= best > -torch.inf
        centres[:, j] = rows.take(chosen)
        if j + 1 == clusters:
            break
        so_far = slice(0, j + 1)

        def measure(_: None, block: Block, so_far: slice = so_far) -> None:
            x, own, place = rows.read(block)
            found = nearest(x.double(), centres[own, so_far], active[own, so_far])
            squared[place] = found[1]

        accumulate(rows.blocks(j + 1), lambda: None, measure, rows.device)
    return centres, active


def _lloyd_step(rows: ClientRows, centres: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums ``(C, k, d)``, weights and counts ``(C, k)`` of the rows nearest to each centre."""
    clients, clusters, d = centres.shape

    def start() -> tuple[Tensor, Tensor, Tensor]:
        sums = torch.zeros(clients * clusters, d, dtype=torch.float64, device=rows.device)
        return sums, sums.new_zeros(clients * clusters), sums.new_zeros(clients * clusters)

    def add_block(total: tuple[Tensor, Tensor, Tensor], block: Block) -> None:
        x, codes, place = rows.read(block)
        x = x.double()
        labels, _ = nearest(x, centres[codes], active[codes])
        cell = codes * clusters + labels
        ones = torch.ones_like(cell, dtype=torch.float64)
        total[0].index_add_(0, cell, rows.weigh(x, place))
        total[2].index_add_(0, cell, ones)
        if rows.weights is not None:
            total[1].index_add_(0, cell, rows.weigh(ones, place))

    lanes = accumulate(rows.blocks(clusters), start, add_block, rows.device)
    sums, weights, counts = (torch.stack(parts).sum(0) for parts in zip(*lanes, strict=True))
    weights = counts if rows.weights is None else weights
    cells = (clients, clusters)
    return sums.reshape(*cells, d), weights.reshape(cells), counts.reshape(cells)


def nearest(x: Tensor, centres: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index and the squared distance of each row's nearest centre, ``(N,)`` each.

    Rows are ``(N, d)``, and each has candidates of its own, ``(N, k, d)``, of which ``active``,
    ``(N, k)``, are used.
    """
    distances = (x.unsqueeze(-2) - centres).square_().sum(-1)
    distances.masked_fill_(~active, torch.inf)
    smallest = distances.min(-1)
    return smallest.indices, smallest.values


# ---------------------------------------------------------------------- the server


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


# ---------------------------------------------------------------------- a start under masks

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


def grid_counts(rows: ClientRows, mean: Tensor, projection: Tensor) -> Tensor:
    """Return the number of a client's rows in every cell of a grid in some directions.

    ``mean`` is that of all rows of the federation, ``(d,)``, and ``projection``, ``(d, k)``, that
    of :func:`leading_directions`.
    """
    cells = grid_size(projection.shape[1])

    def start() -> Tensor:
        return torch.zeros(cells, dtype=torch.float64, device=rows.device)

    def add_block(total: Tensor, block: Block) -> None:
        x, _, place = rows.read(block)
        cell = grid_cells((x.double() - mean) @ projection)
        ones = torch.ones_like(cell, dtype=torch.float64)
        total.index_add_(0, cell, rows.weigh(ones, place))

    return torch.stack(list(accumulate(rows.blocks(1), start, add_block, rows.device))).sum(0)
