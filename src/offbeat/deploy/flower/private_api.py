"""Everything that offbeat uses of Flower beyond its public API, in one module.

Flower may change any of this in any release. `tests/deploy/test_flower_private_api.py` states what is
relied on, one test for each point, against the installed version.

- `FleetClient` is the client with which a SuperNode talks to its SuperLink, with the same authentication. A
  site uses it in its own process. Flower's own loop around it, `http_request_response`, ends the process when
  the SuperLink is away or refuses a node, and would start another process for every message.
- `SuperLink` is Flower's SuperLink as an ASGI application. Each of the nine layers of Flower's middleware
  starts tasks and copies for each request, so the requests that an update consists of are given to Flower's
  handlers directly.
- `begin_task` uses the client of Flower's command line, each call of which takes seconds.
- `ServerTask` is the task of a ServerApp, acquired in the server's own process, as Flower's SuperExec would
  do before it starts another process for it. It has the calls of Flower's grid, but fetches replies object by
  object: the grid waits for objects that a site has not sent yet, accepts any size, loses all replies of a
  call if one of them cannot be read, and ends the process when the SuperLink does not know its token.
"""

import base64
import contextlib
import functools
import hashlib
import importlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

# Nothing of Flower is imported at module level: it takes seconds, which a command that only starts
# processes does not have to spend.

_HEARTBEAT_INTERVAL = 30.0  # seconds; Flower drops a node after two intervals
_KEY_REFUSED, _KEY_IN_USE = 2004, 23  # Flower's error codes
_KEEP_ALIVE = 60.0  # seconds; the gateway keeps the connection of a site for longer
_OBJECT_TYPE = "ArrayChunk"  # the one of Flower's objects that holds plain bytes
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


@functools.cache
def _proto() -> Any:
    """Flower's requests and responses, by name."""
    files = ("control", "fab", "fleet", "heartbeat", "message", "node", "recorddict", "runtime")
    modules = [importlib.import_module(f"flwr.proto.{name}_pb2") for name in files]
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


class Refusal(Enum):
    """Why a SuperLink did not do what was asked."""

    AWAY = "it cannot be reached"
    NOT_ACTIVATED = "it counts a node with this key as connected"
    UNAUTHORIZED = "it does not accept the signature of the request"
    RUN_ENDED = "the run is not running"
    KEY_IN_USE = "the key is registered"
    FAILED = "it has an error of its own"
    OTHER = "another reason"


class FlowerError(Exception):
    """A call to a SuperLink failed; the text is Flower's own."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal
        self.is_away = refusal in (Refusal.AWAY, Refusal.FAILED)  # the same call may succeed later


def _call(client: Any, name: str, request: str | None = None, /, **fields: Any) -> Any:
    """Make a call of one of Flower's clients; every error becomes a `FlowerError`."""
    import httpx

    try:
        return getattr(client, name)(getattr(_proto(), request or f"{name}Request")(**fields))
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        try:
            facts = json.loads(error.response.text)
            code, text = facts.get("code"), str(facts.get("detail") or facts.get("message") or "")
        except (ValueError, AttributeError):
            code, text = None, ""
        codes = {_KEY_REFUSED: Refusal.NOT_ACTIVATED, _KEY_IN_USE: Refusal.KEY_IN_USE}
        statuses = {401: Refusal.UNAUTHORIZED, 403: Refusal.RUN_ENDED, 500: Refusal.FAILED}
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
    metadata: Any  # all of this as Flower has it

    @property
    def node(self) -> int:
        """The node that it was sent to."""
        return int(self.metadata.dst_node_id)


def _connect(
    kind: Any, address: str, component: str, *interceptors: Any, authority: Path | None = None
) -> Any:
    """One of Flower's clients; a component says which version of Flower it has."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    certificate = None if authority is None else authority.read_bytes()
    version = RuntimeVersionHttpInterceptor(component_name=component)
    return kind.from_server_address(address, certificate is None, certificate, [version, *interceptors])


class MissingObjectError(Exception):
    """The SuperLink no longer holds an object of a message."""


class FleetClient:
    """The calls of a SuperNode; each raises a `FlowerError` if it fails, and none is repeated."""

    heartbeat_interval = _HEARTBEAT_INTERVAL

    def __init__(self, address: str, authority: Path | None, key: "EllipticCurvePrivateKey") -> None:
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        signer = NodeAuthHttpInterceptor(key, key.public_key())
        self._public_key = public_key_to_bytes(key.public_key())
        self._client = _connect(FleetHttpClient, address, "SuperNode", signer, authority=authority)
        # Longer than httpx keeps idle connections: a TLS handshake costs more than a request.
        self._client._client._transport._pool._keepalive_expiry = _KEEP_ALIVE
        self._node: Any = None

    def register(self) -> None:
        """Register the key of this node; it may be registered already."""
        try:
            _call(self._client, "RegisterNode", "RegisterNodeFleetRequest", public_key=self._public_key)
        except FlowerError as error:
            if error.refusal is not Refusal.KEY_IN_USE:
                raise

    def activate(self) -> int:
        """Connect this node; return its ID."""
        fields = {"public_key": self._public_key, "heartbeat_interval": _HEARTBEAT_INTERVAL}
        response = _call(self._client, "ActivateNode", **fields)
        self._node = _proto().Node(node_id=response.node_id)
        return int(response.node_id)

    def deactivate(self, node: int) -> None:
        """Say that a node with this key has ended; only for a caller that knows that it has."""
        _call(self._client, "DeactivateNode", node_id=node)

    def heartbeat(self) -> bool:
        """Say that this node is alive; return whether the SuperLink knows it."""
        fields = {"node": self._node, "heartbeat_interval": _HEARTBEAT_INTERVAL}
        return bool(_call(self._client, "SendNodeHeartbeat", **fields).success)

    def pull(self) -> PendingMessage | None:
        """Return the next message for this node, for which the gateway waits some seconds.

        The SuperLink gives it out once.
        """
        response = _call(self._client, "PullMessages", node=self._node)
        if not response.messages_list:
            return None
        about = response.messages_list[0].metadata
        object_ids = _object_ids(response.message_object_trees[0])
        return PendingMessage(
            about.message_id, about.run_id, about.message_type, about.ttl, object_ids, about
        )

    def pull_object(self, run_id: int, object_id: str) -> bytes | None:
        """Return the content of an object, or None while the SuperLink does not have it."""
        return _pull_object(self._client, self._node, run_id, object_id)

    def send(self, reply: "OutgoingReply", seconds: float) -> None:
        """Send a reply after `seconds` of work; a repetition goes on where the last call failed."""
        if reply.session is None:
            response = _call(
                self._client,
                "PushMessages",
                node=self._node,
                messages_list=[reply.message],
                message_object_trees=[_object_tree(reply.objects)],
                clientapp_runtime_list=[seconds],
            )
            reply.session, reply.missing = response.session_id, list(response.objects_to_push)
        run_id = reply.message.metadata.run_id
        while reply.missing:
            content = reply.objects[reply.missing[0]]
            _push_object(self._client, self._node, run_id, reply.session, reply.missing[0], content)
            reply.missing.pop(0)

    def close(self) -> None:
        self._client.close()


class OutgoingReply:
    """A reply to a message, and how much of it was sent; the first of its objects names the others."""

    def __init__(self, to: PendingMessage, message_id: str, objects: Mapping[str, bytes]) -> None:
        about = to.metadata
        # It has the times of the message that it answers, so a site's clock does not matter.
        self.message = _message(
            message_id=message_id,
            reply_to_message_id=to.message_id,
            run_id=to.run_id,
            src_node_id=about.dst_node_id,
            dst_node_id=about.src_node_id,
            dst_task_id=about.src_task_id,
            message_type=to.kind,
            group_id=about.group_id,
            created_at=about.created_at,
            ttl=to.ttl,
        )
        self.objects = objects
        self.session: str | None = None  # of the SuperLink, once it has the message
        self.missing: list[str] = []  # the objects that it does not have


def _message(**metadata: Any) -> Any:
    """Return a message whose content is only in its objects."""
    return _proto().Message(metadata=_proto().Metadata(**metadata), content=_proto().RecordDict())


def _object_tree(objects: Mapping[str, bytes]) -> Any:
    first, *others = objects
    return _proto().ObjectTree(
        object_id=first, children=[_proto().ObjectTree(object_id=each) for each in others]
    )


def _push_object(client: Any, node: Any, run_id: int, session: str, object_id: str, content: bytes) -> None:
    # Whether it was stored is not looked at: an object that is sent again, after a response was lost, is not.
    fields = {"object_id": object_id, "object_content": content, "session_id": session}
    _call(client, "PushObject", node=node, run_id=run_id, **fields)


def _object_ids(tree: Any) -> list[str]:
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    return list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree)))


def _pull_object(client: Any, node: Any, run_id: int, object_id: str) -> bytes | None:
    response = _call(client, "PullObject", node=node, run_id=run_id, object_id=object_id)
    if not response.object_found:
        raise MissingObjectError("one of its objects is missing.")
    return bytes(response.object_content) if response.object_available else None


class PendingReply(NamedTuple):
    """A reply that the SuperLink holds: who is said to have sent it, and the objects that it consists of."""

    message_id: str
    reply_to: str  # the ID of the message that it answers
    node: int
    object_ids: list[str]
    error: str | None  # an error that came in place of content


class ServerTask:
    """The task of a ServerApp, acquired by this process, and its calls; each may raise a `FlowerError`."""

    def __init__(self, client: Any, run_id: int, task_id: int, heartbeat: Any = None) -> None:
        from flwr.common.constant import SUPERLINK_NODE_ID

        self.run_id = run_id
        self._client, self._task_id, self._heartbeat = client, task_id, heartbeat
        self._node = _proto().Node(node_id=SUPERLINK_NODE_ID)

    def nodes(self) -> dict[int, bytes]:
        """Return the nodes that are connected, and their public keys as PEM."""
        nodes = _call(self._client, "GetNodes").nodes
        return {int(node.node_id): bytes(node.public_key) for node in nodes}

    def push(self, node: int, kind: str, message_id: str, objects: Mapping[str, bytes], ttl: float) -> bool:
        """Send a message to a node; return whether the SuperLink accepted it."""
        message = _message(
            message_id=message_id,
            run_id=self.run_id,
            src_node_id=self._node.node_id,
            dst_node_id=node,
            src_task_id=self._task_id,
            message_type=kind,
            created_at=time.time(),
            ttl=ttl,
        )
        fields = {"messages_list": [message], "message_object_trees": [_object_tree(objects)]}
        response = _call(self._client, "PushMessages", "PushAppMessagesRequest", **fields)
        for each in response.objects_to_push:
            _push_object(self._client, self._node, self.run_id, response.session_id, each, objects[each])
        return list(response.message_ids) == [message_id]

    def list_replies(self, message_ids: Sequence[str]) -> list[PendingReply]:
        """Return the replies to these messages that the SuperLink has."""
        try:
            return self._list_replies(message_ids)
        except FlowerError as error:
            if error.refusal is not Refusal.FAILED:
                raise
        # A SuperLink that keeps its state in memory fails if it has deleted any of the messages.
        self._list_replies([])
        found = []
        for message_id in message_ids:
            try:
                found += self._list_replies([message_id])
            except FlowerError as error:
                if error.refusal is not Refusal.FAILED:
                    raise
                gone = "the SuperLink does not have the message any more"
                found.append(PendingReply("", message_id, 0, [], gone))
        return found

    def _list_replies(self, message_ids: Sequence[str]) -> list[PendingReply]:
        response = _call(self._client, "PullMessages", "PullAppMessagesRequest", message_ids=message_ids)
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
        return _pull_object(self._client, self._node, self.run_id, object_id)

    def delete(self, message_id: str) -> None:
        """Let the SuperLink delete the objects of a message, which it would keep until the run ends."""
        fields = {"run_id": self.run_id, "message_object_id": message_id}
        _call(self._client, "ConfirmMessageReceived", node=self._node, **fields)

    def finish(self, error: str | None) -> None:
        """Say how the task ended, and disconnect; a SuperLink that is away is not waited for."""
        from flwr.common.constant import SubStatus

        status = SubStatus.COMPLETED if error is None else SubStatus.FAILED
        with contextlib.suppress(FlowerError):
            _call(self._client, "PushTaskOutput", sub_status=status, details=error or "")
        if self._heartbeat.is_running:
            self._heartbeat.stop()
        self._client.close()


def begin_task(address: str, last: int | None) -> ServerTask:
    """Submit a run, whose code is not in its app, and acquire its task.

    The run `last` is ended, so that sites stop working for it. All runs that offbeat submits are alike: it
    does not matter which one of those that were not begun a server gets.
    """
    from flwr.cli.build import build_fab_from_files
    from flwr.supercore.constant import TaskType
    from flwr.supercore.control.control_http_client import ControlHttpClient
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    content, _ = build_fab_from_files(APP_FILES)
    with contextlib.closing(_connect(ControlHttpClient, address, "flwr CLI")) as control:
        if last is not None:
            with contextlib.suppress(FlowerError):
                _call(control, "StopRun", run_id=last)
        _call(control, "StartRun", fab=_proto().Fab(content=content))
    with contextlib.closing(_connect(RuntimeHttpClient, address, "SuperExec")) as asking:
        acquired = _call(asking, "AcquireTask", supported_task_types=[TaskType.SERVER_APP])
    if not acquired.token:
        raise FlowerError(Refusal.OTHER, "the SuperLink has no task for a server")
    token = RuntimeTokenHttpInterceptor(token=acquired.token)
    client = _connect(RuntimeHttpClient, address, "flwr-serverapp", token)
    given = _call(client, "PullTaskInput")
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    return ServerTask(client, int(given.run.run_id), int(given.task_id), heartbeat)


def wrap_object(body: bytes, children: Sequence[str] = ()) -> bytes:
    """Return bytes as one of Flower's objects, which may name others; a SuperLink checks the form."""
    return f"{_OBJECT_TYPE} {','.join(children)} {len(body)}\0".encode() + body


def unwrap_object(content: bytes) -> tuple[list[str], bytes]:
    """Return the IDs that an object names, and its bytes; a `ValueError` is raised for any other object."""
    head, divider, body = content.partition(b"\0")
    kind, children, length = head.decode("ascii").split(" ")
    if not divider or kind != _OBJECT_TYPE or length != str(len(body)):
        raise ValueError("another form of object")
    return [each for each in children.split(",") if each], body


def object_id(content: bytes) -> str:
    """Return the ID that Flower gives an object."""
    return hashlib.sha256(content).hexdigest()


_Handler = Callable[[Any, Any], Any]  # of a request and its caller


class SuperLink:
    """Flower's SuperLink in this process, as three ASGI applications.

    `app` is Flower's own. `fleet` is for requests of nodes whose signature somebody has verified, and
    `runtime` for those of a server; both answer without Flower's middleware what each update needs.
    """

    def __init__(self) -> None:
        from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
        from flwr.superlink.main import create_app
        from flwr.superlink.servicer.fleet import fleet_handlers as fleet
        from flwr.superlink.servicer.runtime import runtime_handlers as runtime

        # Flower starts no process, and keeps its state in memory, which takes a third of the time of a
        # database on disk. All that has to outlast it is in the server's journal. Only this machine reaches
        # it, so it needs no TLS; which keys may connect is decided by the gateway.
        options = ["--isolation", "process", "--database", ":flwr-in-memory:", "--insecure"]
        sys.argv = ["flower-superlink", *options, "--disable-runtime-dependency-installation"]
        log = logging.getLogger("flwr")
        log.setLevel(logging.ERROR)  # it would warn of all that the gateway does in its place
        self.app: Any = create_app(_parse_superlink_lifespan_config(), SuperLinkLifespan)
        log.setLevel(logging.WARNING)  # it would log every request
        self.fleet = functools.partial(self._answer, "/v1/fleet/", self._check_node)
        self.runtime = functools.partial(self._answer, "/v1/runtime/", self._check_task)
        self._state = state = self.app.state.linkstate_factory.state()
        self._handlers: dict[str, _Handler] = {  # of a request, and of whose it is
            "/v1/fleet/pull-messages": lambda it, _: fleet.pull_messages(it, state, state.object_store),
            "/v1/fleet/push-messages": lambda it, _: fleet.push_messages(it, state),
            "/v1/fleet/push-object": lambda it, _: fleet.push_object(it, state),
            "/v1/fleet/pull-object": lambda it, _: fleet.pull_object(it, state),
            "/v1/fleet/send-node-heartbeat": lambda it, _: fleet.send_node_heartbeat(it, state),
            "/v1/runtime/push-messages": lambda it, task: runtime.push_messages(it, state, task),
            "/v1/runtime/pull-messages": lambda it, task: runtime.pull_messages(it, state, task),
            "/v1/runtime/push-object": lambda it, task: runtime.push_object(it, state, task),
            "/v1/runtime/pull-object": lambda it, task: runtime.pull_object(it, state, task),
            "/v1/runtime/confirm-message-received": lambda it, task: runtime.confirm_message_received(
                it, state, task
            ),
        }

    async def _answer(self, prefix: str, check: _Handler, scope: Any, receive: Any, send: Any) -> None:
        from flwr.supercore.error import http_error_translator
        from flwr.supercore.protobuf import translation
        from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
        from starlette.requests import Request
        from starlette.responses import Response

        path = scope.get("path", "")
        handler = self._handlers.get(path) if path.startswith(prefix) else None
        if handler is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        body = await request.body()

        async def handle(request: Any) -> Response:
            kind = translation.PROTOBUF_REQUEST_TYPES["POST", path]
            message = translation.ProtobufTranslationMiddleware._parse_request(body, kind)
            result = handler(message, check(request, message))
            return Response(result.SerializeToString(), media_type=PROTOBUF_MEDIA_TYPE)

        response = await http_error_translator(request, handle)
        await response(scope, receive, send)

    def _check_node(self, request: Any, message: Any) -> None:
        """Refuse a node that is not the one of its key, as Flower's own check of signatures does."""
        from fastapi import HTTPException

        key = base64.b64decode(request.headers["flwr-public-key"])
        if self._state.get_node_id_by_public_key(key) != message.node.node_id:
            raise HTTPException(401, "Invalid SuperNode authentication")

    def _check_task(self, request: Any, message: Any) -> Any:
        """Return the task whose token a request has."""
        from flwr.supercore.constant import TASK_TOKEN_HEADER
        from flwr.supercore.dependencies.task import authenticate_task

        return authenticate_task(request, request.headers.get(TASK_TOKEN_HEADER), self._state)
