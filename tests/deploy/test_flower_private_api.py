"""What offbeat relies on in Flower beyond its public API: a failure names the point that has changed."""

import inspect
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from offbeat.deploy.flower import private_api
from offbeat.deploy.flower.private_api import NodeStatus

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # raised by what Flower imports
    from flwr.app import Message, RecordDict
    from flwr.proto.message_pb2 import (
        ConfirmMessageReceivedRequest,
        PullObjectRequest,
        PullObjectResponse,
    )
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
    from flwr.supercore.error.base import ApiErrorCode
    from flwr.supercore.error.catalog import API_ERROR_MAP
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.superlink.grid.http_grid import HttpGrid
    from flwr.supernode import fleet_http_connection, start_client_internal

    from offbeat.deploy.flower.client import from_records, to_records


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
    payload = bytes(range(256)) * 100
    content = to_records("the header", payload)
    objects = {key: each.deflate() for key, each in get_all_nested_objects(content).items()}
    private_api.validate_objects(objects)
    assert private_api.array_bytes(objects) >= len(payload), "Array objects list their chunks in another way"
    built = private_api.build_message(content.object_id, objects)
    assert isinstance(built, RecordDict)
    assert from_records(built) == ("the header", payload)
    with pytest.raises(Exception, match=r"(?i)object"):
        private_api.validate_objects({"0": b"no object"})


def test_a_message_says_whether_it_has_content() -> None:
    assert hasattr(Message, "has_content"), "Message has no has_content any more"


def test_a_run_that_has_ended_has_an_exception_of_its_own() -> None:
    assert issubclass(private_api.run_ended_error(), BaseException)


@contextmanager
def superlink(status: int) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every request with the same status."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}", paths
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "meaning"),
    [(401, NodeStatus.UNKNOWN_KEY), (412, NodeStatus.INACTIVE), (404, NodeStatus.UNCLEAR)],
)
def test_a_node_is_deactivated_with_its_key(status: int, meaning: NodeStatus) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    with superlink(status) as (address, paths):
        assert private_api.deactivate_node(address, None, key, 77) is meaning
    assert paths == ["/v1/fleet/deactivate-node"], "the SuperLink's API has another path for deactivation"


def test_a_supernode_logs_its_node_id_and_why_it_was_refused(tmp_path: Path) -> None:
    assert "SuperNode ID: %s" in inspect.getsource(start_client_internal), "SuperNodes log their ID otherwise"
    assert "[code: {" in inspect.getsource(fleet_http_connection), "SuperNodes log refusals otherwise"
    log = tmp_path / "log"
    log.write_text("INFO : SuperNode ID: 77\nFailed\n[code: 2004] Failed to activate SuperNode.\n")
    assert private_api.node_id_in_log(log) == 77
    assert private_api.refusal_in_log(log) == (2004, "Failed to activate SuperNode.")


def test_refusals_have_the_codes_that_are_told_apart() -> None:
    assert private_api.KEY_REQUIRED == ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED
    assert private_api.KEY_REFUSED == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED


def test_a_key_that_is_registered_twice_has_the_message_that_is_recognised() -> None:
    message = API_ERROR_MAP[ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE].public_message
    assert private_api.KEY_IN_USE in message
