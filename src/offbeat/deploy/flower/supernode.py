"""A SuperNode's standing at its SuperLink, beyond what Flower's commands can ask.

Flower refuses a SuperNode for a minute if the last one with its key was killed, and so did not sign off.
Whoever has the key may sign off in its place. The same call tells a key that the SuperLink does not know
from one that is still in use, which Flower's own error does not.

A site's SuperNode as a child process, kept connected.

A site's resident as a child process, kept alive.

A site's two processes: the resident with data and model, and the SuperNode that fetches its tasks.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from offbeat.deploy.flower.commands import SuperLinkAddress, start_supernode, superlink_problem
from offbeat.deploy.process import ChildProcess
from offbeat.deploy.protocol.transport import Backoff
from offbeat.errors import InputError

_NODE_ID = re.compile(rb"SuperNode ID: (\d+)")
_REFUSED = re.compile(rb"\[code: (\d+)\] ([^\n]*)")
_TAIL_BYTES = 65536  # bytes of a log that are looked at
KEY_REFUSED, KEY_WANTED = 2004, 2001  # what a SuperLink says to a key, and to a node without


class NodeStatus(Enum):
    """What a SuperLink makes of a node and its key."""

    FREE = "nobody uses the key now"
    UNKNOWN = "the key is not that node's"
    UNCLEAR = "no usable answer"


def load_site_key(path: Path) -> EllipticCurvePrivateKey:
    """A site's private key."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise InputError(
            f"the key {path} cannot be read ({error.strerror or error}): name another."
        ) from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise InputError(f"{path} is no private key of a site: make one with 'offbeat keys'.")
    return key


def deactivate_node(link: SuperLinkAddress, key: EllipticCurvePrivateKey, node: int) -> NodeStatus:
    """Say that a node is gone, which was killed; only for whoever knows that it is."""
    # imported here, since it takes a second that only a restart has to spend
    import httpx
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    authority = None if link.authority is None else link.authority.read_bytes()
    with FleetHttpClient.from_server_address(
        link.address,
        authority is None,
        authority,
        [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ],
    ) as client:
        try:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            return {401: NodeStatus.UNKNOWN, 412: NodeStatus.FREE}.get(code, NodeStatus.UNCLEAR)
        except (httpx.HTTPError, RuntimeError):
            return NodeStatus.UNCLEAR
        return NodeStatus.FREE


def node_id_in_log(log: Path) -> int | None:
    """The number that a SuperLink gave the node of this log, last."""
    found = _NODE_ID.findall(_read_tail(log))
    return int(found[-1]) if found else None


def refusal_in_log(log: Path) -> tuple[int, str] | None:
    """Why the SuperLink refused it, last: a code and its words."""
    found = _REFUSED.findall(_read_tail(log))
    return (int(found[-1][0]), found[-1][1].decode(errors="replace")) if found else None


def _read_tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read()


_FIRST_NODE_PAUSE, _MAX_NODE_PAUSE = 1.0, 30.0  # seconds between two starts
_RECONNECT_TIMEOUT = 120.0  # seconds in which a SuperLink that knew the site may have forgotten it
_FLOWER_NODE_TIMEOUT = 70  # seconds that Flower waits for a node that was killed


class SuperNodeProcess:
    """Fetches tasks and starts an app for each; what only a person can mend is an `InputError`."""

    def __init__(
        self,
        link: SuperLinkAddress,
        key: Path | None,
        folder: Path,
        told: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._link = link
        self._path = key
        self._key = None if key is None else load_site_key(key)
        self._folder = folder
        self._told = told
        self._say = say
        self._child: ChildProcess | None = None
        self._node: int | None = None  # while it is connected
        self._since: float | None = None  # when it was last connected, or lost
        self._backoff = Backoff(_FIRST_NODE_PAUSE, _MAX_NODE_PAUSE)
        self._waited = False  # whether it was said that it waits

    @property
    def log(self) -> Path:
        """What Flower says."""
        return self._folder / "supernode.log"

    def tend(self) -> None:
        """Start it, note that it is connected, and start it again if it has died."""
        if self._child is None:
            if self._backoff.due:
                self._start()
        elif not self._child.alive():
            self._child = None
            self._lose()
        elif self._node is None:
            self._greet()

    def end(self, *, at_once: bool) -> None:
        """It signs off, unless there is no time for that."""
        if self._child is not None:
            self._child.kill() if at_once else self._child.end()

    def _start(self) -> None:
        trouble = _connection_problem(self._link, superlink_problem(self._link))
        if trouble is not None:
            self._complain(trouble)
            return
        before = self._recorded()
        if self._key is not None and before is not None:
            deactivate_node(self._link, self._key, before)  # the one before is gone; it may not have said so
        self.log.unlink(missing_ok=True)
        home = self._folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        self._child = start_supernode(self._link, home, self._path, self._told, self.log)

    def _greet(self) -> None:
        node = node_id_in_log(self.log)
        if node is None:
            if not self._waited and time.monotonic() - self._child_begun() > _FIRST_NODE_PAUSE * 10:
                self._waited = True
                self._say(f"waits for the SuperLink at {self._link.address}.")
            return
        self._node, self._since, self._waited = node, time.monotonic(), False
        self._backoff.reset()
        self._record().write_text(json.dumps({"superlink": self._link.address, "node": node}))
        self._say(f"connected to {self._link.address} as node {node}.")

    def _lose(self) -> None:
        """It has ended: find out whether that can be mended by starting it again."""
        connected, self._node = self._node is not None, None
        if connected:
            self._since = time.monotonic()
            self._say("the SuperNode ended, and is started again.")
            return
        refused = refusal_in_log(self.log)
        address = self._link.address
        if refused is None:
            self._say(
                f"the SuperNode ended, and is started again in {self._backoff.fail():.0f} s; see {self.log}."
            )
            return
        code, words = refused
        if code == KEY_WANTED:
            self._complain(
                f"the SuperLink at {address} takes only sites that it knows: give --certificate and --key."
            )
        elif code == KEY_REFUSED and self._is_unknown():
            self._complain(
                f"the SuperLink at {address} does not know the key {self._path}, or another node has it: "
                "have its public half registered at the server."
            )
        elif code == KEY_REFUSED:
            self._say(
                f"the SuperLink still counts on the SuperNode that was killed: "
                f"up to {_FLOWER_NODE_TIMEOUT} s until it "
                "takes this one."
            )
            self._backoff.fail()
        else:
            self._complain(f"the SuperLink at {address} refuses this site ({words.rstrip('.')}).")

    def _is_unknown(self) -> bool:
        before = self._recorded()
        if before is None or self._key is None:
            return True
        return deactivate_node(self._link, self._key, before) is NodeStatus.UNKNOWN

    def _complain(self, sentence: str) -> None:
        """At once if it never was connected; a SuperLink that knew it may be in the middle of a restart."""
        if self._since is None or time.monotonic() - self._since > _RECONNECT_TIMEOUT:
            raise InputError(sentence)
        self._say(f"{sentence.rstrip('.')}; it is tried again in {self._backoff.fail():.0f} s.")

    def _child_begun(self) -> float:
        return self._child.begun if self._child is not None else time.monotonic()

    def _record(self) -> Path:
        return self._folder / "node.json"

    def _recorded(self) -> int | None:
        """The node that this site was last, at the same SuperLink."""
        try:
            known = json.loads(self._record().read_text())
            return int(known["node"]) if known["superlink"] == self._link.address else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _connection_problem(link: SuperLinkAddress, why: str | None) -> str | None:
    """What is wrong with the way to a SuperLink, unless it is only away."""
    if why is None:
        return None
    if "CERTIFICATE_VERIFY_FAILED" in why:
        found = re.search(r"verify failed: (.*?)\.? \(_ssl", why)
        return (
            f"the SuperLink at {link.address} has another certificate than {link.authority} vouches for"
            f"{f' ({found[1]})' if found else ''}: check both, and the address."
        )
    if "WRONG_VERSION_NUMBER" in why or "RECORD_LAYER" in why:
        return f"the SuperLink at {link.address} does not speak TLS: use --insecure, if that is meant."
    if link.authority is None and ("closed connection" in why or "reset by peer" in why):
        return f"the SuperLink at {link.address} speaks TLS: give --certificate."
    return None


_FIRST_SITE_PAUSE, _MAX_SITE_PAUSE = 0.5, 60.0  # seconds between two starts


class SiteOptions(NamedTuple):
    """What a site is started with."""

    name: str
    folder: Path
    data: str
    module: str | None = None
    losses: str | None = None
    key: Path | None = None
    helper_key: Path | None = None
    minimum: int | None = None

    def words(self, socket: Path) -> list[str]:
        """The command that starts it."""
        given = self._asdict() | {"socket": socket}
        options = [(name.replace("_", "-"), value) for name, value in given.items() if value is not None]
        return [sys.executable, "-m", "offbeat.deploy.site.process"] + [
            word for name, value in options for word in (f"--{name}", str(value))
        ]


class SiteProcess:
    """Holds data, model and memory; messages come to its socket."""

    def __init__(self, own: SiteOptions, socket: Path, say: Callable[[str], None]) -> None:
        self._own = own
        self._socket = socket
        self._say = say
        self._child: ChildProcess | None = None
        self._heard = b""  # of a line that it has not ended
        self._backoff = Backoff(_FIRST_SITE_PAUSE, _MAX_SITE_PAUSE)

    def start(self) -> dict[str, Any]:
        """What it says of itself once it is ready, which takes as long as loading does."""
        log = self._own.folder / "resident.log"
        words = self._own.words(self._socket)
        child = ChildProcess(words, os.environ, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert child.process.stdout is not None
            line = child.process.stdout.readline()
            said: dict[str, Any] = json.loads(line) if line else {}
        except BaseException:
            child.kill()
            raise
        if "ready" not in said:
            child.end()
            raise InputError(str(said.get("error") or f"the site's process ended as it began: see {log}."))
        os.set_blocking(child.process.stdout.fileno(), False)
        self._child, self._heard = child, b""
        return said

    def tend(self) -> None:
        """Start it again if it has died; that this may fail for a while is only told."""
        if self._child is not None and self._child.alive():
            self._backoff.reset()
            self._hear(self._child)
            return
        if self._child is not None:
            self._child = None
            self._say("the site's process ended, and is started again.")
        if not self._backoff.due:
            return
        try:
            self.start()
        except InputError as error:
            pause = self._backoff.fail()
            self._say(f"{str(error).rstrip('.')}; it is tried again in {pause:.0f} s.")

    def _hear(self, child: ChildProcess) -> None:
        """Pass on what it says after it was ready."""
        assert child.process.stdout is not None
        *lines, self._heard = (self._heard + (child.process.stdout.read() or b"")).split(b"\n")
        for line in lines:
            self._say(f"the server turned this site away: {json.loads(line)['refused']}")

    def end(self, *, at_once: bool) -> None:
        """Let go of it."""
        if self._child is not None:
            self._child.kill() if at_once else self._child.end()


_SOCKET_VARIABLE = "OFFBEAT_SITE"  # tells apps where the resident is
_POLL_INTERVAL = 0.25  # seconds between two looks


def run_site(
    own: SiteOptions,
    link: SuperLinkAddress,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    ready: Callable[[dict[str, Any]], None] = lambda facts: None,
) -> None:
    """Keep both alive until told to stop; the resident comes first, for its data may not load."""
    own.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="offbeat-"))  # a socket's path has to be short
    socket = place / "site"
    once = _WithoutRepeats(say)
    resident = SiteProcess(own, socket, once)
    node = SuperNodeProcess(link, own.key, own.folder, {_SOCKET_VARIABLE: str(socket)}, once)
    at_once = True
    try:
        ready(resident.start())
        while not stop():
            node.tend()
            resident.tend()
            time.sleep(_POLL_INTERVAL)
        at_once = False
    finally:
        node.end(at_once=at_once)
        resident.end(at_once=at_once)
        shutil.rmtree(place, ignore_errors=True)


class _WithoutRepeats:
    """Says nothing twice in a row."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = ""

    def __call__(self, sentence: str) -> None:
        if sentence != self._last:
            self._last = sentence
            self._say(sentence)
