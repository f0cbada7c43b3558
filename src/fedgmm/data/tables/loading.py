"""Tables of many clients to a :class:`FederatedDataset`, in two passes over the files.

The first pass takes every client's summary and its labels; the second one turns rows into numbers and
puts each straight into its split. At no time are two copies of the numbers in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from fedgmm.core.randomness import client_keys
from fedgmm.data.dataset import FederatedDataset, LabelledRows, split_rows
from fedgmm.data.federated import client_rows
from fedgmm.data.tables.agreement import DisagreementError, agree
from fedgmm.data.tables.errors import TableError, quoted
from fedgmm.data.tables.files import Notify, client_name, find_tables
from fedgmm.data.tables.first_pass import (
    IntArray,
    TableFile,
    state_of,
    summarise_one_by_one,
    summarise_together,
)
from fedgmm.data.tables.labels import UNKNOWN
from fedgmm.data.tables.later_files import Rows, read_rows
from fedgmm.data.tables.preprocessing import Preprocessing, TableOptions
from fedgmm.data.tables.summaries import ClientSummary
from fedgmm.wording import counted

__all__ = ["Rows", "Tables", "agreement", "load_federation", "read_rows", "read_tables"]

_CHANGED = "it changed while it was read; start again when nothing writes to it."

ONE_CLIENT = (
    "There is one client only; a federation needs several: give more files, or say --client-column if a "
    "column names the client."
)
"""What is noted of tables with a single client."""

_LEFT_OUT = ("row has no label and is left out", "rows have no label and are left out")


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
    files: list[TableFile]
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

    def load(
        self, preprocessing: Preprocessing, notify: Notify = lambda _: None
    ) -> FederatedDataset:
        """The second pass: all rows as numbers, in their splits."""
        return _load(self, preprocessing, notify)


def read_tables(
    sources: Sequence[str | Path], options: TableOptions, notify: Notify = lambda _: None
) -> Tables:
    """The first pass: every client's summary.

    Args:
        sources: files, folders or patterns.
        options: which column is the label, and so on.
        notify: called with a line before each file.

    Raises:
        TableError: a file that cannot be used.
    """
    # sorted, so that nothing depends on the order in which they were named
    paths = sorted(find_tables(sources), key=lambda path: (client_name(path), path))
    _check_names(paths, options)
    if options.client is not None and len(paths) > 1:
        raise TableError(paths[1], f"client {quoted(options.client)} has one file, not several.")
    categorical = set(options.categorical) - {options.label, options.client_column}
    as_text = categorical | {n for n in (options.label, options.client_column) if n is not None}
    files = [TableFile(path, set(as_text), set(categorical)) for path in paths]
    if options.client_column is not None:
        summaries = summarise_together(files, options, notify)
    else:
        summaries = summarise_one_by_one(files, options, notify)
    summaries = dict(sorted(summaries.items()))
    notes = [
        f"Client {client!r}: {counted(s.unlabelled, *_LEFT_OUT)}."
        for client, s in summaries.items()
        if s.unlabelled
    ]
    if len(summaries) == 1:
        notes.append(ONE_CLIENT)
    tables = Tables(summaries, options, files, notes)
    for client, summary in summaries.items():
        if not summary.rows:
            raise tables.error(client, "it has no rows with a label; leave it out.")
    return tables


def load_federation(
    sources: Sequence[str | Path], options: TableOptions, notify: Notify = lambda _: None
) -> tuple[FederatedDataset, Preprocessing, Tables]:
    """Files to a data set, with the preprocessing that all clients agreed on."""
    tables = read_tables(sources, options, notify)
    preprocessing = agreement(tables)
    return tables.load(preprocessing, notify), preprocessing, tables


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


# ---------------------------------------------------------------------- the second pass


def _load(tables: Tables, preprocessing: Preprocessing, notify: Notify) -> FederatedDataset:
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
        notify(f"preparing {file.path.name}")
        start = 0
        if state_of(file.path) != file.state:
            raise TableError(file.path, _CHANGED)
        for batch in file.batches(only=wanted):
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


def _label_codes(file: TableFile, preprocessing: Preprocessing) -> IntArray:
    encoded, _ = preprocessing.labels.encode(pa.array(file.label_texts, pa.string()))
    return np.append(encoded, UNKNOWN)[file.labels]
