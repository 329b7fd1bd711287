"""What a person sees: a bar while it runs, short tables at the end."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from offbeat.aggregate.aggregation import Spent
from offbeat.running import Progress as Step


class Bar(NamedTuple):
    """Told of every server step, and before the first of clients done and clients in all."""

    step: Callable[[Step], None]
    start: Callable[[int, int], None]


@contextmanager
def bar(label: str, rounds: int, begun: int = 0) -> Iterator[Bar]:
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

        def on_step(step: Step) -> None:
            nonlocal metric
            if step.record:
                metric = f"  accuracy {step.record['accuracy']:.3f}"
            words = f"time {step.time:.1f}  staleness {step.staleness:.1f}{metric}"
            progress.update(task, completed=step.version, words=words)

        def on_start(done: int, clients: int) -> None:
            progress.update(task, words=f"starting: {done:,} of {clients:,} clients")

        yield Bar(on_step, on_start)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on standard output: names left, figures right, and text in the last column left."""
    shown = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        figures = place > 0 and all(_is_figure(row[place]) for row in rows)
        wrapped = place > 0 and not figures and place == len(columns) - 1
        shown.add_column(name, justify="right" if figures else "left", no_wrap=not wrapped)
    for row in rows:
        shown.add_row(*[figure(value) for value in row])
    _print(title, shown)


def pairs(title: str, values: Mapping[str, Any]) -> None:
    """Names and values, one a line."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    for name, value in values.items():
        shown.add_row(name, figure(value))
    _print(title, shown)


def privacy(spent: Spent) -> str:
    """What was told about any one client, and on which terms."""
    return f"(epsilon, delta) = ({spent.epsilon:.4g}, {spent.delta:g}); {spent.terms}"


def _print(title: str, shown: Table) -> None:
    console = Console(file=sys.stdout)
    console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
    console.print(shown)
    console.print()


def _is_figure(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def figure(value: Any) -> str:
    """A number as a person writes it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
