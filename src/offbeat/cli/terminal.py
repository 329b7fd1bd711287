"""The terminal and the process: progress bars, tables, signals that ask to stop, and threads."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from offbeat.training.experiment import Experiment

if TYPE_CHECKING:  # these load PyTorch, which some commands do without
    from offbeat.aggregate.mean import PrivacyCost
    from offbeat.training.build import RunSpec
    from offbeat.training.runner import Progress as Step


class ProgressBar(NamedTuple):
    """Told of every server step, and before the first of clients done and clients in all."""

    step: "Callable[[Step], None]"
    start: Callable[[int, int], None]


@contextmanager
def bar(label: str, rounds: int, begun: int = 0) -> Iterator[ProgressBar]:
    """A progress bar on the terminal's error stream; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, expand=True) as progress:
        task = progress.add_task(label, total=rounds, completed=begun, words="starting")
        metric = ""

        def on_step(step: "Step") -> None:
            nonlocal metric
            if step.record:
                metric = f"  accuracy {step.record['accuracy']:.3f}"
            words = f"time {step.time:.1f}  staleness {step.staleness:.1f}{metric}"
            progress.update(task, completed=step.version, words=words)

        def on_start(done: int, clients: int) -> None:
            progress.update(task, words=f"starting: {done:,} of {clients:,} clients")

        yield ProgressBar(on_step, on_start)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on standard output: names left, figures right, and text in the last column left."""
    shown = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        figures = place > 0 and all(_is_number(row[place]) for row in rows)
        wrapped = place > 0 and not figures and place == len(columns) - 1
        shown.add_column(name, justify="right" if figures else "left", no_wrap=not wrapped)
    for row in rows:
        shown.add_row(*[format_number(value) for value in row])
    _print_titled(title, shown)


def print_pairs(title: str, values: Mapping[str, Any]) -> None:
    """Names and values, one a line."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    for name, value in values.items():
        shown.add_row(name, format_number(value))
    _print_titled(title, shown)


def privacy_sentence(spent: "PrivacyCost") -> str:
    """What was told about any one client, and on which terms."""
    return f"(epsilon, delta) = ({spent.epsilon:.4g}, {spent.delta:g}); {spent.terms}"


def _print_titled(title: str, shown: Table) -> None:
    console = Console(file=sys.stdout)
    console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
    console.print(shown)
    console.print()


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def format_number(value: Any) -> str:
    """A number as a person writes it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


_STOPPING = b"\noffbeat: this step is finished and saved first; the same again stops at once.\n"


class StopRequest:
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
def stop_signals(words: bytes = _STOPPING) -> Iterator[StopRequest]:
    """Ctrl-C once: finish the step, save, stop; twice: KeyboardInterrupt. What was ignored stays ignored."""
    stop = StopRequest()

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


def limit_threads(experiment: Experiment, trial: "RunSpec") -> None:
    """Use one thread if a small model is trained for many clients at once: more would wait for each other."""
    import torch

    from offbeat.engines.simulation import Vectorised

    if (
        experiment.engine == "auto"
        and isinstance(trial.engine, Vectorised)
        and trial.problem.device.type == "cpu"
    ):
        torch.set_num_threads(1)
