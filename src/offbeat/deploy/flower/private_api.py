"""Everything that offbeat uses of Flower beyond its public API, in one module.

Flower may change any of this in any release. `tests/deploy/test_flower_private_api.py` states what is
relied on, one test for each point, against the installed version.

- Replies are fetched object by object, because the grid's own `pull_messages` waits for objects that a site
  has not sent yet, accepts any size, and loses all replies of a call if one of them cannot be read. It also
  trusts what a message says about its sender; here the SuperLink's record of the sender counts.
- A SuperNode that was killed is deactivated with its key. Otherwise the SuperLink refuses a new SuperNode
  with the same key for about a minute. The status of the same call distinguishes a key that the SuperLink
  does not know from one that is still in use, which the error of a SuperNode does not.
- The log of a SuperNode tells its node ID and why the SuperLink refused it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.errors import InputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

# Nothing of Flower is imported at module level: it takes seconds, which a command that only starts
# processes does not have to spend.

KEY_IN_USE = "already in use"  # in the error of `flwr supernode register` for a key that is registered
KEY_REFUSED, KEY_REQUIRED = 2004, 2001  # codes in the log of a SuperNode that was refused
_NODE_ID = re.compile(rb"SuperNode ID: (\d+)")
_REFUSAL = re.compile(rb"\[code: (\d+)\] ([^\n]*)")
_LOG_TAIL_BYTES = 65536


class PendingReply(NamedTuple):
    """A reply that the SuperLink holds: who sent it, and the objects that it consists of."""

    message_id: str
    reply_to: str  # the ID of the message that it answers
    node: int
    object_ids: list[str]
    error: str | None  # an error that came in place of content


class MissingObjectError(Exception):
    """The SuperLink no longer holds an object of a reply."""


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
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        response = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        replies = []
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            metadata, error = message.metadata, None
            if message.HasField("error"):  # code 2 is an exception in the ClientApp
                error = f"code {message.error.code}, {message.error.reason or 'no reason given'}"
            replies.append(
                PendingReply(
                    metadata.message_id,
                    metadata.reply_to_message_id,
                    metadata.src_node_id,
                    list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree))),
                    error,
                )
            )
        return replies

    def pull_object(self, object_id: str) -> bytes | None:
        """Return the content of an object, or None while its sender has not sent it."""
        from flwr.proto.message_pb2 import PullObjectRequest

        response = self._grid._runtime_client.PullObject(
            PullObjectRequest(node=self._grid.node, run_id=self._grid.run.run_id, object_id=object_id)
        )
        if not response.object_found:
            raise MissingObjectError("one of its objects is missing.")
        return bytes(response.object_content) if response.object_available else None

    def confirm(self, reply: PendingReply) -> None:
        """Tell the SuperLink that it may delete a reply."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        self._grid._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=reply.message_id
            )
        )


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


class NodeStatus(Enum):
    """What a SuperLink answers to the deactivation of a node."""

    INACTIVE = "no node uses the key now"
    UNKNOWN_KEY = "the key does not belong to the node"
    UNCLEAR = "no usable answer"


def deactivate_node(
    address: str, authority: Path | None, key: "EllipticCurvePrivateKey", node: int
) -> NodeStatus:
    """Tell a SuperLink that a node has ended; only for a caller that knows that it has."""
    import httpx
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    certificate = None if authority is None else authority.read_bytes()
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    ]
    with FleetHttpClient.from_server_address(
        address, certificate is None, certificate, interceptors
    ) as client:
        try:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
        except httpx.HTTPStatusError as error:
            status = {401: NodeStatus.UNKNOWN_KEY, 412: NodeStatus.INACTIVE}
            return status.get(error.response.status_code, NodeStatus.UNCLEAR)
        except (httpx.HTTPError, RuntimeError):
            return NodeStatus.UNCLEAR
        return NodeStatus.INACTIVE


def node_id_in_log(log: Path) -> int | None:
    """Return the last node ID in the log of a SuperNode."""
    found = _NODE_ID.findall(_tail(log))
    return int(found[-1]) if found else None


def refusal_in_log(log: Path) -> tuple[int, str] | None:
    """Return the code and the text of the last refusal in the log of a SuperNode."""
    found = _REFUSAL.findall(_tail(log))
    return (int(found[-1][0]), found[-1][1].decode(errors="replace")) if found else None


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        return file.read()
