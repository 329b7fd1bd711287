"""A crew of processes on this machine, over shared memory.

They end with this process however it ends: their standard input closes.

Client work in processes of this machine, one thread each.
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

from offbeat.core import AnyAlgorithm, Vector
from offbeat.data.client_store import Anywhere, MemoryBackend
from offbeat.data.population import Population
from offbeat.engines.execution import Execution
from offbeat.engines.local import check_module
from offbeat.engines.shared_memory import Channel, PlacedTree, Segment, SegmentPool
from offbeat.engines.simulation import Simulation
from offbeat.engines.worker_pool import (
    PoolExecutor,
    WorkDone,
    WorkerLost,
    WorkFailed,
    WorkOrder,
    even_chunks,
    guided_chunks,
)
from offbeat.engines.worker_runtime import Serial, pack_worker
from offbeat.errors import InputError, setting_name
from offbeat.nn.problem import Problem, Statistics
from offbeat.schedule.availability import Always, Availability, Dropout
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Delay, Tiers
from offbeat.schedule.rng import Rng
from offbeat.trees import Tree

_EXIT_TIMEOUT = 5.0  # seconds that the nursery has to end
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass
class _Worker:
    """One process, and what it holds of ours and we of its."""

    number: int
    link: Channel
    memories: Segment | None = None
    answered: list[int] = field(default_factory=list)  # segments of its that we may still read
    read: list[int] = field(default_factory=list)  # those that we are through with


class ProcessPool:
    """Workers that a nursery forks."""

    def __init__(self, sent: Tree, workers: int) -> None:
        self._shelf = SegmentPool()
        self._sent = self._shelf.put(sent)
        self._placed: dict[int, Segment] = {}
        self._started = 0
        self._nursery = _ForkServer()
        self._stop = weakref.finalize(self, _stop, self._nursery, self._shelf, os.getpid())
        self._crew = [self._start() for _ in range(workers)]

    @property
    def workers(self) -> int:
        return len(self._crew)

    def ids(self) -> list[int]:
        """Of the processes."""
        alive: dict[int, int] = self._nursery.ask("list", 0)
        return [alive[worker.number] for worker in self._crew]

    def place(self, tree: Tree) -> PlacedTree:
        segment, slots = self._shelf.put(tree)
        self._placed[segment.number] = segment
        return PlacedTree(segment.number, slots)

    def remove(self, placed: Any) -> None:
        self._shelf.take_off(self._placed.pop(placed.number))

    def give(self, worker: int, order: WorkOrder) -> None:
        mine = self._crew[worker]
        mine.memories, slots = self._shelf.put(list(order.memories))
        read, mine.read = mine.read, []
        with contextlib.suppress(OSError):  # it is gone, which `wait` will say
            for message in order.messages:
                mine.link.show(self._placed[message.number])
            mine.link.show(mine.memories)
            mine.link.say((order._replace(memories=()), PlacedTree(mine.memories.number, slots), read))

    def wait(self) -> Sequence[tuple[int, WorkDone | WorkFailed] | WorkerLost]:
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

    def _hear(self, place: int) -> tuple[int, WorkDone | WorkFailed] | WorkerLost:
        worker = self._crew[place]
        try:
            answer: WorkDone | WorkFailed | None = worker.link.hear()
        except (EOFError, OSError):
            answer = None
        if worker.memories is not None:
            self._shelf.take_off(worker.memories)
            worker.memories = None
        if answer is None:
            worker.link.line.close()
            return WorkerLost(place, self._reason(worker))
        if isinstance(answer, WorkDone):
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
        link = Channel(Connection(ours.detach()))
        segment, slots = self._sent
        with contextlib.suppress(OSError):  # as in `give`
            link.show(segment)
            link.say(PlacedTree(segment.number, slots))
        return _Worker(self._started, link)


class _ForkServer:
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
            self._process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "offbeat.engines.forkserver", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,  # what a module prints is no part of this program's output
                pass_fds=[theirs.fileno()],
                env=os.environ | _ONE_THREAD | {"PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C is for this process to deal with
            )
        self._control = Connection(ours.detach())


def _stop(nursery: _ForkServer, shelf: SegmentPool, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork
        nursery.close()
        shelf.close()


@dataclass(frozen=True)
class Workers:
    """The clients of a buffer on several processes of this machine."""

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    workers: int | None = None  # None: as many as cores
    memory: MemoryBackend = Anywhere()
    how: Execution = Serial()
    ahead: int = 0  # tasks to compute at once, some ahead of a buffer too small to keep all busy

    def __post_init__(self) -> None:
        check_worker_count(self.workers)
        if self.problem.device.type != "cpu":
            raise InputError(
                f"worker processes compute on the CPU: use {setting_name('device')} cpu, or another engine."
            )
        if not hasattr(socket, "send_fds"):
            raise InputError("this system cannot share memory with workers: use the sequential engine.")

    @property
    def clients(self) -> int:
        return len(self.population)

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Rng) -> Simulation:
        clock = Clock(self.delays.bind(source, self.clients), source, self.dropout)
        check_module(algorithm, self.problem, self.population, seed)
        crew = ProcessPool(
            pack_worker(self.problem, self.population, self.how), self.workers or available_cores()
        )
        work = PoolExecutor(
            crew, self.problem.device, guided_chunks if isinstance(self.how, Serial) else even_chunks
        )
        return Simulation(algorithm, self.problem, clock, work, seed, self.memory, self.clients, self.ahead)


def available_cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_worker_count(workers: int | None) -> None:
    """Refuse a number of workers that cannot be."""
    if workers is not None and workers < 1:
        raise InputError(f"the number of workers is {workers}: give at least 1.")
