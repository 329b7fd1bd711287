"""Real processes of one trial: started here, found again by a mark in their environment, and all ended.

What a process starts inherits the mark, so that whatever is left can be named. Linux alone has such a list.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MARK = "OFFBEAT_TRIAL"
_LOOK = 0.1  # seconds


class Process:
    """One that was started here; what it says goes to a file."""

    def __init__(self, words: Sequence[str], place: Path, log: Path, own: dict[str, str]) -> None:
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                list(words),
                cwd=place,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    @property
    def said(self) -> str:
        """All of it so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        if self.code is None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Its exit code; what it said is in the error if it does not end."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no end in {seconds:.0f} s: {self.said[-3000:]}") from None


class Trial:
    """All processes of one trial."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._mark = secrets.token_hex(8)
        self._started: list[Process] = []

    def start(self, name: str, *words: str) -> Process:
        """One of Python's modules or scripts, as `python WORDS`."""
        own = {MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = Process([sys.executable, *words], self.place, self.place / f"{name}.log", own)
        self._started.append(process)
        return process

    def offbeat(self, name: str, *words: str) -> Process:
        """One of our commands."""
        return self.start(name, "-m", "offbeat", *words)

    def found(self) -> dict[int, str]:
        """The command line of each process that is there now."""
        mine = f"{MARK}={self._mark}".encode()
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mine in (path / "environ").read_bytes().split(b"\0"):
                    words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(path.name)] = words
        return found

    def kill(self, pid: int, number: int = signal.SIGKILL) -> bool:
        """Signal one of these processes; False if it is gone, or no longer one of them."""
        try:
            handle = os.pidfd_open(pid)  # so that its number cannot go to somebody else meanwhile
        except ProcessLookupError:
            return False
        try:
            if pid not in self.found():
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def end(self, seconds: float = 30.0) -> list[str]:
        """Ask all that was started here to end, and end what does not; the command lines of that."""
        for process in self._started:
            process.signal(signal.SIGTERM)
        wait_for(lambda: not self.found(), seconds)
        left = self.found()
        for pid in left:
            self.kill(pid)
        for process in self._started:
            process.signal(signal.SIGKILL)
            process.wait(10)
        return sorted(left.values())


def wait_for(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in that time."""
    limit = time.monotonic() + seconds
    while not true():
        if time.monotonic() > limit:
            return False
        time.sleep(_LOOK)
    return True
