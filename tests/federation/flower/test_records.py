"""Messages as Flower's records: a round trip changes nothing, and anything else is refused."""

import json
import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedgmm.federation.flower.records import from_records, to_records
from fedgmm.federation.messages import DTYPES, Message, MessageError

NAMES = st.text("abcdefgh_/0", min_size=1, max_size=12)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
FACTS = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=9)
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)  # fmt: skip


@given(st.dictionaries(NAMES, ARRAYS, max_size=4), FACTS)
def test_a_round_trip_changes_nothing(arrays, facts):
    message = Message("round", arrays, facts)

    back = from_records(to_records(message))

    assert back.kind == "round"
    assert back.facts == facts
    assert list(back.arrays) == list(arrays)  # the order too
    for name, array in arrays.items():
        assert back.arrays[name].dtype == array.dtype
        assert back.arrays[name].tobytes() == array.tobytes()  # bit by bit, with NaN and -0.0
        assert back.arrays[name].shape == array.shape
        assert back.arrays[name].flags.writeable


LAYOUT = [["x", "float64", [2, 3]]]
SIX = np.arange(6.0).tobytes()


def records(layout=LAYOUT, payload=SIX, stype="bytes", name="payload", **words):
    arrays = {name: Array("uint8", (len(payload),), stype, payload)}
    texts = {"kind": "answer", "facts": "{}", "layout": json.dumps(layout), **words}
    return RecordDict({"arrays": ArrayRecord(arrays), "words": ConfigRecord(texts)})


def test_the_records_of_these_tests_are_valid():
    assert from_records(records()).arrays["x"].sum() == 15


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (records([["x", "object", [6]]]), "object"),
        (records([["x", "float128", [3]]]), "of type"),
        (records([["x", ">f8", [6]]]), "of type"),
        (records([["x", ["float64"], [6]]]), "of type"),
        (records([["x", "float64", [5]]]), "40 bytes"),
        (records([["x", "float64", [10**9, 10**9]]]), "48 bytes"),
        (records([["x", "float64", [-2, -3]]]), "shape"),
        (records([["x", "float64", [6.0]]]), "shape"),
        (records([["x", "float64", [True]]]), "shape"),
        (records([["x", "float64", 6]]), "shape"),
        (records([["x", "float64", [1] * 8 + [6]]]), "too many axes"),
        (records([["../x;", "float64", [6]]]), "name"),
        (records([["x", "float64", [3]], ["x", "float64", [3]]]), "same name"),
        (records([["x", "float64"]]), "entry"),
        (records({"x": 1}), "not a list"),
        (records([]), "48 bytes"),
        (records(payload=b""), "0 bytes"),
        (records(payload=pickle.dumps({"x": 1})), "bytes"),
        (records(stype="numpy.ndarray"), "one array of bytes"),
        (records(name="x"), "one array of bytes"),
        (records(layout="{"), "not a list"),
        (records(facts="{"), "not JSON"),
        (records(facts="[" * 100_000), "not JSON"),
    ],
)
def test_a_message_that_contradicts_its_layout_is_refused(content, word):
    with pytest.raises(MessageError, match=word):
        from_records(content)


@given(
    st.lists(
        st.tuples(
            st.text(max_size=5) | st.integers() | st.none(),
            st.sampled_from([*DTYPES, "object", "O", "<f8", "str"]) | st.none(),
            st.lists(st.integers(-2, 2**62) | st.floats() | st.none(), max_size=4) | st.none(),
        ).map(list)
        | st.integers()
        | st.text(max_size=3),
        max_size=4,
    ),
    st.binary(max_size=64),
)
def test_any_records_are_read_or_refused(layout, payload):
    """The only error is MessageError, and arrays have the size of their bytes."""
    try:
        message = from_records(records(layout, payload))
    except MessageError:
        return
    assert sum(array.nbytes for array in message.arrays.values()) == len(payload)


def test_a_bool_is_true_or_false():
    back = from_records(records([["x", "bool", [3]]], b"\x00\x01\x07"))

    assert back.arrays["x"].tobytes() == b"\x00\x01\x01"


def test_a_message_that_is_too_large_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(np, "frombuffer", None)  # reading would fail otherwise

    with pytest.raises(MessageError, match="at most 40"):
        from_records(records(), limit_bytes=40)


WORDS = {"kind": "a", "facts": "{}", "layout": "[]"}


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({"arrays": ArrayRecord({})}),
        RecordDict({"arrays": ArrayRecord({}), "words": MetricRecord({"kind": 1})}),
        RecordDict({"arrays": ArrayRecord({}), "words": ConfigRecord({"kind": "a", "facts": "{}"})}),
        RecordDict({"arrays": ArrayRecord({}), "words": ConfigRecord(WORDS | {"kind": 1})}),
        RecordDict({"arrays": ArrayRecord({}), "words": ConfigRecord(WORDS | {"kind": "A!"})}),
        RecordDict({"arrays": ArrayRecord({}), "words": ConfigRecord(WORDS | {"facts": "[]"})}),
        RecordDict({"arrays": ArrayRecord({}), "words": ConfigRecord(WORDS | {"facts": "{"})}),
        RecordDict({"arrays": ArrayRecord({}), "words": ConfigRecord(WORDS | {"facts": '{"x": NaN}'})}),
        RecordDict({"arrays": ArrayRecord({}), "words": ConfigRecord(WORDS | {"more": 1})}),
    ],
)  # fmt: skip
def test_records_that_are_not_a_message_are_refused(content):
    with pytest.raises(MessageError):
        from_records(content)
