"""The agreement of the clients, its record, and what it does to rows."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from fedgmm.data.tabular.labels import Labels
from fedgmm.data.tabular.preprocessing import (
    OTHER,
    Column,
    Preprocessing,
    TableOptions,
    agree_on_columns,
    needs_text,
)
from fedgmm.data.tabular.summaries import ClientSummary, ColumnSummary


def clients(**columns):
    """A summary for each client from one summary of column ``a`` each."""
    return {
        name: ClientSummary(_rows(told), 0, {"a": told}, {"x": 1}) for name, told in columns.items()
    }


def _rows(told):
    return told.missing + (told.count or sum((told.categories or {"": 0}).values()))


def number(mean, squares, count, missing=0, kind="number"):
    return ColumnSummary(kind, missing, count, mean, squares)


def text(missing=0, kind="text", **counts):
    return ColumnSummary(kind, missing, categories=counts)


def agreed(summaries, **options):
    (column,), notes = agree_on_columns(summaries, TableOptions("y", **options))
    return column, notes


def transformed(column, values):
    own = Preprocessing((column,), Labels("y", (0, 1)))
    return own.transform("site.csv", pa.record_batch({"a": values})).T.tolist(), own


def test_truth_values_beside_zeros_and_ones_are_numbers():
    column, _ = agreed(clients(p=text(kind="boolean", true=3, false=1), q=number(0.5, 1.0, 4)))
    assert column.role == "number"
    assert column.mean == pytest.approx(5 / 8)
    assert column.scale == pytest.approx(math.sqrt(15 / 64))
    (values,), _ = transformed(column, ["True", "false"])
    assert values == pytest.approx([(1 - 5 / 8) / column.scale, -5 / 8 / column.scale])


def test_constant_columns():
    column, notes = agreed(clients(p=number(5.0, 0.0, 4), q=number(5.0, 0.0, 2)))
    assert (column.role, len(notes)) == ("ignored", 1)
    column, _ = agreed(clients(p=number(5.0, 0.0, 4, missing=4)))
    assert transformed(column, pa.array([5.0, None]))[0] == [[0, 0], [0, 1]]
    assert agreed(clients(p=text(a=4)))[0].role == "ignored"
    assert agreed(clients(p=text(kind="boolean", true=4)))[0].role == "ignored"
    assert agreed(clients(p=text(missing=4)))[0].role == "ignored"


def test_small_numbers_are_no_constant():
    column, _ = agreed(clients(p=number(1e-14, 4e-28, 4)))
    assert (column.role, column.scale) == ("number", pytest.approx(1e-14))
    assert agreed(clients(p=number(1e-308, 0.0, 4)))[0].role == "ignored"


@pytest.mark.parametrize("mean", [math.inf, math.nan, 1e200])
def test_numbers_too_large(mean):
    column, notes = agreed(clients(p=number(mean, 1.0, 4), q=number(1.0, 1.0, 4)))
    assert column.role == "ignored"
    assert "too large" in notes[0]


def test_the_rarest_categories_are_joined():
    counts = {f"c{i:02}": 100 - i for i in range(60)}
    counts[OTHER] = 200
    column, notes = agreed(clients(p=ColumnSummary("text", 0, categories=counts)))
    assert len(column.categories) == 50
    assert column.categories == (*(f"c{i:02}" for i in range(49)), OTHER)
    assert "49 most frequent" in notes[0]
    values, own = transformed(column, ["c00", "c59", "never seen", None])
    assert [row.index(1.0) for row in np.array(values).T.tolist()[:3]] == [0, 49, 49]
    assert sum(np.array(values).T[3]) == 0
    assert not own.unknown_categories()


def test_names_at_any_client_are_not_used():
    column, notes = agreed(clients(p=text(a=3, b=2), q=ColumnSummary("text", 0, categories=None)))
    assert column.role == "ignored"
    assert "look like names" in notes[0]


def test_names_that_are_seen_only_together():
    """Few at every client, but hardly one occurs twice."""
    summaries = clients(
        **{f"c{k}": text(**{f"n{k}_{i}": 1 for i in range(5)}) for k in range(10)},
    )
    assert agreed(summaries)[0].role == "ignored"


def test_whom_a_disagreement_blames(fails):
    summaries = clients(
        p=number(1.0, 1.0, 3),
        q=ColumnSummary("text", 0, categories={"12": 1, "x": 1}),
        r=number(1, 1, 3),
    )
    message = fails(agree_on_columns, summaries, TableOptions("y"), error="DisagreementError")
    assert message.startswith("Client 'q'")
    assert "'a' holds text such as 'x', where 'p' has numbers" in message


def test_who_reads_again_as_text():
    options = TableOptions("y", max_categories=3)
    few, many = text(a=1, b=1), text(a=1, b=1, c=1, d=1)
    truth, numeric = text(kind="boolean", true=1), number(1, 1, 3)
    assert needs_text(clients(p=few, q=truth, r=numeric), options) == {"q": {"a"}, "r": {"a"}}
    assert needs_text(clients(p=many, q=truth, r=numeric), options) == {"q": {"a"}}
    assert needs_text(clients(q=truth, r=numeric), options) == {}


def test_options_that_make_no_sense(fails):
    assert "'y'" in fails(TableOptions, "y", ignore=("y",))
    assert "'c'" in fails(TableOptions, "y", client_column="c", ignore=("c",))
    assert "'y'" in fails(TableOptions, "y", client_column="y")
    assert "max_categories" in fails(TableOptions, "y", max_categories=1)
    assert "indicator_from" in fails(TableOptions, "y", indicator_from=2.0)
    unknown = TableOptions("y", ignore=("zz",))
    assert "'zz'" in fails(agree_on_columns, clients(p=number(1, 1, 3)), unknown)


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
