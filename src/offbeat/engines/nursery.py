"""A program that has everything imported and forks workers when asked, so that each is ready at once.

Torch computes no gradient in the fork of a process that has computed one, so the process that trains
cannot fork its workers itself. This one has done nothing but import.
"""

import os
import signal
import sys
import time
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection

import torch

from offbeat.engines.worker import live

_GRACE = 2.0  # seconds that a worker has to end by itself


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
                    control.send(_end(workers.pop(number, None)))
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
        live(line)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _end(process: int | None) -> str:
    """Make sure that a worker is gone, and tell how it went."""
    if process is None:
        return "with an earlier nursery"
    patience = time.monotonic() + _GRACE
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > patience:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(ended[1])
    return f"signal {-code}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    main()
