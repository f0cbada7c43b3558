"""Secure aggregation over the federation: both halves of :mod:`fedgmm.privacy.masks`, as messages.

With masks, a reply about rows is one vector of fixed length under pads. The server adds the vectors and
asks the survivors to open the sum (``unmask``). The keys and shares of the next sum travel with these two
requests, so an exchange takes two requests instead of one. Only before the first sum, and after the members
changed, ``keys`` and ``shares`` are requests of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgmm.core.sums import Declaration, Sums, SumsError, check_sums, withhold
from fedgmm.federation.members import Exchange, Member, Members
from fedgmm.federation.messages import Failure, Message, MessageError
from fedgmm.federation.network.keys import signer, verifiers
from fedgmm.federation.policy import Policy
from fedgmm.federation.settings import SiteSettings
from fedgmm.federation.wire import Arrays, WireError, unpack
from fedgmm.files import write_atomically
from fedgmm.privacy.fixed_point import Elements, RangeError, from_fixed
from fedgmm.privacy.mask_server import Aggregation
from fedgmm.privacy.masks import REGISTERED_SIGNATURE, MaskedSite, Roster, commit
from fedgmm.privacy.site_sets import (
    FEWEST_SITES,
    MaskError,
    Released,
    TooFewSitesError,
)

MASK_REQUESTS = ("keys", "shares", "unmask")
"""Kinds of requests that carry keys and shares only."""

PREFIX = "mask/"
"""The names of the protocol's arrays start with this."""

_FEWEST_ROWS = 1e-3  # a component with fewer expected rows in all is rounding of fixed point
_ROUNDING = 1e-6  # relative error of a total, from fixed point
_OPENED, _COMMITMENTS = "opened.json", "commitments.jsonl"  # in the server's folder
_MOST_RUNS = 2  # runs whose secrets a site keeps: the present one and a trial


# ---------------------------------------------------------------------- at a site


class SiteMasks:
    """The half of a site.

    Args:
        settings: its key, the keys of the other sites, and the fewest sites in a sum.
        policy: the privacy of the plan, and the sums that the site has helped to open.
        keep: called with the purpose, the secret and the vector of every commitment.
    """

    def __init__(
        self,
        name: str,
        settings: SiteSettings,
        policy: Policy,
        keep: Callable[[str, bytes, Elements], None],
    ) -> None:
        self._name, self._policy, self._keep = name, policy, keep
        self._sign = None if settings.key is None else signer(settings.key)
        self._peers = None if settings.peers is None else verifiers(settings.peers)
        self._min_sites = settings.min_sites or FEWEST_SITES
        self._runs: dict[str, MaskedSite] = {}

    def _of(self, request: Message) -> MaskedSite:
        run = str(request.facts.get("run"))
        if run not in self._runs:
            self._runs[run] = MaskedSite(
                self._name,
                run,
                sign=self._sign,
                peers=self._peers,
                min_sites=self._min_sites,
                min_change=self._policy.privacy.fewest_changes,
            )
            for old in list(self._runs)[:-_MOST_RUNS]:
                del self._runs[old]
        self._runs[run].released = self._policy.released(run)
        return self._runs[run]

    def reply(self, request: Message) -> Arrays:
        """Reply to ``keys``, ``shares`` or ``unmask``, or raise ``MessageError``.

        The policy notes a sum on the disk before this site helps to open it.
        """
        number, later = _numbers(request)
        try:
            site = self._of(request)
            if request.kind == "keys":
                return _named(identity=site.identity, advert=site.advertise(number))
            if request.kind == "shares":
                names = request.facts.get("names")
                if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
                    raise MaskError("the list of sites is missing")
                site.join(Roster(tuple(names), *_arrays(request, "identities")))
                lists = _arrays(request, "participants", "adverts")
                return _named(bundles=site.share(number, *lists))
            found = _named(**site.unmask(number, *_arrays(request, "survivors", "signatures")))
            if later is not None:
                lists = _arrays(request, "participants", "adverts")
                found |= _named(bundles=site.share(later, *lists))
            self._policy.keep_released(site.run, site.released)
            return found
        except MaskError as error:
            raise MessageError(f"{error}.") from None

    def seal(self, request: Message, vector_for: Callable[[int], Elements]) -> Arrays:
        """Return one masked vector, and the public key for the next one.

        ``vector_for`` returns the vector, given how many sites take part in the aggregation. Raises
        ``MessageError`` if the site must not reply, ``WireError`` for a number beyond fixed point.
        """
        number, later = _numbers(request)
        purpose = purpose_of(request)
        senders, bundles = _arrays(request, "senders", "bundles")
        try:
            site = self._of(request)
            vector = vector_for(site.participants(number))
            masked, signature = site.mask(number, purpose, senders, bundles, vector)
            secret, commitment = commit(vector)
            self._keep(purpose, secret, vector)
            signed = bytes(REGISTERED_SIGNATURE)
            if self._sign is not None:
                what = f"fedgmm commitment {site.run} {purpose} "
                signed = self._sign(what.encode() + commitment)
            found = _named(
                vector=masked,
                signature=signature,
                commitment=np.frombuffer(commitment + signed, dtype=np.uint8).copy(),
            )
            if later is not None:
                found |= _named(advert=site.advertise(later))
        except RangeError as error:
            raise WireError(str(error)) from None
        except MaskError as error:
            raise MessageError(f"{error}.") from None
        return found


def purpose_of(request: Message) -> str:
    """Return the name of the sum that a request is about, which its site opens for one set of sites.

    Only rounds and their scores differ between phases: the same sum must not have two names.
    """
    names = ("phase", "round") if request.kind in ("round", "score") else ("round",)
    place = [request.kind, *(str(request.facts.get(name, "")) for name in names)]
    return " ".join(one for one in place if one)


def _numbers(request: Message) -> tuple[int, int | None]:
    mask = request.facts.get("mask")
    number = mask.get("number") if isinstance(mask, Mapping) else None
    later = mask.get("next") if isinstance(mask, Mapping) else None
    if type(number) is not int or not 0 <= number < 2**62:
        raise MessageError("the request has no keys of secure aggregation, which this run needs.")
    if later is not None and (type(later) is not int or not number < later < 2**62):
        raise MessageError("the number of the next sum is not valid.")
    return number, later


def _arrays(request: Message, *names: str) -> list[NDArray[Any]]:
    """Return arrays of the protocol in a request, or raise ``MessageError``."""
    for name in names:
        if PREFIX + name not in request.arrays:
            raise MessageError(f"the request lacks {name} of secure aggregation.")
    return [request.arrays[PREFIX + name] for name in names]


def _named(**arrays: NDArray[Any]) -> Arrays:
    return {PREFIX + name: array for name, array in arrays.items()}


# ---------------------------------------------------------------------- at the server


@dataclass
class ServerMasks:
    """The half of the server: the sites that share keys, and the sum that is prepared.

    Attributes:
        min_change: fewest sites in which two opened sums may differ.
        released: sums that were opened, or that sites were asked to open.
        home: folder with the sites' commitments and the opened sums.
    """

    members: Members
    min_change: int
    home: Path
    released: Released = field(default_factory=Released)
    _run: str = ""
    _number: int = 0
    _prepared: Aggregation | None = None

    def _recalled(self) -> Released:
        """Return the opened sums of the present run, with the sets of sites of all runs."""
        path = self.home / _OPENED
        if not path.is_file():
            return Released(sets=self.released.sets)
        record = json.loads(path.read_bytes())
        return Released(record["purposes"] if record["run"] == self._run else {}, record["sets"])

    def keep(self, purpose: str, name: str, reply: Message) -> None:
        """Append the commitment of a site to the log."""
        found = reply.arrays.get(PREFIX + "commitment")
        size = 32 + REGISTERED_SIGNATURE
        if found is None or found.dtype != np.uint8 or found.shape != (size,):
            raise WireError("its commitment is missing")
        data = found.tobytes()
        entry = {"run": self.members.run, "purpose": purpose, "site": name}
        entry |= {"commitment": data[:32].hex(), "signature": data[32:].hex()}
        with (self.home / _COMMITMENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def take_prepared(self, purpose: str, names: Iterable[str]) -> Aggregation | None:
        """Return the aggregation for a purpose with these sites, if they may be added up.

        The sum that was prepared with the last one is used, unless more sites may join.
        """
        if self._run != self.members.run:
            self._run, self._prepared = self.members.run, None
            self.released = self._recalled()
        found, self._prepared = self._prepared, None
        wanted = self._allowed(purpose, names)
        if found is not None:
            old = {found.roster.names[u] for u in found.senders}
            fits = self.may_open(purpose, old)
            if fits and found.enough_senders and (wanted is None or set(wanted) <= old):
                found.purpose = purpose
                return found
        if wanted is None:
            return None
        fresh = self._set_up(wanted)
        if fresh is not None:
            fresh.purpose = purpose
        return fresh

    def may_open(self, purpose: str, names: Iterable[str]) -> bool:
        """Return whether the sum over some sites would show no single one."""
        try:
            self.released.check(purpose, list(names), self.min_change)
        except MaskError:
            return False
        return True

    def _allowed(self, purpose: str, names: Iterable[str]) -> list[str] | None:
        """Return the most sites whose sum may be opened; ``None`` if the right ones are not here."""
        here = sorted(names)
        choices = [here[: len(here) - left] for left in range(self.min_change)]
        choices += sorted(([*s] for s in self.released.sets if set(s) <= set(here)), key=len)[::-1]
        for some in choices:
            if len(some) >= FEWEST_SITES and self.may_open(purpose, some):
                return some
        return None

    def next_number(self) -> int:
        """Return a number larger than all before, also if the server was restarted."""
        self._number = max(self._number + 1, time.time_ns() // 1_000_000)
        return self._number

    def _set_up(self, names: list[str]) -> Aggregation | None:
        """Exchange keys and shares with some sites."""
        number, run = self.next_number(), self.members.run
        request = Message("keys", {}, self._facts(number))
        identities: dict[str, NDArray[np.uint8]] = {}
        adverts: dict[str, NDArray[np.uint8]] = {}
        for name, reply in self._ask(dict.fromkeys(names, request)):
            if _has(reply, "identity", "advert"):
                identities[name] = reply.arrays[PREFIX + "identity"]
                adverts[name] = reply.arrays[PREFIX + "advert"]
        known = sorted(identities)
        try:
            table = np.array([identities[n] for n in known], dtype=np.uint8)
            roster = Roster(tuple(known), table)
            keys = {roster.names.index(n): one for n, one in adverts.items()}
            found = Aggregation(run, number, roster, keys, keep=max(1, self.min_change - 1))
            listed = _named(identities=roster.identities)
            facts = self._facts(number, names=list(roster.names))
            requests = {}
            for code, name in enumerate(roster.names):
                participants, keys_of = found.keys_for(code)
                lists = _named(participants=participants, adverts=keys_of)
                requests[name] = Message("shares", {**listed, **lists}, facts)
            for name, reply in self._ask(requests):
                if _has(reply, "bundles"):
                    found.add_bundles(roster.names.index(name), reply.arrays[PREFIX + "bundles"])
        except (MaskError, ValueError) as error:
            self.members.notify(f"secure aggregation cannot start: {error}")
            return None
        return found if found.enough_senders else None

    def _ask(self, requests: Mapping[str, Message]) -> Iterable[tuple[str, Message]]:
        for name, reply in self.members.ask(dict(requests)):
            if isinstance(reply, Failure):
                self.members.notify(f"secure aggregation: {name}: {reply.reason}")
            else:
                yield name, reply

    def _facts(self, number: int, later: int | None = None, **facts: Any) -> dict[str, Any]:
        mask = {"number": number, **({} if later is None else {"next": later})}
        return self.members.facts(mask=mask, **facts)

    def unmask(
        self, now: Aggregation, later: int, adverts: Mapping[int, NDArray[np.uint8]]
    ) -> Elements:
        """Ask the survivors to open a sum, with the keys of the next one; or raise ``MaskError``."""
        names = now.roster.names
        self.released.add(now.purpose, [names[u] for u in now.survivors])
        # on the disk, because the sites remember it, too
        record = {"run": self._run, **asdict(self.released)}
        write_atomically(self.home / _OPENED, json.dumps(record).encode())
        following: Aggregation | None = None
        if len(adverts) >= FEWEST_SITES:
            keep = max(1, self.min_change - 1)
            following = Aggregation(now.run, later, now.roster, adverts, keep=keep)
        requests = {}
        for code in now.survivors:
            survivors, signatures = now.survivors_for(code)
            lists = _named(survivors=survivors, signatures=signatures)
            facts = self._facts(now.number)
            if following is not None and code in adverts:
                participants, keys = following.keys_for(code)
                lists |= _named(participants=participants, adverts=keys)
                facts = self._facts(now.number, later)
            requests[names[code]] = Message("unmask", lists, facts)
        here = set(self.members.connected())
        for name, reply in self._ask({n: q for n, q in requests.items() if n in here}):
            code = names.index(name)
            plain = {n.removeprefix(PREFIX): one for n, one in reply.arrays.items()}
            try:
                now.add_unmask(code, plain)
                if following is not None and "bundles" in plain:
                    following.add_bundles(code, plain["bundles"])
            except MaskError as error:
                self.members.notify(f"secure aggregation: {name}: {error}")
        total = now.open()
        self._prepared = following
        return total


def _has(reply: Message, *names: str) -> bool:
    return all(PREFIX + name in reply.arrays for name in names)


@dataclass
class MaskedExchange(Exchange):
    """One request to all sites, whose vectors are added under masks.

    Attributes:
        total: the opened sum over the sites of ``found``, elements of ``Z_2^64``.
        participants: number of sites that shared keys for the sum.
        discarded: why the last sum could not be opened.
    """

    fewest = FEWEST_SITES
    total: Elements | None = None
    participants: int = 0
    discarded: str = ""

    def _attempt(self, here: list[str], quorum: int) -> bool:
        """Collect vectors and open their sum; return whether sites were asked.

        A sum that cannot be opened is discarded. It is asked again with the same sites only, if any
        site was asked to open it.
        """
        masks, self.found = self.members.masks, set()
        assert masks is not None
        self.members.greet(agree=False)
        if len(here) < quorum:
            return False
        now = masks.take_prepared(purpose_of(self.request(here[0])), here)
        if now is None:
            return False
        later, names = masks.next_number(), now.roster.names
        adverts: dict[int, NDArray[np.uint8]] = {}

        def add(member: Member, reply: Message) -> None:
            code = names.index(member.name)
            if not _has(reply, "vector", "signature"):
                raise WireError("its masked vector is missing")
            vector, signature = (reply.arrays[PREFIX + n] for n in ("vector", "signature"))
            try:
                now.add_masked(code, vector, signature)
            except MaskError as error:
                raise WireError(str(error)) from None
            masks.keep(now.purpose, member.name, reply)
            if _has(reply, "advert"):
                adverts[code] = reply.arrays[PREFIX + "advert"]
            self.note(member, reply)

        connected = set(self.members.connected())
        requests = {}
        for code in now.senders:
            if names[code] in connected:
                plain = self.request(names[code])
                senders, bundles = now.bundles_for(code)
                lists = _named(senders=senders, bundles=bundles)
                mask = {"number": now.number, "next": later}
                requests[names[code]] = Message(
                    plain.kind, {**plain.arrays, **lists}, {**plain.facts, "mask": mask}
                )
        for name, reply in self.members.ask(requests, greet=False):
            self._take(name, reply, add)
        try:
            while not masks.may_open(now.purpose, [names[u] for u in now.survivors]):
                left = now.leave_out()
                if left is None or not now.enough_survivors:
                    raise TooFewSitesError(
                        "the sites changed by too few, and single ones would show"
                    )
                self._drop(names[left], "left out: ", "a sum without one site would show that site")
            if not now.enough_survivors or len(now.survivors) < quorum:
                raise TooFewSitesError(
                    f"{len(now.survivors)} of {len(now.senders)} sites sent vectors"
                )
            keys = {u: one for u, one in adverts.items() if u in now.survivors}
            self.total = masks.unmask(now, later, keys)
        except MaskError as error:
            if str(error) != self.discarded:
                self.discarded = str(error)
                self.members.notify(f"{self.what}: the sum is discarded: {error}")
        else:
            self.found = {names[u] for u in now.survivors}
            self.participants = len(now.participants)
        return True

    def _is_done(self, quorum: int) -> bool:
        return self.total is not None


def read_total(exchange: MaskedExchange, declaration: Declaration) -> Sums:
    """Return the opened sums, or raise ``WireError`` for a vector of another length."""
    assert exchange.total is not None
    sums = Sums(unpack(from_fixed(exchange.total), declaration))
    return withhold(sums, declaration, _FEWEST_ROWS)


def check_total(sums: Sums, declaration: Declaration, rows: float) -> None:
    """Raise ``SumsError`` unless rows can have made a total, up to the rounding of fixed point."""
    if rows <= 0:
        raise SumsError("the total stands for no rows")
    loose = {
        name: replace(one, rounding=max(one.rounding, _ROUNDING))
        for name, one in declaration.items()
    }
    check_sums(sums, loose, int(rows) + 1)
