"""Messages in pieces: a round trip changes nothing, and limits hold before anything is stored."""

import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from fedgmm.federation.messages import Message, MessageError
from fedgmm.federation.network import stream
from fedgmm.federation.network.stream import (
    Assembler,
    greeting,
    is_proven,
    pieces,
    read_greeting,
    sign,
)


@given(
    sizes=st.lists(st.integers(0, 400), max_size=4),
    piece=st.integers(40, 300),
    number=st.integers(0, 2**63),
)
def test_a_round_trip_changes_nothing(sizes, piece, number):
    rng = np.random.default_rng(0)
    arrays = {f"a{k}": rng.normal(size=size) for k, size in enumerate(sizes)}
    message = Message("round", arrays, {"text": "ü" * 9, "number": 0.1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PIECE", piece)
        sent = list(pieces(message, number))
    assert all(0 < len(one) <= piece for one in sent)
    assembler = Assembler(10**6)

    found = [assembler.add(one) for one in sent]

    assert found[:-1] == [None] * (len(sent) - 1)
    back_number, back = found[-1]
    assert (back_number, back.kind, back.facts) == (number, "round", message.facts)
    assert list(back.arrays) == list(arrays)
    for name, array in arrays.items():
        assert back.arrays[name].tobytes() == array.tobytes()
    assert assembler.missing == 0  # ready for the next message


def test_arrays_of_all_shapes_and_types():
    arrays = {
        "scalar": np.asarray(2.5),
        "none": np.empty((0, 3)),
        "true": np.array([True, False]),
        "half": np.arange(6, dtype="float16").reshape(2, 3),
    }
    (sent,) = pieces(Message("reply", arrays), 1)
    _, back = Assembler(1000).add(sent)
    for name, array in arrays.items():
        assert back.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(back.arrays[name], array)


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        (b"short", "no header"),
        (struct.pack(">QQ", 10**12, 1), "at most 1000"),
        (struct.pack(">QQ", 0, 1), "empty"),
        (struct.pack(">QQ", 4, 1) + b"12345", "more bytes"),
        (struct.pack(">QQ", 4, 1) + b"1234", "incomplete"),
        (struct.pack(">QQIII", 12, 1, 2**32 - 1, 2**32 - 1, 0), "longer than"),
        (struct.pack(">QQIII", 13, 1, 1, 0, 0) + b"\xff", "not text"),
        (struct.pack(">QQIII", 17, 1, 1, 2, 2) + b"a{}[]", None),
    ],
)
def test_malformed_messages_are_refused(sent, word):
    assembler = Assembler(1000)
    if word is None:  # the smallest valid message
        assert assembler.add(sent)[1] == Message("a")
        return
    with pytest.raises(MessageError, match=word):
        assembler.add(sent)


@given(st.lists(st.binary(max_size=60), max_size=4), st.integers(0, 80))
def test_any_bytes_are_read_or_refused(sent, size):
    assembler = Assembler(100)
    try:
        assembler.add(struct.pack(">QQ", size, 1))
        for piece in sent:
            assembler.add(piece)
    except MessageError:
        pass
    assert assembler.missing < 100 + 2**17


def test_a_large_message_is_cut_lazily():
    """The bytes of a large array are not copied as a whole before they are sent."""
    import tracemalloc

    message = Message("round", {"x": np.zeros(4_000_000)})
    tracemalloc.start()
    for _ in pieces(message, 1):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * stream.PIECE


# ---------------------------------------------------------------------- proofs


@pytest.fixture(scope="module")
def key():
    return ec.generate_private_key(ec.SECP384R1())


def pem(key):
    public = key.public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def test_a_proof_belongs_to_one_key_challenge_and_host(key):
    proof = sign(key, "challenge", "server.org")
    facts = {"key": pem(key), "host": "server.org", "proof": proof}

    assert is_proven(facts, "challenge")
    assert not is_proven(facts, "another challenge")
    assert not is_proven(facts | {"host": "other.org"}, "challenge")
    assert not is_proven(facts | {"key": pem(ec.generate_private_key(ec.SECP384R1()))}, "challenge")
    wrong_key = [{"key": "x"}, {"key": 3}]
    for wrong in ({"proof": "xyz"}, {"proof": ""}, {"proof": None}, {"host": "\ud800"}, *wrong_key):
        assert not is_proven(facts | wrong, "challenge")


@pytest.mark.parametrize("piece", [b"", b"[1]", b"{", b"[" * 5000, greeting(x="y" * 10_000)])
def test_greetings_that_are_refused(piece):
    with pytest.raises(MessageError, match="greeting"):
        read_greeting(piece)
