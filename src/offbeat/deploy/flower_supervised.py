"""A SuperLink as a supervisor sees it: one that we started, or one that was there."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.deploy import flower_commands
from offbeat.deploy.flower_home import Link, write_app, write_home
from offbeat.deploy.flower_link import OwnLink, Started
from offbeat.deploy.flower_processes import Certificates, await_answer
from offbeat.errors import InputError

_PATIENCE = 60.0  # seconds for a SuperLink to answer
_KEYS = 10.0  # seconds between two looks for keys of new sites


class Carrier:
    """The run's way to sites; `held` gives one."""

    def __init__(
        self, folder: Path, settings: Path, superlink: Link | OwnLink, certificates: Certificates | None
    ) -> None:
        self._folder = folder
        self._flower = folder / "flower"
        self._home = self._flower / "home"
        self._settings = settings
        self._superlink = superlink
        self._own = superlink if isinstance(superlink, OwnLink) else None
        self._certificates = certificates
        self._registered: set[Path] = set()
        self._look = 0.0  # when to look for keys again

    def begin(self) -> None:
        """For the first time; what is wrong now is for a person to mend."""
        superlink = self._superlink
        if isinstance(superlink, OwnLink):
            write_home(self._home, superlink.link)
            superlink.begin()
        else:
            write_home(self._home, superlink)
            await_answer(superlink, _PATIENCE, lambda: True)
        self._register()

    @property
    def ours(self) -> bool:
        return self._own is not None

    def tend(self) -> None:
        if self._own is not None:
            if self._own.tend():
                write_home(self._home, self._own.link)
            if not self._own.alive():
                return
        now = time.monotonic()
        if now > self._look:
            self._look = now + _KEYS
            with contextlib.suppress(InputError):  # told when it was first tried
                self._register()

    def submit(self, *, resume: bool) -> str:
        app, told = write_app(
            self._flower,
            {
                "settings": str(self._settings.absolute()),
                "folder": str(self._folder.absolute()),
                "resume": resume,
                "authenticated": self._certificates is not None,
                "sites": "" if self._certificates is None else str(self._certificates.sites.absolute()),
            },
        )
        return flower_commands.submit(self._home, app, told)

    def is_over(self, run: str) -> bool:
        return flower_commands.is_over(self._home, run)

    def stop(self, run: str) -> None:
        if self._own is None or self._own.alive():
            flower_commands.stop(self._home, run)

    def end(self, *, at_once: bool) -> None:
        """Ours alone."""
        if self._own is not None:
            self._own.end(at_once=at_once)

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
    own = superlink if isinstance(superlink, Link) else OwnLink(superlink, folder / "flower", certificates)
    carrier = Carrier(folder, settings, own, certificates)
    at_once = True
    try:
        carrier.begin()
        yield carrier
        at_once = False
    finally:
        carrier.end(at_once=at_once)
