"""A site's two processes: the resident with data and model, and the SuperNode that fetches its tasks."""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.deploy.flower_home import Link
from offbeat.deploy.flower_node_child import NodeChild
from offbeat.deploy.resident_child import Own, ResidentChild

_SITE = "OFFBEAT_SITE"  # tells apps where the resident is
_LOOK = 0.25  # seconds between two looks


def join(
    own: Own,
    link: Link,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    ready: Callable[[dict[str, Any]], None] = lambda facts: None,
) -> None:
    """Keep both alive until told to stop; the resident comes first, for its data may not load."""
    own.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="offbeat-"))  # a socket's path has to be short
    socket = place / "site"
    once = _Once(say)
    resident = ResidentChild(own, socket, once)
    node = NodeChild(link, own.key, own.folder, {_SITE: str(socket)}, once)
    at_once = True
    try:
        ready(resident.start())
        while not stop():
            node.tend()
            resident.tend()
            time.sleep(_LOOK)
        at_once = False
    finally:
        node.end(at_once=at_once)
        resident.end(at_once=at_once)
        shutil.rmtree(place, ignore_errors=True)


class _Once:
    """Says nothing twice in a row."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = ""

    def __call__(self, sentence: str) -> None:
        if sentence != self._last:
            self._last = sentence
            self._say(sentence)
