"""From a table to the matrix that learners see, as all clients agreed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedgmm.core.checks import NonNegativeInt, Text, Texts, check_fields, integer, number
from fedgmm.data.tables.columns import FloatArray, Kind, categories, kind_of, numbers, stored_kind
from fedgmm.data.tables.errors import TableError, listed, quoted
from fedgmm.data.tables.labels import Labels

Role = Literal["number", "date", "category", "ignored"]

OTHER = "(other)"
MISSING_NAME = "(missing)"
TRUTH = ("false", "true")
_FARTHEST = 1e12  # deviations; n rows of the training cannot lie farther than √n
KIND_NAMES: dict[Kind, str] = {
    "number": "numbers",
    "date": "dates",
    "boolean": "true and false",
    "text": "text",
}


def _check_split(name: str, value: Any) -> None:
    """Raise unless ``value`` holds the shares of training, validation and test rows."""
    fits = isinstance(value, (list, tuple)) and len(value) == 3
    valid = fits and all(type(one) in (int, float) and one >= 0 for one in value)
    if not valid or abs(sum(value) - 1.0) > 1e-9 or not value[0]:
        raise ValueError(
            f"{name} must be three shares, of training, validation and test rows, that sum to 1, "
            f"got {value!r}."
        )


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
        client: what the client of the only file is called; ``None`` takes the file's name.
    """

    label: Text | None
    client_column: Text | None = None
    categorical: Texts = ()
    ignore: Texts = ()
    max_categories: Annotated[int, integer(2)] = 50
    indicator_from: Annotated[float, number(least=0, most=1)] = 0.01
    split: Annotated[tuple[float, float, float], _check_split] = (0.6, 0.2, 0.2)
    seed: NonNegativeInt = 0
    client: Text | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.client is not None and self.client_column is not None:
            raise ValueError(
                "client and client_column cannot both be given; leave out one of them."
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
            (one for both where there are two), ``"ignored"`` may be there and is not used.
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
        known = KIND_NAMES["date" if self.role == "date" else "number"]
        raise ValueError(
            f"the column {quoted(self.name)} holds {KIND_NAMES[kind]}{such} where training had {known}"
        )

    def _fill_categories(self, values: pa.Array, out: FloatArray) -> int:
        codes, texts = categories(values, whole_numbers=True)
        if self.categories == TRUTH:
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
                f"the column {quoted(self.name)} holds {KIND_NAMES[kind]} where training had "
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
            if column.role != "ignored" and column.name not in here:
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
