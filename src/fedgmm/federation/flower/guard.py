"""What stands before Flower's SuperLink: who may call what, and how much may be sent.

Flower serves three interfaces on one port: for nodes (fleet), for its own workers (runtime) and for
people who start runs (control). Whoever reaches the last one can start any program on the server and
on every node. So the public door opens to the fleet alone, and the other two stand behind a private
door on the loopback address, which asks for a secret.
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
"""Bytes of one request. Flower sends arrays in pieces of 5 MB; our JSON is at most 16 MB."""

UNKNOWN_KEY = "This key is not registered at the server."
_FLEET, _RUNTIME = "/v1/fleet/", "/v1/runtime/"
_HEALTH = "/health"


class PublicDoor:
    """Lets nodes with a known key through to the fleet interface, and bounds what they send.

    Args:
        inner: Flower's application.
        known_keys: public keys as they stand in the header, which may change; ``None`` lets every
            key in.
        bytes_per_window: most bytes of one key from one address within a window.
        window: seconds.
    """

    def __init__(
        self,
        inner: Application,
        known_keys: Container[bytes] | None,
        bytes_per_window: int,
        window: float = 10.0,
    ) -> None:
        self._inner = inner
        self._known = known_keys
        self._most = bytes_per_window
        self._window = window
        self._since: dict[bytes, tuple[float, int]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path.startswith(_FLEET) or path == _HEALTH):
            await _refuse(scope, send, 404, "There is nothing here.")
            return
        if path == _HEALTH:
            await _reply(send, 200, b"fedgmm")
            return
        headers = dict(scope.get("headers", []))
        key = headers.get(KEY_HEADER, b"")
        if self._known is not None and key not in self._known:
            await _refuse(scope, send, 400, UNKNOWN_KEY)
            return
        declared = headers.get(b"content-length", b"")
        if not declared.isdigit() or int(declared) > LARGEST_REQUEST:
            await _refuse(scope, send, 413, "The request is too large, or does not say its length.")
            return
        # whoever knows a public key cannot use up what its owner may send from elsewhere
        sender = key + b" " + str((scope.get("client") or ("",))[0]).encode()
        if not self._within_bounds(sender, int(declared)):
            await _refuse(scope, send, 413, "Too much was sent within a short time.")
            return
        await self._inner(scope, receive, send)

    def _within_bounds(self, sender: bytes, size: int) -> bool:
        now = time.monotonic()
        began, total = self._since.get(sender, (now, 0))
        if now - began > self._window:
            began, total = now, 0
        if len(self._since) > 10_000:  # keys are made up at will where every key is let in
            self._since.clear()
        self._since[sender] = (began, total + size)
        return total + size <= self._most


class PrivateDoor:
    """Lets callers on this machine through to all interfaces; starting runs needs the secret."""

    def __init__(self, inner: Application, secret: str) -> None:
        self._inner = inner
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and not scope["path"].startswith(_RUNTIME):
            told = dict(scope.get("headers", [])).get(SECRET_HEADER.encode(), b"")
            # the runtime interface has Flower's own secret and tokens
            if not hmac.compare_digest(told, self._secret):
                await _refuse(scope, send, 403, "The secret is missing.")
                return
        await self._inner(scope, receive, send)


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await _reply(send, status, json.dumps({"code": 0, "public_message": message}).encode())


async def _reply(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
