"""What all clients agree on, from their summaries alone.

It is the same as on pooled rows: the means and variances of number columns, the union of the
categories, which columns need an indicator of missing values.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from fedgmm.data.tables.columns import kind_of
from fedgmm.data.tables.errors import NOT_EVERYWHERE, listed, quoted
from fedgmm.data.tables.labels import Labels
from fedgmm.data.tables.preprocessing import (
    KIND_NAMES,
    OTHER,
    TRUTH,
    Column,
    Preprocessing,
    Role,
    TableOptions,
)
from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary, look_like_names

_NAMES = "it has so many different values that they look like names"
_TOO_LARGE = "its numbers are too large to be squared"
_OTHER_DATE = re.compile(r"\d{1,2}([./-])\d{1,2}\1(\d{2}|\d{4})( .*)?")  # not ISO 8601
_ROUNDING = 1e-12  # of the mean: what rounding leaves of a deviation that is zero


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
        labels = Labels.absent()
    else:
        labels = Labels.agreed(options.label, [s.labels for s in summaries.values()])
    return Preprocessing(tuple(columns), labels, options.client_column), notes


def agree_on_columns(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> tuple[list[Column], list[str]]:
    """What becomes of each column, and what is worth knowing about it."""
    clients = list(summaries)
    # a column that is ignored may be at some clients only
    names = [name for name in summaries[clients[0]].columns if name not in options.ignore]
    _check_same_columns(summaries, names, clients[0], options.ignore)
    names += dict.fromkeys(n for s in summaries.values() for n in s.columns if n in options.ignore)
    for name in (*options.categorical, *options.ignore):
        if name not in (*names, options.label, options.client_column):
            raise ValueError(f"There is no column {quoted(name)}; the columns are {listed(names)}.")
    notes: list[str] = []
    rows = sum(summary.rows for summary in summaries.values())
    columns = []
    for name in names:
        own = {
            c: summary.columns[name] for c, summary in summaries.items() if name in summary.columns
        }
        column = _agree_on(name, own, rows, options)
        if column.role == "ignored" and name not in options.ignore:
            notes.append(f"Column {quoted(name)} is not used: {column.reason}.")
        if column.categories and column.categories[-1] == OTHER:
            notes.append(
                f"Column {quoted(name)} has many categories: all but the {len(column.categories) - 1} most "
                "frequent are joined."
            )
        if column.categories and all(map(_OTHER_DATE.fullmatch, set(column.categories) - {OTHER})):
            notes.append(
                f"Column {quoted(name)} looks like dates, such as {column.categories[0]}, but is used as "
                "categories; write dates as 2024-12-31."
            )
        columns.append(column)
    return columns, notes


def _check_same_columns(
    summaries: Mapping[str, ClientSummary], names: list[str], first: str, ignore: Collection[str]
) -> None:
    for client, summary in summaries.items():
        for name in names:
            if name not in summary.columns:
                raise DisagreementError(
                    client,
                    name,
                    f"the column {quoted(name)} is missing, which {first!r} has; {NOT_EVERYWHERE}.",
                )
        for name in summary.columns:
            if name not in names and name not in ignore:
                raise DisagreementError(
                    client,
                    name,
                    f"there is a column {quoted(name)}, which {first!r} does not have; {NOT_EVERYWHERE}.",
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
        f"the column {quoted(name)} holds {KIND_NAMES[odd.kind]}{such}, where {first!r} has "
        f"{KIND_NAMES[usual]}; correct it, ignore the column or name it as categorical.",
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
        return Column(name, "category", categories=TRUTH, indicator=indicator)
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
