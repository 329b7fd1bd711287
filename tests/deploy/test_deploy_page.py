"""docs/deploy.md to the letter: a server and three sites in terminals that are started at the same moment."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent.parent / "docs" / "deploy.md"
LIMIT = 240.0  # seconds, of which two idle cores need a tenth
MAX_MIB = 450.0  # for a site with a small model


def section(title: str) -> list[str]:
    """The commands of one section."""
    text = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]


class Terminal:
    """A command in a folder, and what it prints."""

    def __init__(self, command: str, folder: Path, name: str) -> None:
        program, *words = shlex.split(command)
        assert program == "offbeat"
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "offbeat", *words],
                cwd=folder,
                env=os.environ | {"XDG_STATE_HOME": str(folder / "state")},
                stdout=log,
                stderr=log,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def facts(self) -> tuple[int, float]:
        """The number of processes, and the resident memory of the first in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        [kib] = re.findall(r"VmRSS:\s+(\d+) kB", status)
        return 1 + len(children), int(kib) / 1024


@contextlib.contextmanager
def terminals(folder: Path, commands: dict[str, str]) -> Iterator[dict[str, Terminal]]:
    opened = {name: Terminal(command, folder, name) for name, command in commands.items()}
    try:
        yield opened
    finally:
        for terminal in opened.values():
            if terminal.process.poll() is None:
                terminal.process.send_signal(signal.SIGINT)
        for terminal in opened.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                terminal.process.wait(30)
            terminal.process.kill()


def ports_are_free() -> bool:
    for port in (8000, 8765):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the processes of a site are in /proc")
@pytest.mark.usefixtures("interruptible")
def test_a_server_and_three_sites_that_are_started_together_train_a_model(tmp_path: Path) -> None:
    if not ports_are_free():
        pytest.skip("the ports of the page, 8000 and 8765, are in use on this machine")
    new, serve, join = section("One machine, five minutes")
    subprocess.run([sys.executable, "-m", *shlex.split(new)], cwd=tmp_path, check=True, capture_output=True)
    assert join.endswith("--name site-0")
    commands = {f"site-{number}": join.replace("site-0", f"site-{number}") for number in range(3)}
    with terminals(tmp_path / "first-try", commands | {"server": serve}) as opened:
        server = opened.pop("server")
        found: dict[str, tuple[int, float]] = {}
        until = time.monotonic() + LIMIT
        while server.process.poll() is None and time.monotonic() < until:
            for name, site in opened.items():
                assert site.process.poll() is None, site.said
                processes, mib = site.facts()
                most = found.get(name, (0, 0.0))
                found[name] = max(most[0], processes), max(most[1], mib)
            time.sleep(0.5)
        assert server.process.poll() == 0, server.said
        for site in opened.values():
            while "the run is over after 30 server steps." not in site.said and time.monotonic() < until:
                time.sleep(0.1)
            assert "the run is over after 30 server steps. This site waits for the next run." in site.said
            site.process.send_signal(signal.SIGINT)
        assert [site.process.wait(30) for site in opened.values()] == [0, 0, 0]
    accuracies = [float(each) for each in re.findall(r"accuracy ([0-9.]+)", server.said)]
    assert accuracies[-1] > 0.8
    assert all(f"site-{number} joined as client" in server.said for number in range(3))
    [model] = re.findall(r"model: (.*)", server.said)
    assert (tmp_path / "first-try" / model).exists()
    assert {processes for processes, _ in found.values()} == {1}
    assert max(mib for _, mib in found.values()) <= MAX_MIB
    assert "Traceback" not in "".join(site.said for site in opened.values())
