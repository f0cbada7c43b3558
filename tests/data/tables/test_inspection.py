"""Facts about clients and columns, and warnings."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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
        "b (2)",
        "'q', 'r': b",
        "'x' has no value at d",
        "b in 'x' (+",
        "d (0.58)",
        "'r' at d",
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
    first, *rest = found.warnings
    assert "'r' at b and 's' at b" in first
    assert any("b (5)" in note for note in rest)
    assert any("'r', 's': a" in note for note in rest)


def test_warnings_about_many_clients_are_one_sentence(inspected):
    found = inspected(**{f"s{i}": site([i] * 5, "pqpqp") for i in range(9)})
    (few,) = [note for note in found.warnings if "Fewer" in note]
    assert "s0 (5), s1 (5), s2 (5) and 6 more" in few
    assert len(found.warnings) <= 3


def test_imbalance(inspected):
    common = ["p"] * 97 + ["q"] * 3
    found = inspected(a=site([0, 1] * 50, common), b=site([0, 1] * 50, ["p"] * 99 + ["q"]))
    (note,) = [note for note in found.warnings if "rare" in note]
    for words in ("'q'", "2.0 % of all rows", "1.0 % at b", "3.0 % at a", "98.0 %", "precision"):
        assert words in note
    rate = found.base_rates[1]
    assert (rate.label, rate.share) == ("q", 0.02)
    assert (rate.lowest, rate.highest) == (("b", 0.01), ("a", 0.03))
    assert not any("rare" in w for w in inspected(a=site([0, 1] * 20, "pq" * 20)).warnings)


def test_a_label_that_looks_continuous_has_one_warning(inspected):
    found = inspected(a=site(range(60), [i / 7 for i in range(60)]), b=site([1], ["3.3"]))
    (note,) = [note for note in found.warnings if "'y'" in note]
    assert "--task regression" in note
    assert not any("only one client" in w or "No row" in w for w in found.warnings)
    assert not any("Other labels" in w for w in found.warnings)
    assert found.base_rates == []


def test_numbers_to_predict_have_means_and_no_classes(write, read):
    paths = [write("a.csv", site([1, 2, 3], [1.5, 2.5, 6.5])), write("b.csv", site([4, 5], [0, 4]))]
    found = inspect_tables(read(*paths, task="regression"))
    assert [client.target for client in found.clients] == [
        pytest.approx((3.5, np.std([1.5, 2.5, 6.5]))),
        pytest.approx((2.0, 2.0)),
    ]
    assert (found.classes, found.base_rates) == ({}, [])
    assert not any("label" in warning or "class" in warning for warning in found.warnings)


def test_columns_that_look_like_ids(inspected):
    def rows(start, names="x,patient_id,n,y"):
        return (
            names
            + "\n"
            + "".join(f"{3 * i},{7 * i + start},{i + start},{'pq'[i % 2]}\n" for i in range(30))
        )

    found = inspected(a=rows(1), b=rows(1000))
    ids = [note for note in found.warnings if "--id" in note]
    assert [("--id patient_id" in note, "--id n" in note) for note in ids] == [
        (True, False),
        (False, True),
    ]


def test_ambiguous_dates(inspected):
    found = inspected(
        a="d,x,y\n" + "1/2/2020,1,p\n3/4/2020,2,q\n" * 10,
        b="d,x,y\n" + "5/6/2020,1,p\n3/4/2020,2,q\n" * 10,
    )
    assert any("'d'" in note and "--date-format" in note for note in found.warnings)


def test_numbers_that_look_like_codes_for_missing_values(inspected):
    rows = "".join(
        f"{-9 if i % 5 == 0 else i % 7},{999 if i % 6 == 0 else i % 3},{i % 4 - 2},{'pq'[i % 2]}\n"
        for i in range(60)
    )
    found = inspected(a="x,z,w,y\n" + rows, b="x,z,w,y\n" + rows)
    codes = [note for note in found.warnings if "--missing-values" in note]
    assert [("-9 occurs repeatedly in x" in n, "999 occurs" in n) for n in codes] == [
        (True, False),
        (False, True),
    ]


def test_a_column_of_vectors_is_one_line(tmp_path, read):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        vectors = [None if row < 5 else rng.normal(size=6).tolist() for row in range(30)]
        y = ["p", "q"] * 15
        pq.write_table(
            pa.table({"v": vectors, "age": range(30), "y": y}), tmp_path / f"{name}.parquet"
        )
    found = inspect_tables(read(tmp_path / "a.parquet", tmp_path / "b.parquet", label="y"))
    vector, age = found.columns
    found = (vector.name, vector.role, vector.outputs, vector.detail)
    assert found == ("v", "vector", 6 + 1, "6 numbers")  # one indicator of missing vectors
    assert vector.missing == pytest.approx(1 / 6)
    assert age.name == "age"
