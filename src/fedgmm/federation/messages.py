"""Messages between server and sites: named numeric arrays and plain JSON, checked before use.

Nothing in a message can run: there is no pickle, there are no class names, and every array has a dtype
of a short list. :mod:`fedgmm.federation.server` lists all requests and replies, and
:meth:`fedgmm.methods.fedgmm.FedGMM.declare_sums` the sums of a round. This module imports only NumPy, so
that a program that relays messages starts fast.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Notify = Callable[[str], None]

PROTOCOL = 5
"""Version of the requests and replies; both sides must have the same."""

DTYPES = ("bool", "uint8", "int64", "uint64", "float16", "float32", "float64")
"""Types of numbers that a message may hold, in little-endian byte order."""

LARGEST_MESSAGE = 256 * 1024 * 1024
"""Largest size of a message in bytes, unless the federation sets another."""

_MOST_ARRAYS = 4096
_MOST_AXES = 8
_LONGEST_NAME = 200
_LARGEST_FACTS = 16 * 1024 * 1024
_MOST_DEPTH = 12
_LARGEST_INTEGER = 2**63
_LONGEST_REASON = 500
_NAME = re.compile(r"[A-Za-z0-9_.+ /-]+", flags=re.ASCII)
_KIND = re.compile(r"[a-z][a-z_]{0,39}", flags=re.ASCII)


FAILURE = "failure"
"""Kind of a reply that reports an error instead of a result."""

GREETINGS = ("hello", "refused")
"""Kinds of requests to nodes that are not members; other requests do not wait long for them."""

GREETING_TIMEOUT = 5.0
"""Seconds for greetings that are sent together with other requests."""

REPORTED = "the client reports: "
"""Start of a failure's reason if the site itself explained it."""


ERROR_CODES = {
    "table": "its table cannot be used",
    "folder": "its own folder or file cannot be used",
    "ledger": "its ledger of privacy cannot be used",
    "sums": "its sums cannot be sent",
    "diverged": "training diverged",
    "internal": "an internal error",
}
"""Errors of a site in a protected run. A text could hold a value of a row or a number of rows, so such a
site sends a code; the text stays in its own log."""


def coded(code: str) -> str:
    """Return the sentence that a site sends instead of the text of an error."""
    return f"error {code!r}: {ERROR_CODES[code]}; its log says why"


class MessageError(ValueError):
    """A message that breaks a rule, with the reason."""


@dataclass(frozen=True)
class Message:
    """A request of the server, or a reply to one.

    Attributes:
        kind: of the request, or ``"reply"``.
        arrays: named numeric arrays in C order, of ``DTYPES``.
        facts: plain JSON values.
    """

    kind: str
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of bytes of the arrays and of the JSON text."""
        return sum(array.nbytes for array in self.arrays.values()) + len(self.facts_text)

    @cached_property
    def facts_text(self) -> str:
        """The facts as JSON in ASCII; floats keep every bit. Raises ``MessageError`` for others."""
        try:
            return json.dumps(self.facts, allow_nan=False, ensure_ascii=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise MessageError(f"its facts are not plain JSON values: {error}.") from None

    def whole(self, name: str) -> int:
        """Return a fact that is a whole number, zero if it is missing, or raise ``MessageError``."""
        value = self.facts.get(name, 0)
        if type(value) is not int or value < 0:
            raise MessageError(f"{name} is {value!r}, which is not a whole number.")
        return value


PROJECTION = "projection/"
"""Start of the names of principal components, which a site keeps; requests refer to them by a digest."""


def digest_of(
    request: Message, names: tuple[str, ...], left_out: tuple[str, ...] = ("mask/", PROJECTION)
) -> str:
    """Return a hash of a request's kind, of its arrays and of the facts with some names.

    The digest of the principal components always counts. Arrays whose names start with ``left_out`` do
    not: keys and shares of masks are new in every attempt.
    """
    found = hashlib.sha256(request.kind.encode())
    for name in sorted(request.arrays):
        if not name.startswith(left_out):
            array = np.ascontiguousarray(request.arrays[name])
            found.update(f"{name} {array.dtype} {array.shape}\n".encode())
            found.update(array.tobytes())
    facts = {name: request.facts.get(name) for name in names}
    if "projection" in request.facts:
        facts["projection"] = request.facts["projection"]
    found.update(hash_of(facts).encode())
    return found.hexdigest()


def hash_of(value: Any) -> str:
    """Return a hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_size(what: str, size: int, unit: str, most: int) -> None:
    """Raise :class:`MessageError` if a part of a message is larger than ``most``."""
    if size > most:
        raise MessageError(f"{what} {size} {unit}; at most {most} are allowed.")


def read_facts(text: str | bytes) -> dict[str, Any]:
    """Return the facts of a message from its JSON text, or raise ``MessageError``."""
    check_size("its facts are", len(text), "bytes", _LARGEST_FACTS)
    try:
        facts = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"its facts are not JSON: {error}.") from None
    if not isinstance(facts, dict):
        raise MessageError("its facts are not a JSON object.")
    return facts


def check_message(message: Message, *, limit_bytes: int = LARGEST_MESSAGE) -> None:
    """Raise :class:`MessageError` if a message that was received, or will be sent, exceeds a limit."""
    if not isinstance(message.kind, str) or not _KIND.fullmatch(message.kind):
        raise MessageError(f"its kind {_short(message.kind)} is unknown.")
    check_size("it has", len(message.arrays), "arrays", _MOST_ARRAYS)
    for name, array in message.arrays.items():
        if not isinstance(array, np.ndarray):
            raise MessageError(f"{_short(name)} is a {type(array).__name__}, not an array.")
        dtype = array.dtype.name if array.dtype.isnative else str(array.dtype)
        check_declared_array(name, dtype, array.shape)
        if not array.flags.c_contiguous:
            raise MessageError(f"array {name!r} is not contiguous in memory.")
    _check_value(message.facts, _MOST_DEPTH)
    if not isinstance(message.facts, Mapping):
        raise MessageError("its facts are not a JSON object.")
    check_size("its facts are", len(message.facts_text), "bytes", _LARGEST_FACTS)
    check_size("it is", message.size, "bytes", limit_bytes)


# ---------------------------------------------------------------------- texts and bytes

_LONGEST_LAYOUT = 4 * 1024 * 1024


def layout_text(message: Message) -> str:
    """Return the names, dtypes and shapes of all arrays as JSON, in the order of their bytes."""
    return json.dumps(
        [[name, one.dtype.name, list(one.shape)] for name, one in message.arrays.items()]
    )


def message_from(
    kind: str, facts: str | bytes, layout: str | bytes, payload: bytes | memoryview, limit: int
) -> Message:
    """Return a message from its texts and the bytes of its arrays, or raise ``MessageError``.

    Everything is checked before use, and bytes are only ever read as numbers of the declared dtypes.
    """
    check_size("it is", len(facts) + len(payload), "bytes", limit)
    message = Message(kind, _arrays(layout, payload), read_facts(facts))
    check_message(message, limit_bytes=limit)
    return message


def _arrays(layout: str | bytes, payload: bytes | memoryview) -> dict[str, NDArray[Any]]:
    """Return the arrays of a payload; all names, dtypes and shapes are checked before one is read."""
    check_size("its layout has", len(layout), "characters", _LONGEST_LAYOUT)
    try:
        entries = json.loads(layout)
    except (ValueError, RecursionError):
        raise MessageError("its layout is not JSON.") from None
    if not isinstance(entries, list):
        raise MessageError("its layout is not a list.")
    if not all(isinstance(one, list) and len(one) == 3 for one in entries):
        raise MessageError("its layout has an entry that is not a name, a dtype and a shape.")
    sizes = [check_declared_array(*one) for one in entries]
    if len({name for name, *_ in entries}) != len(entries):
        raise MessageError("two of its arrays have the same name.")
    if sum(sizes) != len(payload):
        raise MessageError(
            f"its layout declares {sum(sizes)} bytes of arrays, but it has {len(payload)} bytes."
        )
    arrays, at = {}, 0
    for (name, dtype, shape), size in zip(entries, sizes, strict=True):
        values = np.frombuffer(payload[at : at + size], "uint8" if dtype == "bool" else dtype)
        # every byte except zero is true; NumPy's bool must be 0 or 1
        arrays[name] = (values != 0 if dtype == "bool" else values.copy()).reshape(shape)
        at += size
    return arrays


def reply_or_failure(
    reply: Callable[[], Message], public: type[Exception], notify: Notify
) -> Message:
    """Return a site's reply, or a reply that reports an error.

    The texts of ``public`` errors go to the server. The text of any other error may contain values of
    rows, so it goes to the log of the site only.
    """
    try:
        found = reply()
        check_message(found)
        return found
    except (MessageError, public) as error:
        notify(f"Could not reply: {error}")
        reason = str(error)
    except Exception as error:
        notify(f"Could not reply ({type(error).__name__}): {error}")
        reason = "an internal error; see the log of the site."
    return Message(FAILURE, {}, {"reason": reason[:_LONGEST_REASON]})


def check_declared_array(name: Any, dtype: Any, shape: Any) -> int:
    """Return the bytes of a declared array, or raise ``MessageError``, before any of it is read."""
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise MessageError(f"the name {_short(name)} of an array is not allowed.")
    if dtype not in DTYPES:
        raise MessageError(
            f"array {name!r} is of type {_short(dtype)}; allowed are {', '.join(DTYPES)}."
        )
    if not isinstance(shape, (list, tuple)) or len(shape) > _MOST_AXES:
        raise MessageError(f"the shape of array {name!r} is missing or has too many axes.")
    if any(type(length) is not int or length < 0 for length in shape):
        raise MessageError(f"array {name!r} has the invalid shape {_short(shape)}.")
    return int(math.prod(shape) * np.dtype(dtype).itemsize)


def _check_value(value: Any, depth: int) -> None:
    """Raise unless a value is plain JSON of limited depth with finite numbers."""
    if depth == 0:
        raise MessageError(f"its facts are nested deeper than {_MOST_DEPTH} levels.")
    if value is None or isinstance(value, str):  # first, because most are
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise MessageError("its facts hold a number that is not finite.")
    elif isinstance(value, int):
        if abs(value) >= _LARGEST_INTEGER:
            raise MessageError("its facts hold a whole number that is too large.")
    elif isinstance(value, (list, tuple)):
        for one in value:
            _check_value(one, depth - 1)
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if not isinstance(name, str):
                raise MessageError(f"its facts have a name that is not text: {_short(name)}.")
            _check_value(one, depth - 1)
    else:
        raise MessageError(f"its facts hold a {type(value).__name__}, which is not a JSON value.")


def one_line(text: str) -> str:
    """Return text of another party for a log, with control characters written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# ---------------------------------------------------------------------- the transport


@dataclass(frozen=True)
class Failure:
    """The reason why there is no reply, such as ``no reply within 60 s``.

    Attributes:
        reason: in plain words.
        who: the name under which the node's key is registered, if the transport knows it.
    """

    reason: str
    who: str | None = None


Reply = Message | Failure


def checked_reply(reply: Message, registered: str | None) -> Reply:
    """Return a node's reply, or the reason why it does not count.

    A node whose key is ``registered`` under a name cannot use another name.
    """
    if reply.kind == FAILURE:
        reason = str(reply.facts.get("reason", ""))[:_LONGEST_REASON]
        return Failure(REPORTED + reason, registered)
    name = reply.facts.get("name")
    if registered is not None and name is not None and name != registered:
        return Failure(
            f"its key is registered as {registered!r}, but its name is {name!r}; start it with "
            f"--name {registered}"
        )
    return reply


def limits_of(requests: Mapping[str, Message], timeout: float) -> dict[str, float]:
    """Return the seconds that each node has for its reply.

    Greetings beside other requests have less, so that an unknown node does not delay the members.
    """
    alone = all(one.kind in GREETINGS for one in requests.values())
    soon = timeout if alone else min(timeout, GREETING_TIMEOUT)
    return {node: soon if one.kind in GREETINGS else timeout for node, one in requests.items()}


class Transport(Protocol):
    """The connection of a server to its nodes."""

    def nodes(self) -> list[str]:
        """Return the ids of the nodes that are connected now."""
        ...

    def ask(self, requests: Mapping[str, Message], timeout: float) -> Iterator[tuple[str, Reply]]:
        """Send each node its request, and yield replies as they arrive.

        The iteration ends when every node has replied or had its time (:func:`limits_of`); each missing
        node yields a :class:`Failure` then. A late reply to an older request is never yielded.
        """
        ...
