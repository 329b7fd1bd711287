"""What offbeat relies on in Flower beyond its public API: a failure names the point that has changed."""

import threading
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
    from flwr.app import Message, RecordDict
    from flwr.common.constant import ISOLATION_MODE_PROCESS
    from flwr.proto.message_pb2 import (
        ConfirmMessageReceivedRequest,
        PullObjectRequest,
        PullObjectResponse,
    )
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
    from flwr.supercore.constant import TaskType
    from flwr.supercore.error.base import ApiErrorCode
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.superlink.grid.http_grid import HttpGrid
    from flwr.supernode.fleet_http_client import FleetHttpClient

    from offbeat.deploy.flower.content import Content, from_records, to_records


def test_a_grid_has_a_retry_invoker_whose_time_can_be_limited() -> None:
    grid = HttpGrid(token="a token")
    assert hasattr(grid._retry_invoker, "max_time"), "HttpGrid._retry_invoker has no max_time any more"
    private_api.GridClient(grid, 7.0)
    assert grid._retry_invoker.max_time == 7.0


@pytest.mark.parametrize("call", ["PullMessages", "PullObject", "ConfirmMessageReceived"])
def test_a_grid_has_a_client_with_the_calls_that_fetch_replies(call: str) -> None:
    grid = HttpGrid("127.0.0.1:1", insecure=True, token="a token")
    assert hasattr(HttpGrid, "_runtime_client"), "HttpGrid has no _runtime_client any more"
    assert callable(getattr(grid._runtime_client, call, None)), f"the runtime client has no {call} any more"
    assert hasattr(grid, "node"), "HttpGrid has no node any more"
    grid._disconnect()


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (PullAppMessagesRequest, {"message_ids"}),
        (PullAppMessagesResponse, {"messages_list", "message_object_trees"}),
        (PullObjectRequest, {"node", "run_id", "object_id"}),
        (PullObjectResponse, {"object_found", "object_available", "object_content"}),
        (ConfirmMessageReceivedRequest, {"node", "run_id", "message_object_id"}),
    ],
)
def test_requests_and_responses_have_the_fields_that_are_used(message: Any, fields: set[str]) -> None:
    missing = fields - {field.name for field in message.DESCRIPTOR.fields}
    assert not missing, f"Flower's {message.DESCRIPTOR.name} has no field {missing} any more"


def test_objects_have_the_layout_that_the_size_check_reads() -> None:
    payload = bytes(range(256)) * 10_000
    content = to_records(Content("the header", payload))
    objects = {key: each.deflate() for key, each in get_all_nested_objects(content).items()}
    private_api.validate_objects(objects)
    assert private_api.array_bytes(objects) >= len(payload), "Array objects list their chunks in another way"
    built = private_api.build_message(content.object_id, objects)
    assert isinstance(built, RecordDict)
    assert from_records(built) == Content("the header", payload)
    with pytest.raises(Exception, match=r"(?i)object"):
        private_api.validate_objects({"0": b"no object"})


def test_a_message_says_whether_it_has_content() -> None:
    assert hasattr(Message, "has_content"), "Message has no has_content any more"


def test_a_run_that_has_ended_has_an_exception_of_its_own() -> None:
    assert issubclass(private_api.run_ended_error(), BaseException)


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


@pytest.mark.parametrize(
    "call", [*CALLS, "PushMessages", "PullObject", "PushObject", "ConfirmMessageReceived"]
)
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
