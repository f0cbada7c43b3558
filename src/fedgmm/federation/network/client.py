"""``fedgmm client``: the process of a site, which replies to the requests of the server on one stream."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgmm.federation.messages import (
    FAILURE,
    LARGEST_MESSAGE,
    PROTOCOL,
    MessageError,
    Notify,
    reply_or_failure,
)
from fedgmm.federation.network.keys import check_private_key, read_private_key
from fedgmm.federation.network.stream import (
    COMMON_OPTIONS,
    METHOD,
    SERVICE,
    Assembler,
    greeting,
    pieces,
    read_greeting,
    sign,
)
from fedgmm.files import private_folder

if TYPE_CHECKING:
    from fedgmm.federation.site import Site

# seconds
_CONNECT_TIMEOUT = 10.0
_WELCOME_TIMEOUT = 20.0
_LAST_REPLY_TIMEOUT = 30.0
_RETRY_DELAY = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 15.0

_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
"""The first bytes of a client and an empty frame of settings; a server replies with its own settings."""


class RefusedError(ValueError):
    """The server refuses this site, or is not the right server; trying again does not help."""


class UnusableError(ValueError):
    """Something at the site must be fixed before it can take part."""


@dataclass(frozen=True)
class Connection:
    """Address of the server, and the files that authenticate both sides.

    Attributes:
        host: name or address, as in the server's certificate.
        authority: certificate of the authority that signed the server's; ``None`` for plain text.
        key: private key of the site; requires TLS.
    """

    host: str
    port: int
    authority: Path | None
    key: Path | None

    @property
    def address(self) -> str:
        """``host:port``, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` into host and port, or raise ``ValueError``."""
    host, _, port = text.removeprefix("https://").removeprefix("http://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address; use host:port, such as server.org:9092.")
    return host.strip("[]"), int(port)


def take_part(site: Site, connection: Connection, out: Path, *, notify: Notify) -> None:
    """Reply to the server's requests until the site is finished; wait while there is no server.

    Raises ``RefusedError`` or ``UnusableError`` if another attempt does not help.
    """
    from filelock import FileLock, Timeout

    private_folder(out)
    try:
        with FileLock(str(out / ".client.lock"), timeout=0):
            _reconnect(site, connection, notify)
    except Timeout:
        raise ValueError(
            f"Another client is running in {out}; end it, or use another folder."
        ) from None
    except OSError as error:
        raise ValueError(f"Cannot use the folder {out}: {error.strerror or error}.") from None


class _NewLines:
    """Log a line unless it repeats the last one; :meth:`reset` lets it be logged again."""

    def __init__(self, notify: Notify) -> None:
        self._notify, self._last = notify, ""

    def __call__(self, line: str) -> None:
        if line != self._last:
            self._notify(line)
        self._last = line

    def reset(self) -> None:
        """Forget the last line."""
        self._last = ""


def _reconnect(site: Site, connection: Connection, notify: Notify) -> None:
    """Connect again and again until the site is finished, after longer and longer pauses."""
    instance, pause = secrets.token_hex(16), _FIRST_PAUSE
    # a server repeats a request that this site refuses, also after a new connection
    endings, failures = _NewLines(notify), _NewLines(notify)
    while not site.finished:
        wait_for_server(connection, notify)
        line = _Stream(site, connection, instance, notify, failures)
        reason = line.run()
        if site.finished:
            return
        if line.welcomed:
            pause = _FIRST_PAUSE
            endings.reset()
        endings(f"{reason[0].upper()}{reason[1:]}; reconnecting.")
        time.sleep(pause * random.uniform(0.5, 1.0))  # many sites do not come back at once
        pause = min(2 * pause, _LONGEST_PAUSE)


class _Stream:
    """One connection to the server; ``welcomed`` after the server has accepted the site's key."""

    def __init__(
        self,
        site: Site,
        connection: Connection,
        instance: str,
        notify: Notify,
        failures: _NewLines,
    ) -> None:
        self._site, self._connection, self._instance = site, connection, instance
        self._notify, self._failures = notify, failures
        self._outgoing: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        self.welcomed = False

    def run(self) -> str:
        """Reply until the connection ends; return the reason why it did, or raise ``RefusedError``."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        import grpc

        # the address is reached directly, as in check_server, and each attempt has its own connection
        own = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        options = [*COMMON_OPTIONS, *own]
        where, authority = self._connection.address, self._connection.authority
        if authority is None:
            channel = grpc.insecure_channel(where, options)
        else:
            credentials = grpc.ssl_channel_credentials(authority.read_bytes())
            channel = grpc.secure_channel(where, credentials, options)
        with channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(self._sent())
            try:
                # a server that accepts the connection and stays silent does not hold the site
                with _cancelled_after(_WELCOME_TIMEOUT, call):
                    self._prove(call)
                self._reply_to_all(call)
                return "the server ended the connection"
            except grpc.RpcError as error:
                return self._explained(grpc, error)
            except MessageError as error:
                return f"the server's message is not accepted: {error}"
            finally:
                self._outgoing.put(None)
                call.cancel()

    def _sent(self) -> Iterator[bytes]:
        """Yield the pieces of all messages of this site; gRPC takes one when it has sent the last."""
        while (message := self._outgoing.get()) is not None:
            yield from message

    def _prove(self, call: Any) -> None:
        """Answer the server's challenge with a signature."""
        facts = read_greeting(next(call, b""))
        if facts.get("protocol") != PROTOCOL:
            raise RefusedError(
                "The server has another version of fedgmm; use the same version everywhere."
            )
        reply: dict[str, Any] = {"protocol": PROTOCOL, "instance": self._instance}
        if self._connection.key is not None:
            challenge, host = str(facts.get("challenge")), self._connection.host
            reply |= {
                "key": check_private_key(self._connection.key).pem,
                "host": host,
                "proof": sign(read_private_key(self._connection.key), challenge, host),
            }
        self._outgoing.put(iter([greeting(**reply)]))
        read_greeting(next(call, b""))
        self.welcomed = True
        self._notify("Connected; replying to the server's requests.")

    def _reply_to_all(self, call: Any) -> None:
        from fedgmm.federation.site import SiteError

        site, assembler = self._site, Assembler(LARGEST_MESSAGE)
        for piece in call:
            found = assembler.add(piece)
            if found is None:
                continue
            number, request = found
            reply = reply_or_failure(partial(site.reply, request), SiteError, self._failures)
            if reply.kind != FAILURE:
                self._failures.reset()
            self._outgoing.put(pieces(reply, number))
            if site.finished or site.unusable or site.refused:
                self._close_after(call)
            if site.unusable:
                raise UnusableError(f"This site cannot take part: {site.unusable}")
            if site.refused:
                raise RefusedError(f"The server refused this site: {site.refused}")
            if site.finished:
                return

    def _close_after(self, call: Any) -> None:
        """End the stream after the last reply has arrived at the server."""
        import grpc

        self._outgoing.put(None)
        # the server ends its side when it has read everything
        with _cancelled_after(_LAST_REPLY_TIMEOUT, call), contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass

    def _explained(self, grpc: Any, error: Any) -> str:
        """Return why the connection ended, or raise if another attempt cannot help."""
        code, codes = error.code(), grpc.StatusCode
        if code == codes.UNAUTHENTICATED:
            key = self._connection.key
            public = "NAME.pub" if key is None else key.with_suffix(".pub").name
            raise RefusedError(
                f"The server at {self._connection.address} does not know this site's key; send {public} "
                "to the administrator of the server, or use another --key."
            )
        if code in (codes.FAILED_PRECONDITION, codes.UNIMPLEMENTED):
            raise RefusedError(f"The server refused this site: {error.details()}.")
        if code in (codes.ALREADY_EXISTS, codes.RESOURCE_EXHAUSTED, codes.INVALID_ARGUMENT):
            return str(error.details()).rstrip(".")
        return "the connection to the server was lost"


@contextlib.contextmanager
def _cancelled_after(seconds: float, call: Any) -> Iterator[None]:
    """Cancel a call that takes longer than this."""
    watchdog = threading.Timer(seconds, call.cancel)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def check_authority(path: Path) -> None:
    """Raise ``ValueError`` unless a file holds certificates of authorities."""
    if not path.is_file():
        raise ValueError(
            f"There is no file {path}; ask the administrator of the server for ca.crt."
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError):
        raise ValueError(
            f"{path} is not a certificate (PEM); ask the administrator of the server for ca.crt."
        ) from None


def wait_for_server(connection: Connection, notify: Notify) -> None:
    """Wait until the right server responds; report each new reason for waiting once."""
    report = _NewLines(notify)
    while reason := check_server(connection):
        report(f"Waiting for the server at {connection.address} ({reason}).")
        time.sleep(_RETRY_DELAY)


def check_server(connection: Connection) -> str:
    """Return why the server does not respond, empty if it does; raise ``RefusedError`` for another one."""
    try:
        with socket.create_connection((connection.host, connection.port), _CONNECT_TIMEOUT) as line:
            if connection.authority is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_verify_locations(connection.authority)
                context.set_alpn_protocols(["h2"])
                with context.wrap_socket(line, server_hostname=connection.host) as encrypted:
                    return _check_protocol(encrypted, connection)
            return _check_protocol(line, connection)
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(
            f"The certificate of {connection.address} cannot be trusted ({error.verify_message}); "
            "check --ca, the host name and the clock of this machine, and ask the server's administrator."
        ) from None
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            raise RefusedError(
                f"{connection.address} uses plain text, not TLS; the server was started with --insecure, "
                "or it is another server."
            ) from None
        return f"TLS failed: {error.reason}"
    except socket.gaierror:
        return f"unknown host {connection.host}"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _check_protocol(line: socket.socket, connection: Connection) -> str:
    line.settimeout(_CONNECT_TIMEOUT)
    line.sendall(_HTTP2)
    found = line.recv(len(_SETTINGS))
    if found[3:4] == _SETTINGS[3:4]:
        return ""
    if connection.authority is None:
        # a server with TLS closes the connection or sends an alert
        raise RefusedError(
            f"{connection.address} does not respond to plain text; if it uses TLS, use --ca ca.crt "
            "instead of --insecure."
        )
    return "unexpected response"
