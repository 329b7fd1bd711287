"""A SuperLink as a supervisor sees it: one that we started, or one that was there."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offbeat.deploy import flower_commands
from offbeat.deploy.children import Child
from offbeat.deploy.flower_commands import FlowerError
from offbeat.deploy.flower_home import Link, write_app, write_home
from offbeat.deploy.flower_processes import Certificates, await_answer, reached, start_superlink
from offbeat.errors import InputError

_PATIENCE = 60.0  # seconds for a SuperLink to answer
_KEYS = 10.0  # seconds between two looks for keys of new sites
_LONGEST = 30.0  # seconds between two starts


class Started(NamedTuple):
    """Where a SuperLink of our own listens."""

    host: str
    port: int


class Carrier:
    """The run's way to sites; `held` gives one."""

    def __init__(
        self,
        folder: Path,
        settings: Path,
        link: Link,
        started: Started | None,
        certificates: Certificates | None,
    ) -> None:
        self._folder = folder
        self._own = folder / "flower"
        self._home = self._own / "home"
        self._settings = settings
        self._link = link
        self._started = started
        self._certificates = certificates
        self._child: Child | None = None
        self._registered: set[Path] = set()
        self._look = 0.0  # when to look for keys again
        self._again = 0.0  # when to start it again
        self._fails = 0

    def begin(self) -> None:
        """For the first time; what is wrong now is for a person to mend."""
        write_home(self._home, self._link)
        if self._started is not None:
            self._child = self._start(self._started)
        await_answer(self._link, _PATIENCE, self._alive, self._log)
        self._register()

    @property
    def ours(self) -> bool:
        return self._started is not None

    def tend(self) -> None:
        now = time.monotonic()
        if self._started is not None and not self._alive():
            if now < self._again:
                return
            self._fails += 1
            self._again = now + min(_LONGEST, 2.0**self._fails)
            self._child = self._start(self._started)
            try:
                await_answer(self._link, _PATIENCE, self._alive, self._log)
            except InputError as error:
                raise FlowerError(str(error)) from None
            self._fails = 0
        if now > self._look:
            self._look = now + _KEYS
            with contextlib.suppress(InputError):  # told when it was first tried
                self._register()

    def submit(self, *, resume: bool) -> str:
        app, told = write_app(
            self._own,
            {
                "settings": str(self._settings.absolute()),
                "folder": str(self._folder.absolute()),
                "resume": resume,
                "authenticated": self._certificates is not None,
            },
        )
        return flower_commands.submit(self._home, app, told)

    def is_over(self, run: str) -> bool:
        return flower_commands.is_over(self._home, run)

    def stop(self, run: str) -> None:
        if self._alive():
            flower_commands.stop(self._home, run)

    def end(self, *, at_once: bool) -> None:
        """Ours alone."""
        if self._child is not None:
            self._child.kill() if at_once else self._child.end()

    @property
    def _log(self) -> Path | None:
        return None if self._started is None else self._own / "superlink.log"

    def _start(self, started: Started) -> Child:
        return start_superlink(started.host, started.port, self._own, self._certificates)

    def _alive(self) -> bool:
        return self._started is None or (self._child is not None and self._child.alive())

    def _register(self) -> None:
        if self._certificates is None:
            return
        for key in self._certificates.public_keys():
            if key not in self._registered:
                self._registered.add(key)
                flower_commands.register(self._home, key)


@contextmanager
def held(
    folder: Path, settings: Path, superlink: Link | Started, certificates: Certificates | None
) -> Iterator[Carrier]:
    """Started, and ended when the block is left: in order, or at once where it is left by an exception."""
    started = superlink if isinstance(superlink, Started) else None
    authority = None if certificates is None else certificates.authority
    link = superlink if isinstance(superlink, Link) else Link(reached(*superlink), authority)
    carrier = Carrier(folder, settings, link, started, certificates)
    at_once = True
    try:
        carrier.begin()
        yield carrier
        at_once = False
    finally:
        carrier.end(at_once=at_once)
