"""Messages on a stream of bytes, and the proof by which a site shows that it has its private key.

A stream carries pieces of at most ``PIECE`` bytes. A message is a header of two numbers (the size of the
rest, and the number of the exchange) and its texts and arrays, cut into pieces. The size is checked before
anything is stored, and nothing is compressed, so a peer cannot make the other side allocate more than it
sends. A connection starts with three short messages: the server's challenge, the site's signed proof, and
the server's welcome.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedgmm.federation.messages import Message, MessageError, layout_text, message_from
from fedgmm.federation.network.keys import is_signed

SERVICE = "fedgmm.Federation"
METHOD = "Connect"

PIECE = 256 * 1024
"""Largest piece of a message in bytes; a peer without a key can send no more than one."""

NONCE_BYTES = 32
_OVERHEAD = 64 * 1024  # room for layout and lengths beyond the limit on facts and arrays
_LARGEST_GREETING = 8 * 1024
_HEADER = struct.Struct(">QQ")
_LENGTHS = struct.Struct(">III")

COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", PIECE + 1024),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # identity only: nothing can be inflated
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # otherwise the buffer of a connection grows to many megabytes
    ("grpc.http2.lookahead_bytes", 1024 * 1024),
]
"""Options of both sides: a silent connection is noticed within half a minute."""


def pieces(message: Message, number: int) -> Iterator[bytes]:
    """Yield a checked message of exchange ``number`` in pieces, without a copy of all its bytes."""
    texts = [message.kind.encode(), message.facts_text.encode(), layout_text(message).encode()]
    buffers = [array.data.cast("B") for array in message.arrays.values() if array.size]
    head = _LENGTHS.pack(*map(len, texts)) + b"".join(texts)
    size = len(head) + sum(len(one) for one in buffers)
    piece = bytearray(_HEADER.pack(size, number))
    for part in (memoryview(head), *buffers):
        at = 0
        while at < len(part):
            taken = part[at : at + PIECE - len(piece)]
            piece += taken
            at += len(taken)
            if len(piece) == PIECE:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


class Assembler:
    """Pieces of one direction of a stream, put together to messages of at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.missing = 0  # bytes that the current message still lacks
        self.number = 0  # of its exchange
        self._parts = bytearray()
        self._dropped = False

    def drop(self) -> None:
        """Store nothing of the current message; it is not returned when it is complete."""
        self._parts.clear()
        self._dropped = True

    def add(self, piece: bytes) -> tuple[int, Message] | None:
        """Add a piece; return the number of its exchange and the message if it is complete.

        Raises ``MessageError`` if it is too large or not a message; the stream must end then.
        """
        if not self.missing:
            if len(piece) < _HEADER.size:
                raise MessageError("it has no header.")
            size, self.number = _HEADER.unpack_from(piece)
            if size > self.limit + _OVERHEAD:
                raise MessageError(f"it is {size} bytes; at most {self.limit} are allowed.")
            self.missing = size
            piece = piece[_HEADER.size :]
            if not size:
                raise MessageError("it is empty.")
        if len(piece) > self.missing:
            raise MessageError("it has more bytes than it declared.")
        if not self._dropped:
            self._parts += piece
        self.missing -= len(piece)
        if self.missing:
            return None
        parts, self._parts = self._parts, bytearray()
        dropped, self._dropped = self._dropped, False
        return None if dropped else (self.number, self._message(parts))

    def _message(self, parts: bytearray) -> Message:
        if len(parts) < _LENGTHS.size:
            raise MessageError("it is incomplete.")
        kind, facts, layout = _LENGTHS.unpack_from(parts)
        at = [_LENGTHS.size, kind, facts, layout]
        ends = [sum(at[: place + 1]) for place in range(4)]
        if ends[-1] > len(parts):
            raise MessageError("its texts are longer than it is.")
        texts = [bytes(parts[ends[k] : ends[k + 1]]) for k in range(3)]
        payload = memoryview(parts)[ends[-1] :]
        try:
            name = texts[0].decode("ascii")
        except UnicodeDecodeError:
            raise MessageError("its kind is not text.") from None
        return message_from(name, texts[1], texts[2], payload, self.limit)


# ---------------------------------------------------------------------- the first three messages


def greeting(**facts: Any) -> bytes:
    """Return a message of the handshake, in one piece."""
    return json.dumps(facts).encode()


def read_greeting(piece: bytes) -> dict[str, Any]:
    """Return a message of the handshake, or raise ``MessageError``."""
    if len(piece) > _LARGEST_GREETING:
        raise MessageError("its greeting is too long.")
    try:
        facts = json.loads(piece)
    except (ValueError, RecursionError):
        raise MessageError("its greeting is not JSON.") from None
    if not isinstance(facts, dict):
        raise MessageError("its greeting is not a JSON object.")
    return facts


def sign(key: ec.EllipticCurvePrivateKey, challenge: str, host: str) -> str:
    """Return the proof that a site has its private key.

    It answers the server's random ``challenge``, which is used once. It names the ``host`` by which the
    site reached the server, so that another server cannot pass it on.
    """
    return key.sign(_statement(challenge, host), ec.ECDSA(hashes.SHA384())).hex()


def is_proven(facts: Mapping[str, Any], challenge: str) -> bool:
    """Return whether a site's proof belongs to the public key and the host that it names."""
    pem, host, proof = (facts.get(name) for name in ("key", "host", "proof"))
    if not (isinstance(pem, str) and isinstance(host, str) and isinstance(proof, str)):
        return False
    try:
        signature, statement = bytes.fromhex(proof), _statement(challenge, host)
    except ValueError:  # also for a host that cannot be encoded
        return False
    return is_signed(pem, statement, signature)


def _statement(challenge: str, host: str) -> bytes:
    return f"fedgmm: site at {host} answers {challenge}".encode()
