"""Output of commands: JSON, tables on disk, progress, notes."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from rich.console import Console

from fedgmm.cli import output

COLUMNS = {
    "row": np.array([1, 2]),
    "prediction": np.array(['say "aah", please', "a,b\nc"]),
    "p(x)": np.array([0.1, 1 / 3]),
    "novel": np.array([True, False]),
}


@pytest.mark.parametrize("name", ["p.csv", "p.tsv", "p.csv.gz", "p.TSV.GZ", "p.parquet"])
def test_tables_read_back_the_same(tmp_path, name):
    path = tmp_path / "new folder" / name
    output.check_output(path)
    output.write_columns(COLUMNS, path)
    if name.endswith("parquet"):
        table = parquet.read_table(path)
    else:
        with pa.input_stream(str(path), compression="gzip" if "gz" in name.lower() else None) as s:
            mark = "\t" if "tsv" in name.lower() else ","
            parse = csv.ParseOptions(delimiter=mark, newlines_in_values=True)
            table = csv.read_csv(s, parse_options=parse)
    assert table.to_pydict() == {name: values.tolist() for name, values in COLUMNS.items()}
    assert [file.name for file in path.parent.iterdir()] == [name]  # no draft is left


@pytest.mark.parametrize("name", ["p.csv", "p.tsv.gz", None])
def test_texts_that_look_like_formulas_are_escaped(tmp_path, capfdbinary, name):
    """Spreadsheets run cells that start with = and the like; numbers stay numbers."""
    texts = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\tx", "\rx", "-1.5", "+3e2", "a=b"]
    path = None if name is None else tmp_path / name
    output.write_columns({"=label": np.array(texts), "x": np.arange(9.0) - 4.0}, path)
    if path is None:
        found = capfdbinary.readouterr().out
    else:
        with pa.input_stream(str(path), compression="gzip" if "gz" in name else None) as stream:
            found = stream.read()
    cells = [line.replace(b"\t", b",", 1) for line in found.split(b"\n")]
    assert b'"\'=label"' in cells[0]
    assert all(f"\"'{text}".encode() in found for text in texts[:5])
    assert all(f'"{text}"'.encode() in found for text in texts[6:])
    assert b"-4" in found


def test_parquet_keeps_texts_as_they_are(tmp_path):
    output.write_columns({"label": np.array(["=1+1"])}, tmp_path / "p.parquet")
    assert parquet.read_table(tmp_path / "p.parquet").to_pydict() == {"label": ["=1+1"]}


def test_a_table_on_standard_output(capfdbinary):
    output.write_columns(COLUMNS, None)
    out = capfdbinary.readouterr().out
    assert csv.read_csv(io.BytesIO(out)).num_rows == 2 or b'""aah""' in out
    print("more")  # the stream is still open
    assert b"more" in capfdbinary.readouterr().out


@pytest.mark.parametrize("name", ["p.txt", "p", "p.xlsx", "p.gz"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="end in"):
        output.check_output(tmp_path / name)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "p.csv").mkdir()
    with pytest.raises(ValueError, match="folder"):
        output.check_output(tmp_path / "p.csv")


def test_json_is_strict_and_plain(capsys, tmp_path):
    value = {
        "nan": float("nan"),
        "numpy": np.float64("inf"),
        "whole": np.int64(3),
        "flag": np.bool_(True),
        "path": tmp_path,
        "name": "smørås",
        "list": [1.5, -float("inf")],
    }
    output.print_json(value)
    text = capsys.readouterr().out
    assert text.isascii()  # so the encoding of the terminal does not matter
    assert json.loads(text, parse_constant=pytest.fail) == {
        "nan": None,
        "numpy": None,
        "whole": 3,
        "flag": True,
        "path": str(tmp_path),
        "name": "smørås",
        "list": [1.5, None],
    }


def test_a_value_that_is_not_json_is_not_partly_written(capsys):
    with pytest.raises(TypeError, match="JSON"):
        output.print_json({"a": 1, "b": object()})
    assert capsys.readouterr().out == ""


def test_rows_of_columns():
    rows = output.as_rows(COLUMNS)
    assert rows[1] == {"row": 2, "prediction": "a,b\nc", "p(x)": 1 / 3, "novel": False}
    assert type(rows[0]["novel"]) is bool


def test_notes_go_to_standard_error_and_are_limited(capsys):
    output.print_notes([f"[bold]column {i}" for i in range(30)])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "[bold]column 0" in captured.err
    assert "and 10 more" in captured.err


def test_the_bar_shows_round_likelihood_accuracy_and_time(monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=150)
    monkeypatch.setattr(output, "sidelines", lambda: console)
    with output.RoundsBar(quiet=False) as bar:
        bar.notify("reading [odd] name.csv")
        bar._progress.refresh()
        bar.begin(20)
        bar.show({"round": 7.0, "log_likelihood": -1.23456, "validation_accuracy": 0.8761})
        bar.show({"round": 8.0, "log_likelihood": -1.2, "validation_accuracy": 0.9})
    shown = screen.getvalue()
    for text in ("[odd]", "8/20", "log-likelihood -1.2000, accuracy 90.0 %"):
        assert text in shown
    assert re.search(r"(\d:\d\d|-:--):(\d\d|--)", shown)  # the time that is left


@pytest.mark.parametrize("quiet", [True, False])
def test_no_bar_without_a_terminal(monkeypatch, quiet):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=quiet)  # quiet wins on a terminal, too
    monkeypatch.setattr(output, "sidelines", lambda: console)
    with output.RoundsBar(quiet) as bar:
        bar.begin(3)
        bar.show({"round": 1.0, "log_likelihood": -1.0})
    assert screen.getvalue() == ""
