"""A site that lies where it is told to: what stands at its socket changes what the resident says.

Started as `python rogue.py` with the words of `offbeat join`; its key and its SuperNode are real ones.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import sites

from offbeat.cli import deploy as command
from offbeat.cli.main import parse
from offbeat.deploy.flower.supernode import SiteProcess, SuperNodeProcess
from offbeat.deploy.site import relay

_HUGE = 64 << 20  # bytes
_SLOW = 60.0


def lie(order: str, note: str, payload: bytes, before: tuple[str, bytes] | None) -> tuple[str, bytes]:
    """A bad answer in the place of a good one."""
    facts = json.loads(note)
    client, version, visit = facts["task"]
    bits, floats = bytearray(payload), len(payload) // 4 * 4

    def said(**changed: Any) -> str:
        return json.dumps(facts | changed)

    match order:
        case "NaN":
            bits[floats - 4 : floats] = b"\x00\x00\xc0\x7f"
            return note, bytes(bits)
        case "infinity":
            bits[floats - 4 : floats] = b"\x00\x00\x80\x7f"
            return note, bytes(bits)
        case "wrong shape":
            return said(form=[[name, [1, *shape]] for name, shape in facts["form"]]), payload
        case "wrong dtype":
            return said(form=[["float16", shape] for _, shape in facts["form"]]), payload
        case "cut short":
            return note, payload[:-1]
        case "bytes too many":
            return note, payload + b"\0"
        case "huge array":
            return said(form=[["float32", [_HUGE // 4]]]), secrets.token_bytes(1 << 20) * (_HUGE >> 20)
        case "random bytes":
            return note, secrets.token_bytes(len(payload))
        case "corrupt note":
            place = secrets.randbelow(len(note))
            return note[:place] + "\x00" + note[place + 1 :], payload
        case "no JSON":
            return "__import__('os').abort()", payload
        case "replay":
            return before or (said(task=[client, version, max(0, visit - 1)]), payload)
        case "another's task":
            return said(task=[client + 1, version, visit]), payload
        case "version from the future":
            return said(task=[client, version + 1000, visit]), payload
        case "another run":
            return said(run=secrets.token_hex(16)), payload
        case "field too many":
            return said(weight=1e9), payload
        case "no payload":
            return note, b""
    raise ValueError(order)


LIES = (
    *("NaN", "infinity", "wrong shape", "wrong dtype", "cut short", "bytes too many", "huge array"),
    *("random bytes", "corrupt note", "no JSON", "replay", "another's task", "version from the future"),
    *("another run", "field too many", "no payload"),
)
MOUTH = ".mouth"  # what is for a rogue to do, and not for its resident
BREAKS = "breaks off"  # closes the line in the middle of an answer


class Mouth:
    """Between the relay and the resident."""

    def __init__(self, name: str, place: Path, resident: Path) -> None:
        self._name = name
        self._resident = resident
        self._before: tuple[str, bytes] | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(place))
        self._listener.listen(8)

    def serve(self) -> None:
        while True:
            line, _ = self._listener.accept()
            with line, contextlib.suppress(OSError, relay.FrameError, relay.RelayError):
                self._answer(line)

    def _answer(self, line: socket.socket) -> None:
        head, payload = relay.receive_frame(line, time.monotonic() + _SLOW)
        note, result = relay.ask_site(self._resident, head["kind"], head["note"], payload, head["seconds"])
        order = sites.take(f"{self._name}{MOUTH}") if head["kind"] == "task" and result else None
        if order is None:
            if result:
                self._before = note, result
        else:
            sites.tell(f"{self._name}{MOUTH}", {"told": order, "task": json.loads(note)["task"]})
            if order == BREAKS:
                line.sendall((1 << 10).to_bytes(8, "little") + b"{")
                return
            note, result = lie(order, note, result, self._before)
        relay.send_frame(line, {"note": note}, result, time.monotonic() + _SLOW)


def main() -> int:
    """Until it is told to stop."""
    given = parse(["join", *sys.argv[1:]])
    own, link = command._site_options(given), command._superlink_of_site(given)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    own.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="rogue-"))
    resident = SiteProcess(own, place / "resident", print)
    node = SuperNodeProcess(link, own.key, own.folder, {"OFFBEAT_SITE": str(place / "mouth")}, print)
    try:
        resident.start()
        mouth = Mouth(own.name, place / "mouth", place / "resident")
        threading.Thread(target=mouth.serve, daemon=True).start()
        while not stopped.wait(0.25):
            node.keep_alive()
            resident.keep_alive()
    finally:
        node.stop(kill=False)
        resident.stop(kill=False)
        shutil.rmtree(place, ignore_errors=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the mouth may be waiting for somebody
