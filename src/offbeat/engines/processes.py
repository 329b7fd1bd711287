"""A crew of processes on this machine, over shared memory.

They end with this process however it ends: their standard input closes.
"""

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from offbeat.engines.link import Link, Placed
from offbeat.engines.orders import Done, Failed, Lost, Order
from offbeat.engines.segments import Segment, Shelf
from offbeat.errors import InputError
from offbeat.trees import Tree

_GRACE = 5.0  # seconds that the nursery has to end
_SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass
class _Worker:
    """One process, and what it holds of ours and we of its."""

    number: int
    link: Link
    memories: Segment | None = None
    answered: list[int] = field(default_factory=list)  # segments of its that we may still read
    read: list[int] = field(default_factory=list)  # those that we are through with


class Processes:
    """Workers that a nursery forks."""

    def __init__(self, sent: Tree, workers: int) -> None:
        self._shelf = Shelf()
        self._sent = self._shelf.put(sent)
        self._placed: dict[int, Segment] = {}
        self._started = 0
        self._nursery = _Nursery()
        self._stop = weakref.finalize(self, _stop, self._nursery, self._shelf, os.getpid())
        self._crew = [self._start() for _ in range(workers)]

    @property
    def workers(self) -> int:
        return len(self._crew)

    def ids(self) -> list[int]:
        """Of the processes."""
        alive: dict[int, int] = self._nursery.ask("list", 0)
        return [alive[worker.number] for worker in self._crew]

    def place(self, tree: Tree) -> Placed:
        segment, slots = self._shelf.put(tree)
        self._placed[segment.number] = segment
        return Placed(segment.number, slots)

    def remove(self, placed: Any) -> None:
        self._shelf.take_off(self._placed.pop(placed.number))

    def give(self, worker: int, order: Order) -> None:
        mine = self._crew[worker]
        mine.memories, slots = self._shelf.put(list(order.memories))
        read, mine.read = mine.read, []
        with contextlib.suppress(OSError):  # it is gone, which `wait` will say
            for message in order.messages:
                mine.link.show(self._placed[message.number])
            mine.link.show(mine.memories)
            mine.link.say((order._replace(memories=()), Placed(mine.memories.number, slots), read))

    def wait(self) -> Sequence[tuple[int, Done | Failed] | Lost]:
        ready = set(wait([worker.link.line for worker in self._crew]))
        return [self._hear(place) for place, each in enumerate(self._crew) if each.link.line in ready]

    def replace(self, worker: int) -> None:
        self._crew[worker] = self._start()

    def clear(self) -> None:
        for worker in self._crew:
            worker.read += worker.answered
            worker.answered = []

    def close(self) -> None:
        self._stop()

    def _hear(self, place: int) -> tuple[int, Done | Failed] | Lost:
        worker = self._crew[place]
        try:
            answer: Done | Failed | None = worker.link.hear()
        except (EOFError, OSError):
            answer = None
        if worker.memories is not None:
            self._shelf.take_off(worker.memories)
            worker.memories = None
        if answer is None:
            worker.link.line.close()
            return Lost(place, self._reason(worker))
        if isinstance(answer, Done):
            worker.answered.append(answer.results.number)
            answer = replace(answer, results=worker.link.read(answer.results))
        return place, answer

    def _reason(self, worker: _Worker) -> str:
        try:
            return str(self._nursery.ask("end", worker.number))
        except (EOFError, OSError):
            return "with its nursery"

    def _start(self) -> _Worker:
        self._started += 1
        ours, theirs = socket.socketpair()
        with theirs:
            self._nursery.start(self._started, theirs.fileno())
        link = Link(Connection(ours.detach()))
        segment, slots = self._sent
        with contextlib.suppress(OSError):  # as in `give`
            link.show(segment)
            link.say(Placed(segment.number, slots))
        return _Worker(self._started, link)


class _Nursery:
    """The process that forks workers; another, if it is gone."""

    def __init__(self) -> None:
        self._open()

    def start(self, number: int, line: int) -> None:
        for _ in range(2):
            try:
                self._control.send(("start", number))
                reduction.send_handle(self._control, line, None)
                return
            except OSError:
                self.close()
                self._open()
        raise InputError("worker processes cannot be started here: use the sequential engine.")

    def ask(self, what: str, number: int) -> Any:
        self._control.send((what, number))
        return self._control.recv()

    def close(self) -> None:
        self._control.close()
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "offbeat.engines.nursery", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,  # what a module prints is no part of this program's output
                pass_fds=[theirs.fileno()],
                env=os.environ | _SINGLE | {"PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C is for this process to deal with
            )
        self._control = Connection(ours.detach())


def _stop(nursery: _Nursery, shelf: Shelf, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork
        nursery.close()
        shelf.close()
