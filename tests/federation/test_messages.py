"""What may cross the wire, and what may not."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedgmm.federation.messages import (
    DTYPES,
    Message,
    MessageError,
    check_declared_array,
    check_message,
    read_facts,
)

LIMIT = 1_000_000
names = st.from_regex(r"[A-Za-z0-9_.+ /-]{1,30}", fullmatch=True)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)
facts = st.dictionaries(st.text(max_size=10), values, max_size=5)
arrays = st.dictionaries(
    names,
    st.sampled_from(DTYPES).flatmap(
        lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_dims=4, max_side=4))
    ),
    max_size=5,
)


@given(arrays=arrays, facts=facts)
def test_plain_messages_pass_and_know_their_size(arrays, facts):
    message = Message("answer", arrays, facts)
    check_message(message, limit_bytes=LIMIT)
    text = message.facts_text()
    assert message.size == len(text.encode()) + sum(array.nbytes for array in arrays.values())
    assert read_facts(text) == json.loads(json.dumps(facts))
    with pytest.raises(MessageError, match="at most"):
        check_message(message, limit_bytes=message.size - 1)


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(value):
    found = read_facts(Message("answer", {}, {"x": value}).facts_text())["x"]
    assert math.copysign(1, found) == math.copysign(1, value)
    assert found == value


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("Answer!"), "kind"),
        (Message("a" * 60), "kind"),
        (Message(7), "kind"),
        (Message("answer", {"x": [1.0]}), "not an array"),
        (Message("answer", {"": np.zeros(2)}), "no name of an array"),
        (Message("answer", {"a" * 300: np.zeros(2)}), "no name of an array"),
        (Message("answer", {"é": np.zeros(2)}), "no name of an array"),
        (Message("answer", {"a\nb": np.zeros(2)}), "no name of an array"),
        (Message("answer", {3: np.zeros(2)}), "no name of an array"),
        (Message("answer", {"x": np.array([None], dtype=object)}), "of type 'object'"),
        (Message("answer", {"x": np.array(["a"])}), "of type"),
        (Message("answer", {"x": np.zeros(2, dtype=np.complex128)}), "of type 'complex128'"),
        (Message("answer", {"x": np.zeros(2, dtype=">f8")}), "of type '>f8'"),
        (Message("answer", {"x": np.zeros(2, dtype="M8[s]")}), "of type"),
        (Message("answer", {"x": np.zeros(2, dtype=[("a", "f8")])}), "of type"),
        (Message("answer", {"x": np.zeros((2,) + (1,) * 9)}), "too many axes"),
        (Message("answer", {"x": np.zeros((4, 4)).T[1:]}), "row by row"),
        (Message("answer", {f"x{k}": np.zeros(0) for k in range(5000)}), "at most 4096"),
        (Message("answer", {}, {"x": math.nan}), "not finite"),
        (Message("answer", {}, {"x": math.inf}), "not finite"),
        (Message("answer", {}, {"x": 2**64}), "too large"),
        (Message("answer", {}, {"x": {1, 2}}), "no JSON value"),
        (Message("answer", {}, {"x": b"bytes"}), "no JSON value"),
        (Message("answer", {}, {"x": object()}), "no JSON value"),
        (Message("answer", {}, {1: 2}), "name that is no text"),
        (Message("answer", {}, ["x"]), "not a JSON object"),
    ],
)
def test_everything_else_is_refused(message, reason):
    with pytest.raises(MessageError, match=reason):
        check_message(message, limit_bytes=LIMIT)


def test_facts_are_bounded_in_depth_and_size():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MessageError, match="nested deeper"):
        check_message(Message("answer", {}, {"x": deep}), limit_bytes=LIMIT)
    with pytest.raises(MessageError, match="not JSON"):
        read_facts('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(MessageError, match="at most"):
        read_facts(b" " * 20_000_000)
    with pytest.raises(MessageError, match="no JSON number"):
        read_facts('{"x": NaN}')
    with pytest.raises(MessageError, match="not a JSON object"):
        read_facts("[1]")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("object", [1]),
        ("float128", [1]),
        ("<f8", [1]),
        ("float64", [-1]),
        ("float64", [True]),
        ("float64", [1.0]),
        ("float64", "3"),
        ("float64", [1] * 9),
        (None, []),
    ],
)
def test_arrays_are_checked_before_they_are_read(dtype, shape):
    with pytest.raises(MessageError):
        check_declared_array("x", dtype, shape)


def test_declared_sizes_do_not_overflow():
    assert check_declared_array("x", "float64", [2**40, 2**40]) == 8 * 2**80


def test_the_module_is_light():
    code = (
        "import sys; import fedgmm.federation.messages, fedgmm.federation.settings;"
        "heavy = {'torch', 'sklearn', 'pandas', 'pyarrow', 'flwr', 'scipy'} & set(sys.modules);"
        "sys.exit(len(heavy))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
