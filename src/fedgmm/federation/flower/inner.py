"""All touches of Flower's inner interfaces; written for the versions that ``pyproject.toml`` allows.

Flower starts a new Python process for every message, and runs in it whatever program the server sends.
Here the long-lived process takes its tasks itself, by the same interface as Flower's own workers: it is
fast, and of what a server sends only messages are read, never a program.
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

from fedgmm.federation.flower.guard import SECRET_HEADER
from fedgmm.federation.flower.pace import fetch_sooner
from fedgmm.federation.messages import LARGEST_MESSAGE

APP_FOLDER = Path(__file__).parent / "app"
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_HEARTBEAT = 10.0
_FEW_PIECES, _SMALLEST_PIECE = 64, 1024 * 1024  # Flower cuts arrays into pieces of 5 MB
_PATIENCE = 30.0  # seconds for a task to appear after its run was started


class _Secret:
    """Shows the secret at the private door."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        context.request.headers[SECRET_HEADER] = self._secret
        response: httpx.Response = call_next(context)
        return response


class _Arriving:
    """An answer of which not all pieces may be there yet."""

    def __init__(self, told: Any, tree: Any, limit_bytes: int) -> None:
        self.number: str = told.metadata.message_id
        self.question: str = told.metadata.reply_to_message_id
        # one more than is allowed is enough to know
        most = _FEW_PIECES + limit_bytes // _SMALLEST_PIECE
        self._missing = [one.object_id for one in islice(iterate_object_tree(tree), most + 1)]
        self._too_many = len(self._missing) > most
        self._room = limit_bytes + _FEW_PIECES * _SMALLEST_PIECE
        self._pieces: dict[str, bytes] = {}

    def is_whole(self, pull: Callable[[str], bytes]) -> bool:
        """Fetch what is there.

        Raises:
            ValueError: it is larger than any message may be.
        """
        if self._too_many:
            raise ValueError("it is in too many pieces")
        while self._missing:
            try:
                piece = pull(self._missing[-1])
            except ObjectUnavailableError:
                return False
            self._room -= len(piece)
            if self._room < 0:
                raise ValueError("it is larger than the largest message")
            self._pieces[self._missing.pop()] = piece
        return True

    def message(self) -> FlowerMessage:
        message = inflate_object_from_contents(self.number, self._pieces)
        if not isinstance(message, FlowerMessage):
            raise TypeError("it is no message")
        message.metadata.__dict__["_message_id"] = self.number
        return message


class _CarefulGrid(HttpGrid):
    """A grid on which an answer that cannot be read, or never arrives whole, holds nobody up."""

    _arriving: tuple[_Arriving, ...] = ()
    limit_bytes: int = LARGEST_MESSAGE

    def fail_at_once(self) -> None:
        """Do not try again behind our back: the engine is on this machine, and we look after it."""
        self.__dict__["_retry_invoker"] = None

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[FlowerMessage]:
        """Answers to messages; an answer that cannot be read comes as an error."""
        client, run_id, wanted = self._runtime_client, self.run.run_id, set(message_ids)
        arriving = list(self._arriving)
        # Flower forgets a question as soon as it has announced the answer
        if unanswered := wanted - {one.question for one in arriving}:
            found = client.PullMessages(PullAppMessagesRequest(message_ids=unanswered))
            new = zip(found.messages_list, found.message_object_trees, strict=True)
            arriving += [_Arriving(told, tree, self.limit_bytes) for told, tree in new]
        pull = make_pull_object_fn_protobuf(client.PullObject, self.node, run_id)
        messages, rest = [], []
        for one in arriving:
            if one.question not in wanted:
                continue  # nobody waits for it any more
            try:
                if not one.is_whole(pull):
                    rest.append(one)
                    continue
                self._put_away(one)
                messages.append(one.message())
            except Exception as error:  # whatever a hostile sender made of it
                with contextlib.suppress(Exception):
                    self._put_away(one)
                messages.append(self._unreadable(one.question, error))
        self._arriving = tuple(rest)
        return messages

    def _put_away(self, one: _Arriving) -> None:
        """Flower need not keep the pieces any longer."""
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.run.run_id, message_object_id=one.number
            )
        )

    def _unreadable(self, question: str, error: Exception) -> FlowerMessage:
        metadata = Metadata(
            run_id=self.run.run_id,
            message_id="",
            src_node_id=self.node.node_id,
            dst_node_id=self.node.node_id,
            message_type=SYSTEM_MESSAGE_TYPE,
            group_id="",
            ttl=0,
            reply_to_message_id=question,
            created_at=now().timestamp(),
        )
        reason = f"{type(error).__name__}: {error}"[:200]
        return make_message(metadata=metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))


def _address(port: int) -> str:
    return f"127.0.0.1:{port}"


def _worker_client(port: int, secret: str) -> RuntimeHttpClient:
    """Who asks for tasks."""
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
    """Who works on a task."""
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
def _alive(client: RuntimeHttpClient) -> Iterator[None]:
    """Tell Flower now and then that a task is being worked on."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT):
            with contextlib.suppress(Exception):  # the next one may get through
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
    port: int, task_secret: str, door_secret: str, *, limit_bytes: int = LARGEST_MESSAGE
) -> Iterator[HttpGrid]:
    """Start our app on a SuperLink, take its task, and yield the grid that it works on.

    Args:
        port: of the private door.
        task_secret: for taking tasks.
        door_secret: for starting runs.
        limit_bytes: the largest message that is fetched.
    """
    content = build_fab_from_disk(APP_FOLDER)
    control = ControlHttpClient.from_server_address(
        _address(port),
        True,
        None,
        [_Secret(door_secret), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    with contextlib.closing(control):
        bundle = Fab(hashlib.sha256(content).hexdigest(), content, {})
        started = control.StartRun(StartRunRequest(fab=fab_to_proto(bundle)))
    if not started.HasField("run_id"):
        raise RuntimeError("Flower did not start the run; see its log.")
    token = _task_token(port, task_secret)
    grid = _CarefulGrid(_address(port), insecure=True, token=token)
    grid.limit_bytes = limit_bytes
    grid.fail_at_once()
    client = grid._runtime_client
    status, details = SubStatus.FAILED, "It was interrupted."
    try:
        with _alive(client):
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
        for _ in range(int(_PATIENCE / 0.1)):
            request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            answer = worker.AcquireTask(request)
            if answer.HasField("task") and answer.token:
                return str(answer.token)
            pause.wait(0.1)
    raise RuntimeError("Flower did not hand out the task of the run; see its log.")


class Tasks:
    """Questions that a SuperNode has taken in, one after the other.

    Args:
        port: of the SuperNode's interface on this machine.
        secret: between it and us.
    """

    def __init__(self, port: int, secret: str) -> None:
        fetch_sooner()
        self._port = port
        self._worker = _worker_client(port, secret)

    def close(self) -> None:
        """End the connection."""
        self._worker.close()

    @contextlib.contextmanager
    def next(self) -> Iterator[Task | None]:
        """The next question, if there is one; while it is held, Flower is told that we work on it.

        Raises:
            httpx.HTTPError: the SuperNode is not there.
        """
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        answer = self._worker.AcquireTask(request)
        if not (answer.HasField("task") and answer.token):
            yield None
            return
        client = _token_client(self._port, answer.token, "flwr-clientapp")
        with contextlib.closing(client), _alive(client):
            yield Task(client)


class Task:
    """One question, and the way back for its answer."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        from flwr.supernode.runtime.run_clientapp import pull_task_input

        self._client = client
        # the program that the server sent along is dropped here unread
        self._message, self._context, _, _ = pull_task_input(client)

    @property
    def content(self) -> RecordDict:
        """What was asked."""
        return self._message.content

    def reply(self, content: RecordDict) -> None:
        """Answer, and put the task away."""
        from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

        push_message(self._client, FlowerMessage(content, reply_to=self._message), self._context)
        push_task_output(self._client, self._context, SubStatus.COMPLETED, "")
