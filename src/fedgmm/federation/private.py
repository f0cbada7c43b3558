"""Private training with sites: each adds its part of the noise under its mask, so no server is trusted.

The releases are those of :class:`~fedgmm.privacy.private_method.PrivateMixture`, in the order of its plan.
The server sends the public parameters, and sees the total of a release only, with all of its noise.
"""

from __future__ import annotations

import math
import time
from typing import Any

from fedgmm.core.params import Params
from fedgmm.core.sums import Sums
from fedgmm.federation.masking import noise_share
from fedgmm.federation.remote import RemoteTraining
from fedgmm.federation.settings import FederationError
from fedgmm.methods.base import AnyMethod, DivergedError, RoundInfo
from fedgmm.privacy.accounting import compose, epsilon_of
from fedgmm.privacy.fixed_point import from_fixed
from fedgmm.privacy.forecast import forecast
from fedgmm.privacy.private_method import ROUND, PrivateMixture, PrivateShared
from fedgmm.privacy.settings import PrivacyError
from fedgmm.training.private import PrivateWalk, noisy_sums


class PrivateTraining(PrivateWalk, RemoteTraining):
    """One private training run with sites."""

    def start(self, method: AnyMethod, learner: Params | None) -> tuple[Any, Any]:
        """Return the parameters before any release; the first round makes the releases before it."""
        assert self.job.private is not None
        self._enlist()
        shared = self.job.private.blank(self.job.columns)
        return shared, method.newcomer(shared)

    def accepted(self, number: int, info: RoundInfo) -> dict[str, Any]:
        """Note which sites took part; return their number, the traffic and ``ε`` so far."""
        facts = super().accepted(number, info)
        privacy = self.job.privacy
        assert privacy is not None
        assert privacy.delta is not None
        epsilon = epsilon_of(compose(self.loop.run.shared.spent.tolist()), privacy.delta)
        self.members.notify(f"{self.title}round {number}: ε = {epsilon:.3g} of {privacy.epsilon:g}")
        return {**facts, "epsilon": epsilon}

    def release(self, method: PrivateMixture, shared: PrivateShared, place: int) -> Sums:
        """Return a noisy total, opened with the help of the sites."""
        name, mu = method.releases()[place]
        if name == ROUND:
            self._started = time.perf_counter()
        facts = {"phase": "main", "round": place, "release": name, "mu": mu}
        request = self.message("release", self._broadcast(shared, None), facts)
        exchange = self.masked_exchange(f"{self.title}release {place} ({name})", lambda _: request)
        layout = method.clipped_layout(name, shared)
        assert exchange.total is not None
        if len(exchange.total) != layout.numbers:
            raise DivergedError(reason="the sites sent vectors of another length")
        share = noise_share(
            layout.sensitivity / mu, exchange.participants, method.privacy.tolerated
        )
        sigma = share * math.sqrt(len(exchange.found))
        noisy = noisy_sums(layout, from_fixed(exchange.total), sigma, mu)
        if name == "columns":
            self._show_forecast(method, float(noisy["rows"]))
        if name != ROUND:
            self.note_start_traffic()
        return noisy

    def _show_forecast(self, method: PrivateMixture, units: float) -> None:
        """Log the forecast for the noisy number of units, which the first release shows."""
        count, clients = max(1, round(units)), len(self.members.names)
        if method.privacy.unit == "client":
            count = clients
        rows = count if method.privacy.unit == "row" else None
        found = forecast(method, self.job.columns, clients, rows, count)
        self.members.notify(str(found))
        if not found.is_fine:
            self.notes.append(str(found))
        try:
            method.privacy.check_units(count)
        except PrivacyError as error:
            raise FederationError(str(error)) from None
