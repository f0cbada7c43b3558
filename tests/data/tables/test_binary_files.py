"""Parquet and npz files."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedgmm.data.tables.files import read_batches, read_header


def columns(path, **options):
    return pa.Table.from_batches(read_batches(path, **options)).to_pydict()


@pytest.fixture
def table(tmp_path):
    def to(name="site.parquet", **values):
        path = tmp_path / name
        parquet.write_table(pa.table(values), path)
        return path

    return to


@pytest.fixture
def npz(tmp_path):
    def to(name="site.npz", **arrays):
        np.savez(tmp_path / name, **arrays)
        return tmp_path / name

    return to


def test_parquet_text_of_every_make(table):
    texts = ["1", " ? ", "NA", None, "x"]
    for kind in (
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.dictionary(pa.int8(), pa.string()),
    ):
        path = table(a=pa.array(texts).cast(kind))
        assert columns(path) == {"a": ["1", None, None, None, "x"]}


def test_parquet_as_text(table):
    path = table(a=[1, 2], b=[True, None], c=[1.5, float("nan")], d=[Decimal("1.50"), None])
    assert columns(path, as_text="abcd") == {
        "a": ["1", "2"],
        "b": ["true", None],
        "c": ["1.5", None],
        "d": ["1.50", None],
    }


def test_parquet_names(table, fails, tmp_path):
    path = table(**{" a ": [1], "a.b": [2], "": [3], "c": [4]})
    assert columns(path) == {"a": [1], "a.b": [2], "c": [4]}
    assert columns(path, only=["a"]) == {"a": [1]}
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a "])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    assert "'a' appears twice" in fails(read_header, tmp_path / "twice.parquet")


def test_the_index_of_a_frame_is_no_column(tmp_path):
    frame = pd.DataFrame({"a": [1, 2, 3]})[lambda f: f["a"] != 2]
    frame.to_parquet(tmp_path / "site.parquet")
    assert columns(tmp_path / "site.parquet") == {"a": [1, 3]}


def test_parquet_only_some_columns_when_names_have_dots(table):
    assert columns(table(**{"a": [1], "a.b": [2]}), only=["a"]) == {"a": [1]}


def test_damaged_files(write, fails):
    for name in ("site.parquet", "site.npz"):
        for content in (b"", b"PAR1", b"a,b\n1,2\n", b"PK\x03\x04 nothing"):
            message = fails(list, read_batches(write(name, content)))
            assert name in message


def test_npz_matrix_and_labels(npz):
    X = np.arange(6.0).reshape(3, 2)
    path = npz(X=X, y=np.array(["a", "b", "NA"]))
    assert columns(path) == {"X_0": [0.0, 2.0, 4.0], "X_1": [1.0, 3.0, 5.0], "y": ["a", "b", None]}
    assert list(read_header(path)) == ["X_0", "X_1", "y"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1.5, 2.5], ">f8"), [1.5, 2.5]),
        (np.array([b"x", b"z"]), ["x", "z"]),
        (np.array([True, False]), [True, False]),
        (np.array([1, 2], np.uint8), [1, 2]),
        (
            np.array(["2020-01-01", "NaT"], "datetime64[s]"),
            [datetime.datetime(2020, 1, 1), None],
        ),
    ],
)
def test_npz_types(npz, values, expected):
    assert columns(npz(a=values)) == {"a": expected}


def test_npz_that_is_no_table(npz, fails, write):
    def told(**arrays):
        return fails(list, read_batches(npz(**arrays)))

    assert "'a' has 3 dimensions" in told(a=np.zeros((2, 2, 2)))
    assert "'a' has 0 dimensions" in told(a=np.array(3))
    assert "'b' has 3 rows where 'a' has 2" in told(a=np.zeros(2), b=np.zeros(3))
    assert "Python objects" in told(a=np.array([{}, []], dtype=object))
    assert "'a' is of type complex128" in told(a=np.zeros(2, complex))
    assert "'X_0'" in told(X=np.zeros((2, 2)), X_0=np.zeros(2))
    assert "site.npz" in told()


def test_a_single_array_under_the_name_of_an_archive(tmp_path, fails):
    with (tmp_path / "site.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert "not a readable npz file" in fails(read_header, tmp_path / "site.npz")


def test_many_rows_come_in_batches(npz, table):
    n = 150_000
    for path in (npz(a=np.arange(n)), table(a=np.arange(n))):
        sizes = [len(batch) for batch in read_batches(path)]
        assert len(sizes) > 1
        assert sum(sizes) == n
