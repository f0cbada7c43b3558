"""Use of Flower's internal interfaces, for the versions that ``pyproject.toml`` allows.

Flower starts a new Python process for every message and runs the program that the server sends in it. Here
our long-lived process takes the tasks itself, through the interface of Flower's own workers. This is fast,
and it reads only messages: a program that a server sends is never run.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE, TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.date import now
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedgmm.federation.flower.access import SECRET_HEADER
from fedgmm.federation.flower.supernode import fetch_faster
from fedgmm.federation.messages import LARGEST_MESSAGE

APP_FOLDER = Path(__file__).parent / "app"
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_HEARTBEAT = 10.0
_FEW_PARTS, _SMALLEST_PART = 64, 1024 * 1024  # Flower splits arrays into parts of 5 MB
_TASK_TIMEOUT = 30.0  # seconds for a task to appear after its run was started


class _SecretHeader:
    """Add the secret for the local port to every request."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        context.request.headers[SECRET_HEADER] = self._secret
        response: httpx.Response = call_next(context)
        return response


class _PartialReply:
    """A reply that may not have arrived completely."""

    def __init__(self, announced: Any, tree: Any, limit_bytes: int) -> None:
        self.message_id: str = announced.metadata.message_id
        self.request_id: str = announced.metadata.reply_to_message_id
        most = _FEW_PARTS + limit_bytes // _SMALLEST_PART
        # reading one more than allowed is enough to find that there are too many
        self._missing = [one.object_id for one in islice(iterate_object_tree(tree), most + 1)]
        self._too_many = len(self._missing) > most
        self._bytes_left = limit_bytes + _FEW_PARTS * _SMALLEST_PART
        self._parts: dict[str, bytes] = {}

    def is_complete(self, pull: Callable[[str], bytes]) -> bool:
        """Fetch the parts that have arrived; return whether the reply is complete.

        Raises:
            ValueError: the reply exceeds the largest message.
        """
        if self._too_many:
            raise ValueError("it has too many parts")
        while self._missing:
            try:
                part = pull(self._missing[-1])
            except ObjectUnavailableError:
                return False
            self._bytes_left -= len(part)
            if self._bytes_left < 0:
                raise ValueError("it is larger than the largest message")
            self._parts[self._missing.pop()] = part
        return True

    def message(self) -> FlowerMessage:
        message = inflate_object_from_contents(self.message_id, self._parts)
        if not isinstance(message, FlowerMessage):
            raise TypeError("it is not a message")
        message.metadata.__dict__["_message_id"] = self.message_id
        return message


class _CarefulGrid(HttpGrid):
    """A grid on which an unreadable or incomplete reply does not delay the replies of other nodes."""

    _partial: tuple[_PartialReply, ...] = ()
    limit_bytes: int = LARGEST_MESSAGE

    def disable_retries(self) -> None:
        """Raise errors at once: the SuperLink is on this machine, and the caller watches it."""
        self.__dict__["_retry_invoker"] = None

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[FlowerMessage]:
        """Return the complete replies to messages; an unreadable reply is returned as an error."""
        client, run_id, wanted = self._runtime_client, self.run.run_id, set(message_ids)
        partial = list(self._partial)
        # Flower forgets a request as soon as it has announced the reply
        if unanswered := wanted - {one.request_id for one in partial}:
            found = client.PullMessages(PullAppMessagesRequest(message_ids=unanswered))
            new = zip(found.messages_list, found.message_object_trees, strict=True)
            partial += [_PartialReply(message, tree, self.limit_bytes) for message, tree in new]
        pull = make_pull_object_fn_protobuf(client.PullObject, self.node, run_id)
        messages, rest = [], []
        for one in partial:
            if one.request_id not in wanted:
                continue  # its deadline has passed
            try:
                if not one.is_complete(pull):
                    rest.append(one)
                    continue
                self._confirm(one)
                messages.append(one.message())
            except Exception as error:  # a hostile sender can cause errors of any kind
                with contextlib.suppress(Exception):
                    self._confirm(one)
                messages.append(self._unreadable(one.request_id, error))
        self._partial = tuple(rest)
        return messages

    def _confirm(self, one: _PartialReply) -> None:
        """Confirm that a reply was received, so that Flower deletes its parts."""
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.run.run_id, message_object_id=one.message_id
            )
        )

    def _unreadable(self, request_id: str, error: Exception) -> FlowerMessage:
        metadata = Metadata(
            run_id=self.run.run_id,
            message_id="",
            src_node_id=self.node.node_id,
            dst_node_id=self.node.node_id,
            message_type=SYSTEM_MESSAGE_TYPE,
            group_id="",
            ttl=0,
            reply_to_message_id=request_id,
            created_at=now().timestamp(),
        )
        reason = f"{type(error).__name__}: {error}"[:200]
        return make_message(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))


def _address(port: int) -> str:
    return f"127.0.0.1:{port}"


def _worker_client(port: int, secret: str) -> RuntimeHttpClient:
    """Return a client that acquires tasks."""
    return RuntimeHttpClient.from_server_address(
        _address(port),
        True,
        None,
        [
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(
                master_secret=secret.encode(), protected_methods=[_ACQUIRE]
            ),
        ],
    )


def _token_client(port: int, token: str, component: str) -> RuntimeHttpClient:
    """Return a client that works on one task."""
    return RuntimeHttpClient.from_server_address(
        _address(port),
        True,
        None,
        [
            RuntimeVersionHttpInterceptor(component_name=component),
            RuntimeTokenHttpInterceptor(token),
        ],
    )


@contextlib.contextmanager
def _heartbeats(client: RuntimeHttpClient) -> Iterator[None]:
    """Send Flower regular heartbeats while a task is being worked on."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT):
            with contextlib.suppress(Exception):  # the next one may succeed
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    thread = threading.Thread(target=beat, daemon=True)
    with contextlib.suppress(Exception):
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    thread.start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def started_run(
    port: int, task_secret: str, control_secret: str, *, limit_bytes: int = LARGEST_MESSAGE
) -> Iterator[HttpGrid]:
    """Start our app on a SuperLink, acquire its task, and yield the grid that it works on.

    Args:
        port: local port of the SuperLink.
        task_secret: secret for acquiring tasks.
        control_secret: secret for starting runs.
        limit_bytes: size of the largest message that is fetched.
    """
    content = build_fab_from_disk(APP_FOLDER)
    control = ControlHttpClient.from_server_address(
        _address(port),
        True,
        None,
        [_SecretHeader(control_secret), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    with contextlib.closing(control):
        bundle = Fab(hashlib.sha256(content).hexdigest(), content, {})
        started = control.StartRun(StartRunRequest(fab=fab_to_proto(bundle)))
    if not started.HasField("run_id"):
        raise RuntimeError("Flower did not start the run; see its log.")
    token = _task_token(port, task_secret)
    grid = _CarefulGrid(_address(port), insecure=True, token=token)
    grid.limit_bytes = limit_bytes
    grid.disable_retries()
    client = grid._runtime_client
    status, details = SubStatus.FAILED, "The run was interrupted."
    try:
        with _heartbeats(client):
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id = task.task_id
            TaskIdentity.run_id = task.run.run_id
            TaskIdentity.node_id = SUPERLINK_NODE_ID
            grid.set_run(run_from_proto(task.run))
            yield grid
            status, details = SubStatus.COMPLETED, ""
    finally:
        with contextlib.suppress(Exception):
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
        grid.close()


def _task_token(port: int, secret: str) -> str:
    pause = threading.Event()
    with contextlib.closing(_worker_client(port, secret)) as worker:
        for _ in range(int(_TASK_TIMEOUT / 0.1)):
            request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            acquired = worker.AcquireTask(request)
            if acquired.HasField("task") and acquired.token:
                return str(acquired.token)
            pause.wait(0.1)
    raise RuntimeError("Flower did not hand out the task of the run; see its log.")


class Tasks:
    """The requests that a SuperNode has received, one at a time.

    Args:
        port: port of the SuperNode on this machine.
        secret: shared secret of the SuperNode and this process.
    """

    def __init__(self, port: int, secret: str) -> None:
        fetch_faster()
        self._port = port
        self._worker = _worker_client(port, secret)

    def close(self) -> None:
        """Close the connection."""
        self._worker.close()

    @contextlib.contextmanager
    def next(self) -> Iterator[Task | None]:
        """Yield the next request, or ``None``; heartbeats are sent until the block ends.

        Raises:
            httpx.HTTPError: the SuperNode does not respond.
        """
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        acquired = self._worker.AcquireTask(request)
        if not (acquired.HasField("task") and acquired.token):
            yield None
            return
        client = _token_client(self._port, acquired.token, "flwr-clientapp")
        with contextlib.closing(client), _heartbeats(client):
            yield Task(client)


class Task:
    """One request, which expects one reply."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        from flwr.supernode.runtime.run_clientapp import pull_task_input

        self._client = client
        # the program that the server sent with the message is ignored
        self._message, self._context, _, _ = pull_task_input(client)

    @property
    def content(self) -> RecordDict:
        """The records of the request."""
        return self._message.content

    def reply(self, content: RecordDict) -> None:
        """Send the reply and complete the task."""
        from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

        push_message(self._client, FlowerMessage(content, reply_to=self._message), self._context)
        push_task_output(self._client, self._context, SubStatus.COMPLETED, "")
