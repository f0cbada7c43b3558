"""A site's long-lived process: it holds the site, and a SuperNode as its child brings the questions."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedgmm.federation.flower.guard import UNKNOWN_KEY
from fedgmm.federation.flower.processes import Child, FlowerFolder, free_port, prepare_environment
from fedgmm.federation.messages import Message

if TYPE_CHECKING:
    from fedgmm.federation.flower.inner import Tasks

Notify = Callable[[str], None]

_TIMEOUT = 10.0
_PATIENCE = 30.0  # seconds for the last answer to leave
_START = 60.0
_QUICK, _SLOW = 0.1, 0.5  # seconds between two looks for a question
_RETRY = 2.0
_LINGER = 1.0
_SENT = "Sent successfully"


class RefusedError(ValueError):
    """The server does not want us, or is not who it should be; trying again does not help."""


class UnusableError(ValueError):
    """Something at the site has to be mended before it can take part."""


class AnswersQuestions(Protocol):
    """A site, as far as the transport knows it.

    Attributes:
        finished: nothing is left to do.
        refused: why the server does not want it, if it does not.
        unusable: what is wrong with its table, if something is.
    """

    finished: bool
    refused: str | None
    unusable: str | None

    def reply(self, request: Message) -> Message:
        """Answer one question."""
        ...


@dataclass(frozen=True)
class Connection:
    """Where the server is, and how it is known and we are.

    Attributes:
        host: name or address, as the server's certificate has it.
        port: of the server.
        authority: who signed the server's certificate; ``None`` for plain text.
        key: our private key; needs TLS.
    """

    host: str
    port: int
    authority: Path | None
    key: Path | None

    @property
    def address(self) -> str:
        """``host:port``, with brackets where they are needed."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        ValueError: text that is not one.
    """
    host, _, port = text.removeprefix("https://").removeprefix("http://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address; write host:port, such as server.org:9092.")
    return host.strip("[]"), int(port)


def take_part(site: AnswersQuestions, connection: Connection, out: Path, *, notify: Notify) -> None:
    """Answer the server's questions until the site is finished.

    A server that is not there, or goes away, is waited for.

    Raises:
        RefusedError: the server is not who it should be, or does not know our key.
    """
    from filelock import FileLock, Timeout

    folder = FlowerFolder(out)
    folder.root.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(str(folder.lock), timeout=0):
            prepare_environment(folder, connection.host)  # as we knock: without a proxy
            while not site.finished:
                wait_for_server(connection, notify)
                folder.make()
                _one_connection(site, connection, folder, notify)
    except Timeout:
        raise ValueError(
            f"Another client is working in {out}; end it, or use another folder."
        ) from None
    except OSError as error:
        raise ValueError(f"Cannot work in {out}: {error.strerror or error}.") from None


def check_authority(path: Path) -> None:
    """Raise ``ValueError`` unless a file holds certificates that a server can be known by."""
    if not path.is_file():
        raise ValueError(f"There is no file {path}; ask who runs the server for its ca.crt.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError):
        raise ValueError(
            f"{path} is not a certificate (PEM); ask who runs the server for its ca.crt."
        ) from None


def wait_for_server(connection: Connection, notify: Notify) -> None:
    """Wait until the server answers, and make sure that it is the right one."""
    told = ""
    while True:
        reason = knock(connection)
        if not reason:
            return
        if reason != told:
            told = reason
            notify(f"Waiting for the server at {connection.address} ({reason}).")
        time.sleep(_RETRY)


def knock(connection: Connection) -> str:
    """Ask the server for a sign of life; empty, or why there is none (yet).

    Raises:
        RefusedError: what answers is not our server.
    """
    try:
        with socket.create_connection((connection.host, connection.port), _TIMEOUT) as line:
            if connection.authority is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_verify_locations(connection.authority)
                with context.wrap_socket(line, server_hostname=connection.host) as safe:
                    return _greet(safe, connection)
            return _greet(line, connection)
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(
            f"The certificate of {connection.address} cannot be trusted ({error.verify_message}); "
            "check --ca and the host name, and ask who runs the server."
        ) from None
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            raise RefusedError(
                f"{connection.address} speaks plain text, not TLS; the server was started with "
                "--insecure, or is another one."
            ) from None
        return f"TLS failed: {error.reason}"
    except socket.gaierror:
        return f"no machine is known as {connection.host}"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _greet(line: socket.socket, connection: Connection) -> str:
    line.settimeout(_TIMEOUT)
    line.sendall(f"GET /health HTTP/1.1\r\nHost: {connection.address}\r\n\r\n".encode())
    answer = line.recv(64)
    if answer.startswith(b"HTTP/"):
        return ""
    if connection.authority is None:
        # a server that speaks TLS hangs up, or sends an alert
        raise RefusedError(
            f"{connection.address} does not answer to plain text; if it speaks TLS, say --ca ca.crt "
            "instead of --insecure."
        )
    return "it does not answer as expected"


def _one_connection(
    site: AnswersQuestions, connection: Connection, folder: FlowerFolder, notify: Notify
) -> None:
    """Start a SuperNode and answer its questions until it ends, or until we have finished."""
    from fedgmm.federation.flower.inner import Tasks

    port = free_port()
    with Child(
        "fedgmm.federation.flower.supernode", _arguments(connection, folder, port), folder
    ) as node:
        tasks = Tasks(port, folder.secret.read_text())
        try:
            _answer_all(site, tasks, node, notify)
        finally:
            tasks.close()
        if not site.finished:
            _explain(node, connection, notify)


def _arguments(connection: Connection, folder: FlowerFolder, port: int) -> list[str]:
    arguments = ["--superlink", connection.address, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--isolation", "process", "--superexec-auth-secret-file", str(folder.secret)]
    if connection.authority is None:
        return [*arguments, "--insecure"]
    arguments += ["--root-certificates", str(connection.authority)]
    if connection.key is not None:
        arguments += ["--auth-supernode-private-key", str(connection.key)]
    return arguments


def _answer_all(site: AnswersQuestions, tasks: Tasks, node: Child, notify: Notify) -> None:
    import httpx

    from fedgmm.federation.flower.records import answer_records
    from fedgmm.federation.site import SiteError

    started = last = time.monotonic()
    connected = False
    while not node.ended:
        try:
            with tasks.next() as task:
                if task is not None:
                    if not connected:
                        notify("Connected; answering the server's questions.")
                        connected = True
                    before = node.log_end
                    task.reply(answer_records(site.reply, task.content, SiteError, notify))
                    last = time.monotonic()
                    if site.finished or site.unusable:
                        _wait_until_sent(node, before)
                    if site.unusable:
                        raise UnusableError(f"This site cannot take part: {site.unusable}")
                    if site.finished:
                        return
                    continue
            if site.refused and time.monotonic() - last > _PATIENCE:
                raise RefusedError(f"The server refused this site: {site.refused}")
        except httpx.HTTPError:
            # it has not started yet, or ends
            if connected and time.monotonic() - last > _START and not node.ended:
                return
            if not connected and time.monotonic() - started > _START:
                return
        time.sleep(_QUICK if time.monotonic() - last < _PATIENCE else _SLOW)


def _wait_until_sent(node: Child, before: int) -> None:
    """The SuperNode sends the last answer by itself; it must not be ended before."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and not node.ended and _SENT not in node.said(before):
        time.sleep(_QUICK)
    time.sleep(_LINGER)  # a server that has not fetched it yet would drop it when we leave


def _explain(node: Child, connection: Connection, notify: Notify) -> None:
    """Why a SuperNode ended: raise what will not get better, tell the rest."""
    said = node.said()
    if UNKNOWN_KEY in said:
        raise RefusedError(
            f"The server at {connection.address} does not know our key; send the public half "
            f"({_public_name(connection)}) to whoever runs it, or say --key."
        )
    if "401 Unauthorized" in said:
        notify(
            "The server does not recognise us (was it started again? do the clocks of the two machines "
            "agree?); connecting anew."
        )
    else:
        notify("The connection to the server was lost; connecting anew.")
    time.sleep(_RETRY / 2)


def _public_name(connection: Connection) -> str:
    return "NAME.pub" if connection.key is None else connection.key.with_suffix(".pub").name
