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
from fedgmm.data.tabular.columns import Kind, categories, stored_kind
from fedgmm.data.tabular.errors import ConversionError, TableError, listed, quoted
from fedgmm.data.tabular.files import (
    Tell,
    client_name,
    find_tables,
    read_batches,
    read_header,
)
from fedgmm.data.tabular.labels import UNKNOWN
from fedgmm.data.tabular.preprocessing import (
    DisagreementError,
    Preprocessing,
    TableOptions,
    agree,
    check_type,
    needs_text,
    too_many_categories,
)
from fedgmm.data.tabular.summaries import BatchValues, ClientSummary, SummaryOfColumns

IntArray = NDArray[np.int64]

_UNLABELLED = ""  # no label is written so: it means missing
_CHANGED = "it changed while it was read; start again when nothing writes to it."


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

    def error(self, client: str, problem: str) -> TableError:
        """What is wrong with a client, with the name of its file."""
        path = next(file.path for file in self.files if client in file.names)
        named = "" if self.options.client_column is None else f"client {quoted(client)}: "
        return TableError(path, f"{named}{problem}")

    def load(self, preprocessing: Preprocessing, tell: Tell = lambda _: None) -> FederatedDataset:
        """The second pass: all rows as numbers, in their splits."""
        return _load(self, preprocessing, tell)


@dataclass
class _File:
    """One file: where its rows belong, found in the first pass.

    Attributes:
        path: the file.
        as_text: columns that are read as they are written.
        as_categories: those of them whose text is not taken for numbers or dates.
        clients: the client of each row, an index into ``names``, ``(n,)``.
        names: clients that have rows here.
        labels: label texts; the label of each row is an index into them, ``(n,)``.
        kinds: what the types of the columns said.
        state: size and time of the last change when it was read first.
    """

    path: Path
    as_text: set[str]
    as_categories: set[str]
    names: list[str] = field(default_factory=list)
    clients: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    label_texts: list[str] = field(default_factory=list)
    labels: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    kinds: dict[str, Kind] = field(default_factory=dict)
    state: tuple[int, int] = (0, 0)

    def read_as_categories(self, columns: set[str]) -> None:
        self.as_text |= columns
        self.as_categories |= columns


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
    # sorted, so that nothing depends on the order in which they were named
    paths = sorted(find_tables(sources), key=lambda path: (client_name(path), path))
    _check_names(paths, options)
    categorical = set(options.categorical) - {options.label, options.client_column}
    as_text = categorical | {n for n in (options.label, options.client_column) if n is not None}
    files = [_File(path, set(as_text), set(categorical)) for path in paths]
    if options.client_column is not None:
        summaries = _summarise_together(files, options, tell)
    else:
        summaries = _summarise_one_by_one(files, options, tell)
    summaries = dict(sorted(summaries.items()))
    notes = [
        f"Client {client!r}: {s.unlabelled} rows have no label and are left out."
        for client, s in summaries.items()
        if s.unlabelled
    ]
    tables = Tables(summaries, options, files, notes)
    for client, summary in summaries.items():
        if not summary.rows:
            raise tables.error(client, "it has no rows with a label; leave it out.")
    return tables


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
        raise tables.error(error.client, error.problem) from None
    tables.notes.extend(note for note in notes if note not in tables.notes)
    return preprocessing


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


def _summarise_one_by_one(
    files: list[_File], options: TableOptions, tell: Tell
) -> dict[str, ClientSummary]:
    """Summaries of clients that have a file each."""
    summaries: dict[str, ClientSummary] = {}
    for file in files:
        tell(f"reading {file.path.name}")
        summaries |= _summarise([file], options)
    again = needs_text(summaries, options)
    known = dict(summaries)
    for file in files:
        if wanted := again.get(file.names[0]):
            file.read_as_categories(wanted)
            summaries |= _summarise([file], options)
    for name in sorted({name for names in again.values() for name in names}):
        numeric = any(s.columns[name].kind in ("number", "date") for s in known.values())
        if numeric and too_many_categories(summaries, name, options):
            return known  # numbers beside text: the agreement says whose
    return summaries


def _summarise_together(
    files: list[_File], options: TableOptions, tell: Tell
) -> dict[str, ClientSummary]:
    """Summaries of clients that are named in a column; a client may be in several files."""
    while True:
        summaries = _summarise(files, options, tell)
        again = {name for names in needs_text(summaries, options).values() for name in names}
        if again <= files[0].as_categories:
            return summaries
        for file in files:
            file.read_as_categories(again)


def _summarise(
    files: list[_File], options: TableOptions, tell: Tell = lambda _: None
) -> dict[str, ClientSummary]:
    """Summaries of the clients in some files; a column whose types differ is read as text."""
    while True:
        try:
            summaries = _summarise_once(files, options, tell)
            mixed = _mixed_columns(files)
        except ConversionError as error:
            if any(error.column in file.as_text for file in files):
                raise
            mixed = {error.column}
        if not mixed:
            return summaries
        for file in files:
            file.as_text |= mixed


def _mixed_columns(files: list[_File]) -> set[str]:
    """Columns that are numbers in one file and something else in another."""
    kinds: dict[str, set[Kind]] = {}
    for file in files:
        for name, kind in file.kinds.items():
            kinds.setdefault(name, set()).add(kind)
    return {name for name, found in kinds.items() if len(found - {"empty"}) > 1}


def _summarise_once(
    files: list[_File], options: TableOptions, tell: Tell
) -> dict[str, ClientSummary]:
    sums: dict[str, SummaryOfColumns] = {}
    labels: dict[str, Counter[str]] = {}
    header: list[str] = []
    for file in files:
        if len(files) > 1:
            tell(f"reading {file.path.name}")
        own_header = _checked_header(file, options)
        header = header or own_header
        odd = sorted(set(header) ^ set(own_header))
        if odd:
            raise TableError(file.path, f"the column {quoted(odd[0])} is not in all files.")
        rows_of, labels_of = _Codes(), _Codes()
        file.state = _state(file.path)
        for batch in _batches(file):
            _check_types(file, batch, options)
            _add_batch(file, batch, header, options, sums, labels, rows_of, labels_of)
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


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise TableError(path, f"it cannot be read ({error.strerror}).") from None
    return found.st_size, found.st_mtime_ns


def _checked_header(file: _File, options: TableOptions) -> list[str]:
    """The columns beside label and client, which must be there."""
    names = list(read_header(file.path))
    for name, what in ((options.label, "label"), (options.client_column, "client")):
        if name is not None and name not in names:
            raise TableError(
                file.path,
                f"there is no {what} column {quoted(name)}; the columns are {listed(names)}.",
            )
    rest = [name for name in names if name not in (options.label, options.client_column)]
    if not rest:
        raise TableError(file.path, "there is no column to learn from beside the label.")
    return rest


def _check_types(file: _File, batch: pa.RecordBatch, options: TableOptions) -> None:
    for column in batch.schema:
        if column.name not in options.ignore:
            check_type(file.path, column.name, column.type)
            kind = stored_kind(column.type)
            assert kind is not None
            file.kinds[column.name] = kind


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
                f"row {int(np.argmax(clients < 0)) + 1 + rows_of.rows} below the header has no client: the "
                f"column {quoted(options.client_column)} is empty there.",
            )
    rows_of.add(clients, names)
    values = BatchValues(batch.select(header), file.as_categories, options.ignore)
    order = np.argsort(clients, kind="stable")
    ends = np.cumsum(np.bincount(clients, minlength=len(names)))
    for client, mine in zip(names, np.split(order, ends[:-1]), strict=True):
        counts = labels.setdefault(client, Counter())
        found = np.bincount(own_labels[mine] + 1, minlength=len(texts) + 1)
        counts[_UNLABELLED] += int(found[0])
        for code in np.flatnonzero(found[1:]).tolist():
            counts[texts[code]] += int(found[code + 1])
        if client not in sums:
            sums[client] = SummaryOfColumns(header)
        every_row = len(names) == 1 and not found[0]
        sums[client].add(values, slice(None) if every_row else mine[own_labels[mine] >= 0])


class _Codes:
    """Texts of many batches as indices into one list."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._place: dict[str, int] = {}
        self._parts: list[IntArray] = []
        self.rows = 0

    def add(self, codes: IntArray, texts: list[str]) -> None:
        self.rows += len(codes)
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
        if _state(file.path) != file.state:
            raise TableError(file.path, _CHANGED)
        for batch in _batches(file, only=wanted):
            here = keep[start : start + len(batch)]
            start += len(batch)
            if len(here) < len(batch):
                raise TableError(file.path, _CHANGED)
            values = preprocessing.transform(file.path, batch)
            if not here.all():
                values = values[here]
            stop = first + len(values)
            for number, matrix in enumerate(matrices):
                mine = part[first:stop] == number
                matrix[row_in_part[first:stop][mine]] = values[mine]
            first = stop
        if start != len(keep):
            raise TableError(file.path, _CHANGED)
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
    header = read_header(path)
    preprocessing.check_header(path, header, label_needed=label_needed)
    as_text = {column.name for column in preprocessing.columns if column.role == "category"}
    as_text |= {preprocessing.labels.name, preprocessing.client_column or ""}
    while True:
        try:
            return _rows(path, preprocessing, header, as_text)
        except ConversionError as error:
            # a value further down is no number; as text the whole column is looked at
            if error.column in as_text:
                raise
            as_text.add(error.column)


def _rows(
    path: Path, preprocessing: Preprocessing, header: Collection[str], as_text: Collection[str]
) -> Rows:
    label, client = preprocessing.labels.name, preprocessing.client_column
    wanted = {column.name for column in preprocessing.columns if column.outputs}
    wanted |= {label, client or label}
    before = preprocessing.unknown_categories()
    parts, labels, clients, strange = [], [], _Codes(), set()
    for batch in read_batches(path, as_text=as_text, only=wanted):
        parts.append(preprocessing.transform(path, batch))
        if label in header:
            own, odd = preprocessing.labels.encode(batch.column(label))
            labels.append(own)
            strange |= set(odd)
        if client is not None and client in header:
            clients.add(*categories(batch.column(client)))
    if not parts:
        raise TableError(path, "it has no rows.")
    named = None
    if clients.texts:
        named = [clients.texts[code] if code >= 0 else "" for code in clients.codes().tolist()]
    notes = [
        f"{path.name}: {count - before.get(column, 0)} values of column {quoted(column)} are categories "
        "that no client had in training."
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
