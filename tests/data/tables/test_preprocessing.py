"""What a preprocessing does to rows, and its record."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from fedgmm.data.tables.labels import Labels
from fedgmm.data.tables.preprocessing import Column, Preprocessing, TableOptions


def transformed(column, values):
    own = Preprocessing((column,), Labels("y", (0, 1)))
    return own.transform("site.csv", pa.record_batch({"a": values})).T.tolist(), own


def test_options_that_make_no_sense(fails):
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
    ("column", "values", "told"),
    [
        (NUMBER, ["1", "x"], "text such as 'x' where training had numbers"),
        (NUMBER, pa.array([0], pa.timestamp("s")), "dates where training had numbers"),
        (DATE, [1.0], "numbers where training had dates"),
        (DATE, ["2020-01-01", "soon"], "text such as 'soon' where training had dates"),
        (COLOUR, ["1", "2"], "numbers where training had blue, red"),
        (NUMBER, pa.array([[1]]), "list<item: int64>, which is no table value"),
    ],
)
def test_another_kind_than_in_training(fails, column, values, told):
    message = fails(transformed, column, values)
    assert message.startswith("site.csv: the column 'a' holds ")
    assert told in message


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
    assert transformed(COLOUR, ["red", "green", "grey", None])[1].unknown_categories() == {"a": 2}


def test_headers(fails):
    own = Preprocessing((NUMBER, Column("b", "ignored")), Labels("y", (0, 1)), "site")
    own.check_header("f.csv", ["b", "a"])
    own.check_header("f.csv", ["a"])  # what is not used may be missing
    own.check_header("f.csv", ["y", "site", "b", "a"], label_needed=True)
    assert "f.csv: the column 'a' is missing" in fails(own.check_header, "f.csv", ["b"])
    assert "'zz' was not there" in fails(own.check_header, "f.csv", ["a", "b", "zz"])
    assert "label column 'y'" in fails(own.check_header, "f.csv", ["a", "b"], label_needed=True)


def test_a_record_that_makes_no_sense():
    own = Preprocessing((NUMBER,), Labels("y", (0, 1)))
    record = json.loads(json.dumps(own.record()))
    assert Preprocessing.from_record(record) == own
    for change in ({"role": "magic"}, {"scale": 0.0}, {"mean": math.nan}, {"scale": math.inf}):
        broken = {**record, "columns": [{**record["columns"][0], **change}]}
        with pytest.raises(ValueError, match="'a'"):
            Preprocessing.from_record(broken)
