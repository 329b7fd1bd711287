"""The content of Flower messages in both directions, and how it is fetched within limits.

A message has a header, which is text, optionally a payload of plain bytes, and in a site's reply a signature.
Flower moves the content of a message as objects, and each object is a request at each end. A message of
offbeat is therefore one object, in which a long payload is replaced by the IDs of further objects. These
depend on the payload alone: a model that many sites are sent is sent to the SuperLink once, for which shorter
payloads of tasks are objects of their own, too.

Objects are fetched one by one, because what is sent by others may be too large, incomplete or malformed.
"""

import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from offbeat.deploy.flower import private_api

KINDS = {  # by Flower's message type
    "query.hello": "hello",
    "train.task": "task",
    "query.recall": "recall",
    "query.end": "end",
}
_INLINE_BYTES = 2 * 1024 * 1024  # of a payload that needs no objects of its own
_SHARED_BYTES = 64 * 1024  # the same, of one that is sent to many
_PART_BYTES = 4 * 1024 * 1024  # of a longer payload, in each object
_FIXED = struct.Struct("<16sII")  # random bytes, since two messages may say the same, and two lengths
_NUMBER = struct.Struct("<Q")  # of a part, since two parts may have the same bytes
_OVERHEAD_BYTES = 256 * 1024  # bytes of a message beyond its payload
_OVERHEAD_OBJECTS = 2  # objects of a message beyond the whole parts of its payload
PARALLEL_PULLS = 4


class ContentError(Exception):
    """The content of a message is not what offbeat sends; the text is a sentence."""


class Content(NamedTuple):
    """What a message says."""

    header: str
    payload: bytes
    signature: bytes = b""


class ContentObjects(NamedTuple):
    """The objects of a message, by ID; the first one names the others, and gives the message its ID."""

    message_id: str
    objects: dict[str, bytes]


def to_objects(content: Content, *, shared: bool = False) -> ContentObjects:
    """Return content as Flower's objects; the payload of one that is `shared` is sent to many."""
    payload, parts = content.payload, {}
    if len(payload) > (_SHARED_BYTES if shared else _INLINE_BYTES):
        view = memoryview(payload)
        for number, start in enumerate(range(0, len(payload), _PART_BYTES)):
            part = b"".join((_NUMBER.pack(number), view[start : start + _PART_BYTES]))
            wrapped = private_api.wrap_object(part)
            parts[private_api.object_id(wrapped)] = wrapped
        payload = b""
    header = content.header.encode()
    fixed = _FIXED.pack(os.urandom(16), len(header), len(content.signature))
    first = private_api.wrap_object(b"".join((fixed, header, content.signature, payload)), list(parts))
    message_id = private_api.object_id(first)
    return ContentObjects(message_id, {message_id: first, **parts})


def from_objects(message: ContentObjects, max_bytes: int | None = None) -> Content:
    """Return the content of objects that hold nothing else."""
    names, body = _unwrap(message.objects[message.message_id])
    if len(body) < _FIXED.size:
        raise ContentError("the message has no header.")
    _, header_bytes, signature_bytes = _FIXED.unpack_from(body)
    start = _FIXED.size + header_bytes
    end = start + signature_bytes
    if end > len(body) or not message.objects.keys() == {message.message_id, *names}:
        raise ContentError("the message does not consist of the objects that it names.")
    payload = body[end:]
    if names:
        if payload or len(set(names)) < len(names):
            raise ContentError("the payload of the message is not divided as offbeat divides it.")
        payload = b"".join(_part(number, message.objects[name]) for number, name in enumerate(names))
    if max_bytes is not None and len(payload) > max_bytes:
        raise ContentError(f"the payload of the message has {len(payload)} bytes; {max_bytes} are allowed.")
    try:
        return Content(body[_FIXED.size : start].decode(), payload, body[start:end])
    except UnicodeDecodeError:
        raise ContentError("the header of the message is not text.") from None


def _part(number: int, wrapped: bytes) -> bytes:
    names, part = _unwrap(wrapped)
    if names or part[: _NUMBER.size] != _NUMBER.pack(number):
        raise ContentError("the payload of the message is not divided as offbeat divides it.")
    return part[_NUMBER.size :]


def _unwrap(wrapped: bytes) -> tuple[list[str], bytes]:
    try:
        return private_api.unwrap_object(wrapped)
    except ValueError:
        raise ContentError("the message has an object that offbeat does not send.") from None


class MessageDownload:
    """The objects of one message, fetched as they become available."""

    def __init__(self, message_id: str, object_ids: list[str], max_bytes: int) -> None:
        self._message_id, self._missing, self._max_bytes = message_id, list(object_ids), max_bytes
        self._objects: dict[str, bytes] = {}

    def fetch(self, pull: Callable[[str], bytes | None], pool: ThreadPoolExecutor) -> Content | None:
        """Fetch what is available; return the content once all of it is there.

        `pull` returns None for an object that its sender has not sent yet.
        """
        if len(self._missing) > _OVERHEAD_OBJECTS + self._max_bytes // _PART_BYTES:
            raise ContentError(f"the message has {len(self._missing)} objects.")
        while self._missing:
            object_ids = self._missing[:PARALLEL_PULLS]
            several = len(object_ids) > 1
            contents = pool.map(pull, object_ids) if several else map(pull, object_ids)
            found = list(zip(object_ids, contents, strict=True))
            for object_id, content in found:
                if content is not None:
                    self._missing.remove(object_id)
                    self._objects[object_id] = content
            if sum(map(len, self._objects.values())) > self._max_bytes + _OVERHEAD_BYTES:
                raise ContentError(f"the message has more than {self._max_bytes} bytes.")
            if any(content is None for _, content in found):
                return None
        if self._message_id not in self._objects:
            raise ContentError("the message has no content.")
        return from_objects(ContentObjects(self._message_id, self._objects), self._max_bytes)
