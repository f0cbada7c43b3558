"""Convert messages to Flower's records and back: plain bytes and JSON text, checked before reading.

Flower fetches every array with several HTTP requests, which takes longer than a round. So all arrays of a
message are sent as one array of bytes, with a list of their names, dtypes and shapes. The bytes are only
ever interpreted as numbers of these dtypes. This module imports only Flower and NumPy, because every
SuperNode process imports it.
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
"""Kind of a reply that reports an error instead of a result."""

_ARRAYS, _TEXT_RECORD = "arrays", "words"
_PAYLOAD, _BYTES = "payload", "bytes"
_TEXTS = ("kind", "facts", "layout")
_LONGEST_LAYOUT = 4 * 1024 * 1024
_LONGEST_REASON = 500


def to_records(message: Message, *, limit_bytes: int = LARGEST_MESSAGE) -> RecordDict:
    """Convert a message to Flower's records.

    Raises:
        MessageError: the message exceeds a limit.
    """
    check_message(message, limit_bytes=limit_bytes)
    layout = [[name, one.dtype.name, list(one.shape)] for name, one in message.arrays.items()]
    texts = ConfigRecord()
    for name, text in zip(
        _TEXTS, (message.kind, message.facts_text(), json.dumps(layout)), strict=True
    ):
        texts[name] = text
    arrays = {}
    if layout:
        payload = b"".join(one.tobytes() for one in message.arrays.values())
        arrays[_PAYLOAD] = Array("uint8", (len(payload),), _BYTES, payload)
    return RecordDict({_ARRAYS: ArrayRecord(arrays), _TEXT_RECORD: texts})


def from_records(records: RecordDict, *, limit_bytes: int = LARGEST_MESSAGE) -> Message:
    """Convert Flower's records to a message; sizes and shapes are checked before arrays are read.

    Raises:
        MessageError: the records are not a message, or the message exceeds a limit.
    """
    if set(records) != {_ARRAYS, _TEXT_RECORD}:
        raise MessageError("it is not a message of fedgmm.")
    texts, arrays = records[_TEXT_RECORD], records[_ARRAYS]
    if not isinstance(texts, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise MessageError("its records have the wrong types.")
    if set(texts) != set(_TEXTS) or not all(isinstance(texts[one], str) for one in _TEXTS):
        raise MessageError("its texts are not a kind, facts and a layout.")
    kind, facts, layout = (str(texts[one]) for one in _TEXTS)
    payload = _payload(arrays)
    total = len(facts) + len(payload)
    if total > limit_bytes:
        raise MessageError(f"it has {total} bytes; at most {limit_bytes} are allowed.")
    message = Message(kind, _unpack(_read_layout(layout), payload), read_facts(facts))
    check_message(message, limit_bytes=limit_bytes)
    return message


def _payload(arrays: ArrayRecord) -> bytes:
    """Return the bytes of all arrays."""
    if not arrays:
        return b""
    packed = arrays.get(_PAYLOAD)
    if len(arrays) != 1 or packed is None or packed.stype != _BYTES:
        raise MessageError("its arrays are not one array of bytes.")
    return bytes(packed.data)


def _read_layout(text: str) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return the declared name, dtype, shape and size in bytes of every array."""
    if len(text) > _LONGEST_LAYOUT:
        raise MessageError(
            f"its layout has {len(text)} characters; at most {_LONGEST_LAYOUT} are allowed."
        )
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageError("its layout is not JSON.") from None
    if not isinstance(entries, list):
        raise MessageError("its layout is not a list.")
    layout = []
    for one in entries:
        if not isinstance(one, list) or len(one) != 3:
            raise MessageError("its layout has an entry that is not a name, a dtype and a shape.")
        name, dtype, shape = one
        size = check_declared_array(name, dtype, shape)
        layout.append((name, dtype, tuple(shape), size))
    if len({name for name, *_ in layout}) != len(layout):
        raise MessageError("two of its arrays have the same name.")
    return layout


def _unpack(
    layout: list[tuple[str, str, tuple[int, ...], int]], payload: bytes
) -> dict[str, NDArray[Any]]:
    total = sum(size for *_, size in layout)
    if total != len(payload):
        raise MessageError(
            f"its layout declares {total} bytes of arrays, but it has {len(payload)} bytes."
        )
    arrays, at = {}, 0
    for name, dtype, shape, size in layout:
        values = np.frombuffer(payload[at : at + size], "uint8" if dtype == "bool" else dtype)
        # every byte except zero is true; NumPy's bool must be 0 or 1
        arrays[name] = (values != 0 if dtype == "bool" else values.copy()).reshape(shape)
        at += size
    return arrays


def failure(reason: str) -> Message:
    """Return a reply that reports an error."""
    return Message(FAILURE, {}, {"reason": reason[:_LONGEST_REASON]})


def handle_records(
    handle: Callable[[Message], Message],
    request: RecordDict,
    public: type[Exception],
    notify: Callable[[str], None],
) -> RecordDict:
    """Return the reply to a request, or a reply that reports an error.

    The texts of ``public`` errors go to the server. The text of any other error may contain values of
    rows, so it goes to the log of the site only.

    Args:
        handle: function of the site from request to reply.
        request: the request.
        public: class of errors whose texts the server may read.
        notify: called with a line about each error.
    """
    try:
        return to_records(handle(from_records(request)))
    except (MessageError, public) as error:
        notify(f"Could not reply: {error}")
        reason = str(error)
    except Exception as error:
        notify(f"Could not reply ({type(error).__name__}): {error}")
        reason = "an internal error; see the log of the site."
    return to_records(failure(reason))
