"""Files of many clients to a :class:`FederatedDataset`, and later files to rows for a fitted model.

Each file is parsed once. Its columns stay in memory (8 bytes per number) while all clients agree on the
preprocessing from their summaries. They are then written as float32 into the splits and released, file
by file. Within :func:`on_disk_if_large`, columns and splits of large tables are in scratch files.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from fedgmm.data.dataset import FederatedDataset, LabelledRows, split_rows
from fedgmm.data.federated import client_rows
from fedgmm.data.tables.agreement import (
    DisagreementError,
    agree,
    agree_on_kinds,
    columns_to_read_as_text,
)
from fedgmm.data.tables.columns import (
    CodeArray,
    ColumnValues,
    FloatArray,
    IntArray,
    Kind,
    kind_of_text,
    without_beyond,
)
from fedgmm.data.tables.errors import TableError, ValueKindError, joined, quoted, similar_name
from fedgmm.data.tables.errors import listed as list_of
from fedgmm.data.tables.files import Notify, TableFile, client_name, find_tables, memory_needed
from fedgmm.data.tables.preprocessing import (
    NO_LABEL,
    EncodedRows,
    Preprocessing,
    TableOptions,
    is_known,
    known_rows,
    numbers_to_predict,
)
from fedgmm.data.tables.summaries import ClientPart, ClientSummary, ColumnSummary, summarise_columns
from fedgmm.data.tables.text_files import no_header
from fedgmm.support.randomness import client_keys
from fedgmm.support.scratch import (
    as_bytes,
    available_memory,
    concatenated,
    counts_of,
    empty,
    gathered,
    row_blocks,
    scratch,
    stable_order,
    touched,
    where,
)
from fedgmm.wording import counted

ONE_CLIENT = (
    "There is only one client, but a federation needs several: give more files, or use --client-column "
    "if a column names the client."
)
"""The note about tables with a single client."""

_MANY_CLASSES, _FEW_ROWS = 50, 30  # a note for more classes with fewer rows each; rules of thumb

_MOST_WORDS = 3  # of a note

_LEFT_OUT = ("row has no label and is left out", "rows have no label and are left out")


class ClientsFile:
    """A file, and the client of each of its rows.

    Attributes:
        file: the file.
        as_categories: columns whose values are categories even if they look like numbers or dates.
        listed: columns whose texts are listed in a summary even if they look like names.
        names: the clients that have rows here.
        clients: the client of each row, an index into ``names``, ``(n,)``.
    """

    def __init__(
        self, file: TableFile, options: TableOptions, listed: Collection[str] | None = None
    ) -> None:
        """Check the header, then read all columns that the options do not ignore.

        ``listed`` are all columns that the options declare categorical if it is ``None``.
        """
        self.file, self.options = file, options
        self.as_categories = set(options.categorical) - {options.label, options.client_column}
        self.listed = options.categorical if listed is None else listed
        file.ignore_vectors(options.left_out)
        self.ignored = [name for name in file.header if name in options.left_out]
        header = list(file.header)
        for name, role in ((options.label, "label"), (options.client_column, "client")):
            if name is not None and name not in header:
                if file.looks_headless:
                    raise no_header(file.path, header)
                problem = f"there is no {role} column {quoted(name)}"
                full = f"{problem}{similar_name(name, header)}; the columns are {list_of(header)}."
                raise TableError(file.path, full, public=problem)
        if not self.used:
            others = " and those to ignore" if self.ignored else ""
            problem = f"there is no column to learn from besides the label{others}."
            raise TableError(file.path, problem)
        self.read()
        if options.client_column is None:
            self.names = [options.client or client_name(file.path)]
            self.clients: NDArray[np.integer] = np.broadcast_to(np.int64(0), file.rows)
            return
        self.clients, self.names = self.owners(options.client_column, "client")

    @property
    def used(self) -> list[str]:
        """The columns to learn from."""
        options = self.options
        special = (options.label, options.client_column, *options.left_out)
        return [name for name in self.file.header if name not in special]

    def read(self) -> None:
        """Read the columns that are not kept yet."""
        options = self.options
        special = {n for n in (options.label, options.client_column) if n is not None}
        as_text = {*self.as_categories, *special}
        if options.task == "regression":
            as_text -= {options.label}
        self.file.read({*self.used, *special}, as_text, compact=True)
        for name in self.used:
            values = self.file.columns[name]
            if isinstance(values.numbers, np.ndarray):  # others have few digits
                numbers = without_beyond(values.numbers)
                self.file.columns[name] = replace(values, numbers=numbers)

    def owners(self, column: str, what: str) -> tuple[CodeArray, list[str]]:
        """Return the codes and names of the clients or persons of all rows; ``what`` is for errors."""
        codes, names = self.file.columns[column].categories()
        without = where(lambda place: codes[place] < 0, self.file.rows)
        if len(without):
            raise TableError(
                self.file.path,
                f"row {int(without[0]) + 1} below the header has no {what}: the column {quoted(column)} "
                "is empty there.",
                public=f"a row has no {what}",
            )
        return codes, names

    def kind(self, name: str) -> Kind:
        """Return the kind of a column's values."""
        kind = self.file.columns[name].kind
        return "text" if name in self.as_categories and kind != "empty" else kind

    def labels(self) -> ColumnValues:
        """Return the labels as texts; numbers to predict, and rows without labels, have one text."""
        label, codes = self.options.label, np.broadcast_to(np.int32(0), self.file.rows)
        if label is not None and self.options.task != "regression":
            return self.file.columns[label]
        if label is not None:
            try:
                numbers = numbers_to_predict(self.file.columns[label], label)
            except ValueKindError as error:
                raise TableError(self.file.path, str(error), public=error.public) from None
            codes = empty(len(numbers), np.int32)
            for place in row_blocks(len(codes)):
                codes[place] = np.where(np.isnan(numbers[place]), -1, 0)
        return ColumnValues("text", None, codes, pa.array([NO_LABEL]), True)


@dataclass(frozen=True)
class Tables:
    """Files of clients, parsed and summarised.

    Attributes:
        summaries: the summary of each client, sorted by name.
        options: how the files were read.
        files: sorted by the client's name; a client may have rows in several files.
        notes: remarks for the user.
    """

    summaries: dict[str, ClientSummary]
    options: TableOptions
    files: list[ClientsFile]
    notes: list[str] = field(default_factory=list)

    @property
    def paths(self) -> list[Path]:
        """The paths of the files, in order."""
        return [own.file.path for own in self.files]

    def error(self, client: str, problem: str) -> TableError:
        """Return the error for a problem of a client, with the name of its file."""
        path = next(own.file.path for own in self.files if client in own.names)
        named = "" if self.options.client_column is None else f"client {quoted(client)}: "
        return TableError(path, f"{named}{problem}")

    def disagreement(self, error: DisagreementError) -> TableError:
        """Return the error for a client that does not fit, with an example of its values."""
        own = next(own for own in self.files if error.client in own.names)
        values = own.file.columns.get(error.column)
        problem = error.problem
        if values is not None and values.kind == "text" and " holds text, " in problem:
            texts = values.texts.to_pylist()
            example = next(text for text in texts if kind_of_text(text) == "text")
            problem = problem.replace(" holds text, ", f" holds text such as {quoted(example)}, ")
        return self.error(error.client, problem)

    def load(
        self,
        preprocessing: Preprocessing,
        notify: Notify = lambda _: None,
        *,
        keep_columns: bool = False,
    ) -> FederatedDataset:
        """Return all labelled rows as numbers, in their splits.

        ``keep_columns`` keeps the parsed columns in memory, so that loading again does not parse again.
        """
        kept, labels, codes = map(list, zip(*self._labelled(preprocessing), strict=True))
        all_codes, all_labels = concatenated(codes), concatenated(labels)
        splits = self._split(all_codes)
        # the split of each row, and its place within that split
        part = empty(len(all_codes), np.int8)
        row_in_part = empty(len(all_codes), np.int64)
        for number, rows in enumerate(splits):
            for at in row_blocks(len(rows)):
                part[rows[at]] = number
                row_in_part[rows[at]] = np.arange(at.start, at.stop)
        width = len(preprocessing.feature_names)
        matrices = [empty((len(rows), width), np.float32) for rows in splits]
        first = 0
        for own, keep in zip(self.files, kept, strict=True):
            notify(f"preparing {own.file.path.name}")
            start = 0
            for block in _encoded(own.file, preprocessing).blocks():
                ends = np.searchsorted(keep, (start, start + len(block)))
                values = block[keep[slice(*ends)] - start]
                start += len(block)
                stop = first + len(values)
                for number, matrix in enumerate(matrices):
                    mine = part[first:stop] == number
                    matrix[row_in_part[first:stop][mine]] = values[mine]
                first = stop
                touched(values.nbytes * 2 + 8 * block.size)
            if not keep_columns:
                own.file.columns.clear()
        train, validation, test = (
            LabelledRows(
                client_rows([matrix], gathered(all_codes, rows), self.summaries),
                torch.from_numpy(matrix),
                torch.from_numpy(gathered(all_labels, rows)),
            )
            for matrix, rows in zip(matrices, splits, strict=True)
        )
        return FederatedDataset(
            train,
            validation,
            test,
            tuple(self.summaries),
            preprocessing.labels.array,
            preprocessing.feature_names,
            preprocessing.labels.target,
            vectors=preprocessing.vectors,
        )

    def persons(self, preprocessing: Preprocessing, column: str) -> torch.Tensor:
        """Return the person of each training row as a number, ``(N,)``, in the order of the loaded rows.

        Rows of different files with the same text in the column are of one person.

        Args:
            preprocessing: decides which labels are known; other rows are left out.
            column: names the person of a row, for privacy of persons with several rows.

        Raises:
            TableError: a file without the column, or a row without a person.
        """
        found: list[IntArray] = []
        numbers: dict[str, int] = {}
        for own in self.files:
            if column not in own.file.header:
                problem = f"there is no person column {quoted(column)}"
                raise TableError(own.file.path, f"{problem}.", public=problem)
            own.file.read({column}, {column})
            codes, texts = own.owners(column, "person")
            found.append(np.array([numbers.setdefault(t, len(numbers)) for t in texts])[codes])
        kept, _, clients = zip(*self._labelled(preprocessing), strict=True)
        persons = np.concatenate([own[rows] for own, rows in zip(found, kept, strict=True)])
        return torch.from_numpy(persons[self._split(np.concatenate(clients))[0]])

    def _labelled(
        self, preprocessing: Preprocessing
    ) -> Iterator[tuple[IntArray, NDArray[Any], IntArray]]:
        """Yield, for each file, the rows with known labels, these labels, and the clients' codes."""
        place = {name: code for code, name in enumerate(self.summaries)}
        for own in self.files:
            own.file.check_unchanged()
            own.read()
            values = own.labels()
            if preprocessing.labels.scaling is not None:
                values = own.file.columns[preprocessing.labels.name]
            labels = preprocessing.labels.encode_column(values)[0]
            kept = known_rows(labels)
            owners = np.array([place[name] for name in own.names])
            yield kept, gathered(labels, kept), gathered(owners, gathered(own.clients, kept))

    def _split(self, codes: IntArray) -> list[IntArray]:
        """Return the training, validation and test rows of clients given by their codes, ``(N,)``."""
        keys = client_keys(self.summaries)
        return split_rows(codes, keys, self.options.split, self.options.seed)


# ---------------------------------------------------------------------- the files of training


@contextmanager
def on_disk_if_large(
    sources: Sequence[str | Path], options: TableOptions, folder: str | Path
) -> Iterator[None]:
    """Keep tables in scratch files of a folder if they would need more memory than the options allow.

    The limit is ``options.memory``, or half of the memory that is available if it is ``None``.
    """
    limit = available_memory() // 2 if options.memory is None else as_bytes(options.memory)
    large = sum(map(memory_needed, find_tables(sources))) > limit
    with scratch(folder if large else None):
        yield


def load_federation(
    sources: Sequence[str | Path], options: TableOptions, notify: Notify = lambda _: None
) -> tuple[FederatedDataset, Preprocessing, Tables]:
    """Return the data set of some files, the preprocessing of all clients, and the summaries."""
    tables = read_tables(sources, options, notify)
    preprocessing = agreement(tables)
    return tables.load(preprocessing, notify), preprocessing, tables


def read_tables(
    sources: Sequence[str | Path], options: TableOptions, notify: Notify = lambda _: None
) -> Tables:
    """Parse files, folders or patterns, and summarise every client.

    Raises:
        TableError: a file that cannot be used.
    """
    # sorted, so that the order in which files are named does not matter
    paths = sorted(find_tables(sources), key=lambda path: (client_name(path), path))
    if options.client is not None and len(paths) > 1:
        raise TableError(paths[1], f"client {quoted(options.client)} has one file, not several.")
    for before, path in itertools.pairwise(paths):
        if options.client_column is None and client_name(path) == client_name(before):
            raise TableError(
                path, f"it has the same name as {before}; each client needs its own file name."
            )
    return summarise_files(
        [ClientsFile(TableFile(path, notify, options.written), options) for path in paths], options
    )


def summarise_files(files: list[ClientsFile], options: TableOptions) -> Tables:
    """Summarise every client of files that are read."""
    if options.client_column is None:
        summaries = _summarise_one_by_one(files, options)
    else:
        summaries = _summarise_together(files, options)
    summaries = dict(sorted(summaries.items()))
    notes = []
    headless = [own.file.path.name for own in files if own.file.looks_headless]
    if headless:
        notes.append(
            f"The first line of {joined(headless)} looks like data, but names the columns; use --no-header "
            "or --names if there is no header."
        )
    without = {client: s.unlabelled for client, s in summaries.items() if s.unlabelled}
    if without:
        notes.append(f"{counted(sum(without.values()), *_LEFT_OUT)}: at {joined(list(without))}.")
    notes += _word_notes(files, summaries)
    if len(summaries) == 1:
        notes.append(ONE_CLIENT)
    tables = Tables(summaries, options, files, notes)
    for client, summary in summaries.items():
        if not summary.rows:
            raise tables.error(client, "it has no rows with a label; leave it out.")
    return tables


def _word_notes(files: Sequence[ClientsFile], summaries: Mapping[str, ClientSummary]) -> list[str]:
    """Return notes about columns that would hold numbers or dates but for a few words.

    The agreement has a note of its own where only some of the clients have words.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for own in files for name in own.used):
        own = [one.file.columns[name] for one in files if name in one.used]
        if name in files[0].options.categorical or {v.kind for v in own} - {"text", "empty"}:
            continue
        numbers, others, words = 0, 0, Counter[str]()
        for values in own:
            here, not_here, frequent = values.numbers_and_words()
            numbers, others, words = numbers + here, others + not_here, words + frequent
        listed_by = [
            s.columns[name].categories or {} for s in summaries.values() if name in s.columns
        ]
        wordless = any(texts and not texts.keys() & words.keys() for texts in listed_by)
        if words and numbers > others and not wordless:
            ranked = sorted(words, key=lambda word: (-words[word], word))
            found.setdefault(tuple(ranked[:_MOST_WORDS]), []).append(name)
    return [
        f"{'Column' if len(names) == 1 else 'Columns'} {list_of([quoted(name) for name in names])}: most "
        f"values are numbers or dates, but words such as {quoted(words[0])} keep them from being read so; "
        "if the words mean missing values, add "
        f"{' '.join(f'--missing-values {quoted(word)}' for word in words)}."
        for words, names in found.items()
    ]


def agreement(tables: Tables) -> Preprocessing:
    """Return the preprocessing of all clients; an error names the file."""
    try:
        preprocessing, notes = agree(tables.summaries, tables.options)
    except DisagreementError as error:
        raise tables.disagreement(error) from None
    classes, rows = (
        len(preprocessing.labels.classes),
        sum(s.rows for s in tables.summaries.values()),
    )
    if classes > _MANY_CLASSES and rows < _FEW_ROWS * classes:
        notes.append(
            f"The label has {classes} classes with {rows / classes:.1f} rows each on average, which is too "
            "few to learn them well; check --label, or join rare classes."
        )
    tables.notes.extend(note for note in notes if note not in tables.notes)
    if tables.options.no_header:  # so that a later file without the label fits, too
        names = tuple(tables.files[0].file.header)
        preprocessing = replace(preprocessing, written=replace(preprocessing.written, names=names))
    return preprocessing


def _summarise_one_by_one(
    files: list[ClientsFile], options: TableOptions
) -> dict[str, ClientSummary]:
    """Summarise clients that have one file each."""
    summaries: dict[str, ClientSummary] = {}
    for own in files:
        summaries |= _summaries([own])
    of_client = {own.names[0]: own for own in files}

    def read_as_text(columns: dict[str, set[str]]) -> dict[str, ClientSummary]:
        found: dict[str, ClientSummary] = {}
        for client, wanted in columns.items():
            of_client[client].as_categories |= wanted
            of_client[client].read()
            found |= _summaries([of_client[client]])
        return found

    return agree_on_kinds(summaries, options, read_as_text)


def _summarise_together(
    files: list[ClientsFile], options: TableOptions
) -> dict[str, ClientSummary]:
    """Summarise clients that a column names; a client may have rows in several files."""
    for name in {name for own in files for name in own.used}:
        if len({own.kind(name) for own in files if name in own.used} - {"empty"}) > 1:
            for own in files:  # its texts are counted, so they are needed as they are written
                own.file.read({name}, {name})
    while True:
        summaries = _summaries(files)
        wanted = set().union(*columns_to_read_as_text(summaries, options).values())
        if wanted <= files[0].as_categories:
            return summaries
        for own in files:
            own.as_categories |= wanted
            own.read()


def _summaries(files: list[ClientsFile]) -> dict[str, ClientSummary]:
    """Return the summaries of all clients that have rows in some files."""
    names = dict.fromkeys(name for own in files for name in own.used)
    options = files[0].options
    target = options.label if options.task == "regression" else None
    parts: dict[str, list[ClientPart]] = {}
    owned: dict[str, set[str]] = {}
    vectors: dict[str, dict[str, int]] = {}
    labels: dict[str, Counter[str]] = {}
    unlabelled: Counter[str] = Counter()
    for own in files:
        columns = dict.fromkeys(names, ColumnValues.absent(own.file.rows))
        for name in own.used:
            columns[name] = replace(own.file.columns[name], kind=own.kind(name))
        if target is not None:
            columns[target] = own.file.columns[target]
        values = own.labels()
        order = stable_order(own.clients, len(own.names))
        ends = np.cumsum(counts_of(own.clients, len(own.names)))
        for client, rows in zip(own.names, np.split(order, ends[:-1]), strict=True):
            missing, counts = values.text_counts(rows)
            unlabelled[client] += missing
            labels.setdefault(client, Counter()).update(counts)
            labelled = values.present(rows) if missing else rows
            parts.setdefault(client, []).append(ClientPart(columns, labelled))
            owned.setdefault(client, set()).update(own.used)
            vectors.setdefault(client, {}).update(own.file.vectors)
    ignored = dict.fromkeys((n for own in files for n in own.ignored), ColumnSummary("empty", 0))
    return {
        client: ClientSummary(
            sum(len(part.rows) for part in own),
            unlabelled[client],
            {
                **summarise_columns(own, [n for n in names if n in owned[client]], files[0].listed),
                **ignored,
            },
            dict(labels[client]),
            None if target is None else summarise_columns(own, [target])[target],
            vectors[client],
        )
        for client, own in parts.items()
    }


# ---------------------------------------------------------------------- later files


@dataclass(frozen=True)
class Rows:
    """The rows of a file that came after training.

    Attributes:
        matrix: ``(n, d)`` float32.
        labels: class indices ``(n,)``, -1 where the label is missing, or numbers to predict, NaN where
            missing; ``None`` without a label column.
        clients: the client of each row, if the file has the client column; else ``None``.
        unknown_labels: texts that were not a class in training.
        notes: remarks for the user.
        ids: the columns that identify rows, as they are written, ``(n,)`` each.
    """

    matrix: NDArray[np.float32]
    labels: IntArray | FloatArray | None
    clients: list[str] | None
    unknown_labels: list[str]
    notes: list[str]
    ids: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def labelled(self) -> NDArray[np.bool_]:
        """Whether each row has a label that training knows, ``(n,)``."""
        if self.labels is None:
            return np.zeros(len(self.matrix), dtype=bool)
        return is_known(self.labels)


def read_rows(
    path: Path,
    preprocessing: Preprocessing,
    *,
    label_needed: bool = False,
    ids: Sequence[str] = (),
    notify: Notify = lambda _: None,
) -> Rows:
    """Return a later file as the model expects it; columns are found by name.

    Args:
        path: the file.
        preprocessing: of the model.
        label_needed: raise if the label column is missing.
        ids: further columns that identify rows.
        notify: called with a line before the file is read.
    """
    find_tables([path])
    file = TableFile(path, notify, preprocessing.written)
    for name in ids:
        if name not in file.header:
            raise TableError(path, f"there is no column {quoted(name)} for --id.")
    ids = [name for name in dict.fromkeys((*preprocessing.ids, *ids)) if name in file.header]
    preprocessing = replace(preprocessing, ids=tuple(ids))
    notes = preprocessing.check_header(
        path, file.header, label_needed=label_needed, vectors=file.vectors
    )
    label, client = preprocessing.labels.name, preprocessing.client_column
    named = {name for name in (label, client, *ids) if name in file.header}
    texts = named | preprocessing.text_columns({})
    if preprocessing.labels.scaling is not None and label not in ids:
        texts.discard(label)
    file.read({*named, *(column.name for column in preprocessing.used)}, texts)
    encoded = _encoded(file, preprocessing)
    labels, clients = None, None
    unknown: list[str] = []
    if label in file.header:
        try:
            labels, unknown = preprocessing.labels.encode_column(file.columns[label])
        except ValueKindError as error:
            raise TableError(path, str(error), public=error.public) from None
    if client is not None and client in file.header:
        codes, names = file.columns[client].categories()
        clients = [names[code] if code >= 0 else "" for code in codes.tolist()]
    notes += [
        f"{path.name}: column {quoted(column)} has {counted(count, 'value')} that no client had in "
        "training."
        for column, count in encoded.unknown.items()
    ]
    found_ids = {name: file.columns[name].as_texts() for name in ids}
    matrix = np.concatenate(list(encoded.blocks()))
    return Rows(matrix, labels, clients, sorted(unknown), notes, found_ids)


def _encoded(file: TableFile, preprocessing: Preprocessing) -> EncodedRows:
    """Encode the rows of a file, after reading the columns that are not kept yet."""
    used = {column.name for column in preprocessing.used}
    file.read(used, preprocessing.text_columns(file.columns))
    return preprocessing.encode(file.path, file.columns, file.rows)
