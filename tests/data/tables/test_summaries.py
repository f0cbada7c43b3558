"""What a client tells: counts, sums and lists of categories."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.data.tables.summaries import BatchValues, SummaryOfColumns, look_like_names


def summary(*batches, **options):
    names = list(batches[0])
    found = SummaryOfColumns(names)
    for batch in batches:
        values = BatchValues(pa.RecordBatch.from_pydict(batch), **options)
        found.add(values, slice(None))
    return found.result()


numbers_or_none = st.lists(
    st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=30
).filter(lambda values: any(value is not None for value in values))


@given(values=numbers_or_none, cut=st.integers(0, 30))
def test_moments_are_those_of_all_rows_however_they_are_cut(values, cut):
    parts = [part for part in (values[:cut], values[cut:]) if part]
    told = summary(*({"a": pa.array(part, pa.float64())} for part in parts))["a"]
    present = np.array([value for value in values if value is not None])
    assert (told.count, told.missing) == (len(present), len(values) - len(present))
    assert told.mean == pytest.approx(present.mean(), rel=1e-12, abs=1e-9)
    assert told.squares == pytest.approx(
        ((present - present.mean()) ** 2).sum(), rel=1e-9, abs=1e-6
    )


def test_moments_far_from_zero_keep_their_digits(rng):
    values = 1e9 + rng.normal(size=1000)
    told = summary(*({"a": part} for part in np.split(values, 10)))["a"]
    assert told.squares == pytest.approx(((values - values.mean()) ** 2).sum(), rel=1e-10)


def test_missing_values_are_counted_once_in_every_kind():
    for values in (
        pa.array([1.0, None]),
        pa.array(["1", None]),
        pa.array(["x", None]),
        pa.array(["2020-01-01", None]),
        pa.array([True, None]),
        pa.array(["True", None]),
    ):
        assert summary({"a": values})["a"].missing == 1
        assert summary({"a": values}, as_categories=["a"])["a"].missing == 1
    assert summary({"a": pa.nulls(2)})["a"].missing == 2


def test_text_that_looked_like_numbers_at_first():
    told = summary({"a": ["1", "2"]}, {"a": ["2.0", None]}, {"a": ["x", "x"]})["a"]
    assert (told.kind, told.missing) == ("text", 1)
    assert told.categories == {"1": 1, "2": 2, "x": 2}


def test_numbers_that_are_names_of_groups():
    assert summary({"a": ["1", "2", "1"]})["a"].kind == "number"
    told = summary({"a": ["1", "2", "1"]}, as_categories=["a"])["a"]
    assert (told.kind, told.categories) == ("text", {"1": 2, "2": 1})


def test_a_client_keeps_names_to_itself():
    people = [f"person {i}" for i in range(30)]
    assert summary({"a": people})["a"].categories is None
    told = summary(*({"a": [f"{b} {i}" for i in range(1000)]} for b in range(3)))["a"]
    assert told.categories is None
    assert summary({"a": people * 4})["a"].categories is not None
    assert summary({"a": people[:3]})["a"].categories is not None


def test_numbers_too_large_to_be_squared_warn_nobody(recwarn):
    told = summary({"a": [1e308, -1e308, 1e308]}, {"a": [1.0, 2.0, 3.0]})["a"]
    assert not np.isfinite(told.squares)
    assert not list(recwarn)


def test_what_looks_like_names():
    assert look_like_names(20, 20)
    assert not look_like_names(19, 19)
    assert not look_like_names(80, 200)
    assert look_like_names(150, 200)
    assert look_like_names(2001, 10**6)
