"""The gate as a child process, kept alive on a socket that outlasts it."""

import socket
import subprocess
import sys
import time
from pathlib import Path

from offbeat.deploy.backoff import Backoff
from offbeat.deploy.children import Child
from offbeat.deploy.flower_home import Link, environment
from offbeat.deploy.flower_processes import Certificates
from offbeat.errors import InputError

_FIRST, _LONGEST = 0.5, 30.0  # seconds between two starts
_LASTING = 60.0  # seconds after which a start was a good one


class GateChild:
    """Connections that come while it is away wait at the socket."""

    def __init__(self, listener: socket.socket, folder: Path, certificates: Certificates | None) -> None:
        self._listener, self._folder, self._certificates = listener, folder, certificates
        self._link: Link | None = None
        self._child: Child | None = None
        self._backoff = Backoff(_FIRST, _LONGEST)

    @property
    def log(self) -> Path:
        """What did not pass."""
        return self._folder / "gate.log"

    def lead_to(self, link: Link) -> None:
        """Start it, before this SuperLink."""
        self.end()
        self._link = link
        self._child = self._start(link)

    def check(self) -> None:
        """Refuse to go on without it."""
        if self._child is None or not self._child.alive():
            raise InputError(f"the gate before the SuperLink ended as it began; see {self.log}.")

    def tend(self) -> None:
        """Start it again, if it has died."""
        if self._link is None:
            return
        if self._child is not None and not self._child.alive():
            if time.monotonic() - self._child.begun > _LASTING:
                self._backoff.succeed()
            self._child = None
            self._backoff.fail()
        if self._child is None and self._backoff.due:
            self._child = self._start(self._link)

    def end(self) -> None:
        """At once: it has nothing to save."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _start(self, link: Link) -> Child:
        number = self._listener.fileno()
        words = [sys.executable, "-P", "-m", "offbeat.deploy.gate", "--listener", str(number)]
        words += ["--superlink", link.address]
        if self._certificates is not None:
            words += ["--authority", str(self._certificates.authority.absolute())]
            words += ["--certificate", str(self._certificates.server.absolute())]
            words += ["--key", str(self._certificates.key.absolute())]
        return Child(
            words, environment(self._folder / "home"), self.log, stdin=subprocess.PIPE, handed=(number,)
        )
