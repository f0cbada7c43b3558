"""Numbers with their nouns, for messages."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return ``"1 row"`` or ``"2,000 rows"``; ``many`` is the plural if it is not ``one`` + "s"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def percent(share: float) -> str:
    """Return ``"12.3 %"``."""
    return f"{100 * share:.1f} %"
