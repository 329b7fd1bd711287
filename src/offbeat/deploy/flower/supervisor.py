"""Keeps a deployed run going: restarts the SuperLink, the gateway in front of it, and the server.

A SuperLink that is started here listens on loopback only, behind a gateway for sites. One that was running
already is only given requests. The server is a child process; it is started again, from what was saved, until
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

from offbeat.deploy.flower.commands import (
    LOOPBACK,
    Certificates,
    ChildProcess,
    SuperLinkAddress,
    flower_environment,
    start_superlink,
    wait_for_superlink,
)
from offbeat.deploy.flower.private_api import ControlClient, FlowerError, Refusal
from offbeat.deploy.network import Doorbell, bind_socket, format_address, free_port
from offbeat.deploy.protocol.transport import Backoff
from offbeat.deploy.server.run import (
    STOP_FILE,
    ServeOutcome,
    read_outcome,
    remove_outcome,
)
from offbeat.errors import InputError
from offbeat.files import JsonlTail, disk_full

_FIRST_GATEWAY_PAUSE, _MAX_GATEWAY_PAUSE = 0.5, 30.0  # seconds between two starts
_GATEWAY_STABLE = 60.0  # seconds after which a start counts as successful
_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE = 2.0, 30.0
_SUPERLINK_TIMEOUT = 60.0  # seconds for a SuperLink to answer
_KEY_INTERVAL = 5.0  # seconds between two searches for new and revoked keys
_POLL_INTERVAL = 0.25
_MAX_RETRIES = 20  # in a row without progress
_MAX_RETRY_PAUSE = 30.0  # seconds
_SPACE_INTERVAL = 5.0  # seconds between two looks whether the disk is full
_SAVE_TIMEOUT = 120.0  # seconds for a server to save and end


class ListenAddress(NamedTuple):
    """Where sites connect to a SuperLink that is started here."""

    host: str
    port: int


class GatewayProcess:
    """The gateway, kept alive; connections that arrive while it restarts wait at the listening socket."""

    def __init__(
        self, listener: socket.socket, bell: Doorbell, folder: Path, certificates: Certificates | None
    ) -> None:
        self._listener, self._bell = listener, bell
        self._folder, self._certificates = folder, certificates
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
        listener, bell = self._listener.fileno(), self._bell.socket.fileno()
        command = [sys.executable, "-P", "-m", "offbeat.deploy.gateway", "--listener", str(listener)]
        command += ["--superlink", link.address, "--doorbell", str(bell)]
        if self._certificates is not None:
            command += ["--authority", str(self._certificates.authority.absolute())]
            command += ["--certificate", str(self._certificates.server.absolute())]
            command += ["--key", str(self._certificates.key.absolute())]
            command += ["--sites", str(self._certificates.sites.absolute())]
        environment = flower_environment(self._folder / "home")
        return ChildProcess(command, environment, self.log, stdin=subprocess.PIPE, pass_fds=(listener, bell))


class LocalSuperLink:
    """A SuperLink that is started here, with its gateway.

    A restart keeps its port where possible, because the server survives a short absence of the SuperLink.
    """

    def __init__(self, listen: ListenAddress, folder: Path, certificates: Certificates | None) -> None:
        self._folder, self._certificates = folder, certificates
        self._listener = bind_socket(*listen)
        self.bell, self._gateway_bell = Doorbell.pair()  # of the server, and of the gateway
        self._gateway = GatewayProcess(self._listener, self._gateway_bell, folder, certificates)
        self._port = free_port()
        self._child: ChildProcess | None = None
        self._certificate = 0
        self._change_port = False  # after a failed start, another process may use the port
        self._backoff = Backoff(_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE)

    @property
    def link(self) -> SuperLinkAddress:
        """How this machine reaches it, without the gateway."""
        authority = None if self._certificates is None else self._certificates.authority
        return SuperLinkAddress(format_address(LOOPBACK, self._port), authority)

    def start(self) -> None:
        """Start it for the first time, without its gateway; a failure is an `InputError`."""
        self._start()

    def open(self) -> None:
        """Start the gateway, where sites connect."""
        self._gateway.forward_to(self.link)
        self._gateway.check_started()

    def keep_alive(self) -> bool:
        """Restart what has ended or has an old certificate; return whether the SuperLink was restarted."""
        if self._child is not None and self._certificate_date() != self._certificate:
            self._child.kill()
            self._gateway.forward_to(self.link)
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
            raise FlowerError(Refusal.AWAY, str(error)) from None
        self._change_port = False
        self._backoff.reset()
        return True

    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive()

    def kill(self) -> None:
        """End the SuperLink alone; `keep_alive` starts it again."""
        if self._child is not None:
            self._child.kill()

    def _certificate_date(self) -> int:
        """When the certificate was issued, by its file; it is renewed while the run goes on."""
        try:
            return 0 if self._certificates is None else self._certificates.server.stat().st_mtime_ns
        except OSError:
            return self._certificate

    def stop(self, *, kill: bool) -> None:
        self._gateway.stop()
        for each in (self._listener, self.bell, self._gateway_bell):
            each.close()
        if self._child is not None:
            self._child.kill() if kill else self._child.stop()

    def _start(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._certificate = self._certificate_date()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its log may name sites
        (self._folder / "superlink.address").write_text(self.link.address)  # for another 'offbeat serve'
        self._child = start_superlink(LOOPBACK, self._port, self._folder, self._certificates)
        wait_for_superlink(
            self.link, _SUPERLINK_TIMEOUT, self._child.is_alive, self._folder / "superlink.log"
        )


class SuperLinkBackend:
    """A SuperLink that carries the run, and the server's process; `running_backend` starts and stops them.

    Requests to the SuperLink may raise a `FlowerError`.
    """

    def __init__(
        self,
        folder: Path,
        settings: Path,
        superlink: SuperLinkAddress | LocalSuperLink,
        certificates: Certificates | None,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._superlink = superlink
        self._local = superlink if isinstance(superlink, LocalSuperLink) else None
        self._certificates = certificates
        self._control: tuple[SuperLinkAddress, ControlClient] | None = None
        self._server: ChildProcess | None = None
        self._next_key_search = 0.0
        self._was_restarted = False  # the SuperLink, which then knows neither keys nor nodes
        self._missing: set[bytes] = set()  # registered keys that the last search did not find

    @property
    def link(self) -> SuperLinkAddress:
        """How this machine reaches the SuperLink."""
        return self._local.link if self._local is not None else self._superlink  # type: ignore[return-value]

    def start(self) -> None:
        """Start it, or wait until it answers, and register all keys before sites can connect."""
        if self._local is not None:
            self._local.start()
        else:
            wait_for_superlink(self.link, _SUPERLINK_TIMEOUT, lambda: True)
        try:
            self._update_keys()
        except FlowerError as error:
            raise InputError(f"the keys of the sites cannot be registered: {error}.") from None
        if self._local is not None:
            self._local.open()

    def keep_alive(self) -> None:
        """Restart what was started here and has ended; register new keys and revoke those that are gone."""
        now = time.monotonic()
        if self._local is not None:
            if self._local.keep_alive():
                self._next_key_search, self._was_restarted = now, True
            if not self._local.is_alive():
                return
        if now >= self._next_key_search:
            self._next_key_search = now + _KEY_INTERVAL
            with contextlib.suppress(InputError, FlowerError):  # it is tried again
                self._update_keys()
                if self._was_restarted and self._local is not None:
                    self._local.bell.ring()  # for sites that wait for a message, and have to connect again
                    self._was_restarted = False

    def restart_superlink(self) -> None:
        """End a SuperLink that was started here: `keep_alive` starts it again."""
        if self._local is not None:
            self._local.kill()

    def start_server(self, *, resume: bool) -> None:
        """Start the server's process."""
        link = self.link
        command = [sys.executable, "-m", "offbeat.deploy.flower.server", "--superlink", link.address]
        if link.authority is not None:
            command += ["--authority", str(link.authority.absolute())]
        command += ["--settings", str(self._settings.absolute()), "--folder", str(self._folder.absolute())]
        if self._certificates is not None:
            command += ["--sites", str(self._certificates.sites.absolute())]
        bells = () if self._local is None else (self._local.bell.socket.fileno(),)
        for bell in bells:
            command += ["--doorbell", str(bell)]
        self._server = ChildProcess(
            [*command, *(["--resume"] if resume else [])],
            flower_environment(self._folder / "flower" / "home"),
            self._folder / "server.log",
            pass_fds=bells,
        )

    def is_server_alive(self) -> bool:
        return self._server is not None and self._server.is_alive()

    def stop_server(self) -> None:
        """End the server's process, which saves nothing any more."""
        if self._server is not None:
            self._server.stop()

    def stop(self, *, kill: bool) -> None:
        """Stop everything that was started here."""
        if self._server is not None:
            self._server.kill() if kill else self._server.stop()
        if self._local is not None:
            self._local.stop(kill=kill)

    def _update_keys(self) -> None:
        """Register the keys of all sites at once, and unregister those that are no longer in the folder."""
        if self._certificates is None:
            return
        link, wanted = self.link, self._certificates.public_keys()
        if self._control is None or self._control[0] != link:
            self._control = link, ControlClient(link.address, link.authority)
        control = self._control[1]
        registered = control.registered_keys()
        for key in wanted.keys() - registered.keys():
            control.register_key(key)
        # In a SuperLink of somebody else, other keys may be for other runs. Flower never accepts a key again
        # that was revoked, so one that is missing only while files are copied must not be.
        missing = registered.keys() - wanted.keys() if wanted and self._local is not None else set()
        for key in missing & self._missing:
            with contextlib.suppress(FlowerError):  # Flower fails for a node that was never connected
                control.unregister_key(registered[key])
        self._missing = set(missing)


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
            had_no_space = self._wait_for_space()
            if self.should_stop():
                return ServeOutcome(None, stopped=True)
            if had_no_space:
                continue
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
        self.backend.keep_alive()
        self.backend.start_server(resume=(self.folder / "settings.json").exists())
        try:
            return self._follow()
        finally:
            self.backend.stop_server()

    def _wait_for_space(self) -> bool:
        """Wait while the disk is full, and restart the SuperLink after it; return whether it was full."""
        if not disk_full(self.folder):
            return False
        self.display.message(
            f"the disk of {self.folder} is full: free some space, and the run continues by itself."
        )
        while disk_full(self.folder) and not self.should_stop():
            self._pause(_SPACE_INTERVAL)
        if not self.should_stop():
            self.display.message("there is space again: the run continues from what was saved.")
            self.backend.restart_superlink()
        return True

    def _follow(self) -> ServeOutcome | None:
        stop_requested, next_probe = None, self.clock() + _SPACE_INTERVAL
        while True:
            if self.clock() >= next_probe:
                next_probe = self.clock() + _SPACE_INTERVAL
                if disk_full(self.folder, quick=True):  # the SuperLink has stopped working, too
                    return None
            self.backend.keep_alive()
            self._show_progress()
            ended = not self.backend.is_server_alive()
            outcome = read_outcome(self.folder)  # read last, because a server writes it just before it ends
            if ended:
                return outcome
            now = self.clock()
            if stop_requested is None and self.should_stop():
                (self.folder / STOP_FILE).touch()
                stop_requested = now
            if stop_requested is not None and now - stop_requested > _SAVE_TIMEOUT:
                self.display.message("the server did not react to the stop request and is ended.")
                return None
            self.sleep(_POLL_INTERVAL)

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
