"""Keeps a deployed run going: restarts the SuperLink and the server.

A SuperLink that is started here listens on loopback only, and has a gateway for sites. One that was running
already is only given requests. The server is a child process; it is started again, from what was saved, until
it finishes, is stopped, or has failed many times without progress.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from offbeat.deploy.flower.commands import (
    LOOPBACK,
    Certificates,
    ChildProcess,
    SuperLinkAddress,
    flower_environment,
    superlink_problem,
    wait_for_superlink,
)
from offbeat.deploy.flower.private_api import ControlClient, FlowerError, Refusal
from offbeat.deploy.keys import find_site_keys
from offbeat.deploy.network import Doorbell, bind_socket, format_address
from offbeat.deploy.protocol.transport import Backoff
from offbeat.deploy.server.run import STOP_FILE, ServeOutcome, read_outcome, remove_outcome
from offbeat.errors import InputError
from offbeat.files import JsonlTail, disk_full

_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE = 2.0, 30.0
_SUPERLINK_TIMEOUT = 60.0  # seconds for a SuperLink to answer
_KEY_INTERVAL = 5.0  # seconds between two searches for new and revoked keys
_POLL_INTERVAL = 0.25
_MAX_RETRIES = 20  # in a row without progress
_MAX_RETRY_PAUSE = 30.0  # seconds
_SPACE_INTERVAL = 5.0  # seconds between two looks whether the disk is full
_FREEZE_INTERVAL = 30.0  # seconds between two looks whether a process is frozen
_MAX_UNANSWERED = 4  # health requests in a row that a SuperLink may leave without an answer
_SAVE_TIMEOUT = 120.0  # seconds for a server to save and end
_KEY_FORMAT = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo  # in which Flower knows keys


class ListenAddress(NamedTuple):
    """Where sites connect to a SuperLink that is started here."""

    host: str
    port: int


class LocalSuperLink:
    """A SuperLink that is started here, in one process with its gateway.

    Both of its sockets are bound here, so connections that arrive while it restarts wait.
    """

    def __init__(self, listen: ListenAddress, folder: Path, certificates: Certificates | None) -> None:
        self._folder, self._certificates = folder, certificates
        self._listener, self._own = bind_socket(*listen), bind_socket(LOOPBACK, 0)
        self.bell, self._gateway_bell = Doorbell.pair()  # of the server, and of the gateway
        self._child: ChildProcess | None = None
        self._certificate: int | None = None  # its date
        self._unanswered = 0  # health requests in a row
        self._backoff = Backoff(_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE)

    @property
    def link(self) -> SuperLinkAddress:
        """How this machine reaches it, without the gateway."""
        authority = None if self._certificates is None else self._certificates.authority
        return SuperLinkAddress(format_address(*self._own.getsockname()), authority)

    def start(self) -> None:
        """Start it, closed for sites; a failure is an `InputError`."""
        self.kill()
        self._unanswered = 0
        self._certificate = self._certificate_date()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its log may name sites
        (self._folder / "superlink.address").write_text(self.link.address)  # for another 'offbeat serve'
        log = self._folder / "superlink.log"
        sockets = [each.fileno() for each in (self._own, self._listener, self._gateway_bell.socket)]
        command = [sys.executable, "-P", "-m", "offbeat.deploy.flower.superlink"]
        for option, number in zip(("--own", "--listener", "--doorbell"), sockets, strict=True):
            command += [option, str(number)]
        if self._certificates is not None:
            options = ("--authority", "--certificate", "--key", "--sites")
            for option, path in zip(options, self._certificates, strict=True):
                command += [option, str(path.absolute())]
        environment = flower_environment(self._folder / "home")
        self._child = ChildProcess(command, environment, log, stdin=subprocess.PIPE, pass_fds=sockets)
        wait_for_superlink(self.link, _SUPERLINK_TIMEOUT, self._child.is_alive, log)

    def open(self) -> None:
        """Let sites connect."""
        if self._child is not None and self._child.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended: `keep_alive` starts it again
                self._child.process.stdin.write(b"open")
                self._child.process.stdin.flush()

    def keep_alive(self) -> bool:
        """Restart it if it has ended or has an old certificate; return whether it was restarted."""
        date = self._certificate_date()
        if self._certificates and date not in (None, self._certificate) and self._certificates.match():
            self.kill()
        if self.is_alive() or not self._backoff.due:
            return False
        self._backoff.fail()
        try:
            self.start()
        except InputError as error:
            self.kill()
            raise FlowerError(Refusal.AWAY, str(error)) from None
        self._backoff.reset()
        return True

    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive()

    @property
    def child(self) -> ChildProcess | None:
        return self._child

    def is_hanging(self) -> bool:
        """Send a health request; return whether this and several before it were not answered in time."""
        in_time = not self.is_alive() or "timed out" not in (superlink_problem(self.link) or "")
        self._unanswered = 0 if in_time else self._unanswered + 1
        return self._unanswered >= _MAX_UNANSWERED

    def kill(self) -> None:
        """End it, which has nothing to save; `keep_alive` starts it again."""
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """End it for good."""
        self.kill()
        for each in (self._listener, self._own, self.bell, self._gateway_bell):
            each.close()

    def _certificate_date(self) -> int | None:
        """When the certificate was issued, by its file; it is renewed while the run goes on."""
        try:
            return None if self._certificates is None else self._certificates.server.stat().st_mtime_ns
        except OSError:
            return None


class SuperLinkBackend:
    """A SuperLink that carries the run, and the server's process; `running_backend` starts and stops them.

    Requests to the SuperLink may raise a `FlowerError`.
    """

    def __init__(
        self,
        folder: Path,
        settings: Path,
        superlink: SuperLinkAddress | ListenAddress,
        certificates: Certificates | None,
    ) -> None:
        self._folder, self._settings, self._certificates = folder, settings, certificates
        self._local: LocalSuperLink | None = None
        if isinstance(superlink, ListenAddress):
            self._local = LocalSuperLink(superlink, folder / "flower", certificates)
            superlink = self._local.link
        self.link = superlink  # how this machine reaches the SuperLink
        self._control: ControlClient | None = None
        self._server: ChildProcess | None = None
        self._next_key_search = 0.0
        self._missing: set[bytes] = set()  # registered keys that the last search did not find
        self._stopped: set[int] = set()  # processes that were stopped when `thaw` last looked

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

    def keep_alive(self) -> None:
        """Restart what was started here and has ended; register new keys and revoke those that are gone."""
        now = time.monotonic()
        if self._local is not None:
            if self._local.keep_alive():
                self._next_key_search, self._control = now, None
            if not self._local.is_alive():
                return
        if now >= self._next_key_search:
            self._next_key_search = now + _KEY_INTERVAL
            with contextlib.suppress(FlowerError):  # it is tried again
                self._update_keys()

    def restart_superlink(self) -> None:
        """End a SuperLink that was started here: `keep_alive` starts it again."""
        if self._local is not None:
            self._local.kill()

    def thaw(self) -> list[str]:
        """Continue what was stopped by a signal in two calls in a row; end a SuperLink that hangs.

        Return a sentence for each. A process that computes for long is never taken for a frozen one: the
        system knows which processes are stopped, and only the SuperLink has to answer requests.
        """
        said, before = [], self._stopped
        superlink = None if self._local is None else self._local.child
        children = {"the server": self._server, "the SuperLink": superlink}
        stopped = {name: child for name, child in children.items() if child and child.is_stopped()}
        self._stopped = {child.process.pid for child in stopped.values()}
        for name, child in stopped.items():
            if child.process.pid in before:
                child.resume()
                said.append(f"{name} had been stopped by a signal, and is continued.")
        if self._local is not None and "the SuperLink" not in stopped and self._local.is_hanging():
            self._local.kill()
            said.append("the SuperLink hangs: it has answered no request for minutes, and is started again.")
        return said

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
            self._local.stop()

    def _update_keys(self) -> None:
        """Register the keys of all sites at once, and unregister those that are no longer in the folder.

        Then sites may connect.
        """
        if self._certificates is not None:
            if self._control is None:
                self._control = ControlClient(*self.link)
            registered, found = self._control.registered_keys(), find_site_keys(self._certificates.sites)
            wanted = {key.public_bytes(*_KEY_FORMAT) for key in found.keys.values()}
            for key in wanted - registered.keys():
                self._control.register_key(key)
            # In a SuperLink of somebody else, other keys may be for other runs. Flower never accepts a key
            # again that was revoked, so one that is missing only while files are copied must not be.
            revoking = wanted and not found.problems and self._local is not None
            missing = registered.keys() - wanted if revoking else set()
            for key in missing & self._missing:
                with contextlib.suppress(FlowerError):  # Flower fails for a node that was never connected
                    self._control.unregister_key(registered[key])
            self._missing = missing
        if self._local is not None:
            self._local.open()


@contextmanager
def running_backend(
    folder: Path,
    settings: Path,
    superlink: SuperLinkAddress | ListenAddress,
    certificates: Certificates | None,
) -> Iterator[SuperLinkBackend]:
    """Start a backend and stop it when the block is left; an exception kills it."""
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
        next_thaw = self.clock() + _FREEZE_INTERVAL
        while True:
            if self.clock() >= next_thaw:
                next_thaw = self.clock() + _FREEZE_INTERVAL
                for sentence in self.backend.thaw():
                    self.display.message(sentence)
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
