"""Flower's SuperNode as a child process of ``fedgmm client``; run with ``python -m``.

The arguments are those of ``flower-supernode``. There are two differences: the process ends with its
parent, and Flower's waiting times are shorter. Flower's own SuperNode polls for messages every 3 s, waits a
second for missing parts of a message, and counts as connected for a minute after its death; a round is
often faster than that.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from fedgmm.federation.flower.processes import end_with_parent

# seconds
_POLL, _IDLE_POLL, _IDLE_AFTER = 0.3, 2.0, 120.0
_HEARTBEAT = 12
_MAX_RETRY_DELAY = 4
_FIRST_WAIT, _MAX_WAIT = 0.05, 1.0

_BUSY_FACTOR = 4.0  # wait this many times the duration of the last poll, to spare a busy server


class _Sleeper:
    """Replacement for ``time.sleep`` in the loop of a SuperNode.

    The loop sleeps 3 s between two polls, and 0.5 s while it waits for the reply to a message.
    """

    def __init__(self) -> None:
        self._last_work = self._woke = time.monotonic()

    def sleep(self, seconds: float) -> None:
        now = time.monotonic()
        if seconds < 1.0:  # a reply is being computed
            self._last_work = now
            time.sleep(min(seconds, 0.1))
        else:
            interval = _IDLE_POLL if now - self._last_work > _IDLE_AFTER else _POLL
            time.sleep(min(seconds, max(interval, _BUSY_FACTOR * (now - self._woke))))
        self._woke = time.monotonic()


def poll_faster() -> None:
    """In a SuperNode: poll more often, and let the server notice sooner that it is gone."""
    _set("flwr.supernode.start_client_internal", "time", SimpleNamespace(sleep=_Sleeper().sleep))
    _set("flwr.supernode.fleet_http_connection", "HEARTBEAT_DEFAULT_INTERVAL", _HEARTBEAT)
    _set("flwr.supercore.heartbeat", "HEARTBEAT_DEFAULT_INTERVAL", _HEARTBEAT)
    _set("flwr.supercore.retry.http_retry", "MAX_RETRY_DELAY", _MAX_RETRY_DELAY)


def fetch_faster() -> None:
    """Ask again for missing parts of a message after 0.05 s instead of a second."""
    utilities = import_module("flwr.supercore.inflatable.inflatable_utils")
    for fetch in (utilities.pull_objects, utilities.pull_and_inflate_object_from_tree):
        fetch.__kwdefaults__.update(initial_backoff=_FIRST_WAIT, backoff_cap=_MAX_WAIT)


def _set(module: str, name: str, value: Any) -> None:
    """Change a constant of Flower, and raise if this version does not have it."""
    home = import_module(module)
    if not hasattr(home, name):
        raise RuntimeError(f"This version of Flower has no {module}.{name}; use 1.41.")
    setattr(home, name, value)


def main() -> None:
    """Run the SuperNode until the parent ends."""
    from flwr.supernode.cli import flower_supernode

    poll_faster()
    fetch_faster()
    end_with_parent(_sign_off)
    try:
        flower_supernode()
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()  # the parent looks for the reason in the log
    # Two errors at the same time can end Flower's main thread before it stops its web server. The thread
    # of the web server would then keep the process alive, and the parent would wait for it.
    os._exit(1)


def _sign_off() -> None:
    """Give Flower 3 s to sign off from the server."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3.0)


if __name__ == "__main__":
    main()
