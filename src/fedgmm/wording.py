"""Words for people: numbers with their nouns."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """``"1 row"``, ``"2,000 rows"``; ``many`` is for nouns that take more than an "s"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
