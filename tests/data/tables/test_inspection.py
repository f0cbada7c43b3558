"""Facts about clients and columns, and warnings."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedgmm.data.tables.inspection import inspect_tables


@pytest.fixture
def inspected(write, read):
    def of(label="y", ignore=(), **files):
        paths = [write(f"{name}.csv", content) for name, content in files.items()]
        return inspect_tables(read(*paths, label=label, ignore=ignore))

    return of


def site(values, labels, header="x,c,y"):
    rows = [f"{v},{'uv'[i % 2]},{y}" for i, (v, y) in enumerate(zip(values, labels, strict=True))]
    return "\n".join([header, *rows]) + "\n"


def test_clients_and_columns(inspected):
    found = inspected(
        a=site([0, 1, 2, 3, ""] * 10, ["p", "q"] * 25), b=site(range(10, 40), ["p"] * 30)
    )
    assert json.loads(json.dumps(found.record()))["classes"] == {"p": 55, "q": 25}
    a = found.clients[0]
    assert (a.name, a.rows, a.classes) == ("a", 50, {"p": 25, "q": 25})
    assert a.missing == pytest.approx(10 / 100)
    values = np.array([0, 1, 2, 3] * 10 + list(range(10, 40)))
    gap = (1.5 - values.mean()) / values.std()
    assert a.marginal_shift == pytest.approx(abs(gap))
    assert a.farthest_column == ("x", pytest.approx(gap))
    assert a.label_shift == pytest.approx(55 / 80 - 0.5)
    x, c = found.columns
    assert (x.name, x.role, x.missing, x.outputs) == ("x", "number", 10 / 80, 2)
    assert (c.name, c.role, c.detail) == ("c", "category", "u, v")


def test_columns_to_ignore_count_for_nothing(inspected):
    a, b = site([0, 1, 2, 3, ""] * 10, ["p", "q"] * 25), site(range(30), ["p"] * 30, "x,note,y")
    found = inspected(a=a, b=b, ignore=("c", "note"))
    assert found.clients[0].missing == pytest.approx(10 / 50)
    assert [column.role for column in found.columns] == ["number", "ignored", "ignored"]


def test_warnings(inspected):
    found = inspected(
        a=site([0, 1] * 20, ["p", "q"] * 20),
        b=site([100, 101, ""], ["p", "p", ""]),
        d=site([""] * 30, ["r"] * 30),
    )
    warnings = "\n".join(found.warnings)
    for words in (
        "1 row has no label",
        "only 2 rows",
        "'q', 'r'",
        "no value in column 'x'",
        "b lies +",
        "d has other labels",
        "only at d",
    ):
        assert words in warnings
    assert len(set(found.warnings)) == len(found.warnings)


def test_labels_are_counted_as_classes(inspected):
    found = inspected(a=site([0, 1], ["1", "2"]), b=site([0, 1], ["1.0", "2.0"]))
    assert found.classes == {"1": 2, "2": 2}
    assert [client.label_shift for client in found.clients] == [0, 0]


def test_labels_that_cannot_be_learned_are_a_warning(inspected):
    assert any("class 'p'" in w for w in inspected(a=site([0, 1], "pp")).warnings)
    measured = inspected(a=site(range(30), [i / 7 for i in range(1, 31)]))
    assert any("measurement" in warning for warning in measured.warnings)


def test_without_a_label(inspected):
    found = inspected(label=None, a=site([0, 1] * 20, "pq" * 20), b=site([0, 1] * 20, "pq" * 20))
    assert found.classes == {}
    assert [column.name for column in found.columns] == ["x", "c", "y"]
    assert found.warnings == []


def test_files_that_do_not_fit_together(inspected, fails):
    message = fails(inspected, a=site([0], "p"), b=site([0], "p", header="v,d,y"))
    assert "a.csv" in message
    assert "'x'" in message


def test_warnings_about_all_clients_come_first(inspected):
    found = inspected(
        a=site([0, 1] * 20, ["p", "q"] * 20), b=site(range(5), ["r", "s", "p", "q", "p"])
    )
    first, second, *rest = found.warnings
    assert "'r'" in first
    assert "'s'" in second
    assert any(note.startswith("b has only 5 rows") for note in rest)
    assert any("'r', 's'" in note for note in rest)
