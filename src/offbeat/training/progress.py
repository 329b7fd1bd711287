"""What accompanies a run: a progress bar, signals that stop it, and the number of threads."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from offbeat.engines.simulation import Vectorised
from offbeat.training.build import RunSpec
from offbeat.training.experiment import Experiment
from offbeat.training.runner import Progress as Step


class ProgressBar(NamedTuple):
    """The callbacks of a progress bar: after each server step, and during the start."""

    step: Callable[[Step], None]
    start: Callable[[int, int], None]


@contextmanager
def bar(
    label: str, rounds: int, begun: int = 0, metric: str = "accuracy", *, shown: bool = True
) -> Iterator[ProgressBar]:
    """A progress bar on standard error, if that is a terminal; it shows the last value of a metric."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, disable=not (shown and console.is_terminal), expand=True
    ) as progress:
        task = progress.add_task(label, total=rounds, completed=begun, words="starting")
        score = ""

        def on_step(step: Step) -> None:
            nonlocal score
            if step.record and step.record.get(metric) is not None:
                score = f"  {metric} {step.record[metric]:.3f}"
            words = f"time {step.time:.1f}  staleness {step.staleness:.1f}{score}"
            progress.update(task, completed=step.version, words=words)

        def on_start(done: int, clients: int) -> None:
            progress.update(task, words=f"starting: {done:,} of {clients:,} clients")

        yield ProgressBar(on_step, on_start)


_STOPPING = b"\noffbeat: finishing and saving this step; interrupt again to stop at once.\n"


class StopRequest:
    """Whether to stop, and the signal that requested it."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def code(self) -> int:
        """The exit code that shells give a process ended by this signal."""
        return 128 + (self.signal or signal.SIGINT)


@contextmanager
def stop_signals(words: bytes = _STOPPING) -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a stop request, and the second into `KeyboardInterrupt`.

    Signals that are ignored stay ignored. `words` are printed to a terminal at the first signal.
    """
    stop = StopRequest()

    def request(number: int, frame: object) -> None:
        if stop():
            raise KeyboardInterrupt
        stop.signal = number
        if sys.stderr.isatty():
            os.write(2, words)

    main = threading.current_thread() is threading.main_thread()  # other threads receive no signals
    numbers = [
        n for n in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, request) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def limited_threads(experiment: Experiment, spec: RunSpec) -> Iterator[None]:
    """Use one thread while the clients of a small model are computed together, which is faster on a CPU."""
    before = torch.get_num_threads()
    if (
        experiment.engine == "auto"
        and isinstance(spec.engine, Vectorised)
        and spec.problem.device.type == "cpu"
    ):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
