"""Private training with sites: each adds its part of the noise under its mask, so no server is trusted.

The releases are those of :class:`~fedgmm.privacy.private_method.PrivateMixture`, in the order of its plan.
A site replies with its part of a release, and the server sees the total only, with all of its noise.
"""

from __future__ import annotations

import math
import time
from typing import Any

from fedgmm.core.params import Params
from fedgmm.core.sums import Sums
from fedgmm.data.dataset import LabelledRows
from fedgmm.federation.folders import SiteFolder
from fedgmm.federation.job import Job
from fedgmm.federation.masking import SiteMasks
from fedgmm.federation.messages import Message, MessageError, Notify
from fedgmm.federation.policy import LimitError, Policy
from fedgmm.federation.remote import RemoteTraining
from fedgmm.federation.settings import FederationError
from fedgmm.federation.site_table import SiteTable
from fedgmm.federation.wire import Arrays
from fedgmm.files import sha256_of
from fedgmm.methods.base import AnyMethod, DivergedError, RoundInfo
from fedgmm.privacy.accounting import Release, compose, epsilon_of
from fedgmm.privacy.fixed_point import Elements, from_fixed, to_fixed
from fedgmm.privacy.forecast import forecast
from fedgmm.privacy.noise import SMALLEST_NOISE, noise_elements, share_of
from fedgmm.privacy.private_method import ROUND, PrivateMixture, PrivateShared
from fedgmm.privacy.settings import Privacy, PrivacyError
from fedgmm.privacy.site_sets import fewest_survivors
from fedgmm.training.private import PrivateWalk, noisy_sums, unit_weights, vector_of


def noise_share(sigma: float, sites: int, colluding: int) -> float:
    """Return the deviation of one site's part of the noise in an aggregation.

    A sum opens only for :func:`fewest_survivors` sites or more, so their parts reach ``sigma`` with the
    most dropouts, even if ``colluding`` survivors reveal theirs to the server. Without any, the total has
    up to ``√1.5`` times as much. ``sites`` are those that shared keys for the aggregation.
    """
    return share_of(sigma, sites, sites - fewest_survivors(sites) + colluding)


# ---------------------------------------------------------------------- at a site


class SiteNoise:
    """The half of a site: its releases, with their noise, on its disk."""

    def __init__(
        self,
        table: SiteTable,
        folder: SiteFolder,
        policy: Policy,
        masks: SiteMasks,
        notify: Notify,
    ) -> None:
        self._table, self._folder, self._policy = table, folder, policy
        self._masks, self._notify = masks, notify

    def reply(
        self,
        request: Message,
        job: Job,
        rows: LabelledRows,
        shared: PrivateShared,
        started: float,
    ) -> Arrays:
        """Return one release of the plan, with this site's part of the noise, under its mask.

        The work on the request began at ``started``.

        The noisy vector is on the disk before the ledger counts it, and the ledger before it leaves. A
        repeated request gets the same vector again. If more noise is needed, because fewer sites take
        part, it is added; the sum of the first noise and more reveals less.
        """
        run, place = str(request.facts["run"]), request.whole("round")
        method, name, mu = planned_release(job, request)
        layout = method.clipped_layout(name, shared)

        def noised(sites: int) -> Elements:
            share = noise_share(layout.sensitivity / mu, sites, method.privacy.tolerated)
            kept, charged = self._folder.release(run, place), self._policy.is_charged(request)
            if kept is None:
                if charged:
                    raise MessageError(
                        "the noise of this release was lost after the ledger counted it; this site takes "
                        "part in the next one."
                    )
                persons = self._table.persons(job.table, job.preprocessing, method.privacy)
                weights = unit_weights(method.privacy, rows.codes.cpu(), persons)
                units = round(float(weights.sum()))
                try:  # also of a site that joins later, and of persons, who are counted here only
                    method.privacy.check_units(units, units)
                except PrivacyError:
                    raise too_large_delta(method.privacy) from None
                exact = vector_of(method, name, shared, rows, weights)
                noise = noise_elements(layout.numbers, share)
                kept = to_fixed(exact, sites) + noise, share
                self._folder.keep_release(run, place, *kept)
                if name == ROUND:
                    number = [one for one, _ in method.plan()[: place + 1]].count(ROUND)
                    fit = method.mean_log_likelihood(shared, layout.read(exact))
                    seconds = time.perf_counter() - started
                    entry = {"round": float(number), "log_likelihood": fit, "seconds": seconds}
                    self._folder.add_history(entry)
            elif kept[1] < share * (1 - 1e-9):
                more = max(math.sqrt(share**2 - kept[1] ** 2), SMALLEST_NOISE)
                vector = kept[0] + noise_elements(layout.numbers, more)
                kept = vector, math.hypot(kept[1], more)
                self._folder.keep_release(run, place, *kept)
            if not charged:
                self._policy.charge(request, Release(mu), sha256_of(self._table.path))
            return kept[0]

        arrays = self._masks.seal(request, noised)
        self._notify(f"release {place} ({name}): μ = {mu:.3g}")
        return arrays


def planned_release(job: Job, request: Message) -> tuple[PrivateMixture, str, float]:
    """Return the method, and the name and ``μ`` of the release that a request asks for.

    Raises ``MessageError`` unless it is the one that the plan has in this place, with as much noise.
    """
    method, place = job.private, request.whole("round")
    plan = [] if method is None else method.releases()
    if method is None or place >= len(plan):
        raise MessageError(f"the plan of this run has no release {place}.")
    (name, most), mu = plan[place], request.facts.get("mu")
    if request.facts.get("release") != name:
        raise MessageError(
            f"the server asks for another release than number {place} of the plan, {name!r}."
        )
    if not isinstance(mu, float) or not 0 < mu <= most * (1 + 1e-12):
        raise MessageError(f"the server asks for release {place} with less noise than its plan.")
    return method, name, mu


def too_large_delta(privacy: Privacy) -> LimitError:
    """Return the error for a ``delta`` that protects no single unit of a site."""
    return LimitError(
        f"the server asks for delta={privacy.delta:g}, which is not less than one over the number of this "
        f"site's training {privacy.unit}s, and so allows to publish one of them as it is."
    )


# ---------------------------------------------------------------------- at the server


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
