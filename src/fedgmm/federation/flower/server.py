"""``fedgmm server``: checks what it was given, opens the doors, and has the coordinator do its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgmm.federation.flower.certificates import Tls, check_tls
from fedgmm.federation.flower.keys import PublicKey, read_public_keys
from fedgmm.federation.flower.processes import FlowerFolder, prepare_environment
from fedgmm.federation.messages import Transport
from fedgmm.federation.server import run_federation, serve_model
from fedgmm.federation.settings import FederationError, FederationSettings
from fedgmm.runs.config import SERVER, read_config
from fedgmm.runs.folder import RunFolder
from fedgmm.wording import counted

Notify = Callable[[str], None]


_PATHS = ("tls_cert", "tls_key", "tls_ca", "keys")


def read_doors(config: Path, **given: Any) -> dict[str, Any]:
    """The section ``server`` of a TOML file, whose paths are relative to it.

    Args:
        config: the file.
        **given: options that count more than the file's; ``None`` means that nothing was given.

    Raises:
        ValueError: an option of the wrong type.
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
class Doors:
    """Where the server listens, and whom it lets in.

    Attributes:
        host: address to listen on.
        port: for the sites.
        tls: files of the server; ``None`` is plain text, and lets every site in.
        keys: folder of public keys; needs TLS.
    """

    host: str
    port: int
    tls: Tls | None
    keys: Path | None

    def check(self, notify: Notify) -> list[PublicKey]:
        """The keys of the sites that are let in, after everything was looked at.

        Raises:
            ValueError: what is missing or does not fit, and what to do.
        """
        if self.tls is None:
            notify("Plain text, and every site is let in: only for trying out on this machine.")
            return []
        if self.keys is None:
            raise FederationError(
                "Say which sites are let in: --keys FOLDER with their public keys (NAME.pub), which "
                "they make with fedgmm keys new NAME."
            )
        names = check_tls(self.tls, self.host)
        keys = read_public_keys(self.keys)
        notify(f"Clients reach this server as {', '.join(names)}.")
        let_in = counted(len(keys), "key is let in", "keys are let in")
        notify(f"{let_in}: {', '.join(key.name for key in keys)}.")
        return keys


def run_server(
    settings: FederationSettings, out: Path, doors: Doors, *, serve: bool, notify: Notify
) -> None:
    """Train with the sites that connect; with a finished run, hand out its model.

    Args:
        settings: of the federation.
        out: the run folder; a run that was interrupted goes on there.
        doors: where, and for whom.
        serve: hand out the model after the training, too.
        notify: told what goes on, in plain words.
    """
    from filelock import FileLock, Timeout

    keys = doors.check(notify)
    folder = FlowerFolder(out)
    folder.root.mkdir(parents=True, exist_ok=True)
    prepare_environment(folder)  # before Flower is imported
    from fedgmm.federation.flower.link import open_sites

    try:
        with (
            FileLock(str(folder.lock), timeout=0),
            open_sites(
                out,
                doors.host,
                doors.port,
                doors.tls,
                keys,
                keys_folder=doors.keys,
                limit_bytes=settings.largest_message,
                notify=notify,
            ) as sites,
        ):
            run_or_serve(settings, sites, out, serve, notify=notify)
    except Timeout:
        raise FederationError(
            f"Another server is working in {out}; end it, or use another folder."
        ) from None


def run_or_serve(
    settings: FederationSettings, sites: Transport, out: Path, serve: bool, *, notify: Notify
) -> None:
    """Train unless the run is finished; hand out the model of one that is, or if asked to."""
    finished = RunFolder(out).is_finished
    if not finished:
        run_federation(settings, sites, out, notify=notify)
    if finished or serve:
        notify("The run is finished; handing its model to sites that join with --adapt-only.")
        serve_model(settings, sites, out, notify=notify, stop=lambda: False)
