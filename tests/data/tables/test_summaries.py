"""Summaries of a client: counts, sums and lists of categories."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.data.tables.columns import column_values
from fedgmm.data.tables.summaries import ClientPart, look_like_names, summarise_columns


def summary(*parts):
    """The summary of column ``a`` of a client with rows in several files."""
    files = [{"a": column_values(pa.chunked_array([pa.array(part)]))} for part in parts]
    return summarise_columns(
        [ClientPart(own, np.arange(len(part))) for own, part in zip(files, parts, strict=True)],
        ["a"],
    )["a"]


numbers_or_none = st.lists(
    st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=30
).filter(lambda values: any(value is not None for value in values))


@given(values=numbers_or_none, cut=st.integers(0, 30))
def test_moments_are_those_of_all_rows_however_they_are_cut(values, cut):
    parts = [part for part in (values[:cut], values[cut:]) if part]
    found = summary(*(pa.array(part, pa.float64()) for part in parts))
    present = np.array([value for value in values if value is not None])
    assert (found.count, found.missing) == (len(present), len(values) - len(present))
    assert found.mean == pytest.approx(present.mean(), rel=1e-12, abs=1e-9)
    assert found.squares == pytest.approx(
        ((present - present.mean()) ** 2).sum(), rel=1e-9, abs=1e-6
    )


def test_moments_far_from_zero_keep_their_digits(rng):
    values = 1e9 + rng.normal(size=1000)
    found = summary(*np.split(values, 10))
    assert found.squares == pytest.approx(((values - values.mean()) ** 2).sum(), rel=1e-10)


def test_long_columns_are_summed_in_blocks(rng, monkeypatch):
    monkeypatch.setattr("fedgmm.data.tables.summaries._BLOCK_ROWS", 7)
    values = 1e9 + rng.normal(size=100)
    values[::9] = np.nan
    found = summary(values)
    present = values[~np.isnan(values)]
    assert (found.count, found.missing) == (len(present), 12)
    assert found.mean == pytest.approx(present.mean(), rel=1e-15)
    assert found.squares == pytest.approx(((present - present.mean()) ** 2).sum(), rel=1e-9)


def test_missing_values_are_counted_once_in_every_kind():
    for values in (
        pa.array([1.0, None]),
        pa.array(["1", None]),
        pa.array(["x", None]),
        pa.array(["2020-01-01", None]),
        pa.array([True, None]),
        pa.array(["True", None]),
    ):
        assert summary(values).missing == 1
        assert summary(values, pa.nulls(2)).missing == 3
    assert summary(pa.nulls(2)).missing == 2


def test_text_that_looks_like_numbers_in_one_file():
    found = summary(["1", "2"], ["2.0", None], ["x", "x"])
    assert (found.kind, found.missing) == ("text", 1)
    assert found.categories == {"1": 1, "2": 2, "x": 2}


def test_a_client_keeps_names_to_itself():
    people = [f"person {i}" for i in range(30)]
    assert summary(people).categories is None
    found = summary(*([f"{b} {i}" for i in range(1000)] for b in range(3)))
    assert found.categories is None
    assert summary(people * 4).categories is not None
    assert summary(people[:3]).categories is not None


def test_numbers_too_large_to_be_squared_raise_no_warning(recwarn):
    found = summary([1e308, -1e308, 1e308], [1.0, 2.0, 3.0])
    assert not np.isfinite(found.squares)
    assert not list(recwarn)


def test_what_looks_like_names():
    assert look_like_names(20, 20)
    assert not look_like_names(19, 19)
    assert not look_like_names(80, 200)
    assert look_like_names(150, 200)
    assert look_like_names(2001, 10**6)
