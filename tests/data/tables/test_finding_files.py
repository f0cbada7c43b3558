"""Which files are meant, and whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedgmm.data.tables.files import client_name, find_tables


@pytest.fixture
def folder(tmp_path):
    for name in ("b.csv", "a.csv.gz", "c.PARQUET", "notes.txt", ".hidden.csv", "deep/d.npz"):
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
    ("source", "told"),
    [
        ("nowhere.csv", "no such file"),
        ("x_*.csv", "no such file"),
        ("notes.txt", "this kind of file"),
        ("empty", "holds no table"),
        ("a\x00b", "no such file"),
    ],
)
def test_sources_that_lead_nowhere(folder, fails, source, told):
    (folder / "empty").mkdir()
    message = fails(find_tables, [str(folder / source)])
    assert told in message


def test_no_sources(fails):
    assert "No files" in fails(find_tables, [])


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
