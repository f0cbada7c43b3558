"""A SuperLink of our own, as long as it is needed, and the sites that are reached through it.

Import it after :func:`~fedgmm.federation.flower.processes.prepare_environment`: Flower reads it
when it is imported.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedgmm.federation.flower.certificates import Tls
from fedgmm.federation.flower.inner import started_run
from fedgmm.federation.flower.key_ring import KeyRing
from fedgmm.federation.flower.keys import PublicKey
from fedgmm.federation.flower.processes import Child, FlowerFolder
from fedgmm.federation.flower.sites import FlowerSites
from fedgmm.federation.messages import LARGEST_MESSAGE
from fedgmm.federation.settings import FederationError

_START = 90.0  # seconds; a busy machine takes its time to import Flower
_SLACK = 64 * 1024 * 1024


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
    notify: Callable[[str], None] = lambda _: None,
) -> Iterator[FlowerSites]:
    """Start a SuperLink on ``host:port``, start our app on it, and yield its sites.

    Args:
        out: the run folder; Flower's files go into ``out/flower``.
        host: address to listen on.
        port: for the sites; Flower's other interfaces get a port of the loopback address.
        tls: files of the server; ``None`` for plain text.
        keys: of the sites that are let in; without TLS every site is.
        keys_folder: where they are from; keys that come or go there later are let in or shut out.
        limit_bytes: the largest message.
        notify: told what goes on.

    Raises:
        FederationError: the port is taken, or Flower does not start.
    """
    folder = FlowerFolder(out)
    folder.make()
    secret = secrets.token_hex(32)
    told = {
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
        "bytes_per_window": 2 * limit_bytes + _SLACK,
    }
    with Child("fedgmm.federation.flower.superlink", [], folder, json.dumps(told)) as child:
        line = child.next_line(_START)
        if not line:
            raise FederationError(f"Flower's SuperLink did not start; {folder.log} says why.")
        ready: dict[str, Any] = json.loads(line)
        if "error" in ready:
            raise FederationError(f"Cannot listen on {host}:{port}: {ready['error']}.")
        secrets_of_start = (folder.secret.read_text(), secret)
        with started_run(ready["port"], *secrets_of_start, limit_bytes=limit_bytes) as grid:
            notify(f"Listening on {host}:{port}.")
            ring = KeyRing(keys_folder if tls else None, child, keys, ready["nodes"], notify)
            yield FlowerSites(
                grid,
                limit_bytes=limit_bytes,
                names=ring.names,
                is_up=lambda: not child.ended,
                refresh=ring.refresh,
                notify=notify,
            )
