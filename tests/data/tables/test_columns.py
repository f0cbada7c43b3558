"""Kinds of values, and columns as numbers and as codes of texts."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.data.tables.columns import (
    Decimals,
    column_values,
    kind_of_text,
    stored_kind,
    without_point,
)

DAY = datetime.date(1970, 1, 3)
NOON = datetime.datetime(1970, 1, 3, 12)


def converted(*chunks):
    return column_values(pa.chunked_array(chunks))


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
    found = converted(values)
    assert found.kind == kind
    assert found.numbers.dtype == np.float64
    np.testing.assert_array_equal(found.numbers, np.array(expected, dtype=float))


@given(
    st.lists(st.none() | st.integers(-(2**31) + 1, 2**31 - 1), min_size=1, max_size=30),
    st.integers(0, 9),
)
def test_decimals_are_the_numbers_that_a_parser_reads(whole, places):
    texts = ["nan" if n is None else f"{n}e-{places}" for n in whole]
    numbers = np.array([float(text) for text in texts])
    found = Decimals.of(numbers, np.empty(len(numbers), np.int32))
    assert found is not None
    np.testing.assert_array_equal(found, numbers)
    np.testing.assert_array_equal(found[::2], numbers[::2])
    assert len(found) == len(numbers)


@pytest.mark.parametrize("other", [1 / 3, 2.0**31, -(2.0**31), np.inf, -np.inf, 1e300, 1e-10])
@pytest.mark.parametrize("place", [0, 20_000])
def test_other_numbers_are_no_decimals(other, place):
    numbers = np.arange(40_000) / 8
    numbers[place] = other
    assert Decimals.of(numbers, np.empty(len(numbers), np.int32)) is None


def test_text_is_not_a_number():
    for texts in (["1", "x"], ["1", "true"], ["1", "2020-01-01"], ["5%"], ["1,5"]):
        found = converted(pa.array(texts))
        assert (found.kind, found.numbers) == ("text", None)


def test_types_that_tables_do_not_have():
    for kind in (
        pa.list_(pa.int8()),
        pa.struct({"a": pa.int8()}),
        pa.map_(pa.string(), pa.int8()),
        pa.month_day_nano_interval(),
    ):
        assert stored_kind(kind) is None


def named(values):
    texts = values.texts.to_pylist()
    return [None if code < 0 else texts[code] for code in values.codes]


def test_codes_of_texts():
    found = converted(pa.array(["b", None, "a"]), pa.array(["b", "c"]))
    assert named(found) == ["b", None, "a", "b", "c"]
    assert found.as_written


def test_blanks_and_words_for_missing_values():
    found = converted(pa.array([" b", "NA", "b ", " ? ", "a", "b"]))
    assert named(found) == ["b", None, "b", None, "a", "b"]
    assert found.texts.to_pylist() == ["b", "a"]
    assert converted(pa.array([" ", "NA"])).kind == "empty"


def test_truth_values_have_codes_and_numbers_do_not():
    found = converted(pa.array([True, None, False]))
    assert named(found) == ["true", None, "false"]
    assert not found.as_written
    found = converted(pa.array([1.5, None]))
    assert found.codes is None
    assert not found.as_written


def test_kinds_of_single_texts():
    texts = ["1e3", "TRUE", "2020-01-01", "12:30", "x"]
    assert [kind_of_text(text) for text in texts] == ["number", "boolean", "date", "date", "text"]


def test_whole_numbers_have_one_name():
    texts = ["1.0", "1", "-2.00", "1.5", "1.0.0", "x"]
    assert [without_point(text) for text in texts] == ["1", "1", "-2", "1.5", "1.0.0", "x"]
