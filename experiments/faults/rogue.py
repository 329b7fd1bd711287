"""A site that lies where it is told to: its answers are changed before they are signed.

Started as `python rogue.py` with the options of `offbeat join`; its key and its connection are real ones.
"""

import contextlib
import json
import os
import secrets
import sys
from datetime import timedelta
from typing import Any

import sites

from offbeat.cli import main
from offbeat.deploy.flower import site as connection
from offbeat.deploy.flower.private_api import FleetClient, OutgoingReply
from offbeat.deploy.site.site import Site

_HUGE = 64 << 20  # bytes


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
CLOCK = "OFFBEAT_CLOCK"  # by how many seconds the clock of a site is wrong
MOUTH = ".mouth"  # what is for a rogue to do, and not for its model
BREAKS = "breaks off"  # sends only a part of an answer
_breaking: list[bool] = []


class Rogue(Site):
    """A site whose next answer is a lie where there is an order."""

    _before: tuple[str, bytes] | None = None

    def answer(self, kind: str, header: str, payload: bytes) -> tuple[str, bytes]:
        """A good answer, or a bad one."""
        note, result = super().answer(kind, header, payload)
        order = sites.take(f"{self.name}{MOUTH}") if kind == "task" and result else None
        if order is None:
            if kind == "task" and result:
                self._before = note, result
            return note, result
        sites.tell(f"{self.name}{MOUTH}", {"told": order, "task": json.loads(note)["task"]})
        if order == BREAKS:
            _breaking.append(True)
            return note, result
        return lie(order, note, result, self._before)


class RogueClient(FleetClient):
    """A connection that sends only the first part of an answer where it is told to."""

    def send(self, reply: OutgoingReply, seconds: float) -> None:
        """Send a reply, or a part of it."""
        if _breaking:
            _breaking.clear()
            reply.objects = dict.fromkeys(reply.objects)  # type: ignore[arg-type]  # no request has such bytes
            with contextlib.suppress(TypeError):
                super().send(reply, seconds)
            return
        super().send(reply, seconds)


def misset_clock(seconds: float) -> None:
    """Have the times that are signed be wrong by so much."""
    from flwr.supernode import node_auth_http_interceptor as signing

    right = signing.now
    signing.now = lambda: right() + timedelta(seconds=seconds)


if __name__ == "__main__":
    if os.environ.get(CLOCK):
        misset_clock(float(os.environ[CLOCK]))
    connection.Site = Rogue  # type: ignore[misc]
    connection.FleetClient = RogueClient  # type: ignore[misc]
    sys.exit(main(["join", *sys.argv[1:]]))
