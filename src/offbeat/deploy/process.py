"""Processes that we start: each with what it starts itself, and none that outlives us.

Addresses and ports of this machine.
"""

import contextlib
import ctypes
import errno
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offbeat.errors import InputError

_PR_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of Linux
_POLL_INTERVAL = 0.05  # seconds


class ChildProcess:
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
                preexec_fn=_die_with_parent(os.getpid()),
            )
        self.code: int | None = None
        self.begun = time.monotonic()

    def alive(self) -> bool:
        """Whether it runs; if it has ended, so has all that it left in its group."""
        if self.code is None and _has_ended(self.process.pid):
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
            time.sleep(_POLL_INTERVAL)

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


def _has_ended(number: int) -> bool:
    """Whether a child has ended and was not waited for yet."""
    return os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # found before the fork: nothing may be loaded after it

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def parse_address(text: str, option: str = "--superlink") -> tuple[str, int]:
    """`host:port`, or `[host]:port` for IPv6."""
    host, colon, port = text.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or "/" in text or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{option} must be such as server.example:8000, not '{text}'.")
    return bare, int(port)


def format_address(host: str, port: int) -> str:
    """As one text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_port_free(host: str, port: int, option: str = "--port") -> None:
    """Refuse a port that somebody else listens on."""
    bind_socket(host, port, option).close()


def bind_socket(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket of ours there, or one sentence."""
    taken = _new_socket(host)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        reason = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror or error})"
        )
        raise InputError(f"port {port} of {host} {reason}: name another with {option}.") from None
    return taken


def is_loopback(host: str) -> bool:
    """Whether this machine alone reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port() -> int:
    """One of this machine's that nobody uses now."""
    with _new_socket("127.0.0.1") as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _new_socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
