"""The gate as a child process, kept alive on a socket that outlasts it.

A SuperLink of our own: it listens to its machine alone, behind a gate for sites; both are kept alive.

A SuperLink as a supervisor sees it: one that we started, or one that was there.

Sees a deployed run through: whatever dies on the way is started again, as long as there is progress.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offbeat.deploy.flower import commands
from offbeat.deploy.flower.commands import (
    LOOPBACK,
    Certificates,
    FlowerError,
    SuperLinkAddress,
    flower_environment,
    start_superlink,
    wait_for_superlink,
    write_flower_app,
    write_flower_home,
)
from offbeat.deploy.process import ChildProcess, bind_socket, format_address, free_port
from offbeat.deploy.protocol.transport import Backoff
from offbeat.deploy.server.run import (
    STOP_FILE,
    ServeOutcome,
    is_running,
    read_outcome,
    read_server,
    remove_outcome,
    remove_server,
)
from offbeat.errors import InputError
from offbeat.files import JsonlTail

_FIRST_GATEWAY_PAUSE, _MAX_GATEWAY_PAUSE = 0.5, 30.0  # seconds between two starts
_GATEWAY_STABLE = 60.0  # seconds after which a start was a good one


class GatewayProcess:
    """Connections that come while it is away wait at the socket."""

    def __init__(self, listener: socket.socket, folder: Path, certificates: Certificates | None) -> None:
        self._listener, self._folder, self._certificates = listener, folder, certificates
        self._link: SuperLinkAddress | None = None
        self._child: ChildProcess | None = None
        self._backoff = Backoff(_FIRST_GATEWAY_PAUSE, _MAX_GATEWAY_PAUSE)

    @property
    def log(self) -> Path:
        """What did not pass."""
        return self._folder / "gate.log"

    def lead_to(self, link: SuperLinkAddress) -> None:
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
            if time.monotonic() - self._child.begun > _GATEWAY_STABLE:
                self._backoff.reset()
            self._child = None
            self._backoff.fail()
        if self._child is None and self._backoff.due:
            self._child = self._start(self._link)

    def end(self) -> None:
        """At once: it has nothing to save."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _start(self, link: SuperLinkAddress) -> ChildProcess:
        number = self._listener.fileno()
        words = [sys.executable, "-P", "-m", "offbeat.deploy.gateway", "--listener", str(number)]
        words += ["--superlink", link.address]
        if self._certificates is not None:
            words += ["--authority", str(self._certificates.authority.absolute())]
            words += ["--certificate", str(self._certificates.server.absolute())]
            words += ["--key", str(self._certificates.key.absolute())]
        return ChildProcess(
            words,
            flower_environment(self._folder / "home"),
            self.log,
            stdin=subprocess.PIPE,
            handed=(number,),
        )


_LOCAL_SUPERLINK_TIMEOUT = 60.0  # seconds for a SuperLink to answer
_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE = 2.0, 30.0  # seconds between two starts


class ListenAddress(NamedTuple):
    """Where sites find it."""

    host: str
    port: int


class LocalSuperLink:
    """Its address lasts as long as it can: a server outlives a SuperLink that is soon back."""

    def __init__(self, started: ListenAddress, folder: Path, certificates: Certificates | None) -> None:
        self._folder, self._certificates = folder, certificates
        self._listener = bind_socket(*started)
        self._listener.listen()
        self._gate = GatewayProcess(self._listener, folder, certificates)
        self._port = free_port()
        self._child: ChildProcess | None = None
        self._moves = False  # whether the port may be somebody else's by now
        self._backoff = Backoff(_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE)

    @property
    def link(self) -> SuperLinkAddress:
        """How this machine reaches it, beside the gate."""
        authority = None if self._certificates is None else self._certificates.authority
        return SuperLinkAddress(format_address(LOOPBACK, self._port), authority)

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
        self._backoff.reset()
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
        self._child = start_superlink(LOOPBACK, self._port, self._folder, self._certificates)
        wait_for_superlink(
            self.link, _LOCAL_SUPERLINK_TIMEOUT, self._child.alive, self._folder / "superlink.log"
        )


_SUPERLINK_TIMEOUT = 60.0  # seconds for a SuperLink to answer
_KEY_INTERVAL = 10.0  # seconds between two looks for keys of new sites


class SuperLinkBackend:
    """The run's way to sites; `held` gives one."""

    def __init__(
        self,
        folder: Path,
        settings: Path,
        superlink: SuperLinkAddress | LocalSuperLink,
        certificates: Certificates | None,
    ) -> None:
        self._folder = folder
        self._flower = folder / "flower"
        self._home = self._flower / "home"
        self._settings = settings
        self._superlink = superlink
        self._own = superlink if isinstance(superlink, LocalSuperLink) else None
        self._certificates = certificates
        self._registered: set[Path] = set()
        self._look = 0.0  # when to look for keys again

    def begin(self) -> None:
        """For the first time; what is wrong now is for a person to mend."""
        superlink = self._superlink
        if isinstance(superlink, LocalSuperLink):
            write_flower_home(self._home, superlink.link)
            superlink.begin()
        else:
            write_flower_home(self._home, superlink)
            wait_for_superlink(superlink, _SUPERLINK_TIMEOUT, lambda: True)
        self._register()

    @property
    def ours(self) -> bool:
        return self._own is not None

    def tend(self) -> None:
        if self._own is not None:
            if self._own.tend():
                write_flower_home(self._home, self._own.link)
            if not self._own.alive():
                return
        now = time.monotonic()
        if now > self._look:
            self._look = now + _KEY_INTERVAL
            with contextlib.suppress(InputError):  # told when it was first tried
                self._register()

    def submit(self, *, resume: bool) -> str:
        app, told = write_flower_app(
            self._flower,
            {
                "settings": str(self._settings.absolute()),
                "folder": str(self._folder.absolute()),
                "resume": resume,
                "authenticated": self._certificates is not None,
                "sites": "" if self._certificates is None else str(self._certificates.sites.absolute()),
            },
        )
        return commands.submit_run(self._home, app, told)

    def is_over(self, run: str) -> bool:
        return commands.is_run_finished(self._home, run)

    def stop(self, run: str) -> None:
        if self._own is None or self._own.alive():
            commands.stop_run(self._home, run)

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
                commands.register_key(self._home, key)


@contextmanager
def running_backend(
    folder: Path,
    settings: Path,
    superlink: SuperLinkAddress | ListenAddress,
    certificates: Certificates | None,
) -> Iterator[SuperLinkBackend]:
    """Started, and ended when the block is left: in order, or at once where it is left by an exception."""
    own = (
        superlink
        if isinstance(superlink, SuperLinkAddress)
        else LocalSuperLink(superlink, folder / "flower", certificates)
    )
    carrier = SuperLinkBackend(folder, settings, own, certificates)
    at_once = True
    try:
        carrier.begin()
        yield carrier
        at_once = False
    finally:
        carrier.end(at_once=at_once)


_POLL_INTERVAL = 0.25  # seconds between two looks
_MAX_RETRIES = 20  # in a row without progress
_MAX_RETRY_PAUSE = 30.0  # seconds of pause before another try
_START_TIMEOUT = 60.0  # seconds for a server to show itself, before Flower is asked
_STATUS_INTERVAL = 30.0  # seconds between two such questions
_SAVE_TIMEOUT = 120.0  # seconds for a server to save and end


class RunBackend(Protocol):
    """What carries the run."""

    @property
    def ours(self) -> bool:
        """Whether it ends with us, and the server with it."""
        ...

    def tend(self) -> None:
        """Bring back what was started here and has died; may fail with a `FlowerError`."""
        ...

    def submit(self, *, resume: bool) -> str:
        """Have the server started; the run's number. May fail with a `FlowerError`."""
        ...

    def is_over(self, run: str) -> bool: ...

    def stop(self, run: str) -> None: ...


class ProgressDisplay(Protocol):
    """Who is shown what happens."""

    def record(self, record: dict[str, Any]) -> None: ...

    def event(self, event: dict[str, Any]) -> None: ...

    def say(self, sentence: str) -> None: ...


@dataclass
class Supervisor:
    """Of the run in one folder."""

    folder: Path
    flower: RunBackend
    seen: ProgressDisplay
    stop: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._records = JsonlTail(self.folder / "records.jsonl", from_end=True)
        self._events = JsonlTail(self.folder / "events.jsonl", from_end=True)
        self._shown = -1  # the last version whose record was shown

    def watch(self) -> ServeOutcome:
        """Until the run ends, is stopped, or cannot be brought to go on."""
        (self.folder / STOP_FILE).unlink(missing_ok=True)
        tries, reached = 0, self._progress()
        while True:
            why = None
            try:
                outcome = self._attempt()
            except FlowerError as error:
                outcome, why = None, str(error)
            self._show()
            if outcome is not None:
                return outcome
            if self.stop():
                return ServeOutcome(None, stopped=True)
            before, reached = reached, self._progress()
            tries = 1 if reached != before else tries + 1
            lost = "the server ended without a word" if why is None else f"Flower could not be asked ({why})"
            if tries > _MAX_RETRIES:
                return ServeOutcome(
                    None, error=f"{lost}, {_MAX_RETRIES} times in a row; see the logs in {self.folder}."
                )
            pause = min(_MAX_RETRY_PAUSE, 2.0 ** (tries - 1))
            self.seen.say(f"{lost}; the run goes on in {pause:.0f} s from what was saved.")
            self._pause(pause)
            if self.stop():
                return ServeOutcome(None, stopped=True)

    def _attempt(self) -> ServeOutcome | None:
        """One server, from its start to its end; None if it left no word."""
        remove_outcome(self.folder)
        remove_server(self.folder)
        self.flower.tend()
        run = self.flower.submit(resume=(self.folder / "settings.json").exists())
        try:
            outcome = self._follow(run)
        except KeyboardInterrupt:
            if not self.flower.ours:
                self._end(run)
            raise
        except FlowerError:
            self._end(run)  # or it goes on beside the next one
            raise
        if outcome is None:
            self._end(run)
        return outcome

    def _follow(self, run: str) -> ServeOutcome | None:
        ask, asked = self.clock() + _START_TIMEOUT, None
        while True:
            self.flower.tend()
            self._show()
            server = read_server(self.folder)
            gone = server is not None and not is_running(server)
            outcome = read_outcome(self.folder)  # after the look at the server, which writes it last of all
            if outcome is not None or gone:
                return outcome
            now = self.clock()
            if asked is None and self.stop():
                (self.folder / STOP_FILE).touch()
                asked = now
            if asked is not None and now - asked > (_SAVE_TIMEOUT if server else _START_TIMEOUT):
                self.seen.say("the server did not answer to a stop: it is ended as it is.")
                return None
            if server is None and now > ask:
                if self.flower.is_over(run):
                    return None
                ask = now + _STATUS_INTERVAL
            self.sleep(_POLL_INTERVAL)

    def _end(self, run: str) -> None:
        """So that sites do not work on for a server that is gone."""
        with contextlib.suppress(FlowerError):  # it ended by itself, or its SuperLink is away
            self.flower.stop(run)

    def _pause(self, seconds: float) -> None:
        until = self.clock() + seconds
        while self.clock() < until and not self.stop():
            self.sleep(_POLL_INTERVAL)

    def _show(self) -> None:
        for event in self._events.new():
            self.seen.event(event)
        for record in self._records.new():
            if record["version"] > self._shown:  # one that was cut off is written again
                self._shown = record["version"]
                self.seen.record(record)

    def _progress(self) -> tuple[int, ...]:
        """Differs once anything more was saved or accepted."""
        places = (self.folder / "checkpoint" / "state.safetensors", self.folder / "journal")
        return tuple(place.stat().st_mtime_ns if place.exists() else 0 for place in places)
