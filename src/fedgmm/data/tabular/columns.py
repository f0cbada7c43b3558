"""Values of a column as numbers or as categories, whatever type a file gave them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Kind = Literal["empty", "number", "date", "boolean", "text"]
"""What values look like. ``empty`` means that all of them are missing and they may be anything."""

FloatArray = NDArray[np.float64]

_SECONDS_A_DAY = 86_400.0


def stored_kind(kind: pa.DataType) -> Kind | None:
    """What the type of a column says; ``None`` for types that are no table values."""
    types = pa.types
    if types.is_null(kind):
        return "empty"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_date(kind) or types.is_timestamp(kind):
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
    lowered = pc.utf8_lower(values)
    if pc.all(pc.is_in(lowered, value_set=pa.array(["true", "false"])), min_count=0).as_py():
        return "boolean"
    return "text" if _as_dates(values) is None else "date"


def numbers(values: pa.Array) -> FloatArray | None:
    """The values as float64 with NaN for missing ones, ``(n,)``; dates in days since 1970.

    Infinities count as missing. ``None`` where some value is not a number.
    """
    kind = stored_kind(values.type)
    if kind == "empty":
        return np.full(len(values), np.nan)
    if kind == "text":
        found = _cast(values, pa.float64())
        if found is None:
            found = _as_dates(values)
            return None if found is None else _days(found)
        return _finite(found)
    if kind == "date":
        return _days(values)
    return _finite(values.cast(pa.float64()))


def categories(values: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
    """Codes ``(n,)``, with -1 for missing values, and the texts that they stand for."""
    if stored_kind(values.type) != "text":
        values = values.cast(pa.string())
    encoded = values.dictionary_encode()
    texts = [text.strip() for text in encoded.dictionary.to_pylist()]
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    if len(set(texts)) < len(texts):  # they differ in blanks alone
        unique = sorted(set(texts))
        place = {text: code for code, text in enumerate(unique)}
        lookup = np.array([*(place[text] for text in texts), -1], dtype=np.int64)
        return lookup[codes], unique
    return codes, texts


def _finite(values: pa.Array) -> FloatArray:
    found: FloatArray = np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)
    infinite = np.isinf(found)
    return np.where(infinite, np.nan, found) if infinite.any() else found


def _days(values: pa.Array) -> FloatArray:
    seconds = values.cast(pa.timestamp("us")).cast(pa.int64())
    found: FloatArray = np.asarray(seconds.to_numpy(zero_copy_only=False), dtype=np.float64)
    return found / (_SECONDS_A_DAY * 1e6)


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    try:
        return pc.cast(pc.utf8_trim_whitespace(values), kind)
    except pa.ArrowInvalid:
        return None


def _as_dates(values: pa.Array) -> pa.Array | None:
    found = _cast(values, pa.timestamp("us"))
    if found is not None:
        return found
    zoned = _cast(values, pa.timestamp("us", tz="UTC"))
    return None if zoned is None else zoned.cast(pa.timestamp("us"))
