"""A question or an answer on a line between two processes of one machine: a head in JSON, then a payload.

Each is a length of 8 bytes, little endian, and that many bytes. Only the standard library is used:
the process that passes messages on must start quickly.

A process that ends itself where its work hangs.

Where things are kept that outlive a command.

The light end of a site: passes a message on to its resident process, and waits for the answer.

Flower starts a process for every message. This one imports the standard library alone, so that it
is ready at once; data, model and torch stay in the resident.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 1 << 20  # bytes: a note of 64 KiB, whatever its characters
MAX_PAYLOAD_BYTES = 1 << 34
_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 20  # memory is taken as bytes come, not as they are promised


class FrameError(Exception):
    """What came is no frame, or ended early; the text says which."""


def send_frame(line: socket.socket, head: dict[str, Any], payload: bytes, until: float) -> None:
    """One frame, by that time of the monotonic clock."""
    text = json.dumps(head).encode()
    sizes = [len(part).to_bytes(_LENGTH_BYTES, "little") for part in (text, payload)]
    for part in (sizes[0] + text + sizes[1], payload):
        if part:  # after the last byte the other end may answer and be gone
            _set_timeout(line, until)
            line.sendall(part)


def receive_frame(line: socket.socket, until: float) -> tuple[dict[str, Any], bytes]:
    """The next frame, by that time of the monotonic clock."""
    text = _receive_part(line, MAX_HEADER_BYTES, "head", until)
    try:
        head = json.loads(text)
    except ValueError:
        raise FrameError("the head of a frame is not JSON") from None
    if not isinstance(head, dict):
        raise FrameError("the head of a frame is not an object")
    return head, _receive_part(line, MAX_PAYLOAD_BYTES, "payload", until)


def _receive_part(line: socket.socket, most: int, what: str, until: float) -> bytes:
    size = int.from_bytes(_receive_exactly(line, _LENGTH_BYTES, until), "little")
    if size > most:
        raise FrameError(f"the {what} of a frame is said to have {size} bytes, and {most} are allowed")
    return _receive_exactly(line, size, until)


def _receive_exactly(line: socket.socket, size: int, until: float) -> bytes:
    pieces, missing = [], size
    while missing:
        _set_timeout(line, until)
        piece = line.recv(min(_CHUNK_BYTES, missing))
        if not piece:
            raise FrameError("the other end closed the line in the middle of a frame")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _set_timeout(line: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    line.settimeout(left)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """The process is ended if what is inside takes longer, even where it never returns to Python."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles the signal, so the system acts on it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def site_folder(name: str) -> Path:
    """The folder of one of this user's sites."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "offbeat" / "sites" / name


CONNECT_TIMEOUT = 30.0  # seconds that a resident has to come back
_CONNECT_PAUSE = 0.05


class RelayError(Exception):
    """The resident gave no answer; the text is a sentence."""


def ask_site(path: Path | str, kind: str, note: str, payload: bytes, seconds: float) -> tuple[str, bytes]:
    """What the resident behind the socket answers; one that takes longer is ended, for it hangs."""
    path, until = Path(path), time.monotonic() + seconds
    with contextlib.closing(_connect(path, until)) as line:
        try:
            send_frame(line, {"kind": kind, "note": note, "seconds": seconds}, payload, until)
            head, answer = receive_frame(line, until)
        except TimeoutError:
            ended = _kill_site(path, line)
            raise RelayError(
                f"the site did not answer within {seconds:g} seconds"
                f"{', and its process was ended to be started anew' if ended else ''}."
            ) from None
        except (FrameError, OSError) as error:
            raise RelayError(f"the site's process ended or broke off ({error}).") from None
    if type(head.get("note")) is not str:
        raise RelayError("the site's process answered with something else than a note.")
    return head["note"], answer


def pid_file(path: Path) -> Path:
    """Where the resident behind a socket says who it is."""
    return path.with_name(f"{path.name}.pid")


def _connect(path: Path, until: float) -> socket.socket:
    """A line to the resident, which may just be starting."""
    patience = min(until, time.monotonic() + CONNECT_TIMEOUT)
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.settimeout(max(_CONNECT_PAUSE, until - time.monotonic()))
            line.connect(str(path))
            return line
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            line.close()
            if time.monotonic() >= patience:
                raise RelayError(
                    f"the site's process is not there ({error.strerror}): is 'offbeat join' still running?"
                ) from None
            time.sleep(_CONNECT_PAUSE)
        except OSError as error:
            line.close()
            raise RelayError(f"the site's process cannot be reached: {error.strerror or error}.") from None


def _kill_site(path: Path, line: socket.socket) -> bool:
    """Kill the process that holds the other end, if it is the one that said so beside the socket."""
    try:
        pid = int(pid_file(path).read_text())
    except (OSError, ValueError):
        return False
    if sys.platform == "linux":
        size = struct.calcsize("3i")
        holder, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if holder != pid:
            return False
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True
