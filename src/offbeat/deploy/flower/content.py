"""The content of Flower messages in both directions, and how it is fetched within limits.

A message has a header, which is text, optionally a payload of plain bytes, and in a site's reply a signature.
Flower moves a message as a tree of objects. They are fetched one by one, because what is sent by others may
be too large, incomplete or malformed.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from offbeat.deploy.flower import private_api

KINDS = {"query.hello": "hello", "train.task": "task", "query.end": "end"}  # by Flower's message type
_CONFIG, _ARRAYS, _PAYLOAD = "offbeat", "offbeat.payload", "payload"
_STYPE = "offbeat.bytes"
_INLINE_BYTES = 2 * 1024 * 1024  # of a payload that needs no objects of its own
_OVERHEAD_BYTES = 256 * 1024  # bytes of a message beyond its payload
_OVERHEAD_OBJECTS = 64  # objects of a message beyond those of its payload
_OBJECT_BYTES = 1024 * 1024  # of payload in an object, at least; Flower's chunks have five times as many
PARALLEL_PULLS = 4


class ContentError(Exception):
    """The content of a message is not what offbeat sends; the text is a sentence."""


class Content(NamedTuple):
    """What a message says."""

    header: str
    payload: bytes
    signature: bytes = b""


def to_records(content: Content) -> RecordDict:
    """Return content as Flower's records."""
    config: dict[str, Any] = {"header": content.header}
    if content.signature:
        config["signature"] = content.signature
    payload = bytes(content.payload)  # plain, because parsing a NumPy array would parse untrusted input
    if not payload or len(payload) > _INLINE_BYTES:
        records: dict[str, Any] = {_CONFIG: ConfigRecord(config)}
        if payload:
            array = Array(dtype="uint8", shape=(len(payload),), stype=_STYPE, data=payload)
            records[_ARRAYS] = ArrayRecord({_PAYLOAD: array})
        return RecordDict(records)
    # A short payload goes with the header: every object of a message is a request of its own.
    return RecordDict({_CONFIG: ConfigRecord(config | {_PAYLOAD: payload})})


def from_records(records: RecordDict, max_bytes: int | None = None) -> Content:
    """Return the content of records that hold nothing else."""
    if not set(records) <= {_CONFIG, _ARRAYS}:
        raise ContentError("the message has records that offbeat does not send.")
    config, arrays = records.get(_CONFIG), records.get(_ARRAYS)
    if not isinstance(config, ConfigRecord) or type(config.get("header")) is not str:
        raise ContentError("the message has no header.")
    header, signature, payload = config["header"], config.get("signature", b""), config.get(_PAYLOAD, b"")
    if not set(config) <= {"header", "signature", _PAYLOAD} or {type(signature), type(payload)} != {bytes}:
        raise ContentError("the message has fields that offbeat does not send.")
    if arrays is not None:
        if payload or not isinstance(arrays, ArrayRecord) or set(arrays) != {_PAYLOAD}:
            raise ContentError("the message has something else in place of its payload.")
        array = arrays[_PAYLOAD]
        if array.stype != _STYPE or array.dtype != "uint8" or array.shape != (len(array.data),):
            raise ContentError("the payload of the message is not plain bytes.")
        payload = array.data
    if max_bytes is not None and len(payload) > max_bytes:
        raise ContentError(f"the payload of the message has {len(payload)} bytes; {max_bytes} are allowed.")
    return Content(str(header), payload, signature)


class MessageDownload:
    """The objects of one message, fetched as they become available."""

    def __init__(self, message_id: str, object_ids: list[str], max_bytes: int) -> None:
        if len(object_ids) > _OVERHEAD_OBJECTS + max_bytes // _OBJECT_BYTES:
            raise ContentError(f"the message has {len(object_ids)} objects.")
        self._message_id, self._missing, self._max_bytes = message_id, list(object_ids), max_bytes
        self._objects: dict[str, bytes] = {}

    def fetch(self, pull: Callable[[str], bytes | None], pool: ThreadPoolExecutor) -> Content | None:
        """Fetch what is available; return the content once all of it is there.

        `pull` returns None for an object that its sender has not sent yet.
        """
        while self._missing:
            object_ids = self._missing[:PARALLEL_PULLS]
            found = list(zip(object_ids, pool.map(pull, object_ids), strict=True))
            for object_id, content in found:
                if content is not None:
                    self._missing.remove(object_id)
                    self._objects[object_id] = content
            if sum(map(len, self._objects.values())) > self._max_bytes + _OVERHEAD_BYTES:
                raise ContentError(f"the message has more than {self._max_bytes} bytes.")
            if any(content is None for _, content in found):
                return None
        return self._read()

    def _read(self) -> Content:
        private_api.validate_objects(self._objects)
        if private_api.array_bytes(self._objects) > self._max_bytes + _OVERHEAD_BYTES:
            raise ContentError(f"the arrays of the message have more than {self._max_bytes} bytes.")
        message = private_api.build_message(self._message_id, self._objects)
        if not isinstance(message, Message) or not message.has_content():
            raise ContentError("the message has no content.")
        return from_records(message.content, self._max_bytes)
