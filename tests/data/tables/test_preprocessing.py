"""Conversion of columns and labels, and its record."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from fedgmm.data.tables.columns import column_values
from fedgmm.data.tables.errors import TableError
from fedgmm.data.tables.preprocessing import (
    UNKNOWN,
    Column,
    Labels,
    Preprocessing,
    TableOptions,
)


def transformed(column, values):
    own = Preprocessing((column,), Labels("y", (0, 1)))
    columns = {"a": column_values(pa.chunked_array([pa.array(values)]))}
    found = own.encode("site.csv", columns, len(values))
    (matrix,) = found.blocks()
    return matrix.T.tolist(), found.unknown


def test_options_that_contradict_each_other(fails):
    fails = partial(fails, error=ValueError)
    assert "'y'" in fails(TableOptions, "y", ignore=("y",))
    assert "'c'" in fails(TableOptions, "y", client_column="c", ignore=("c",))
    assert "'y'" in fails(TableOptions, "y", client_column="y")
    assert "max_categories" in fails(TableOptions, "y", max_categories=1)
    assert "indicator_from" in fails(TableOptions, "y", indicator_from=2.0)


NUMBER, DATE = Column("a", "number", 1.0, 2.0), Column("a", "date", 1.0, 2.0)
COLOUR, TRUTH = (
    Column("a", "category", categories=("blue", "red")),
    Column("a", "category", categories=("false", "true")),
)


@pytest.mark.parametrize(
    ("column", "values", "example"),
    [
        (NUMBER, ["1", "secret"], "'secret'"),
        (NUMBER, pa.array([0], pa.timestamp("s")), "dates"),
        (DATE, [1.0], "numbers"),
        (DATE, ["2020-01-01", "secret"], "'secret'"),
        (COLOUR, ["1", "2"], "numbers"),
    ],
)
def test_another_kind_than_in_training(column, values, example):
    with pytest.raises(TableError, match=r"^site\.csv.*'a'") as caught:
        transformed(column, values)
    assert example in str(caught.value)
    assert "'a'" in caught.value.public
    assert "secret" not in caught.value.public
    assert "site.csv" not in caught.value.public


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        (NUMBER, pa.nulls(1), [[0]]),
        (NUMBER, ["3"], [[1]]),
        (NUMBER, [1e308], [[np.float32(1e12)]]),
        (TRUTH, ["1", "0.0", "TRUE", None], [[1, 0, 1, 0]]),
        (TRUTH, pa.array([True, False]), [[1, 0]]),
        (COLOUR, ["red", "blue", "green", None], [[1, 0, 0, 0]]),
    ],
)
def test_values_as_training_knew_them(column, values, expected):
    assert transformed(column, values)[0] == expected


def test_unknown_categories_are_counted():
    assert transformed(COLOUR, ["red", "green", "grey", None])[1] == {"a": 2}


def test_headers(fails):
    own = Preprocessing((NUMBER, Column("b", "ignored")), Labels("y", (0, 1)), "site")
    own.check_header("f.csv", ["b", "a"])
    own.check_header("f.csv", ["a"])  # what is not used may be missing
    own.check_header("f.csv", ["y", "site", "b", "a"], label_needed=True)
    assert "'a'" in fails(own.check_header, "f.csv", ["b"])
    (note,) = own.check_header("f.csv", ["a", "b", "zz"])
    assert "zz not used" in note
    assert "'y'" in fails(own.check_header, "f.csv", ["a", "b"], label_needed=True)


def test_a_record_that_is_not_valid():
    own = Preprocessing((NUMBER,), Labels("y", (0, 1)))
    record = json.loads(json.dumps(own.record()))
    assert Preprocessing.from_record(record) == own
    for change in ({"role": "magic"}, {"scale": 0.0}, {"mean": math.nan}, {"scale": math.inf}):
        broken = {**record, "columns": [{**record["columns"][0], **change}]}
        with pytest.raises(ValueError, match="'a'"):
            Preprocessing.from_record(broken)


# ---------------------------------------------------------------------- labels


def agreed(*clients, rows=1, task="auto"):
    return Labels.agreed("y", [dict.fromkeys(own, rows) for own in clients], task)


@pytest.mark.parametrize(
    ("clients", "classes"),
    [
        ([["b", "a"], ["c"]], ("a", "b", "c")),
        ([["1", "10"], ["2"]], (1, 2, 10)),
        ([["1"], ["2.0", "1.0"]], (1, 2)),
        ([["-1"], ["+1"]], (-1, 1)),
        ([["True"], ["false", "true"]], (False, True)),
        ([["True", "False"], ["1", "0.0"]], (False, True)),
        ([["0", "1"], ["1.0"]], (0, 1)),
        ([["true", "false"], ["2"]], ("2", "false", "true")),
        ([["007"], ["7"]], ("007", "7")),
        ([["0.5", "1"], ["1.5"]], (0.5, 1.0, 1.5)),
        ([["1", "2"], ["x"]], ("1", "2", "x")),
        ([["9" * 30], ["8" * 30]], ("8" * 30, "9" * 30)),
        ([["1e999"], ["2e999"]], ("1e999", "2e999")),
        ([["1" * 5000], ["x"]], ("1" * 5000, "x")),
        ([["."], ["1"]], (".", "1")),
        ([["٣"], ["٤"]], ("٣", "٤")),
    ],
)
def test_classes_are_the_union(clients, classes):
    labels = agreed(*clients)
    assert labels.classes == classes
    assert list(map(type, labels.classes)) == list(map(type, classes))
    again = Labels.from_record(json.loads(json.dumps(labels.record())))
    assert again == labels
    texts = [text for own in clients for text in own]
    values = column_values(pa.chunked_array([pa.array([*texts, None])]))
    codes, unknown = again.encode_column(values)
    assert not unknown
    assert codes[-1] == UNKNOWN
    assert set(codes[:-1].tolist()) == set(range(len(classes)))
    assert labels.array.shape == (len(classes),)


def test_unknown_labels():
    codes, unknown = agreed(["1", "2"]).encode(["2.0", "3", "x", "1"])
    assert codes.tolist() == [1, UNKNOWN, UNKNOWN, 0]
    assert unknown == ["3", "x"]


def test_labels_that_are_not_classes(fails):
    fails = partial(fails, error=ValueError)
    assert "class 'a'" in fails(agreed, ["a"], ["a"])
    assert "no values" in fails(agreed, [], [])
    assert "--task regression" in fails(agreed, [str(0.1 + i) for i in range(30)])
    assert "--task classification" in fails(agreed, map(str, range(500)))
    assert "free text" in fails(agreed, ["long " * 500 + str(i) for i in range(1500)])


def test_many_whole_numbers_are_classes():
    assert len(agreed(map(str, range(500)), rows=4).classes) == 500
    assert len(agreed(map(str, range(500)), task="classification").classes) == 500
    assert agreed(["0", "1"]).array.dtype.kind == "i"
    assert agreed(["true", "false"]).array.dtype == np.bool_


def test_labels_that_hardly_repeat_are_no_classes():
    dates = {f"{day:02d}.{month:02d}.1960": 1 for day in range(1, 29) for month in (1, 2)}
    with pytest.raises(ValueError, match="--label"):
        Labels.agreed("born", [dates])
    assert len(Labels.agreed("born", [dates], "classification").classes) == 56
    assert (
        len(Labels.agreed("town", [dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 3)]).classes) == 26
    )
