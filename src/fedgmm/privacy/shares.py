"""Shamir's secret sharing of 256-bit keys: any ``t`` of ``n`` shares give the key, fewer give nothing.

A key is the value at zero of a random polynomial of degree ``t - 1`` over the field of ``PRIME`` elements.
The share of a holder is the value at its own point, a positive integer.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**256 + 297
"""The smallest prime above all 256-bit keys."""

KEY_BYTES, SHARE_BYTES = 32, 33


def split(key: bytes, points: Sequence[int], threshold: int) -> dict[int, int]:
    """Return the share of each point, one per holder; ``threshold`` of them give the key."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"A key has {KEY_BYTES} bytes, not {len(key)}.")
    if not 1 <= threshold <= len(set(points)) or len(set(points)) < len(points):
        raise ValueError(
            f"{len(points)} points cannot hold shares with a threshold of {threshold}."
        )
    if min(points) < 1:
        raise ValueError("The points of shares are positive, because the key itself is at zero.")
    # f(x) = key + a_1 x + … + a_{t-1} x^{t-1}, by Horner's rule
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = {}
    for x in points:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * x % PRIME
        shares[x] = (value + int.from_bytes(key, "big")) % PRIME
    return shares


@lru_cache(maxsize=4096)
def weights_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights ``λ_i = Π_{j≠i} x_j / (x_j - x_i)`` of the points, in their order."""
    weights = []
    for x in points:
        above, below = 1, 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)


def combine(shares: Mapping[int, int]) -> bytes:
    """Return the key of at least ``t`` shares by point.

    Wrong shares, or fewer than ``t``, give another key or raise ``ValueError``.
    """
    weights = weights_at_zero(tuple(shares))
    # key = f(0) = Σ_i λ_i f(x_i)
    value = sum(w * y for w, y in zip(weights, shares.values(), strict=True)) % PRIME
    if value >= 2**256:
        raise ValueError("The shares do not belong to one key.")
    return value.to_bytes(KEY_BYTES, "big")
