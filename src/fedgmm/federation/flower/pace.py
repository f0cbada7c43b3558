"""Flower's waiting times, shortened.

A SuperNode of Flower looks for a question every 3 s, waits a second for pieces that are not there yet,
and counts as connected for a minute after its death. A round of ours is often quicker than that.
"""

from __future__ import annotations

import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

_POLL, _IDLE_POLL, _IDLE_AFTER = 0.3, 2.0, 120.0
_PATIENCE = 4.0  # times as long as a look took, before the next one: a busy server is left alone
_HEARTBEAT = 12
_LONGEST_RETRY = 4
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0


class _Sleeper:
    """``time.sleep`` of the loop of a SuperNode: 3 s before the next question, 0.5 s for an answer."""

    def __init__(self) -> None:
        self._busy = self._woke = time.monotonic()

    def sleep(self, seconds: float) -> None:
        now = time.monotonic()
        if seconds < 1.0:  # an answer is being worked on
            self._busy = now
            time.sleep(min(seconds, 0.1))
        else:
            wanted = _IDLE_POLL if now - self._busy > _IDLE_AFTER else _POLL
            time.sleep(min(seconds, max(wanted, _PATIENCE * (now - self._woke))))
        self._woke = time.monotonic()


def look_sooner() -> None:
    """In a SuperNode: look for questions more often, and have its absence noticed sooner."""
    _set("flwr.supernode.start_client_internal", "time", SimpleNamespace(sleep=_Sleeper().sleep))
    _set("flwr.supernode.fleet_http_connection", "HEARTBEAT_DEFAULT_INTERVAL", _HEARTBEAT)
    _set("flwr.supercore.heartbeat", "HEARTBEAT_DEFAULT_INTERVAL", _HEARTBEAT)
    _set("flwr.supercore.retry.http_retry", "MAX_RETRY_DELAY", _LONGEST_RETRY)


def fetch_sooner() -> None:
    """Ask for pieces of a message that are not there yet after a twentieth of a second."""
    utilities = import_module("flwr.supercore.inflatable.inflatable_utils")
    for fetch in (utilities.pull_objects, utilities.pull_and_inflate_object_from_tree):
        fetch.__kwdefaults__.update(initial_backoff=_FIRST_WAIT, backoff_cap=_LONGEST_WAIT)


def _set(module: str, name: str, value: Any) -> None:
    """Change a constant of Flower; one that is gone is an error, not a silent delay."""
    home = import_module(module)
    if not hasattr(home, name):
        raise RuntimeError(f"This version of Flower has no {module}.{name}; use 1.41.")
    setattr(home, name, value)
