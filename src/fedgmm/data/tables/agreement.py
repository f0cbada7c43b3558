"""Agreement of all clients on one preprocessing, from their summaries alone.

The result is the same as for pooled rows: means and variances of number columns, the union of the
categories, and the columns that need an indicator of missing values.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedgmm.core.moments import pool
from fedgmm.data.tables.columns import TRUTH, kind_of_text
from fedgmm.data.tables.errors import NOT_EVERYWHERE, listed, quoted
from fedgmm.data.tables.preprocessing import (
    KIND_NAMES,
    OTHER,
    Column,
    Labels,
    Preprocessing,
    Role,
    TableOptions,
)
from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary, look_like_names

_NAMES = "it has so many different values that they look like names"
_TOO_LARGE = "its numbers are too large to be squared"
_CONSTANT = "all its values are equal"
_OTHER_DATE = re.compile(r"\d{1,2}([./-])\d{1,2}\1(\d{2}|\d{4})( .*)?")  # not ISO 8601
_ROUNDING = 1e-12  # relative to the mean; a smaller deviation is rounding


class DisagreementError(ValueError):
    """A client whose columns do not fit those of the others.

    Attributes:
        client: the client.
        column: the column.
        problem: one sentence.
    """

    def __init__(self, client: str, column: str, problem: str) -> None:
        super().__init__(f"Client {client!r}: {problem}")
        self.client, self.column, self.problem = client, column, problem


def agree(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> tuple[Preprocessing, list[str]]:
    """Return one preprocessing for all clients, and notes about it.

    Raises:
        DisagreementError: a client that lacks a column, has an extra one, or has values of another kind.
    """
    columns, notes = agree_on_columns(summaries, options)
    if not any(column.outputs for column in columns):
        raise ValueError("No column is left to learn from.")
    if options.label is None:
        labels = Labels.absent()
    elif options.task == "regression":
        raise ValueError("There are no learners for task='regression' yet.")
    else:
        labels = Labels.agreed(options.label, [s.labels for s in summaries.values()], options.task)
    return Preprocessing(tuple(columns), labels, options.client_column), notes


def agree_on_columns(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> tuple[list[Column], list[str]]:
    """Return the conversion of each column, and notes about them."""
    first = next(iter(summaries))
    names = [name for name in summaries[first].columns if name not in options.ignore]
    _check_same_columns(summaries, names, first, options.ignore)
    # an ignored column may be in some files only
    names += dict.fromkeys(n for s in summaries.values() for n in s.columns if n in options.ignore)
    for name in (*options.categorical, *options.ignore):
        if name not in (*names, options.label, options.client_column):
            raise ValueError(f"There is no column {quoted(name)}; the columns are {listed(names)}.")
    notes: list[str] = []
    rows = sum(summary.rows for summary in summaries.values())
    columns = []
    for name in names:
        column = _agree_on(name, _of_column(summaries, name), rows, options)
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


def _of_column(summaries: Mapping[str, ClientSummary], name: str) -> dict[str, ColumnSummary]:
    return {c: s.columns[name] for c, s in summaries.items() if name in s.columns}


def _check_same_columns(
    summaries: Mapping[str, ClientSummary], names: list[str], first: str, ignore: Collection[str]
) -> None:
    for client, summary in summaries.items():
        for name in names:
            if name not in summary.columns:
                problem = f"the column {quoted(name)} is missing, but {first!r} has it"
                raise DisagreementError(client, name, f"{problem}; {NOT_EVERYWHERE}.")
        for name in summary.columns:
            if name not in names and name not in ignore:
                problem = f"there is a column {quoted(name)}, which {first!r} does not have"
                raise DisagreementError(client, name, f"{problem}; {NOT_EVERYWHERE}.")


def _agree_on(
    name: str, own: Mapping[str, ColumnSummary], rows: int, options: TableOptions
) -> Column:
    if name in options.ignore:
        return Column(name, "ignored", reason="the options ignore it")
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
    # agree_on_kinds has already read such columns as text if that helps
    raise _disagreement(name, own)


def _disagreement(name: str, own: Mapping[str, ColumnSummary]) -> DisagreementError:
    """Blame the first client whose values are of another kind than those of most clients."""
    kinds = Counter(s.kind for s in own.values() if s.kind != "empty")
    usual = max(kinds, key=lambda kind: (kinds[kind], kind != "text"))
    first = next(client for client, s in own.items() if s.kind == usual)
    client, odd = next((c, s) for c, s in own.items() if s.kind not in ("empty", usual))
    example = next((t for t in sorted(odd.categories or {}) if kind_of_text(t) != usual), None)
    such = f" such as {quoted(example)}" if example is not None else ""
    return DisagreementError(
        client,
        name,
        f"the column {quoted(name)} holds {KIND_NAMES[odd.kind]}{such}, but {first!r} has "
        f"{KIND_NAMES[usual]}; correct it, ignore the column or declare it categorical.",
    )


def _zeros_and_ones(own: ColumnSummary) -> ColumnSummary:
    """Return counts of true and false as the moments of 0 and 1."""
    if own.kind != "boolean":
        return own
    counts = _lowered(own.categories or {})
    ones, zeros = counts["true"], counts["false"]
    count = ones + zeros
    return ColumnSummary("number", own.missing, count, ones / count, ones * zeros / count)


def _lowered(counts: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for text, count in counts.items():
        found[text.lower()] += count
    return found


def _number_column(name: str, role: Role, own: Sequence[ColumnSummary], indicator: bool) -> Column:
    """Return the conversion of numbers by the mean and deviation of the pooled values."""
    moments = np.array([(c.count, c.mean, c.squares, c.mean_rest) for c in own if c.count])
    with np.errstate(over="ignore", invalid="ignore"):
        counts, means, squares, _ = pool(*moments.T[..., None])
    mean, variance = float(means[0]), float(squares[0] / counts[0])
    if not (math.isfinite(mean) and math.isfinite(variance)):
        return Column(name, "ignored", reason=_TOO_LARGE)
    if variance < sys.float_info.min or math.sqrt(variance) <= _ROUNDING * abs(mean):
        if not indicator:
            return Column(name, "ignored", mean, reason=_CONSTANT)
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
    truth = {column.kind for column in own.values()} <= {"boolean", "empty"}
    if truth:
        total = _lowered(total)
    elif look_like_names(len(total), total.total()):
        return Column(name, "ignored", reason=_NAMES)
    if len(total) == 1 and not indicator:
        return Column(name, "ignored", reason=_CONSTANT)
    if truth:
        return Column(name, "category", categories=TRUTH, indicator=indicator)
    chosen = sorted(total)
    if len(total) > options.max_categories:
        # most frequent first and ties by name, so the order of clients does not matter
        ranked = sorted(total.keys() - {OTHER}, key=lambda text: (-total[text], text))
        chosen = [*sorted(ranked[: options.max_categories - 1]), OTHER]
    return Column(name, "category", categories=tuple(chosen), indicator=indicator)


# ---------------------------------------------------------------------- columns of several kinds


def agree_on_kinds(
    summaries: Mapping[str, ClientSummary],
    options: TableOptions,
    read_as_text: Callable[[dict[str, set[str]]], dict[str, ClientSummary]],
) -> dict[str, ClientSummary]:
    """Return summaries in which a column that is text for one client is text for all, if possible.

    Args:
        summaries: the summary of each client, as each read its own rows.
        options: how tables are read.
        read_as_text: returns new summaries of clients that read the named columns as categories.
    """
    wanted = columns_to_read_as_text(summaries, options)
    found = {**summaries, **(read_as_text(wanted) if wanted else {})}
    for name in sorted(set().union(*wanted.values())):
        before = _of_column(summaries, name)
        numeric = any(own.kind in ("number", "date") for own in before.values())
        if numeric and _has_too_many_categories(_of_column(found, name), options):
            # these are numbers next to text after all, and the agreement says which client is wrong
            for client, own in before.items():
                found[client] = replace(found[client], columns={**found[client].columns, name: own})
    return found


def columns_to_read_as_text(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> dict[str, set[str]]:
    """Return, for each client, the columns it must read as text because other clients have text.

    Numbers and dates become categories only if the texts of the other clients are few.
    """
    found: dict[str, set[str]] = {}
    for name in next(iter(summaries.values())).columns:
        own = _of_column(summaries, name)
        texts = [s.categories for s in own.values() if s.kind == "text"]
        if not texts:
            continue
        few = all(t is not None and len(t) <= options.max_categories for t in texts)
        for client, column in own.items():
            if column.kind == "boolean" or (few and column.kind in ("number", "date")):
                found.setdefault(client, set()).add(name)
    return found


def _has_too_many_categories(own: Mapping[str, ColumnSummary], options: TableOptions) -> bool:
    texts: set[str] = set()
    for column in own.values():
        if column.categories is None:
            return True
        texts |= set(column.categories)
    return len(texts) > options.max_categories
