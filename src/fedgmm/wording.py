"""Numbers with their nouns, and lists of names, for messages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return ``"1 row"`` or ``"2,000 rows"``; ``many`` is the plural if it is not ``one`` + "s"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def first_few(texts: Iterable[str], most: int) -> str:
    """Return at most ``most`` texts, and ``…`` for the others."""
    first = [*islice(texts, most + 1)]
    return ", ".join(first[:most]) + (", …" if len(first) > most else "")


def percent(share: float) -> str:
    """Return ``"12.3 %"``."""
    return f"{100 * share:.1f} %"
