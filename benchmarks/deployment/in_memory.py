"""A server and its sites in one process, with no network between."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deployment.meter import resident_mib
from deployment.wide import BUFFER, write_task
from offbeat.deploy.protocol.messages import (
    HelloReply,
    TaskMessage,
    UploadMessage,
    byte_size,
    decode_message,
    encode_message,
)
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.server.run import ServeRequest, serve
from offbeat.deploy.site.site import Site


class InMemory:
    """A post whose sites answer at once; weighs the process as it goes."""

    backlog: frozenset[str] = frozenset()

    def __init__(self, sites: "Sequence[Site | Parrot]", every: int, at_once: int | None = None) -> None:
        self._sites = dict(enumerate(sites, 1))
        self._letters: dict[str, tuple[int, str, str, bytes]] = {}
        self._every, self._count, self._at_once = every, 0, at_once
        self.weights: list[tuple[int, float]] = []  # updates, MiB

    def nodes(self) -> frozenset[int]:
        return frozenset(self._sites)

    def key(self, node: int) -> bytes:
        return b""

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        self._count += kind == "task"
        if kind == "task" and self._count % self._every == 0:
            self.weights.append((self._count, resident()))
        number = f"{kind}-{self._count}-{node}"
        self._letters[number] = node, kind, header, payload
        return number

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        replies: list[Reply] = []
        for number in message_ids[: self._at_once]:
            node, *asked = self._letters.pop(number)
            replies.append(Reply(number, node, *self._sites[node].answer(*asked), None))
        return replies


class Parrot:
    """A site without data and model, which answers every task with zeros."""

    def __init__(self, number: int, size: int) -> None:
        self._number, self._form = number, (("float32", (size,)),)

    def answer(self, kind: str, header: str, payload: bytes) -> tuple[str, bytes]:
        """Answer as a site does."""
        if kind == "hello":
            hello = HelloReply(f"site {self._number}", f"{self._number:032x}", 4, self._form, None, None)
            return encode_message(hello), b""
        if kind == "end":
            return "{}", b""
        asked = decode_message(header, TaskMessage)
        upload = UploadMessage(asked.run, asked.task, self._form, "none", 0.01, None)
        return encode_message(upload), bytes(byte_size(self._form))


def resident() -> float:
    """MiB of this process in RAM; NaN where the system does not tell."""
    status = Path("/proc/self/statm")
    pages = int(status.read_text().split()[1]) if status.exists() else float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def briefly(seconds: float) -> None:
    """Sleep as long as a server does that is told of each upload at once."""
    time.sleep(min(seconds, 0.001))


@contextmanager
def open_sites(size: int, nodes: int, updates: int) -> Iterator[tuple[ServeRequest, list[Site]]]:
    """A run of that many updates, to be served, and the sites that take part in it."""
    with tempfile.TemporaryDirectory(prefix="offbeat-") as name, ExitStack() as stack:
        folder = Path(name)
        settings = write_task(folder, size, nodes, updates)
        sys.path.insert(0, name)
        task = __import__(f"wide_{size}")
        sites = [Site(f"s{node}", folder / f"site-{node}", task.load, task.Wide) for node in range(nodes)]
        for site in sites:
            stack.callback(site.close)
        yield ServeRequest(settings, folder / "run", False, False), sites


def weigh(size: int, nodes: int, updates: int) -> dict[str, Any]:
    """The server's loop with its journal, checkpoints and log, and its sites, in this process."""
    with open_sites(size, nodes, updates) as (request, sites):
        post = InMemory(sites, max(1, updates // 10))
        begun, spent = time.perf_counter(), time.process_time()
        outcome = serve(request, lambda most: post, briefly)
        wall, cpu = time.perf_counter() - begun, time.process_time() - spent
    if outcome.error or outcome.version != updates // BUFFER:
        raise SystemExit(f"deployed: the run did not end well: {outcome}")
    counts, weights = np.array(post.weights).T
    later = counts > updates / 5
    slope = float(np.polyfit(counts[later], weights[later], 1)[0]) * 1024
    return {
        "size": size,
        "updates": updates,
        "mib": [[int(count), weight] for count, weight in post.weights],
        "kib_an_update": slope,
        "ms_an_update": 1000 * wall / updates,
        "cpu_ms_an_update": 1000 * cpu / updates,
    }


def peak(size: int, buffer: int, steps: int) -> dict[str, Any]:
    """The most memory of a server whose sites are no part of its process; call it in a new process."""
    with tempfile.TemporaryDirectory(prefix="offbeat-") as name:
        settings = write_task(Path(name), size, buffer, steps * buffer, buffer)
        sys.path.insert(0, name)
        post = InMemory([Parrot(number, size) for number in range(buffer)], steps * buffer, at_once=1)
        begun = time.perf_counter()
        request = ServeRequest(settings, Path(name) / "run", False, False)
        outcome = serve(request, lambda most: post, briefly)
        wall = time.perf_counter() - begun
    if outcome.error or outcome.version != steps:
        raise SystemExit(f"deployed: the run did not end well: {outcome}")
    most = resident_mib(os.getpid(), "VmHWM")
    return {"size": size, "buffer": buffer, "peak_mib": most, "seconds_a_step": wall / steps}
