"""Agreement of all clients, from their summaries."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from fedgmm.data.tables.agreement import (
    DisagreementError,
    agree_on_columns,
    columns_to_read_as_text,
)
from fedgmm.data.tables.columns import column_values
from fedgmm.data.tables.preprocessing import OTHER, Labels, Preprocessing, TableOptions
from fedgmm.data.tables.summaries import ClientSummary, ColumnSummary


def clients(**columns):
    """A summary for each client from one summary of column ``a`` each."""
    return {
        name: ClientSummary(_rows(own), 0, {"a": own}, {"x": 1}) for name, own in columns.items()
    }


def _rows(own):
    return own.missing + (own.count or sum((own.categories or {"": 0}).values()))


def number(mean, squares, count, missing=0, kind="number"):
    return ColumnSummary(kind, missing, count, mean, squares)


def text(missing=0, kind="text", **counts):
    return ColumnSummary(kind, missing, categories=counts)


def agreed(summaries, **options):
    (column,), notes = agree_on_columns(summaries, TableOptions("y", **options))
    return column, notes


def transformed(column, values):
    own = Preprocessing((column,), Labels("y", (0, 1)))
    columns = {"a": column_values(pa.chunked_array([pa.array(values)]))}
    found = own.encode("site.csv", columns, len(values))
    (matrix,) = found.blocks()
    return matrix.T.tolist(), found.unknown


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


def test_small_numbers_are_not_constant():
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
    assert "49" in notes[0]
    values, unknown = transformed(column, ["c00", "c59", "never seen", None])
    assert [row.index(1.0) for row in np.array(values).T.tolist()[:3]] == [0, 49, 49]
    assert sum(np.array(values).T[3]) == 0
    assert not unknown


def hidden(rows, distinct):
    """The summary of a client that does not list its texts, and its rows."""
    column = ColumnSummary("text", 0, categories=None, unlisted=distinct)
    return ClientSummary(rows, 0, {"a": column}, {"x": rows})


def test_a_client_that_does_not_list_its_texts_has_no_veto():
    summaries = clients(p=text(a=300, b=200)) | {"q": hidden(22, 21)}
    column, notes = agreed(summaries)
    assert column.categories == ("a", "b")
    (note,) = notes
    assert all(word in note for word in ("'a'", "21", "q", "names", "--categorical a"))


def test_names_at_most_clients_are_not_used():
    summaries = clients(p=text(a=30, b=20)) | {"q": hidden(500, 480), "r": hidden(400, 390)}
    column, notes = agreed(summaries)
    assert column.role == "ignored"
    assert "names" in notes[0]
    assert "--categorical a" in notes[0]
    assert agreed(summaries, categorical=("a",))[0].categories == ("a", "b")


def test_a_declared_category_is_used_even_if_its_texts_hardly_repeat():
    summaries = clients(p=text(**{f"n{i}": 1 for i in range(40)}), q=text(n1=2))
    assert agreed(summaries)[0].role == "ignored"
    column, _ = agreed(summaries, categorical=("a",))
    assert len(column.categories) == 40


def with_columns(**owned):
    """A client of ten rows for each name, with numbers in the named columns."""
    return {
        client: ClientSummary(10, 0, {c: number(1.0, 5.0, 10) for c in columns}, {"x": 10})
        for client, columns in owned.items()
    }


def test_a_column_that_some_clients_lack_is_missing_there():
    summaries = with_columns(p="abc", q="abc", **{f"r{i}": "a" for i in range(5)})
    columns, notes = agree_on_columns(summaries, TableOptions("y"))
    assert [column.optional for column in columns] == [False, True, True]
    assert [column.indicator for column in columns] == [False, True, True]
    (note,) = notes
    assert note.startswith("2 columns (b, c) are absent at r0, r1, r2 and 2 more")


def test_a_column_of_a_single_client_is_not_used_unless_it_is_declared():
    summaries = with_columns(p=["age"], q=["age"], r=["Age_", "x", "age2"])
    summaries["q"] = replace(summaries["q"], columns={**summaries["q"].columns, "x": text(u=10)})
    summaries["r"] = replace(summaries["r"], columns={**summaries["r"].columns, "x": text(v=10)})
    columns, notes = agree_on_columns(summaries, TableOptions("y"))
    assert {c.name: c.role for c in columns} == {
        "age": "number", "x": "category", "Age_": "ignored", "age2": "ignored",
    }  # fmt: skip
    assert [("only r" in note, "rename" in note) for note in notes[-2:]] == [
        (True, True),
        (True, False),
    ]
    own = {**summaries["r"].columns, "z": text(u=5, v=5)}
    summaries["r"] = replace(summaries["r"], columns=own)
    columns, _ = agree_on_columns(summaries, TableOptions("y", categorical=("z",)))
    assert columns[-1].role == "category"


def test_a_client_without_any_shared_column_is_an_error(fails):
    message = fails(
        agree_on_columns,
        with_columns(p="ab", q="ab", r="cd"),
        TableOptions("y"),
        error=DisagreementError,
    )
    assert message.startswith("Client 'r'")


def test_numbers_that_become_categories_are_named():
    summaries = clients(p=text(high=1, **{"1": 9}), q=text(**{"1": 5, "2": 5}))
    column, notes = agreed(summaries)
    assert column.role == "category"
    (note,) = notes
    assert all(word in note for word in ("because p", "'high'", "and q", "--missing-values"))
    assert agreed(summaries, categorical=("a",))[1] == []
    assert agreed(clients(p=text(high=1, low=9), q=text(low=5)))[1] == []


def test_one_client_that_sets_the_scale_is_named():
    ordinary = {name: number(5.0, 40.0, 10) for name in "pq"}
    assert agreed(clients(**ordinary, r=number(9.0, 40.0, 10)))[1] == []
    _, notes = agreed(clients(**ordinary, r=number(1e6, 1e12, 10)))
    assert "r" in notes[0]
    assert "--missing-values" in notes[0]


def test_names_that_are_seen_only_together():
    """Few at every client, but hardly one occurs twice."""
    summaries = clients(
        **{f"c{k}": text(**{f"n{k}_{i}": 1 for i in range(5)}) for k in range(10)},
    )
    assert agreed(summaries)[0].role == "ignored"


def test_client_that_a_disagreement_blames(fails):
    summaries = clients(
        p=number(1.0, 1.0, 3),
        q=ColumnSummary("text", 0, categories={"12": 1, "x": 1}),
        r=number(1, 1, 3),
    )
    message = fails(agree_on_columns, summaries, TableOptions("y"), error=DisagreementError)
    assert message.startswith("Client 'q'")
    assert "'x'" in message


def test_clients_that_must_read_a_column_as_text():
    options = TableOptions("y", max_categories=3)
    few, many = text(a=1, b=1), text(a=1, b=1, c=1, d=1)
    truth, numeric = text(kind="boolean", true=1), number(1, 1, 3)
    assert columns_to_read_as_text(clients(p=few, q=truth, r=numeric), options) == {
        "q": {"a"},
        "r": {"a"},
    }
    assert columns_to_read_as_text(clients(p=many, q=truth, r=numeric), options) == {"q": {"a"}}
    assert columns_to_read_as_text(clients(q=truth, r=numeric), options) == {}


def test_options_that_name_an_unknown_column(fails):
    unknown = TableOptions("y", ignore=("zz",))
    assert "'zz'" in fails(agree_on_columns, clients(p=number(1, 1, 3)), unknown, error=ValueError)


@pytest.mark.parametrize(
    "dates", ["31.01.2024 01.02.2024", "1/31/24 12/1/24", "31-01-2024 1-2-2024"]
)
def test_a_note_about_dates_that_are_not_read_as_dates(dates):
    counts = dict.fromkeys(dates.split(), 5)
    _, notes = agreed(clients(oslo=text(**counts)))
    assert len(notes) == 1
    assert "dates" in notes[0]
    assert "2024-12-31" in notes[0]


@pytest.mark.parametrize("texts", ["1.2.3 31.01.2024x", "31.01.2024 north", "a b", "1.1-2024 b"])
def test_no_note_about_texts_that_are_not_all_dates(texts):
    _, notes = agreed(clients(oslo=text(**dict.fromkeys(texts.split(), 5))))
    assert notes == []


def test_columns_that_one_rule_drops_share_a_note():
    columns = {"a": number(5.0, 0.0, 9), "b": number(3.0, 0.0, 9), "x": number(5.0, 8.0, 9)}
    _, notes = agree_on_columns({"p": ClientSummary(9, 0, columns, {"u": 9})}, TableOptions("y"))
    assert notes == ["2 columns (a, b) are not used: all values are equal."]


def with_vectors(**names):
    """A summary for each client, with one column of vectors of two or more numbers."""
    return {
        client: ClientSummary(
            9,
            0,
            {f"{name}_{i}": number(0.0, 1.0, 9) for i in range(length)}
            | {"a": number(0.0, 1.0, 9)},
            {"x": 9},
            vectors={name: length},
        )
        for client, (name, length) in names.items()
    }


@pytest.mark.parametrize(
    ("vectors", "client", "problem"),
    [
        ({"b": ("r_1", 2), "c": ("r_1", 2), "d": ("r_2", 2)}, "d", "another encoder"),
        ({"b": ("r_2", 2), "c": ("r_1", 2), "d": ("r_1", 2)}, "b", "another encoder"),
        ({"b": ("r_1", 2), "c": ("r_2", 2)}, "c", "another encoder"),
        ({"b": ("v", 3), "c": ("v", 2), "d": ("v", 3)}, "c", "2 numbers"),
    ],
)
def test_vectors_of_another_encoder_are_refused(vectors, client, problem):
    with pytest.raises(DisagreementError, match=problem) as raised:
        agree_on_columns(with_vectors(**vectors), TableOptions("y"))
    assert raised.value.client == client
