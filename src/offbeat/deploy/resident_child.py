"""A site's resident as a child process, kept alive."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.deploy.backoff import Backoff
from offbeat.deploy.children import Child
from offbeat.errors import InputError

_FIRST, _LONGEST = 0.5, 60.0  # seconds between two starts


class Own(NamedTuple):
    """What a site is started with."""

    name: str
    folder: Path
    data: str
    module: str | None = None
    losses: str | None = None
    key: Path | None = None
    helper_key: Path | None = None
    minimum: int | None = None

    def words(self, socket: Path) -> list[str]:
        """The command that starts it."""
        given = self._asdict() | {"socket": socket}
        options = [(name.replace("_", "-"), value) for name, value in given.items() if value is not None]
        return [sys.executable, "-m", "offbeat.deploy.resident"] + [
            word for name, value in options for word in (f"--{name}", str(value))
        ]


class ResidentChild:
    """Holds data, model and memory; messages come to its socket."""

    def __init__(self, own: Own, socket: Path, say: Callable[[str], None]) -> None:
        self._own = own
        self._socket = socket
        self._say = say
        self._child: Child | None = None
        self._heard = b""  # of a line that it has not ended
        self._backoff = Backoff(_FIRST, _LONGEST)

    def start(self) -> dict[str, Any]:
        """What it says of itself once it is ready, which takes as long as loading does."""
        log = self._own.folder / "resident.log"
        words = self._own.words(self._socket)
        child = Child(words, os.environ, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert child.process.stdout is not None
            line = child.process.stdout.readline()
            said: dict[str, Any] = json.loads(line) if line else {}
        except BaseException:
            child.kill()
            raise
        if "ready" not in said:
            child.end()
            raise InputError(str(said.get("error") or f"the site's process ended as it began: see {log}."))
        os.set_blocking(child.process.stdout.fileno(), False)
        self._child, self._heard = child, b""
        return said

    def tend(self) -> None:
        """Start it again if it has died; that this may fail for a while is only told."""
        if self._child is not None and self._child.alive():
            self._backoff.succeed()
            self._hear(self._child)
            return
        if self._child is not None:
            self._child = None
            self._say("the site's process ended, and is started again.")
        if not self._backoff.due:
            return
        try:
            self.start()
        except InputError as error:
            pause = self._backoff.fail()
            self._say(f"{str(error).rstrip('.')}; it is tried again in {pause:.0f} s.")

    def _hear(self, child: Child) -> None:
        """Pass on what it says after it was ready."""
        assert child.process.stdout is not None
        *lines, self._heard = (self._heard + (child.process.stdout.read() or b"")).split(b"\n")
        for line in lines:
            self._say(f"the server turned this site away: {json.loads(line)['refused']}")

    def end(self, *, at_once: bool) -> None:
        """Let go of it."""
        if self._child is not None:
            self._child.kill() if at_once else self._child.end()
