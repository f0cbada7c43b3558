"""The clients' part of a start: every client clusters its own rows into a few centroids."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.core.initialise import (
    FEWEST_ROWS_SENT,
    Centroids,
    grid_cells,
    grid_size,
    local_clusters,
    nearest,
)
from fedgmm.core.randomness import row_uniforms
from fedgmm.core.scratch import empty, row_blocks
from fedgmm.core.streaming import Block, accumulate
from fedgmm.data.federated import ClientRows

# The start uses about this many local centroids and rows at most, drawn at random. They suffice for any
# M, and its time and memory do not grow with the federation.
_MOST_CENTROIDS = 20_000
_MOST_START_ROWS = 200_000
FEWEST_ROWS_A_CLUSTER = 10
"""A client draws at least this many rows per centroid."""
_LLOYD_ITERATIONS = 10
_CLIENT_STREAM, _ROW_STREAM = 0, 1_000_000
_ROWS_AT_ONCE = 65_536


def local_centroids(
    rows: ClientRows, clusters: int, seed: int, most_rows: int | None = None
) -> Centroids:
    """Return at most ``clusters`` centroids of every client's own rows; all clients are clustered at once.

    Draws depend on a client's name and row, so the order of clients does not matter. ``most_rows``
    is the largest number of rows that a client uses, see :func:`start_sample`, if ``rows`` hold
    only some clients of the federation; ``None`` if they hold all.
    """
    rows = _sample(rows, clusters, seed, most_rows)
    wanted = local_clusters(rows.rows_per_client, clusters)
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


def grid_counts(rows: ClientRows, mean: Tensor, projection: Tensor) -> Tensor:
    """Return the number of rows in every cell of a grid in some directions, for a start under masks.

    ``mean`` is that of all rows of the federation, ``(d,)``, and ``projection``, ``(d, k)``, that
    of :func:`fedgmm.core.initialise.leading_directions`.
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
