"""Labelled rows of named clients, stacked, in training, validation and test splits."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedgmm.core.moments import Scaling, scaled, scaling_of
from fedgmm.data.federated import ClientRows, client_rows
from fedgmm.data.inputs import (
    NO_CLIENT,
    check_once,
    checked_rows,
    column_names,
    encode_clients,
    encode_labels,
    is_missing,
    numeric,
    order_columns,
    row_weights,
)
from fedgmm.support.checks import check_choice
from fedgmm.support.randomness import client_keys, row_uniforms
from fedgmm.support.scratch import (
    blocks_in,
    counts_of,
    empty,
    empty_beside,
    folder_of,
    gathered,
    ordered,
    row_blocks,
    scratch,
    stable_order,
    taken,
    touched,
    where,
)
from fedgmm.wording import counted, first_few

SPLITS = ("train", "validation", "test")
PAPER_SPLIT = (0.6, 0.2, 0.2)
_SPLIT_STREAM, _SHUFFLE_STREAM = 101, 211
_ROWS_AT_ONCE = 250_000  # that are shuffled together, or those of one client

Task = Literal["auto", "classification", "regression"]
TASKS: tuple[str, ...] = get_args(Task)


@dataclass(frozen=True)
class LabelledRows:
    """Labelled rows of many clients, sorted by client in the order of ``names``.

    Attributes:
        features: rows for the Gaussians.
        inputs: rows for the learners, ``(N, *shape)``.
        labels: class indices, ``(N,)`` int64, or numbers to predict, ``(N,)`` float64.
        features_are_inputs: whether the features are the inputs, flattened.
    """

    features: ClientRows
    inputs: Tensor
    labels: Tensor
    features_are_inputs: bool = True

    @property
    def names(self) -> tuple[Hashable, ...]:
        """Names of the clients."""
        return self.features.names

    @property
    def codes(self) -> Tensor:
        """The client of each row, ``(N,)``."""
        return self.features.codes

    @property
    def owners(self) -> NDArray[Any]:
        """Name of the client of each row, ``(N,)``."""
        # of names that are tuples np.array would make a matrix
        names = np.fromiter(self.names, dtype=object, count=len(self.names))
        return np.asarray(names[self.codes.cpu().numpy()])

    @property
    def weights(self) -> Tensor | None:
        """Weight of each row, the number of rows that it counts for, ``(N,)``; ``None`` means one."""
        return self.features.weights

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.inputs.device

    @cached_property
    def offsets(self) -> Tensor:
        """First row of each client, and the number of rows as the last entry, ``(C + 1,)``."""
        counts = self.features.rows_per_client
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.labels)

    def shuffled(self, seed: int, round_number: int, epoch: int) -> Tensor:
        """Return row indices ``(N,)`` with each client's rows in random order.

        The order depends only on the seed, the round, the epoch and the client's name.
        """
        stream = _SHUFFLE_STREAM + 1_000_003 * round_number + epoch
        # a word holds client, draw and position: no two are equal, even if draws are
        first = max(int(self.features.rows_per_client.max()) - 1, 0).bit_length()
        # the same number in every federation, so that other clients do not change the order
        largest = int(self.codes.max()) if len(self) else 0
        free = min(40, 63 - first - largest.bit_length())

        def words(place: slice) -> NDArray[np.int64]:
            codes, positions = self.codes[place].cpu().numpy(), self.features.positions_at(place)
            draws = row_uniforms(seed, stream, self.features.keys[codes], positions)
            found = codes << (first + free) | positions
            found |= (draws * 2.0**free).astype(np.int64) << first
            return np.asarray(found)

        out, folder = empty_beside(self.labels, (len(self),), torch.int64), folder_of(self.labels)
        for begin, end in _client_groups(self.features.rows_per_client.cpu().numpy()):
            place = slice(int(self.offsets[begin]), int(self.offsets[end]))
            rows = place.stop - place.start
            if end - begin == 1 and rows > _ROWS_AT_ONCE and folder is not None:
                with scratch(folder):
                    ranked = empty(rows, np.int64)
                    for at in row_blocks(rows):
                        ranked[at] = words(slice(place.start + at.start, place.start + at.stop))
                    ranked = ordered(ranked)
                for at in row_blocks(rows):
                    positions = ranked[at] & ((1 << first) - 1)
                    out[place][at] = torch.from_numpy(positions) + place.start
            else:  # three times as fast as NumPy
                order = torch.from_numpy(words(place)).to(self.device).argsort()
                out[place] = order + place.start
        return out

    def select(self, clients: Tensor) -> LabelledRows:
        """Return the rows of some clients, given as sorted codes."""
        if len(clients) == len(self.names):
            return self
        wanted = torch.zeros(len(self.names), dtype=torch.bool, device=self.device)
        wanted[clients] = True
        here = wanted[self.codes]
        inputs, labels = taken(self.inputs, here), taken(self.labels, here)
        if self.features_are_inputs:  # taking features of bytes would copy floats
            names = tuple(self.names[code] for code in clients.tolist())
            codes = (wanted.cumsum(0) - 1)[self.codes[here]]
            weights = None if self.weights is None else self.weights[here]
            features = _features_of(inputs, codes, names, weights)
        else:
            features = self.features.select(clients)
        return replace(self, features=features, inputs=inputs, labels=labels)

    def keep(self, wanted: Tensor) -> LabelledRows:
        """Return a copy of the rows where ``wanted`` ``(N,)`` is true; the clients stay the same."""
        inputs, labels = taken(self.inputs, wanted), taken(self.labels, wanted)
        # the features of bytes may be floats
        if self.features_are_inputs and self.features.chunks[0].dtype == inputs.dtype:
            weights = None if self.weights is None else self.weights[wanted]
            features = _features_of(inputs, taken(self.codes, wanted), self.names, weights)
        else:
            features = self.features.keep(wanted)
        return replace(self, features=features, inputs=inputs, labels=labels)

    def join(self, other: LabelledRows) -> LabelledRows:
        """Return these rows and other rows of the same clients; features must be the inputs."""
        rows = len(self) + len(other)
        # both are sorted by client, so a row moves by the rows of the other before it
        later = [other.offsets[:-1], self.offsets[1:]]
        values: list[list[Tensor]] = [[one.inputs, one.labels, one.codes] for one in (self, other)]
        if self.weights is not None or other.weights is not None:
            for own, one in zip(values, (self, other), strict=True):
                ones = torch.ones(len(one), dtype=torch.float64, device=self.device)
                own.append(ones if one.weights is None else one.weights)
        joined = [
            empty_beside(self.inputs, (rows, *value.shape[1:]), value.dtype) for value in values[0]
        ]
        for own, moved in zip(values, later, strict=True):
            first = 0
            for codes in blocks_in(own[2]):
                place = slice(first, first + len(codes))
                to = torch.arange(place.start, place.stop, device=self.device) + moved[codes]
                for into, value in zip(joined, own, strict=True):
                    into[to] = value[place]
                    touched(2 * value[place].nbytes)
                first = place.stop
        inputs, labels, codes = joined[:3]
        weights = joined[3] if joined[3:] else None
        features = _features_of(inputs, codes, self.names, weights)
        return replace(self, features=features, inputs=inputs, labels=labels)

    def client(self, code: int) -> LabelledRows:
        """Return the rows of one client."""
        return self.select(torch.tensor([code], device=self.device))

    def to(self, device: torch.device) -> LabelledRows:
        """Return the same rows on another device."""
        if self.device == device:
            return self
        return self.with_inputs(self.inputs.to(device))

    def with_inputs(self, inputs: Tensor) -> LabelledRows:
        """Return the same rows with other inputs ``(N, *shape)``, on the device of the inputs."""
        device = inputs.device
        if self.features_are_inputs:
            weights = None if self.weights is None else self.weights.to(device)
            features = _features_of(inputs, self.codes.to(device), self.names, weights)
        else:
            features = self.features.to(device)
        return replace(self, features=features, inputs=inputs, labels=self.labels.to(device))


def _features_of(
    inputs: Tensor, codes: Tensor, names: tuple[Hashable, ...], weights: Tensor | None
) -> ClientRows:
    """Return the inputs flattened, over the same memory; bytes stay bytes."""
    return ClientRows((inputs.flatten(1),), codes, names, weights)


@dataclass(frozen=True)
class FederatedDataset:
    """Clients with training, validation and test rows.

    Make one with :meth:`from_arrays` or :meth:`from_clients`.

    Attributes:
        train, validation, test: the splits; a client may have no rows in a split.
        names: the clients, in the order of the codes of all splits.
        classes: the distinct labels as they were given, sorted, ``(K,)``; empty for regression.
        column_names: names of the inputs' columns, or ``None``.
        target: mean and deviation of the numbers to predict; ``None`` for classification.
        persons: the person of each training row as a number, ``(N,)``, if persons are known.
        vectors: the columns of the inputs, in rising order, that are entries of vectors of an encoder.
            ``pca`` reduces these columns only; without any it reduces all.
    """

    train: LabelledRows
    validation: LabelledRows
    test: LabelledRows
    names: tuple[Hashable, ...]
    classes: NDArray[Any]
    column_names: tuple[str, ...] | None = None
    target: Scaling | None = None
    persons: Tensor | None = None
    vectors: tuple[int, ...] = ()

    @classmethod
    def from_arrays(
        cls,
        X: ArrayLike,
        y: ArrayLike,
        clients: ArrayLike | None = None,
        *,
        features: ArrayLike | None = None,
        task: Task = "auto",
        split: Sequence[float] = PAPER_SPLIT,
        seed: int = 0,
        sample_weight: ArrayLike | None = None,
        persons: ArrayLike | None = None,
    ) -> FederatedDataset:
        """Return a data set from rows with one client id each.

        Args:
            X: inputs, ``(N, d)`` or ``(N, channels, height, width)``. The splits of an array that is mapped
                from a file (``np.load(path, mmap_mode="r")``) are scratch files in ``TMPDIR``.
            y: labels of any kind, or numbers to predict, ``(N,)``.
            clients: one id per row; ``None`` means one client.
            features: rows for the Gaussians, ``(N, d')``; ``None`` means the inputs, flattened.
            task: ``"classification"`` makes every distinct label a class, ``"regression"`` predicts
                numbers. ``"auto"`` means classification, and raises if ``y`` looks continuous.
            split: shares of training, validation and test rows within each client.
            seed: seed of the split.
            sample_weight: how many rows each row counts for in training, ``(N,)``; ``None`` means one.
                Rows of weight zero are left out.
            persons: id of the person of each row, ``(N,)``, for privacy of persons with several rows.
        """
        inputs = numeric(X, "X")
        if not inputs.size:
            raise ValueError(f"X has no rows or no columns: its shape is {inputs.shape}.")
        labels = np.asarray(y)
        if labels.ndim != 1 or len(labels) != len(inputs):
            raise ValueError(
                f"y must hold one label per row: X has {counted(len(inputs), 'row')}, y has "
                f"shape {labels.shape}."
            )
        names: list[Hashable] = [0]
        if clients is None:
            codes = np.zeros(len(inputs), dtype=np.int64)
        else:
            codes, names = encode_clients(clients, len(inputs))
        people = None if persons is None else encode_clients(persons, len(inputs))[0]
        if people is not None and (people == NO_CLIENT).any():
            raise ValueError("The person of a row is missing; name a person for every row.")
        weights = None
        if sample_weight is not None:
            weights = row_weights(sample_weight, len(inputs))
            wanted = weights > 0
            people = None if people is None else people[wanted]
            with _beside(inputs):
                inputs = gathered(inputs, np.flatnonzero(wanted))
            labels, weights = labels[wanted], weights[wanted]
            features = None if features is None else np.asarray(features)[wanted]
            codes = codes[wanted]
            if (codes != NO_CLIENT).all():
                present, codes = np.unique(codes, return_inverse=True)
                names = [names[code] for code in present]
        rows = inputs, labels, codes, names, features
        return cls._build(*rows, task, split, seed, column_names(X), weights, people)

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[Any, tuple[ArrayLike, ArrayLike]]
        | Iterable[tuple[Any, tuple[ArrayLike, ArrayLike]]],
        *,
        task: Task = "auto",
        split: Sequence[float] = PAPER_SPLIT,
        seed: int = 0,
    ) -> FederatedDataset:
        """Return a data set from ``{client: (X, y)}`` or an iterable of such pairs.

        Tables with column names may have their columns in different orders; the first order is used.
        The other arguments are those of :meth:`from_arrays`.
        """
        pairs = list(clients.items() if isinstance(clients, Mapping) else clients)
        if not pairs:
            raise ValueError("No clients were given; pass at least one (client, (X, y)) pair.")
        expected = "from_clients needs {client: (X, y)} or pairs (client, (X, y))"
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"{expected}; got an entry of type {type(pair).__name__}.")
            name, rows = pair
            if not isinstance(name, Hashable):
                raise TypeError(
                    f"{expected}; got a {type(name).__name__} in place of a client's name."
                )
            if not isinstance(rows, (tuple, list)) or len(rows) != 2:
                what = f"one {type(rows).__name__}, without labels"
                if isinstance(rows, (tuple, list)):
                    what = f"one {type(rows).__name__} of length {len(rows)}"
                elif isinstance(rows, Mapping):
                    what = f"a dictionary with the keys {', '.join(map(repr, rows))}"
                raise TypeError(f"{expected}; client {name!r} has {what}.")
        names = [name for name, _ in pairs]
        if any(is_missing(name) for name in names):
            raise ValueError("The name of a client is None or NaN; give every client a name.")
        check_once(names)
        columns = next(filter(None, (column_names(X) for _, (X, _) in pairs)), None)
        for name, (X, _) in pairs:
            if not np.size(X):
                raise ValueError(f"Client {name!r} is empty; omit it.")
        inputs = [
            numeric(order_columns(X, columns, f"Client {name!r}"), f"Client {name!r}")
            for name, (X, _) in pairs
        ]
        labels = [np.asarray(y) for _, (_, y) in pairs]
        for name, own, own_labels in zip(names, inputs, labels, strict=True):
            if own.shape[1:] != inputs[0].shape[1:]:
                raise ValueError(
                    f"Client {name!r} has rows of shape {own.shape[1:]}, but client {names[0]!r} has "
                    f"{inputs[0].shape[1:]}; all clients need the same columns."
                )
            if own_labels.shape != (len(own),):
                raise ValueError(
                    f"Client {name!r} has {counted(len(own), 'row')} but labels of shape "
                    f"{own_labels.shape}."
                )
        codes = np.repeat(np.arange(len(names)), [len(own) for own in inputs])
        rows = np.concatenate(inputs), np.concatenate(labels), codes, names
        return cls._build(*rows, None, task, split, seed, columns)

    @classmethod
    def _build(
        cls,
        inputs: NDArray[Any],
        labels: NDArray[Any],
        codes: NDArray[np.int64],
        names: Sequence[Hashable],
        features: ArrayLike | None,
        task: Task,
        split: Sequence[float],
        seed: int,
        columns: tuple[str, ...] | None,
        weights: NDArray[np.float64] | None = None,
        people: NDArray[np.int64] | None = None,
    ) -> FederatedDataset:
        check_choice("task", task, TASKS)
        flat = inputs.reshape(len(inputs), -1)
        checked_rows([_as_float(flat)], codes, names, columns)
        classes, encoded = encode_labels(labels, codes, names, task)
        seen = flat if features is None else numeric(features, "features")
        if len(seen) != len(inputs) or seen.ndim != 2:
            raise ValueError(f"features must be ({len(inputs)}, d'), got shape {seen.shape}.")
        if features is not None:
            checked_rows([_as_float(seen)], codes, names)
        splits = []
        with _beside(inputs):
            parts = split_rows(codes, client_keys(names), split, seed)
            for rows in parts:
                own = gathered(inputs, rows)
                shared = own.reshape(len(own), flat.shape[1])
                matrix = _as_float(shared if features is None else gathered(seen, rows))
                found = client_rows([matrix], codes[rows], names)
                if weights is not None:
                    found = replace(found, weights=torch.from_numpy(weights[rows]))
                labelled = torch.from_numpy(own), torch.from_numpy(encoded[rows])
                splits.append(LabelledRows(found, *labelled, features is None))
        train, validation, test = splits
        target = scaling_of_numbers(train) if task == "regression" else None
        persons = None if people is None else torch.from_numpy(people[parts[0]])
        return cls(train, validation, test, tuple(names), classes, columns, target, persons)

    @property
    def task(self) -> Literal["classification", "regression"]:
        """``"regression"`` if numbers are to be predicted, else ``"classification"``."""
        return "classification" if self.target is None else "regression"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.inputs.shape[1:])

    def split(self, name: str) -> LabelledRows:
        """Return a split by its name."""
        if not isinstance(name, str):
            raise TypeError(
                f"split must be one of {list(SPLITS)}, got {type(name).__name__}; pass a data set "
                "as the second argument, dataset=."
            )
        check_choice("split", name, SPLITS)
        rows: LabelledRows = getattr(self, name)
        return rows

    def training_rows(self, device: torch.device, dtype: torch.dtype) -> LabelledRows:
        """Return the training rows on a device; numbers to predict are standardised."""
        rows = self.train.to(device)
        if self.target is None:
            return rows
        return replace(rows, labels=scaled(rows.labels, self.target, dtype))

    def labels_of(self, rows: LabelledRows) -> NDArray[Any]:
        """Return the labels of a split as they were given, ``(n,)``."""
        labels = rows.labels.cpu().numpy()
        return self.classes[labels] if self.target is None else labels

    def select(self, clients: Sequence[Hashable]) -> FederatedDataset:
        """Return the data set with only some clients, in their order here."""
        keep = set(clients)
        if not keep:
            raise ValueError("select needs at least one client.")
        for name in keep - set(self.names):
            raise ValueError(f"Unknown client {name!r}.")
        codes = torch.tensor([code for code, name in enumerate(self.names) if name in keep])
        persons = self.persons
        if persons is not None:
            persons = persons[torch.isin(self.train.codes.cpu(), codes)]
        return replace(
            self,
            persons=persons,
            train=self.train.select(codes),
            validation=self.validation.select(codes),
            test=self.test.select(codes),
            names=tuple(self.names[code] for code in codes.tolist()),
        )

    def __repr__(self) -> str:
        """Return a few lines with the numbers of clients, rows, columns and classes."""
        rows = torch.stack(
            [s.features.rows_per_client for s in (self.train, self.validation, self.test)]
        )
        per_client = rows.sum(0)
        shape = "×".join(map(str, self.input_shape))
        if self.target is not None:
            mean, scale = float(self.target.mean), float(self.target.scale)
            labels = f"numbers  to predict: mean {mean:.4g}, standard deviation {scale:.4g}"
        else:
            listing = first_few(map(str, self.classes.tolist()), 10)
            labels = f"classes  {len(self.classes)}: {listing}"
        shown = first_few(map(repr, self.names), 4)
        return (
            f"FederatedDataset: {counted(len(self.names), 'client')} ({shown})\n"
            f"  rows     {int(rows.sum())} (train {int(rows[0].sum())}, validation {int(rows[1].sum())}, "
            f"test {int(rows[2].sum())}); {int(per_client.min())} to {int(per_client.max())} per client\n"
            f"  inputs   {shape} {str(self.train.inputs.dtype).removeprefix('torch.')}\n"
            f"  {labels}"
        )


def labelled_without_labels(rows: ClientRows, columns: tuple[str, ...] | None) -> FederatedDataset:
    """Return a data set of rows without labels, all for training; they are sorted by client."""
    order = torch.argsort(rows.codes, stable=True)
    inputs, codes = torch.cat(list(rows.chunks))[order], rows.codes[order]
    zeros = torch.zeros(len(codes), dtype=torch.int64, device=rows.device)
    every = LabelledRows(_features_of(inputs, codes, rows.names, None), inputs, zeros)
    none = every.keep(torch.zeros(len(codes), dtype=torch.bool))
    return FederatedDataset(every, none, none, rows.names, np.zeros(1, dtype=np.int64), columns)


def _as_float(rows: NDArray[Any]) -> NDArray[np.floating]:
    return rows.astype(np.float32) if rows.dtype == np.uint8 else rows


def scaling_of_numbers(rows: LabelledRows) -> Scaling:
    """Return the mean and deviation of the numbers to predict, for standardising them."""
    weights = torch.ones_like(rows.labels) if rows.weights is None else rows.weights.double()
    share = weights / weights.sum()
    mean = (share * rows.labels).sum()
    return scaling_of(mean, (share * (rows.labels - mean).square()).sum())


def split_rows(
    codes: NDArray[np.int64], keys: NDArray[np.uint64], split: Sequence[float], seed: int
) -> list[NDArray[np.int64]]:
    """Return the indices of the training, validation and test rows, each sorted by client.

    Every client has at least one training row, so a client with one row has no other rows. The draw of
    a row depends on the client's name and the row's position, so other clients do not change it.

    Args:
        codes: the client of each row, ``(N,)``.
        keys: of :func:`~fedgmm.support.randomness.client_keys`, ``(C,)``.
        split: shares of training, validation and test rows.
        seed: seed of the draws.
    """
    if not isinstance(split, Sequence | np.ndarray) or isinstance(split, str):
        raise TypeError(
            f"split must be three shares that sum to 1, got {split!r}; (1, 0, 0) uses all rows for "
            "training."
        )
    if len(split) != 3 or min(split) < 0 or abs(sum(split) - 1) > 1e-9:
        raise ValueError(f"split must be three shares that sum to 1, got {tuple(split)}.")
    counts = counts_of(codes, len(keys))
    training = np.maximum(1, np.round(split[0] * counts)).astype(np.int64)
    validation = np.minimum(np.round((split[0] + split[1]) * counts).astype(np.int64), counts)
    training = np.minimum(training, counts)  # a client without rows
    validation = np.maximum(training, validation)
    part = empty(len(codes), np.int8)  # the split of each row, client after client
    ends = np.cumsum(counts)
    for begin, end in _client_groups(counts):
        own = part[ends[begin] - counts[begin] : ends[end - 1]]
        if end - begin == 1 and len(own) > _ROWS_AT_ONCE:
            _split_client(own, seed, keys[begin], (int(training[begin]), int(validation[begin])))
            continue
        of_group = counts[begin:end]
        clients = np.repeat(np.arange(begin, end), of_group)
        positions = np.arange(len(own)) - np.repeat(np.cumsum(of_group) - of_group, of_group)
        mixed = np.lexsort((row_uniforms(seed, _SPLIT_STREAM, keys[clients], positions), clients))
        own[mixed] = positions >= training[clients]
        own[mixed] += positions >= validation[clients]
    order = stable_order(codes, len(keys))  # the rows of a client keep their order

    def rows_of(number: int) -> NDArray[np.int64]:
        return gathered(order, where(lambda place: part[place] == number, len(part)))

    return [rows_of(number) for number in range(3)]


def _split_client(part: NDArray[np.int8], seed: int, key: np.uint64, ends: tuple[int, int]) -> None:
    """Write the splits of a large client's rows into ``part`` ``(n,)``, without an index of all rows.

    The rows with the smallest draws are for training, up to ``ends[0]`` rows, and those up to ``ends[1]``
    for validation. Of equal draws the first is the smallest.
    """
    rows = len(part)
    draws = empty(rows, np.float64)
    for place in row_blocks(rows):
        positions = np.arange(place.start, place.stop)
        draws[place] = row_uniforms(seed, _SPLIT_STREAM, np.asarray(key), positions)
    ranked = ordered(draws)

    def ranked_at(end: int) -> tuple[np.float64, np.int64]:
        draw = ranked[end]
        equal = where(lambda place: draws[place] == draw, rows)
        return draw, equal[end - np.searchsorted(ranked, draw)]

    bounds = [ranked_at(end) for end in ends if end < rows]
    for place in row_blocks(rows):
        own, positions = draws[place], np.arange(place.start, place.stop)
        part[place] = 0
        for draw, position in bounds:
            part[place] += (own > draw) | ((own == draw) & (positions >= position))


def _client_groups(counts: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return first and last code (exclusive) of groups of clients with a few hundred thousand rows each."""
    ends, last = np.cumsum(counts), 0
    groups = []
    while last < len(counts):
        rows_before = ends[last] - counts[last]
        after = int(np.searchsorted(ends, rows_before + _ROWS_AT_ONCE)) + 1
        groups.append((last, min(after, len(counts))))
        last = after
    return groups


def _beside(values: Any) -> AbstractContextManager[None]:
    """Keep large arrays in scratch files if ``values`` are mapped from a file."""
    while isinstance(values, (np.ndarray, memoryview)):
        values = values.base if isinstance(values, np.ndarray) else values.obj
    return scratch(tempfile.gettempdir()) if isinstance(values, mmap.mmap) else nullcontext()
