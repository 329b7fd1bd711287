"""The light end of a site: passes a message on to the site's process and waits for the answer.

Flower starts a process for every message. This module imports the standard library only, so that such a
process starts quickly; data, model and torch stay in the site's process.

A message on the socket is a frame: a header in JSON, then a payload, each after its length in 8 bytes,
little endian.
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
from pathlib import Path
from typing import Any

SOCKET_VARIABLE = "OFFBEAT_SITE"  # the environment variable with the path of the socket
MAX_HEADER_BYTES = 1 << 20  # enough for a message header of 64 KiB, whatever its characters
MAX_PAYLOAD_BYTES = 1 << 34
CONNECT_TIMEOUT = 30.0  # seconds for a site's process that is being restarted
_CONNECT_PAUSE = 0.05
_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 20  # memory is allocated as bytes arrive, not as they are announced


class RelayError(Exception):
    """The site's process gave no answer; the text is a sentence."""


class FrameError(Exception):
    """A frame is malformed or incomplete."""


def site_folder(name: str) -> Path:
    """Return the default folder of a site of this user."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "offbeat" / "sites" / name


def ask_site(path: Path | str, kind: str, header: str, payload: bytes, timeout: float) -> tuple[str, bytes]:
    """Return the answer of the site's process behind a socket; a process that takes longer is killed."""
    path, deadline = Path(path), time.monotonic() + timeout
    with contextlib.closing(_connect(path, deadline)) as connection:
        try:
            send_frame(connection, {"kind": kind, "note": header, "seconds": timeout}, payload, deadline)
            head, answer = receive_frame(connection, deadline)
        except TimeoutError:
            killed = _kill_site(path, connection)
            raise RelayError(
                f"the site did not answer within {timeout:g} seconds"
                f"{', and its process was killed in order to be restarted' if killed else ''}."
            ) from None
        except (FrameError, OSError) as error:
            raise RelayError(f"the site's process ended or closed the connection ({error}).") from None
    if type(head.get("note")) is not str:
        raise RelayError("the answer of the site's process has no header.")
    return head["note"], answer


def pid_file(path: Path) -> Path:
    """Return the file in which the process behind a socket writes its PID."""
    return path.with_name(f"{path.name}.pid")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Kill this process if the block takes longer, even if it never returns to Python."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # the default action of SIGALRM ends the process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def send_frame(connection: socket.socket, head: dict[str, Any], payload: bytes, deadline: float) -> None:
    """Send a frame before `deadline`, a time of the monotonic clock."""
    text = json.dumps(head).encode()
    sizes = [len(part).to_bytes(_LENGTH_BYTES, "little") for part in (text, payload)]
    for part in (sizes[0] + text + sizes[1], payload):
        if part:  # after the last byte the other end may answer and close the connection
            _set_timeout(connection, deadline)
            connection.sendall(part)


def receive_frame(connection: socket.socket, deadline: float) -> tuple[dict[str, Any], bytes]:
    """Receive a frame before `deadline`, a time of the monotonic clock."""
    text = _receive_part(connection, MAX_HEADER_BYTES, "header", deadline)
    try:
        head = json.loads(text)
    except ValueError:
        raise FrameError("the header of a frame is not JSON") from None
    if not isinstance(head, dict):
        raise FrameError("the header of a frame is not an object")
    return head, _receive_part(connection, MAX_PAYLOAD_BYTES, "payload", deadline)


def _receive_part(connection: socket.socket, max_bytes: int, name: str, deadline: float) -> bytes:
    size = int.from_bytes(_receive_exactly(connection, _LENGTH_BYTES, deadline), "little")
    if size > max_bytes:
        raise FrameError(f"the {name} of a frame is announced with {size} bytes; {max_bytes} are allowed")
    return _receive_exactly(connection, size, deadline)


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    chunks, missing = [], size
    while missing:
        _set_timeout(connection, deadline)
        chunk = connection.recv(min(_CHUNK_BYTES, missing))
        if not chunk:
            raise FrameError("the connection was closed in the middle of a frame")
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def _set_timeout(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _connect(path: Path, deadline: float) -> socket.socket:
    """Connect to the site's process, which may be starting."""
    give_up = min(deadline, time.monotonic() + CONNECT_TIMEOUT)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(_CONNECT_PAUSE, deadline - time.monotonic()))
            connection.connect(str(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            connection.close()
            if time.monotonic() >= give_up:
                raise RelayError(
                    f"the site's process is not running ({error.strerror}): is 'offbeat join' still running?"
                ) from None
            time.sleep(_CONNECT_PAUSE)
        except OSError as error:
            connection.close()
            raise RelayError(f"the site's process cannot be reached: {error.strerror or error}.") from None


def _kill_site(path: Path, connection: socket.socket) -> bool:
    """Kill the process at the other end, if it is the one named in the PID file."""
    try:
        pid = int(pid_file(path).read_text())
    except (OSError, ValueError):
        return False
    if sys.platform == "linux":
        size = struct.calcsize("3i")
        peer, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if peer != pid:
            return False
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True
