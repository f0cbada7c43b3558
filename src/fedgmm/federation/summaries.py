"""A client's summary of its table as JSON, and back with every value checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from fedgmm.data.tables.columns import DAY_FIRST, MONTH_FIRST, Kind
from fedgmm.data.tables.preprocessing import TableOptions
from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary

_MOST_COLUMNS = 20_000
_MOST_TEXTS = 4_000
_LONGEST_TEXT = 2_000
_MOST_ROWS = 10**12
_MOMENTS = ("mean", "squares", "mean_rest")


class SummaryError(ValueError):
    """A summary that no table could have made, with the reason."""


def summary_record(summary: ClientSummary, min_count: int = 0) -> dict[str, Any]:
    """Return plain values; numbers that JSON cannot hold become ``None``.

    Categories of fewer than ``min_count`` rows are left out, because a rare text may identify a person.
    """
    return {
        "rows": summary.rows,
        "unlabelled": summary.unlabelled,
        "labels": dict(summary.labels),
        "columns": [
            _column_record(name, column, min_count) for name, column in summary.columns.items()
        ],
        "target": None if summary.target is None else _column_record("target", summary.target),
        "vectors": dict(summary.vectors),
    }


def _column_record(name: str, column: ColumnSummary, min_count: int = 0) -> dict[str, Any]:
    found = {"name": name, **asdict(column)}
    found |= {one: _finite(found[one]) for one in _MOMENTS}
    if column.categories is not None:
        found["categories"] = {t: n for t, n in column.categories.items() if n >= min_count}
    found["orders"] = {
        order: [count, *map(_finite, moments)] for order, (count, *moments) in column.orders.items()
    }
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def summary_from_record(record: Any) -> ClientSummary:
    """Return the summary of a record of :func:`summary_record`, or raise ``SummaryError``."""
    if not isinstance(record, Mapping):
        raise SummaryError("its summary is missing")
    rows = _count(record.get("rows"), "rows", _MOST_ROWS)
    labels = _texts(record.get("labels"), "labels")
    if sum(labels.values()) != rows:
        raise SummaryError("its labels do not add up to its rows")
    columns = record.get("columns")
    if not isinstance(columns, list) or not 0 < len(columns) <= _MOST_COLUMNS:
        raise SummaryError("its columns are missing or too many")
    found: dict[str, ColumnSummary] = {}
    for column in columns:
        name = column.get("name") if isinstance(column, Mapping) else None
        if not isinstance(name, str) or len(name) > _LONGEST_TEXT or name in found:
            raise SummaryError("the name of a column is missing or used twice")
        found[name] = _column(name, column, rows)
    unlabelled = _count(record.get("unlabelled"), "unlabelled", _MOST_ROWS)
    target = record.get("target")
    if target is not None and not isinstance(target, Mapping):
        raise SummaryError("the summary of its numbers is not a record")
    own = None if target is None else _column("target", target, rows)
    vectors = _vectors(record.get("vectors", {}), found)
    return ClientSummary(rows, unlabelled, found, labels, own, vectors)


def _vectors(value: Any, columns: Mapping[str, ColumnSummary]) -> dict[str, int]:
    """Return the lengths of columns of vectors; each entry must be a column."""
    if not isinstance(value, Mapping):
        raise SummaryError("its columns of vectors are not a record")
    for name, length in value.items():
        if type(length) is not int or not 0 < length <= _MOST_COLUMNS:
            raise SummaryError(f"the vectors of {name!r:.40} have no length")
        if any(f"{name}_{entry}" not in columns for entry in range(length)):
            raise SummaryError(f"the vectors of {name!r:.40} lack columns")
    return dict(value)


def _column(name: str, record: Mapping[str, Any], rows: int) -> ColumnSummary:
    what = f"column {name!r}"
    kind: Any = record.get("kind")
    if kind not in get_args(Kind):
        raise SummaryError(f"{what} has an unknown kind")
    missing = _count(record.get("missing"), f"missing of {what}", rows)
    count = _count(record.get("count"), f"count of {what}", rows - missing)
    mean, squares, rest = _moments(record, what)
    categories = record.get("categories")
    texts = None if categories is None else _texts(categories, what)
    if texts is not None and sum(texts.values()) > rows - missing:
        raise SummaryError(f"the counts of the categories of {what} add up to more than its rows")
    unlisted = _count(record.get("unlisted", 0), f"unlisted of {what}", rows - missing)
    orders = _orders(record.get("orders", {}), what, rows - missing)
    return ColumnSummary(kind, missing, count, mean, squares, texts, rest, unlisted, orders)


def _orders(value: Any, what: str, rows: int) -> dict[str, tuple[int, float, float, float]]:
    """Return the moments of dates in each order in which they can be read."""
    if not isinstance(value, Mapping) or not set(value) <= {DAY_FIRST, MONTH_FIRST}:
        raise SummaryError(f"{what} has an unknown order of dates")
    found = {}
    for order, moments in value.items():
        if not isinstance(moments, list) or len(moments) != 4:
            raise SummaryError(f"{what} has incomplete dates")
        count = _count(moments[0], f"count of {what}", rows)
        found[order] = (count, *_moments(dict(zip(_MOMENTS, moments[1:], strict=True)), what))
    return found


def _moments(record: Mapping[str, Any], what: str) -> tuple[float, float, float]:
    """Return mean, squares and the rest of the mean."""
    found = []
    for name in _MOMENTS:
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise SummaryError(f"{name} of {what} is not a number")
        found.append(math.inf if value is None else float(value))
    mean, squares, rest = found
    if squares < 0:
        raise SummaryError(f"the squares of {what} are negative")
    return mean, squares, rest


def _count(value: Any, what: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise SummaryError(f"{what} is {value!r:.40}, which is not a number of rows")
    return int(value)


def _texts(value: Any, what: str) -> dict[str, int]:
    if not isinstance(value, Mapping) or len(value) > _MOST_TEXTS:
        raise SummaryError(f"{what}: texts are missing or too many")
    for text in value:
        if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
            raise SummaryError(f"{what}: a text is too long")
    return {text: _count(count, what, _MOST_ROWS) for text, count in value.items()}


# ---------------------------------------------------------------------- options of tables


def table_record(options: TableOptions) -> dict[str, Any]:
    """Return options of tables for JSON, without those of a single client."""
    own = ("client", "memory")
    return {name: value for name, value in asdict(options).items() if name not in own}


def table_from_record(record: Any, client: str) -> TableOptions:
    """Return the options of :func:`table_record` for one client, or raise ``SummaryError``."""
    known = {field.name for field in fields(TableOptions)} - {"client"}
    if not isinstance(record, Mapping) or not set(record) <= known:
        raise SummaryError("unknown options of tables; install the server's version of fedgmm here")
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in record.items()
    }
    try:
        return TableOptions(**values, client=client)
    except (TypeError, ValueError) as error:
        raise SummaryError(f"the options of the table are invalid: {error}") from None
