"""Errors about table files, with a text that may leave the machine."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedgmm.wording import first_few

_MOST_CHARACTERS = 60
_MOST_NAMES = 12
_MOST_CLIENTS = 3


class TableError(ValueError):
    """A file that cannot be used: its name, the problem, and the place.

    Attributes:
        path: the file.
        public: the problem without the path and without any value of a row, so that a site may send it
            to the server of a federation. It is required if the problem quotes a value.
    """

    def __init__(self, path: Path | str, problem: str, *, public: str | None = None) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = Path(path)
        self.public = (problem if public is None else public).rstrip(".")


class HeaderError(TableError):
    """A file whose first line holds values instead of the names of its columns."""


class ValueKindError(ValueError):
    """A column whose values are of another kind than in training; ``public`` has no example of a value."""

    def __init__(self, problem: str, public: str) -> None:
        super().__init__(problem)
        self.public = public


def quoted(value: Any) -> str:
    """Return a name or value for a message: in quotes, on one line, shortened."""
    text = repr(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS - 2]}…{text[-1]}"


def listed(names: Sequence[str]) -> str:
    """Return the first few names for a message."""
    return first_few((quoted(name)[1:-1] for name in names), _MOST_NAMES)


def similar_name(name: str, names: Sequence[str]) -> str:
    """Return `` (did you mean 'age'?)`` if one of the ``names`` is similar, otherwise an empty text."""
    lower = {one.lower(): one for one in names}
    near = get_close_matches(name.lower(), lower, 1)
    return f" (did you mean {quoted(lower[near[0]])}?)" if near else ""


def joined(names: Sequence[str]) -> str:
    """Return the first few clients, and the number of the others, for a message."""
    if len(names) > _MOST_CLIENTS + 1:
        names = [*names[:_MOST_CLIENTS], f"{len(names) - _MOST_CLIENTS} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
