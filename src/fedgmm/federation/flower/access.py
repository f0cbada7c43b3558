"""Access control in front of Flower's SuperLink: who may call which interface, and how much may be sent.

Flower serves three interfaces on one port: for nodes (fleet), for its own workers (runtime) and for
starting runs (control). The control interface can start any program on the server and on every node. So the
public port gives access to the fleet interface only. The other two are reachable on a port of the loopback
address, which requires a secret. Both classes are ASGI middleware.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable, Container, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SECRET_HEADER = "x-fedgmm-secret"
KEY_HEADER = b"flwr-public-key"
LARGEST_REQUEST = 32 * 1024 * 1024
"""Largest HTTP request in bytes. Flower sends arrays in parts of 5 MB; our JSON has at most 16 MB."""

UNKNOWN_KEY = "This key is not registered at the server."
_FLEET, _RUNTIME = "/v1/fleet/", "/v1/runtime/"
_HEALTH = "/health"


class PublicAccess:
    """Give nodes with a registered key access to the fleet interface, and limit the bytes they send.

    Args:
        application: Flower's application.
        known_keys: public keys in the format of the header; the container may change. ``None`` admits
            every key.
        bytes_per_window: largest number of bytes from one key and one address per window.
        window: length of the window in seconds.
    """

    def __init__(
        self,
        application: Application,
        known_keys: Container[bytes] | None,
        bytes_per_window: int,
        window: float = 10.0,
    ) -> None:
        self._application = application
        self._known = known_keys
        self._max_bytes = bytes_per_window
        self._window = window
        self._sent: dict[bytes, tuple[float, int]] = {}  # start of the window, bytes since then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path.startswith(_FLEET) or path == _HEALTH):
            await _refuse(scope, send, 404, "Not found.")
            return
        if path == _HEALTH:
            await _respond(send, 200, b"fedgmm")
            return
        headers = dict(scope.get("headers", []))
        key = headers.get(KEY_HEADER, b"")
        if self._known is not None and key not in self._known:
            await _refuse(scope, send, 400, UNKNOWN_KEY)
            return
        declared = headers.get(b"content-length", b"")
        if not declared.isdigit() or int(declared) > LARGEST_REQUEST:
            await _refuse(scope, send, 413, "The request is too large or has no content length.")
            return
        # counted per address, so that others who know a public key cannot use up its owner's limit
        sender = key + b" " + str((scope.get("client") or ("",))[0]).encode()
        if not self._within_limit(sender, int(declared)):
            await _refuse(scope, send, 413, "Too many bytes within a short time.")
            return
        await self._application(scope, receive, send)

    def _within_limit(self, sender: bytes, size: int) -> bool:
        now = time.monotonic()
        start, total = self._sent.get(sender, (now, 0))
        if now - start > self._window:
            start, total = now, 0
        if len(self._sent) > 10_000:  # if every key is admitted, a sender can invent keys
            self._sent.clear()
        self._sent[sender] = (start, total + size)
        return total + size <= self._max_bytes


class LocalAccess:
    """Give callers on this machine access to all interfaces; starting runs requires the secret."""

    def __init__(self, application: Application, secret: str) -> None:
        self._application = application
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        # the runtime interface is protected by Flower's own secret and tokens
        if scope["type"] == "http" and not scope["path"].startswith(_RUNTIME):
            given = dict(scope.get("headers", [])).get(SECRET_HEADER.encode(), b"")
            if not hmac.compare_digest(given, self._secret):
                await _refuse(scope, send, 403, "The secret is missing.")
                return
        await self._application(scope, receive, send)


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await _respond(send, status, json.dumps({"code": 0, "public_message": message}).encode())


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
