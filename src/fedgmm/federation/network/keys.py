"""Key pairs of sites: make them, read them, and watch the server's folder of public keys.

The private key stays at the site, and the public key goes to the server.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedgmm.federation.messages import Notify
from fedgmm.files import private_folder

_PRIVATE, _PUBLIC = ".key", ".pub"
_NAME = re.compile(r"[\w][\w .+-]{0,63}")
_WATCH_INTERVAL = 2.0  # seconds


class SiteKeyError(ValueError):
    """A key, or a folder of keys, that cannot be used."""


@dataclass(frozen=True)
class PublicKey:
    """The public key of a site.

    Attributes:
        pem: the key as PEM text, by which the server identifies a site.
        fingerprint: short hash, to compare by telephone.
    """

    name: str
    pem: str
    fingerprint: str


def new_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """Write a new key pair (ECDSA, P-384) to ``NAME.key`` and ``NAME.pub``; raise if one exists."""
    if not _NAME.fullmatch(name):
        raise SiteKeyError(
            f"{name!r} cannot be a name: use up to 64 letters, digits, spaces and . + - _"
        )
    private, public = folder / (name + _PRIVATE), folder / (name + _PUBLIC)
    for path in (private, public):
        if path.exists():
            raise SiteKeyError(f"{path} exists already; choose another name or folder.")
    private_folder(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    written = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(written)
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    public.write_bytes(line + b" " + name.encode() + b"\n")
    return private, public


def read_public_keys(folder: Path) -> list[PublicKey]:
    """Read all ``*.pub`` files of a folder, sorted by name, or raise ``SiteKeyError``."""
    if not folder.is_dir():
        raise SiteKeyError(
            f"There is no folder {folder}; create it with the public keys of the sites (NAME.pub)."
        )
    keys = [_read_public(path) for path in sorted(folder.glob("*" + _PUBLIC))]
    if not keys:
        raise SiteKeyError(
            f"{folder} has no public keys; each site makes a pair with fedgmm keys new NAME and sends "
            "NAME.pub."
        )
    seen: dict[str, str] = {}
    for key in keys:
        if key.pem in seen:
            raise SiteKeyError(
                f"{seen[key.pem]} and {key.name} have the same key; each site needs its own."
            )
        seen[key.pem] = key.name
    return keys


def check_private_key(path: Path) -> PublicKey:
    """Return the public key that belongs to a private key file, or raise ``SiteKeyError``."""
    if not path.is_file():
        raise SiteKeyError(f"There is no key {path}; make one with fedgmm keys new NAME.")
    if path.suffix == _PUBLIC:
        raise SiteKeyError(
            f"{path} is the public key, which goes to the server; use --key NAME{_PRIVATE}."
        )
    key = read_private_key(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise SiteKeyError(f"Other users can read {path}; run chmod 600 {path}.")
    return _public_key(path.name.removesuffix(_PRIVATE), key.public_key())


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file, or raise ``SiteKeyError``."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SiteKeyError(
            f"{path} is not a private key of a site; make one with fedgmm keys new NAME."
        )
    return key


def signer(path: Path) -> Callable[[bytes], bytes]:
    """Return a function that signs with a site's private key: 96 bytes, as both numbers of ECDSA."""
    key = read_private_key(path)

    def sign(text: bytes) -> bytes:
        r, s = decode_dss_signature(key.sign(text, ec.ECDSA(SHA384())))
        return r.to_bytes(48, "big") + s.to_bytes(48, "big")

    return sign


def verifiers(folder: Path) -> dict[str, Callable[[bytes, bytes], bool]]:
    """Return checks of signatures by the sites whose public keys are in a folder."""

    def verify(pem: str, text: bytes, signature: bytes) -> bool:
        r, s = (int.from_bytes(part, "big") for part in (signature[:48], signature[48:]))
        return is_signed(pem, text, encode_dss_signature(r, s))

    return {one.name: partial(verify, one.pem) for one in read_public_keys(folder)}


def is_signed(pem: str, text: bytes, signature: bytes) -> bool:
    """Return whether a signature of a text, in the form of ECDSA, belongs to a public key in PEM."""
    try:
        key = load_pem_public_key(pem.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, text, ec.ECDSA(SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


def _read_public(path: Path) -> PublicKey:
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SiteKeyError(
            f"{path} is not a public key of a site; ask the site for a new NAME.pub, made by "
            "fedgmm keys new NAME."
        )
    return _public_key(path.name.removesuffix(_PUBLIC), key)


def _public_key(name: str, key: ec.EllipticCurvePublicKey) -> PublicKey:
    name = unicodedata.normalize("NFC", name)  # file systems encode umlauts in two ways
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(der).hexdigest()[:24]
    return PublicKey(name, pem, ":".join(digest[at : at + 4] for at in range(0, 24, 4)))


# ---------------------------------------------------------------------- changes while the server runs


class AcceptedKeys:
    """The public keys of a folder, which may change while the server runs.

    Attributes:
        names: name of the site of each accepted key.
    """

    def __init__(self, folder: Path, notify: Notify = lambda _: None) -> None:
        self._folder, self._notify = folder, notify
        self._seen: object = _folder_state(folder)
        self._next_check = 0.0
        self.names = {key.pem: key.name for key in read_public_keys(folder)}

    def refresh(self) -> bool:
        """Read the folder again if it has changed; return whether the accepted keys have.

        Looks at the folder at most every two seconds.
        """
        if time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + _WATCH_INTERVAL
        state = _folder_state(self._folder)
        if state == self._seen:
            return False
        self._seen = state
        try:
            names = {key.pem: key.name for key in read_public_keys(self._folder)}
        except (SiteKeyError, OSError) as error:  # perhaps being copied; the next change is seen
            self._notify(f"The registered keys are not changed: {error}")
            return False
        before = {name: pem for pem, name in self.names.items()}
        keys = {name: pem for pem, name in names.items()}
        self.names = names
        for name in sorted(keys.keys() | before.keys()):
            if name not in before:
                self._notify(f"The key of {name} is now accepted.")
            elif name not in keys:
                self._notify(f"The key of {name} is no longer accepted.")
            elif keys[name] != before[name]:
                self._notify(f"{name} has a new key; the old one is no longer accepted.")
        return keys != before


def _folder_state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of every key file, to detect changes."""
    try:
        found = [(path.name, path.stat()) for path in sorted(folder.glob("*" + _PUBLIC))]
    except OSError:  # a file was deleted in between
        return ()
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in found)
