"""Finding files, their clients, and Parquet and npz files."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedgmm.data.tables.files import TableFile, client_name, find_tables, memory_needed


@pytest.fixture
def folder(tmp_path):
    for name in ("b.csv", "a.csv.gz", "c.PARQUET", "notes.doc", ".hidden.csv", "deep/d.npz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.csv").mkdir()
    return tmp_path


def names(paths):
    return [path.name for path in paths]


def test_folders_patterns_and_names(folder):
    assert names(find_tables([folder])) == ["a.csv.gz", "b.csv", "c.PARQUET"]
    assert names(find_tables([str(folder / "*.csv*")])) == ["a.csv.gz", "b.csv"]
    assert names(find_tables([str(folder / "**" / "*.npz")])) == ["d.npz"]
    assert names(find_tables([folder / "b.csv", folder])) == ["b.csv", "a.csv.gz", "c.PARQUET"]


def test_each_file_once_however_it_is_written(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert len(find_tables(["b.csv", "./b.csv", folder / "b.csv", "*.csv"])) == 1


def test_a_name_that_looks_like_a_pattern(folder):
    (folder / "site[1].csv").touch()
    assert names(find_tables([folder / "site[1].csv"])) == ["site[1].csv"]


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("nowhere.csv", "such file"),
        ("x_*.csv", "such file"),
        ("notes.doc", "kind"),
        ("empty", "folder"),
        ("a\x00b", "such file"),
    ],
)
def test_sources_that_lead_nowhere(folder, fails, source, word):
    (folder / "empty").mkdir()
    assert word in fails(find_tables, [str(folder / source)])


def test_no_sources(fails):
    assert "No files" in fails(find_tables, [], error=ValueError)


@pytest.mark.parametrize(
    ("name", "client"),
    [
        ("oslo.csv", "oslo"),
        ("oslo.csv.gz", "oslo"),
        ("oslo.v2.CSV", "oslo.v2"),
        ("oslo.parquet", "oslo"),
        (".csv", ".csv"),
    ],
)
def test_names_of_clients(name, client):
    assert client_name(Path("data") / name) == client


# ---------------------------------------------------------------------- Parquet and npz


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


def test_parquet_text_of_every_make(table, columns):
    texts = ["1", " ? ", "NA", None, "x"]
    for kind in (
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.dictionary(pa.int8(), pa.string()),
    ):
        path = table(a=pa.array(texts).cast(kind))
        assert columns(path) == {"a": ["1", None, None, None, "x"]}


def test_parquet_as_text(table, columns):
    path = table(a=[1, 2], b=[True, None], c=[1.5, float("nan")], d=[Decimal("1.50"), None])
    assert columns(path, as_text="abcd") == {
        "a": ["1", "2"],
        "b": ["true", None],
        "c": ["1.5", None],
        "d": ["1.50", None],
    }


def test_parquet_names(table, fails, tmp_path, columns):
    path = table(**{" a ": [1], "a.b": [2], "": [3], "c": [4]})
    assert columns(path) == {"a": [1], "a.b": [2], "c": [4]}
    assert columns(path, only=["a"]) == {"a": [1]}
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a "])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    assert "twice" in fails(TableFile, tmp_path / "twice.parquet")


def test_the_index_of_a_frame_is_not_a_column(tmp_path, columns):
    frame = pd.DataFrame({"a": [1, 2, 3]})[lambda f: f["a"] != 2]
    frame.to_parquet(tmp_path / "site.parquet")
    assert columns(tmp_path / "site.parquet") == {"a": [1, 3]}


def test_parquet_only_some_columns_when_names_have_dots(table, columns):
    assert columns(table(**{"a": [1], "a.b": [2]}), only=["a"]) == {"a": [1]}


def test_damaged_files(write, fails, columns):
    for name in ("site.parquet", "site.npz"):
        for content in (b"", b"PAR1", b"a,b\n1,2\n", b"PK\x03\x04 nothing"):
            assert name in fails(columns, write(name, content))


def test_npz_matrix_and_labels(npz, columns):
    X = np.arange(6.0).reshape(3, 2)
    path = npz(X=X, y=np.array(["a", "b", "NA"]))
    assert columns(path) == {"X_0": [0.0, 2.0, 4.0], "X_1": [1.0, 3.0, 5.0], "y": ["a", "b", None]}
    assert list(TableFile(path).header) == ["X_0", "X_1", "y"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1.5, 2.5], ">f8"), [1.5, 2.5]),
        (np.array([b"x", b"z"]), ["x", "z"]),
        (np.array([True, False]), ["true", "false"]),
        (np.array([1, 2], np.uint8), [1, 2]),
        (
            np.array(["2020-01-01", "NaT"], "datetime64[s]"),
            [(datetime.date(2020, 1, 1) - datetime.date(1970, 1, 1)).days, None],
        ),
    ],
)
def test_npz_types(npz, values, expected, columns):
    assert columns(npz(a=values)) == {"a": expected}


def test_npz_that_is_not_a_table(npz, fails, columns):
    def failure(**arrays):
        return fails(columns, npz(**arrays))

    assert "3 dimensions" in failure(a=np.zeros((2, 2, 2)))
    assert "0 dimensions" in failure(a=np.array(3))
    assert "3 rows" in failure(a=np.zeros(2), b=np.zeros(3))
    assert "objects" in failure(a=np.array([{}, []], dtype=object))
    assert "complex128" in failure(a=np.zeros(2, complex))
    assert "'X_0'" in failure(X=np.zeros((2, 2)), X_0=np.zeros(2))
    assert "site.npz" in failure()


def test_a_single_array_under_the_name_of_an_archive(tmp_path, fails):
    with (tmp_path / "site.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert "npz" in fails(TableFile, tmp_path / "site.npz")


def test_the_memory_of_a_table_counts_every_entry_of_its_vectors(tmp_path):
    vectors = pa.FixedSizeListArray.from_arrays(np.zeros(100 * 50, dtype=np.float16), 50)
    parquet.write_table(pa.table({"age": np.zeros(100), "v": vectors}), tmp_path / "a.parquet")
    assert memory_needed(tmp_path / "a.parquet") == 24 * 100 * 51


def test_numbers_of_a_file_share_memory_that_is_returned_with_them(tmp_path):
    pd.DataFrame(
        {"age": [1.5, 2.5], "x": [1 / 3, 2 / 3], "ward": ["a", "b"], "dose": [3, None], "y": np.pi}
    ).to_csv(tmp_path / "a.csv", index=False)
    file = TableFile(tmp_path / "a.csv")
    file.read(file.header, compact=True)
    age, x, dose, y = (file.columns[name].numbers for name in ("age", "x", "dose", "y"))
    np.testing.assert_array_equal(age, [1.5, 2.5])
    np.testing.assert_array_equal(dose, [3.0, np.nan])
    np.testing.assert_array_equal(x, [1 / 3, 2 / 3])
    assert age.whole.base is dose.whole.base is not None
    assert x.base is y.base is not None
