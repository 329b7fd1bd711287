"""Flower's grid as a post.

Uploads are fetched piece by piece rather than by the grid's own `pull_messages`. That would wait for
pieces that a site has not sent yet, take in whatever size there is, and lose the other replies of a pull
over one that cannot be read. It would also believe what a site says of its own node; here the SuperLink's
word counts.

The server's half as a Flower app.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content
from flwr.supercore.run import RunNotRunningException

from offbeat.deploy.flower.client import RecordError, from_records, to_records
from offbeat.deploy.protocol.transport import Reply, TransportClosedError, TransportError
from offbeat.deploy.server.run import ServeRequest, serve
from offbeat.errors import InputError
from offbeat.training.folder import claim_folder

_MESSAGE_TYPES = {"hello": "query.hello", "task": "train.task"}
_OVERHEAD_BYTES = 256 * 1024  # bytes of a message beside its payload
_OVERHEAD_OBJECTS = 64  # of a message beside those of its payload
_OBJECT_BYTES = 1024 * 1024  # bytes; Flower's own pieces have five times as many
_MAX_FETCHES = 4  # pieces


@dataclass
class _PendingReply:
    """A reply whose pieces are being fetched."""

    node: int
    message: str  # its own number
    missing: list[str]
    pieces: dict[str, bytes] = field(default_factory=dict)


class FlowerTransport:
    """Uploads have `most` bytes at most; a call gives up after `seconds`, for the grid would try for ever."""

    def __init__(self, grid: Any, most: int = 2**30, seconds: float = 10.0) -> None:
        if not hasattr(grid, "_retry_invoker"):
            raise InputError("a Flower simulation has no sites to send to: run this on a SuperLink.")
        grid._retry_invoker.max_time = seconds
        self._grid = grid
        self._run = grid.run.run_id
        self._most = most
        self._keys: dict[int, bytes] = {}  # of those who are there
        self._coming: dict[str, _PendingReply] = {}  # by the message that it answers
        self._fetching = ThreadPoolExecutor(_MAX_FETCHES)

    def nodes(self) -> frozenset[int]:
        with _transport_errors():
            self._keys = {node.node_id: node.public_key for node in self._grid.get_nodes()}
        return frozenset(self._keys)

    def key(self, node: int) -> bytes:
        return self._keys.get(node, b"")

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        with _transport_errors():
            message = Message(to_records(header, payload), node, _MESSAGE_TYPES[kind], ttl=timeout)
            numbers = list(self._grid.push_messages([message]))
        if len(numbers) != 1 or not numbers[0]:
            raise TransportError(f"the SuperLink took no message for node {node}")
        return str(numbers[0])

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        self._coming = {number: each for number, each in self._coming.items() if number in set(message_ids)}
        replies = self._ask([number for number in message_ids if number not in self._coming])
        for number, coming in list(self._coming.items()):
            try:
                reply = self._fetch(number, coming)
            except TransportError:
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
        with _transport_errors():
            answer = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=numbers))
        errors = []
        for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            about = message.metadata
            number, node = about.reply_to_message_id, about.src_node_id
            pieces = list(dict.fromkeys(each.object_id for each in iterate_object_tree(tree)))
            if number not in numbers:
                continue
            if message.HasField("error"):
                errors.append(Reply(number, node, "", b"", _describe_error(message.error)))
            elif len(pieces) > _OVERHEAD_OBJECTS + self._most // _OBJECT_BYTES:
                errors.append(Reply(number, node, "", b"", f"the answer has {len(pieces)} pieces"))
            else:
                self._coming[number] = _PendingReply(node, about.message_id, pieces)
        return errors

    def _fetch(self, number: str, coming: _PendingReply) -> Reply | None:
        """The answer, if all of it is there."""
        note, payload, error = "", b"", None
        try:
            if not self._complete(coming):
                return None
            note, payload = self._read(coming)
        except TransportError:
            raise
        except Exception as failure:  # a stranger's bytes may be anything
            error = f"the answer cannot be read: {failure}"
        with _transport_errors():
            self._grid._runtime_client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=self._grid.node, run_id=self._run, message_object_id=coming.message
                )
            )
        return Reply(number, coming.node, note, payload, error)

    def _complete(self, coming: _PendingReply) -> bool:
        """Fetch what is there; whether that was all."""
        while coming.missing:
            some = coming.missing[:_MAX_FETCHES]
            with _transport_errors():
                answers = list(self._fetching.map(self._piece, some))
            for name, answer in zip(some, answers, strict=True):
                if not answer.object_found:
                    raise RecordError("a piece of it is gone.")
                if not answer.object_available:
                    return False  # the site is still sending
                coming.missing.remove(name)
                coming.pieces[name] = answer.object_content
            if sum(map(len, coming.pieces.values())) > self._most + _OVERHEAD_BYTES:
                raise RecordError(f"it has more than {self._most} bytes.")
        return True

    def _piece(self, name: str) -> Any:
        return self._grid._runtime_client.PullObject(
            PullObjectRequest(node=self._grid.node, run_id=self._run, object_id=name)
        )

    def _read(self, coming: _PendingReply) -> tuple[str, bytes]:
        for content in coming.pieces.values():
            validate_object_content(content)
        _check_sizes(coming.pieces, self._most)
        message = inflate_object_from_contents(coming.message, coming.pieces, keep_object_contents=True)
        if not isinstance(message, Message) or not message.has_content():
            raise RecordError("the message has no content.")
        return from_records(message.content, self._most)


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
    if total > most + _OVERHEAD_BYTES:
        raise RecordError(f"its arrays have more than {most} bytes.")


def _describe_error(error: Any) -> str:
    """Flower's error in its own words; code 2 is an exception of the site's."""
    return f"code {error.code}, {error.reason or 'no reason given'}"


@contextmanager
def _transport_errors() -> Iterator[None]:
    """Whatever goes wrong on the way to the SuperLink, in a post's terms."""
    try:
        yield
    except RunNotRunningException:
        raise TransportClosedError("Flower has ended the run underneath") from None
    except Exception as error:
        raise TransportError(f"{type(error).__name__}: {error}") from error


_LOG = logging.getLogger("offbeat")
_MAX_THREADS = 4  # at most: between two steps there is nothing to do for them


def server_app() -> ServerApp:
    """Runs what `settings`, `folder` and `resume` of its run config name."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(min(_MAX_THREADS, torch.get_num_threads()))
        ask = request_from_config(context.run_config)
        _log_to(ask.folder / "server.log")
        try:
            outcome = serve(ask, lambda most: FlowerTransport(grid, most))
        except Exception:
            _LOG.exception("the server failed")
            raise
        if outcome.error is not None:
            _LOG.error("%s", outcome.error)

    return app


def request_from_config(config: Mapping[str, Any]) -> ServeRequest:
    """A relative settings file is looked for beside the app first, and then here; no folder: a new one."""
    named = Path(str(config.get("settings") or "serve.toml")).expanduser()
    places = [Path(place) / named for place in (*sys.path, ".")]
    settings = next((place for place in places if place.is_file()), named)
    folder, resume = str(config.get("folder") or ""), bool(config.get("resume", False))
    if resume and not folder:
        raise InputError("resume needs folder, that of the run to go on with: give both.")
    place = Path(folder).expanduser() if folder else claim_folder(Path("runs"), "serve")
    sites = str(config.get("sites") or "")
    return ServeRequest(
        settings.absolute(),
        place.absolute(),
        resume,
        bool(config.get("authenticated", False)),
        Path(sites) if sites else None,
    )


def _log_to(path: Path) -> None:
    """Flower throws away what its apps print."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
