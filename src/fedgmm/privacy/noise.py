"""Discrete Gaussian noise on the grid of fixed-point numbers, from the operating system's randomness.

Continuous noise in floating point has gaps that reveal the sum below it (Mironov, 2012), so noise is a
whole number of grid steps. Its distribution is ``P(k) ∝ exp(-k²/2σ²)``, drawn by rejection from a discrete
Laplace distribution (Canonne, Kamath and Steinke, 2020, algorithms 2 and 3), for all numbers at once.

The sampler differs from the exact distribution in one place: probabilities are compared with 53 random
bits. Each comparison is wrong by at most ``2^-53``, and a number needs about ten of them, so the total
variation distance per number is below ``2^-48``. Ten thousand numbers in each of a hundred releases add
less than 4e-9 to ``δ``. With ``σ`` of thousands of steps, the discrete Gaussian has the privacy of the
continuous one, and a sum of the sites' noise is a discrete Gaussian, both up to less than ``exp(-σ²)``.

:meth:`fedgmm.training.private.PrivateClients.release` adds the noise in one process. Over a network each
site adds its part, in :mod:`fedgmm.federation.private`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedgmm.privacy.fixed_point import Elements, from_fixed, steps_of, to_fixed

RandomBytes = Callable[[int], bytes]
"""A source of random bytes; only tests replace the operating system's."""

_SMALLEST_STEPS = 1000.0  # a deviation of fewer grid steps would differ from continuous noise
_LARGEST_STEPS = 2.0**52

SMALLEST_NOISE = _SMALLEST_STEPS / steps_of(1.0)
"""Smallest deviation of noise."""


def discrete_gaussian(
    sigma: float, count: int, source: RandomBytes = os.urandom
) -> NDArray[np.int64]:
    """Draw ``count`` whole numbers with ``P(k) ∝ exp(-k²/2σ²)``; ``sigma`` is in grid steps."""
    if not _SMALLEST_STEPS <= sigma <= _LARGEST_STEPS:
        raise ValueError(
            f"A noise deviation of {sigma:.3g} grid steps is outside {_SMALLEST_STEPS:g} to "
            f"{_LARGEST_STEPS:.2g}; rescale the sums."
        )
    width = math.floor(sigma) + 1
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        proposed = _discrete_laplace(width, 2 * (count - len(found)) + 16, source)
        # accept with probability exp(-(|k| - σ²/t)² / 2σ²)
        gap = np.abs(proposed) - sigma * (sigma / width)
        accepted = _happens(np.exp(-0.5 * (gap / sigma) ** 2), source)
        found = np.concatenate([found, proposed[accepted]])
    return found[:count]


def _discrete_laplace(width: int, count: int, source: RandomBytes) -> NDArray[np.int64]:
    """Draw about ``count`` whole numbers with ``P(k) ∝ exp(-|k|/t)``, ``t`` being the width."""
    low = _below(width, 3 * count, source)
    low = low[_happens(np.exp(-low / width), source)]
    # the number of times in a row that an event of probability 1/e happens
    high = np.zeros(len(low), dtype=np.int64)
    going = np.arange(len(low))
    while len(going):
        going = going[_happens(np.full(len(going), math.exp(-1.0)), source)]
        high[going] += 1
    size = low + width * high
    negative = _words(len(size), source) >> np.uint64(63) == 1
    kept = ~(negative & (size == 0))  # otherwise zero would count twice
    return np.asarray(np.where(negative, -size, size)[kept])


def _below(limit: int, count: int, source: RandomBytes) -> NDArray[np.int64]:
    """Draw whole numbers below ``limit``, all equally likely."""
    mask = np.uint64((1 << (limit - 1).bit_length()) - 1)
    drawn = (_words(2 * count, source) & mask).astype(np.int64)
    return drawn[drawn < limit]


def _happens(probabilities: NDArray[np.float64], source: RandomBytes) -> NDArray[np.bool_]:
    """Draw events with these probabilities."""
    uniforms = (_words(len(probabilities), source) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray(uniforms < probabilities)


def _words(count: int, source: RandomBytes) -> Elements:
    """Return ``count`` random 64-bit numbers."""
    return np.frombuffer(source(8 * count), dtype=np.uint64)


# ---------------------------------------------------------------------- noise of a release


def noisy(
    total: NDArray[np.float64], sigma: float, source: RandomBytes = os.urandom
) -> NDArray[np.float64]:
    """Return a total with discrete Gaussian noise of deviation ``sigma``, on the fixed-point grid."""
    return from_fixed(to_fixed(total) + noise_elements(total.size, sigma, source))


def noise_elements(count: int, sigma: float, source: RandomBytes = os.urandom) -> Elements:
    """Return noise of deviation ``sigma`` as elements of ``Z_2^64``, to add to fixed-point numbers."""
    return discrete_gaussian(steps_of(sigma), count, source).view(np.uint64)


def share_of(sigma: float, sites: int, tolerated: int = 0) -> float:
    """Return the deviation of one site's part of the noise.

    Independent parts add up in variance, so all sites but the tolerated ones reach at least ``sigma``::

        (n - tolerated) · share² = σ²

    Tolerated sites may drop out, or reveal their part to the server.
    """
    if not 0 <= tolerated < sites:
        raise ValueError(
            f"tolerated must be at least 0 and less than the number of sites ({sites}), got "
            f"{tolerated!r}."
        )
    return sigma / math.sqrt(sites - tolerated)


def grid_sensitivity(sensitivity: float, numbers: int) -> float:
    """Return the sensitivity of a vector that is rounded to the grid.

    Rounding changes the distance of two numbers by a step at most.
    """
    return sensitivity + math.sqrt(numbers) / steps_of(1.0)
