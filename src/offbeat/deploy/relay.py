"""The light end of a site: passes a message on to its resident process, and waits for the answer.

Flower starts a process for every message. This one imports the standard library alone, so that it
is ready at once; data, model and torch stay in the resident.
"""

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from offbeat.deploy import frames
from offbeat.deploy.frames import FrameError

PATIENCE = 30.0  # seconds that a resident has to come back
_PAUSE = 0.05


class RelayError(Exception):
    """The resident gave no answer; the text is a sentence."""


def ask(path: Path | str, kind: str, note: str, payload: bytes, seconds: float) -> tuple[str, bytes]:
    """What the resident behind the socket answers; one that takes longer is ended, for it hangs."""
    path, until = Path(path), time.monotonic() + seconds
    with contextlib.closing(_connect(path, until)) as line:
        try:
            frames.send(line, {"kind": kind, "note": note, "seconds": seconds}, payload, until)
            head, answer = frames.receive(line, until)
        except TimeoutError:
            ended = _end(path, line)
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
    patience = min(until, time.monotonic() + PATIENCE)
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.settimeout(max(_PAUSE, until - time.monotonic()))
            line.connect(str(path))
            return line
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            line.close()
            if time.monotonic() >= patience:
                raise RelayError(
                    f"the site's process is not there ({error.strerror}): is 'offbeat join' still running?"
                ) from None
            time.sleep(_PAUSE)
        except OSError as error:
            line.close()
            raise RelayError(f"the site's process cannot be reached: {error.strerror or error}.") from None


def _end(path: Path, line: socket.socket) -> bool:
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
