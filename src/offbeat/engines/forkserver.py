"""The life of a worker process: it does orders until there is nobody to give any.

A program that has everything imported and forks workers when asked, so that each is ready at once.

Torch computes no gradient in the fork of a process that has computed one, so the process that trains
cannot fork its workers itself. This one has done nothing but import.
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


def run_worker(line: int) -> None:
    """Serve the line with this handle; end with the process at the other end of standard input."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # nobody is there any more
        _serve(Channel(Connection(line)))


def _serve(link: Channel) -> None:
    shelf = SegmentPool()
    taken: dict[int, Segment] = {}  # results that may still be read
    sent: PlacedTree = link.hear()
    body = attempt(0, lambda: WorkerRuntime(link.read(sent), torch.device("cpu")))
    while True:
        order, memories, read = link.hear()
        for number in read:
            shelf.take_off(taken.pop(number))
        answer = _answer(link, body, order, memories)
        if isinstance(answer, WorkDone):
            segment, slots = shelf.put(answer.results)
            taken[segment.number] = segment
            link.show(segment)
            answer = replace(answer, results=PlacedTree(segment.number, slots))
        link.say(answer)


def _answer(
    link: Channel, body: WorkerRuntime | WorkFailed, order: WorkOrder, memories: PlacedTree
) -> WorkDone | WorkFailed:
    if isinstance(body, WorkFailed):
        return WorkFailed(order.number, body.error)

    def action() -> WorkDone:
        messages = [link.read(message) for message in order.messages]
        return body.do(order._replace(memories=link.read(memories)), messages)

    answer: WorkDone | WorkFailed = attempt(order.number, action)
    return answer


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


_EXIT_TIMEOUT = 2.0  # seconds that a worker has to end by itself


def main() -> None:
    """Serve the line whose handle is the last word of the command; all workers end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    control = Connection(int(sys.argv[-1]))
    workers: dict[int, int] = {}  # number -> process
    try:
        while True:
            asked, number = control.recv()
            match asked:
                case "start":
                    workers[number] = _fork(control)
                case "end":
                    control.send(_reap(workers.pop(number, None)))
                case "list":
                    control.send(dict(workers))
    except (EOFError, OSError):
        for process in workers.values():
            os.kill(process, signal.SIGKILL)
        os._exit(0)  # at once: there is nothing to tidy up


def _fork(control: Connection) -> int:
    line = reduction.recv_handle(control)
    process = os.fork()
    if process:
        os.close(line)
        return process
    try:
        control.close()
        run_worker(line)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _reap(process: int | None) -> str:
    """Make sure that a worker is gone, and tell how it went."""
    if process is None:
        return "with an earlier nursery"
    patience = time.monotonic() + _EXIT_TIMEOUT
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > patience:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(ended[1])
    return f"signal {-code}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    main()
