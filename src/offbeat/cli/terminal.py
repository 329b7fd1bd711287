"""Tables and numbers on the terminal."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WRAPPED_WIDTH = 24  # of a column of text in a narrow terminal

if TYPE_CHECKING:  # loads PyTorch, which some commands do without
    from offbeat.aggregate.mean import PrivacyCost


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on standard output: names left, figures right, and text in the last column left."""
    shown = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    texts = [[format_number(value) for value in row] for row in rows]
    needed = 0
    for index, name in enumerate(columns):
        figures = index > 0 and all(_is_number(row[index]) for row in rows)
        wrapped = index > 0 and not figures and index == len(columns) - 1
        widest = max(map(cell_len, [name, *(row[index] for row in texts)]))
        needed += (min(widest, _WRAPPED_WIDTH) if wrapped else widest) + 2
        shown.add_column(name, justify="right" if figures else "left", no_wrap=not wrapped)
    for row in texts:
        shown.add_row(*map(escape, row))
    _print_titled(title, shown, needed)


def print_pairs(title: str, values: Mapping[str, Any]) -> None:
    """Names and values, one a line."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    for name, value in values.items():
        shown.add_row(name, escape(format_number(value)))
    _print_titled(title, shown, max(map(cell_len, values), default=0) + _WRAPPED_WIDTH)


def notify(sentence: str) -> None:
    """Print a sentence about a run on standard error."""
    print(f"offbeat: {sentence}", file=sys.stderr, flush=True)


def privacy_sentence(spent: "PrivacyCost") -> str:
    """The privacy cost so far, and the conditions under which it holds."""
    text = f"(epsilon, delta) = ({spent.epsilon:.4g}, {spent.delta:g})"
    if spent.unamplified is not None:
        text += (
            " against those who see the models, and "
            f"({spent.unamplified:.4g}, {spent.delta:g}) against those who also see which clients connect"
        )
    return f"{text}; {spent.terms}"


def _print_titled(title: str, shown: Table, needed: int) -> None:
    """Print a table, wider than the terminal where digits would be cut otherwise."""
    console = Console(file=sys.stdout)
    console.width = max(console.width, needed)
    console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
    console.print(shown)
    console.print()


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and value[-1:] == "%")


def format_number(value: Any) -> str:
    """Format a number for people."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def byte_unit(largest: float) -> tuple[float, str]:
    """The unit in which to give numbers of bytes up to this one: its size and its name."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if largest >= unit[0]), (1.0, "bytes"))


def bar(share: float, width: int) -> str:
    """A bar of blocks, or of number signs where standard output has no blocks."""
    block = "█"
    try:
        block.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        block = "#"
    return block * round(width * share)
