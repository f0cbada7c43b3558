"""From a table to the matrix that learners see, as all clients agreed.

``agree`` looks at the clients' summaries only. What it decides is the same as on pooled rows: the
means and variances of number columns, the union of the categories, which columns need an indicator of
missing values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedgmm.data.tabular.columns import FloatArray, categories, numbers, stored_kind
from fedgmm.data.tabular.files import TableError
from fedgmm.data.tabular.labels import Labels
from fedgmm.data.tabular.summaries import ClientSummary, ColumnSummary

Role = Literal["number", "date", "category", "ignored"]

OTHER = "(other)"
MISSING_NAME = "(missing)"
_MANY_CLASSES = 1000


@dataclass(frozen=True)
class TableOptions:
    """How tables are read, beyond what they say themselves.

    Attributes:
        label: the column to predict; ``None`` only to look at files.
        client_column: the column that names the client; ``None`` means one file a client.
        categorical: number columns whose values are names of groups.
        ignore: columns to leave out.
        max_categories: of one column; the rarest beyond it become one.
        indicator_from: share of missing values from which a column gets an indicator of them.
        split: shares of training, validation and test rows within every client.
        seed: of the split.
    """

    label: str | None
    client_column: str | None = None
    categorical: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    max_categories: int = 50
    indicator_from: float = 0.01
    split: tuple[float, float, float] = (0.6, 0.2, 0.2)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_categories < 2:
            raise ValueError(f"max_categories must be at least 2, got {self.max_categories!r}.")
        if not 0.0 <= self.indicator_from <= 1.0:
            raise ValueError(
                f"indicator_from must lie between 0 and 1, got {self.indicator_from!r}."
            )
        if self.label is not None and self.client_column == self.label:
            raise ValueError(f"The label and the client cannot both be column {self.label!r}.")
        for name in (self.label, self.client_column):
            if name is not None and name in self.ignore:
                raise ValueError(f"Column {name!r} is needed and cannot be ignored.")


@dataclass(frozen=True)
class Column:
    """What becomes of one column.

    Attributes:
        name: in the file.
        role: ``"number"`` and ``"date"`` are standardised, ``"category"`` is one column a category
            (one for both where there are two), ``"ignored"`` must be there and is not used.
        mean: of all clients' values; missing ones are put there.
        scale: their deviation, or one where all are equal.
        categories: sorted, ``"(other)"`` last where the rarest were joined.
        indicator: whether a column of ones and zeros tells which values are missing.
        reason: why it is ignored.
    """

    name: str
    role: Role
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()
    indicator: bool = False
    reason: str = ""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns that it becomes."""
        if self.role == "ignored":
            return ()
        missing = (f"{self.name}={MISSING_NAME}",) if self.indicator else ()
        if self.role != "category":
            return (self.name, *missing)
        shown = self.categories[1:] if len(self.categories) == 2 else self.categories
        return (*(f"{self.name}={category}" for category in shown), *missing)

    def fill(self, values: pa.Array, out: FloatArray) -> int:
        """Write the values into ``out`` ``(k, n)``; how many categories were unknown."""
        if self.role == "category":
            return self._fill_categories(values, out)
        found = numbers(values)
        if found is None:
            raise ValueError(f"column {self.name!r} holds text where numbers belong")
        missing = np.isnan(found)
        np.subtract(found, self.mean, out=out[0])
        out[0] /= self.scale
        out[0][missing] = 0.0
        if self.indicator:
            out[1] = missing
        return 0

    def _fill_categories(self, values: pa.Array, out: FloatArray) -> int:
        codes, texts = categories(values)
        if self.categories == ("false", "true"):
            texts = [text.lower() for text in texts]
        place = {category: index for index, category in enumerate(self.categories)}
        unknown = place.get(OTHER, len(self.categories))
        missing = len(self.categories) + 1
        lookup = np.array([*(place.get(text, unknown) for text in texts), missing], dtype=np.int64)
        own = lookup[codes]  # the code of a missing value is -1: the last
        first = 1 if len(self.categories) == 2 else 0
        for row, index in enumerate(range(first, len(self.categories))):
            out[row] = own == index
        if self.indicator:
            out[-1] = own == missing
        return int((own == len(self.categories)).sum())


@dataclass(frozen=True)
class Preprocessing:
    """Everything that turns a later file into what the model expects.

    Attributes:
        columns: in the order of the first client's file.
        labels: the label column and its classes.
        client_column: the column that names the client, if there is one.
    """

    columns: tuple[Column, ...]
    labels: Labels
    client_column: str | None = None
    _unknown: Counter[str] = field(default_factory=Counter, compare=False, repr=False)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns of the matrix, ``(d,)``."""
        return tuple(output for column in self.columns for output in column.outputs)

    def check_header(
        self, path: Any, names: Collection[str], *, label_needed: bool = False
    ) -> None:
        """Raise :class:`TableError` for the first column that is missing or that nobody knows."""
        here = set(names)
        for column in self.columns:
            if column.name not in here:
                raise TableError(path, f"the column {column.name!r} is missing.")
        if label_needed and self.labels.name not in here:
            raise TableError(path, f"the label column {self.labels.name!r} is missing.")
        known = {column.name for column in self.columns}
        known |= {self.labels.name, self.client_column or ""}
        for name in names:
            if name not in known:
                raise TableError(
                    path, f"the column {name!r} was not there in training; take it out."
                )

    def transform(self, path: Any, batch: pa.RecordBatch) -> NDArray[np.float32]:
        """The matrix of a batch, ``(n, d)``, in any order of its columns."""
        out = np.empty((len(self.feature_names), len(batch)))
        first = 0
        for column in self.columns:
            size = len(column.outputs)
            if not size:
                continue
            values = batch.column(column.name)
            if stored_kind(values.type) is None:
                raise TableError(
                    path,
                    f"the column {column.name!r} holds {values.type}, which is no table value.",
                )
            try:
                unknown = column.fill(values, out[first : first + size])
            except ValueError as error:
                raise TableError(
                    path, f"{error}; the model was trained on numbers there."
                ) from None
            if unknown:
                self._unknown[column.name] += unknown
            first += size
        return np.ascontiguousarray(out.T, dtype=np.float32)

    def unknown_categories(self) -> dict[str, int]:
        """How many values so far were categories that no client had in training, per column."""
        return dict(self._unknown)

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "columns": [asdict(column) for column in self.columns],
            "labels": self.labels.record(),
            "client_column": self.client_column,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Preprocessing:
        """The inverse of :meth:`record`."""
        columns = tuple(
            Column(**{**column, "categories": tuple(column["categories"])})
            for column in record["columns"]
        )
        for column in columns:
            if column.role not in ("number", "date", "category", "ignored") or not (
                math.isfinite(column.mean) and column.scale > 0
            ):
                raise ValueError(f"the preprocessing of column {column.name!r} makes no sense")
        return cls(columns, Labels.from_record(record["labels"]), record["client_column"])


# ---------------------------------------------------------------------- agreement of the clients


class DisagreementError(ValueError):
    """Clients whose columns do not fit together.

    Attributes:
        client: whose file it is about.
        column: which column.
        problem: in words.
    """

    def __init__(self, client: str, column: str, problem: str) -> None:
        super().__init__(f"Client {client!r}: {problem}")
        self.client, self.column, self.problem = client, column, problem


def agree(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> tuple[Preprocessing, list[str]]:
    """One preprocessing for all clients, from their summaries, and what is worth knowing about it.

    Raises:
        DisagreementError: a client that lacks a column, has one more, or has another kind of values.
    """
    columns, notes = agree_on_columns(summaries, options)
    if not any(column.outputs for column in columns):
        raise ValueError("No column is left to learn from.")
    if options.label is None:
        raise ValueError("No label column was given; say which one is to be predicted.")
    labels = Labels.agreed(options.label, [s.labels for s in summaries.values()])
    return Preprocessing(tuple(columns), labels, options.client_column), notes


def agree_on_columns(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> tuple[list[Column], list[str]]:
    """What becomes of each column, and what is worth knowing about it."""
    clients = list(summaries)
    names = list(summaries[clients[0]].columns)
    _check_same_columns(summaries, names, clients[0])
    unknown = [name for name in (*options.categorical, *options.ignore) if name not in names]
    if unknown:
        raise ValueError(f"There is no column {unknown[0]!r}; the columns are {', '.join(names)}.")
    notes: list[str] = []
    rows = sum(summary.rows for summary in summaries.values())
    columns = []
    for name in names:
        own = {client: summary.columns[name] for client, summary in summaries.items()}
        column = _agree_on(name, own, rows, options)
        if column.role == "ignored" and name not in options.ignore:
            notes.append(f"Column {name!r} is not used: {column.reason}.")
        if column.categories and column.categories[-1] == OTHER:
            notes.append(
                f"Column {name!r} has many categories: all but the {len(column.categories) - 1} most "
                "frequent are joined."
            )
        columns.append(column)
    return columns, notes


def _check_same_columns(
    summaries: Mapping[str, ClientSummary], names: list[str], first: str
) -> None:
    for client, summary in summaries.items():
        for name in names:
            if name not in summary.columns:
                raise DisagreementError(
                    client, name, f"the column {name!r} is missing, which {first!r} has."
                )
        for name in summary.columns:
            if name not in names:
                raise DisagreementError(
                    client, name, f"there is a column {name!r}, which {first!r} does not have."
                )


def _agree_on(
    name: str, own: Mapping[str, ColumnSummary], rows: int, options: TableOptions
) -> Column:
    if name in options.ignore:
        return Column(name, "ignored", reason="it was asked for")
    missing = sum(column.missing for column in own.values())
    if missing >= rows:
        return Column(name, "ignored", reason="it has no values")
    indicator = missing > 0 and missing >= options.indicator_from * rows
    kinds = {column.kind for column in own.values()} - {"empty"}
    if kinds <= {"number", "date"} and name not in options.categorical:
        if len(kinds) > 1:
            _disagree(name, own)
        return _number_column(name, "date" if "date" in kinds else "number", own, indicator)
    if kinds & {"number", "date"}:  # the caller reads such columns as text, if that can help
        _disagree(name, own)
    return _category_column(name, own, indicator, options)


def _disagree(name: str, own: Mapping[str, ColumnSummary]) -> None:
    words = {"number": "numbers", "date": "dates", "boolean": "true and false", "text": "text"}
    first, usual = next((c, s) for c, s in own.items() if s.kind not in ("empty", "text"))
    client, odd = next((c, s) for c, s in own.items() if s.kind not in ("empty", usual.kind))
    example = next(iter(sorted(odd.categories or {})), None)
    such = f" such as {example!r}" if example is not None else ""
    raise DisagreementError(
        client,
        name,
        f"the column {name!r} holds {words[odd.kind]}{such}, where {first!r} has "
        f"{words[usual.kind]}; correct it, ignore the column or name it as categorical.",
    )


def _number_column(
    name: str, role: Role, own: Mapping[str, ColumnSummary], indicator: bool
) -> Column:
    """Mean and deviation of the pooled values.

    With ``n = Σ n_c``: ``mean = Σ n_c mean_c / n`` and ``variance = Σ [s_c + n_c (mean_c - mean)²] / n``.
    """
    told = [column for column in own.values() if column.count]
    count = math.fsum(column.count for column in told)
    mean = math.fsum(column.count * column.mean for column in told) / count
    squares = math.fsum(
        column.squares + column.count * (column.mean - mean) ** 2 for column in told
    )
    variance = squares / count
    if not variance > 1e-24 * (1.0 + mean**2):
        if not indicator:
            return Column(name, "ignored", mean, reason="all its values are equal")
        return Column(name, role, mean, 1.0, indicator=True)
    return Column(name, role, mean, math.sqrt(variance), indicator=indicator)


def _category_column(
    name: str, own: Mapping[str, ColumnSummary], indicator: bool, options: TableOptions
) -> Column:
    total: Counter[str] = Counter()
    for column in own.values():
        if column.categories is None:
            return Column(
                name, "ignored", reason="it has so many different values that they look like names"
            )
        total.update(column.categories)
    kinds = {column.kind for column in own.values()} - {"empty"}
    if kinds == {"boolean"}:
        total.update({"false": 0, "true": 0})
    elif "boolean" in kinds:  # true and false at one client, other words at another
        total = Counter(total)
    if len(total) == 1 and not indicator:
        return Column(name, "ignored", reason="all its values are equal")
    chosen = sorted(total)
    if len(total) > options.max_categories:
        # most frequent first, ties by name: the same for every order of clients
        ranked = sorted(total, key=lambda text: (-total[text], text))
        chosen = [*sorted(ranked[: options.max_categories - 1]), OTHER]
    return Column(name, "category", categories=tuple(chosen), indicator=indicator)


def needs_text(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> dict[str, set[str]]:
    """Columns that some client must read again as text, because others have few different texts there.

    Returns:
        For each client that has numbers or dates there, the names of those columns.
    """
    again: dict[str, set[str]] = {}
    first: Sequence[str] = list(next(iter(summaries.values())).columns)
    for name in first:
        own = {c: s.columns[name] for c, s in summaries.items() if name in s.columns}
        texts = [s.categories for s in own.values() if s.kind in ("text", "boolean")]
        wanted = name in options.categorical or (
            texts and all(t is not None and len(t) <= options.max_categories for t in texts)
        )
        typed = {c for c, s in own.items() if s.kind in ("number", "date")}
        if wanted and typed and name not in options.ignore:
            for client in typed:
                again.setdefault(client, set()).add(name)
    return again
