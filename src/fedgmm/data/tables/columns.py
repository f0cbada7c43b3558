"""Values of a column as numbers or as categories, whatever type a file gave them."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Kind = Literal["empty", "number", "date", "boolean", "text"]
"""What values look like. ``empty`` means that all of them are missing and they may be anything."""

FloatArray = NDArray[np.float64]

_MICROSECONDS_A_DAY = 86_400e6
_FIRST_LOOK = 8  # most text shows itself at once; to fail on all of it takes much longer
_WHOLE_WITH_POINT = re.compile(r"([+-]?\d+)\.0*")


def stored_kind(kind: pa.DataType) -> Kind | None:
    """What the type of a column says; ``None`` for types that are no table values."""
    types = pa.types
    if types.is_null(kind):
        return "empty"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_date(kind) or types.is_timestamp(kind) or types.is_time(kind):
        return "date"
    if types.is_duration(kind):
        return "date"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    return None


def kind_of(values: pa.Array) -> Kind:
    """What the values look like, reading text that holds numbers, truth values or dates."""
    kind = stored_kind(values.type)
    assert kind is not None
    if values.null_count == len(values):
        return "empty"
    if kind != "text":
        return kind
    if _cast(values, pa.float64()) is not None:
        return "number"
    if _is_truth(values):
        return "boolean"
    return "text" if _as_dates(values) is None else "date"


def numbers(values: pa.Array) -> FloatArray | None:
    """The values as float64 with NaN for missing ones, ``(n,)``.

    Dates are days since 1970, times are parts of a day, truth values are 0 and 1. Infinities count as
    missing. ``None`` where some value is not a number.
    """
    kind = stored_kind(values.type)
    if kind == "empty":
        return np.full(len(values), np.nan)
    if kind == "text":
        found = _cast(values, pa.float64())
        if found is not None:
            return _finite(found)
        if _is_truth(values):
            return _finite(pc.equal(pc.utf8_lower(values), "true").cast(pa.float64()))
        found = _as_dates(values)
        return None if found is None else _days(found)
    if kind == "date":
        return _days(values)
    return _finite(values.cast(pa.float64(), safe=False))


def categories(
    values: pa.Array, *, whole_numbers: bool = False
) -> tuple[NDArray[np.int64], list[str]]:
    """Codes ``(n,)``, with -1 for missing values, and the texts that they stand for.

    Args:
        values: text without surrounding blanks, or truth values.
        whole_numbers: take ``1.0`` for ``1``, since programs write whole numbers both ways.
    """
    if stored_kind(values.type) != "text":
        values = values.cast(pa.string())
    encoded = values.dictionary_encode()
    texts: list[str] = encoded.dictionary.to_pylist()
    if whole_numbers:
        texts = [_without_point(text) for text in texts]
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    if len(set(texts)) < len(texts):
        unique = sorted(set(texts))
        place = {text: code for code, text in enumerate(unique)}
        lookup = np.array([*(place[text] for text in texts), -1], dtype=np.int64)
        return lookup[codes], unique
    return codes, texts


def _without_point(text: str) -> str:
    found = _WHOLE_WITH_POINT.fullmatch(text)
    return text if found is None else found[1]


def _finite(values: pa.Array) -> FloatArray:
    found: FloatArray = np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)
    infinite = np.isinf(found)
    return np.where(infinite, np.nan, found) if infinite.any() else found


def _days(values: pa.Array) -> FloatArray:
    if pa.types.is_time(values.type):
        values = values.cast(pa.time64("us"), safe=False)
    elif pa.types.is_duration(values.type):
        values = values.cast(pa.duration("us"), safe=False)
    else:
        values = values.cast(pa.timestamp("us"), safe=False)
    microseconds = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
    found: FloatArray = np.asarray(microseconds, dtype=np.float64)
    return found / _MICROSECONDS_A_DAY


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    try:
        pc.cast(values[:_FIRST_LOOK], kind)
        return pc.cast(values, kind)
    except pa.ArrowInvalid:
        return None


def _is_truth(values: pa.Array) -> bool:
    known = pc.is_in(pc.utf8_lower(values), value_set=pa.array(["true", "false", None]))
    return bool(pc.all(known, min_count=0).as_py())


def _as_dates(values: pa.Array) -> pa.Array | None:
    """Text as dates or as times of the day; ``None`` where it is something else."""
    found = _cast(values, pa.timestamp("us"))
    if found is not None:
        return found
    zoned = _cast(values, pa.timestamp("us", tz="UTC"))
    if zoned is not None:
        return zoned.cast(pa.timestamp("us"))
    # there is no cast to a time; as a time of the first day it comes to the same
    return _cast(pc.binary_join_element_wise("1970-01-01", values, " "), pa.timestamp("us"))
