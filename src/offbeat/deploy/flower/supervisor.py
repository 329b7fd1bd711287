"""Keeps a deployed run going: starts the SuperLink and the server, and starts them again.

The SuperLink listens on loopback only, and has a gateway for sites. The server is started again, from what
was saved, until it finishes, is stopped, or has failed many times without progress.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from offbeat.deploy.flower.commands import (
    ChildProcess,
    flower_environment,
    superlink_problem,
    wait_for_superlink,
)
from offbeat.deploy.keys import Certificates
from offbeat.deploy.network import Doorbell, bind_socket, format_address
from offbeat.deploy.protocol.transport import Backoff
from offbeat.deploy.server.run import STOP_FILE, ServeOutcome, read_outcome, remove_outcome
from offbeat.errors import InputError
from offbeat.files import JsonlTail, disk_full

_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE = 2.0, 30.0
_SUPERLINK_TIMEOUT = 60.0  # seconds for the SuperLink to answer
_POLL_INTERVAL = 0.25
_MAX_RETRIES = 20  # in a row without progress
_MAX_RETRY_PAUSE = 30.0  # seconds
_SPACE_INTERVAL = 5.0  # seconds between two looks whether the disk is full
_FREEZE_INTERVAL = 30.0  # seconds between two looks whether a process is frozen
_MAX_UNANSWERED = 4  # health requests in a row that the SuperLink may leave without an answer
_SAVE_TIMEOUT = 120.0  # seconds for a server to save and end
_LOOPBACK = "127.0.0.1"  # where the SuperLink listens


class Backend:
    """The two processes of a run: the SuperLink with its gateway, and the server.

    Sites connect to the host and port `listen`. Both sockets of the SuperLink are bound here, so connections
    that arrive while it restarts wait. Used as a context manager, it starts the SuperLink, and stops both in
    the end; an exception kills them.
    """

    def __init__(
        self, folder: Path, settings: Path, listen: tuple[str, int], certificates: Certificates | None
    ) -> None:
        self._folder, self._settings, self._certificates = folder, settings, certificates
        self._listener, self._own = bind_socket(*listen), bind_socket(_LOOPBACK, 0)
        self._bell, self._gateway_bell = Doorbell.pair()  # of the server, and of the gateway
        self._superlink: ChildProcess | None = None
        self._server: ChildProcess | None = None
        self._unanswered = 0  # health requests in a row
        self._backoff = Backoff(_FIRST_SUPERLINK_PAUSE, _MAX_SUPERLINK_PAUSE)
        self._stopped: set[int] = set()  # processes that were stopped when `thaw` last looked

    def __enter__(self) -> Self:
        try:
            self._start_superlink()
        except BaseException:
            self._stop(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._stop(kill=kind is not None)

    @property
    def address(self) -> str:
        """How this machine reaches the SuperLink, without the gateway."""
        return format_address(*self._own.getsockname())

    def _start_superlink(self) -> None:
        """Start the SuperLink; a failure is an `InputError`."""
        self.restart_superlink()
        self._unanswered = 0
        folder = self._folder / "flower"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its log may name sites
        log = folder / "superlink.log"
        sockets = [each.fileno() for each in (self._own, self._listener, self._gateway_bell.socket)]
        command = [sys.executable, "-P", "-m", "offbeat.deploy.flower.superlink"]
        for option, number in zip(("--own", "--listener", "--doorbell"), sockets, strict=True):
            command += [option, str(number)]
        if self._certificates is not None:
            tls, sites = self._certificates
            for option, path in zip(("--certificate", "--key", "--sites"), (*tls, sites), strict=True):
                command += [option, str(path.absolute())]
        self._superlink = ChildProcess(
            command, flower_environment(folder / "home"), log, stdin=subprocess.PIPE, pass_fds=sockets
        )
        try:
            wait_for_superlink(self.address, _SUPERLINK_TIMEOUT, self._superlink.is_alive, log)
        except InputError:
            self.restart_superlink()
            raise

    def keep_alive(self) -> None:
        """Start the SuperLink again if it has ended; an `InputError` says why it does not start."""
        if (self._superlink is None or not self._superlink.is_alive()) and self._backoff.due:
            self._backoff.fail()
            self._start_superlink()
            self._backoff.reset()

    def restart_superlink(self) -> None:
        """End the SuperLink, which has nothing to save; `keep_alive` starts it again."""
        if self._superlink is not None:
            self._superlink.kill()

    def thaw(self) -> list[str]:
        """Continue what was stopped by a signal in two calls in a row; end a SuperLink that hangs.

        Return a sentence for each. A process that computes for long is never taken for a frozen one: the
        system knows which processes are stopped, and only the SuperLink has to answer requests.
        """
        said, before = [], self._stopped
        children = {"the server": self._server, "the SuperLink": self._superlink}
        stopped = {name: child for name, child in children.items() if child and child.is_stopped()}
        self._stopped = {child.process.pid for child in stopped.values()}
        for name, child in stopped.items():
            if child.process.pid in before:
                child.resume()
                said.append(f"{name} had been stopped by a signal, and is continued.")
        if "the SuperLink" not in stopped and self._superlink_hangs():
            self.restart_superlink()
            said.append("the SuperLink hangs: it has answered no request for minutes, and is started again.")
        return said

    def _superlink_hangs(self) -> bool:
        """Send a health request; return whether this and several before it were not answered in time."""
        alive = self._superlink is not None and self._superlink.is_alive()
        in_time = not alive or "timed out" not in (superlink_problem(self.address) or "")
        self._unanswered = 0 if in_time else self._unanswered + 1
        return self._unanswered >= _MAX_UNANSWERED

    def start_server(self, *, resume: bool) -> None:
        """Start the server's process."""
        bell = self._bell.socket.fileno()
        command = [sys.executable, "-m", "offbeat.deploy.flower.server", "--superlink", self.address]
        command += ["--settings", str(self._settings.absolute()), "--folder", str(self._folder.absolute())]
        command += ["--doorbell", str(bell)]
        if self._certificates is not None:
            command += ["--sites", str(self._certificates.sites.absolute())]
        self._server = ChildProcess(
            [*command, *(["--resume"] if resume else [])],
            flower_environment(self._folder / "flower" / "home"),
            self._folder / "server.log",
            pass_fds=(bell,),
        )

    def is_server_alive(self) -> bool:
        return self._server is not None and self._server.is_alive()

    def stop_server(self) -> None:
        """End the server's process, which saves nothing any more."""
        if self._server is not None:
            self._server.stop()

    def _stop(self, *, kill: bool) -> None:
        if self._server is not None:
            self._server.kill() if kill else self._server.stop()
        self.restart_superlink()
        for each in (self._listener, self._own, self._bell, self._gateway_bell):
            each.close()


class ProgressDisplay(Protocol):
    """Shows the progress of the run."""

    def record(self, record: dict[str, Any]) -> None: ...

    def event(self, event: dict[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...


@dataclass
class Supervisor:
    """Supervises the run in one folder."""

    folder: Path
    backend: Backend
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
            except InputError as error:
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
