"""Client work in processes of this machine with one thread each, over shared memory.

The processes end with this one, however it ends: their standard input closes.
"""

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from offbeat import trees
from offbeat.data.client_store import Anywhere, MemoryBackend
from offbeat.data.population import Population
from offbeat.engines.execution import Execution, Serial
from offbeat.engines.local import Executor
from offbeat.engines.shared_memory import (
    Channel,
    PlacedTree,
    ResultShape,
    Segment,
    SegmentPool,
    plan_stack,
    read_packed,
    select_rows,
)
from offbeat.engines.simulation import SimulatedEngine
from offbeat.engines.worker_pool import (
    PoolExecutor,
    WorkDone,
    WorkerLost,
    WorkFailed,
    WorkOrder,
    even_chunks,
    guided_chunks,
    pack_worker,
)
from offbeat.errors import InputError, setting_name
from offbeat.nn.problem import Problem
from offbeat.schedule.availability import Always, Availability, Dropout
from offbeat.schedule.clock import TaskLimits
from offbeat.schedule.delays import Delay, Tiers
from offbeat.trees import Tree

_MOST_PROCESSES, _PROCESSES_PER_CORE = 64, 8  # the larger of the two limits holds
_EXIT_TIMEOUT = 5.0  # seconds that the fork server has to end
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# memory of one local step is used again by the next, in large pages, and not given back to the system
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 29),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Workers(SimulatedEngine):
    """The clients of a buffer on several processes of this machine."""

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    workers: int | None = None  # None: as many as cores
    memory: MemoryBackend = Anywhere()
    execution: Execution = Serial()
    ahead: int = 0  # tasks to compute at once, some ahead of a buffer too small to keep all workers busy
    limits: TaskLimits = TaskLimits()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_worker_count(self.workers)
        check_process_count("the number of workers", self.workers or 1)
        if self.problem.device.type != "cpu":
            raise InputError(
                f"worker processes compute on the CPU: use {setting_name('device')} cpu, or another engine."
            )
        if not hasattr(socket, "send_fds"):
            raise InputError("this system cannot share memory with workers: use the sequential engine.")

    def make_executor(self) -> Executor:
        packed = pack_worker(self.problem, self.population, self.execution)
        pool = ProcessPool(packed, self.workers or available_cores())
        split = guided_chunks if isinstance(self.execution, Serial) else even_chunks
        return PoolExecutor(pool, self.problem.device, split)

    def tasks_at_once(self) -> int:
        return self.ahead


def available_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_process_count(what: str, count: int) -> None:
    """Refuse more processes than any machine of so many cores has a use for, before they fill its memory."""
    most = max(_MOST_PROCESSES, _PROCESSES_PER_CORE * available_cores())
    if count > most:
        raise InputError(
            f"{what} is {count:,}, and each is a process on this machine: give at most {most:,}."
        )


def check_worker_count(workers: int | None) -> None:
    """Refuse a number of workers below 1."""
    if workers is not None and workers < 1:
        raise InputError(f"the number of workers is {workers}: give at least 1.")


@dataclass
class _Worker:
    """One worker process, and the segments that it and this process have in use."""

    number: int
    channel: Channel
    memories: Segment | None = None
    rows: tuple[int, int] = (0, 0)  # the first of its order among the results, and their number


class _Results(NamedTuple):
    """Where workers write what they compute."""

    segment: Segment
    memory: Tensor
    slots: Tree


class ProcessPool:
    """Worker processes that a fork server forks."""

    def __init__(self, packed: Tree, workers: int) -> None:
        self._segments = SegmentPool()
        self._packed = self._segments.put(packed)
        self._placed: dict[int, Segment] = {}
        self._tasks = 0  # of the orders that are given
        self._sizes: dict[int, int] = {}  # the tasks of each order
        self._row: Tree | None = None  # what the results of one task take, once it is known
        self._results: _Results | None = None
        self._adapted = False  # whether a worker has said what these results take
        self._started = 0
        self._forkserver = _ForkServer()
        self._stop = weakref.finalize(self, _stop, self._forkserver, self._segments, os.getpid())
        self._workers = [self._start() for _ in range(workers)]

    @property
    def workers(self) -> int:
        return len(self._workers)

    def process_ids(self) -> list[int]:
        """The process ids of the workers."""
        alive: dict[int, int] = self._forkserver.ask("list", 0)
        return [alive[worker.number] for worker in self._workers]

    def expect(self, tasks: int) -> None:
        self._tasks, self._sizes, self._results, self._adapted = tasks, {}, None, False
        if self._row is not None:
            self._place_results(self._row)

    def place(self, tree: Tree) -> PlacedTree:
        segment, slots = self._segments.put(tree)
        self._placed[segment.number] = segment
        return PlacedTree(segment.number, slots)

    def remove(self, placed: Any) -> None:
        self._segments.release(self._placed.pop(placed.segment))

    def give(self, worker: int, order: WorkOrder) -> None:
        target = self._workers[worker]
        target.memories, slots = self._segments.put(list(order.memories))
        target.rows = order.first, len(order.tasks)
        self._sizes[order.number] = len(order.tasks)
        with contextlib.suppress(OSError):  # the worker is gone, which `wait` reports
            for message in order.messages:
                target.channel.share(self._placed[message.segment])
            target.channel.share(target.memories)
            memories = PlacedTree(target.memories.number, slots)
            target.channel.send((order._replace(memories=()), memories, self._share_rows(target)))

    def wait(self) -> Sequence[tuple[int, WorkDone | WorkFailed] | WorkerLost]:
        events: list[tuple[int, WorkDone | WorkFailed] | WorkerLost] = []
        while not events:
            ready = set(wait([worker.channel.connection for worker in self._workers]))
            received = [
                self._receive(number)
                for number, worker in enumerate(self._workers)
                if worker.channel.connection in ready
            ]
            events = [event for event in received if event is not None]
        return events

    def replace(self, worker: int) -> None:
        self._workers[worker] = self._start()

    @property
    def in_place(self) -> bool:
        return True

    def join(self, done: Sequence[WorkDone]) -> Tree:
        assert self._results is not None
        rows = sum(self._sizes[each.number] for each in done)
        slots, memory = select_rows(self._results.slots, 0, rows), self._results.memory
        if rows == self._tasks:
            self._results = None
        return read_packed(slots, memory)

    def close(self) -> None:
        self._stop()

    def _receive(self, number: int) -> tuple[int, WorkDone | WorkFailed] | WorkerLost | None:
        """What a worker has to say; None if it only asked where its results go."""
        worker = self._workers[number]
        try:
            answer: WorkDone | WorkFailed | ResultShape | None = worker.channel.receive()
            if isinstance(answer, ResultShape):
                self._adapt_results(answer.row)
                worker.channel.send(self._share_rows(worker))
                return None
        except (EOFError, OSError):
            answer = None
        if worker.memories is not None:
            self._segments.release(worker.memories)
            worker.memories = None
        if answer is None:
            worker.channel.connection.close()
            return WorkerLost(number, self._exit_reason(worker))
        return number, answer

    def _place_results(self, row: Tree) -> None:
        """A stack of such rows for all tasks, for workers to write."""
        slots, size = plan_stack(row, self._tasks)
        self._row, self._results = row, _Results(*self._segments.lease(size), slots)

    def _adapt_results(self, row: Tree) -> None:
        """Results are not as those before: the first worker that notices says so for all."""
        if not self._adapted:
            self._adapted = True
            self._place_results(row)
        elif trees.leaves(row) != trees.leaves(self._row):
            raise RuntimeError("the results of two tasks differ in shape.")

    def _share_rows(self, worker: _Worker) -> PlacedTree | None:
        """The rows of the worker's order."""
        if self._results is None:
            return None
        worker.channel.share(self._results.segment)
        rows = select_rows(self._results.slots, *worker.rows)
        return PlacedTree(self._results.segment.number, rows)

    def _exit_reason(self, worker: _Worker) -> str:
        try:
            return str(self._forkserver.ask("end", worker.number))
        except (EOFError, OSError):
            return "with its fork server"

    def _start(self) -> _Worker:
        self._started += 1
        ours, theirs = socket.socketpair()
        with theirs:
            self._forkserver.start(self._started, theirs.fileno())
        channel = Channel(Connection(ours.detach()))
        segment, slots = self._packed
        with contextlib.suppress(OSError):  # as in `give`
            channel.share(segment)
            channel.send(PlacedTree(segment.number, slots))
        return _Worker(self._started, channel)


class _ForkServer:
    """The process that forks workers; started again if it is gone."""

    def __init__(self) -> None:
        self._open()

    def start(self, number: int, descriptor: int) -> None:
        """Fork a worker that serves this connection."""
        for _ in range(2):
            try:
                self._control.send(("start", number))
                reduction.send_handle(self._control, descriptor, None)
                return
            except OSError:
                self.close()
                self._open()
        raise InputError("worker processes cannot be started here: use the sequential engine.")

    def ask(self, request: str, number: int) -> Any:
        self._control.send((request, number))
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
                env=_KEEP_MEMORY | os.environ | _ONE_THREAD | {"PYTHONPATH": paths},
                start_new_session=True,  # this process handles Ctrl-C
            )
        self._control = Connection(ours.detach())


def _stop(forkserver: _ForkServer, segments: SegmentPool, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it
        forkserver.close()
        segments.close()
