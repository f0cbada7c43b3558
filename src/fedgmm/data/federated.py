"""Rows of many clients, stacked: one matrix for all clients, and a code per row that names its client.

The matrix is kept in chunks, so that large arrays of the caller are not copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgmm.support.randomness import client_keys
from fedgmm.support.scratch import blocks_in, counts_of, taken
from fedgmm.support.streaming import Block, block_rows, blocks_of

# Matrices with fewer rows are copied into common chunks, because tiny blocks are slow.
_OWN_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class ClientRows:
    """The rows of ``C`` clients. Chunks are views of the caller's arrays where possible.

    Attributes:
        chunks: matrices ``(n_k, d)``; together ``N`` rows.
        codes: the client of each row, an index into ``names``, ``(N,)`` int64.
        names: the clients, in the order of ``codes``.
        weights: how many rows each row counts for, ``(N,)`` float64, positive; ``None`` means one.
    """

    chunks: tuple[Tensor, ...]
    codes: Tensor
    names: tuple[Hashable, ...]
    weights: Tensor | None = None

    @property
    def columns(self) -> int:
        """Number of columns, ``d``."""
        return int(self.chunks[0].shape[1])

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.chunks[0].device

    @cached_property
    def rows_per_client(self) -> Tensor:
        """Number of rows of each client, ``N_c``, ``(C,)`` int64."""
        if self.device.type != "cpu":
            return torch.bincount(self.codes, minlength=len(self.names))
        return torch.from_numpy(counts_of(self.codes.numpy(), len(self.names)))

    @cached_property
    def weight_per_client(self) -> Tensor:
        """Summed weights of each client's rows, which are ``N_c`` without weights, ``(C,)``."""
        if self.weights is None:
            return self.rows_per_client
        total = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        return total.index_add_(0, self.codes, self.weights)

    def weigh(self, values: Tensor, place: slice) -> Tensor:
        """Return ``values`` ``(n, ...)`` of the rows at ``place``, times the weights of the rows."""
        if self.weights is None:
            return values
        own = self.weights[place].to(values.dtype)
        return values * own.reshape(-1, *(1,) * (values.dim() - 1))

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """A number that depends only on the client's name, for random draws; ``(C,)``."""
        return client_keys(self.names)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """The position of each row within its client, ``(N,)``."""
        codes = self.codes.cpu().numpy()
        order = np.argsort(codes, kind="stable")
        places = np.empty(len(codes), dtype=np.int64)
        places[order] = np.arange(len(codes)) - self._starts[codes[order]]
        return places

    def positions_at(self, place: slice) -> NDArray[np.int64]:
        """Return the positions of consecutive rows, ``(n,)``.

        If the rows are sorted by client, this does not compute the positions of all rows.
        """
        if not self._grouped:
            return self.positions[place]
        own = self._starts[self.codes[place].cpu().numpy()]
        return np.asarray(np.arange(place.start, place.stop) - own)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The first row of each client if rows were sorted by client, ``(C,)``."""
        counts = self.rows_per_client.cpu().numpy()
        return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)

    @cached_property
    def _grouped(self) -> bool:
        """Whether the rows are sorted by client."""
        pairs = zip(blocks_in(self.codes[1:]), blocks_in(self.codes[:-1]), strict=True)
        return all(bool((later >= earlier).all()) for later, earlier in pairs)

    @cached_property
    def _first_rows(self) -> list[int]:
        lengths = [len(chunk) for chunk in self.chunks]
        return [0, *np.cumsum(lengths).tolist()]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.codes)

    def blocks(self, components: int) -> list[Block]:
        """Return blocks of rows small enough for ``components`` residuals per row."""
        item_bytes = self.chunks[0].element_size()
        rows = block_rows(components, self.columns, self.device, item_bytes)
        return blocks_of([len(chunk) for chunk in self.chunks], rows)

    def read(self, block: Block) -> tuple[Tensor, Tensor, slice]:
        """Return rows ``(n, d)`` and client codes ``(n,)`` of a block, and its place among all rows."""
        chunk, start, stop = block
        first = self._first_rows[chunk]
        place = slice(first + start, first + stop)
        return self.chunks[chunk][start:stop].contiguous(), self.codes[place], place

    def add_by_client(self, totals: Tensor, values: Tensor, place: slice) -> None:
        """Add ``values`` ``(n, K)`` of the rows at ``place`` to their clients' ``totals`` ``(C, K)``."""
        if self.device.type != "cpu" or not self._grouped:
            totals.index_add_(0, self.codes[place], values)
            return
        codes = self.codes[place].numpy()
        # sum runs of equal codes, which is faster than adding rows
        starts = np.concatenate([[0], np.flatnonzero(codes[1:] != codes[:-1]) + 1])
        sums = np.add.reduceat(values.mT.numpy(), starts, axis=1)
        totals.numpy()[codes[starts]] += sums.T

    def take(self, indices: Tensor) -> Tensor:
        """Return the rows with these indices, ``(k, d)`` float64."""
        out = torch.empty(len(indices), self.columns, dtype=torch.float64, device=self.device)
        edges = torch.tensor(self._first_rows[1:], device=indices.device)
        chunk_of = torch.searchsorted(edges, indices, right=True)
        for chunk in torch.unique(chunk_of).tolist():
            here = chunk_of == chunk
            out[here] = self.chunks[chunk][indices[here] - self._first_rows[chunk]].double()
        return out

    def select(self, clients: Tensor) -> ClientRows:
        """Return the rows of some clients, given as sorted codes; a copy unless no other has rows."""
        new_code = torch.full((len(self.names),), -1, dtype=torch.int64, device=self.device)
        new_code[clients] = torch.arange(len(clients), device=self.device)
        codes = new_code[self.codes]
        rows = self if bool((codes >= 0).all()) else self.keep(codes >= 0)
        names = tuple(self.names[code] for code in clients.tolist())
        return replace(rows, codes=codes[codes >= 0], names=names)

    def keep(self, wanted: Tensor) -> ClientRows:
        """Return a copy of the rows where ``wanted`` ``(N,)`` is true; the clients stay the same."""
        chunks = [
            taken(chunk, wanted[first : first + len(chunk)])
            for chunk, first in zip(self.chunks, self._first_rows, strict=False)
        ]
        weights = None if self.weights is None else self.weights[wanted]
        return ClientRows(tuple(chunks), taken(self.codes, wanted), self.names, weights)

    def with_weights(self, weights: Tensor) -> ClientRows:
        """Return the rows with weights ``(N,)``, without those of weight zero and their clients."""
        rows = replace(self, weights=weights).keep(weights > 0)
        return rows.select(torch.nonzero(rows.rows_per_client).flatten())

    def to(self, device: torch.device) -> ClientRows:
        """Return the same rows on another device."""
        if self.device == device:
            return self
        return ClientRows(
            tuple(chunk.to(device) for chunk in self.chunks),
            self.codes.to(device),
            self.names,
            None if self.weights is None else self.weights.to(device),
        )


def client_rows(
    matrices: Sequence[NDArray[np.floating]], codes: NDArray[np.int64], names: Iterable[Hashable]
) -> ClientRows:
    """Stack matrices ``(n_k, d)`` that were checked; ``codes`` ``(N,)`` is the client of each row."""
    chunks = []
    for matrix in _merge_small(matrices):
        # a field of a record array may have strides that torch does not support
        odd = any(stride < 0 or stride % matrix.itemsize for stride in matrix.strides)
        with warnings.catch_warnings():  # chunks share the caller's memory and are never written to
            warnings.filterwarnings("ignore", message=".*not writable.*")
            chunks.append(torch.from_numpy(matrix.copy() if odd else matrix))
    own = torch.from_numpy(np.ascontiguousarray(codes, dtype=np.int64))
    return ClientRows(tuple(chunks), own, tuple(names))


def _merge_small(matrices: Sequence[NDArray[np.floating]]) -> list[NDArray[np.floating]]:
    """Join consecutive small matrices; large ones are not copied."""
    merged: list[NDArray[np.floating]] = []
    waiting: list[NDArray[np.floating]] = []
    rows_waiting = 0
    for matrix in matrices:
        large = len(matrix) >= _OWN_CHUNK_ROWS
        if waiting and (large or rows_waiting >= 16 * _OWN_CHUNK_ROWS):
            merged.append(np.concatenate(waiting))
            waiting, rows_waiting = [], 0
        if large:
            merged.append(matrix)
        else:
            waiting.append(matrix)
            rows_waiting += len(matrix)
    if waiting:
        merged.append(waiting[0] if len(waiting) == 1 else np.concatenate(waiting))
    return merged
