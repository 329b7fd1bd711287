"""Flower's grid as a post.

Uploads are fetched piece by piece rather than by the grid's own `pull_messages`. That would wait for
pieces that a site has not sent yet, take in whatever size there is, and lose the other replies of a pull
over one that cannot be read. It would also believe what a site says of its own node; here the SuperLink's
word counts.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content
from flwr.supercore.run import RunNotRunningException

from offbeat.deploy.flower_records import RecordError, unwrap, wrap
from offbeat.deploy.post import PostClosedError, PostError, Reply
from offbeat.errors import InputError

_KINDS = {"hello": "query.hello", "task": "train.task"}
_ROOM = 256 * 1024  # bytes of a message beside its payload
_PIECES = 64  # of a message beside those of its payload
_PIECE = 1024 * 1024  # bytes; Flower's own pieces have five times as many
_AT_ONCE = 4  # pieces


@dataclass
class _Coming:
    """A reply whose pieces are being fetched."""

    node: int
    message: str  # its own number
    missing: list[str]
    pieces: dict[str, bytes] = field(default_factory=dict)


class FlowerPost:
    """Uploads have `most` bytes at most; a call gives up after `seconds`, for the grid would try for ever."""

    def __init__(self, grid: Any, most: int = 2**30, seconds: float = 10.0) -> None:
        if not hasattr(grid, "_retry_invoker"):
            raise InputError("a Flower simulation has no sites to send to: run this on a SuperLink.")
        grid._retry_invoker.max_time = seconds
        self._grid = grid
        self._run = grid.run.run_id
        self._most = most
        self._keys: dict[int, bytes] = {}  # of those who are there
        self._coming: dict[str, _Coming] = {}  # by the message that it answers
        self._fetching = ThreadPoolExecutor(_AT_ONCE)

    def nodes(self) -> frozenset[int]:
        with _translated():
            self._keys = {node.node_id: node.public_key for node in self._grid.get_nodes()}
        return frozenset(self._keys)

    def key(self, node: int) -> bytes:
        return self._keys.get(node, b"")

    def push(self, node: int, kind: str, note: str, payload: bytes, seconds: float) -> str:
        with _translated():
            message = Message(wrap(note, payload), node, _KINDS[kind], ttl=seconds)
            numbers = list(self._grid.push_messages([message]))
        if len(numbers) != 1 or not numbers[0]:
            raise PostError(f"the SuperLink took no message for node {node}")
        return str(numbers[0])

    def pull(self, numbers: Sequence[str]) -> list[Reply]:
        self._coming = {number: each for number, each in self._coming.items() if number in set(numbers)}
        replies = self._ask([number for number in numbers if number not in self._coming])
        for number, coming in list(self._coming.items()):
            try:
                reply = self._fetch(number, coming)
            except PostError:
                if not replies:
                    raise
                break  # the next call will say so; what has come is not given twice
            if reply is not None:
                del self._coming[number]
                replies.append(reply)
        return replies

    def _ask(self, numbers: list[str]) -> list[Reply]:
        """Which of them have an answer; what is no more than an error is given at once."""
        if not numbers:
            return []
        with _translated():
            answer = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=numbers))
        errors = []
        for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            about = message.metadata
            number, node = about.reply_to_message_id, about.src_node_id
            pieces = list(dict.fromkeys(each.object_id for each in iterate_object_tree(tree)))
            if number not in numbers:
                continue
            if message.HasField("error"):
                errors.append(Reply(number, node, "", b"", _say(message.error)))
            elif len(pieces) > _PIECES + self._most // _PIECE:
                errors.append(Reply(number, node, "", b"", f"the answer has {len(pieces)} pieces"))
            else:
                self._coming[number] = _Coming(node, about.message_id, pieces)
        return errors

    def _fetch(self, number: str, coming: _Coming) -> Reply | None:
        """The answer, if all of it is there."""
        note, payload, error = "", b"", None
        try:
            if not self._complete(coming):
                return None
            note, payload = self._read(coming)
        except PostError:
            raise
        except Exception as failure:  # a stranger's bytes may be anything
            error = f"the answer cannot be read: {failure}"
        with _translated():
            self._grid._runtime_client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=self._grid.node, run_id=self._run, message_object_id=coming.message
                )
            )
        return Reply(number, coming.node, note, payload, error)

    def _complete(self, coming: _Coming) -> bool:
        """Fetch what is there; whether that was all."""
        while coming.missing:
            some = coming.missing[:_AT_ONCE]
            with _translated():
                answers = list(self._fetching.map(self._piece, some))
            for name, answer in zip(some, answers, strict=True):
                if not answer.object_found:
                    raise RecordError("a piece of it is gone.")
                if not answer.object_available:
                    return False  # the site is still sending
                coming.missing.remove(name)
                coming.pieces[name] = answer.object_content
            if sum(map(len, coming.pieces.values())) > self._most + _ROOM:
                raise RecordError(f"it has more than {self._most} bytes.")
        return True

    def _piece(self, name: str) -> Any:
        return self._grid._runtime_client.PullObject(
            PullObjectRequest(node=self._grid.node, run_id=self._run, object_id=name)
        )

    def _read(self, coming: _Coming) -> tuple[str, bytes]:
        for content in coming.pieces.values():
            validate_object_content(content)
        _check_sizes(coming.pieces, self._most)
        message = inflate_object_from_contents(coming.message, coming.pieces, keep_object_contents=True)
        if not isinstance(message, Message) or not message.has_content():
            raise RecordError("the message has no content.")
        return unwrap(message.content, self._most)


def _check_sizes(pieces: dict[str, bytes], most: int) -> None:
    """An array may name one of its pieces many times over: add up before anything is put together."""
    total = 0
    for content in pieces.values():
        end = content.index(b"\x00")
        kind, children, _ = content[:end].decode().split(" ")
        if kind == "Array":
            names = children.split(",")
            total += sum(
                len(pieces[names[place]]) for place in json.loads(content[end + 1 :])["arraychunk_ids"]
            )
    if total > most + _ROOM:
        raise RecordError(f"its arrays have more than {most} bytes.")


def _say(error: Any) -> str:
    """Flower's error in its own words; code 2 is an exception of the site's."""
    return f"code {error.code}, {error.reason or 'no reason given'}"


@contextmanager
def _translated() -> Iterator[None]:
    """Whatever goes wrong on the way to the SuperLink, in a post's terms."""
    try:
        yield
    except RunNotRunningException:
        raise PostClosedError("Flower has ended the run underneath") from None
    except Exception as error:
        raise PostError(f"{type(error).__name__}: {error}") from error
