"""Agreement of all clients on one preprocessing, from their summaries alone.

The result is the same as for pooled rows: means and variances of number columns, the union of the
categories, and the columns that need an indicator of missing values.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedgmm.core.moments import pool
from fedgmm.data.tables.columns import TRUTH, kind_of_text
from fedgmm.data.tables.errors import joined, listed, quoted, similar_name
from fedgmm.data.tables.preprocessing import (
    KIND_NAMES,
    OTHER,
    Column,
    Labels,
    Preprocessing,
    Role,
    TableOptions,
    as_classes,
)
from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary, look_like_names

_NAMES = "so many different values look like names"
_TOO_LARGE = "the numbers are too large to be squared"
_CONSTANT = "all values are equal"
_UNLISTED = "no client lists the values, because they look like names"
_AMBIGUOUS = "the dates can be read with the day first or with the month first"
_REMEDIES = {
    _AMBIGUOUS: "; say which with --date-format, such as --date-format %d.%m.%Y",
    _NAMES: "; use --categorical {0} for categories, --date-format for dates, or --id {0} for ids",
    _UNLISTED: "; sites list them with --categorical {0}",
}
"""What to do about a column that is not used for a reason."""

_OTHER_DATE = re.compile(r"\d{1,2}([./-])\d{1,2}\1(\d{2}|\d{4})( .*)?")  # not ISO 8601
_OTHER_SCALE = 100.0
_ROUNDING = 1e-12  # relative to the mean; a smaller deviation is rounding


class DisagreementError(ValueError):
    """A column of a client does not fit those of the others; ``problem`` says why in one sentence."""

    def __init__(self, client: str, column: str, problem: str) -> None:
        super().__init__(f"Client {client!r}: {problem}")
        self.client, self.column, self.problem = client, column, problem


def agree(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> tuple[Preprocessing, list[str]]:
    """Return one preprocessing for all clients, and notes about it.

    Raises:
        DisagreementError: a client with other columns, or with values of another kind.
    """
    columns, notes = agree_on_columns(summaries, options)
    if not any(column.outputs for column in columns):
        raise ValueError("No column is left to learn from.")
    if options.label is None:
        labels = Labels.absent()
    elif options.task == "regression":
        own = [s.target for s in summaries.values() if s.target is not None]
        labels = Labels.of_numbers(options.label, *_pooled(own))
    else:
        labels = Labels.agreed(options.label, [s.labels for s in summaries.values()], options.task)
        notes += spelling_notes(f"The label {quoted(options.label)}", labels.classes, "classes")
    written = options.written
    return Preprocessing(tuple(columns), labels, options.client_column, options.id, written), notes


def agree_on_columns(
    summaries: Mapping[str, ClientSummary], options: TableOptions
) -> tuple[list[Column], list[str]]:
    """Return the conversion of each column, and notes about them."""
    owners = Counter(name for own in summaries.values() for name in own.columns)
    names = sorted(owners, key=lambda name: name in options.left_out)  # the ignored ones come last
    _check_vectors(summaries)
    for client, one in summaries.items():
        mine = [name for name in one.columns if name not in options.left_out]
        if len(summaries) > 1 and mine and all(owners[name] == 1 for name in mine):
            raise DisagreementError(
                client,
                mine[0],
                f"no other client has any of its columns, such as {quoted(mine[0])}; correct the names "
                "of its columns.",
            )
    named = {"--categorical": options.categorical, "--ignore": options.ignore, "--id": options.id}
    for option, given in named.items():
        for name in given:
            if name not in (*names, options.label, options.client_column):
                hint = similar_name(name, names)
                raise ValueError(
                    f"{option}: there is no column {quoted(name)}{hint}; the columns are {listed(names)}."
                )
    entries = {
        f"{vector}_{entry}": vector
        for own in summaries.values()
        for vector, length in own.vectors.items()
        for entry in range(length)
    }
    columns = [_agree_on(name, summaries, options, entries.get(name, "")) for name in names]
    lacking: dict[tuple[str, ...], list[str]] = {}
    dropped: dict[str, list[str]] = {}
    for column in columns:
        if column.outputs:
            absent = tuple(c for c, own in summaries.items() if column.name not in own.columns)
            lacking.setdefault(absent, []).append(column.vector or column.name)
        elif column.name not in options.left_out:
            dropped.setdefault(column.reason, []).append(column.name)
    lacking.pop((), None)
    notes = [
        f"{_columns([*dict.fromkeys(lacked)])} absent at {joined(clients)}; the values count as missing "
        "there."
        for clients, lacked in lacking.items()
    ]
    notes += [
        f"{_columns(unused)} not used: {reason}{_REMEDIES.get(reason, '').format(unused[0])}."
        for reason, unused in dropped.items()
    ]
    for column in columns:
        notes += _column_notes(column, _of_column(summaries, column.name), options)
    return columns, notes


def _of_column(summaries: Mapping[str, ClientSummary], name: str) -> dict[str, ColumnSummary]:
    return {c: s.columns[name] for c, s in summaries.items() if name in s.columns}


def _columns(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"Column {quoted(names[0])} is"
    return f"{len(names)} columns ({listed(names)}) are"


def _check_vectors(summaries: Mapping[str, ClientSummary]) -> None:
    """Raise for a client whose vectors are of another encoder than those of most clients."""
    owners = Counter(vector for own in summaries.values() for vector in own.vectors.items())
    if not owners:
        return
    (usual, length), _ = owners.most_common(1)[0]
    first = next(client for client, own in summaries.items() if own.vectors.get(usual) == length)
    for client, own in summaries.items():
        if own.vectors.get(usual, length) != length:
            raise DisagreementError(
                client,
                f"{usual}_0",
                f"its vectors in column {quoted(usual)} have {own.vectors[usual]} numbers, but those of "
                f"{first!r} have {length}; use the same encoder at all clients.",
            )
        alone = all(owners[vector] == 1 for vector in own.vectors.items())
        if own.vectors and alone and client != first:
            name = next(iter(own.vectors))
            raise DisagreementError(
                client,
                f"{name}_0",
                f"its column of vectors {quoted(name)} was embedded with another encoder than "
                f"{quoted(usual)} of {first!r}; embed it again with the same encoder, weights and size.",
            )


def _column_notes(
    column: Column, own: Mapping[str, ColumnSummary], options: TableOptions
) -> list[str]:
    """Return notes about a column that is changed in a way that may surprise."""
    if column.role != "category":
        return [] if column.role == "ignored" else _scale_notes(column, own)
    name = quoted(column.name)
    notes = [] if column.name in options.categorical else _mixed_notes(column, own)
    hidden = [client for client, one in own.items() if one.categories is None]
    if hidden:
        many = sum(own[client].unlisted for client in hidden)
        notes.append(
            f"Column {name}: the {many} different values at {joined(hidden)} hardly repeat there and "
            "may be names, so they are not listed; those that no other client lists count as no "
            f"category. Use --categorical {column.name} to list them."
        )
    if column.categories[-1] == OTHER:
        notes.append(
            f"Column {name} has many categories: all but the {len(column.categories) - 1} most "
            "frequent are joined."
        )
    notes += spelling_notes(f"Column {name}", column.categories, "categories")
    if all(map(_OTHER_DATE.fullmatch, set(column.categories) - {OTHER})):
        notes.append(
            f"Column {name} looks like dates, such as {column.categories[0]}, but is used as "
            "categories; name the format, such as --date-format %d.%m.%y, or write 2024-12-31."
        )
    return notes


def spelling_notes(subject: str, values: Iterable[Any], called: str) -> list[str]:
    """Return a note if texts such as ``Yes`` and ``yes`` count as different values."""
    spellings: dict[str, list[str]] = {}
    for value in values:
        if isinstance(value, str):
            spellings.setdefault(" ".join(value.casefold().split()), []).append(value)
    alike = [found for found in spellings.values() if len(found) > 1]
    if not alike:
        return []
    return [
        f"{subject} has {called} that differ only in upper and lower case or blanks, such as "
        f"{quoted(alike[0][0])} and {quoted(alike[0][1])}; if they mean the same, write them alike."
    ]


def _mixed_notes(column: Column, own: Mapping[str, ColumnSummary]) -> list[str]:
    """Return a note about numbers that are categories because other clients have words."""
    words = {text for text in column.categories if kind_of_text(text) == "text"} - {OTHER}
    numbers = set(column.categories) - words - {OTHER}
    listed_by = {client: set(one.categories or {}) for client, one in own.items()}
    wordless = [client for client, texts in listed_by.items() if texts and not texts & words]
    wordy = [client for client, texts in listed_by.items() if texts & words]
    if not numbers or not wordless or not wordy or column.categories == TRUTH:
        return []
    first = min(listed_by[wordy[0]] & words)
    return [
        f"Column {quoted(column.name)} is used as categories, because {joined(wordy)} has words such as "
        f"{quoted(first)}, and {joined(wordless)} only numbers; if a word means a missing value, add "
        f"--missing-values {quoted(first)}."
    ]


def _scale_notes(column: Column, own: Mapping[str, ColumnSummary]) -> list[str]:
    """Return a note if one client alone sets the scale, so that the other values hardly differ."""
    own = {client: _zeros_and_ones(one) for client, one in own.items() if one.kind != "empty"}
    if len(own) < 2:
        return []
    far = {c: one.squares + one.count * (one.mean - column.mean) ** 2 for c, one in own.items()}
    client = max(far, key=lambda name: far[name])
    _, variance = _pooled([one for name, one in own.items() if name != client])
    if not 0 < variance < column.scale**2 / _OTHER_SCALE**2:
        return []
    return [
        f"Column {quoted(column.name)}: the values at {client} are so large that they set the scale: "
        f"the deviation is {column.scale:.2g}, and {math.sqrt(variance):.2g} without {client}. Check the "
        "unit there; if a code stands for missing values, name it with --missing-values."
    ]


def _agree_on(
    name: str, summaries: Mapping[str, ClientSummary], options: TableOptions, vector: str
) -> Column:
    """Return the conversion of a column, decided by sums over all clients."""
    if name in options.left_out:
        id_ = name in options.id
        return Column(name, "ignored", reason="it is an id" if id_ else "the options ignore it")
    own = _of_column(summaries, name)
    if len(own) == 1 < len(summaries) and name not in options.categorical:
        reason = _one_owner(name, next(iter(own)), summaries)
        return Column(name, "ignored", reason=reason, vector=vector)
    rows = sum(summary.rows for summary in summaries.values())
    present = sum(summaries[client].rows - column.missing for client, column in own.items())
    if not present:
        return Column(name, "ignored", reason="there are no values")
    # a client without the column lacks all of its values
    indicator = present < rows and rows - present >= options.indicator_from * rows
    lacks = len(own) < len(summaries) or (indicator and bool(vector))
    if name != f"{vector}_0":  # one indicator serves all entries of a vector
        indicator = indicator and not vector
    kinds = {summary.kind for summary in own.values()} - {"empty"}
    if not kinds & {"number", "date"}:
        column = _category_column(name, own, present, indicator, options)
    elif kinds == {"date"}:
        column = _date_column(name, own, indicator)
    elif kinds <= {"number", "boolean"}:
        numbers = [_zeros_and_ones(one) for one in own.values()]
        column = _number_column(name, "number", numbers, indicator)
    else:  # agree_on_kinds has already read such columns as text if that helps
        raise _disagreement(name, own)
    return replace(column, optional=bool(column.outputs) and lacks, vector=vector)


def _one_owner(name: str, owner: str, summaries: Mapping[str, ClientSummary]) -> str:
    """Return the reason why a column of a single client is not used, and a likely typing error."""

    def plain(name: str) -> str:
        return re.sub(r"[\W_]", "", name.lower())

    others = {n for c, own in summaries.items() if c != owner for n in own.columns}
    here = summaries[owner].columns
    twin = next((n for n in sorted(others) if n not in here and plain(n) == plain(name)), None)
    hint = "" if twin is None else f"; rename it there if it is the {quoted(twin)} of the others"
    return f"only {owner} has such a column{hint}"


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
        f"{KIND_NAMES[usual]}; correct it, name a text that means a missing value (--missing-values), or "
        "use --categorical or --ignore.",
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
    mean, variance = _pooled(own)
    if not (math.isfinite(mean) and math.isfinite(variance)):
        return Column(name, "ignored", reason=_TOO_LARGE)
    if variance < sys.float_info.min or math.sqrt(variance) <= _ROUNDING * abs(mean):
        if not indicator:
            return Column(name, "ignored", mean, reason=_CONSTANT)
        return Column(name, role, mean, 1.0, indicator=True)
    return Column(name, role, mean, math.sqrt(variance), indicator=indicator)


def _pooled(own: Sequence[ColumnSummary]) -> tuple[float, float]:
    """Return the mean and the variance of the pooled values."""
    moments = np.array([(c.count, c.mean, c.squares, c.mean_rest) for c in own if c.count])
    with np.errstate(over="ignore", invalid="ignore"):
        counts, means, squares, _ = pool(*moments.T[..., None])
    return float(means[0]), float(squares[0] / counts[0])


def _date_column(name: str, own: Mapping[str, ColumnSummary], indicator: bool) -> Column:
    """Return the conversion of dates; those like ``3/4/2020`` are read in the one order that fits all."""
    possible = {client: set(one.orders) for client, one in own.items() if one.orders}
    orders = set.intersection(*possible.values()) if possible else {""}
    if len(orders) > 1:
        return Column(name, "ignored", reason=_AMBIGUOUS)
    if not orders:
        # the order of most clients counts, whichever of them comes first
        clients = Counter(order for found in possible.values() for order in sorted(found))
        order = max(sorted(clients), key=clients.__getitem__)
        first = next(client for client, found in possible.items() if found == {order})
        client = next(client for client, found in possible.items() if order not in found)
        (other,) = possible[client]
        raise DisagreementError(
            client,
            name,
            f"the column {quoted(name)} holds dates with the {other}, but {first!r} has the {order}; write "
            "dates as 2024-12-31.",
        )
    (order,) = orders
    found = _number_column(name, "date", [one.in_order(order) for one in own.values()], indicator)
    return replace(found, order=order)


def _category_column(
    name: str,
    own: Mapping[str, ColumnSummary],
    present: int,
    indicator: bool,
    options: TableOptions,
) -> Column:
    total: Counter[str] = Counter()
    for column in own.values():
        total.update(column.categories or {})
    truth = {column.kind for column in own.values()} <= {"boolean", "empty"}
    if truth:
        total = _lowered(total)
    elif name not in options.categorical and look_like_names(_distinct(own), present):
        return Column(name, "ignored", reason=_NAMES)
    if not total:
        return Column(name, "ignored", reason=_UNLISTED)
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

    ``read_as_text`` returns new summaries of clients that read the named columns as categories.
    """
    wanted = columns_to_read_as_text(summaries, options)
    found = {**summaries, **(read_as_text(wanted) if wanted else {})}
    for name in sorted(set().union(*wanted.values())):
        before = _of_column(summaries, name)
        numeric = any(own.kind in ("number", "date") for own in before.values())
        if numeric and _distinct(_of_column(found, name)) > options.max_categories:
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
    for name in dict.fromkeys(name for own in summaries.values() for name in own.columns):
        own = _of_column(summaries, name)
        texts = [s.categories for s in own.values() if s.kind == "text"]
        if not texts:
            continue
        few = all(t is not None and len(t) <= options.max_categories for t in texts)
        for client, column in own.items():
            if column.kind == "boolean" or (few and column.kind in ("number", "date")):
                found.setdefault(client, set()).add(name)
    return found


def _distinct(own: Mapping[str, ColumnSummary]) -> int:
    """Return an upper bound of the number of distinct texts; unlisted ones of two clients may be equal."""
    listed_somewhere = set().union(*(column.categories or {} for column in own.values()))
    return len(listed_somewhere) + sum(column.unlisted for column in own.values())


def declared(
    header: Sequence[str],
    options: TableOptions,
    bounds: tuple[float, float] | Mapping[str, tuple[float, float]],
    categories: Mapping[str, Sequence[str]],
) -> Preprocessing:
    """Return a preprocessing that does not depend on any row, for privacy.

    Numbers are scaled from their bounds to ``[-1, 1]``, and a missing one is the middle. Columns without a
    declaration are ignored.

    Args:
        header: names of the columns of the files.
        options: which column is the label, and so on.
        bounds: smallest and largest value of number columns, by name; one pair serves all columns without
            categories.
        categories: values of categorical columns and of the label, by name.
    """
    own = {options.label, options.client_column, *options.left_out}
    names = [name for name in header if name not in own]
    by_name = bounds if isinstance(bounds, Mapping) else dict.fromkeys(names, bounds)
    for name in (*by_name, *(one for one in categories if one != options.label)):
        if name not in names:
            raise ValueError(f"There is no input column {name!r} to declare bounds or values for.")
    columns = []
    for name in names:
        pair = by_name.get(name)
        if name in categories:
            columns.append(Column(name, "category", categories=tuple(sorted(categories[name]))))
        elif pair is None:
            columns.append(Column(name, "ignored", reason="no bounds are declared"))
        else:
            columns.append(Column(name, "number", sum(pair) / 2, (pair[1] - pair[0]) / 2))
    labels = Labels.absent()
    if options.label is not None:
        if len(categories.get(options.label, ())) < 2:
            raise ValueError(
                f"epsilon needs the classes of the label: declare the values of {options.label!r} in "
                "categories."
            )
        classes = as_classes(categories[options.label]).values()
        labels = Labels(options.label, tuple(sorted(set(classes))))
    written = (
        replace(options.written, names=tuple(header)) if options.no_header else options.written
    )
    return Preprocessing(tuple(columns), labels, options.client_column, options.id, written)
