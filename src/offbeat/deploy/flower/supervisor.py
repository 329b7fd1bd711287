"""Keeps a deployed run going: restarts the SuperLink, the gateway in front of it, and the server.

A SuperLink that is started here listens on loopback only, behind a gateway for sites. One that was running
already is only given requests. The server is a Flower run; it is submitted again, from what was saved, until
it finishes, is stopped, or has failed many times without progress.
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
    ChildProcess,
    FlowerError,
    SuperLinkAddress,
    flower_environment,
    start_superlink,
    wait_for_superlink,
    write_flower_app,
    write_flower_home,
)
from offbeat.deploy.network import bind_socket, format_address, free_port
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
_GATEWAY_STABLE = 60.0  # seconds after which a start counts as successful
_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE = 2.0, 30.0
_SUPERLINK_TIMEOUT = 60.0  # seconds for a SuperLink to answer
_KEY_INTERVAL = 10.0  # seconds between two searches for keys of new sites
_POLL_INTERVAL = 0.25
_MAX_RETRIES = 20  # in a row without progress
_MAX_RETRY_PAUSE = 30.0  # seconds
_START_TIMEOUT = (
    60.0  # seconds for a server to report its process, before Flower is asked for the run's status
)
_STATUS_INTERVAL = 30.0  # seconds between two such requests
_SAVE_TIMEOUT = 120.0  # seconds for a server to save and end


class ListenAddress(NamedTuple):
    """Where sites connect to a SuperLink that is started here."""

    host: str
    port: int


class GatewayProcess:
    """The gateway, kept alive; connections that arrive while it restarts wait at the listening socket."""

    def __init__(self, listener: socket.socket, folder: Path, certificates: Certificates | None) -> None:
        self._listener, self._folder, self._certificates = listener, folder, certificates
        self._link: SuperLinkAddress | None = None
        self._child: ChildProcess | None = None
        self._backoff = Backoff(_FIRST_GATEWAY_PAUSE, _MAX_GATEWAY_PAUSE)

    @property
    def log(self) -> Path:
        """The log of refused requests."""
        return self._folder / "gate.log"

    def forward_to(self, link: SuperLinkAddress) -> None:
        """Start it, or start it anew, in front of this SuperLink."""
        self.stop()
        self._link = link
        self._child = self._start(link)

    def check_started(self) -> None:
        """Raise an `InputError` if it has ended already."""
        if self._child is None or not self._child.is_alive():
            raise InputError(f"the gateway of the SuperLink ended during its start; see {self.log}.")

    def keep_alive(self) -> None:
        """Start it again if it has ended."""
        if self._link is None:
            return
        if self._child is not None and not self._child.is_alive():
            if time.monotonic() - self._child.started > _GATEWAY_STABLE:
                self._backoff.reset()
            self._child = None
            self._backoff.fail()
        if self._child is None and self._backoff.due:
            self._child = self._start(self._link)

    def stop(self) -> None:
        """Kill it: it has nothing to save."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _start(self, link: SuperLinkAddress) -> ChildProcess:
        listener = self._listener.fileno()
        command = [sys.executable, "-P", "-m", "offbeat.deploy.gateway", "--listener", str(listener)]
        command += ["--superlink", link.address]
        if self._certificates is not None:
            command += ["--authority", str(self._certificates.authority.absolute())]
            command += ["--certificate", str(self._certificates.server.absolute())]
            command += ["--key", str(self._certificates.key.absolute())]
        environment = flower_environment(self._folder / "home")
        return ChildProcess(command, environment, self.log, stdin=subprocess.PIPE, pass_fds=(listener,))


class LocalSuperLink:
    """A SuperLink that is started here, with its gateway.

    A restart keeps its port where possible, because the server survives a short absence of the SuperLink.
    """

    def __init__(self, listen: ListenAddress, folder: Path, certificates: Certificates | None) -> None:
        self._folder, self._certificates = folder, certificates
        self._listener = bind_socket(*listen)
        self._gateway = GatewayProcess(self._listener, folder, certificates)
        self._port = free_port()
        self._child: ChildProcess | None = None
        self._change_port = False  # after a failed start, another process may use the port
        self._backoff = Backoff(_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE)

    @property
    def link(self) -> SuperLinkAddress:
        """How this machine reaches it, without the gateway."""
        authority = None if self._certificates is None else self._certificates.authority
        return SuperLinkAddress(format_address(LOOPBACK, self._port), authority)

    def start(self) -> None:
        """Start it for the first time; a failure is an `InputError`."""
        self._gateway.forward_to(self.link)
        self._start()
        self._gateway.check_started()

    def keep_alive(self) -> bool:
        """Restart what has ended; return whether the SuperLink was restarted."""
        self._gateway.keep_alive()
        if self.is_alive() or not self._backoff.due:
            return False
        self._backoff.fail()
        if self._change_port:
            self._port = free_port()
            self._gateway.forward_to(self.link)
        self._change_port = True
        try:
            self._start()
        except InputError as error:
            raise FlowerError(str(error)) from None
        self._change_port = False
        self._backoff.reset()
        return True

    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive()

    def stop(self, *, kill: bool) -> None:
        self._gateway.stop()
        self._listener.close()
        if self._child is not None:
            self._child.kill() if kill else self._child.stop()

    def _start(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._child = start_superlink(LOOPBACK, self._port, self._folder, self._certificates)
        wait_for_superlink(
            self.link, _SUPERLINK_TIMEOUT, self._child.is_alive, self._folder / "superlink.log"
        )


class SuperLinkBackend:
    """A SuperLink that executes the run; `running_backend` starts and stops it.

    Requests to it may raise a `FlowerError`.
    """

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
        self._local = superlink if isinstance(superlink, LocalSuperLink) else None
        self._certificates = certificates
        self._registered: set[Path] = set()
        self._next_key_search = 0.0

    @property
    def is_local(self) -> bool:
        """Whether it was started here: then it ends with this process, and the server with it."""
        return self._local is not None

    def start(self) -> None:
        """Start it, or wait until it answers; a failure is an `InputError`."""
        if isinstance(self._superlink, LocalSuperLink):
            write_flower_home(self._home, self._superlink.link)
            self._superlink.start()
        else:
            write_flower_home(self._home, self._superlink)
            wait_for_superlink(self._superlink, _SUPERLINK_TIMEOUT, lambda: True)
        self._register_keys()

    def keep_alive(self) -> None:
        """Restart what was started here and has ended, and register the keys of new sites."""
        if self._local is not None:
            if self._local.keep_alive():
                write_flower_home(self._home, self._local.link)
            if not self._local.is_alive():
                return
        now = time.monotonic()
        if now > self._next_key_search:
            self._next_key_search = now + _KEY_INTERVAL
            with contextlib.suppress(InputError):  # raised when the key was first tried
                self._register_keys()

    def submit(self, *, resume: bool) -> str:
        """Have the server started; return the ID of its run."""
        sites = "" if self._certificates is None else str(self._certificates.sites.absolute())
        app, run_config = write_flower_app(
            self._flower,
            {
                "settings": str(self._settings.absolute()),
                "folder": str(self._folder.absolute()),
                "resume": resume,
                "authenticated": self._certificates is not None,
                "sites": sites,
            },
        )
        return commands.submit_run(self._home, app, run_config)

    def is_finished(self, run_id: str) -> bool:
        return commands.is_run_finished(self._home, run_id)

    def stop_run(self, run_id: str) -> None:
        if self._local is None or self._local.is_alive():
            commands.stop_run(self._home, run_id)

    def stop(self, *, kill: bool) -> None:
        """Stop the SuperLink, if it was started here."""
        if self._local is not None:
            self._local.stop(kill=kill)

    def _register_keys(self) -> None:
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
    """Start a backend and stop it when the block is left; an exception kills it."""
    if isinstance(superlink, ListenAddress):
        started = LocalSuperLink(superlink, folder / "flower", certificates)
        backend = SuperLinkBackend(folder, settings, started, certificates)
    else:
        backend = SuperLinkBackend(folder, settings, superlink, certificates)
    kill = True
    try:
        backend.start()
        yield backend
        kill = False
    finally:
        backend.stop(kill=kill)


class ProgressDisplay(Protocol):
    """Shows the progress of the run."""

    def record(self, record: dict[str, Any]) -> None: ...

    def event(self, event: dict[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...


@dataclass
class Supervisor:
    """Supervises the run in one folder."""

    folder: Path
    backend: SuperLinkBackend
    display: ProgressDisplay
    should_stop: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._records = JsonlTail(self.folder / "records.jsonl", from_end=True)
        self._events = JsonlTail(self.folder / "events.jsonl", from_end=True)
        self._shown_version = -1

    def run(self) -> ServeOutcome:
        """Supervise until the run finishes, is stopped, or fails too often without progress."""
        (self.folder / STOP_FILE).unlink(missing_ok=True)
        retries, progress = 0, self._progress()
        while True:
            failure = None
            try:
                outcome = self._attempt()
            except FlowerError as error:
                outcome, failure = None, str(error)
            self._show_progress()
            if outcome is not None:
                return outcome
            if self.should_stop():
                return ServeOutcome(None, stopped=True)
            before, progress = progress, self._progress()
            retries = 1 if progress != before else retries + 1
            problem = "the server ended unexpectedly" if failure is None else f"Flower failed ({failure})"
            if retries > _MAX_RETRIES:
                return ServeOutcome(
                    None, error=f"{problem}, {_MAX_RETRIES} times in a row; see the logs in {self.folder}."
                )
            pause = min(_MAX_RETRY_PAUSE, 2.0 ** (retries - 1))
            self.display.message(f"{problem}; the run continues in {pause:.0f} s from what was saved.")
            self._pause(pause)
            if self.should_stop():
                return ServeOutcome(None, stopped=True)

    def _attempt(self) -> ServeOutcome | None:
        """Run one server from start to end; None if it ended without an outcome."""
        remove_outcome(self.folder)
        remove_server(self.folder)
        self.backend.keep_alive()
        run_id = self.backend.submit(resume=(self.folder / "settings.json").exists())
        try:
            outcome = self._follow(run_id)
        except KeyboardInterrupt:
            if not self.backend.is_local:
                self._stop_run(run_id)
            raise
        except FlowerError:
            self._stop_run(run_id)  # otherwise it would continue beside the next one
            raise
        if outcome is None:
            self._stop_run(run_id)
        return outcome

    def _follow(self, run_id: str) -> ServeOutcome | None:
        next_status, stop_requested = self.clock() + _START_TIMEOUT, None
        while True:
            self.backend.keep_alive()
            self._show_progress()
            server = read_server(self.folder)
            ended = server is not None and not is_running(server)
            outcome = read_outcome(self.folder)  # read last, because a server writes it just before it ends
            if outcome is not None or ended:
                return outcome
            now = self.clock()
            if stop_requested is None and self.should_stop():
                (self.folder / STOP_FILE).touch()
                stop_requested = now
            if stop_requested is not None and now - stop_requested > (
                _SAVE_TIMEOUT if server else _START_TIMEOUT
            ):
                self.display.message("the server did not react to the stop request and is ended.")
                return None
            if server is None and now > next_status:
                if self.backend.is_finished(run_id):
                    return None
                next_status = now + _STATUS_INTERVAL
            self.sleep(_POLL_INTERVAL)

    def _stop_run(self, run_id: str) -> None:
        """Stop the run, so that sites do not go on working for a server that has ended."""
        with contextlib.suppress(FlowerError):  # it ended by itself, or its SuperLink is down
            self.backend.stop_run(run_id)

    def _pause(self, seconds: float) -> None:
        until = self.clock() + seconds
        while self.clock() < until and not self.should_stop():
            self.sleep(_POLL_INTERVAL)

    def _show_progress(self) -> None:
        for event in self._events.new():
            self.display.event(event)
        for record in self._records.new():
            if record["version"] > self._shown_version:  # a record may be written again after a restart
                self._shown_version = record["version"]
                self.display.record(record)

    def _progress(self) -> tuple[int, ...]:
        """Return a value that changes whenever a checkpoint or an accepted upload is saved."""
        paths = (self.folder / "checkpoint" / "state.safetensors", self.folder / "journal")
        return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)
