"""A forecast before private training: is the noise small against what the rows say?

The noise of a release is known before any row is read, and so is the size of the sums that it hides. The
forecast compares them in the last round, which is averaged with the rounds before, for these sums:

- the gradient of a learner, whose length is about ``0.2 n/M2`` while the learner is still wrong;
- the gradients of a network, whose noise is averaged over all steps: a rule of thumb, from MLPs on digits;
- the second moments of a Gaussian, whose eigenvalues are about ``n/M1`` in whitened coordinates.

``tests/privacy/test_forecast.py`` holds the accuracies that decided where noise is called too large. They
are those of the paper's synthetic data; classes or groups that are harder to separate need less noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedgmm.privacy.accounting import epsilon_of, mu_of
from fedgmm.privacy.private_em import radius
from fedgmm.privacy.private_method import ROUND, PrivateMixture
from fedgmm.privacy.settings import NETWORK_ROUNDS, PrivacyError
from fedgmm.wording import counted

FINE, HOPELESS = 0.1, 0.15
"""Noise relative to the signal, up to which little accuracy is lost, and from which on little is left."""

_AVERAGED = 0.384  # of the budget of all rounds that counts for the last average
_WRONG = 0.2  # mean length of a shortened (p - y) z along a direction that decides the label
_SECOND = 0.75  # weight of the relative noise of covariances, against that of gradients
_EASY = 3  # components up to which a noisy start finds them all; more are harder to separate
_SPREAD = 0.03  # of clients' contributions beyond that of their rows, relative to a row's bound
_CLIPPED = 0.7  # of the usual length of a client's contribution, to which longer ones are clipped


@dataclass(frozen=True)
class Forecast:
    """Noise of the last round of a private run, relative to its signal.

    ``rows`` are the training rows of all clients, if they are known.
    """

    noise: float
    epsilon: float
    delta: float
    unit: str
    clients: int
    rows: int | None

    @property
    def is_hopeless(self) -> bool:
        """Whether the noise leaves little of the signal."""
        return self.noise > HOPELESS

    @property
    def is_fine(self) -> bool:
        """Whether little accuracy is lost."""
        return self.noise <= FINE

    @property
    def needed_epsilon(self) -> float:
        """The ``ε`` with which little accuracy is lost, rounded up to two digits."""
        mu = mu_of(self.epsilon, self.delta) * max(self.noise / FINE, 1.0)
        found = max(epsilon_of(mu, self.delta), self.epsilon)
        step = 10.0 ** (math.floor(math.log10(found)) - 1)
        return math.ceil(found / step - 1e-6) * step

    @property
    def needed_clients(self) -> int:
        """Number of clients of the same size that lose little accuracy."""
        return math.ceil(self.clients * max(self.noise / FINE, 1.0))

    def __str__(self) -> str:
        size = counted(self.clients, "client")
        if self.rows is not None:
            size += f" with {counted(self.rows, 'training row')}"
        what = f"{size} at epsilon={self.epsilon:g} per {self.unit}"
        share = f"{100 * self.noise:.0f} %" if self.noise >= 0.01 else "less than 1 %"
        if self.is_fine:
            return f"{what}: the noise is {share} of the signal, so little accuracy is lost."
        loss = "a model of little use" if self.is_hopeless else "to lose several points of accuracy"
        remedy = f"epsilon={self.needed_epsilon:g} or {counted(self.needed_clients, 'client')}"
        return f"{what}: the noise is {share} of the signal; expect {loss}. {remedy} of this size would do."


def forecast(
    method: PrivateMixture,
    columns: int,
    clients: int,
    rows: int | None,
    persons: int | None = None,
) -> Forecast:
    """Return the noise of a private run against its signal; it uses public numbers only.

    ``rows`` are the training rows of all clients, ``None`` if they are many and not known. Without
    ``persons`` every row counts as one person.
    """
    privacy = method.privacy
    if privacy.epsilon is None or privacy.delta is None:
        raise PrivacyError("A forecast needs epsilon and delta.")
    units = {"row": rows, "person": persons or rows, "client": clients}[privacy.unit] or 1
    shares = [share for name, share in method.plan() if name == ROUND]
    mu = mu_of(privacy.epsilon, privacy.delta)
    mu *= math.sqrt(max(shares[-1], _AVERAGED * sum(shares)))
    parts = {one.name: one for one in method.layout(ROUND, columns).parts}
    shrink = 1.0
    if privacy.unit == "client":  # its contribution is the mean of its rows, clipped
        shrink = _CLIPPED * math.sqrt(min(1.0, (clients / rows if rows else 0.0) + _SPREAD**2))
    found = [0.0]
    if "gradient" in parts:
        one, learners = parts["gradient"], method.base.learners
        noise = shrink / math.sqrt(one.share) / mu * math.sqrt(one.numbers / learners)
        if method.sums_up_gradients:
            noise /= math.sqrt(privacy.rounds or NETWORK_ROUNDS)
        else:
            noise *= one.bound / _WRONG
        found.append(noise / (units / learners))
    if "second" in parts:
        kind = method.base.gaussians.covariance_type
        bound = radius(columns) ** 2
        noise = shrink * bound / math.sqrt(parts["second"].share) / mu
        # a symmetric matrix of noise has eigenvalues up to √(2d) deviations, a diagonal one has one
        noise *= math.sqrt(2.0 * columns) if kind in ("full", "tied") else 1.0
        found.append(_SECOND * noise / (units / (1 if kind == "tied" else method.components)))
    harder = max(method.components, method.base.learners, _EASY) / _EASY
    noise = max(found) * harder
    return Forecast(noise, privacy.epsilon, privacy.delta, privacy.unit, clients, rows)
