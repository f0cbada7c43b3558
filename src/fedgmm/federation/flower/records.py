"""Our messages as Flower's records, and back: plain bytes and JSON text, checked before reading.

Flower fetches every array by itself, with several requests each, which takes longer than a round. So
the arrays of a message travel as one piece, with a list of their names, types and shapes. The bytes
are read as numbers of these types, and as nothing else. The module is light: Flower, NumPy, and nothing
that computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedgmm.federation.messages import (
    LARGEST_MESSAGE,
    Message,
    MessageError,
    check_declared_array,
    check_message,
    read_facts,
)

FAILURE = "failure"
"""Kind of an answer that says why there is none."""

_ARRAYS, _WORDS = "arrays", "words"
_PAYLOAD, _BYTES = "payload", "bytes"
_TEXTS = ("kind", "facts", "layout")
_LONGEST_LAYOUT = 4 * 1024 * 1024
_LONGEST_REASON = 500


def to_records(message: Message, *, limit_bytes: int = LARGEST_MESSAGE) -> RecordDict:
    """A message as Flower carries it.

    Raises:
        MessageError: a message that keeps not to the bounds.
    """
    check_message(message, limit_bytes=limit_bytes)
    layout = [[name, one.dtype.name, list(one.shape)] for name, one in message.arrays.items()]
    words = ConfigRecord()
    for name, text in zip(
        _TEXTS, (message.kind, message.facts_text(), json.dumps(layout)), strict=True
    ):
        words[name] = text
    arrays = {}
    if layout:
        payload = b"".join(one.tobytes() for one in message.arrays.values())
        arrays[_PAYLOAD] = Array("uint8", (len(payload),), _BYTES, payload)
    return RecordDict({_ARRAYS: ArrayRecord(arrays), _WORDS: words})


def from_records(records: RecordDict, *, limit_bytes: int = LARGEST_MESSAGE) -> Message:
    """The message in Flower's records. Sizes and shapes are checked before any array is read.

    Raises:
        MessageError: records that are not a message, or one beyond the bounds.
    """
    if set(records) != {_ARRAYS, _WORDS}:
        raise MessageError("it is not a message of fedgmm.")
    words, arrays = records[_WORDS], records[_ARRAYS]
    if not isinstance(words, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise MessageError("its records are of the wrong types.")
    if set(words) != set(_TEXTS) or not all(isinstance(words[one], str) for one in _TEXTS):
        raise MessageError("its words are not a kind, facts and a layout.")
    kind, facts, layout = (str(words[one]) for one in _TEXTS)
    payload = _payload(arrays)
    total = len(facts) + len(payload)
    if total > limit_bytes:
        raise MessageError(f"it is {total} bytes; at most {limit_bytes} are allowed.")
    message = Message(kind, _unpacked(_read_layout(layout), payload), read_facts(facts))
    check_message(message, limit_bytes=limit_bytes)
    return message


def _payload(arrays: ArrayRecord) -> bytes:
    """The bytes of all arrays."""
    if not arrays:
        return b""
    packed = arrays.get(_PAYLOAD)
    if len(arrays) != 1 or packed is None or packed.stype != _BYTES:
        raise MessageError("its arrays are not in one piece of bytes.")
    return bytes(packed.data)


def _read_layout(text: str) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Names, types, shapes and numbers of bytes of the arrays, as their sender tells them."""
    if len(text) > _LONGEST_LAYOUT:
        raise MessageError(f"its layout is {len(text)} long; at most {_LONGEST_LAYOUT} is allowed.")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageError("its layout is not JSON.") from None
    if not isinstance(told, list):
        raise MessageError("its layout is not a list.")
    layout = []
    for one in told:
        if not isinstance(one, list) or len(one) != 3:
            raise MessageError("its layout has an entry that is not a name, a type and a shape.")
        name, dtype, shape = one
        size = check_declared_array(name, dtype, shape)
        layout.append((name, dtype, tuple(shape), size))
    if len({name for name, *_ in layout}) != len(layout):
        raise MessageError("two of its arrays have the same name.")
    return layout


def _unpacked(
    layout: list[tuple[str, str, tuple[int, ...], int]], payload: bytes
) -> dict[str, NDArray[Any]]:
    total = sum(size for *_, size in layout)
    if total != len(payload):
        raise MessageError(
            f"its arrays should be {total} bytes, and come with {len(payload)} bytes."
        )
    arrays, at = {}, 0
    for name, dtype, shape, size in layout:
        piece = np.frombuffer(payload[at : at + size], "uint8" if dtype == "bool" else dtype)
        # any byte but zero is true; a bool of another byte would be neither
        arrays[name] = (piece != 0 if dtype == "bool" else piece.copy()).reshape(shape)
        at += size
    return arrays


def failure(reason: str) -> Message:
    """An answer that says why there is none."""
    return Message(FAILURE, {}, {"reason": reason[:_LONGEST_REASON]})


def answer_records(
    answer: Callable[[Message], Message],
    asked: RecordDict,
    public: type[Exception],
    notify: Callable[[str], None],
) -> RecordDict:
    """Read a question, have it answered, and write the answer.

    What goes wrong is told here, and is the answer: in plain words where the site meant them for the
    server's eyes, and without details where it did not, since they may hold values of rows.

    Args:
        answer: of the site.
        asked: the question.
        public: errors whose words the server may read.
        notify: told what went wrong.
    """
    try:
        return to_records(answer(from_records(asked)))
    except (MessageError, public) as error:
        notify(f"Could not answer: {error}")
        told = str(error)
    except Exception as error:
        notify(f"Could not answer ({type(error).__name__}): {error}")
        told = "something went wrong; the reason stands in the log of the site."
    return to_records(failure(told))
