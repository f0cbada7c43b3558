"""Labels of any kind, as the files write them and as classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedgmm.data.tables.columns import categories
from fedgmm.data.tables.errors import quoted

_MOST_CLASSES = 1000
_MOST_FRACTIONS = 20
_LARGEST_NUMBER = 2.0**53
NO_LABEL = "(none)"
"""The class of all rows where no column is to be predicted."""

UNKNOWN = -1
"""The code of a label that is missing or that no client had in training."""


@dataclass(frozen=True)
class Labels:
    """The label column and its classes.

    Attributes:
        name: of the column.
        classes: sorted: truth values, whole numbers, numbers or texts.
    """

    name: str
    classes: tuple[Any, ...]

    @classmethod
    def agreed(cls, name: str, counts: Iterable[Mapping[str, int]]) -> Labels:
        """The union of all clients' labels, given as they are written.

        Raises:
            ValueError: one class only, or values that are measurements rather than classes.
        """
        read = as_classes(text for own in counts for text in own)
        classes = tuple(sorted(set(read.values())))
        fractions = [c for c in classes if isinstance(c, float)]
        if len(classes) > _MOST_CLASSES or len(fractions) > _MOST_FRACTIONS:
            raise ValueError(
                f"The label column {name!r} has {len(classes)} different values, such as "
                f"{quoted(classes[0])} and {quoted(classes[1])}; it looks like a measurement, not a "
                "class."
            )
        if len(classes) < 2:
            only = f"only the class {quoted(classes[0])}" if classes else "no values"
            raise ValueError(
                f"The label column {name!r} has {only} in all files; classification needs two classes."
            )
        return cls(name, classes)

    @classmethod
    def absent(cls) -> Labels:
        """No column is to be predicted: all rows are of one class."""
        return cls("", (NO_LABEL,))

    @property
    def array(self) -> NDArray[Any]:
        """The classes as an array, ``(K,)``."""
        return np.array(self.classes)

    def encode(self, values: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
        """Class indices ``(n,)`` of a column read as text, and texts that are no class."""
        codes, texts = categories(values)
        read = _reader([str(c) for c in self.classes])
        place = {label: index for index, label in enumerate(self.classes)}
        lookup, strange = [], []
        for text in texts:
            try:
                label = read(text)
            except ValueError:
                label = text
            known = place.get(label, UNKNOWN)
            if known == UNKNOWN:
                strange.append(text)
            lookup.append(known)
        return np.array([*lookup, UNKNOWN], dtype=np.int64)[codes], strange

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"name": self.name, "classes": list(self.classes)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Labels:
        """The inverse of :meth:`record`."""
        return cls(str(record["name"]), tuple(record["classes"]))


def as_classes(texts: Iterable[str]) -> dict[str, Any]:
    """The class that each text means, given all texts that occur."""
    known = sorted(set(texts))
    read = _reader(known)
    return {text: read(text) for text in known}


def _reader(texts: list[str]) -> Callable[[str], Any]:
    """How to read labels: the first of whole numbers, numbers, truth values, text that fits all."""
    readers: tuple[Callable[[str], Any], ...] = (_whole, _number, _truth)
    for read in readers:
        try:
            for text in texts:
                read(text)
        except ValueError:
            continue
        return read
    return str


def _truth(text: str) -> bool:
    """Also ``0`` and ``1``, which some programs write for false and true; alone they are numbers."""
    found = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    if text.lower() not in found:
        raise ValueError(text)
    return found[text.lower()]


def _whole(text: str) -> int:
    """``1`` for ``1`` and ``1.0``, since programs write whole numbers both ways; ``007`` is a name."""
    found = re.fullmatch(r"([+-]?(?:0|[1-9]\d*))(?:\.0*)?", text, flags=re.ASCII)
    if found is None:
        raise ValueError(text)
    if abs(whole := int(found[1])) >= 2**63:  # too long for an array of numbers
        raise ValueError(text)
    return whole


def _number(text: str) -> float:
    if not re.fullmatch(
        r"[+-]?(?:0|[1-9]\d*|(?=\.))(?:\.\d*)?(?:[eE][+-]?\d+)?", text, flags=re.ASCII
    ):
        raise ValueError(text)
    number = float(text)
    if abs(number) > _LARGEST_NUMBER:  # distinct texts may be the same number there
        raise ValueError(text)
    return number
