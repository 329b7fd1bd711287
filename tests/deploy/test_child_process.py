"""Child processes end when they are stopped, with all that they started, and do not outlive their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.deploy.flower.commands import ChildProcess

# a process that starts another, says its number, and waits
PARENT = (
    "import subprocess, sys, time; "
    "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print(other.pid, flush=True); time.sleep(60)"
)
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('on', flush=True); time.sleep(60)"
)


def start(code: str, log: Path) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], os.environ, log)


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Ended; a process whose parent has not waited for it is a name only."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def said(log: Path) -> str:
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    return log.read_text()


def test_a_child_that_a_signal_stopped_is_known_and_continues(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = start("import time\nwhile True: time.sleep(0.05); print(flush=True)", log)
    try:
        assert not child.is_stopped()
        os.kill(child.process.pid, signal.SIGSTOP)
        until(child.is_stopped)
        assert child.is_stopped()  # which looking at it does not change
        assert child.is_alive()
        child.resume()
        until(lambda: not child.is_stopped())
        written = log.stat().st_size
        until(lambda: log.stat().st_size > written)
    finally:
        child.kill()
    assert not child.is_stopped()


def test_a_child_ends_when_told_and_gives_its_code(tmp_path: Path) -> None:
    child = start("import time; time.sleep(60)", tmp_path / "log")
    assert child.is_alive()
    child.stop()
    assert not child.is_alive()
    assert child.returncode == -signal.SIGTERM
    child.stop()


def test_a_child_that_does_not_listen_is_ended_all_the_same(tmp_path: Path) -> None:
    child = start(STUBBORN, tmp_path / "log")
    said(tmp_path / "log")
    child.stop(timeout=0.2)
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("how", ["stop", "kill", "alone"])
def test_what_a_child_started_ends_with_it(tmp_path: Path, how: str) -> None:
    child = start(PARENT, tmp_path / "log")
    other = int(said(tmp_path / "log"))
    assert not gone(other)
    if how == "alone":
        os.kill(child.process.pid, signal.SIGKILL)
        until(lambda: not child.is_alive())
    else:
        getattr(child, how)()
    until(lambda: gone(other))


def test_what_a_child_says_is_added_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    child = start("import sys; print('out'); print('err', file=sys.stderr)", log)
    until(lambda: not child.is_alive())
    assert child.returncode == 0
    assert sorted(log.read_text().split()) == ["before", "err", "out"]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a child of its parent's death"
)
def test_a_child_does_not_outlive_us(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; "
        "from offbeat.deploy.flower.commands import ChildProcess; "
        "words = [sys.executable, '-c', 'import time; time.sleep(60)']; "
        "child = ChildProcess(words, os.environ, Path(sys.argv[1])); "
        "print(child.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as us:
        assert us.stdout is not None
        child = int(us.stdout.readline())
        assert not gone(child)
        us.kill()
    until(lambda: gone(child))
