"""Messages: the rules for arrays and facts."""

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
    checked_reply,
    read_facts,
    reply_or_failure,
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
    message = Message("reply", arrays, facts)
    check_message(message, limit_bytes=LIMIT)
    text = message.facts_text
    assert message.size == len(text.encode()) + sum(array.nbytes for array in arrays.values())
    assert read_facts(text) == json.loads(json.dumps(facts))
    with pytest.raises(MessageError, match="at most"):
        check_message(message, limit_bytes=message.size - 1)


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(value):
    found = read_facts(Message("reply", {}, {"x": value}).facts_text)["x"]
    assert math.copysign(1, found) == math.copysign(1, value)
    assert found == value


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("Answer!"), "kind"),
        (Message("a" * 60), "kind"),
        (Message(7), "kind"),
        (Message("reply", {"x": [1.0]}), "not an array"),
        (Message("reply", {"": np.zeros(2)}), "not allowed"),
        (Message("reply", {"a" * 300: np.zeros(2)}), "not allowed"),
        (Message("reply", {"é": np.zeros(2)}), "not allowed"),
        (Message("reply", {"a\nb": np.zeros(2)}), "not allowed"),
        (Message("reply", {3: np.zeros(2)}), "not allowed"),
        (Message("reply", {"x": np.array([None], dtype=object)}), "of type 'object'"),
        (Message("reply", {"x": np.array(["a"])}), "of type"),
        (Message("reply", {"x": np.zeros(2, dtype=np.complex128)}), "of type 'complex128'"),
        (Message("reply", {"x": np.zeros(2, dtype=">f8")}), "of type '>f8'"),
        (Message("reply", {"x": np.zeros(2, dtype="M8[s]")}), "of type"),
        (Message("reply", {"x": np.zeros(2, dtype=[("a", "f8")])}), "of type"),
        (Message("reply", {"x": np.zeros((2,) + (1,) * 9)}), "too many axes"),
        (Message("reply", {"x": np.zeros((4, 4)).T[1:]}), "contiguous"),
        (Message("reply", {f"x{k}": np.zeros(0) for k in range(5000)}), "at most 4096"),
        (Message("reply", {}, {"x": math.nan}), "not finite"),
        (Message("reply", {}, {"x": math.inf}), "not finite"),
        (Message("reply", {}, {"x": 2**64}), "too large"),
        (Message("reply", {}, {"x": {1, 2}}), "JSON value"),
        (Message("reply", {}, {"x": b"bytes"}), "JSON value"),
        (Message("reply", {}, {"x": object()}), "JSON value"),
        (Message("reply", {}, {1: 2}), "not text"),
        (Message("reply", {}, ["x"]), "not a JSON object"),
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
        check_message(Message("reply", {}, {"x": deep}), limit_bytes=LIMIT)
    with pytest.raises(MessageError, match="not JSON"):
        read_facts('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(MessageError, match="at most"):
        read_facts(b" " * 20_000_000)
    with pytest.raises(MessageError, match="JSON number"):
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


# ---------------------------------------------------------------------- replies


class PublicError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PublicError("the file has no column age"), "the file has no column age"),
        (ValueError("row 3: Mr. Smith, 42"), "internal error"),
        (KeyError("Mr. Smith"), "internal error"),
    ],
)
def test_the_server_receives_only_public_errors(error, reason):
    lines = []

    def fails():
        raise error

    reply = reply_or_failure(fails, PublicError, lines.append)

    assert reply.kind == "failure"
    assert reason in reply.facts["reason"]
    assert "Smith" not in reply.facts["reason"]
    assert str(error) in lines[0]  # the site's own log has the full text


def test_a_long_reason_is_cut():
    def fails():
        raise PublicError("x" * 10_000)

    reply = reply_or_failure(fails, PublicError, lambda _: None)

    assert len(reply.facts["reason"]) == 500


def test_a_registered_site_cannot_use_another_name():
    reply = Message("reply", {}, {"name": "oslo"})

    assert checked_reply(reply, "oslo") is reply
    assert checked_reply(reply, None) is reply
    assert "registered as 'bergen'" in checked_reply(reply, "bergen").reason
    failed = checked_reply(Message("failure", {}, {"reason": "no label"}), "bergen")
    assert (failed.reason, failed.who) == ("the client reports: no label", "bergen")
