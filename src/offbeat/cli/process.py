"""What belongs to the whole process: signals that ask it to stop, and how many threads it computes with."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offbeat.engines.simulated import Vectorised
from offbeat.experiment import Experiment
from offbeat.trial import Trial

_WAIT = b"\noffbeat: this step is finished and saved first; the same again stops at once.\n"


class Stop:
    """Whether to stop, and the signal that said so."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def code(self) -> int:
        """The exit code that shells give a process ended by this signal."""
        return 128 + (self.signal or signal.SIGINT)


@contextmanager
def stop_signals(words: bytes = _WAIT) -> Iterator[Stop]:
    """Ctrl-C once: finish the step, save, stop; twice: KeyboardInterrupt. What was ignored stays ignored."""
    stop = Stop()

    def ask(number: int, frame: object) -> None:
        if stop():
            raise KeyboardInterrupt
        stop.signal = number
        if sys.stderr.isatty():
            os.write(2, words)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def settle_threads(experiment: Experiment, trial: Trial) -> None:
    """One thread where a small model is why clients are computed together: more would wait for each other."""
    if (
        experiment.engine == "auto"
        and isinstance(trial.engine, Vectorised)
        and trial.problem.device.type == "cpu"
    ):
        torch.set_num_threads(1)
