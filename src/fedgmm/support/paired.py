"""Means with intervals and paired tests, over repeated splits of the rows or over bootstrap resamples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

LEVEL = 0.95
"""Coverage of all intervals."""


@dataclass(frozen=True)
class Estimate:
    """A mean with an interval, and a test whether it is zero."""

    mean: float  # the estimate
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    p_value: float  # two-sided p-value of a mean of zero

    @property
    def within_noise(self) -> bool:
        """Whether the interval contains zero: a difference like this is a tie."""
        return self.low <= 0.0 <= self.high

    def record(self) -> dict[str, float | bool]:
        """Return plain values of a difference, for JSON."""
        return {
            "difference": self.mean,
            "low": self.low,
            "high": self.high,
            "p_value": self.p_value,
            "tie": self.within_noise,
        }

    @classmethod
    def from_record(cls, record: dict[str, float]) -> Estimate:
        """Return the difference of a :meth:`record`."""
        return cls(record["difference"], record["low"], record["high"], record["p_value"])


def over_splits(values: FloatArray, test_per_training_row: float = 0.0) -> Estimate:
    """Return the mean of one value per split, ``(S,)``, with the interval of a ``t`` distribution.

    Splits of the same rows overlap, so their values vary less than those of new rows would. Nadeau
    and Bengio (2003) correct for that::

        variance of the mean = (1/S + n_test/n_train) · variance of the values

    ``test_per_training_row`` is ``n_test / n_train``; zero for values that are independent.
    Differences of two methods make the test paired.
    """
    count, mean = len(values), float(values.mean())
    if count < 2:
        return Estimate(mean, -math.inf, math.inf, 1.0)
    from scipy.stats import t  # takes a second to import

    error = float(values.std(ddof=1)) * math.sqrt(1.0 / count + test_per_training_row)
    reach = float(t.ppf(0.5 + LEVEL / 2, count - 1)) * error
    if error == 0.0:
        return Estimate(mean, mean, mean, float(mean == 0.0))
    p_value = 2.0 * float(t.sf(abs(mean) / error, count - 1))
    return Estimate(mean, mean - reach, mean + reach, p_value)


def over_resamples(mean: float, values: FloatArray) -> Estimate:
    """Return the mean of all rows with the percentiles of its values under bootstrap resamples, ``(B,)``.

    Differences of two methods under the same resamples make the test paired. NaN, where a value is
    undefined, is left out.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return Estimate(mean, -math.inf, math.inf, 1.0)
    low, high = np.quantile(known, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    tail = float(min((known <= 0.0).sum(), (known >= 0.0).sum()))
    p_value = min(1.0, 2.0 * (1.0 + tail) / (1.0 + len(known)))
    return Estimate(mean, float(low), float(high), p_value)
