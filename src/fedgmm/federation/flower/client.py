"""``fedgmm client``: the long-lived process of a site, with a SuperNode as its child process.

The SuperNode receives the requests of the server, and this process replies to them.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedgmm.federation.flower.access import UNKNOWN_KEY
from fedgmm.federation.flower.processes import Child, FlowerFolder, free_port, prepare_environment
from fedgmm.federation.messages import Message

if TYPE_CHECKING:
    from fedgmm.federation.flower.flower_internals import Tasks

Notify = Callable[[str], None]

# seconds
_CONNECT_TIMEOUT = 10.0
_LAST_REPLY_TIMEOUT = 30.0
_START_TIMEOUT = 60.0
_POLL, _IDLE_POLL = 0.1, 0.5
_RETRY_DELAY = 2.0
_SIGN_OFF_DELAY = 1.0

_SENT = "Sent successfully"  # in the SuperNode's log


class RefusedError(ValueError):
    """The server refuses this site, or is not the right server; trying again does not help."""


class UnusableError(ValueError):
    """Something at the site must be fixed before it can take part."""


class RequestHandler(Protocol):
    """The part of a site that the transport uses.

    Attributes:
        finished: the site has no more work to do.
        refused: reason why the server refuses the site, or ``None``.
        unusable: reason why the site's table cannot be used, or ``None``.
    """

    finished: bool
    refused: str | None
    unusable: str | None

    def reply(self, request: Message) -> Message:
        """Return the reply to a request."""
        ...


@dataclass(frozen=True)
class Connection:
    """Address of the server, and the files that authenticate both sides.

    Attributes:
        host: name or address, as in the server's certificate.
        port: port of the server.
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
    """Split ``host:port`` into host and port.

    Raises:
        ValueError: the text is not an address.
    """
    host, _, port = text.removeprefix("https://").removeprefix("http://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address; use host:port, such as server.org:9092.")
    return host.strip("[]"), int(port)


def take_part(site: RequestHandler, connection: Connection, out: Path, *, notify: Notify) -> None:
    """Reply to the server's requests until the site is finished.

    If the server is not available, wait for it.

    Raises:
        RefusedError: the server is not the right one, or does not know the site's key.
    """
    from filelock import FileLock, Timeout

    folder = FlowerFolder(out)
    folder.root.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(str(folder.lock), timeout=0):
            prepare_environment(folder, connection.host)  # without a proxy, as in check_server
            while not site.finished:
                wait_for_server(connection, notify)
                folder.make()
                _one_connection(site, connection, folder, notify)
    except Timeout:
        raise ValueError(
            f"Another client is running in {out}; end it, or use another folder."
        ) from None
    except OSError as error:
        raise ValueError(f"Cannot use the folder {out}: {error.strerror or error}.") from None


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
    reported = ""
    while reason := check_server(connection):
        if reason != reported:
            reported = reason
            notify(f"Waiting for the server at {connection.address} ({reason}).")
        time.sleep(_RETRY_DELAY)


def check_server(connection: Connection) -> str:
    """Return why the server does not respond, or an empty text if it does.

    Raises:
        RefusedError: another server responds.
    """
    try:
        with socket.create_connection((connection.host, connection.port), _CONNECT_TIMEOUT) as line:
            if connection.authority is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_verify_locations(connection.authority)
                with context.wrap_socket(line, server_hostname=connection.host) as encrypted:
                    return _check_health(encrypted, connection)
            return _check_health(line, connection)
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(
            f"The certificate of {connection.address} cannot be trusted ({error.verify_message}); "
            "check --ca and the host name, and ask the administrator of the server."
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


def _check_health(line: socket.socket, connection: Connection) -> str:
    line.settimeout(_CONNECT_TIMEOUT)
    line.sendall(f"GET /health HTTP/1.1\r\nHost: {connection.address}\r\n\r\n".encode())
    if line.recv(64).startswith(b"HTTP/"):
        return ""
    if connection.authority is None:
        # a server with TLS closes the connection or sends an alert
        raise RefusedError(
            f"{connection.address} does not respond to plain text; if it uses TLS, use --ca ca.crt "
            "instead of --insecure."
        )
    return "unexpected response"


def _one_connection(
    site: RequestHandler, connection: Connection, folder: FlowerFolder, notify: Notify
) -> None:
    """Start a SuperNode and reply to its requests until it ends or the site is finished."""
    from fedgmm.federation.flower.flower_internals import Tasks

    port = free_port()
    with Child(
        "fedgmm.federation.flower.supernode", _arguments(connection, folder, port), folder
    ) as node:
        tasks = Tasks(port, folder.secret.read_text())
        try:
            _reply_to_all(site, tasks, node, notify)
        finally:
            tasks.close()
        if not site.finished:
            _explain_end(node, connection, notify)


def _arguments(connection: Connection, folder: FlowerFolder, port: int) -> list[str]:
    arguments = ["--superlink", connection.address, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--isolation", "process", "--superexec-auth-secret-file", str(folder.secret)]
    if connection.authority is None:
        return [*arguments, "--insecure"]
    arguments += ["--root-certificates", str(connection.authority)]
    if connection.key is not None:
        arguments += ["--auth-supernode-private-key", str(connection.key)]
    return arguments


def _reply_to_all(site: RequestHandler, tasks: Tasks, node: Child, notify: Notify) -> None:
    import httpx

    from fedgmm.federation.flower.records import handle_records
    from fedgmm.federation.site import SiteError

    started = last_reply = time.monotonic()
    connected = False
    while not node.ended:
        try:
            with tasks.next() as task:
                if task is not None:
                    if not connected:
                        notify("Connected; replying to the server's requests.")
                        connected = True
                    before = node.log_end
                    task.reply(handle_records(site.reply, task.content, SiteError, notify))
                    last_reply = time.monotonic()
                    if site.finished or site.unusable:
                        _wait_until_sent(node, before)
                    if site.unusable:
                        raise UnusableError(f"This site cannot take part: {site.unusable}")
                    if site.finished:
                        return
                    continue
            if site.refused and time.monotonic() - last_reply > _LAST_REPLY_TIMEOUT:
                raise RefusedError(f"The server refused this site: {site.refused}")
        except httpx.HTTPError:
            # the SuperNode has not started yet, or is ending
            if connected and time.monotonic() - last_reply > _START_TIMEOUT and not node.ended:
                return
            if not connected and time.monotonic() - started > _START_TIMEOUT:
                return
        idle = time.monotonic() - last_reply >= _LAST_REPLY_TIMEOUT
        time.sleep(_IDLE_POLL if idle else _POLL)


def _wait_until_sent(node: Child, before: int) -> None:
    """Wait until the SuperNode has sent the last reply, because it must not be stopped before."""
    deadline = time.monotonic() + _LAST_REPLY_TIMEOUT
    while time.monotonic() < deadline and not node.ended and _SENT not in node.log_text(before):
        time.sleep(_POLL)
    time.sleep(_SIGN_OFF_DELAY)  # the server drops a reply that it has not fetched when we sign off


def _explain_end(node: Child, connection: Connection, notify: Notify) -> None:
    """Report why a SuperNode ended, or raise if another attempt cannot help."""
    log = node.log_text()
    if UNKNOWN_KEY in log:
        public = "NAME.pub" if connection.key is None else connection.key.with_suffix(".pub").name
        raise RefusedError(
            f"The server at {connection.address} does not know this site's key; send {public} to the "
            "administrator of the server, or use another --key."
        )
    if "401 Unauthorized" in log:
        notify(
            "The server does not recognise this site (perhaps it was restarted, or the clocks of the two "
            "machines differ); reconnecting."
        )
    else:
        notify("The connection to the server was lost; reconnecting.")
    time.sleep(_RETRY_DELAY / 2)
