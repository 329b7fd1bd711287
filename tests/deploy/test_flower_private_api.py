"""What offbeat relies on in Flower beyond its public API: a failure names the point that has changed."""

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from offbeat.deploy.flower import private_api
from offbeat.deploy.flower.private_api import FlowerError, Refusal

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # raised by what Flower imports
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.common.constant import ISOLATION_MODE_PROCESS
    from flwr.common.serde import message_from_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
    from flwr.proto.message_pb2 import (
        ConfirmMessageReceivedRequest,
        Metadata,
        ObjectTree,
        PullObjectRequest,
        PullObjectResponse,
        PushObjectRequest,
    )
    from flwr.proto.runtime_pb2 import (
        PullAppMessagesRequest,
        PullAppMessagesResponse,
        PushAppMessagesRequest,
        PushAppMessagesResponse,
    )
    from flwr.server.utils.validator import validate_message
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, TaskType
    from flwr.supercore.error.base import ApiErrorCode
    from flwr.supercore.inflatable.inflatable_object import get_object_id
    from flwr.supercore.inflatable.inflatable_utils import validate_object_content
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.fleet_http_client import FleetHttpClient


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
        (403, '{"code": 2001}', Refusal.KEY_REQUIRED),
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
    assert private_api._KEY_REQUIRED == ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED
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
