"""The accountant: how much privacy some releases cost together.

A release is a Gaussian mechanism: a sum with L2 sensitivity ``s``, plus normal noise of deviation ``σ``.
It is ``μ``-Gaussian differentially private with ``μ = s/σ`` (Dong, Roth and Su, 2022). Releases in which
every row takes part compose exactly::

    μ² = Σ_i μ_i²
    δ(ε) = Φ(−ε/μ + μ/2) − e^ε · Φ(−ε/μ − μ/2)

A release in which each unit takes part with some probability is cheaper. It has no closed form, so
``dp-accounting`` composes its privacy loss distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated

from fedgmm.support.checks import Count, Positive, check_fields, check_number, number

_LARGEST_MU = 1e6
_SAFETY = 1e-12  # relative step that moves a root to the side that claims less privacy


@dataclass(frozen=True)
class Release:
    """One noisy sum, or several of the same kind.

    Attributes:
        mu: sensitivity divided by the deviation of the noise.
        sampling: probability with which a unit takes part, independently in each release.
        times: number of such releases.
    """

    mu: Positive
    sampling: Annotated[float, number(above=0, most=1)] = 1.0
    times: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)


def compose(mus: Iterable[float]) -> float:
    """Return the ``μ`` of several releases of the same rows, ``√(Σ μ_i²)``."""
    return math.hypot(*mus)


def delta_of(mu: float, epsilon: float) -> float:
    """Return the smallest ``δ`` with which ``μ``-Gaussian privacy is ``(ε, δ)``-private."""
    from scipy.special import log_ndtr

    check_number("mu", mu, least=0)
    check_number("epsilon", epsilon, least=0)
    if mu == 0:
        return 0.0
    first = float(log_ndtr(-epsilon / mu + mu / 2))
    second = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    # in logarithms, because e^ε overflows and both terms underflow
    return -math.exp(first) * math.expm1(min(second - first, 0.0))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest ``ε`` with which ``μ``-Gaussian privacy is ``(ε, δ)``-private."""
    check_number("mu", mu, least=0, most=_LARGEST_MU)
    check_number("delta", delta, above=0, below=1)
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    return _root(lambda epsilon: delta - delta_of(mu, epsilon), safe=1.0)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest ``μ`` that is ``(ε, δ)``-private: the budget that releases share."""
    check_number("epsilon", epsilon, above=0)
    check_number("delta", delta, above=0, below=1)
    return _root(lambda mu: delta_of(mu, epsilon) - delta, safe=-1.0)


def spent(releases: Iterable[Release], delta: float) -> float:
    """Return the ``ε`` that some releases about the same rows cost together, at this ``δ``."""
    check_number("delta", delta, above=0, below=1)
    times: dict[tuple[float, float], int] = {}
    for one in releases:
        times[one.mu, one.sampling] = times.get((one.mu, one.sampling), 0) + one.times
    full = compose(mu * math.sqrt(n) for (mu, sampling), n in times.items() if sampling == 1)
    sampled = [(mu, sampling, n) for (mu, sampling), n in times.items() if sampling < 1]
    if not sampled:
        return epsilon_of(full, delta)
    loss = _loss_distributions()
    total = loss.from_gaussian_mechanism(1 / full) if full else loss.identity()
    for mu, sampling, n in sampled:
        one = loss.from_gaussian_mechanism(1 / mu, sampling_prob=sampling)
        total = total.compose(one.self_compose(n))
    return float(total.get_epsilon_for_delta(delta))


def _root(rises: Callable[[float], float], safe: float) -> float:
    """Return the positive root of a rising function, moved a little up (1) or down (-1)."""
    from scipy.optimize import brentq

    low, high = 1.0, 1.0
    while rises(low) > 0:
        low /= 2
    while rises(high) < 0:
        high *= 2
    found = float(brentq(rises, low, high, xtol=1e-300, rtol=1e-14)) if low < high else low
    step = _SAFETY
    while safe * rises(found) < 0:
        found *= 1 + safe * step
        step *= 2
    return found


def _loss_distributions() -> ModuleType:
    """Return the module of ``dp-accounting`` for privacy loss distributions."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError:
        raise ImportError(
            "Accounting for sampled units needs dp-accounting; pip install 'fedgmm[privacy]', or let every "
            "unit take part in every round."
        ) from None
    return privacy_loss_distribution  # type: ignore[no-any-return]
