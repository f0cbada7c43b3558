"""Fixed-point numbers: float64 arrays as elements of ``Z_2^64``, and back.

Masks and distributed noise need a group in which sums are exact and wrap around. A number ``x`` becomes
``round(x · 2^24) mod 2^64``. Sums of such elements are exact and do not depend on the order, as long as the
true sum stays below ``LARGEST``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

FRACTION_BITS = 24
"""Bits after the point: a step is ``2^-24``, about 6e-8."""

LARGEST = 2.0 ** (63 - FRACTION_BITS)
"""Absolute values of sums stay below this number, about 5.5e11."""

Elements = NDArray[np.uint64]
"""Elements of ``Z_2^64``; NumPy's addition of them wraps around."""


class RangeError(ValueError):
    """A number that fixed point cannot hold, with the reason."""


def to_fixed(values: ArrayLike, sites: int = 1) -> Elements:
    """Return numbers as elements of ``Z_2^64``, rounded to the nearest step.

    Raises ``RangeError`` for a number that is not finite, or not below ``LARGEST / sites``: so no sum of
    as many arrays can wrap around.
    """
    exact = np.asarray(values, dtype=np.float64)
    if not np.isfinite(exact).all():
        raise RangeError("a value is not finite, so it cannot be masked")
    limit = LARGEST / sites
    if exact.size and float(np.abs(exact).max()) >= limit:
        raise RangeError(
            f"a value of {float(np.abs(exact).max()):.3g} exceeds {limit:.3g}, the largest that "
            f"{sites} sites can add in fixed point; rescale the columns"
        )
    steps: NDArray[np.int64] = np.rint(np.ldexp(exact, FRACTION_BITS)).astype(np.int64)
    return steps.view(np.uint64)


def from_fixed(elements: Elements) -> NDArray[np.float64]:
    """Return elements of ``Z_2^64`` as numbers; the upper half of the range is negative."""
    if elements.dtype != np.uint64:
        raise TypeError(f"elements are {elements.dtype}, not uint64")
    steps = np.ascontiguousarray(elements).view(np.int64)
    return np.ldexp(steps.astype(np.float64), -FRACTION_BITS)


def steps_of(length: float) -> float:
    """Return a length, such as a noise deviation or a sensitivity, in steps of the grid."""
    return math.ldexp(length, FRACTION_BITS)
