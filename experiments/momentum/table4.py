"""Table 4 of arXiv 2402.09247, by schedules alone: how far momentum is from momentum without delay.

Prints the paper's figures beside those that `table4.json` holds, and what window and ridge do to them;
`--measure` simulates them anew (some minutes) and `--write` puts the tables into README.md.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.reproduce.page import fill_sections, markdown_table
from torch import Tensor

from offbeat.algorithms.momentum_approximation import Ridge, Solver, Truncated, relative_errors
from offbeat.schedule.availability import Dropout
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import Poisson
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.statistics import iterate_buffers

HERE = Path(__file__).parent
PAGE, RECORDS = HERE / "README.md", HERE / "table4.json"

# In per cent, MA and MA-light.
PAPER = {"half-normal": (2.58, 33.07), "uniform": (8.35, 36.78), "exponential": (2.41, 33.89)}
LAWS = {"half-normal": "half-normal:1", "uniform": "uniform:0:1", "exponential": "exponential:1"}
STARTED = (1.2, 2.0, 4.0)  # tasks started from each version, per task that a step takes
BROAD = ("half-normal:1", 8.0, 300)  # a schedule to try windows and ridges on: law, tasks started, rounds
WINDOWS, PENALTIES = (80, 160, 300), (1e-3, 1e-4, 1e-5, 1e-6)
SWEPT, WHOLE = 2.0, 300  # tasks started and rounds, all of them in the window, for the solvers compared
SOLVERS: dict[str, Solver] = {f"ridge {penalty:g}": Ridge(penalty) for penalty in (1e-2, *PENALTIES)} | {
    "least squares": Truncated(1e-15)
}
BETA, COHORT, LIMIT, ROUNDS, CLIENTS, SEED = 0.9, 200, 20, 2000, 1_000_000, 0


def staleness(law: str, started: float, rounds: int, clients: int = CLIENTS) -> list[tuple[int, ...]]:
    """That of each server step's updates, clients being sampled from each version by Poisson."""
    dispatch = Poisson(started * COHORT / clients)
    source = dispatch.source(SEED)
    clock = Clock(parse_delay(law).bind(source, clients), source, Dropout())
    flow = Scheduler(clock, dispatch, source, clients, COHORT, LIMIT)
    return [step.staleness for step in iterate_buffers(flow, rounds)]


def measure(rounds: int = ROUNDS) -> dict[str, dict[str, dict[str, float]]]:
    """Relative errors, by law and by tasks started."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for law, text in LAWS.items():
        for started in STARTED:
            ages = staleness(text, started, rounds)
            errors = relative_errors(ages, BETA, LIMIT + 1)._asdict()
            mean = sum(map(sum, ages)) / (COHORT * rounds)
            found.setdefault(law, {})[f"{started:g}"] = {"staleness": mean} | errors
    return found


def measure_windows() -> dict[str, dict[str, float]]:
    """The relative error of MA, by window and by penalty."""
    ages = staleness(*BROAD)
    return {
        f"{window}": {
            f"{penalty:g}": relative_errors(ages, BETA, LIMIT + 1, window, Ridge(penalty)).approximation
            for penalty in PENALTIES
        }
        for window in WINDOWS
    }


class _Watched:
    """A solver, and the largest weight that it has given."""

    def __init__(self, solver: Solver) -> None:
        self.solver, self.largest = solver, 0.0

    def __call__(self, rows: Tensor, target: Tensor) -> Tensor:
        found = self.solver(rows, target)
        self.largest = max(self.largest, float(found.abs().max()))
        return found


def measure_solvers(rounds: int = WHOLE, clients: int = CLIENTS) -> dict[str, dict[str, dict[str, float]]]:
    """MA's relative error and its largest weight, by law and by solver, over the whole history."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for law, text in LAWS.items():
        ages = staleness(text, SWEPT, rounds, clients)
        for name, solver in SOLVERS.items():
            watched = _Watched(solver)
            error = relative_errors(ages, BETA, LIMIT + 1, rounds, watched).approximation
            found.setdefault(law, {})[name] = {"error": error, "largest": watched.largest}
    return found


def tables(records: Mapping[str, Any]) -> dict[str, str]:
    """Everything between markers, by the name of its marker."""
    return {
        "table 4": table(records["laws"]),
        "windows": windows(records["windows"]),
        "solvers": solvers(records["solvers"]),
    }


def table(records: Mapping[str, Any]) -> str:
    """The paper's figures and this project's, in per cent: MA / MA-light, and naive momentum."""
    head = ["delays", "paper", *(f"K = {started:g} C" for started in STARTED)]
    rows = [
        [law, f"{full:.2f} / {light:.2f}", *(_cell(records[law][f"{started:g}"]) for started in STARTED)]
        for law, (full, light) in PAPER.items()
    ]
    return markdown_table(head, rows)


def windows(records: Mapping[str, Any]) -> str:
    """MA's error in per cent."""
    head = ["window", *(f"ridge {penalty:g}" for penalty in PENALTIES)]
    return markdown_table(
        head, [[name, *(f"{100 * one:.2f}" for one in row.values())] for name, row in records.items()]
    )


def solvers(records: Mapping[str, Any]) -> str:
    """MA's error in per cent and its largest weight, beside the paper's error."""
    rows = [
        [
            law,
            f"{PAPER[law][0]:.2f}",
            *(f"{100 * one['error']:.2f} ({one['largest']:.3g})" for one in row.values()),
        ]
        for law, row in records.items()
    ]
    return markdown_table(["delays", "paper", *SOLVERS], rows)


def _cell(one: dict[str, float]) -> str:
    full, light, naive = (f"{100 * one[name]:.2f}" for name in ("approximation", "light", "naive"))
    return f"{full} / {light}, naive {naive}"


def main() -> None:
    """Print the tables; measure them first, or put them into the page, if asked to."""
    parser = argparse.ArgumentParser(description="Make table 4 of arXiv 2402.09247 from schedules alone.")
    parser.add_argument("--measure", action="store_true", help="simulate anew, into table4.json")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    given = parser.parse_args()
    if given.measure:
        found = {"laws": measure(), "windows": measure_windows(), "solvers": measure_solvers()}
        RECORDS.write_text(json.dumps(found, indent=1) + "\n")
    made = tables(json.loads(RECORDS.read_text()))
    if given.write:
        PAGE.write_text(fill_sections(PAGE.read_text(), made))
    print(f"|AW - M|^2 / |M|^2 in %, MA / MA-light; beta {BETA}, C = {COHORT}, T = {ROUNDS:,}\n")
    print("\n\n".join(made.values()))


if __name__ == "__main__":
    main()
