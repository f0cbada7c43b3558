"""The server's half of secure aggregation: it routes keys and shares, adds vectors and opens their sum.

The protocol is described in :mod:`fedgmm.privacy.masks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedgmm.privacy.fixed_point import Elements
from fedgmm.privacy.masks import (
    ADVERT_BYTES,
    BUNDLE_BYTES,
    MISSING,
    SIGNATURE_BYTES,
    TAG_BYTES,
    Bytes,
    Codes,
    Roster,
    checked_bytes,
    derive,
    digest_of,
    pair_pad,
    seed_pad,
    view_of,
    where_of,
    xor,
)
from fedgmm.privacy.shares import SHARE_BYTES, combine
from fedgmm.privacy.site_sets import (
    FEWEST_SITES,
    MaskError,
    TooFewSitesError,
    fewest_survivors,
    graph_sizes,
)


class Aggregation:
    """One number at the server: it routes keys and shares, adds vectors and opens the sum.

    Vectors are added as they arrive, so the memory does not grow with the number of sites.

    Attributes:
        purpose: of the vectors.
        participants: sorted codes of the sites that sent mask keys.
        senders: those that sent shares.
        survivors: those whose vectors are in the sum.

    Methods raise ``MaskError`` for a message of a site that breaks the protocol.
    """

    def __init__(
        self,
        run: str,
        number: int,
        roster: Roster,
        adverts: Mapping[int, Bytes],
        *,
        purpose: str = "",
        keep: int = 1,
    ) -> None:
        """Note the mask keys of the participants, by code; raise ``TooFewSitesError`` below three.

        ``number`` is larger than all before it in the run. ``purpose`` may be set until the first vector is
        asked for. :meth:`leave_out` can take the last ``keep`` vectors out of the sum again.
        """
        self.run, self.number, self.roster, self.purpose = run, number, roster, purpose
        self.participants = tuple(sorted(adverts))
        if len(self.participants) < FEWEST_SITES:
            raise TooFewSitesError(
                f"secure aggregation needs at least {FEWEST_SITES} sites; "
                f"there are {len(self.participants)}"
            )
        self._adverts = {u: checked_bytes(one, ADVERT_BYTES) for u, one in adverts.items()}
        self._near = roster.circle(run, number, self.participants)
        _, self.threshold = graph_sizes(len(self.participants))
        self._bundles: dict[int, dict[int, Bytes]] = {}  # by sender and receiver
        self._senders: tuple[int, ...] | None = None
        self._total: Elements | None = None
        self._uploads: dict[int, Bytes] = {}  # signatures
        self._latest: deque[tuple[int, Elements]] = deque(maxlen=keep)
        self._closed = False
        self._replies: dict[int, dict[str, Bytes]] = {}

    # ------------------------------------------------------------------ shares

    def keys_for(self, code: int) -> tuple[Codes, Bytes]:
        """Return the participants, and the mask keys of a site's neighbours."""
        near = sorted(self._near[code])
        return np.array(self.participants), np.stack([self._adverts[v] for v in near])

    def add_bundles(self, code: int, bundles: Bytes) -> None:
        """Take the encrypted shares of a site."""
        near = sorted(self._near[code])
        table = checked_bytes(bundles, len(near), BUNDLE_BYTES)
        self._bundles[code] = dict(zip(near, table, strict=True))

    @property
    def senders(self) -> tuple[int, ...]:
        """Sites that sent shares; the first use closes the list."""
        if self._senders is None:
            self._senders = tuple(sorted(self._bundles))
        return self._senders

    @property
    def enough_senders(self) -> bool:
        """Whether the sites will accept the list of senders."""
        return len(self.senders) >= fewest_survivors(len(self.participants))

    def bundles_for(self, code: int) -> tuple[Codes, Bytes]:
        """Return the senders, and their encrypted shares for one site."""
        near = sorted(self._near[code] & set(self.senders))
        table = [self._bundles[v][code] for v in near]
        return np.array(self.senders), np.array(table, dtype=np.uint8).reshape(-1, BUNDLE_BYTES)

    # ------------------------------------------------------------------ vectors

    def add_masked(self, code: int, vector: Elements, signature: Bytes) -> None:
        """Add a sender's vector to the sum, once."""
        if code not in self.senders or code in self._uploads or self._closed:
            raise MaskError("the site is not a sender, has sent its vector, or the sum is closed")
        signature = checked_bytes(signature, SIGNATURE_BYTES)
        if vector.dtype != np.uint64 or vector.ndim != 1:
            raise MaskError("the vector is not one of elements of Z_2^64")
        if self._total is None:
            self._total = np.zeros(len(vector), dtype=np.uint64)
        if len(vector) != len(self._total):
            raise MaskError(f"the vector has {len(vector)} elements, not {len(self._total)}")
        self._total += vector
        self._uploads[code] = signature
        self._latest.append((code, vector))

    def leave_out(self) -> int | None:
        """Take the latest vector out of the sum, and return its site; ``None`` if it is not known.

        If one site drops, the sum over the others and the sum of the round before would show that site.
        So another site is left out, too.
        """
        if self._closed or not self._latest or self._total is None:
            return None
        code, vector = self._latest.pop()
        self._total -= vector
        del self._uploads[code]
        return code

    @property
    def survivors(self) -> tuple[int, ...]:
        """Sites whose vectors are in the sum."""
        return tuple(sorted(self._uploads))

    @property
    def enough_survivors(self) -> bool:
        """Whether the sites will accept the list of survivors."""
        return len(self._uploads) >= fewest_survivors(len(self.participants))

    def survivors_for(self, code: int) -> tuple[Codes, Bytes]:
        """Return the survivors, and the signatures of a site's neighbours among them."""
        self._closed = True
        near = sorted(self._near[code] & set(self.survivors))
        table = [self._uploads[v] for v in near]
        return np.array(self.survivors), np.array(table, dtype=np.uint8).reshape(
            -1, SIGNATURE_BYTES
        )

    # ------------------------------------------------------------------ the sum

    def add_unmask(self, code: int, reply: Mapping[str, Bytes]) -> None:
        """Take a survivor's reply to ``unmask``."""
        if code not in self._uploads:
            raise MaskError("the site did not survive")
        near = len(self._near[code] & set(self.survivors))
        held = len(self._near[code] & set(self.senders)) + 1
        sizes = {
            "shares": (held * SHARE_BYTES + TAG_BYTES,),
            "locks": (near, SHARE_BYTES),
            "keys": (near, SHARE_BYTES),
            "own": (SHARE_BYTES,),
        }
        self._replies[code] = {n: checked_bytes(reply.get(n), *s) for n, s in sizes.items()}

    def open(self) -> Elements:
        """Return the sum of the survivors' vectors; too few replies raise ``TooFewSitesError``."""
        if self._total is None or not self.enough_survivors:
            raise TooFewSitesError(
                f"{len(self._uploads)} of {len(self.senders)} sites sent a vector"
            )
        shares = self._unlocked_shares()
        where, length = where_of(self.run, self.number), len(self._total)
        total = self._total.copy()
        for code in self.senders:
            secret = self._secret(code, shares)
            if code in self._uploads:
                total -= seed_pad(secret, where, length)
                continue
            key = X25519PrivateKey.from_private_bytes(secret)
            if key.public_key().public_bytes_raw() != self._adverts[code][:32].tobytes():
                raise MaskError(
                    f"the shares of {self.roster.names[code]!r} do not give its mask key"
                )
            for other in self._near[code] & set(self._uploads):
                of_pair = pair_pad(key, self._adverts[other][:32].tobytes(), where, length)
                # the survivor added the pad of a larger code and subtracted that of a smaller one
                if other < code:
                    total -= of_pair
                else:
                    total += of_pair
        return total

    def _unlocked_shares(self) -> dict[int, dict[int, int]]:
        """Return the shares of all secrets by owner and point."""
        near = {u: sorted(self._near[u] & set(self._uploads)) for u in self._replies}
        place = {u: {v: at for at, v in enumerate(near[u])} for u in near}
        view = (self.run, self.number, self.roster, self.participants, self.senders, self.purpose)
        assert self._total is not None
        agreement = digest_of(view_of(*view, len(self._total)), np.array(self.survivors))
        shares: dict[int, dict[int, int]] = {}
        for code, reply in self._replies.items():
            # the same holders for all sites, if possible, because their weights take long
            holders = sorted(v for v in (code, *near[code]) if v in self._replies)
            if len(holders) < self.threshold:
                continue
            points = {}
            for v in holders[: self.threshold]:
                if v == code:
                    points[v + 1] = int.from_bytes(reply["own"].tobytes(), "big")
                    continue
                locked = self._replies[v]["locks"][place[v][code]].tobytes()
                key = reply["keys"][place[code][v]].tobytes()
                points[v + 1] = int.from_bytes(xor(locked, key), "big")
            sealed = reply["shares"].tobytes()
            try:
                lock = combine(points)
                plain = AESGCM(derive(lock, b"shares")).decrypt(bytes(12), sealed, agreement)
            except (ValueError, InvalidTag):
                raise MaskError("the sites do not agree on senders and survivors") from None
            around = sorted({code, *(self._near[code] & set(self.senders))})
            for at, owner in enumerate(around):
                part = plain[at * SHARE_BYTES : (at + 1) * SHARE_BYTES]
                if part != MISSING:
                    shares.setdefault(owner, {})[code + 1] = int.from_bytes(part, "big")
        return shares

    def _secret(self, owner: int, shares: Mapping[int, Mapping[int, int]]) -> bytes:
        """Return the seed of a survivor, or the mask key of a dropped site."""
        held = dict(sorted(shares.get(owner, {}).items())[: self.threshold])
        if len(held) < self.threshold:
            raise TooFewSitesError(
                f"{len(held)} of {self.threshold} shares of {self.roster.names[owner]!r} came back"
            )
        try:
            return combine(held)
        except ValueError as error:
            raise MaskError(str(error)) from None
