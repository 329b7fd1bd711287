"""What the page on scale derives follows from what it states."""

import math
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
UNITS = {"us": 1e-6, "ns": 1e-9}  # formulas are in seconds


def rows() -> list[list[str]]:
    """The cells of all rows of all tables, headings left out."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "symbol" and not set(row[0]) <= {"-"}]


def inputs() -> dict[str, float]:
    """Symbols that are measured or assumed, in seconds where they are times."""
    tables = PAGE.read_text().partition("## The load")[0].count("\n| ") - 2  # less two headings
    given = rows()[:tables]
    return {row[0]: float(row[2]) * UNITS.get(row[3], 1) for row in given}


def results() -> list[tuple[str, str, float]]:
    """Symbol, formula and stated value, in the page's order."""
    return [(row[0], row[2], float(row[3])) for row in rows()[len(inputs()) :]]


def value(formula: str, known: dict[str, float]) -> float:
    """A formula as it is written there: a blank between two factors means times."""
    product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    return float(eval(product, {"ceil": math.ceil, "__builtins__": {}}, known))


def test_the_page_has_inputs_and_results() -> None:
    assert {"t_task", "n_sum", "N", "d", "peak"} <= set(inputs())
    assert {"r", "C", "B_up", "K_sched", "R_flight", "D_day"} <= {symbol for symbol, _, _ in results()}


@pytest.mark.parametrize("symbol", [symbol for symbol, _, _ in results()])
def test_every_result_follows_from_its_formula(symbol: str) -> None:
    known = inputs()
    for name, formula, stated in results():
        known[name] = value(formula, known)
        if name == symbol:
            assert stated == pytest.approx(known[name], rel=5e-3)


def test_the_text_repeats_what_the_tables_say() -> None:
    known = inputs()
    for name, formula, _ in results():
        known[name] = value(formula, known)
    text = " ".join(PAGE.read_text().split())
    assert f"takes {known['K_sched']:.0%} of its core".replace("%", " %") in text
    assert f"would carry {1 / known['K_sched']:.1f} times the load" in text
    assert f"authentication of {known['r']:,.0f} connections a second" in text
    assert f"to 10^5 for a staleness of {known['C'] / 1e5:.0f}" in text


def test_every_command_on_the_page_is_a_benchmark() -> None:
    for name in re.findall(r"`python (benchmarks/\w+\.py)", PAGE.read_text()):
        assert (PAGE.parent.parent / name).is_file()
