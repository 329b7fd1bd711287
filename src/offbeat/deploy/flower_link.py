"""A SuperLink of our own: it listens to its machine alone, behind a gate for sites; both are kept alive."""

from pathlib import Path
from typing import NamedTuple

from offbeat.deploy.backoff import Backoff
from offbeat.deploy.children import Child
from offbeat.deploy.flower_commands import FlowerError
from offbeat.deploy.flower_home import Link
from offbeat.deploy.flower_processes import OWN, Certificates, await_answer, start_superlink
from offbeat.deploy.gated import GateChild
from offbeat.deploy.ports import bound, free_port, joined
from offbeat.errors import InputError

_PATIENCE = 60.0  # seconds for a SuperLink to answer
_FIRST, _LONGEST = 2.0, 30.0  # seconds between two starts


class Started(NamedTuple):
    """Where sites find it."""

    host: str
    port: int


class OwnLink:
    """Its address lasts as long as it can: a server outlives a SuperLink that is soon back."""

    def __init__(self, started: Started, folder: Path, certificates: Certificates | None) -> None:
        self._folder, self._certificates = folder, certificates
        self._listener = bound(*started)
        self._listener.listen()
        self._gate = GateChild(self._listener, folder, certificates)
        self._port = free_port()
        self._child: Child | None = None
        self._moves = False  # whether the port may be somebody else's by now
        self._backoff = Backoff(_FIRST, _LONGEST)

    @property
    def link(self) -> Link:
        """How this machine reaches it, beside the gate."""
        authority = None if self._certificates is None else self._certificates.authority
        return Link(joined(OWN, self._port), authority)

    def begin(self) -> None:
        """For the first time; what is wrong now is for a person to mend."""
        self._gate.lead_to(self.link)
        self._start()
        self._gate.check()

    def tend(self) -> bool:
        """Start again what has died; whether the SuperLink had."""
        self._gate.tend()
        if self.alive() or not self._backoff.due:
            return False
        self._backoff.fail()
        if self._moves:
            self._port = free_port()
            self._gate.lead_to(self.link)
        self._moves = True
        try:
            self._start()
        except InputError as error:
            raise FlowerError(str(error)) from None
        self._moves = False
        self._backoff.succeed()
        return True

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def end(self, *, at_once: bool) -> None:
        self._gate.end()
        self._listener.close()
        if self._child is not None:
            self._child.kill() if at_once else self._child.end()

    def _start(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._child = start_superlink(OWN, self._port, self._folder, self._certificates)
        await_answer(self.link, _PATIENCE, self._child.alive, self._folder / "superlink.log")
