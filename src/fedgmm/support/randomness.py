"""Random numbers that belong to a row, not to a position in memory.

Each draw is a hash of the seed, the client's name and the row's place within the client. So the order of
clients, and the machines they are on, do not change any draw.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def client_keys(names: Iterable[Hashable]) -> NDArray[np.uint64]:
    """Return a fixed number for each client's name, ``(C,)``."""
    return np.array([zlib.crc32(str(name).encode()) for name in names], dtype=np.uint64)


def row_uniforms(
    seed: int, stream: int, keys: NDArray[np.uint64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return uniform numbers in (0, 1), one per row; different streams are independent draws.

    ``keys`` are those of each row's client, and ``positions`` the rows' places within their
    clients, ``(N,)`` each.
    """
    with np.errstate(over="ignore"):
        word = _mix(np.uint64(seed) + _GOLDEN * np.uint64(stream + 1))
        word = _mix(word ^ (keys * _MIX_1))
        word = _mix(word ^ (positions.astype(np.uint64) * _GOLDEN))
    return ((word >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(word: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64: every input bit flips half of the output bits."""
    word = np.asarray(word) + _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return np.asarray(word ^ (word >> np.uint64(31)))
