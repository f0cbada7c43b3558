"""``fedgmm server``: check the options, listen for the sites, and run the federation with them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgmm.federation.messages import Notify
from fedgmm.federation.network.certificates import Tls, check_tls
from fedgmm.federation.network.keys import AcceptedKeys
from fedgmm.federation.server import run_or_serve
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.files import private_folder
from fedgmm.runs.config import SERVER, read_config
from fedgmm.wording import counted

_PATHS = ("tls_cert", "tls_key", "tls_ca", "keys")


def read_server_options(config: Path, **given: Any) -> dict[str, Any]:
    """Return the section ``server`` of a TOML file; its paths are relative to the file.

    ``given`` options override the file, unless they are ``None``.
    """
    found: dict[str, Any] = {}
    for name, value in read_config(config)["server"].items():
        kind = SERVER[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(
                f"{config}: [server] {name} must be of type {kind.__name__}, got {value!r}."
            )
        found[name] = config.parent / str(value) if name in _PATHS else value
    return {**found, **{name: value for name, value in given.items() if value is not None}}


@dataclass(frozen=True)
class ServerAddress:
    """Address of the server, its TLS files, and the sites that it accepts.

    Attributes:
        tls: TLS files of the server; ``None`` is plain text and accepts every site.
        keys: folder of public keys; requires TLS.
    """

    host: str
    port: int
    tls: Tls | None
    keys: Path | None

    def check(self, notify: Notify) -> tuple[AcceptedKeys | None, tuple[str, ...]]:
        """Return the accepted keys and the host names of the certificate, or raise ``ValueError``."""
        if self.tls is None:
            if not _is_loopback(self.host):
                raise FederationError(
                    f"--insecure listens on the loopback address only, not on {self.host}; use --host "
                    "127.0.0.1, or TLS and keys."
                )
            notify("Plain text, and every site is accepted: only for trials on this machine.")
            return None, ()
        if self.keys is None:
            raise FederationError(
                "--keys FOLDER is missing: a folder with the public keys (NAME.pub) of the accepted "
                "sites, which they make with fedgmm keys new NAME."
            )
        names = check_tls(self.tls, self.host)
        keys = AcceptedKeys(self.keys, notify)
        notify(f"Clients reach this server as {', '.join(names)}.")
        accepted = counted(len(keys.names), "key is accepted", "keys are accepted")
        notify(f"{accepted}: {', '.join(sorted(keys.names.values()))}.")
        return keys, tuple(names)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run_server(
    settings: FederationSettings, out: Path, address: ServerAddress, *, serve: bool, notify: Notify
) -> None:
    """Train with the sites that connect, or serve the model of a finished run.

    An interrupted run in ``out`` is resumed. With ``serve`` the model is served after training, too.
    """
    from filelock import FileLock, Timeout

    from fedgmm.federation.network.sites import NetworkSites

    keys, names = address.check(notify)
    private_folder(out)
    try:
        with (
            FileLock(str(out / ".server.lock"), timeout=0),
            NetworkSites(
                address.host,
                address.port,
                address.tls,
                keys,
                names=names,
                limit_bytes=settings.largest_message,
                notify=notify,
            ) as sites,
        ):
            notify(f"Listening on {address.host}:{address.port}.")
            run_or_serve(settings, sites, out, serve, notify=notify)
    except Timeout:
        raise FederationError(
            f"Another server is running in {out}; end it, or use another folder."
        ) from None
