"""Tables of many clients to a :class:`FederatedDataset`, in two passes over the files.

The first pass takes every client's summary and its labels; the second one turns rows into numbers and
puts each straight into its split. At no time are two copies of the numbers in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from fedgmm.core.randomness import client_keys
from fedgmm.data.dataset import FederatedDataset, LabelledRows, split_rows
from fedgmm.data.federated import client_rows
from fedgmm.data.tabular.columns import categories, stored_kind
from fedgmm.data.tabular.files import (
    TableError,
    Tell,
    broken_column,
    client_name,
    find_tables,
    is_conversion,
    read_batches,
    sniff,
)
from fedgmm.data.tabular.labels import UNKNOWN
from fedgmm.data.tabular.preprocessing import (
    DisagreementError,
    Preprocessing,
    TableOptions,
    agree,
    needs_text,
)
from fedgmm.data.tabular.summaries import BatchValues, ClientSummary, SummaryOfColumns

IntArray = NDArray[np.int64]

_UNLABELLED = ""  # no label is written so: it means missing


@dataclass(frozen=True)
class Tables:
    """Clients' files, looked at once.

    Attributes:
        summaries: what each client tells, in the order of their names.
        options: how they were read.
        files: of each client; several where a client's rows stand in several files.
        notes: what is worth knowing.
    """

    summaries: dict[str, ClientSummary]
    options: TableOptions
    files: list[_File]
    notes: list[str] = field(default_factory=list)

    @property
    def paths(self) -> list[Path]:
        """The files, in order."""
        return [file.path for file in self.files]

    def load(self, preprocessing: Preprocessing, tell: Tell = lambda _: None) -> FederatedDataset:
        """The second pass: all rows as numbers, in their splits."""
        return _load(self, preprocessing, tell)


@dataclass
class _File:
    """One file: where its rows belong, found in the first pass.

    Attributes:
        path: the file.
        as_text: columns that are read as they are written.
        clients: the client of each row, an index into ``names``, ``(n,)``.
        names: clients that have rows here.
        labels: label texts; the label of each row is an index into them, ``(n,)``.
    """

    path: Path
    as_text: set[str]
    names: list[str] = field(default_factory=list)
    clients: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    label_texts: list[str] = field(default_factory=list)
    labels: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


def read_tables(
    sources: Sequence[str | Path], options: TableOptions, tell: Tell = lambda _: None
) -> Tables:
    """The first pass: every client's summary.

    Args:
        sources: files, folders or patterns.
        options: which column is the label, and so on.
        tell: called with a line before each file.

    Raises:
        TableError: a file that cannot be used.
    """
    paths = find_tables(sources)
    _check_names(paths, options)
    files = [_File(path, _text_columns(options)) for path in paths]
    summaries: dict[str, ClientSummary] = {}
    if options.client_column is not None:
        summaries = _summarise_together(files, options, tell)
    else:
        for file in files:
            tell(f"reading {file.path.name}")
            summaries |= _summarise(file, options)
        again = needs_text(summaries, options)
        for file in files:
            wanted = again.get(client_name(file.path))
            if wanted:
                file.as_text |= wanted
                summaries |= _summarise(file, options)
    summaries = dict(sorted(summaries.items()))
    notes = [
        f"Client {client!r}: {s.unlabelled} rows have no label and are left out."
        for client, s in summaries.items()
        if s.unlabelled
    ]
    for client, summary in summaries.items():
        if not summary.rows:
            where = next(file.path for file in files if client in file.names)
            raise TableError(where, "it has no rows with a label; leave it out.")
    return Tables(summaries, options, files, notes)


def load_federation(
    sources: Sequence[str | Path], options: TableOptions, tell: Tell = lambda _: None
) -> tuple[FederatedDataset, Preprocessing, Tables]:
    """Files to a data set, with the preprocessing that all clients agreed on."""
    tables = read_tables(sources, options, tell)
    preprocessing = agreement(tables)
    return tables.load(preprocessing, tell), preprocessing, tables


def agreement(tables: Tables) -> Preprocessing:
    """The preprocessing of all clients; a disagreement is told with the file's name."""
    try:
        preprocessing, notes = agree(tables.summaries, tables.options)
    except DisagreementError as error:
        path = next(file.path for file in tables.files if error.client in file.names)
        raise TableError(path, error.problem) from None
    tables.notes.extend(note for note in notes if note not in tables.notes)
    return preprocessing


def _text_columns(options: TableOptions) -> set[str]:
    named = {options.label, options.client_column, *options.categorical}
    return {name for name in named if name is not None}


def _check_names(paths: Sequence[Path], options: TableOptions) -> None:
    if options.client_column is not None:
        return
    seen: dict[str, Path] = {}
    for path in paths:
        name = client_name(path)
        if name in seen:
            raise TableError(
                path, f"it is named like {seen[name]}; each client needs a file name of its own."
            )
        seen[name] = path


# ---------------------------------------------------------------------- the first pass


def _batches(file: _File, only: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
    yield from read_batches(file.path, as_text=file.as_text, only=only)


def _summarise(file: _File, options: TableOptions) -> dict[str, ClientSummary]:
    """Summaries of the clients in one file; values that break a column's type make it text."""
    while True:
        try:
            return _summarise_once([file], options, lambda _: None)
        except _BrokenColumnError as error:
            file.as_text.add(error.column)


def _summarise_together(
    files: list[_File], options: TableOptions, tell: Tell
) -> dict[str, ClientSummary]:
    """Summaries of clients that are named in a column; a client may be in several files."""
    while True:
        try:
            summaries = _summarise_once(files, options, tell)
        except _BrokenColumnError as error:
            for file in files:
                file.as_text.add(error.column)
            continue
        again = {name for names in needs_text(summaries, options).values() for name in names}
        if again <= files[0].as_text:
            return summaries
        for file in files:
            file.as_text |= again


class _BrokenColumnError(Exception):
    def __init__(self, column: str) -> None:
        self.column = column


def _summarise_once(
    files: list[_File], options: TableOptions, tell: Tell
) -> dict[str, ClientSummary]:
    sums: dict[str, SummaryOfColumns] = {}
    labels: dict[str, Counter[str]] = {}
    header: list[str] = []
    for file in files:
        if len(files) > 1:
            tell(f"reading {file.path.name}")
        rows_of, labels_of = _Codes(), _Codes()
        try:
            for batch in _batches(file):
                own_header = _checked_header(file, batch, options)
                header = header or own_header
                odd = sorted(set(header) ^ set(own_header))
                if odd:
                    raise TableError(file.path, f"the column {odd[0]!r} is not in all files.")
                _add_batch(file, batch, header, options, sums, labels, rows_of, labels_of)
        except TableError as error:
            column = broken_column(error, _header_of(file)) if is_conversion(error) else None
            if column is None or column in file.as_text:
                raise
            raise _BrokenColumnError(column) from None
        if not rows_of.texts:
            raise TableError(file.path, "it has no rows.")
        file.names, file.clients = rows_of.texts, rows_of.codes()
        file.label_texts, file.labels = labels_of.texts, labels_of.codes()
    return {
        client: ClientSummary(
            own.rows,
            labels[client].pop(_UNLABELLED, 0),
            own.result(),
            dict(labels[client]),
        )
        for client, own in sums.items()
    }


def _header_of(file: _File) -> list[str]:
    return [name.strip() for name in sniff(file.path).header]


def _checked_header(file: _File, batch: pa.RecordBatch, options: TableOptions) -> list[str]:
    names = list(batch.schema.names)
    for name, what in ((options.label, "label"), (options.client_column, "client")):
        if name is not None and name not in names:
            raise TableError(
                file.path,
                f"there is no {what} column {name!r}; the columns are {_listed(names)}.",
            )
    for field_ in batch.schema:
        if stored_kind(field_.type) is None:
            raise TableError(
                file.path,
                f"the column {field_.name!r} holds {field_.type}, which is no table value.",
            )
    rest = [name for name in names if name not in (options.label, options.client_column)]
    if not rest:
        raise TableError(file.path, "there is no column to learn from beside the label.")
    return rest


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def _add_batch(
    file: _File,
    batch: pa.RecordBatch,
    header: list[str],
    options: TableOptions,
    sums: dict[str, SummaryOfColumns],
    labels: dict[str, Counter[str]],
    rows_of: _Codes,
    labels_of: _Codes,
) -> None:
    if options.label is None:
        own_labels, texts = np.zeros(len(batch), dtype=np.int64), ["(none)"]
    else:
        own_labels, texts = categories(batch.column(options.label))
    labels_of.add(own_labels, texts)
    if options.client_column is None:
        clients, names = np.zeros(len(batch), dtype=np.int64), [client_name(file.path)]
    else:
        clients, names = categories(batch.column(options.client_column))
        if (clients < 0).any():
            raise TableError(
                file.path,
                f"a row has no client: the column {options.client_column!r} is empty there.",
            )
    rows_of.add(clients, names)
    values = BatchValues(batch.select(header))
    labelled = own_labels >= 0
    for code, client in enumerate(names):
        here: IntArray | slice = np.flatnonzero((clients == code) & labelled)
        if len(names) == 1 and labelled.all():
            here = slice(None)
        counts = labels.setdefault(client, Counter())
        found = np.bincount(own_labels[clients == code] + 1, minlength=len(texts) + 1)
        counts[_UNLABELLED] += int(found[0])
        for label, count in zip(texts, found[1:].tolist(), strict=True):
            if count:
                counts[label] += count
        if client not in sums:
            sums[client] = SummaryOfColumns(header)
        sums[client].add(values, here)


class _Codes:
    """Texts of many batches as indices into one list."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._place: dict[str, int] = {}
        self._parts: list[IntArray] = []

    def add(self, codes: IntArray, texts: list[str]) -> None:
        for text in texts:
            if text not in self._place:
                self._place[text] = len(self.texts)
                self.texts.append(text)
        lookup = np.array([*(self._place[text] for text in texts), UNKNOWN], dtype=np.int64)
        self._parts.append(lookup[codes])

    def codes(self) -> IntArray:
        return np.concatenate(self._parts)


# ---------------------------------------------------------------------- the second pass


def _load(tables: Tables, preprocessing: Preprocessing, tell: Tell) -> FederatedDataset:
    names = list(tables.summaries)
    place = {name: code for code, name in enumerate(names)}
    codes = [_look_up(file.clients, [place[n] for n in file.names]) for file in tables.files]
    labels = [_label_codes(file, preprocessing) for file in tables.files]
    kept = [own >= 0 for own in labels]
    all_codes = np.concatenate([c[k] for c, k in zip(codes, kept, strict=True)])
    all_labels = np.concatenate([own[k] for own, k in zip(labels, kept, strict=True)])
    options = tables.options
    splits = split_rows(all_codes, client_keys(names), options.split, options.seed)
    # the split of each row, and its place within that split
    part = np.empty(len(all_codes), dtype=np.int8)
    row_in_part = np.empty(len(all_codes), dtype=np.int64)
    for number, rows in enumerate(splits):
        part[rows] = number
        row_in_part[rows] = np.arange(len(rows))
    width = len(preprocessing.feature_names)
    matrices = [np.empty((len(rows), width), dtype=np.float32) for rows in splits]
    wanted = {column.name for column in preprocessing.columns if column.outputs}
    first = 0
    for file, keep in zip(tables.files, kept, strict=True):
        tell(f"preparing {file.path.name}")
        start = 0
        for batch in _batches(file, only=wanted):
            here = keep[start : start + len(batch)]
            start += len(batch)
            values = preprocessing.transform(file.path, batch)
            if not here.all():
                values = values[here]
            stop = first + len(values)
            for number, matrix in enumerate(matrices):
                mine = part[first:stop] == number
                matrix[row_in_part[first:stop][mine]] = values[mine]
            first = stop
        if start != len(keep):
            raise TableError(file.path, "it changed while it was read.")
    train, validation, test = (
        LabelledRows(
            client_rows([matrix], all_codes[rows], names),
            torch.from_numpy(matrix),
            torch.from_numpy(all_labels[rows]),
        )
        for matrix, rows in zip(matrices, splits, strict=True)
    )
    classes, columns = preprocessing.labels.array, preprocessing.feature_names
    return FederatedDataset(train, validation, test, tuple(names), classes, columns)


def _look_up(codes: IntArray, values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)[codes]


def _label_codes(file: _File, preprocessing: Preprocessing) -> IntArray:
    encoded, _ = preprocessing.labels.encode(pa.array(file.label_texts, pa.string()))
    return np.append(encoded, UNKNOWN)[file.labels]


# ---------------------------------------------------------------------- later files


@dataclass(frozen=True)
class Rows:
    """Rows of a file that came after training.

    Attributes:
        matrix: ``(n, d)`` float32.
        labels: class indices, ``(n,)``, -1 where a label is missing; ``None`` without a label column.
        clients: of each row, where the file has the client column; else ``None``.
        unknown_labels: texts that were no class in training.
        notes: what is worth knowing.
    """

    matrix: NDArray[np.float32]
    labels: IntArray | None
    clients: list[str] | None
    unknown_labels: list[str]
    notes: list[str]


def read_rows(
    path: Path,
    preprocessing: Preprocessing,
    *,
    label_needed: bool = False,
    tell: Tell = lambda _: None,
) -> Rows:
    """A later file as the model expects it; columns are found by name.

    Raises:
        TableError: a column that is missing, not known, or of another kind than in training.
    """
    find_tables([path])
    tell(f"reading {path.name}")
    as_text = {column.name for column in preprocessing.columns if column.role == "category"}
    as_text |= {preprocessing.labels.name, preprocessing.client_column or preprocessing.labels.name}
    # numbers are read as such, so that the first text among them is told with its row
    types = {
        column.name: pa.float64() for column in preprocessing.columns if column.role == "number"
    }
    before = preprocessing.unknown_categories()
    parts, labels, clients, strange = [], [], _Codes(), set()
    has_labels = False
    first = True
    try:
        for batch in read_batches(path, as_text=as_text, types=types):
            if first:
                preprocessing.check_header(path, batch.schema.names, label_needed=label_needed)
                has_labels = preprocessing.labels.name in batch.schema.names
                first = False
            parts.append(preprocessing.transform(path, batch))
            if has_labels:
                own, odd = preprocessing.labels.encode(batch.column(preprocessing.labels.name))
                labels.append(own)
                strange |= set(odd)
            if preprocessing.client_column in batch.schema.names:
                clients.add(*categories(batch.column(preprocessing.client_column)))
    except TableError as error:
        raise _retyped(error, path) from None
    if first or not sum(map(len, parts)):
        raise TableError(path, "it has no rows.")
    named = None
    if clients.texts:
        named = [clients.texts[code] if code >= 0 else "" for code in clients.codes().tolist()]
    notes = [
        f"{path.name}: {count - before.get(column, 0)} values of column {column!r} are categories that "
        "no client had in training."
        for column, count in preprocessing.unknown_categories().items()
        if count > before.get(column, 0)
    ]
    return Rows(
        np.concatenate(parts),
        np.concatenate(labels) if labels else None,
        named,
        sorted(strange),
        notes,
    )


def _retyped(error: TableError, path: Path) -> TableError:
    """Say which column is of another kind than in training."""
    column = broken_column(error, sniff(path).header) if is_conversion(error) else None
    if column is None:
        return error
    value = str(error).rpartition("invalid value ")[2].rstrip(".")
    shown = f" ({value})" if value.startswith("'") else ""
    return TableError(
        path, f"the column {column.strip()!r} holds text{shown} where training had numbers."
    )
