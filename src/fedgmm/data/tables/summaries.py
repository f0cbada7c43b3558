"""Summaries of a client's table: counts, sums and lists of categories, but never a row.

A number column is summarised by its count, its mean and the sum of squares around the mean. From these
the server gets exactly the mean and variance of the pooled rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from fedgmm.core.moments import Pooled, pool
from fedgmm.data.tables.columns import ColumnValues, FloatArray, IntArray, Kind, without_point
from fedgmm.support.scratch import row_blocks, touched

_BLOCK_ROWS = 16_384
_ALWAYS_LISTED = 100  # any client may list this many distinct texts
_MOST_LISTED = 2000  # and none lists more than this many
_NAMES_FROM = 20  # from this many distinct texts on, texts that hardly ever repeat are names


def look_like_names(distinct: int, present: int) -> bool:
    """Return whether so many distinct texts of ``present`` values are names rather than categories."""
    unique = distinct >= _NAMES_FROM and distinct > 0.9 * present
    return unique or distinct > max(_ALWAYS_LISTED, present // 2) or distinct > _MOST_LISTED


@dataclass(frozen=True)
class ColumnSummary:
    """One column of one client.

    Attributes:
        kind: kind of its values.
        missing: number of missing values.
        count: number of numbers; zero for text.
        mean: mean of the numbers.
        squares: ``Σ (x - mean)²``.
        categories: how often each text occurs; ``None`` if the texts look like names, identifiers or
            free text, which never leave a client.
        unlisted: number of distinct texts if they are not listed.
        orders: for dates such as ``3/4/2020`` the moments (count, mean, squares, mean_rest) in each
            order in which all of them can be read.
        mean_rest: the part of the mean that rounding left out. It matters for numbers far from zero,
            whose means differ in their last digits only.
    """

    kind: Kind
    missing: int
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    categories: Mapping[str, int] | None = field(default_factory=dict)
    mean_rest: float = 0.0
    unlisted: int = 0
    orders: Mapping[str, tuple[int, float, float, float]] = field(default_factory=dict)

    def in_order(self, order: str) -> ColumnSummary:
        """Return the summary of dates that are read in an order."""
        if order not in self.orders:
            return self
        count, mean, squares, rest = self.orders[order]
        return replace(self, count=count, mean=mean, squares=squares, mean_rest=rest)


@dataclass(frozen=True)
class ClientSummary:
    """Everything that leaves a client before training.

    Attributes:
        rows: number of rows with a label.
        unlabelled: number of rows without a label; they are left out.
        columns: in the order of the client's file; ignored columns come last and are empty.
        labels: how often each label occurs, as it is written; numbers to predict count as one label.
        target: the numbers to predict; ``None`` for classes.
        vectors: columns of vectors and their lengths; ``columns`` has every entry, such as ``v_0``.
    """

    rows: int
    unlabelled: int
    columns: Mapping[str, ColumnSummary]
    labels: Mapping[str, int]
    target: ColumnSummary | None = None
    vectors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientPart:
    """The rows of one client in one file: all columns, and the indices of its rows ``(n,)``."""

    columns: Mapping[str, ColumnValues]
    rows: IntArray


def summarise_columns(
    parts: Sequence[ClientPart], names: Iterable[str], listed: Collection[str] = ()
) -> dict[str, ColumnSummary]:
    """Return the summary of each column of a client, over all files that hold its rows.

    Texts of the columns in ``listed`` are listed even if they look like names.
    """
    kinds: dict[str, Kind] = {}
    for name in names:
        found = {part.columns[name].kind for part in parts} - {"empty"}
        kinds[name] = "empty" if not found else found.pop() if len(found) == 1 else "text"
    numeric = [name for name, kind in kinds.items() if kind in ("number", "date")]
    rows = sum(len(part.rows) for part in parts)
    numbers = dict(zip(numeric, _number_summaries(parts, numeric, kinds, rows), strict=True))
    for name in numeric:
        if any(part.columns[name].orders for part in parts):
            numbers[name] = _dates_in_orders(parts, name, rows)
    return {
        name: numbers[name] if name in numbers else _text_summary(parts, name, kind, name in listed)
        for name, kind in kinds.items()
    }


def _number_summaries(
    parts: Sequence[ClientPart], names: list[str], kinds: Mapping[str, Kind], rows: int
) -> list[ColumnSummary]:
    if not names or not rows:
        return [ColumnSummary(kinds[name], 0) for name in names]
    # sums that are too large become infinite, and the agreement then ignores the column
    with np.errstate(over="ignore", invalid="ignore"):
        blocks = []
        for part in parts:
            numbers = [cast("FloatArray", part.columns[name].numbers) for name in names]
            whole_file = len(part.rows) == len(numbers[0])  # then its rows are in order
            for place in row_blocks(len(part.rows), _BLOCK_ROWS):
                rows_here = place if whole_file else part.rows[place]
                blocks.append(_moments(np.stack([one[rows_here] for one in numbers])))
        counts, means, squares, rests = pool(*map(np.stack, zip(*blocks, strict=True)))
    return [
        ColumnSummary(
            kinds[name],
            rows - int(counts[j]),
            int(counts[j]),
            float(means[j]),
            float(squares[j]),
            mean_rest=float(rests[j]),
        )
        for j, name in enumerate(names)
    ]


def _dates_in_orders(parts: Sequence[ClientPart], name: str, rows: int) -> ColumnSummary:
    """Summarise dates such as ``3/4/2020`` in each order in which all files can be read."""
    possible = [part.columns[name].orders for part in parts if part.columns[name].orders]
    orders = [order for order in possible[0] if all(order in own for own in possible)]
    found = {}
    for order in orders:
        read = []
        for part in parts:
            own = part.columns[name]
            days = own.orders.get(order, own.numbers)
            read.append(ClientPart({name: replace(own, numbers=days)}, part.rows))
        found[order] = _number_summaries(read, [name], {name: "date"}, rows)[0]
    if not found:  # one file has the day first, another the month
        return _text_summary(parts, name, "text", False)
    moments = {o: (s.count, s.mean, s.squares, s.mean_rest) for o, s in found.items()}
    return replace(next(iter(found.values())), orders=moments)


def _moments(values: FloatArray) -> Pooled:
    """Return the moments of values ``(k, n)``, NaN where missing; each is ``(k,)``.

    The values are overwritten.
    """
    missing = np.isnan(values)
    count = (values.shape[1] - missing.sum(1)).astype(np.float64)
    values[missing] = 0.0
    mean = values.sum(1) / np.maximum(count, 1.0)
    values -= mean[:, None]
    values[missing] = 0.0
    touched(values.nbytes)
    rest = values.sum(1) / np.maximum(count, 1.0)
    return Pooled(count, mean, np.square(values, out=values).sum(1) - count * rest**2, rest)


def _text_summary(
    parts: Sequence[ClientPart], name: str, kind: Kind, listed: bool
) -> ColumnSummary:
    counts: Counter[str] = Counter()
    missing = 0
    for part in parts:
        absent, found = part.columns[name].text_counts(part.rows)
        missing += absent
        for text, count in found.items():
            counts[without_point(text)] += count
    if not listed and look_like_names(len(counts), counts.total()):
        return ColumnSummary(kind, missing, categories=None, unlisted=len(counts))
    if len(counts) > _MOST_LISTED:  # ties by name, so that the order of rows does not matter
        ranked = sorted(counts, key=lambda text: (-counts[text], text))
        counts = Counter({text: counts[text] for text in ranked[:_MOST_LISTED]})
    return ColumnSummary(kind, missing, categories=dict(counts))
