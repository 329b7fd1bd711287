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
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import Connection

import torch

from offbeat.engines.shared_memory import Channel, PlacedTree, Segment, SegmentPool
from offbeat.engines.worker_pool import WorkDone, WorkFailed, WorkOrder
from offbeat.engines.worker_runtime import WorkerRuntime, attempt

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
    segments = SegmentPool()
    in_use: dict[int, Segment] = {}  # results that may still be read
    packed: PlacedTree = channel.receive()
    runtime = attempt(0, lambda: WorkerRuntime(channel.read(packed), torch.device("cpu")))
    while True:
        order, memories, released = channel.receive()
        for number in released:
            segments.release(in_use.pop(number))
        answer = _answer(channel, runtime, order, memories)
        if isinstance(answer, WorkDone):
            segment, slots = segments.put(answer.results)
            in_use[segment.number] = segment
            channel.share(segment)
            answer = replace(answer, results=PlacedTree(segment.number, slots))
        channel.send(answer)


def _answer(
    channel: Channel, runtime: WorkerRuntime | WorkFailed, order: WorkOrder, memories: PlacedTree
) -> WorkDone | WorkFailed:
    if isinstance(runtime, WorkFailed):
        return WorkFailed(order.number, runtime.error)

    def action() -> WorkDone:
        messages = [channel.read(message) for message in order.messages]
        return runtime.run(order._replace(memories=channel.read(memories)), messages)

    answer: WorkDone | WorkFailed = attempt(order.number, action)
    return answer


if __name__ == "__main__":
    main()
