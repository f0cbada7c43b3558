"""Named clients with labelled rows, split into training, validation and test."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.core.randomness import client_keys, row_uniforms
from fedgmm.data.federated import ClientRows, client_rows
from fedgmm.data.inputs import NO_CLIENT, checked_rows, encode_clients

SPLITS = ("train", "validation", "test")
PAPER_SPLIT = (0.6, 0.2, 0.2)
_SPLIT_STREAM, _SHUFFLE_STREAM = 101, 211


@dataclass(frozen=True)
class LabelledRows:
    """Labelled rows of many clients; a client's rows stand together, in the order of ``names``.

    Attributes:
        features: what the Gaussians see.
        inputs: what the learners see, ``(N, *shape)``.
        labels: class indices, ``(N,)`` int64.
    """

    features: ClientRows
    inputs: Tensor
    labels: Tensor

    @property
    def names(self) -> tuple[Hashable, ...]:
        """The clients."""
        return self.features.names

    @property
    def codes(self) -> Tensor:
        """The client of each row, ``(N,)``."""
        return self.features.codes

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.inputs.device

    @cached_property
    def offsets(self) -> Tensor:
        """First row of each client and, last, the number of rows, ``(C + 1,)``."""
        counts = self.features.rows_per_client
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    @cached_property
    def _client_words(self) -> NDArray[np.int64]:
        return self.codes.cpu().numpy() << 32

    def __len__(self) -> int:
        """How many rows there are in all."""
        return len(self.labels)

    def shuffled(self, seed: int, round_number: int, epoch: int) -> Tensor:
        """The row numbers with every client's rows in random order, ``(N,)``.

        The order depends on the seed, the round, the epoch and the client's name only.
        """
        stream = _SHUFFLE_STREAM + 1_000_003 * round_number + epoch
        keys = self.features.keys[self.codes.cpu().numpy()]
        draws = (row_uniforms(seed, stream, keys, self.features.positions) * 2**32).astype(np.int64)
        return torch.from_numpy(np.argsort(self._client_words | draws)).to(self.device)

    def select(self, clients: Tensor) -> LabelledRows:
        """Only some clients, given as sorted codes."""
        if len(clients) == len(self.names):
            return self
        wanted = torch.zeros(len(self.names), dtype=torch.bool, device=self.device)
        wanted[clients] = True
        here = wanted[self.codes]
        return LabelledRows(self.features.select(clients), self.inputs[here], self.labels[here])

    def client(self, code: int) -> LabelledRows:
        """The rows of one client."""
        return self.select(torch.tensor([code], device=self.device))

    def to(self, device: torch.device) -> LabelledRows:
        """The same rows on another device."""
        if self.device == device:
            return self
        return LabelledRows(
            self.features.to(device), self.inputs.to(device), self.labels.to(device)
        )


@dataclass(frozen=True)
class FederatedDataset:
    """Clients with training, validation and test rows.

    Make one with :meth:`from_arrays` or :meth:`from_clients`.

    Attributes:
        train, validation, test: the splits; every client is in ``names``, whether or not it has rows
            in a split.
        names: the clients.
        classes: the labels as they were given, sorted, ``(K,)``.
        column_names: names of the inputs' columns, where they have any.
    """

    train: LabelledRows
    validation: LabelledRows
    test: LabelledRows
    names: tuple[Hashable, ...]
    classes: NDArray[Any]
    column_names: tuple[str, ...] | None = None

    @classmethod
    def from_arrays(
        cls,
        X: ArrayLike,
        y: ArrayLike,
        clients: ArrayLike | None = None,
        *,
        features: ArrayLike | None = None,
        split: Sequence[float] = PAPER_SPLIT,
        seed: int = 0,
    ) -> FederatedDataset:
        """A data set from rows with one client id each.

        Args:
            X: inputs, ``(N, d)`` or ``(N, channels, height, width)``.
            y: labels of any kind, ``(N,)``.
            clients: one id per row; ``None`` means one client.
            features: what the Gaussians see, ``(N, d')``; ``None`` means the inputs, flattened.
            split: shares of training, validation and test rows within every client.
            seed: of the split.
        """
        column_names = tuple(map(str, X.columns)) if hasattr(X, "columns") else None
        inputs = np.asarray(X)
        labels = np.asarray(y)
        if labels.ndim != 1 or len(labels) != len(inputs):
            raise ValueError(
                f"y must hold one label per row: X has {len(inputs)} rows, y has shape {labels.shape}."
            )
        names: list[Hashable] = [0]
        if clients is None:
            codes = np.zeros(len(inputs), dtype=np.int64)
        else:
            codes, names = encode_clients(clients, len(inputs))
        return cls._build(inputs, labels, codes, names, features, split, seed, column_names)

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[Any, tuple[ArrayLike, ArrayLike]]
        | Iterable[tuple[Any, tuple[ArrayLike, ArrayLike]]],
        *,
        split: Sequence[float] = PAPER_SPLIT,
        seed: int = 0,
    ) -> FederatedDataset:
        """A data set from ``{client: (X, y)}`` or an iterable of such pairs."""
        pairs = list(clients.items() if isinstance(clients, Mapping) else clients)
        if not pairs:
            raise ValueError("There is no client; give at least one (client, (X, y)) pair.")
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError("A client appears more than once; join its rows first.")
        inputs = [np.asarray(X) for _, (X, _) in pairs]
        labels = [np.asarray(y) for _, (_, y) in pairs]
        for name, own, own_labels in zip(names, inputs, labels, strict=True):
            if not len(own):
                raise ValueError(f"Client {name!r} is empty; leave it out.")
            if own.shape[1:] != inputs[0].shape[1:]:
                raise ValueError(
                    f"Client {name!r} has rows of shape {own.shape[1:]}, but client {names[0]!r} has "
                    f"{inputs[0].shape[1:]}; all clients need the same columns."
                )
            if own_labels.shape != (len(own),):
                raise ValueError(
                    f"Client {name!r} has {len(own)} rows but labels of shape {own_labels.shape}."
                )
        codes = np.repeat(np.arange(len(names)), [len(own) for own in inputs])
        first = pairs[0][1][0]
        column_names = tuple(map(str, first.columns)) if hasattr(first, "columns") else None
        return cls._build(
            np.concatenate(inputs),
            np.concatenate(labels),
            codes,
            names,
            None,
            split,
            seed,
            column_names,
        )

    @classmethod
    def _build(
        cls,
        inputs: NDArray[Any],
        labels: NDArray[Any],
        codes: NDArray[np.int64],
        names: Sequence[Hashable],
        features: ArrayLike | None,
        split: Sequence[float],
        seed: int,
        column_names: tuple[str, ...] | None,
    ) -> FederatedDataset:
        if inputs.ndim < 2:
            raise ValueError(f"X must have rows and columns, got an array of shape {inputs.shape}.")
        if not len(inputs):
            raise ValueError("X has no rows.")
        if inputs.dtype not in (np.float32, np.float64, np.uint8):
            try:
                inputs = inputs.astype(np.float64)
            except (TypeError, ValueError) as error:
                raise ValueError(f"X holds data that are not numeric: {error}.") from None
        if (codes == NO_CLIENT).any():
            row = int(np.argmax(codes == NO_CLIENT))
            raise ValueError(f"Row {row} has no client (its id is missing).")
        classes, encoded = _encode_labels(labels, codes, names)
        seen = inputs.reshape(len(inputs), -1) if features is None else np.asarray(features)
        if len(seen) != len(inputs) or seen.ndim != 2:
            raise ValueError(f"features must be ({len(inputs)}, d'), got shape {seen.shape}.")
        if seen.dtype not in (np.float32, np.float64):
            seen = seen.astype(np.float32)
        checked_rows([seen], codes, names, column_names)
        train, validation, test = (
            _labelled(inputs, seen, encoded, codes, names, rows, shared=features is None)
            for rows in split_rows(codes, client_keys(names), split, seed)
        )
        return cls(train, validation, test, tuple(names), classes, column_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.inputs.shape[1:])

    def split(self, name: str) -> LabelledRows:
        """A split by its name."""
        if name not in SPLITS:
            raise ValueError(f"split must be one of {list(SPLITS)}, got {name!r}.")
        rows: LabelledRows = getattr(self, name)
        return rows

    def select(self, clients: Sequence[Hashable]) -> FederatedDataset:
        """The same data set with only some clients, in the order they have here."""
        missing = [name for name in clients if name not in set(self.names)]
        if missing:
            raise ValueError(f"Unknown client {missing[0]!r}.")
        keep = set(clients)
        codes = torch.tensor([code for code, name in enumerate(self.names) if name in keep])
        return replace(
            self,
            train=self.train.select(codes),
            validation=self.validation.select(codes),
            test=self.test.select(codes),
            names=tuple(self.names[code] for code in codes.tolist()),
        )

    def __repr__(self) -> str:
        """One screen: how many clients, rows, columns and classes."""
        rows = torch.stack(
            [s.features.rows_per_client for s in (self.train, self.validation, self.test)]
        )
        per_client = rows.sum(0)
        shape = "×".join(map(str, self.input_shape))
        shown = ", ".join(repr(name) for name in self.names[:4]) + (
            ", …" if len(self.names) > 4 else ""
        )
        return (
            f"FederatedDataset: {len(self.names)} clients ({shown})\n"
            f"  rows     {int(rows.sum())} (train {int(rows[0].sum())}, validation {int(rows[1].sum())}, "
            f"test {int(rows[2].sum())}); {int(per_client.min())} to {int(per_client.max())} a client\n"
            f"  inputs   {shape} {str(self.train.inputs.dtype).removeprefix('torch.')}\n"
            f"  classes  {len(self.classes)}: {', '.join(map(str, self.classes[:10].tolist()))}"
            f"{', …' if len(self.classes) > 10 else ''}"
        )


def _encode_labels(
    labels: NDArray[Any], codes: NDArray[np.int64], names: Sequence[Hashable]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Sorted classes and the index of every label."""
    if labels.dtype.kind == "f":
        bad = ~np.isfinite(labels)
    elif labels.dtype.kind == "O":
        bad = np.array([label is None or label != label for label in labels])
    else:
        bad = np.zeros(len(labels), dtype=bool)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f"y contains NaN or a missing label: client {names[codes[row]]!r}, row {row}."
        )
    classes, encoded = np.unique(labels, return_inverse=True)
    return classes, encoded.astype(np.int64)


def split_rows(
    codes: NDArray[np.int64], keys: NDArray[np.uint64], split: Sequence[float], seed: int
) -> list[NDArray[np.int64]]:
    """Row numbers of the training, validation and test rows, a client's rows together.

    Every client keeps at least one training row; a client with a single row only trains. The draw
    belongs to the client's name and the row, so other clients do not change it.
    """
    if len(split) != 3 or min(split) < 0 or abs(sum(split) - 1) > 1e-9:
        raise ValueError(f"split must be three shares that sum to 1, got {tuple(split)}.")
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes, minlength=len(keys))
    starts = np.concatenate([[0], np.cumsum(counts)])[codes[order]]
    positions = np.arange(len(codes)) - starts
    draws = row_uniforms(seed, _SPLIT_STREAM, keys[codes[order]], positions)
    mixed = order[np.lexsort((draws, codes[order]))]
    sizes = counts[codes[mixed]]
    training = np.maximum(1, np.round(split[0] * sizes)).astype(np.int64)
    validation = np.minimum(np.round((split[0] + split[1]) * sizes).astype(np.int64), sizes)
    part = np.where(positions < training, 0, np.where(positions < validation, 1, 2))
    # within a split, rows keep the order in which they came
    return [
        np.sort(mixed[part == k])[_by_client(codes, np.sort(mixed[part == k]))] for k in range(3)
    ]


def _by_client(codes: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.argsort(codes[rows], kind="stable")


def _labelled(
    inputs: NDArray[Any],
    features: NDArray[np.floating],
    labels: NDArray[np.int64],
    codes: NDArray[np.int64],
    names: Sequence[Hashable],
    rows: NDArray[np.int64],
    shared: bool,
) -> LabelledRows:
    own = inputs[rows]
    seen = own.reshape(len(own), features.shape[1]) if shared else features[rows]
    if seen.dtype not in (np.float32, np.float64):
        seen = seen.astype(np.float32)
    return LabelledRows(
        client_rows([seen], codes[rows], names),
        torch.from_numpy(own),
        torch.from_numpy(labels[rows]),
    )
