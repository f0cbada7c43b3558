"""Flower's SuperLink with our access control, as a child process of the server; run with ``python -m``.

The parent sends one line of JSON with host, files, keys and secrets. The child replies with one line: its
local port and the ids of the registered nodes, or the reason why it cannot start. Each later line of the
parent holds all keys that are accepted from then on, and the reply holds the ids of their nodes.
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

from fedgmm.federation.flower.access import LocalAccess, PublicAccess
from fedgmm.federation.flower.processes import end_with_parent, read_first_line

_BACKLOG = 512


class _Server(uvicorn.Server):
    """A web server without signal handlers, because two of them run in this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Serve until the parent ends."""
    options, pipe = read_first_line(), _pipe_to_parent()

    def reply(**facts: Any) -> None:
        pipe.write(json.dumps(facts) + "\n")
        pipe.flush()

    try:
        public = _listen(options["host"], options["port"])
        local = _listen("127.0.0.1", 0)
    except OSError as error:
        reply(error=_listen_error(error))
        return
    application = _superlink(options)
    keys = _Keys(application.state.linkstate_factory.state())
    nodes = keys.register(options["keys"])
    end_with_parent(on_line=lambda line: reply(nodes=keys.register(json.loads(line)["keys"])))
    reply(port=local.getsockname()[1], nodes=nodes)
    asyncio.run(_serve(application, public, local, options, keys))


def _pipe_to_parent() -> TextIO:
    """Return the pipe to the parent, and redirect printed output to the log."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # otherwise every request waits 40 ms for an acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(address)
    listener.listen(_BACKLOG)
    listener.set_inheritable(False)
    return listener


def _listen_error(error: OSError) -> str:
    """Return why the server cannot listen on a port, and what to do."""
    if isinstance(error, socket.gaierror):
        return "unknown host; choose another --host"
    return {
        errno.EADDRINUSE: "the port is in use; choose another --port",
        errno.EADDRNOTAVAIL: "this machine does not have the address; choose another --host",
        errno.EACCES: "ports below 1024 need more rights; choose another --port",
    }.get(error.errno or 0, f"{error.strerror}; choose another --host or --port")


def _superlink(options: dict[str, Any]) -> Any:
    """Build Flower's application as its command line does."""
    from flwr.superlink.main import create_app

    # import_module, because a function of the same name hides the module in its package
    command: Any = import_module("flwr.superlink.cli.flower_superlink")
    arguments = ["--isolation", "process", "--superexec-auth-secret-file", options["secret_file"]]
    if options["tls"] is None:
        arguments.append("--insecure")
    else:
        arguments += ["--ssl-certfile", options["tls"]["certificate"]]
        arguments += ["--ssl-keyfile", options["tls"]["key"]]
        arguments += ["--ssl-ca-certfile", options["tls"]["authority"], "--enable-supernode-auth"]
    sys.argv = ["flower-superlink", *arguments]
    config = command._parse_superlink_lifespan_config()
    application = create_app(config, command.SuperLinkLifespan)
    _patch(application.state.linkstate_factory)
    return application


def _patch(factory: Any) -> None:
    """Change three behaviours of Flower that would interrupt a federation."""
    state, store = factory.state(), factory.objectstore_factory.store()
    activate, register = state.activate_node, store.preregister

    def activate_again(node_id: int, heartbeat_interval: float) -> bool:
        """Activate a node that restarted within one heartbeat and therefore still counts as online."""
        if activate(node_id, heartbeat_interval):
            return True
        return bool(state.deactivate_node(node_id) and activate(node_id, heartbeat_interval))

    def register_locked(run_id: int, object_tree: Any) -> Any:
        """Lock the store: equal arrays of two messages are one object, which must not be deleted."""
        with store.lock_store:
            return register(run_id, object_tree)

    links: Any = import_module("flwr.server.superlink.linkstate.in_memory_linkstate")
    check = links.check_node_availability_for_in_message

    def check_unanswered(inquired_in_message_ids: set[str], **others: Any) -> Any:
        """Keep the reply of a node that has disconnected after it replied."""
        answered = inquired_in_message_ids & set(state.message_ins_id_to_message_res_id)
        unanswered = inquired_in_message_ids - answered
        found = check(
            inquired_in_message_ids=unanswered, **others
        )  # keeps those of connected nodes
        inquired_in_message_ids &= answered | unanswered
        return found

    links.check_node_availability_for_in_message = check_unanswered
    state.activate_node = activate_again
    store.preregister = register_locked


class _Keys:
    """The accepted public keys, in the format of the header."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._nodes: dict[str, str] = {}
        self._headers: frozenset[bytes] = frozenset()

    def __contains__(self, header: object) -> bool:
        return header in self._headers

    def register(self, keys: dict[str, str]) -> dict[str, str]:
        """Accept exactly these keys, and return their names by node id."""
        from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID

        for key in keys.values():
            if key not in self._nodes:  # Flower keeps keys; access depends on the headers
                node = self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key.encode(), 0)
                self._nodes[key] = str(node)
        self._headers = frozenset(b64encode(key.encode()) for key in keys.values())
        return {self._nodes[key]: name for name, key in keys.items()}


async def _serve(
    application: Any,
    public: socket.socket,
    local: socket.socket,
    options: dict[str, Any],
    keys: _Keys,
) -> None:
    secure = options["tls"] is not None
    public_app = PublicAccess(application, keys if secure else None, options["bytes_per_window"])
    local_app = LocalAccess(application, options["secret"])
    common: dict[str, Any] = {"access_log": False, "log_level": "warning", "ws": "none"}
    files = {}
    if secure:
        files = {
            "ssl_certfile": options["tls"]["certificate"],
            "ssl_keyfile": options["tls"]["key"],
        }
    local_server = _Server(uvicorn.Config(local_app, lifespan="on", **common))
    public_server = _Server(uvicorn.Config(public_app, lifespan="off", **common, **files))
    await asyncio.gather(local_server.serve(sockets=[local]), public_server.serve(sockets=[public]))


if __name__ == "__main__":
    main()
