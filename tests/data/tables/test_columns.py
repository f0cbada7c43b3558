"""Kinds of values, and values as numbers and categories."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from fedgmm.data.tables.columns import categories, kind_of, numbers, stored_kind

DAY = datetime.date(1970, 1, 3)
NOON = datetime.datetime(1970, 1, 3, 12)


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (pa.array([1, None, 3]), "number", [1, np.nan, 3]),
        (pa.array([2**60 + 1]), "number", [2.0**60]),
        (pa.array(np.array([1.5], np.float16)), "number", [1.5]),
        (pa.array([1.0, np.inf, -np.inf, np.nan]), "number", [1, np.nan, np.nan, np.nan]),
        (pa.array([Decimal("1.5"), None]), "number", [1.5, np.nan]),
        (pa.array([True, None, False]), "boolean", [1, np.nan, 0]),
        (pa.array(["1", "+2.5", None, "1e3", "inf"]), "number", [1, 2.5, np.nan, 1000, np.nan]),
        (pa.array(["True", "false", None]), "boolean", [1, 0, np.nan]),
        (pa.array([DAY, None]), "date", [2, np.nan]),
        (pa.array([NOON]), "date", [2.5]),
        (pa.array([NOON], pa.timestamp("ns", "UTC")), "date", [2.5]),
        (pa.array([1], pa.timestamp("ns")), "date", [0]),
        (pa.array([datetime.time(18)]), "date", [0.75]),
        (pa.array([datetime.timedelta(days=2)]), "date", [2]),
        (pa.array(["1970-01-03", "1970-01-03 12:00", None]), "date", [2, 2.5, np.nan]),
        (pa.array(["1970-01-03T14:00+02:00", "1970-01-03T12:00Z"]), "date", [2.5, 2.5]),
        (pa.array(["18:00", "06:00:00"]), "date", [0.75, 0.25]),
        (pa.array([None, None], pa.string()), "empty", [np.nan, np.nan]),
        (pa.nulls(2), "empty", [np.nan, np.nan]),
    ],
)
def test_numbers(values, kind, expected):
    assert kind_of(values) == kind
    found = numbers(values)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, np.array(expected, dtype=float))


def test_text_is_no_number():
    for texts in (["1", "x"], ["1", "true"], ["1", "2020-01-01"], ["5%"], ["1,5"]):
        assert kind_of(pa.array(texts)) == "text"
        assert numbers(pa.array(texts)) is None


def test_values_that_are_no_table_values():
    for kind in (pa.list_(pa.int8()), pa.struct({"a": pa.int8()}), pa.map_(pa.string(), pa.int8())):
        assert stored_kind(kind) is None


def test_categories():
    codes, texts = categories(pa.array(["b", None, "a", "b"]))
    assert [None if code < 0 else texts[code] for code in codes] == ["b", None, "a", "b"]
    codes, texts = categories(pa.array([True, None]))
    assert (codes.tolist(), texts) == ([0, -1], ["true"])


def test_whole_numbers_have_one_name():
    values = pa.array(["1.0", "1", "-2.00", None, "1.5", "1.0.0", "x"])
    codes, texts = categories(values, whole_numbers=True)
    named = [None if code < 0 else texts[code] for code in codes]
    assert named == ["1", "1", "-2", None, "1.5", "1.0.0", "x"]
    assert categories(values)[1] == ["1.0", "1", "-2.00", "1.5", "1.0.0", "x"]
