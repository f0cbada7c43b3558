"""Private training with sites: each adds its part of the noise under its mask, so no server is trusted.

The releases are those of :class:`~fedgmm.privacy.private_method.PrivateMixture`, in the order of its plan.
The server sends the public parameters, and sees the total of a release only, with all of its noise.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from fedgmm.core.params import Params
from fedgmm.core.sums import Sums
from fedgmm.federation.masking import noise_share
from fedgmm.federation.remote import RemoteTraining
from fedgmm.federation.settings import FederationError
from fedgmm.methods.base import AnyMethod, DivergedError, RoundInfo
from fedgmm.privacy.accounting import compose, epsilon_of
from fedgmm.privacy.fixed_point import from_fixed
from fedgmm.privacy.forecast import forecast
from fedgmm.privacy.private_method import DEVIATION, MUS, ROUND, PrivateMixture, PrivateShared
from fedgmm.privacy.settings import PrivacyError
from fedgmm.training.loop import Replies


class PrivateTraining(RemoteTraining):
    """One private training run with sites."""

    def start(self, method: AnyMethod, learner: Params | None) -> tuple[Any, Any]:
        """Return the parameters before any release; the first round makes the releases before it.

        So each release is in a checkpoint, and a server that is killed asks for none of them again.
        """
        assert isinstance(method, PrivateMixture)
        for member in self.members.members.values():
            member.since, member.best_since, member.founder = 0, 0, True
        self._codes = list(self.members.names)
        shared = method.blank(self.job.columns)
        return shared, method.newcomer(shared)

    def step(self, method: AnyMethod, shared: Any, personal: Any, number: int) -> Replies | None:
        """Return the noisy total of a round; sites have no personal part before the end."""
        assert isinstance(method, PrivateMixture)
        names = [name for name, _ in method.releases()]
        first = names.index(ROUND)
        for place in range(len(shared.spent), first):
            noisy = self._release(method, shared, place)
            if place == 0:
                self._show_forecast(method, float(noisy["rows"]))
            shared = self.loop.run.shared = method.advance(names[place], shared, noisy)
            self.note_start_traffic()
            self.loop.save()
        self._started = time.perf_counter()
        return Replies(personal, self._release(method, shared, first + number - 1))

    def accepted(self, number: int, info: RoundInfo) -> dict[str, Any]:
        """Note which sites took part; return their number, the traffic and ``ε`` so far."""
        facts = super().accepted(number, info)
        privacy = self.job.privacy
        assert privacy is not None
        assert privacy.delta is not None
        epsilon = epsilon_of(compose(self.loop.run.shared.spent.tolist()), privacy.delta)
        self.members.notify(f"{self.title}round {number}: ε = {epsilon:.3g} of {privacy.epsilon:g}")
        return {**facts, "epsilon": epsilon}

    def score(self, method: AnyMethod, shared: Any, personal: Any) -> float:
        """Refuse: scores of validation rows are not noised."""
        raise PrivacyError("patience compares scores of rows, which are not private; leave it out.")

    def _release(self, method: PrivateMixture, shared: PrivateShared, place: int) -> Sums:
        """Return a noisy total, with the deviations of its noise and the ``μ`` that it costs."""
        name, mu = method.releases()[place]
        facts = {"phase": "main", "round": place, "release": name, "mu": mu}
        request = self.message("release", self._broadcast(shared, None), facts)
        exchange = self.masked_exchange(f"{self.title}release {place} ({name})", lambda _: request)
        layout = method.layout(name, self.job.columns)
        assert exchange.total is not None
        if len(exchange.total) != layout.numbers:
            raise DivergedError(reason="the sites sent vectors of another length")
        share = noise_share(
            layout.sensitivity / mu, exchange.participants, method.privacy.tolerated
        )
        deviations = layout.deviations(share * math.sqrt(len(exchange.found)))
        return Sums(
            {
                **layout.read(from_fixed(exchange.total)),
                **{DEVIATION + n: torch.tensor(one) for n, one in deviations.items()},
                MUS: torch.tensor([mu], dtype=torch.float64),
            }
        )

    def _show_forecast(self, method: PrivateMixture, rows: float) -> None:
        """Log the forecast for the noisy number of rows, which the first release shows.

        Raises:
            FederationError: ``delta`` is too large for so many rows.
        """
        count = max(1, round(rows))
        found = forecast(method, self.job.columns, len(self.members.names), count)
        self.members.notify(str(found))
        if not found.is_fine:
            self.notes.append(str(found))
        try:
            method.privacy.check_units(count)
        except PrivacyError as error:
            raise FederationError(str(error)) from None
