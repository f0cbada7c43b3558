"""What a client tells about its table: counts, sums and lists of categories; never a row.

Number columns are told by how many values there are, their mean and the sum of squares around it.
These add up over clients without loss: the mean and variance of the pooled rows follow exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedgmm.data.tables.columns import FloatArray, Kind, categories, kind_of, numbers

_ALWAYS_LISTED = 100  # distinct values that any client may list …
_EVER_LISTED = 2000  # … and those that none lists beyond
_NAMES_FROM = 20  # distinct values that may be names, if hardly any occurs twice


def look_like_names(distinct: int, present: int) -> bool:
    """Whether texts are names, numbers of persons or free text rather than categories."""
    unique = distinct >= _NAMES_FROM and distinct > 0.9 * present
    return unique or distinct > max(_ALWAYS_LISTED, present // 2) or distinct > _EVER_LISTED


@dataclass(frozen=True)
class ColumnSummary:
    """One column of one client.

    Attributes:
        kind: what its values look like.
        missing: how many values are missing.
        count: how many numbers there are; zero for text.
        mean: of the numbers.
        squares: ``Σ (x - mean)²``.
        categories: how often each text occurs; ``None`` where they look like names, numbers of
            persons or free text, which a client keeps to itself.
        mean_rest: what rounding left out of the mean; it matters for numbers far from zero, whose
            means differ in their last digits only.
    """

    kind: Kind
    missing: int
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    categories: Mapping[str, int] | None = field(default_factory=dict)
    mean_rest: float = 0.0


@dataclass(frozen=True)
class ClientSummary:
    """All that leaves a client before training.

    Attributes:
        rows: how many rows it has.
        unlabelled: how many more have no label; they are left out.
        columns: in the order of its file; those to ignore come last, as empty ones.
        labels: how often each label occurs, as it is written.
    """

    rows: int
    unlabelled: int
    columns: Mapping[str, ColumnSummary]
    labels: Mapping[str, int]


class SummaryOfColumns:
    """Adds up batches of one client's rows."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.rows = 0
        self._missing = np.zeros(len(names), dtype=np.int64)
        self._count = np.zeros(len(names))
        self._mean = np.zeros(len(names))
        self._rest = np.zeros(len(names))
        self._squares = np.zeros(len(names))
        self._kinds: list[set[Kind]] = [set() for _ in names]
        self._texts: list[Counter[str] | None] = [Counter() for _ in names]

    def add(self, batch: BatchValues, rows: NDArray[np.int64] | slice) -> None:
        """Add some rows of a batch."""
        matrix = batch.matrix[:, rows]
        self.rows += matrix.shape[1]
        self._add_numbers(batch.number_columns, matrix)
        numeric = set(batch.number_columns.tolist())
        for column, (codes, texts) in batch.texts.items():
            missing = self._add_texts(column, codes[rows], texts)
            if column not in numeric:  # else they are counted already
                self._missing[column] += missing
        for column, kind in enumerate(batch.kinds):
            self._kinds[column].add(kind)

    def _add_numbers(self, columns: NDArray[np.int64], values: FloatArray) -> None:
        """Merge counts, means and squares (Chan, Golub and LeVeque 1979); ``values`` is ``(k, n)``."""
        if not len(columns) or not values.shape[1]:
            return
        present = ~np.isnan(values)
        count = present.sum(1).astype(np.float64)
        self._missing[columns] += values.shape[1] - present.sum(1)
        filled = np.where(present, values, 0.0)
        # numbers whose squares are too large become infinite; the column is not used then
        with np.errstate(over="ignore", invalid="ignore"):
            mean = filled.sum(1) / np.maximum(count, 1.0)
            around = np.where(present, filled - mean[:, None], 0.0)
            rest = around.sum(1) / np.maximum(count, 1.0)
            squares = (around**2).sum(1) - count * rest**2
            before, total = self._count[columns], self._count[columns] + count
            share = count / np.maximum(total, 1.0)
            old_mean = np.where(before > 0, self._mean[columns], mean)
            old_rest = np.where(before > 0, self._rest[columns], rest)
            gap = (mean - old_mean) + (rest - old_rest)
            step = old_rest + gap * share
            self._mean[columns] = old_mean + step
            self._rest[columns] = step - (self._mean[columns] - old_mean)
            self._squares[columns] += squares + gap**2 * before * share
        self._count[columns] = total

    def _add_texts(self, column: int, codes: NDArray[np.int64], texts: list[str]) -> int:
        """Count texts; how many are missing."""
        counts = np.bincount(codes + 1, minlength=len(texts) + 1)
        known = self._texts[column]
        if known is not None:
            for code in np.flatnonzero(counts[1:]).tolist():
                known[texts[code]] += int(counts[code + 1])
            if len(known) > _EVER_LISTED:
                self._texts[column] = None
        return int(counts[0])

    def result(self) -> dict[str, ColumnSummary]:
        """The summary of each column."""
        return {name: self._column(index) for index, name in enumerate(self.names)}

    def _column(self, index: int) -> ColumnSummary:
        kind = _common_kind(self._kinds[index])
        missing = int(self._missing[index])
        if kind in ("number", "date"):
            return ColumnSummary(
                kind,
                missing,
                int(self._count[index]),
                float(self._mean[index]),
                float(self._squares[index]),
                mean_rest=float(self._rest[index]),
            )
        texts = self._texts[index]
        if texts is not None and look_like_names(len(texts), texts.total()):
            texts = None
        return ColumnSummary(kind, missing, categories=None if texts is None else dict(texts))


def _common_kind(kinds: set[Kind]) -> Kind:
    found = kinds - {"empty"}
    if not found:
        return "empty"
    return found.pop() if len(found) == 1 else "text"


class BatchValues:
    """The columns of a batch, read once for all clients in it.

    Attributes:
        kinds: what each column looks like in this batch.
        number_columns: which columns hold numbers or dates, ``(k,)``.
        matrix: their values with NaN for missing ones, ``(k, n)``.
        texts: codes and texts of the columns that were read as text or truth values.
    """

    def __init__(self, batch: pa.RecordBatch, as_categories: Collection[str] = ()) -> None:
        """Read a batch.

        Args:
            batch: some rows of a file.
            as_categories: columns of text that is not to be taken for numbers.
        """
        self.kinds: list[Kind] = []
        self.texts: dict[int, tuple[NDArray[np.int64], list[str]]] = {}
        columns, rows = [], []
        for index, name in enumerate(batch.schema.names):
            values = batch.column(index)
            kind = kind_of(values)
            if name in as_categories and kind != "empty":
                kind = "text"
            self.kinds.append(kind)
            if kind in ("number", "date", "empty"):
                found = numbers(values)
                assert found is not None
                columns.append(index)
                rows.append(found)
            # text that looks like numbers here may be text in the next batch
            if kind in ("text", "boolean") or (kind != "empty" and pa.types.is_string(values.type)):
                self.texts[index] = categories(values, whole_numbers=True)
        self.number_columns = np.array(columns, dtype=np.int64)
        self.matrix = np.stack(rows) if rows else np.empty((0, len(batch)))
