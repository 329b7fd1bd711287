"""What offbeat relies on in Flower beyond its public API: a failure names the point that has changed."""

import asyncio
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from offbeat.deploy.flower import private_api
from offbeat.deploy.flower.private_api import FlowerError, Refusal

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # raised by what Flower imports
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.cli.build import build_fab_from_files
    from flwr.common.constant import ISOLATION_MODE_PROCESS, SUPERLINK_NODE_ID
    from flwr.common.serde import message_from_proto
    from flwr.proto.control_pb2 import StartRunRequest, StartRunResponse
    from flwr.proto.fab_pb2 import Fab
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        ActivateNodeResponse,
        PullMessagesRequest,
        PullMessagesResponse,
        PushMessagesRequest,
        PushMessagesResponse,
        RegisterNodeFleetRequest,
        RegisterNodeFleetResponse,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.message_pb2 import (
        ConfirmMessageReceivedRequest,
        Metadata,
        ObjectTree,
        PullObjectRequest,
        PullObjectResponse,
        PushObjectRequest,
        PushObjectResponse,
    )
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import (
        AcquireTaskRequest,
        AcquireTaskResponse,
        PullAppMessagesRequest,
        PullAppMessagesResponse,
        PullTaskInputRequest,
        PullTaskInputResponse,
        PushAppMessagesRequest,
        PushAppMessagesResponse,
    )
    from flwr.server.utils.validator import validate_message
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, TASK_TOKEN_HEADER, TaskType
    from flwr.supercore.error.base import ApiErrorCode
    from flwr.supercore.inflatable.inflatable_object import get_object_id
    from flwr.supercore.inflatable.inflatable_utils import validate_object_content
    from flwr.supercore.protobuf.client import ProtobufRequestContext
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor


RUNTIME_CALLS = ("AcquireTask", "PullTaskInput", "PushTaskOutput", "GetNodes", "PushMessages", "PushObject")


@pytest.mark.parametrize("call", [*RUNTIME_CALLS, "PullMessages", "PullObject", "ConfirmMessageReceived"])
def test_the_client_of_a_server_app_has_the_calls_that_a_server_makes(call: str) -> None:
    assert callable(getattr(RuntimeHttpClient, call, None)), f"RuntimeHttpClient has no {call} any more"


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (PullAppMessagesRequest, {"message_ids"}),
        (PullAppMessagesResponse, {"messages_list", "message_object_trees"}),
        (PushAppMessagesRequest, {"messages_list", "message_object_trees"}),
        (PushAppMessagesResponse, {"message_ids", "objects_to_push", "session_id"}),
        (PushMessagesRequest, {"node", "messages_list", "message_object_trees", "clientapp_runtime_list"}),
        (PushMessagesResponse, {"objects_to_push", "session_id"}),
        (PushObjectRequest, {"node", "run_id", "object_id", "object_content", "session_id"}),
        (ObjectTree, {"object_id", "children"}),
        (PullObjectRequest, {"node", "run_id", "object_id"}),
        (PullObjectResponse, {"object_found", "object_available", "object_content"}),
        (ConfirmMessageReceivedRequest, {"node", "run_id", "message_object_id"}),
    ],
)
def test_requests_and_responses_have_the_fields_that_are_used(message: Any, fields: set[str]) -> None:
    missing = fields - {field.name for field in message.DESCRIPTOR.fields}
    assert not missing, f"Flower's {message.DESCRIPTOR.name} has no field {missing} any more"


def test_a_superlink_accepts_objects_of_plain_bytes() -> None:
    wrapped = private_api.wrap_object(b"some \0 bytes", ["0" * 64])
    validate_object_content(wrapped)
    assert get_object_id(wrapped) == private_api.object_id(wrapped), "objects have other IDs now"
    assert private_api.unwrap_object(wrapped) == (["0" * 64], b"some \0 bytes")
    ours = private_api.wrap_object(b"abc")
    assert ours == ArrayChunk(memoryview(b"abc")).deflate(), "an ArrayChunk is not plain bytes any more"


def test_a_reply_is_valid_for_a_superlink_whatever_the_clock_of_the_site_says() -> None:
    now = time.time()
    about = Metadata(
        run_id=7,
        message_id="a",
        src_node_id=1,
        dst_node_id=5,
        message_type="train.task",
        created_at=now,
        ttl=9,
    )
    pending = private_api.PendingMessage("a", 7, "train.task", 9.0, [], about)
    reply = message_from_proto(private_api.OutgoingReply(pending, "b", {"b": b""}).message)
    assert validate_message(reply, is_reply_message=True) == []
    assert (reply.metadata.created_at, reply.metadata.ttl) == (now, 9)


def test_the_state_of_a_superlink_can_be_in_memory() -> None:
    assert FLWR_IN_MEMORY_DB_NAME == ":flwr-in-memory:"


@contextmanager
def superlink(status: int, text: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every request with the same status."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *words: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}", paths
        server.shutdown()
        thread.join()


CALLS = ("RegisterNode", "ActivateNode", "DeactivateNode", "SendNodeHeartbeat", "PullMessages")


@pytest.mark.parametrize("call", [*CALLS, "PushMessages", "PullObject", "PushObject"])
def test_the_client_of_a_supernode_has_the_calls_that_a_site_makes(call: str) -> None:
    assert callable(getattr(FleetHttpClient, call, None)), f"FleetHttpClient has no {call} any more"


@pytest.mark.parametrize(
    ("status", "text", "meaning"),
    [
        (401, "", Refusal.UNAUTHORIZED),
        (403, "", Refusal.RUN_ENDED),
        (412, '{"code": 2004, "detail": "x"}', Refusal.NOT_ACTIVATED),
        (409, '{"code": 23}', Refusal.KEY_IN_USE),
        (404, "[]", Refusal.OTHER),
        (502, "no JSON", Refusal.AWAY),
    ],
)
def test_refusals_are_told_apart(status: int, text: str, meaning: Refusal) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    with superlink(status, text) as (address, paths):
        client = private_api.FleetClient(address, None, key)
        with pytest.raises(FlowerError) as raised:
            client.activate()
        client.close()
    assert raised.value.refusal is meaning
    assert paths == ["/v1/fleet/activate-node"], "the SuperLink's API has another path for activation"


def test_a_superlink_that_is_away_is_told_apart() -> None:
    client = private_api.FleetClient("127.0.0.1:1", None, ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(FlowerError) as raised:
        client.activate()
    client.close()
    assert raised.value.refusal is Refusal.AWAY


def test_refusals_have_the_codes_that_are_told_apart() -> None:
    assert private_api._KEY_REFUSED == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
    assert private_api._KEY_IN_USE == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE


def test_idle_connections_of_a_site_are_kept() -> None:
    client = private_api.FleetClient("127.0.0.1:1", None, ec.generate_private_key(ec.SECP384R1()))
    pool: Any = client._client._client._transport
    assert pool._pool._keepalive_expiry == private_api._KEEP_ALIVE, "httpx keeps connections in another way"
    client.close()


def test_a_superlink_can_be_started_without_starting_other_processes() -> None:
    assert ISOLATION_MODE_PROCESS == "process"
    assert TaskType.SERVER_APP == "flwr-serverapp"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports
def test_the_app_of_a_run_can_be_built() -> None:
    from flwr.cli.build import build_fab_from_files
    from flwr.cli.config_utils import get_fab_config

    content, _ = build_fab_from_files(private_api.APP_FILES)
    components = get_fab_config(content)["tool"]["flwr"]["app"]["components"]
    assert components.keys() == {"serverapp", "clientapp"}


class AsgiFlower:
    """Requests to a SuperLink in this process, in Flower's own way or in the short one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.argv", ["pytest"])  # which the SuperLink changes
        self.superlink = private_api.SuperLink()
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.pem = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def ask(self, app: Any, path: str, message: Any, **headers: str) -> tuple[int, bytes]:
        sent = httpx.Request("POST", f"http://flower{path}", content=message.SerializeToString())
        sent.headers["content-type"] = "application/protobuf"
        sent.headers.update({name.replace("_", "-"): text for name, text in headers.items()})
        if "/fleet/" in path:
            context = ProtobufRequestContext("", message, sent)
            NodeAuthHttpInterceptor(self.key, self.key.public_key()).intercept(
                context, lambda context: httpx.Response(200)
            )

        async def send() -> tuple[int, bytes]:
            response = await httpx.ASGITransport(app).handle_async_request(sent)
            return response.status_code, await response.aread()

        return asyncio.run(send())

    def call(self, path: str, message: Any, response: Any, **headers: str) -> Any:
        status, body = self.ask(self.superlink.app, path, message, **headers)
        assert status == 200, body
        return response.FromString(body)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports
def test_what_an_update_needs_is_answered_as_flower_itself_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task to a site and its reply, each request once in either way; then what has to be refused."""
    flower = AsgiFlower(monkeypatch)
    superlink, fleet, runtime = flower.superlink.app, flower.superlink.fleet, flower.superlink.runtime
    register = RegisterNodeFleetRequest(public_key=flower.pem)
    node = flower.call("/v1/fleet/register-node", register, RegisterNodeFleetResponse).node_id
    activate = ActivateNodeRequest(public_key=flower.pem, heartbeat_interval=30)
    assert flower.call("/v1/fleet/activate-node", activate, ActivateNodeResponse).node_id == node
    fab, _ = build_fab_from_files(private_api.APP_FILES)
    start = StartRunRequest(fab=Fab(content=fab))
    run = flower.call("/v1/control/start-run", start, StartRunResponse).run_id
    acquire = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    token = flower.call("/v1/runtime/acquire-task", acquire, AcquireTaskResponse).token
    headers = {TASK_TOKEN_HEADER: token}
    given = flower.call(
        "/v1/runtime/pull-task-input", PullTaskInputRequest(), PullTaskInputResponse, **headers
    )

    def both(path: str, short: Any, message: Any) -> None:
        """The answers to a request that changes nothing."""
        assert flower.ask(short, path, message, **headers) == flower.ask(superlink, path, message, **headers)

    server, site = Node(node_id=SUPERLINK_NODE_ID), Node(node_id=node)
    ids = []
    for way in (superlink, runtime):
        wrapped = private_api.wrap_object(f"a task {way}".encode())
        ids.append(private_api.object_id(wrapped))
        message = private_api._message(
            message_id=ids[-1],
            run_id=run,
            src_node_id=SUPERLINK_NODE_ID,
            dst_node_id=node,
            src_task_id=given.task_id,
            message_type="train.task",
            created_at=time.time(),
            ttl=60,
        )
        tree = private_api._object_tree({ids[-1]: wrapped})
        push = PushAppMessagesRequest(messages_list=[message], message_object_trees=[tree])
        status, body = flower.ask(way, "/v1/runtime/push-messages", push, **headers)
        pushed = PushAppMessagesResponse.FromString(body)
        assert (status, list(pushed.message_ids), list(pushed.objects_to_push)) == (200, ids[-1:], ids[-1:])
        both("/v1/runtime/pull-object", runtime, PullObjectRequest(node=server, object_id=ids[-1]))
        put = PushObjectRequest(
            node=server, run_id=run, object_id=ids[-1], object_content=wrapped, session_id=pushed.session_id
        )
        status, body = flower.ask(way, "/v1/runtime/push-object", put, **headers)
        assert PushObjectResponse.FromString(body).stored
    both("/v1/runtime/pull-messages", runtime, PullAppMessagesRequest(message_ids=ids))
    both("/v1/fleet/pull-object", fleet, PullObjectRequest(node=site, run_id=run, object_id=ids[0]))
    both("/v1/fleet/pull-object", fleet, PullObjectRequest(node=site, run_id=run, object_id="0" * 64))
    both("/v1/fleet/send-node-heartbeat", fleet, SendNodeHeartbeatRequest(node=site, heartbeat_interval=30))
    replies = []
    for way, short in ((superlink, superlink), (fleet, runtime)):
        status, body = flower.ask(way, "/v1/fleet/pull-messages", PullMessagesRequest(node=site))
        pulled = PullMessagesResponse.FromString(body)
        about = pulled.messages_list[0].metadata
        pending = private_api.PendingMessage(about.message_id, run, about.message_type, 60, [], about)
        wrapped = private_api.wrap_object(f"a reply {way}".encode())
        replies.append(private_api.object_id(wrapped))
        reply = private_api.OutgoingReply(pending, replies[-1], {replies[-1]: wrapped})
        tree = private_api._object_tree(reply.objects)
        answer = PushMessagesRequest(node=site, messages_list=[reply.message], message_object_trees=[tree])
        status, body = flower.ask(way, "/v1/fleet/push-messages", answer)
        session = PushMessagesResponse.FromString(body).session_id
        put = PushObjectRequest(
            node=site, run_id=run, object_id=replies[-1], object_content=wrapped, session_id=session
        )
        assert PushObjectResponse.FromString(flower.ask(way, "/v1/fleet/push-object", put)[1]).stored
        wanted = PullAppMessagesRequest(message_ids=[about.message_id])
        status, body = flower.ask(short, "/v1/runtime/pull-messages", wanted, **headers)
        [found] = PullAppMessagesResponse.FromString(body).messages_list
        assert found.metadata.message_id == replies[-1]
        confirm = ConfirmMessageReceivedRequest(node=server, run_id=run, message_object_id=replies[-1])
        assert flower.ask(short, "/v1/runtime/confirm-message-received", confirm, **headers)[0] == 200
        gone = PullObjectRequest(node=server, object_id=replies[-1])
        _, body = flower.ask(superlink, "/v1/runtime/pull-object", gone, **headers)
        assert not PullObjectResponse.FromString(body).object_found
    both("/v1/fleet/pull-messages", fleet, PullMessagesRequest(node=Node(node_id=node + 1)))
    both("/v1/fleet/push-object", fleet, PushObjectRequest(node=Node(node_id=node + 1), run_id=run))
    both("/v1/fleet/pull-object", fleet, PullObjectRequest(node=site, run_id=run + 1, object_id=ids[0]))
    status, _ = flower.ask(runtime, "/v1/runtime/pull-messages", wanted)
    assert status == flower.ask(superlink, "/v1/runtime/pull-messages", wanted)[0] == 401
