"""Processes that we start: each with what it starts itself, and none that outlives us."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_LOOK = 0.05  # seconds


class Child:
    """A process in a session of its own, so that Ctrl-C at our terminal reaches us alone.

    It is asked to end when we are gone. Start it from a thread that lasts: Linux asks when that thread ends.
    What it leaves behind in its group is ended with it; nothing else ever is.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = None,
        handed: Sequence[int] = (),
    ) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                list(words),
                env=dict(environment),
                stdin=stdin,
                stdout=file if stdout is None else stdout,
                stderr=file,
                start_new_session=True,
                pass_fds=handed,
                preexec_fn=_dying_with(os.getpid()),
            )
        self.code: int | None = None
        self.begun = time.monotonic()

    def alive(self) -> bool:
        """Whether it runs; if it has ended, so has all that it left in its group."""
        if self.code is None and _ended(self.process.pid):
            self._reap()
        return self.code is None

    def end(self, patience: float = 10.0) -> None:
        """Ask, wait, and insist."""
        if not self.alive():
            return
        self.process.terminate()
        limit = time.monotonic() + patience
        while self.alive():
            if time.monotonic() > limit:
                self._reap()
                return
            time.sleep(_LOOK)

    def kill(self) -> None:
        """At once."""
        if self.alive():
            self._reap()

    def _reap(self) -> None:
        # before it is waited for, its number cannot have gone to somebody else
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _ended(number: int) -> bool:
    """Whether a child has ended and was not waited for yet."""
    return os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _dying_with(parent: int) -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # found before the fork: nothing may be loaded after it

    def ask() -> None:
        prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
