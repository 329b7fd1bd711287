"""A site's SuperNode as a child process, kept connected."""

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from offbeat.deploy.backoff import Backoff
from offbeat.deploy.children import Child
from offbeat.deploy.flower_home import Link
from offbeat.deploy.flower_node import (
    KEY_REFUSED,
    KEY_WANTED,
    Standing,
    load_key,
    node_in,
    refusal_in,
    sign_off,
)
from offbeat.deploy.flower_processes import answers, start_supernode
from offbeat.errors import InputError

_FIRST, _LONGEST = 1.0, 30.0  # seconds between two starts
_PATIENCE = 120.0  # seconds in which a SuperLink that knew the site may have forgotten it
_LAPSE = 70  # seconds that Flower waits for a node that was killed


class NodeChild:
    """Fetches tasks and starts an app for each; what only a person can mend is an `InputError`."""

    def __init__(
        self, link: Link, key: Path | None, folder: Path, told: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._link = link
        self._path = key
        self._key = None if key is None else load_key(key)
        self._folder = folder
        self._told = told
        self._say = say
        self._child: Child | None = None
        self._node: int | None = None  # while it is connected
        self._since: float | None = None  # when it was last connected, or lost
        self._backoff = Backoff(_FIRST, _LONGEST)
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
        trouble = _trouble(self._link, answers(self._link))
        if trouble is not None:
            self._complain(trouble)
            return
        before = self._recorded()
        if self._key is not None and before is not None:
            sign_off(self._link, self._key, before)  # the one before is gone; it may not have said so
        self.log.unlink(missing_ok=True)
        home = self._folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        self._child = start_supernode(self._link, home, self._path, self._told, self.log)

    def _greet(self) -> None:
        node = node_in(self.log)
        if node is None:
            if not self._waited and time.monotonic() - self._child_begun() > _FIRST * 10:
                self._waited = True
                self._say(f"waits for the SuperLink at {self._link.address}.")
            return
        self._node, self._since, self._waited = node, time.monotonic(), False
        self._backoff.succeed()
        self._record().write_text(json.dumps({"superlink": self._link.address, "node": node}))
        self._say(f"connected to {self._link.address} as node {node}.")

    def _lose(self) -> None:
        """It has ended: find out whether that can be mended by starting it again."""
        connected, self._node = self._node is not None, None
        if connected:
            self._since = time.monotonic()
            self._say("the SuperNode ended, and is started again.")
            return
        refused = refusal_in(self.log)
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
                f"the SuperLink still counts on the SuperNode that was killed: up to {_LAPSE} s until it "
                "takes this one."
            )
            self._backoff.fail()
        else:
            self._complain(f"the SuperLink at {address} refuses this site ({words.rstrip('.')}).")

    def _is_unknown(self) -> bool:
        before = self._recorded()
        if before is None or self._key is None:
            return True
        return sign_off(self._link, self._key, before) is Standing.UNKNOWN

    def _complain(self, sentence: str) -> None:
        """At once if it never was connected; a SuperLink that knew it may be in the middle of a restart."""
        if self._since is None or time.monotonic() - self._since > _PATIENCE:
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


def _trouble(link: Link, why: str | None) -> str | None:
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
