"""The server's process: Flower as a transport, and the run on it.

`offbeat serve` starts this process. It submits a run to the SuperLink and acquires the task of that run
itself, so that Flower starts no process.
"""

import argparse
import base64
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from offbeat.deploy.flower.commands import log_to
from offbeat.deploy.flower.content import (
    KINDS,
    PARALLEL_PULLS,
    Content,
    MessageDownload,
    to_objects,
)
from offbeat.deploy.flower.private_api import (
    FlowerError,
    PendingReply,
    Refusal,
    ServerTask,
    begin_task,
)
from offbeat.deploy.keys import reply_statement, verify_signature
from offbeat.deploy.network import Doorbell, waits_for
from offbeat.deploy.protocol.transport import Reply, TransportClosedError, TransportError
from offbeat.deploy.server.run import ServeRequest, serve

_MESSAGE_TYPES = {kind: name for name, kind in KINDS.items()}
_MAX_THREADS = 4  # for torch: the server has little to compute between two steps
_MAX_FETCHED = 8  # replies at a time: their sites are sent new tasks before others are fetched
_TTL_MARGIN = 60.0  # seconds that Flower keeps a message after it has to be answered
_MAX_PULLED = 2**26  # bytes of replies at a time: the rest waits at the SuperLink, not in memory here
_RUN_FILE = "flower/run"  # in the folder of the run: Flower's ID of its run
_LOG = logging.getLogger("offbeat")


class FlowerTransport:
    """Flower as a transport; an upload has `max_bytes` bytes at most.

    `bell` tells the gateway, where sites wait, that there is a message for one of them.
    """

    def __init__(self, task: ServerTask, bell: Doorbell, max_bytes: int = 2**30) -> None:
        self._task, self._bell = task, bell
        self._max_bytes = max_bytes
        self._keys: dict[int, bytes] = {}  # public keys of the nodes that were connected
        # Replies whose objects are being fetched, by the ID of the message that each answers.
        self._arriving: dict[str, tuple[PendingReply, MessageDownload]] = {}
        self._sent: set[str] = set()  # messages whose objects the SuperLink has
        self.backlog: frozenset[str] = frozenset()
        self._pool, self._deletions = ThreadPoolExecutor(PARALLEL_PULLS), ThreadPoolExecutor(1)

    def nodes(self) -> frozenset[int]:
        with _transport_errors():
            connected = self._task.nodes()
        self._keys |= connected  # a node that leaves may have sent a reply before
        return frozenset(connected)

    def key(self, node: int) -> bytes:
        return self._keys.get(node, b"")

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        with _transport_errors():
            message_id, objects = to_objects(Content(header, payload), shared=True)
            accepted = self._task.push(node, _MESSAGE_TYPES[kind], message_id, objects, timeout + _TTL_MARGIN)
        if not accepted:
            raise TransportError(f"the SuperLink accepted no message for node {node}")
        self._bell.ring(waits_for(base64.b64encode(self.key(node))))
        self._sent.add(message_id)
        return message_id

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        wanted = set(message_ids)
        for message_id in self._sent - wanted:
            self._delete(message_id)  # it was answered, or given up
        self._sent &= wanted
        for message_id in self._arriving.keys() - wanted:
            self._delete(self._arriving.pop(message_id)[0].message_id)
        replies = self._list_replies([key for key in message_ids if key not in self._arriving])
        pulled, untried = 0, set(self._arriving)
        for message_id, arriving in list(self._arriving.items()):
            untried.remove(message_id)
            try:
                reply = self._fetch(*arriving)
            except TransportError:
                if not replies:
                    raise
                break  # return what has arrived; the next call will report a problem that persists
            if reply is not None:
                del self._arriving[message_id]
                replies.append(reply)
                pulled += len(reply.payload)
                if pulled >= _MAX_PULLED or len(replies) >= _MAX_FETCHED:
                    break
        self.backlog = frozenset(untried)
        return replies

    def _list_replies(self, message_ids: list[str]) -> list[Reply]:
        """Begin to download the replies that have arrived; errors are returned at once."""
        if not message_ids:
            return []
        with _transport_errors():
            found = self._task.list_replies(message_ids)
        errors = []
        for reply in found:
            if reply.reply_to not in message_ids:
                continue
            if reply.error is not None:
                errors.append(Reply(reply.reply_to, reply.node, "", b"", reply.error))
            else:
                download = MessageDownload(reply.message_id, reply.object_ids, self._max_bytes)
                self._arriving[reply.reply_to] = reply, download
        return errors

    def _fetch(self, reply: PendingReply, download: MessageDownload) -> Reply | None:
        """Return the reply, or None while its sender is still sending."""
        error = None
        try:
            content = download.fetch(self._pull_object, self._pool)
        except TransportError:
            raise
        except Exception as failure:  # the bytes come from outside and may cause any error
            content, error = Content("", b""), f"the reply cannot be read: {failure}"
        if content is None:
            return None
        self._delete(reply.message_id)
        authentic = error is not None or self._is_authentic(reply, content)
        return Reply(reply.reply_to, reply.node, content.header, content.payload, error, authentic)

    def _delete(self, message_id: str) -> None:
        """Have the SuperLink delete the objects of a message; nothing waits for it, or depends on it."""
        self._deletions.submit(self._task.delete, message_id)

    def _pull_object(self, object_id: str) -> bytes | None:
        with _transport_errors():
            return self._task.pull_object(object_id)

    def _is_authentic(self, reply: PendingReply, content: Content) -> bool:
        """Whether a reply has the signature of its node; Flower does not check who sent a reply."""
        statement = reply_statement(reply.reply_to, content.header, content.payload)
        try:
            key: Any = load_pem_public_key(self.key(reply.node))
            return verify_signature(key, statement, content.signature)
        except (ValueError, UnsupportedAlgorithm):
            return False


@contextmanager
def _transport_errors() -> Iterator[None]:
    """Turn any error of a call to the SuperLink into a `TransportError`."""
    try:
        yield
    except FlowerError as error:
        # A SuperLink that was started again does not know the run nor the server.
        if error.refusal in (Refusal.RUN_ENDED, Refusal.UNAUTHORIZED):
            raise TransportClosedError("Flower has ended the run") from None
        raise TransportError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server from start to end; the outcome is in the folder of the run."""
    parser = argparse.ArgumentParser(prog="python -m offbeat.deploy.flower.server", description=__doc__)
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument("--doorbell", required=True, type=int, metavar="N", help="a socket to the gateway")
    parser.add_argument("--settings", required=True, type=Path)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--sites", type=Path, help="a folder with the public keys of sites, by name")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    torch.set_num_threads(min(_MAX_THREADS, torch.get_num_threads()))
    _LOG.setLevel(logging.INFO)
    with log_to(options.folder / "server.log"):
        return _run(options, Doorbell(socket.socket(fileno=options.doorbell)))


def _run(options: argparse.Namespace, bell: Doorbell) -> int:
    request = ServeRequest(
        options.settings, options.folder, options.resume, options.sites is not None, options.sites
    )
    run_file, last = options.folder / _RUN_FILE, None
    with contextlib.suppress(OSError, ValueError):
        last = int(run_file.read_text())
    try:
        task = begin_task(options.superlink, last)
    except FlowerError as problem:
        _LOG.error("the server cannot begin its run: %s", problem)
        return 1
    run_file.write_text(str(task.run_id))
    error: str | None = "the server failed"
    try:
        outcome = serve(request, lambda max_bytes: FlowerTransport(task, bell, max_bytes), bell.wait)
        error = outcome.error
        if error is not None:
            _LOG.error("%s", error)
    except TransportClosedError as closed:  # as after a restart of the SuperLink
        _LOG.error("%s: the server ends, and the run is resumed.", closed)
        return 1
    except Exception:
        _LOG.exception("the server failed")
        return 1
    finally:
        task.finish(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
