"""TLS certificates: check them as a client would, and make a small authority for trials."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,250}[A-Za-z0-9_.])?", flags=re.ASCII)
_ALL_ADDRESSES = ("0.0.0.0", "::", "")


class CertificateError(ValueError):
    """A certificate, or its key, that cannot be used."""


@dataclass(frozen=True)
class Tls:
    """TLS files of a server: its certificate, its key, and the certificate of the authority."""

    certificate: Path
    key: Path
    authority: Path


def check_tls(files: Tls, host: str) -> list[str]:
    """Return the host names of a certificate, or raise ``CertificateError`` if clients would refuse it.

    It must be valid for ``host``, unless that means all addresses.
    """
    for path in (files.certificate, files.key, files.authority):
        if not path.is_file():
            raise CertificateError(
                f"There is no file {path}; fedgmm keys certificate makes one for tests."
            )
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    except ValueError:
        raise CertificateError(f"{files.certificate} is not a certificate (PEM).") from None
    names = _names(certificate)
    if not names:
        raise CertificateError(
            f"{files.certificate} has no host name (subject alternative name), so clients would refuse it; "
            "make one that has, such as with fedgmm keys certificate --host NAME."
        )
    if host not in _ALL_ADDRESSES and host not in names:
        raise CertificateError(
            f"{files.certificate} is for {', '.join(names)}, not for {host}; use another --host or "
            "another certificate."
        )
    _handshake(files, names[0].replace("*", "any"))
    return names


def covers(names: Sequence[str], host: str) -> bool:
    """Return whether one of a certificate's names is that of a host; ``*`` stands for one label."""
    rest = host.partition(".")[2]
    return host in names or (bool(rest) and f"*.{rest}" in names)


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(one) for one in found.get_values_for_type(x509.IPAddress)]
    return [*found.get_values_for_type(x509.DNSName), *addresses]


def _handshake(files: Tls, name: str) -> None:
    """Connect a client and a server in memory, to find errors before the server starts."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(files.certificate, files.key, password=lambda: "")
    except (ssl.SSLError, ValueError):
        raise CertificateError(
            f"{files.key} is not the key of {files.certificate}, or has a password."
        ) from None
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        client.load_verify_locations(files.authority)
    except ssl.SSLError:
        raise CertificateError(f"{files.authority} is not a certificate (PEM).") from None
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=name)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (here, there, here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        raise CertificateError(
            f"Clients with {files.authority} would refuse {files.certificate}: {error.verify_message}. "
            "Renew the certificate, or correct --tls-cert and --tls-ca."
        ) from None
    except ssl.SSLError as error:
        raise CertificateError(f"{files.certificate} cannot be used: {error.reason}.") from None


def trial_certificates(hosts: Sequence[str], folder: Path, days: int = 365) -> Tls:
    """Make an authority and a certificate signed by it, for trials; the authority's key is not kept.

    Writes ``ca.crt`` (for all sites), ``server.crt`` and ``server.key`` (for the server). Existing files
    are not overwritten.
    """
    files = Tls(folder / "server.crt", folder / "server.key", folder / "ca.crt")
    for path in (files.certificate, files.key, files.authority):
        if path.exists():
            raise CertificateError(f"{path} exists already; choose another folder with --out.")
    names = [_general_name(one) for one in hosts]
    folder.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP384R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedgmm trial authority")])
    authority = (
        _builder(authority_name, authority_name, authority_key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _builder(subject, authority_name, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False
        )
        .sign(authority_key, hashes.SHA256())
    )
    files.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    files.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with os.fdopen(os.open(files.key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    start = datetime.now(UTC) - timedelta(minutes=5)  # clocks of machines differ
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(identifier, False)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise CertificateError(
            f"{host!r} is neither an address nor a host name; use letters, digits, dots and hyphens."
        )
    return x509.DNSName(host)
