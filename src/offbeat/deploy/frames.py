"""A question or an answer on a line between two processes of one machine: a head in JSON, then a payload.

Each is a length of 8 bytes, little endian, and that many bytes. Only the standard library is used:
the process that passes messages on must start quickly.
"""

import json
import socket
import time
from typing import Any

MOST_HEAD = 1 << 20  # bytes: a note of 64 KiB, whatever its characters
MOST_PAYLOAD = 1 << 34
_LENGTH = 8
_PIECE = 1 << 20  # memory is taken as bytes come, not as they are promised


class FrameError(Exception):
    """What came is no frame, or ended early; the text says which."""


def send(line: socket.socket, head: dict[str, Any], payload: bytes, until: float) -> None:
    """One frame, by that time of the monotonic clock."""
    text = json.dumps(head).encode()
    sizes = [len(part).to_bytes(_LENGTH, "little") for part in (text, payload)]
    for part in (sizes[0] + text + sizes[1], payload):
        if part:  # after the last byte the other end may answer and be gone
            _limit(line, until)
            line.sendall(part)


def receive(line: socket.socket, until: float) -> tuple[dict[str, Any], bytes]:
    """The next frame, by that time of the monotonic clock."""
    text = _part(line, MOST_HEAD, "head", until)
    try:
        head = json.loads(text)
    except ValueError:
        raise FrameError("the head of a frame is not JSON") from None
    if not isinstance(head, dict):
        raise FrameError("the head of a frame is not an object")
    return head, _part(line, MOST_PAYLOAD, "payload", until)


def _part(line: socket.socket, most: int, what: str, until: float) -> bytes:
    size = int.from_bytes(_read(line, _LENGTH, until), "little")
    if size > most:
        raise FrameError(f"the {what} of a frame is said to have {size} bytes, and {most} are allowed")
    return _read(line, size, until)


def _read(line: socket.socket, size: int, until: float) -> bytes:
    pieces, missing = [], size
    while missing:
        _limit(line, until)
        piece = line.recv(min(_PIECE, missing))
        if not piece:
            raise FrameError("the other end closed the line in the middle of a frame")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _limit(line: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    line.settimeout(left)
