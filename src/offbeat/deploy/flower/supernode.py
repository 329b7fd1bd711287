"""The two processes of a site, kept alive: the site itself, and the SuperNode that receives its tasks."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.deploy.flower.commands import (
    ChildProcess,
    SuperLinkAddress,
    start_supernode,
    superlink_problem,
)
from offbeat.deploy.flower.private_api import (
    KEY_REFUSED,
    KEY_REQUIRED,
    NodeStatus,
    deactivate_node,
    node_id_in_log,
    refusal_in_log,
)
from offbeat.deploy.keys import load_site_key
from offbeat.deploy.protocol.transport import Backoff
from offbeat.deploy.site.relay import SOCKET_VARIABLE
from offbeat.errors import InputError

_FIRST_NODE_PAUSE, _MAX_NODE_PAUSE = 1.0, 30.0  # seconds between two starts
_FIRST_SITE_PAUSE, _MAX_SITE_PAUSE = 0.5, 60.0
_CONNECT_NOTICE = 10.0  # seconds after which the user is told that the SuperNode still waits
_RECONNECT_TIMEOUT = 120.0  # seconds during which refusals by a SuperLink that knew the site are retried
_FLOWER_NODE_TIMEOUT = 70  # seconds after which Flower drops a node that was killed
_POLL_INTERVAL = 0.25  # seconds


class SiteOptions(NamedTuple):
    """The options of `offbeat join` that the site's process gets."""

    name: str
    folder: Path
    data: str
    module: str | None = None
    losses: str | None = None
    key: Path | None = None
    helper_key: Path | None = None
    minimum: int | None = None

    def command(self, socket: Path) -> list[str]:
        """Return the command that starts the site's process."""
        given = self._asdict() | {"socket": socket}
        options = [(name.replace("_", "-"), value) for name, value in given.items() if value is not None]
        return [sys.executable, "-m", "offbeat.deploy.site.process"] + [
            word for name, value in options for word in (f"--{name}", str(value))
        ]


def run_site(
    options: SiteOptions,
    link: SuperLinkAddress,
    notify: Callable[[str], None],
    should_stop: Callable[[], bool],
    on_ready: Callable[[dict[str, Any]], None] = lambda facts: None,
) -> None:
    """Keep both processes alive until `should_stop()`; the site starts first, as its data may not load."""
    options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    socket_folder = Path(tempfile.mkdtemp(prefix="offbeat-"))  # the path of a socket has to be short
    socket = socket_folder / "site"
    notify = _without_repeats(notify)
    site = SiteProcess(options, socket, notify)
    node = SuperNodeProcess(link, options.key, options.folder, {SOCKET_VARIABLE: str(socket)}, notify)
    kill = True
    try:
        on_ready(site.start())
        while not should_stop():
            node.keep_alive()
            site.keep_alive()
            time.sleep(_POLL_INTERVAL)
        kill = False
    finally:
        node.stop(kill=kill)
        site.stop(kill=kill)
        shutil.rmtree(socket_folder, ignore_errors=True)


def _without_repeats(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Drop a message that is equal to the one before it."""
    last = ""

    def notify_once(message: str) -> None:
        nonlocal last
        if message != last:
            last = message
            notify(message)

    return notify_once


class SiteProcess:
    """The process that holds a site's data, model and memory, and answers on a socket."""

    def __init__(self, options: SiteOptions, socket: Path, notify: Callable[[str], None]) -> None:
        self._options = options
        self._socket = socket
        self._notify = notify
        self._child: ChildProcess | None = None
        self._unfinished = b""  # the part of a line that the process has written so far
        self._backoff = Backoff(_FIRST_SITE_PAUSE, _MAX_SITE_PAUSE)

    def start(self) -> dict[str, Any]:
        """Start it, wait until it has loaded its data, and return what it reports."""
        log = self._options.folder / "resident.log"
        command = self._options.command(self._socket)
        child = ChildProcess(command, os.environ, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert child.process.stdout is not None
            line = child.process.stdout.readline()
            report: dict[str, Any] = json.loads(line) if line else {}
        except BaseException:
            child.kill()
            raise
        if "ready" not in report:
            child.stop()
            raise InputError(
                str(report.get("error") or f"the site's process ended during its start: see {log}.")
            )
        os.set_blocking(child.process.stdout.fileno(), False)
        self._child, self._unfinished = child, b""
        return report

    def keep_alive(self) -> None:
        """Start it again if it has ended; a start that fails is reported and repeated."""
        if self._child is not None and self._child.is_alive():
            self._backoff.reset()
            self._report_refusals(self._child)
            return
        if self._child is not None:
            self._child = None
            self._notify("the site's process ended and is being restarted.")
        if not self._backoff.due:
            return
        try:
            self.start()
        except InputError as error:
            self._notify(f"{str(error).rstrip('.')}; next attempt in {self._backoff.fail():.0f} s.")

    def stop(self, *, kill: bool) -> None:
        if self._child is not None:
            self._child.kill() if kill else self._child.stop()

    def _report_refusals(self, child: ChildProcess) -> None:
        assert child.process.stdout is not None
        *lines, self._unfinished = (self._unfinished + (child.process.stdout.read() or b"")).split(b"\n")
        for line in lines:
            self._notify(f"the server refused this site: {json.loads(line)['refused']}")


class SuperNodeProcess:
    """A SuperNode, kept connected; a problem that a restart cannot solve is raised as an `InputError`."""

    def __init__(
        self,
        link: SuperLinkAddress,
        key: Path | None,
        folder: Path,
        variables: Mapping[str, str],
        notify: Callable[[str], None],
    ) -> None:
        self._link = link
        self._key_file = key
        self._key = None if key is None else load_site_key(key)
        self._folder = folder
        self._variables = variables
        self._notify = notify
        self._child: ChildProcess | None = None
        self._node: int | None = None  # its node ID while it is connected
        self._last_connected: float | None = None
        self._backoff = Backoff(_FIRST_NODE_PAUSE, _MAX_NODE_PAUSE)
        self._waiting = False  # whether the user was told that it waits

    @property
    def log(self) -> Path:
        """The SuperNode's log file."""
        return self._folder / "supernode.log"

    @property
    def _record(self) -> Path:
        """The file that keeps the last node ID."""
        return self._folder / "node.json"

    def keep_alive(self) -> None:
        """Start it, notice when it is connected, and start it again if it has ended."""
        if self._child is None:
            if self._backoff.due:
                self._start()
        elif not self._child.is_alive():
            self._child = None
            self._handle_exit()
        elif self._node is None:
            self._check_connected(self._child)

    def stop(self, *, kill: bool) -> None:
        """Stop it; unless it is killed, it deactivates its node first."""
        if self._child is not None:
            self._child.kill() if kill else self._child.stop()

    def _start(self) -> None:
        problem = _connection_problem(self._link, superlink_problem(self._link))
        if problem is not None:
            self._fail(problem)
            return
        self._deactivate_last()  # the last SuperNode has ended, perhaps without deactivating its node
        self.log.unlink(missing_ok=True)
        home = self._folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        self._child = start_supernode(self._link, home, self._key_file, self._variables, self.log)

    def _check_connected(self, child: ChildProcess) -> None:
        node = node_id_in_log(self.log)
        if node is None:
            if not self._waiting and time.monotonic() - child.started > _CONNECT_NOTICE:
                self._waiting = True
                self._notify(f"waiting for the SuperLink at {self._link.address}.")
            return
        self._node, self._last_connected, self._waiting = node, time.monotonic(), False
        self._backoff.reset()
        self._record.write_text(json.dumps({"superlink": self._link.address, "node": node}))
        self._notify(f"connected to {self._link.address} as node {node}.")

    def _handle_exit(self) -> None:
        """Decide whether another start can help."""
        was_connected, self._node = self._node is not None, None
        if was_connected:
            self._last_connected = time.monotonic()
            self._notify("the SuperNode ended and is being restarted.")
            return
        refusal = refusal_in_log(self.log)
        address = self._link.address
        if refusal is None:
            pause = self._backoff.fail()
            self._notify(f"the SuperNode ended and will be restarted in {pause:.0f} s; see {self.log}.")
            return
        code, reason = refusal
        if code == KEY_REQUIRED:
            self._fail(
                f"the SuperLink at {address} accepts registered sites only: give --certificate and --key."
            )
        elif code == KEY_REFUSED and self._deactivate_last() in (None, NodeStatus.UNKNOWN_KEY):
            self._fail(
                f"the SuperLink at {address} does not know the key {self._key_file}, or another node uses "
                "it: have its public key registered at the server."
            )
        elif code == KEY_REFUSED:
            self._notify(
                "the SuperLink still counts the SuperNode that was killed as connected: it can take up to "
                f"{_FLOWER_NODE_TIMEOUT} s until it accepts this one."
            )
            self._backoff.fail()
        else:
            self._fail(f"the SuperLink at {address} refuses this site ({reason.rstrip('.')}).")

    def _fail(self, problem: str) -> None:
        """Raise, unless the site was connected a short time ago: then its SuperLink may be restarting."""
        if self._last_connected is None or time.monotonic() - self._last_connected > _RECONNECT_TIMEOUT:
            raise InputError(problem)
        self._notify(f"{problem.rstrip('.')}; next attempt in {self._backoff.fail():.0f} s.")

    def _deactivate_last(self) -> NodeStatus | None:
        """Deactivate the node that this site was last at this SuperLink; None if there is none."""
        if self._key is None:
            return None
        try:
            record = json.loads(self._record.read_text())
            node = int(record["node"]) if record["superlink"] == self._link.address else None
        except (OSError, ValueError, KeyError, TypeError):
            node = None
        if node is None:
            return None
        return deactivate_node(self._link.address, self._link.authority, self._key, node)


def _connection_problem(link: SuperLinkAddress, problem: str | None) -> str | None:
    """Return what the user has to change to reach a SuperLink; None if it may only be down."""
    if problem is None:
        return None
    if "CERTIFICATE_VERIFY_FAILED" in problem:
        found = re.search(r"verify failed: (.*?)\.? \(_ssl", problem)
        return (
            f"the certificate of the SuperLink at {link.address} is not valid under {link.authority}"
            f"{f' ({found[1]})' if found else ''}: check both files and the address."
        )
    if "WRONG_VERSION_NUMBER" in problem or "RECORD_LAYER" in problem:
        return f"the SuperLink at {link.address} does not speak TLS: give --insecure, if that is intended."
    if link.authority is None and ("closed connection" in problem or "reset by peer" in problem):
        return f"the SuperLink at {link.address} speaks TLS: give --certificate."
    return None
