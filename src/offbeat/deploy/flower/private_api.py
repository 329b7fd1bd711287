"""Everything that offbeat uses of Flower beyond its public API, in one module.

Flower may change any of this in any release. `tests/deploy/test_flower_private_api.py` states what is
relied on, one test for each point, against the installed version.

- `FleetClient` is the client with which a SuperNode talks to its SuperLink, with the same authentication. A
  site uses it in its own process. Flower's own loop around it, `http_request_response`, ends the process when
  the SuperLink is away or refuses a node, and would start another process for every message.
- `GridClient` fetches replies object by object, because the grid's own `pull_messages` waits for objects that
  a site has not sent yet, accepts any size, and loses all replies of a call if one of them cannot be read.
- `ControlClient` is the client of Flower's command line. One connection registers all keys; each call of the
  command takes seconds.
- `ServerTask` acquires the task of a ServerApp in the server's own process, as Flower's SuperExec would
  do before it starts another process for it.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.errors import InputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

# Nothing of Flower is imported at module level: it takes seconds, which a command that only starts
# processes does not have to spend.

_HEARTBEAT_INTERVAL = 30.0  # seconds; Flower drops a node after two intervals
_KEY_REQUIRED, _KEY_REFUSED, _KEY_IN_USE = 2001, 2004, 23  # Flower's error codes
_RUN_ENDED_STATUS = 403
_PROJECT = """\
[project]
name = "offbeat-run"
version = "1.0.0"
description = "A run of offbeat, whose code is installed at the server and at each site"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "offbeat"

[tool.flwr.app.components]
serverapp = "offbeat_run:server"
clientapp = "offbeat_run:client"

[tool.flwr.app.config]
"""
APP_FILES: Mapping[str, Any] = {"pyproject.toml": _PROJECT.encode(), "offbeat_run.py": b""}


class Refusal(Enum):
    """Why a SuperLink did not do what was asked."""

    AWAY = "it cannot be reached"
    KEY_REQUIRED = "it accepts registered keys only"
    NOT_ACTIVATED = "it does not know the key, or counts its node as connected"
    UNAUTHORIZED = "it does not accept the signature of the request"
    RUN_ENDED = "the run is not running"
    KEY_IN_USE = "the key is registered"
    OTHER = "another reason"


class FlowerError(Exception):
    """A call to a SuperLink failed; the text is Flower's own."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


@contextlib.contextmanager
def _flower_errors() -> Iterator[None]:
    """Turn every error of a call into a `FlowerError`."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        try:
            facts = json.loads(error.response.text)
            code, text = facts.get("code"), str(facts.get("detail") or facts.get("message") or "")
        except (ValueError, AttributeError):
            code, text = None, ""
        codes = {
            _KEY_REQUIRED: Refusal.KEY_REQUIRED,
            _KEY_REFUSED: Refusal.NOT_ACTIVATED,
            _KEY_IN_USE: Refusal.KEY_IN_USE,
        }
        statuses = {401: Refusal.UNAUTHORIZED, _RUN_ENDED_STATUS: Refusal.RUN_ENDED}
        found = codes.get(code) or statuses.get(status) or (Refusal.AWAY if status >= 500 else Refusal.OTHER)
        raise FlowerError(found, f"HTTP status {status}{f', {text}' if text else ''}") from None
    except (httpx.HTTPError, OSError) as error:
        raise FlowerError(Refusal.AWAY, str(error) or type(error).__name__) from None
    except (ValueError, RuntimeError) as error:
        raise FlowerError(Refusal.OTHER, str(error)) from None


class PendingMessage(NamedTuple):
    """A message for this node: its kind, and the objects that it consists of."""

    message_id: str
    run_id: int
    kind: str
    ttl: float  # seconds
    object_ids: list[str]
    message: Any  # Flower's own, without content


class MissingObjectError(Exception):
    """The SuperLink no longer holds an object of a message."""


class FleetClient:
    """The calls of a SuperNode; each raises a `FlowerError` if it fails, and none is repeated."""

    heartbeat_interval = _HEARTBEAT_INTERVAL

    def __init__(self, address: str, authority: Path | None, key: "EllipticCurvePrivateKey") -> None:
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        certificate = None if authority is None else authority.read_bytes()
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ]
        self._public_key = public_key_to_bytes(key.public_key())
        self._client = FleetHttpClient.from_server_address(
            address, certificate is None, certificate, interceptors
        )
        self._node: Any = None

    def register(self) -> None:
        """Register the key of this node, which a SuperLink without registered keys allows."""
        from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest

        try:
            with _flower_errors():
                self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public_key))
        except FlowerError as error:
            if error.refusal is not Refusal.KEY_IN_USE:
                raise

    def activate(self) -> int:
        """Connect this node; return its ID."""
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.proto.node_pb2 import Node

        with _flower_errors():
            response = self._client.ActivateNode(
                ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=_HEARTBEAT_INTERVAL)
            )
        self._node = Node(node_id=response.node_id)
        return int(response.node_id)

    def deactivate(self, node: int) -> None:
        """Say that a node with this key has ended; only for a caller that knows that it has."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        with _flower_errors():
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    def heartbeat(self) -> bool:
        """Say that this node is alive; return whether the SuperLink knows it."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        with _flower_errors():
            request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=_HEARTBEAT_INTERVAL)
            return bool(self._client.SendNodeHeartbeat(request).success)

    def pull(self) -> PendingMessage | None:
        """Return the next message for this node, which the SuperLink gives out once."""
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        with _flower_errors():
            response = self._client.PullMessages(PullMessagesRequest(node=self._node))
            if not response.messages_list:
                return None
            message = message_from_proto(response.messages_list[0])
            about = message.metadata
            object_ids = _object_ids(response.message_object_trees[0])
        return PendingMessage(
            about.message_id, about.run_id, about.message_type, about.ttl, object_ids, message
        )

    def pull_object(self, run_id: int, object_id: str) -> bytes | None:
        """Return the content of an object, or None while the SuperLink does not have it."""
        with _flower_errors():
            return _pull_object(self._client, self._node, run_id, object_id)

    def confirm(self, message: PendingMessage) -> None:
        """Tell the SuperLink that it may delete a message."""
        with _flower_errors():
            _confirm(self._client, self._node, message.run_id, message.message_id)

    def send(self, reply: "OutgoingReply", seconds: float) -> None:
        """Send a reply after `seconds` of work; a repetition goes on where the last call failed."""
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import PushObjectRequest

        with _flower_errors():
            if reply.session is None:
                response = self._client.PushMessages(
                    PushMessagesRequest(
                        node=self._node,
                        messages_list=[message_to_proto(remove_content_from_message(reply.message))],
                        message_object_trees=[reply.tree],
                        clientapp_runtime_list=[seconds],
                    )
                )
                reply.session, reply.missing = response.session_id, list(response.objects_to_push)
            while reply.missing:
                self._client.PushObject(
                    PushObjectRequest(
                        node=self._node,
                        run_id=reply.message.metadata.run_id,
                        object_id=reply.missing[0],
                        object_content=reply.objects[reply.missing[0]].deflate(),
                        session_id=reply.session,
                    )
                )
                reply.missing.pop(0)

    def close(self) -> None:
        self._client.close()


class OutgoingReply:
    """A reply to a message, and how much of it was sent."""

    def __init__(self, to: PendingMessage, records: Any) -> None:
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )

        self.message = Message(records, reply_to=to.message)
        with no_object_id_recompute():
            self.message.metadata.__dict__["_message_id"] = self.message.object_id
            self.objects, self.tree = get_all_nested_objects(self.message), get_object_tree(self.message)
        self.session: str | None = None  # of the SuperLink, once it has the message
        self.missing: list[str] = []  # the objects that it does not have


def _object_ids(tree: Any) -> list[str]:
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    return list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree)))


def _pull_object(client: Any, node: Any, run_id: int, object_id: str) -> bytes | None:
    from flwr.proto.message_pb2 import PullObjectRequest

    response = client.PullObject(PullObjectRequest(node=node, run_id=run_id, object_id=object_id))
    if not response.object_found:
        raise MissingObjectError("one of its objects is missing.")
    return bytes(response.object_content) if response.object_available else None


def _confirm(client: Any, node: Any, run_id: int, message_id: str) -> None:
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

    client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=message_id)
    )


class PendingReply(NamedTuple):
    """A reply that the SuperLink holds: who is said to have sent it, and the objects that it consists of."""

    message_id: str
    reply_to: str  # the ID of the message that it answers
    node: int
    object_ids: list[str]
    error: str | None  # an error that came in place of content


class GridClient:
    """The calls of a `Grid` with which replies are fetched object by object."""

    def __init__(self, grid: Any, timeout: float) -> None:
        """A call gives up after `timeout` seconds; by default Flower would repeat it without end."""
        if not hasattr(grid, "_retry_invoker"):
            raise InputError("a Flower simulation has no sites to send to: run this on a SuperLink.")
        grid._retry_invoker.max_time = timeout
        self._grid = grid

    def list_replies(self, message_ids: Sequence[str]) -> list[PendingReply]:
        """Return the replies to these messages that the SuperLink has."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        response = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        replies = []
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            metadata, error = message.metadata, None
            if message.HasField("error"):
                error = f"code {message.error.code}, {message.error.reason or 'no reason given'}"
            replies.append(
                PendingReply(
                    metadata.message_id,
                    metadata.reply_to_message_id,
                    metadata.src_node_id,
                    _object_ids(tree),
                    error,
                )
            )
        return replies

    def pull_object(self, object_id: str) -> bytes | None:
        """Return the content of an object, or None while its sender has not sent it."""
        return _pull_object(self._grid._runtime_client, self._grid.node, self._grid.run.run_id, object_id)

    def confirm(self, reply: PendingReply) -> None:
        """Tell the SuperLink that it may delete a reply."""
        _confirm(self._grid._runtime_client, self._grid.node, self._grid.run.run_id, reply.message_id)


def array_bytes(objects: Mapping[str, bytes]) -> int:
    """Return how many bytes the arrays of a message will have once it is put together.

    An array lists its chunks, and may list a chunk many times: the total has to be known before any array
    is built.
    """
    total = 0
    for content in objects.values():
        end = content.index(b"\x00")
        kind, children, _ = content[:end].decode().split(" ")
        if kind == "Array":
            ids = children.split(",")
            total += sum(
                len(objects[ids[index]]) for index in json.loads(content[end + 1 :])["arraychunk_ids"]
            )
    return total


def validate_objects(objects: Mapping[str, bytes]) -> None:
    """Raise an exception if an object is malformed."""
    from flwr.supercore.inflatable.inflatable_utils import validate_object_content

    for content in objects.values():
        validate_object_content(content)


def build_message(message_id: str, objects: Mapping[str, bytes]) -> Any:
    """Put a message together from its objects."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    return inflate_object_from_contents(message_id, objects, keep_object_contents=True)


def run_ended_error() -> type[BaseException]:
    """Return the exception that calls of the grid raise once Flower has ended the run."""
    from flwr.supercore.run import RunNotRunningException

    error: type[BaseException] = RunNotRunningException
    return error


class ControlClient:
    """The calls of Flower's command line; each raises a `FlowerError` if it fails."""

    def __init__(self, address: str, authority: Path | None) -> None:
        from flwr.supercore.control.control_http_client import ControlHttpClient
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

        certificate = None if authority is None else authority.read_bytes()
        self._client = ControlHttpClient.from_server_address(
            address,
            certificate is None,
            certificate,
            [RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def registered_keys(self) -> dict[bytes, int]:
        """Return the public keys that may connect, as PEM, and the IDs of their nodes."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with _flower_errors():
            nodes = self._client.ListNodes(ListNodesRequest()).nodes_info
        return {bytes(node.public_key): int(node.node_id) for node in nodes if node.status != "unregistered"}

    def register_key(self, public_key: bytes) -> None:
        """Let a node with this public key, as PEM, connect; one that was unregistered stays so."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        try:
            with _flower_errors():
                self._client.RegisterNode(RegisterNodeRequest(public_key=public_key))
        except FlowerError as error:
            if error.refusal is not Refusal.KEY_IN_USE:
                raise

    def unregister_key(self, node: int) -> None:
        """Do not let the key of a node connect any more."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        with _flower_errors():
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node))

    def submit_run(self) -> int:
        """Submit a run whose code is not in its app; return its ID."""
        from flwr.cli.build import build_fab_from_files
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab

        content, _ = build_fab_from_files(APP_FILES)
        with _flower_errors():
            return int(self._client.StartRun(StartRunRequest(fab=Fab(content=content))).run_id)

    def stop_run(self, run_id: int) -> None:
        """End a run, so that sites do not go on working for it."""
        from flwr.proto.control_pb2 import StopRunRequest

        with _flower_errors():
            self._client.StopRun(StopRunRequest(run_id=run_id))

    def close(self) -> None:
        self._client.close()


class ServerTask:
    """The task of a ServerApp, acquired by this process; `grid` reaches the sites of its run."""

    def __init__(self, grid: Any, run_id: int, heartbeat: Any) -> None:
        self.grid, self.run_id, self._heartbeat = grid, run_id, heartbeat

    def finish(self, error: str | None) -> None:
        """Say how the task ended, and disconnect; a SuperLink that is away is not waited for."""
        from flwr.common.constant import SubStatus
        from flwr.proto.runtime_pb2 import PushTaskOutputRequest

        self.grid._retry_invoker.max_tries = 1
        status = SubStatus.COMPLETED if error is None else SubStatus.FAILED
        with contextlib.suppress(Exception):
            self.grid._runtime_client.PushTaskOutput(
                PushTaskOutputRequest(sub_status=status, details=error or "")
            )
        if self._heartbeat.is_running:
            self._heartbeat.stop()
        self.grid.close()


def acquire_server_task(address: str, authority: Path | None) -> ServerTask | None:
    """Acquire the task of any run that was submitted and not begun; None if there is none now.

    All runs that offbeat submits are alike, so it does not matter which one a server gets.
    """
    from flwr.common.serde import run_from_proto
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import HttpGrid

    certificate = None if authority is None else authority.read_bytes()
    with (
        _flower_errors(),
        contextlib.closing(
            RuntimeHttpClient.from_server_address(
                address,
                certificate is None,
                certificate,
                [RuntimeVersionHttpInterceptor(component_name="SuperExec")],
            )
        ) as client,
    ):
        acquired = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
    if not acquired.token:
        return None
    grid = HttpGrid(address, certificate is None, certificate, token=acquired.token)
    with _flower_errors():
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    run = run_from_proto(given.run)
    grid.set_run(run)
    # New messages get these numbers, which are the same in the whole process.
    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, run.run_id
    TaskIdentity.node_id = given.context.node_id
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
    heartbeat.start()
    return ServerTask(grid, run.run_id, heartbeat)
