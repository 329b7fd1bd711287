"""Cells over processes: each has its record or says what went wrong, whoever dies."""

import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from threading import current_thread, main_thread
from typing import Any

import torch

from experiments.reproduce.outcome import ComputeOptions, run_cell
from experiments.reproduce.pause import Pause, PausedError
from experiments.reproduce.study import Cell
from offbeat.cli.options import option_name
from offbeat.errors import InputError, naming_settings

_TRIES = 2  # of a cell whose process dies
_GLANCE = 60.0  # seconds after which the clock is looked at again
_PATIENCE = 180.0  # seconds after the deadline for runs to pause, before they are ended
_PARTING = 30.0  # seconds for a process that is at nothing to end by itself, and leave nothing behind


@dataclass
class _Worker:
    """A process and what it is at."""

    process: SpawnProcess
    connection: Connection
    cell: Cell | None = None


def results(
    cells: Iterable[Cell], spot: ComputeOptions, processes: int, pause: Pause = Pause()
) -> Iterator[tuple[Cell, dict[str, Any] | str]]:
    """Each cell with its record, or with what went wrong, in the order they end.

    No cell begins after the deadline. Those under way then pause before their next server step.
    """
    waiting, tries = list(cells), dict[str, int]()
    workers: list[_Worker] = []
    last = pause.deadline + (0 if pause.folder is None else _PATIENCE)
    try:
        workers.extend(_start(spot, pause) for _ in range(min(processes, len(waiting))))
        while True:
            if time.monotonic() >= pause.deadline:
                waiting.clear()
            for worker in workers:
                if worker.cell is None and waiting:
                    worker.cell = waiting.pop(0)
                    worker.connection.send(worker.cell)
            busy = {worker.connection.fileno(): worker for worker in workers if worker.cell is not None}
            left = last - time.monotonic()
            if not busy or left <= 0:
                return
            ready = wait([worker.connection for worker in busy.values()], timeout=min(left, _GLANCE))
            for worker in [one for one in busy.values() if one.connection in ready]:
                cell, worker.cell = worker.cell, None
                assert cell is not None
                try:
                    answer = worker.connection.recv()
                except (EOFError, ConnectionError):
                    tries[cell.key] = tries.get(cell.key, 0) + 1
                    workers[workers.index(worker)] = _start(spot, pause)
                    if tries[cell.key] < _TRIES:
                        waiting.insert(0, cell)
                        continue
                    answer = f"its process died {_TRIES} times"
                if answer is not None:
                    yield cell, answer
                    pause.drop(cell.key)
    finally:
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            if worker.cell is None:
                worker.process.join(_PARTING)
            worker.process.kill()
            worker.process.join()


def serve(connection: Connection, spot: ComputeOptions, pause: Pause) -> None:
    """In a process of its own: run cells until none comes or nobody is left to send one.

    The answer is a record, a sentence on what went wrong, or None of a run that paused.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started this ends it
    torch.set_num_threads(1)
    while True:
        try:
            cell = connection.recv()
        except EOFError:
            return
        try:
            with naming_settings(option_name):  # the studies run from the command line
                record = run_cell(cell, spot, pause)
            connection.send(record)
        except PausedError:
            connection.send(None)
        except InputError as error:
            connection.send(str(error))
        except Exception:
            connection.send(traceback.format_exc())


def _start(spot: ComputeOptions, pause: Pause) -> _Worker:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, spot, pause), daemon=True)
    with _undisturbed():
        process.start()
    there.close()  # so that its end is noticed here
    return _Worker(process, here)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A Ctrl-C waits until this is over; processes that are started meanwhile never hear one."""
    ensure_running()  # its start would let signals through again
    heard: list[int] = []
    before = None
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # is handed down, handlers are not
    try:
        if current_thread() is main_thread():  # no other can set one, nor is one interrupted
            before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if heard:  # in a thread that does not block it
            signal.raise_signal(signal.SIGINT)
