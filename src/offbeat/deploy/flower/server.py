"""The server as a Flower app: the grid as a transport, and the ServerApp that runs on it."""

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
from flwr.serverapp import Grid, ServerApp

from offbeat.deploy.flower import private_api
from offbeat.deploy.flower.client import RecordError, from_records, to_records
from offbeat.deploy.flower.private_api import GridClient, MissingObjectError, PendingReply
from offbeat.deploy.protocol.transport import Reply, TransportClosedError, TransportError
from offbeat.deploy.server.run import ServeRequest, serve
from offbeat.errors import InputError
from offbeat.training.folder import claim_folder

_MESSAGE_TYPES = {"hello": "query.hello", "task": "train.task"}
_OVERHEAD_BYTES = 256 * 1024  # bytes of a message beyond its payload
_OVERHEAD_OBJECTS = 64  # objects of a message beyond those of its payload
_OBJECT_BYTES = (
    1024 * 1024
)  # bytes of payload in an object, at least; Flower's chunks have five times as many
_PARALLEL_PULLS = 4
_MAX_THREADS = 4  # for torch: the server has little to compute between two steps
_LOG = logging.getLogger("offbeat")


@dataclass
class _Download:
    """A reply whose objects are being fetched."""

    reply: PendingReply
    missing: list[str]
    objects: dict[str, bytes] = field(default_factory=dict)


class FlowerTransport:
    """Flower's grid as a transport.

    Uploads have `max_bytes` bytes at most. A call of the grid gives up after `timeout` seconds.
    """

    def __init__(self, grid: Any, max_bytes: int = 2**30, timeout: float = 10.0) -> None:
        self._client = GridClient(grid, timeout)
        self._grid = grid
        self._max_bytes = max_bytes
        self._keys: dict[int, bytes] = {}  # public keys of the connected nodes
        self._downloads: dict[str, _Download] = {}  # by the ID of the message that is answered
        self._pool = ThreadPoolExecutor(_PARALLEL_PULLS)

    def nodes(self) -> frozenset[int]:
        with _transport_errors():
            self._keys = {node.node_id: node.public_key for node in self._grid.get_nodes()}
        return frozenset(self._keys)

    def key(self, node: int) -> bytes:
        return self._keys.get(node, b"")

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        with _transport_errors():
            message = Message(to_records(header, payload), node, _MESSAGE_TYPES[kind], ttl=timeout)
            message_ids = list(self._grid.push_messages([message]))
        if len(message_ids) != 1 or not message_ids[0]:
            raise TransportError(f"the SuperLink accepted no message for node {node}")
        return str(message_ids[0])

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        self._downloads = {key: each for key, each in self._downloads.items() if key in set(message_ids)}
        replies = self._list_replies([key for key in message_ids if key not in self._downloads])
        for message_id, download in list(self._downloads.items()):
            try:
                reply = self._fetch(download)
            except TransportError:
                if not replies:
                    raise
                break  # return what has arrived; the next call will report a problem that persists
            if reply is not None:
                del self._downloads[message_id]
                replies.append(reply)
        return replies

    def _list_replies(self, message_ids: list[str]) -> list[Reply]:
        """Begin to download the replies that have arrived; errors are returned at once."""
        if not message_ids:
            return []
        with _transport_errors():
            found = self._client.list_replies(message_ids)
        errors = []
        for reply in found:
            if reply.reply_to not in message_ids:
                continue
            count, error = len(reply.object_ids), reply.error
            if error is None and count > _OVERHEAD_OBJECTS + self._max_bytes // _OBJECT_BYTES:
                error = f"the reply has {count} objects"
            if error is not None:
                errors.append(Reply(reply.reply_to, reply.node, "", b"", error))
            else:
                self._downloads[reply.reply_to] = _Download(reply, list(reply.object_ids))
        return errors

    def _fetch(self, download: _Download) -> Reply | None:
        """Return the reply, or None while its sender is still sending."""
        header, payload, error = "", b"", None
        try:
            if not self._download(download):
                return None
            header, payload = self._read(download)
        except TransportError:
            raise
        except Exception as failure:  # the bytes come from outside and may cause any error
            error = f"the reply cannot be read: {failure}"
        reply = download.reply
        with _transport_errors():
            self._client.confirm(reply)
        return Reply(reply.reply_to, reply.node, header, payload, error)

    def _download(self, download: _Download) -> bool:
        """Fetch the objects that are available; return whether that was all."""
        while download.missing:
            object_ids = download.missing[:_PARALLEL_PULLS]
            with _transport_errors():
                contents = list(self._pool.map(self._client.pull_object, object_ids))
            for object_id, content in zip(object_ids, contents, strict=True):
                if content is None:
                    return False
                download.missing.remove(object_id)
                download.objects[object_id] = content
            if sum(map(len, download.objects.values())) > self._max_bytes + _OVERHEAD_BYTES:
                raise RecordError(f"it has more than {self._max_bytes} bytes.")
        return True

    def _read(self, download: _Download) -> tuple[str, bytes]:
        private_api.validate_objects(download.objects)
        if private_api.array_bytes(download.objects) > self._max_bytes + _OVERHEAD_BYTES:
            raise RecordError(f"its arrays have more than {self._max_bytes} bytes.")
        message = private_api.build_message(download.reply.message_id, download.objects)
        if not isinstance(message, Message) or not message.has_content():
            raise RecordError("the message has no content.")
        return from_records(message.content, self._max_bytes)


@contextmanager
def _transport_errors() -> Iterator[None]:
    """Turn any error of a call to the SuperLink into a `TransportError`."""
    try:
        yield
    except MissingObjectError:
        raise
    except private_api.run_ended_error():
        raise TransportClosedError("Flower has ended the run") from None
    except Exception as error:
        raise TransportError(f"{type(error).__name__}: {error}") from error


def server_app() -> ServerApp:
    """Return the ServerApp that runs what `settings`, `folder` and `resume` of its run config name."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(min(_MAX_THREADS, torch.get_num_threads()))
        request = request_from_config(context.run_config)
        _log_to(request.folder / "server.log")
        try:
            outcome = serve(request, lambda max_bytes: FlowerTransport(grid, max_bytes))
        except Exception:
            _LOG.exception("the server failed")
            raise
        if outcome.error is not None:
            _LOG.error("%s", outcome.error)

    return app


def request_from_config(config: Mapping[str, Any]) -> ServeRequest:
    """Read a run config.

    A relative settings file is looked for beside the app first, then in the current folder. Without a
    `folder`, a new one is made in `runs`.
    """
    name = Path(str(config.get("settings") or "serve.toml")).expanduser()
    candidates = [Path(folder) / name for folder in (*sys.path, ".")]
    settings = next((path for path in candidates if path.is_file()), name)
    folder, resume = str(config.get("folder") or ""), bool(config.get("resume", False))
    if resume and not folder:
        raise InputError("resume needs the folder of the run to resume: give both.")
    run_folder = Path(folder).expanduser() if folder else claim_folder(Path("runs"), "serve")
    sites = str(config.get("sites") or "")
    return ServeRequest(
        settings.absolute(),
        run_folder.absolute(),
        resume,
        bool(config.get("authenticated", False)),
        Path(sites) if sites else None,
    )


def _log_to(path: Path) -> None:
    """Log to a file, because Flower discards what its apps print."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
