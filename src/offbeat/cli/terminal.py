"""Tables and numbers on the terminal."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:  # loads PyTorch, which some commands do without
    from offbeat.aggregate.mean import PrivacyCost


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on standard output: names left, figures right, and text in the last column left."""
    shown = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        figures = index > 0 and all(_is_number(row[index]) for row in rows)
        wrapped = index > 0 and not figures and index == len(columns) - 1
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
    """The privacy cost so far, and the conditions under which it holds."""
    text = f"(epsilon, delta) = ({spent.epsilon:.4g}, {spent.delta:g})"
    if spent.unamplified is not None:
        text += (
            " against those who see the models, and "
            f"({spent.unamplified:.4g}, {spent.delta:g}) against those who also see which clients connect"
        )
    return f"{text}; {spent.terms}"


def _print_titled(title: str, shown: Table) -> None:
    console = Console(file=sys.stdout)
    console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
    console.print(shown)
    console.print()


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def format_number(value: Any) -> str:
    """Format a number for people."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
