"""Key pairs of sites: the private half stays at the site, the public half goes to the server."""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

_PRIVATE, _PUBLIC = ".key", ".pub"
_NAME = re.compile(r"[\w][\w .+-]{0,63}")


class SiteKeyError(ValueError):
    """What is wrong with a key, in plain words."""


@dataclass(frozen=True)
class PublicKey:
    """The public half of a pair.

    Attributes:
        name: of the site.
        pem: as Flower knows nodes.
        fingerprint: to compare over the telephone.
    """

    name: str
    pem: str
    fingerprint: str


def new_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """Make a pair (ECDSA, P-384) as ``NAME.key`` and ``NAME.pub``; nothing is overwritten."""
    if not _NAME.fullmatch(name):
        raise SiteKeyError(
            f"{name!r} cannot be a name: use up to 64 letters, digits, spaces and . + - _"
        )
    private, public = folder / (name + _PRIVATE), folder / (name + _PUBLIC)
    for path in (private, public):
        if path.exists():
            raise SiteKeyError(f"{path} is there already; choose another name or folder.")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    written = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(written)
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    public.write_bytes(line + b" " + name.encode() + b"\n")
    return private, public


def read_public_keys(folder: Path) -> list[PublicKey]:
    """All ``*.pub`` files of a folder, sorted by name.

    Raises:
        SiteKeyError: no folder, no key, a file that is none, or one key under two names.
    """
    if not folder.is_dir():
        raise SiteKeyError(
            f"There is no folder {folder}; put the public keys of the sites (NAME.pub) into one."
        )
    keys = [_read_public(path) for path in sorted(folder.glob("*" + _PUBLIC))]
    if not keys:
        raise SiteKeyError(
            f"{folder} has no public keys; each site makes one with fedgmm keys new NAME and sends "
            "its NAME.pub."
        )
    seen: dict[str, str] = {}
    for key in keys:
        if key.pem in seen:
            raise SiteKeyError(f"{seen[key.pem]} and {key.name} have the same key; use one each.")
        seen[key.pem] = key.name
    return keys


def check_private_key(path: Path) -> PublicKey:
    """The public half of a private key file.

    Raises:
        SiteKeyError: a file that cannot be used, or that others can read.
    """
    if not path.is_file():
        raise SiteKeyError(f"There is no key {path}; make one with fedgmm keys new NAME.")
    if path.suffix == _PUBLIC:
        raise SiteKeyError(
            f"{path} is the public half, which goes to the server; say --key NAME{_PRIVATE}."
        )
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SiteKeyError(
            f"{path} is not a private key that Flower can use; make one with fedgmm keys new NAME."
        )
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise SiteKeyError(f"Others can read {path}; say chmod 600 {path}.")
    return _described(path.name.removesuffix(_PRIVATE), key.public_key())


def _read_public(path: Path) -> PublicKey:
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SiteKeyError(
            f"{path} is not a public key that Flower can use; ask the site for a new NAME.pub, made "
            "with fedgmm keys new NAME."
        )
    return _described(path.name.removesuffix(_PUBLIC), key)


def _described(name: str, key: ec.EllipticCurvePublicKey) -> PublicKey:
    import hashlib

    name = unicodedata.normalize("NFC", name)  # file systems write umlauts in two ways
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(der).hexdigest()[:24]
    return PublicKey(name, pem, ":".join(digest[at : at + 4] for at in range(0, 24, 4)))
