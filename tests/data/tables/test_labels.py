"""Classes from labels of any kind."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from fedgmm.data.tables.labels import UNKNOWN, Labels


def agreed(*clients):
    return Labels.agreed("y", [dict.fromkeys(own, 1) for own in clients])


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
    codes, strange = again.encode(pa.array([*texts, None]))
    assert not strange
    assert codes[-1] == UNKNOWN
    assert set(codes[:-1].tolist()) == set(range(len(classes)))
    assert labels.array.shape == (len(classes),)


def test_labels_that_nobody_had():
    labels = agreed(["1", "2"])
    codes, strange = labels.encode(pa.array(["2.0", "3", "x", None, "1"]))
    assert codes.tolist() == [1, UNKNOWN, UNKNOWN, UNKNOWN, 0]
    assert strange == ["3", "x"]


def test_labels_that_are_no_classes(fails):
    assert "only the class 'a'" in fails(agreed, ["a"], ["a"])
    assert "no values" in fails(agreed, [], [])
    assert "measurement" in fails(agreed, [str(0.1 + i) for i in range(30)])
    assert "measurement" in fails(agreed, ["long " * 500 + str(i) for i in range(1500)])


def test_many_whole_numbers_are_classes():
    assert len(agreed(map(str, range(500))).classes) == 500
    assert agreed(["0", "1"]).array.dtype.kind == "i"
    assert agreed(["true", "false"]).array.dtype == np.bool_
