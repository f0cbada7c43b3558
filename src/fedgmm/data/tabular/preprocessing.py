"""From a table to the matrix that learners see, as all clients agreed.

``agree`` looks at the clients' summaries only. What it decides is the same as on pooled rows: the
means and variances of number columns, the union of the categories, which columns need an indicator of
missing values.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedgmm.data.tabular.columns import FloatArray, Kind, categories, kind_of, numbers, stored_kind
from fedgmm.data.tabular.errors import TableError, listed, quoted
from fedgmm.data.tabular.labels import Labels
from fedgmm.data.tabular.summaries import ClientSummary, ColumnSummary, look_like_names

Role = Literal["number", "date", "category", "ignored"]

OTHER = "(other)"
MISSING_NAME = "(missing)"
_TRUTH = ("false", "true")
_NAMES = "it has so many different values that they look like names"
_TOO_LARGE = "its numbers are too large to be squared"
_ROUNDING = 1e-12  # of the mean: what rounding leaves of a deviation that is zero
_FARTHEST = 1e12  # deviations; n rows of the training cannot lie farther than √n
_KIND_NAMES: dict[Kind, str] = {
    "number": "numbers",
    "date": "dates",
    "boolean": "true and false",
    "text": "text",
}


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
        """Write the values into ``out`` ``(k, n)``; how many categories were unknown.

        Raises:
            ValueError: values of another kind than in training.
        """
        if self.role == "category":
            return self._fill_categories(values, out)
        self._check_kind(values)
        found = numbers(values)
        assert found is not None
        missing = np.isnan(found)
        np.subtract(found, self.mean, out=out[0])
        out[0] /= self.scale
        np.clip(out[0], -_FARTHEST, _FARTHEST, out=out[0])
        out[0][missing] = 0.0
        if self.indicator:
            out[1] = missing
        return 0

    def _check_kind(self, values: pa.Array) -> None:
        # truth values are the numbers 0 and 1 wherever some client wrote them so
        fitting = ("date", "empty") if self.role == "date" else ("number", "boolean", "empty")
        kind = kind_of(values)
        if kind in fitting:
            return
        such = ""
        if kind == "text":
            odd = (
                text
                for text in values.drop_null()
                if kind_of(pa.array([text.as_py()])) not in fitting
            )
            such = f" such as {quoted(next(odd).as_py())}"
        known = _KIND_NAMES["date" if self.role == "date" else "number"]
        raise ValueError(
            f"the column {quoted(self.name)} holds {_KIND_NAMES[kind]}{such} where training had {known}"
        )

    def _fill_categories(self, values: pa.Array, out: FloatArray) -> int:
        codes, texts = categories(values, whole_numbers=True)
        if self.categories == _TRUTH:
            written = {"0": "false", "1": "true"}
            texts = [written.get(text, text.lower()) for text in texts]
        place = {category: index for index, category in enumerate(self.categories)}
        if texts and not any(text in place for text in texts) and OTHER not in place:
            self._check_strangers(values)
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

    def _check_strangers(self, values: pa.Array) -> None:
        """No value is known: texts may be new categories, but numbers are another kind of column."""
        kind = kind_of(values)
        known = {kind_of(pa.array([category])) for category in self.categories}
        if kind in ("number", "date") and kind not in known:
            raise ValueError(
                f"the column {quoted(self.name)} holds {_KIND_NAMES[kind]} where training had "
                f"{listed(self.categories)}"
            )


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
                raise TableError(path, f"the column {quoted(column.name)} is missing.")
        if label_needed and self.labels.name not in here:
            raise TableError(path, f"the label column {quoted(self.labels.name)} is missing.")
        known = {column.name for column in self.columns}
        known |= {self.labels.name, self.client_column or ""}
        for name in names:
            if name not in known:
                raise TableError(
                    path, f"the column {quoted(name)} was not there in training; take it out."
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
            check_type(path, column.name, values.type)
            try:
                unknown = column.fill(values, out[first : first + size])
            except ValueError as error:
                raise TableError(path, f"{error}.") from None
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
                math.isfinite(column.mean) and 0 < column.scale < math.inf
            ):
                raise ValueError(f"the preprocessing of column {column.name!r} makes no sense")
        return cls(columns, Labels.from_record(record["labels"]), record["client_column"])


def check_type(path: Any, name: str, kind: pa.DataType) -> None:
    """Raise :class:`TableError` for lists, pictures and other values that are no table values."""
    if stored_kind(kind) is None:
        shown = quoted(str(kind))[1:-1]
        raise TableError(path, f"the column {quoted(name)} holds {shown}, which is no table value.")


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
    for name in (*options.categorical, *options.ignore):
        if name not in (*names, options.label, options.client_column):
            raise ValueError(f"There is no column {quoted(name)}; the columns are {listed(names)}.")
    notes: list[str] = []
    rows = sum(summary.rows for summary in summaries.values())
    columns = []
    for name in names:
        own = {client: summary.columns[name] for client, summary in summaries.items()}
        column = _agree_on(name, own, rows, options)
        if column.role == "ignored" and name not in options.ignore:
            notes.append(f"Column {quoted(name)} is not used: {column.reason}.")
        if column.categories and column.categories[-1] == OTHER:
            notes.append(
                f"Column {quoted(name)} has many categories: all but the {len(column.categories) - 1} most "
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
                    client, name, f"the column {quoted(name)} is missing, which {first!r} has."
                )
        for name in summary.columns:
            if name not in names:
                raise DisagreementError(
                    client,
                    name,
                    f"there is a column {quoted(name)}, which {first!r} does not have.",
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
    if not kinds & {"number", "date"}:
        return _category_column(name, own, indicator, options)
    if kinds == {"date"}:
        return _number_column(name, "date", list(own.values()), indicator)
    if kinds <= {"number", "boolean"}:
        return _number_column(name, "number", [_zeros_and_ones(s) for s in own.values()], indicator)
    # the caller reads such columns as text, if that can help
    raise _disagreement(name, own)


def _disagreement(name: str, own: Mapping[str, ColumnSummary]) -> DisagreementError:
    """Blame the first client whose values are of another kind than those of most."""
    kinds = Counter(s.kind for s in own.values() if s.kind != "empty")
    usual = max(kinds, key=lambda kind: (kinds[kind], kind != "text"))
    first = next(client for client, s in own.items() if s.kind == usual)
    client, odd = next((c, s) for c, s in own.items() if s.kind not in ("empty", usual))
    texts = sorted(odd.categories or {})
    example = next((text for text in texts if kind_of(pa.array([text])) != usual), None)
    such = f" such as {quoted(example)}" if example is not None else ""
    return DisagreementError(
        client,
        name,
        f"the column {quoted(name)} holds {_KIND_NAMES[odd.kind]}{such}, where {first!r} has "
        f"{_KIND_NAMES[usual]}; correct it, ignore the column or name it as categorical.",
    )


def _zeros_and_ones(told: ColumnSummary) -> ColumnSummary:
    """Counts of true and false as the moments of 0 and 1."""
    if told.kind != "boolean":
        return told
    counts = _lowered(told.categories or {})
    ones, zeros = counts["true"], counts["false"]
    count = ones + zeros
    return ColumnSummary("number", told.missing, count, ones / count, ones * zeros / count)


def _lowered(counts: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for text, count in counts.items():
        found[text.lower()] += count
    return found


def _number_column(name: str, role: Role, own: Sequence[ColumnSummary], indicator: bool) -> Column:
    """Mean and deviation of the pooled values.

    With ``n = Σ n_c``: ``mean = Σ n_c mean_c / n`` and ``variance = Σ [s_c + n_c (mean_c - mean)²] / n``,
    where means are told as distances from the first one, so that none of their digits is lost.
    """
    told = [column for column in own if column.count]
    if not all(math.isfinite(column.mean) and math.isfinite(column.squares) for column in told):
        return Column(name, "ignored", reason=_TOO_LARGE)
    count = math.fsum(column.count for column in told)
    start = told[0].mean
    gaps = [column.mean - start + column.mean_rest for column in told]
    try:
        gap = math.fsum(c.count * own_gap for c, own_gap in zip(told, gaps, strict=True)) / count
        mean = start + gap
        squares = math.fsum(
            c.squares + c.count * (own_gap - gap) ** 2
            for c, own_gap in zip(told, gaps, strict=True)
        )
        variance = squares / count
    except OverflowError:
        return Column(name, "ignored", reason=_TOO_LARGE)
    if variance < sys.float_info.min or math.sqrt(variance) <= _ROUNDING * abs(mean):
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
            return Column(name, "ignored", reason=_NAMES)
        total.update(column.categories)
    if {column.kind for column in own.values()} <= {"boolean", "empty"}:
        total = _lowered(total)
        if len(total) == 1 and not indicator:
            return Column(name, "ignored", reason="all its values are equal")
        return Column(name, "category", categories=_TRUTH, indicator=indicator)
    if look_like_names(len(total), total.total()):
        return Column(name, "ignored", reason=_NAMES)
    if len(total) == 1 and not indicator:
        return Column(name, "ignored", reason="all its values are equal")
    chosen = sorted(total)
    if len(total) > options.max_categories:
        # most frequent first, ties by name: the same for every order of clients
        ranked = sorted(total.keys() - {OTHER}, key=lambda text: (-total[text], text))
        chosen = [*sorted(ranked[: options.max_categories - 1]), OTHER]
    return Column(name, "category", categories=tuple(chosen), indicator=indicator)


def needs_text(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> dict[str, set[str]]:
    """Columns that some client must read again as text, because others have text there.

    Numbers and dates become categories only beside a client that has few different texts.

    Returns:
        For each client that has other values there, the names of those columns.
    """
    again: dict[str, set[str]] = {}
    for name in next(iter(summaries.values())).columns:
        own = {c: s.columns[name] for c, s in summaries.items() if name in s.columns}
        texts = [s.categories for s in own.values() if s.kind == "text"]
        if not texts:
            continue
        few = all(t is not None and len(t) <= options.max_categories for t in texts)
        for client, told in own.items():
            if told.kind == "boolean" or (few and told.kind in ("number", "date")):
                again.setdefault(client, set()).add(name)
    return again


def too_many_categories(
    summaries: Mapping[str, ClientSummary], name: str, options: TableOptions
) -> bool:
    """Whether a column that was read as text turned out to hold no categories."""
    found: set[str] = set()
    for summary in summaries.values():
        own = summary.columns[name].categories if name in summary.columns else {}
        if own is None:
            return True
        found |= set(own)
    return len(found) > options.max_categories
