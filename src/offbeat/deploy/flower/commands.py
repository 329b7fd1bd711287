"""The processes of a deployment: how they are started, and whether a SuperLink answers."""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from offbeat.errors import InputError

# Unless the user has set them otherwise: no telemetry, nothing is installed, and logs stay short.
_DEFAULT_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_LOG_LEVEL": "WARNING",  # otherwise the SuperLink logs every request
}
_HEALTH_TIMEOUT = 5.0  # seconds for an answer
_HEALTH_INTERVAL = 0.2  # seconds between two requests
_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h
_EXIT_POLL = 0.05  # seconds


class ChildProcess:
    """A child process in a session of its own, so that Ctrl-C in the terminal does not reach it.

    When it ends, the processes left in its group are killed. On Linux it gets SIGTERM when the thread that
    started it ends, so start it from a thread that lasts.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        stdin: int | None = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=stdin,
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        self.returncode: int | None = None

    def is_alive(self) -> bool:
        """Whether it runs; once it has ended, everything left in its process group is killed."""
        if self.returncode is None and self._reports(os.WEXITED):
            self._kill_group()
        return self.returncode is None

    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it, so that it lives but does nothing."""
        return self.is_alive() and self._reports(os.WSTOPPED)

    def resume(self) -> None:
        """Let it continue after `is_stopped`."""
        if self.is_alive():
            os.kill(self.process.pid, signal.SIGCONT)

    def stop(self, timeout: float = 10.0) -> None:
        """Terminate it, and kill it if it has not ended after `timeout` seconds."""
        if not self.is_alive():
            return
        self.process.terminate()
        deadline = time.monotonic() + timeout
        while self.is_alive():
            if time.monotonic() > deadline:
                self._kill_group()
                return
            time.sleep(_EXIT_POLL)

    def kill(self) -> None:
        """Kill it and its process group."""
        if self.is_alive():
            self._kill_group()

    def _reports(self, change: int) -> bool:
        """Whether the system knows of such a change of the process, which is not waited for."""
        return os.waitid(os.P_PID, self.process.pid, change | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_group(self) -> None:
        # Before the process is waited for, the system cannot give its number to another one.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.returncode = self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # loaded before the fork, because nothing may be loaded after it

    def request_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return request_signal


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of processes that use Flower, which is told to open no ports of its own."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_INTERNAL_GRPC")}
    return _DEFAULT_ENVIRONMENT | given | {"FLWR_HOME": str(home.absolute())}


@contextlib.contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write what this process logs to a file, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("offbeat")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def superlink_problem(address: str) -> str | None:
    """Return why the SuperLink does not answer its health check, or None if it does."""
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=_HEALTH_TIMEOUT):
            return None
    except urllib.error.HTTPError as error:
        return f"it answers with HTTP status {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", None) or error)


def wait_for_superlink(address: str, timeout: float, is_alive: Callable[[], bool], log: Path) -> None:
    """Wait until the SuperLink answers; raise an `InputError` if its process ends or the time is up."""
    deadline = time.monotonic() + timeout
    while (problem := superlink_problem(address)) is not None:
        if not is_alive():
            raise InputError(f"the SuperLink ended during its start; see {log}.")
        if time.monotonic() > deadline:
            raise InputError(f"the SuperLink at {address} does not answer ({problem}); see {log}.")
        time.sleep(_HEALTH_INTERVAL)
