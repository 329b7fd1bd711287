"""A program that has everything imported and forks worker processes on request, so that each starts at once.

Torch computes no gradient in the fork of a process that has computed one, so the process that trains
cannot fork its workers itself; this one has only imported modules.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection

import torch

from offbeat import trees
from offbeat.engines.shared_memory import Channel, PlacedTree, ResultShape, row_slots
from offbeat.engines.worker_pool import WorkDone, WorkerRuntime, WorkFailed, WorkOrder, attempt
from offbeat.trees import Tree

_EXIT_TIMEOUT = 2.0  # seconds that a worker has to end by itself


def main() -> None:
    """Serve the connection whose file descriptor is the last argument; all workers end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    control = Connection(int(sys.argv[-1]))
    workers: dict[int, int] = {}  # number -> process id
    try:
        while True:
            request, number = control.recv()
            match request:
                case "start":
                    workers[number] = _fork(control)
                case "end":
                    control.send(_reap(workers.pop(number, None)))
                case "list":
                    control.send(dict(workers))
    except (EOFError, OSError):
        for process in workers.values():
            os.kill(process, signal.SIGKILL)
        os._exit(0)  # at once: there is nothing to clean up


def _fork(control: Connection) -> int:
    descriptor = reduction.recv_handle(control)
    process = os.fork()
    if process:
        os.close(descriptor)
        return process
    try:
        control.close()
        _run_worker(descriptor)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _reap(process: int | None) -> str:
    """Make sure that a worker has ended, and say how."""
    if process is None:
        return "with an earlier fork server"
    deadline = time.monotonic() + _EXIT_TIMEOUT
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(ended[1])
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _run_worker(descriptor: int) -> None:
    """Serve this connection; end with the process at the other end of standard input."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the other end is gone
        _serve(Channel(Connection(descriptor)))


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _serve(channel: Channel) -> None:
    packed: PlacedTree = channel.receive()
    runtime = attempt(0, lambda: WorkerRuntime(channel.read(packed), torch.device("cpu")))
    while True:
        channel.send(_answer(channel, runtime, *channel.receive()))


def _answer(
    channel: Channel,
    runtime: WorkerRuntime | WorkFailed,
    order: WorkOrder,
    memories: PlacedTree,
    rows: PlacedTree | None,
) -> WorkDone | WorkFailed:
    if isinstance(runtime, WorkFailed):
        return WorkFailed(order.number, runtime.error)

    def action() -> WorkDone:
        messages = [channel.read(message) for message in order.messages]
        results = _ResultRows(channel, rows)
        return runtime.run_into(order._replace(memories=channel.read(memories)), messages, results.write)

    answer: WorkDone | WorkFailed = attempt(order.number, action)
    return answer


class _ResultRows:
    """Where the results of an order are written; asked for where they have another shape than expected."""

    def __init__(self, channel: Channel, rows: PlacedTree | None) -> None:
        self._channel = channel
        self._views: Tree = () if rows is None else channel.read(rows)

    def write(self, first: int, results: Tree) -> None:
        """Copy results that are stacked over tasks to the rows from `first` on."""
        shape = row_slots(results)
        if not _equal(shape, row_slots(self._views)):
            if first:
                raise RuntimeError("the results of two tasks differ in shape.")
            self._channel.send(ResultShape(shape))
            self._views = self._channel.read(self._channel.receive())
        for leaf, view in zip(trees.leaves(results), trees.leaves(self._views), strict=True):
            view[first : first + len(leaf)].copy_(leaf)


def _equal(one: Tree, other: Tree) -> bool:
    return trees.structure(one) == trees.structure(other) and trees.leaves(one) == trees.leaves(other)


if __name__ == "__main__":
    main()
