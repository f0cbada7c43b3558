"""Flower's SuperLink behind our two doors; run as a child with ``python -m``.

The parent sends one line of JSON: hosts, files, keys and secrets. The child answers with one line: its
private port and the ids of the registered nodes, or why it cannot start. Later lines of the parent hold
all keys that are let in from now on; each is answered with the ids of their nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import sys
from base64 import b64encode
from collections.abc import Iterator
from importlib import import_module
from typing import Any, TextIO

import uvicorn

from fedgmm.federation.flower.guard import PrivateDoor, PublicDoor
from fedgmm.federation.flower.processes import end_with_parent, read_told

_BACKLOG = 512


class _Server(uvicorn.Server):
    """A server that leaves signals alone: there are two of them, and the process ends with both."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Serve until the parent ends."""
    told, line = read_told(), _answer()

    def answer(**facts: Any) -> None:
        line.write(json.dumps(facts) + "\n")
        line.flush()

    try:
        public = _listen(told["host"], told["port"])
        private = _listen("127.0.0.1", 0)
    except OSError as error:
        answer(error=_why(error))
        return
    application = _superlink(told)
    keys = _Keys(application.state.linkstate_factory.state())
    nodes = keys.let_in(told["keys"])
    end_with_parent(on_line=lambda words: answer(nodes=keys.let_in(json.loads(words)["keys"])))
    answer(port=private.getsockname()[1], nodes=nodes)
    asyncio.run(_serve(application, public, private, told, keys))


def _answer() -> TextIO:
    """The pipe to the parent; from now on, what is printed goes into the log."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # without it, every request waits 40 ms for an acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(address)
    listener.listen(_BACKLOG)
    listener.set_inheritable(False)
    return listener


def _why(error: OSError) -> str:
    """Why a port cannot be listened on, and what to do."""
    if isinstance(error, socket.gaierror):
        return "no machine is known by this name; choose another --host"
    return {
        errno.EADDRINUSE: "somebody listens there already; choose another --port",
        errno.EADDRNOTAVAIL: "it is no address of this machine; choose another --host",
        errno.EACCES: "ports below 1024 need more rights; choose another --port",
    }.get(error.errno or 0, f"{error.strerror}; choose another --host or --port")


def _superlink(told: dict[str, Any]) -> Any:
    """Flower's own application, as its command line builds it."""
    from flwr.superlink.main import create_app

    command: Any = import_module(
        "flwr.superlink.cli.flower_superlink"
    )  # its package hides the module
    arguments = ["--isolation", "process", "--superexec-auth-secret-file", told["secret_file"]]
    if told["tls"] is None:
        arguments.append("--insecure")
    else:
        arguments += ["--ssl-certfile", told["tls"]["certificate"]]
        arguments += ["--ssl-keyfile", told["tls"]["key"]]
        arguments += ["--ssl-ca-certfile", told["tls"]["authority"], "--enable-supernode-auth"]
    sys.argv = ["flower-superlink", *arguments]
    config = command._parse_superlink_lifespan_config()
    application = create_app(config, command.SuperLinkLifespan)
    _mend(application.state.linkstate_factory)
    return application


def _mend(factory: Any) -> None:
    """Three things that would hurt us."""
    state, store = factory.state(), factory.objectstore_factory.store()
    activate, register = state.activate_node, store.preregister

    def activate_again(node_id: int, heartbeat_interval: float) -> bool:
        """A node that died and came back within the time of a heartbeat still counts as online."""
        if activate(node_id, heartbeat_interval):
            return True
        return bool(state.deactivate_node(node_id) and activate(node_id, heartbeat_interval))

    def register_at_once(run_id: int, object_tree: Any) -> Any:
        """Equal arrays of two messages are one object, which must not be deleted in between."""
        with store.lock_store:
            return register(run_id, object_tree)

    links: Any = import_module("flwr.server.superlink.linkstate.in_memory_linkstate")
    check = links.check_node_availability_for_in_message

    def check_unanswered(inquired_in_message_ids: set[str], **others: Any) -> Any:
        """A node that has answered may leave: its answer counts all the same."""
        answered = inquired_in_message_ids & set(state.message_ins_id_to_message_res_id)
        unanswered = inquired_in_message_ids - answered
        found = check(inquired_in_message_ids=unanswered, **others)  # leaves those of present nodes
        inquired_in_message_ids &= answered | unanswered
        return found

    links.check_node_availability_for_in_message = check_unanswered
    state.activate_node = activate_again
    store.preregister = register_at_once


class _Keys:
    """The public keys that are let in, as the door sees them in headers."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._nodes: dict[str, str] = {}
        self._headers: frozenset[bytes] = frozenset()

    def __contains__(self, header: object) -> bool:
        return header in self._headers

    def let_in(self, keys: dict[str, str]) -> dict[str, str]:
        """Let in these keys and no others; their names by the ids of their nodes."""
        from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID

        for key in keys.values():
            if key not in self._nodes:  # Flower knows a key for ever; the door does not
                node = self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key.encode(), 0)
                self._nodes[key] = str(node)
        self._headers = frozenset(b64encode(key.encode()) for key in keys.values())
        return {self._nodes[key]: name for name, key in keys.items()}


async def _serve(
    application: Any,
    public: socket.socket,
    private: socket.socket,
    told: dict[str, Any],
    keys: _Keys,
) -> None:
    secure = told["tls"] is not None
    outer = PublicDoor(application, keys if secure else None, told["bytes_per_window"])
    common: dict[str, Any] = {"access_log": False, "log_level": "warning", "ws": "none"}
    files = {}
    if secure:
        files = {
            "ssl_certfile": told["tls"]["certificate"],
            "ssl_keyfile": told["tls"]["key"],
        }
    inner = _Server(
        uvicorn.Config(PrivateDoor(application, told["secret"]), lifespan="on", **common)
    )
    fleet = _Server(uvicorn.Config(outer, lifespan="off", **common, **files))
    await asyncio.gather(inner.serve(sockets=[private]), fleet.serve(sockets=[public]))


if __name__ == "__main__":
    main()
