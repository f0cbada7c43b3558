"""What is wrong with a file, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

NOT_EVERYWHERE = "take it out everywhere, or have it ignored (--ignore)"
"""What to do with a column that not all have."""

_MOST_CHARACTERS = 60
_MOST_NAMES = 12


class TableError(ValueError):
    """A file that cannot be used, with its name, what is wrong and where."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = Path(path)


class ConversionError(TableError):
    """A value that does not fit the type that its column has elsewhere.

    Attributes:
        column: whose value it is.
        value: as it is written; empty where it is not known.
    """

    def __init__(self, path: Path | str, column: str, value: str) -> None:
        shown = f" ({quoted(value)})" if value else ""
        super().__init__(
            path, f"the column {quoted(column)} holds text{shown} where numbers belong."
        )
        self.column, self.value = column, value


def quoted(value: Any) -> str:
    """A name or value for a message: in quotes, on one line, not too long."""
    text = repr(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS - 2]}…{text[-1]}"


def listed(names: Sequence[str]) -> str:
    """The first of some names, for a message."""
    shown = [quoted(name)[1:-1] for name in names[:_MOST_NAMES]]
    return ", ".join(shown) + (", …" if len(names) > _MOST_NAMES else "")
