"""``fedgmm server``: check the options, start a SuperLink, and run the federation on it."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgmm.federation.flower.certificates import Tls, check_tls
from fedgmm.federation.flower.keys import KeyWatcher, PublicKey, read_public_keys
from fedgmm.federation.flower.processes import Child, FlowerFolder, prepare_environment
from fedgmm.federation.messages import LARGEST_MESSAGE, Transport
from fedgmm.federation.server import run_federation, serve_model
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.runs.config import SERVER, read_config
from fedgmm.runs.folder import RunFolder
from fedgmm.wording import counted

if TYPE_CHECKING:
    from fedgmm.federation.flower.sites import FlowerSites

Notify = Callable[[str], None]

_PATHS = ("tls_cert", "tls_key", "tls_ca", "keys")
_START_TIMEOUT = 90.0  # seconds; importing Flower is slow on a busy machine
_EXTRA_BYTES = 64 * 1024 * 1024  # of a site per window, beyond two messages


def read_server_options(config: Path, **given: Any) -> dict[str, Any]:
    """Read the section ``server`` of a TOML file; its paths are relative to the file.

    Args:
        config: path of the file.
        **given: options that override the file; ``None`` means not given.

    Raises:
        ValueError: an option has the wrong type.
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
        host: address to listen on.
        port: port for the sites.
        tls: TLS files of the server; ``None`` is plain text and accepts every site.
        keys: folder of public keys; requires TLS.
    """

    host: str
    port: int
    tls: Tls | None
    keys: Path | None

    def check(self, notify: Notify) -> list[PublicKey]:
        """Check the certificate and the keys, and return the keys of the accepted sites.

        Raises:
            ValueError: a file is missing or does not fit.
        """
        if self.tls is None:
            notify("Plain text, and every site is accepted: only for trials on this machine.")
            return []
        if self.keys is None:
            raise FederationError(
                "--keys FOLDER is missing: a folder with the public keys (NAME.pub) of the accepted "
                "sites, which they make with fedgmm keys new NAME."
            )
        names = check_tls(self.tls, self.host)
        keys = read_public_keys(self.keys)
        notify(f"Clients reach this server as {', '.join(names)}.")
        accepted = counted(len(keys), "key is accepted", "keys are accepted")
        notify(f"{accepted}: {', '.join(key.name for key in keys)}.")
        return keys


def run_server(
    settings: FederationSettings, out: Path, address: ServerAddress, *, serve: bool, notify: Notify
) -> None:
    """Train with the sites that connect, or serve the model of a finished run.

    Args:
        settings: settings of the federation.
        out: the run folder; an interrupted run is resumed.
        address: where to listen, and which sites to accept.
        serve: also serve the model after training.
        notify: called with one line per event.
    """
    from filelock import FileLock, Timeout

    keys = address.check(notify)
    folder = FlowerFolder(out)
    folder.root.mkdir(parents=True, exist_ok=True)
    try:
        with (
            FileLock(str(folder.lock), timeout=0),
            open_sites(
                out,
                address.host,
                address.port,
                address.tls,
                keys,
                keys_folder=address.keys,
                limit_bytes=settings.largest_message,
                notify=notify,
            ) as sites,
        ):
            run_or_serve(settings, sites, out, serve, notify=notify)
    except Timeout:
        raise FederationError(
            f"Another server is running in {out}; end it, or use another folder."
        ) from None


def run_or_serve(
    settings: FederationSettings, sites: Transport, out: Path, serve: bool, *, notify: Notify
) -> None:
    """Train if the run is not finished; then serve the model of a finished run, or if ``serve``."""
    finished = RunFolder(out).is_finished
    if not finished:
        run_federation(settings, sites, out, notify=notify)
    if finished or serve:
        notify("The run is finished; serving its model to sites that join with --adapt-only.")
        serve_model(settings, sites, out, notify=notify, stop=lambda: False)


@contextlib.contextmanager
def open_sites(
    out: Path,
    host: str,
    port: int,
    tls: Tls | None,
    keys: Sequence[PublicKey],
    *,
    keys_folder: Path | None = None,
    limit_bytes: int = LARGEST_MESSAGE,
    notify: Notify = lambda _: None,
) -> Iterator[FlowerSites]:
    """Start a SuperLink on ``host:port``, start our app on it, and yield its sites.

    Args:
        out: the run folder; Flower's files go into ``out/flower``.
        host: address to listen on.
        port: port for the sites; Flower's other interfaces get a port of the loopback address.
        tls: TLS files of the server; ``None`` for plain text.
        keys: keys of the accepted sites; without TLS every site is accepted.
        keys_folder: folder of the keys; later changes in it are registered.
        limit_bytes: size of the largest message.
        notify: called with one line per event.

    Raises:
        FederationError: the port is in use, or Flower does not start.
    """
    folder = FlowerFolder(out)
    prepare_environment(folder)  # Flower reads it when it is imported
    from fedgmm.federation.flower.flower_internals import started_run
    from fedgmm.federation.flower.sites import FlowerSites

    folder.make()
    secret = secrets.token_hex(32)
    options = {
        "host": host,
        "port": port,
        "tls": None
        if tls is None
        else {
            "certificate": str(tls.certificate.resolve()),
            "key": str(tls.key.resolve()),
            "authority": str(tls.authority.resolve()),
        },
        "keys": {key.name: key.pem for key in keys} if tls is not None else {},
        "secret": secret,
        "secret_file": str(folder.secret),
        "bytes_per_window": 2 * limit_bytes + _EXTRA_BYTES,
    }
    with Child("fedgmm.federation.flower.superlink", [], folder, json.dumps(options)) as superlink:
        line = superlink.read_line(_START_TIMEOUT)
        if not line:
            raise FederationError(f"Flower's SuperLink did not start; see {folder.log}.")
        ready: dict[str, Any] = json.loads(line)
        if "error" in ready:
            raise FederationError(f"Cannot listen on {host}:{port}: {ready['error']}.")
        with started_run(
            ready["port"], folder.secret.read_text(), secret, limit_bytes=limit_bytes
        ) as grid:
            notify(f"Listening on {host}:{port}.")
            watcher = KeyWatcher(
                keys_folder if tls else None, superlink, keys, ready["nodes"], notify
            )
            yield FlowerSites(
                grid,
                limit_bytes=limit_bytes,
                names=watcher.names,
                is_up=lambda: not superlink.ended,
                refresh=watcher.refresh,
                notify=notify,
            )
