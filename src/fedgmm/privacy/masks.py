"""Secure aggregation: the server learns the sum of the sites' vectors and nothing else about them.

Every site adds pads to its vector, elements of ``Z_2^64`` (:mod:`fedgmm.privacy.fixed_point`):

    y_u = x_u + PRG(b_u) + Σ_{v > u} PRG(k_uv) - Σ_{v < u} PRG(k_uv)

``k_uv`` is a key that only the sites ``u`` and ``v`` know, so these pads cancel in the sum. ``b_u`` is a
seed of the site alone. Shares of ``b_u``, and of the key behind all ``k_uv``, are held by other sites
(:mod:`fedgmm.privacy.shares`). After the uploads, the server learns ``b_u`` of the sites that survived and
the mask key of those that dropped, never both. This is the protocol of Bonawitz et al. (2017) with the
sparse graphs of Bell et al. (2020) for more than 100 sites (:mod:`fedgmm.privacy.site_sets`).

One aggregation has four phases. The messages of the first two travel with the previous aggregation,
so a round of training needs two exchanges:

===========  ==========================================  =============================================
phase        request of the server                       reply of a site
===========  ==========================================  =============================================
``keys``     a number                                    its public mask key, signed
``shares``   the public mask keys of all                 encrypted shares for its neighbours
``masked``   encrypted shares for this site              ``y_u``, and its view of the senders, signed
``unmask``   the survivors, with their signatures        its shares, locked
===========  ==========================================  =============================================

The server may be hostile. Before the first number, each site sends its identity: two public keys, signed
with its registered key. A site that knows the registered keys of the others (``peers``) refuses identities
that they did not sign. The shares of an ``unmask`` reply are locked: they open only if the threshold of
sites replied about the same senders and survivors, so a server that names different survivors to different
sites learns nothing. A site replies about one set of survivors per purpose, such as ``round 3``, for good.

This module has the half of a site, :mod:`fedgmm.privacy.mask_server` that of the server. Neither sends
anything: :mod:`fedgmm.federation.masking` puts their arrays into messages.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedgmm.privacy.fixed_point import Elements
from fedgmm.privacy.shares import SHARE_BYTES, split
from fedgmm.privacy.site_sets import (
    FEWEST_SITES,
    MaskError,
    Released,
    TooFewSitesError,
    fewest_survivors,
    graph_sizes,
    neighbours_of,
)

Bytes = NDArray[np.uint8]
Codes = NDArray[np.int64]
Sign = Callable[[bytes], bytes]
"""Sign a text with the registered key of a site: 96 bytes."""
Verify = Callable[[bytes, bytes], bool]
"""Return whether a signature of a text is that of a registered key."""

REGISTERED_SIGNATURE = 96
IDENTITY_BYTES = 64 + REGISTERED_SIGNATURE
ADVERT_BYTES = 32 + 64
SIGNATURE_BYTES = 64
TAG_BYTES = 16
SECRETS = 3  # the mask key, the seed b_u and the lock
BUNDLE_BYTES = SECRETS * SHARE_BYTES + TAG_BYTES

# ---------------------------------------------------------------------- keys and pads


def pad(key: bytes, length: int) -> Elements:
    """Return ``length`` elements of AES-256 in counter mode; a key is used for one pad only."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * length)), dtype="<u8").astype(
        np.uint64, copy=False
    )


def derive(secret: bytes, *info: bytes) -> bytes:
    """Return a key of 32 bytes by HKDF with SHA-256."""
    text = b"".join(len(one).to_bytes(4, "big") + one for one in info)
    return HKDF(hashes.SHA256(), 32, None, b"fedgmm" + text).derive(secret)


def pair_pad(own: X25519PrivateKey, other: bytes, where: bytes, length: int) -> Elements:
    """Return ``PRG(k_uv)``, which only these two sites can compute."""
    return pad(derive(_agreed(own, other), b"pair", where), length)


def _agreed(own: X25519PrivateKey, other: bytes) -> bytes:
    """Return the secret of two keys; with a key of low order it would be known to all."""
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise MaskError("the key of another site is of low order") from None


def seed_pad(seed: bytes, where: bytes, length: int) -> Elements:
    """Return ``PRG(b_u)``."""
    return pad(derive(seed, b"own", where), length)


def _lock_pad(channel: bytes, agreement: bytes, holder: int, owner: int) -> bytes:
    """Return the pad over one holder's share of one owner's lock, known to both."""
    text = agreement + holder.to_bytes(4, "big") + owner.to_bytes(4, "big")
    return hmac.digest(channel, b"lock" + text, "sha512")[:SHARE_BYTES]


def xor(one: bytes, other: bytes) -> bytes:
    """Return the bitwise exclusive or."""
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).to_bytes(len(one), "big")


def _array(data: bytes, *shape: int) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8).reshape(shape).copy()


def where_of(run: str, number: int) -> bytes:
    """Return a hash of a run and a number, by which pads of different sums differ."""
    return hashlib.sha256(json.dumps([run, number]).encode()).digest()


def digest_of(*parts: bytes | Codes | str | int) -> bytes:
    """Return a hash of values, each with its length."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            data = np.ascontiguousarray(part, dtype="<i8").tobytes()
        else:
            data = part if isinstance(part, bytes) else str(part).encode()
        found.update(len(data).to_bytes(8, "big") + data)
    return found.digest()


# ---------------------------------------------------------------------- the roster


@dataclass(frozen=True)
class Roster:
    """The sites of a federation in a fixed order, with their identities, ``(n, IDENTITY_BYTES)``.

    An identity is a public key for signatures, a public key for encryption, and the signature of both with
    the registered key (zeros without one).
    """

    names: tuple[str, ...]
    identities: Bytes

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise MaskError("a site is listed twice")
        if self.identities.dtype != np.uint8 or self.identities.shape != (
            len(self.names),
            IDENTITY_BYTES,
        ):
            raise MaskError("the identities of the sites have the wrong size")

    @property
    def digest(self) -> bytes:
        """Hash of names and identities."""
        return digest_of(json.dumps(self.names), self.identities.tobytes())

    def circle(
        self, run: str, number: int, participants: Sequence[int]
    ) -> dict[int, frozenset[int]]:
        """Return the neighbours of every participant, by code."""
        seed = digest_of(run, number, self.digest, np.array(participants))
        found = neighbours_of(len(participants), seed)
        return {
            code: frozenset(participants[v] for v in found[at])
            for at, code in enumerate(participants)
        }


def identity_text(run: str, name: str, keys: bytes) -> bytes:
    """Return the text that a site signs with its registered key."""
    return b"fedgmm identity" + json.dumps([run, name]).encode() + keys


def checked_bytes(array: Any, *shape: int) -> Bytes:
    """Return an array of bytes, or raise ``MaskError`` if it has another type or shape."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape != shape:
        raise MaskError(f"bytes of shape {shape} were expected")
    return array


# ---------------------------------------------------------------------- commitments


def commit(vector: Elements) -> tuple[bytes, bytes]:
    """Return a secret and a hash that binds a site to its vector without showing it.

    The server keeps the signed hash. In a dispute the site opens it with the secret and the vector.
    """
    secret = os.urandom(32)
    return secret, digest_of("commitment", secret, vector.tobytes())


def is_committed(commitment: bytes, secret: bytes, vector: Elements) -> bool:
    """Return whether a hash of :func:`commit` belongs to a vector."""
    return hmac.compare_digest(commitment, digest_of("commitment", secret, vector.tobytes()))


# ---------------------------------------------------------------------- a site


@dataclass
class _Session:
    """The secrets of a site for one number."""

    key: X25519PrivateKey
    participants: tuple[int, ...] = ()
    neighbours: frozenset[int] = frozenset()
    threshold: int = 0
    public: dict[int, bytes] = field(default_factory=dict)  # mask keys of the neighbours
    seed: bytes = b""
    lock: bytes = b""
    own: tuple[int, ...] = ()  # its shares of its own secrets
    bundles: Bytes | None = None
    senders: tuple[int, ...] = ()
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)  # shares of the others' secrets
    purpose: str = ""
    view: bytes = b""
    upload: tuple[bytes, Elements] | None = None  # hash of the vector, and the vector with its pads
    agreement: bytes = b""
    reply: dict[str, Bytes] | None = None


class MaskedSite:
    """One site in the protocol; its secrets exist in memory only, so a restarted site counts as dropped.

    Args:
        sign: signs with the registered key of the site.
        peers: checks of the other sites' registered keys by name; ``None`` trusts the server to list
            the right sites.
        min_sites: fewest sites in a sum.
        min_change: fewest sites in which two opened sums may differ; 1 allows any, which is safe only
            if the sums are noisy.
        released: sums that the site has helped to open, also in an earlier process.

    All methods raise ``MaskError`` for a request that must not be trusted.
    """

    def __init__(
        self,
        name: str,
        run: str,
        *,
        sign: Sign | None = None,
        peers: Mapping[str, Verify] | None = None,
        min_sites: int = FEWEST_SITES,
        min_change: int = 2,
        released: Released | None = None,
    ) -> None:
        self.name, self.run, self.released = name, run, released or Released()
        self._sign, self._peers = sign, peers
        self._least, self._min_change = max(FEWEST_SITES, min_sites), min_change
        self._signing, self._channel = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
        public = self._signing.public_key().public_bytes_raw()
        keys = public + self._channel.public_key().public_bytes_raw()
        signature = bytes(REGISTERED_SIGNATURE)
        if sign is not None:
            signature = sign(identity_text(run, name, keys))
        self.identity = _array(keys + signature, IDENTITY_BYTES)
        self._known: dict[str, bytes] = {}  # identities that were accepted in this run
        self._roster: Roster | None = None
        self._code = -1
        self._channels: dict[int, bytes] = {}
        self._sessions: dict[int, _Session] = {}
        self._last = -1

    # ------------------------------------------------------------------ keys

    def advertise(self, number: int) -> Bytes:
        """Return a fresh public mask key for a number, signed; ``(ADVERT_BYTES,)``.

        A new number must be larger than all before.
        """
        known = self._sessions.get(number)
        if known is None:
            if number <= self._last:
                raise MaskError(f"number {number} was used before")
            self._last = number
            known = self._sessions[number] = _Session(X25519PrivateKey.generate())
            for old in sorted(self._sessions)[:-2]:  # the present number and the next one stay
                del self._sessions[old]
        public = known.key.public_key().public_bytes_raw()
        return _array(
            public + self._signing.sign(self._advert_text(self.name, number, public)), ADVERT_BYTES
        )

    def _advert_text(self, name: str, number: int, public: bytes) -> bytes:
        return digest_of("advert", self.run, name, number, public)

    def join(self, roster: Roster) -> None:
        """Accept the sites of the federation: enough sites, this one among them, with signed identities."""
        if self._roster is not None and roster.digest == self._roster.digest:
            return
        if self.name not in roster.names:
            raise MaskError("the list of sites does not have this site")
        own = roster.names.index(self.name)
        if roster.identities[own].tobytes() != self.identity.tobytes():
            raise MaskError("the list of sites has other keys for this site")
        self._check_size(len(roster.names), "are listed")
        seen: set[bytes] = set()
        for name, row in zip(roster.names, roster.identities, strict=True):
            identity = row.tobytes()
            self._check_identity(name, identity)
            if seen & {identity[:32], identity[32:64]}:
                raise MaskError("two sites have the same key")
            seen |= {identity[:32], identity[32:64]}
        self._roster, self._code, self._channels = roster, own, {}
        # codes of the old list would mean other sites now
        self._sessions = {n: one for n, one in self._sessions.items() if one.bundles is None}

    def _check_identity(self, name: str, identity: bytes) -> None:
        if self._known.get(name) == identity or name == self.name:
            return
        if self._peers is not None:
            verify = self._peers.get(name)
            if verify is None:
                raise MaskError(f"the site {name!r} is not among the peers")
            keys, signature = identity[:64], identity[64:]
            if not verify(identity_text(self.run, name, keys), signature):
                raise MaskError(f"the keys of {name!r} are not signed with its registered key")
        self._known[name] = identity

    def _check_size(self, sites: int, verb: str) -> None:
        if sites < self._least:
            raise TooFewSitesError(
                f"{sites} sites {verb}; a sum over fewer than {self._least} is not sent"
            )

    def _listed(self, values: Any, among: Iterable[int], what: str) -> tuple[int, ...]:
        """Return sorted, different codes of an array, all ``among`` the known ones, with this site's."""
        array = np.asarray(values)
        if array.dtype != np.int64 or array.ndim != 1:
            raise MaskError(f"the list of {what} is not a list of codes")
        codes = tuple(array.tolist())
        if any(a >= b for a, b in itertools.pairwise(codes)):
            raise MaskError(f"the list of {what} names a site twice or is not sorted")
        if not set(codes) <= set(among):
            raise MaskError(f"the list of {what} names a site that is not one")
        if self._code not in codes:
            raise MaskError(f"the list of {what} does not have this site")
        return codes

    def _near(self, session: _Session, codes: tuple[int, ...], verb: str) -> list[int]:
        """Return this site's neighbours among some sites, which must be enough to open a sum."""
        self._check_size(len(codes), verb)
        near = sorted(session.neighbours & set(codes))
        fewest = fewest_survivors(len(session.participants))
        if len(near) + 1 < session.threshold or len(codes) < fewest:
            raise TooFewSitesError(f"too few sites {verb}")
        return near

    # ------------------------------------------------------------------ shares

    def share(self, number: int, participants: Codes, adverts: Bytes) -> Bytes:
        """Return encrypted shares of this site's secrets for its neighbours, ``(k, BUNDLE_BYTES)``.

        ``participants`` are sorted codes of the sites that sent their mask keys, and ``adverts`` the keys
        of the neighbours, ``(k, ADVERT_BYTES)``. Neighbours are in the order of their codes.
        """
        session, roster = self._session(number)
        codes = self._listed(participants, range(len(roster.names)), "participants")
        if session.bundles is not None:
            if codes != session.participants:
                raise MaskError("the participants changed")
            return session.bundles
        self._check_size(len(codes), "take part")
        near = roster.circle(self.run, number, codes)[self._code]
        table = checked_bytes(adverts, len(near), ADVERT_BYTES)
        public: dict[int, bytes] = {}
        for code, row in zip(sorted(near), table, strict=True):
            key, signature = row[:32].tobytes(), row[32:].tobytes()
            text = self._advert_text(roster.names[code], number, key)
            self._check_signature(code, signature, text, "mask key")
            public[code] = key
        _, threshold = graph_sizes(len(codes))
        seed, lock = os.urandom(32), os.urandom(32)
        holders = sorted({self._code, *near})
        points = [code + 1 for code in holders]
        parts = [
            split(secret, points, threshold)
            for secret in (session.key.private_bytes_raw(), seed, lock)
        ]
        sealed = b""
        for code in sorted(near):
            plain = b"".join(part[code + 1].to_bytes(SHARE_BYTES, "big") for part in parts)
            cipher, nonce, text = self._bundle_cipher(number, code, sends=True)
            sealed += cipher.encrypt(nonce, plain, text)
        session.participants, session.neighbours, session.threshold = codes, near, threshold
        session.public, session.seed, session.lock = public, seed, lock
        session.own = tuple(part[self._code + 1] for part in parts)
        session.bundles = _array(sealed, len(near), BUNDLE_BYTES)
        return session.bundles

    def _session(self, number: int) -> tuple[_Session, Roster]:
        if self._roster is None:
            raise MaskError("there is no list of sites yet")
        if number not in self._sessions:
            raise MaskError(f"this site has no keys for number {number}")
        return self._sessions[number], self._roster

    def participants(self, number: int) -> int:
        """Return how many sites take part in an aggregation."""
        session, _ = self._session(number)
        if session.bundles is None:
            raise MaskError("this site has not sent its shares")
        return len(session.participants)

    def _channel_with(self, code: int) -> bytes:
        """Return the secret that this site shares with another one, in all numbers of the run."""
        if code not in self._channels:
            assert self._roster is not None
            secret = _agreed(self._channel, self._roster.identities[code, 32:64].tobytes())
            self._channels[code] = derive(secret, b"channel", self.run.encode())
        return self._channels[code]

    def _bundle_cipher(self, number: int, code: int, *, sends: bool) -> tuple[AESGCM, bytes, bytes]:
        """Return cipher, nonce and context of a bundle to or from another site.

        The key depends on the names of sender and receiver, and a number is used once per key. So no
        nonce is used twice, however the server orders the sites.
        """
        assert self._roster is not None
        pair = (self.name, self._roster.names[code])
        sender, receiver = pair if sends else pair[::-1]
        key = derive(self._channel_with(code), b"bundle", sender.encode(), receiver.encode())
        return (
            AESGCM(key),
            number.to_bytes(12, "big"),
            digest_of("bundle", self.run, number, sender, receiver),
        )

    def _check_signature(self, code: int, signature: bytes, text: bytes, what: str) -> None:
        assert self._roster is not None
        key = Ed25519PublicKey.from_public_bytes(self._roster.identities[code, :32].tobytes())
        try:
            key.verify(signature, text)
        except InvalidSignature:
            raise MaskError(
                f"the {what} of {self._roster.names[code]!r} is not signed by that site"
            ) from None

    # ------------------------------------------------------------------ the masked vector

    def mask(
        self, number: int, purpose: str, senders: Codes, bundles: Bytes, vector: Elements
    ) -> tuple[Elements, Bytes]:
        """Return ``y_u`` and the signature of this site's view of the aggregation.

        Args:
            number: of the aggregation.
            purpose: of the vector, such as ``round 3``.
            senders: sorted codes of all sites that sent shares.
            bundles: from the senders among the neighbours, in the order of their codes.
            vector: ``x_u``, elements of ``Z_2^64``, ``(D,)``; one per number.
        """
        session, roster = self._session(number)
        if session.bundles is None:
            raise MaskError("this site has not sent its shares")
        codes = self._listed(senders, session.participants, "senders")
        content = digest_of(purpose, np.array(codes), vector.tobytes())
        if session.upload is not None:  # a request may be repeated, but not changed
            if session.upload[0] != content:
                raise MaskError(f"another vector was sent for number {number} already")
            return session.upload[1], self._view_signature(session)
        near = self._near(session, codes, "sent shares")
        for code, row in zip(near, checked_bytes(bundles, len(near), BUNDLE_BYTES), strict=True):
            session.held[code] = self._opened(number, code, row.tobytes())
        where = where_of(self.run, number)
        total = vector + seed_pad(session.seed, where, len(vector))
        for code in near:
            of_pair = pair_pad(session.key, session.public[code], where, len(vector))
            if self._code < code:
                total += of_pair
            else:
                total -= of_pair
        session.senders, session.purpose = codes, purpose
        session.view = view_of(
            self.run, number, roster, session.participants, codes, purpose, len(vector)
        )
        session.upload = content, total
        return total, self._view_signature(session)

    def _opened(self, number: int, code: int, sealed: bytes) -> tuple[int, ...]:
        """Return a neighbour's three shares; none if the bundle is damaged."""
        cipher, nonce, text = self._bundle_cipher(number, code, sends=False)
        try:
            plain = cipher.decrypt(nonce, sealed, text)
        except InvalidTag:
            return ()
        return tuple(
            int.from_bytes(plain[at : at + SHARE_BYTES], "big")
            for at in range(0, SECRETS * SHARE_BYTES, SHARE_BYTES)
        )

    def _view_signature(self, session: _Session) -> Bytes:
        return _array(self._signing.sign(session.view), SIGNATURE_BYTES)

    # ------------------------------------------------------------------ unmasking

    def unmask(self, number: int, survivors: Codes, signatures: Bytes) -> dict[str, Bytes]:
        """Return shares of the survivors' seeds and of the dropped sites' mask keys, locked.

        ``survivors`` are sorted codes of the sites whose vectors are in the sum. ``signatures``,
        ``(k, SIGNATURE_BYTES)``, are those of the survivors among the neighbours, in the order of their
        codes: each saw the same senders as this site.
        """
        session, roster = self._session(number)
        if session.upload is None:
            raise MaskError("this site has not sent its vector")
        codes = self._listed(survivors, session.senders, "survivors")
        agreement = digest_of(session.view, np.array(codes))
        names = [roster.names[code] for code in codes]
        if session.reply is not None:
            if session.agreement != agreement:
                raise MaskError("the survivors changed")
            self.released.add(session.purpose, names)  # the first note may be lost
            return session.reply
        near = self._near(session, codes, "survived")
        table = checked_bytes(signatures, len(near), SIGNATURE_BYTES)
        for code, row in zip(near, table, strict=True):
            self._check_signature(code, row.tobytes(), session.view, "view")
        self.released.check(session.purpose, names, self._min_change)
        self.released.add(session.purpose, names)
        around = sorted(session.neighbours & set(session.senders))
        shares = b""
        for code in sorted({self._code, *around}):
            of_site = session.own if code == self._code else session.held[code]
            wanted = int(code in codes)  # the seed of a survivor, the mask key of a dropped site
            shares += of_site[wanted].to_bytes(SHARE_BYTES, "big") if of_site else MISSING
        locks, keys = b"", b""
        for code in near:
            channel, of_site = self._channel_with(code), session.held[code]
            share = of_site[2].to_bytes(SHARE_BYTES, "big") if of_site else MISSING
            locks += xor(share, _lock_pad(channel, agreement, self._code, code))
            keys += _lock_pad(channel, agreement, code, self._code)
        sealed = AESGCM(derive(session.lock, b"shares")).encrypt(bytes(12), shares, agreement)
        session.agreement = agreement
        session.reply = {
            "shares": _array(sealed, len(sealed)),
            "locks": _array(locks, len(near), SHARE_BYTES),
            "keys": _array(keys, len(near), SHARE_BYTES),
            "own": _array(session.own[2].to_bytes(SHARE_BYTES, "big"), SHARE_BYTES),
        }
        return session.reply


MISSING = b"\xff" * SHARE_BYTES  # larger than every share


def view_of(
    run: str,
    number: int,
    roster: Roster,
    participants: Sequence[int],
    senders: Sequence[int],
    purpose: str,
    length: int,
) -> bytes:
    """Return the text that a site signs with its vector."""
    return digest_of(
        "view",
        run,
        number,
        roster.digest,
        np.array(participants),
        np.array(senders),
        purpose,
        length,
    )
