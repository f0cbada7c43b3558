"""Convert messages to Flower's records and back: plain bytes and JSON text, checked before reading.

Flower fetches every array with several HTTP requests, which takes longer than a round. So all arrays of a
message are sent as one array of bytes, with a list of their names, dtypes and shapes. This module imports
only Flower and NumPy, because Flower starts a process for every request.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedgmm.federation.messages import (
    LARGEST_MESSAGE,
    Message,
    MessageError,
    check_message,
    layout_text,
    message_from,
)

_ARRAYS, _TEXT_RECORD = "arrays", "words"
_PAYLOAD, _BYTES = "payload", "bytes"
_TEXTS = ("kind", "facts", "layout")


def to_records(message: Message, *, limit_bytes: int = LARGEST_MESSAGE) -> RecordDict:
    """Convert a message to Flower's records, or raise ``MessageError``."""
    check_message(message, limit_bytes=limit_bytes)
    texts = ConfigRecord()
    for name, text in zip(
        _TEXTS, (message.kind, message.facts_text, layout_text(message)), strict=True
    ):
        texts[name] = text
    arrays = {}
    if message.arrays:
        payload = b"".join(one.tobytes() for one in message.arrays.values())
        arrays[_PAYLOAD] = Array("uint8", (len(payload),), _BYTES, payload)
    return RecordDict({_ARRAYS: ArrayRecord(arrays), _TEXT_RECORD: texts})


def from_records(records: RecordDict, *, limit_bytes: int = LARGEST_MESSAGE) -> Message:
    """Convert Flower's records to a message; sizes and shapes are checked before arrays are read."""
    if set(records) != {_ARRAYS, _TEXT_RECORD}:
        raise MessageError("it is not a message of fedgmm.")
    texts, arrays = records[_TEXT_RECORD], records[_ARRAYS]
    if not isinstance(texts, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise MessageError("its records have the wrong types.")
    if set(texts) != set(_TEXTS) or not all(isinstance(texts[one], str) for one in _TEXTS):
        raise MessageError("its texts are not a kind, facts and a layout.")
    kind, facts, layout = (str(texts[one]) for one in _TEXTS)
    return message_from(kind, facts, layout, _payload(arrays), limit_bytes)


def _payload(arrays: ArrayRecord) -> bytes:
    """Return the bytes of all arrays."""
    if not arrays:
        return b""
    packed = arrays.get(_PAYLOAD)
    if len(arrays) != 1 or packed is None or packed.stype != _BYTES:
        raise MessageError("its arrays are not one array of bytes.")
    return bytes(packed.data)
