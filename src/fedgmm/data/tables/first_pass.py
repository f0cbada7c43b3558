"""The first pass over the files: every client's summary, and where each row belongs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedgmm.data.tables.agreement import needs_text, too_many_categories
from fedgmm.data.tables.columns import Kind, categories, stored_kind
from fedgmm.data.tables.errors import (
    NOT_EVERYWHERE,
    ConversionError,
    TableError,
    listed,
    quoted,
)
from fedgmm.data.tables.files import Notify, client_name, read_batches, read_header
from fedgmm.data.tables.labels import NO_LABEL, UNKNOWN
from fedgmm.data.tables.preprocessing import TableOptions, check_type
from fedgmm.data.tables.summaries import (
    BatchValues,
    ClientSummary,
    ColumnSummary,
    SummaryOfColumns,
)

IntArray = NDArray[np.int64]

_UNLABELLED = ""  # no label is written so: it means missing


@dataclass
class TableFile:
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

    def batches(self, only: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Its rows; ``only`` names the columns that are wanted, ``None`` means all."""
        return read_batches(self.path, as_text=self.as_text, only=only)

    def read_as_categories(self, columns: set[str]) -> None:
        """From now on take columns as they are written."""
        self.as_text |= columns
        self.as_categories |= columns


def summarise_one_by_one(
    files: list[TableFile], options: TableOptions, notify: Notify
) -> dict[str, ClientSummary]:
    """Summaries of clients that have a file each."""
    summaries: dict[str, ClientSummary] = {}
    for file in files:
        notify(f"reading {file.path.name}")
        summaries |= _summarise([file], options)
    of_client = {file.names[0]: file for file in files}

    def read_again(columns: dict[str, set[str]]) -> dict[str, ClientSummary]:
        found: dict[str, ClientSummary] = {}
        for client, wanted in columns.items():
            of_client[client].read_as_categories(wanted)
            found |= _summarise([of_client[client]], options)
        return found

    return settle_kinds(summaries, options, read_again)


def settle_kinds(
    summaries: dict[str, ClientSummary],
    options: TableOptions,
    read_again: Callable[[dict[str, set[str]]], dict[str, ClientSummary]],
) -> dict[str, ClientSummary]:
    """Summaries in which columns that are text for one client are text for all, where that helps.

    Args:
        summaries: of all clients, as each read its own rows.
        options: how tables are read.
        read_again: the summaries of clients that read the named columns as categories.
    """
    again = needs_text(summaries, options)
    known = dict(summaries)
    summaries = {**summaries, **(read_again(again) if again else {})}
    for name in sorted({name for names in again.values() for name in names}):
        own = {client: s.columns[name] for client, s in known.items() if name in s.columns}
        numeric = any(told.kind in ("number", "date") for told in own.values())
        if numeric and too_many_categories(summaries, name, options):
            # numbers beside text after all: the agreement says whose
            for client, told in own.items():
                columns = {**summaries[client].columns, name: told}
                summaries[client] = replace(summaries[client], columns=columns)
    return summaries


def summarise_together(
    files: list[TableFile], options: TableOptions, notify: Notify
) -> dict[str, ClientSummary]:
    """Summaries of clients that are named in a column; a client may be in several files."""
    while True:
        summaries = _summarise(files, options, notify)
        again = {name for names in needs_text(summaries, options).values() for name in names}
        if again <= files[0].as_categories:
            return summaries
        for file in files:
            file.read_as_categories(again)


def _summarise(
    files: list[TableFile], options: TableOptions, notify: Notify = lambda _: None
) -> dict[str, ClientSummary]:
    """Summaries of the clients in some files; a column whose types differ is read as text."""
    while True:
        try:
            summaries = _summarise_once(files, options, notify)
            mixed = _mixed_columns(files)
        except ConversionError as error:
            if any(error.column in file.as_text for file in files):
                raise
            mixed = {error.column}
        if not mixed:
            return summaries
        for file in files:
            file.as_text |= mixed


def _mixed_columns(files: list[TableFile]) -> set[str]:
    """Columns that are numbers in one file and something else in another."""
    kinds: dict[str, set[Kind]] = {}
    for file in files:
        for name, kind in file.kinds.items():
            kinds.setdefault(name, set()).add(kind)
    return {name for name, found in kinds.items() if len(found - {"empty"}) > 1}


def _summarise_once(
    files: list[TableFile], options: TableOptions, notify: Notify
) -> dict[str, ClientSummary]:
    sums: dict[str, SummaryOfColumns] = {}
    labels: dict[str, Counter[str]] = {}
    header: list[str] = []
    ignored: dict[str, ColumnSummary] = {}
    for file in files:
        if len(files) > 1:
            notify(f"reading {file.path.name}")
        own_header, own_ignored = _checked_header(file, options)
        header = header or own_header
        odd = sorted(set(header) ^ set(own_header))
        if odd:
            problem = f"the column {quoted(odd[0])} is not in all files; {NOT_EVERYWHERE}."
            raise TableError(file.path, problem)
        ignored |= dict.fromkeys(own_ignored, ColumnSummary("empty", 0))
        rows_of, labels_of = Codes(), Codes()
        file.state = state_of(file.path)
        for batch in file.batches(
            only={*header, *filter(None, (options.label, options.client_column))}
        ):
            _check_types(file, batch)
            _add_batch(file, batch, header, options, sums, labels, rows_of, labels_of)
        if not rows_of.texts:
            raise TableError(file.path, "it has no rows.")
        file.names, file.clients = rows_of.texts, rows_of.codes()
        file.label_texts, file.labels = labels_of.texts, labels_of.codes()
    return {
        client: ClientSummary(
            own.rows,
            labels[client].pop(_UNLABELLED, 0),
            {**own.result(), **ignored},
            dict(labels[client]),
        )
        for client, own in sums.items()
    }


def state_of(path: Path) -> tuple[int, int]:
    """Size and time of the last change of a file."""
    try:
        found = path.stat()
    except OSError as error:
        raise TableError(path, f"it cannot be read ({error.strerror}).") from None
    return found.st_size, found.st_mtime_ns


def _checked_header(file: TableFile, options: TableOptions) -> tuple[list[str], list[str]]:
    """The columns beside label and client, which must be there: those to use, those to ignore."""
    names = list(read_header(file.path))
    for name, what in ((options.label, "label"), (options.client_column, "client")):
        if name is not None and name not in names:
            raise TableError(
                file.path,
                f"there is no {what} column {quoted(name)}; the columns are {listed(names)}.",
            )
    rest = [name for name in names if name not in (options.label, options.client_column)]
    used = [name for name in rest if name not in options.ignore]
    ignored = [name for name in rest if name in options.ignore]
    if not used:
        others = " and those to ignore" if ignored else ""
        raise TableError(file.path, f"there is no column to learn from beside the label{others}.")
    return used, ignored


def _check_types(file: TableFile, batch: pa.RecordBatch) -> None:
    for column in batch.schema:
        check_type(file.path, column.name, column.type)
        kind = stored_kind(column.type)
        assert kind is not None
        file.kinds[column.name] = kind


def _add_batch(
    file: TableFile,
    batch: pa.RecordBatch,
    header: list[str],
    options: TableOptions,
    sums: dict[str, SummaryOfColumns],
    labels: dict[str, Counter[str]],
    rows_of: Codes,
    labels_of: Codes,
) -> None:
    if options.label is None:
        own_labels, texts = np.zeros(len(batch), dtype=np.int64), [NO_LABEL]
    else:
        own_labels, texts = categories(batch.column(options.label))
    labels_of.add(own_labels, texts)
    if options.client_column is None:
        clients = np.zeros(len(batch), dtype=np.int64)
        names = [options.client or client_name(file.path)]
    else:
        clients, names = categories(batch.column(options.client_column))
        if (clients < 0).any():
            raise TableError(
                file.path,
                f"row {int(np.argmax(clients < 0)) + 1 + rows_of.rows} below the header has no client: the "
                f"column {quoted(options.client_column)} is empty there.",
            )
    rows_of.add(clients, names)
    values = BatchValues(batch.select(header), file.as_categories)
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


class Codes:
    """Texts of many batches as indices into one list."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._place: dict[str, int] = {}
        self._parts: list[IntArray] = []
        self.rows = 0

    def add(self, codes: IntArray, texts: list[str]) -> None:
        """Add the rows of a batch."""
        self.rows += len(codes)
        for text in texts:
            if text not in self._place:
                self._place[text] = len(self.texts)
                self.texts.append(text)
        lookup = np.array([*(self._place[text] for text in texts), UNKNOWN], dtype=np.int64)
        self._parts.append(lookup[codes])

    def codes(self) -> IntArray:
        """Of all rows, ``(n,)``."""
        return np.concatenate(self._parts)
