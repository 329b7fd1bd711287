"""What README.md shows of training beyond `python -m experiments`: printed, or with `--write` put into it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.reproduce.page import markdown, table_command
from experiments.reproduce.records import Curve, present_key, recorded
from experiments.reproduce.study import Cell, Table, Version
from experiments.studies.momentum import (
    BETA,
    BETAS,
    METHODS,
    SCALE,
    TABLE2,
    beta_of,
    evenly,
    rate_of,
    speed_ups,
)

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
VERSIONS = {"full": TABLE2.full, "quick": TABLE2.quick}


@dataclass(frozen=True)
class Run:
    """One cell and its curve."""

    cell: Cell
    curve: Curve

    @property
    def method(self) -> str:
        """One of three."""
        return self.cell.column

    @property
    def beta(self) -> float:
        """Its momentum."""
        return beta_of(self.cell)

    @property
    def rate(self) -> float:
        """The server's."""
        return rate_of(self.cell)

    @property
    def best(self) -> float:
        """The highest point of the curve, even if it diverged later."""
        return self.curve.best


def path_of(name: str) -> Path:
    """The records of the study in full, or of its quick version."""
    return HERE / "records" / f"{name}.jsonl"


def groups(version: Version, found: Mapping[str, Curve]) -> dict[str, tuple[Run, ...]]:
    """The runs that are compared with each other, of groups that are complete."""
    made: dict[str, list[Cell]] = {}
    for cell in version.cells:
        made.setdefault(cell.row, []).append(cell)
    return {
        row: tuple(Run(cell, evenly(cell, found[cell.key])) for cell in cells)
        for row, cells in made.items()
        if all(cell.key in found for cell in cells)
    }


def last_models(path: Path) -> dict[str, Curve]:
    """The records of a file, with the accuracy of the last model in place of the averaged one's."""
    lines = map(json.loads, path.read_text().splitlines())
    last = {present_key(one["key"]): tuple(one["last"]) for one in lines}
    return {key: curve._replace(accuracies=last[key]) for key, curve in recorded(path).items()}


def finals(found: Mapping[str, tuple[Run, ...]]) -> Table:
    """The best and the last metric of each method's best run."""
    rows = []
    for row, runs in found.items():
        texts = []
        for method in METHODS:
            run = max((one for one in runs if one.method == method), key=lambda one: one.best)
            end = "diverged" if run.curve.failure else f"{run.curve.accuracies[-1]:.4f}"
            texts.append(f"{run.best:.4f} / {end}, rate {run.rate:g}")
        rows.append((row, *texts))
    return Table(("data, rule", "FedBuff: best / last", "MA", "MA-light"), tuple(rows))


def betas(found: Mapping[str, tuple[Run, ...]]) -> Table:
    """The best metric of FedBuff at each beta, over the rates; how many of a group's runs diverged."""
    rows = []
    for row, runs in found.items():
        best = (f"{best_of(runs, 'fedbuff', beta):.4f}" for beta in BETAS)
        rows.append((row, *best, str(sum(run.curve.failure is not None for run in runs))))
    return Table(("data, rule", *(f"beta {beta:g}" for beta in BETAS), "diverged, of all"), tuple(rows))


def by_rate(found: Mapping[str, tuple[Run, ...]]) -> Table:
    """The best metric of FedBuff without momentum and of MA at each rate."""
    rates = sorted({run.rate for runs in found.values() for run in runs})
    rows = []
    for row, runs in found.items():
        for name, method, beta in (("FedBuff", "fedbuff", 0.0), ("MA", "ma", BETA)):
            best = {run.rate: run.best for run in runs if (run.method, run.beta) == (method, beta)}
            rows.append((row, name, *(f"{best[rate]:.4f}" if rate in best else "" for rate in rates)))
    return Table(("data, rule", "", *(f"rate {rate:g}" for rate in rates)), tuple(rows))


def control(delayed: Mapping[str, tuple[Run, ...]]) -> Table:
    """The best accuracy of each beta without delay, and what the approximations have of it under delay."""
    found: dict[str, dict[str, float]] = json.loads((HERE / "control.json").read_text())
    rows = []
    for rule, best in found.items():
        runs = delayed[f"digits, {rule}"]
        numbers = [*best.values(), *(best_of(runs, method, BETA) for method in METHODS)]
        rows.append((rule, *(f"{number:.4f}" for number in numbers)))
    head = ["rule", *(f"no delay, beta {beta}" for beta in next(iter(found.values())))]
    return Table((*head, "delay, naive 0.9", "delay, MA 0.9", "delay, MA-light 0.9"), tuple(rows))


def best_of(runs: Iterable[Run], method: str, beta: float) -> float:
    """Over the rates."""
    return max(run.best for run in runs if (run.method, run.beta) == (method, beta))


def tables() -> dict[str, str]:
    """Everything between markers, by the name of its marker."""
    made = {}
    for name, version in VERSIONS.items():
        found = groups(version, recorded(path_of(name)))
        made[f"{name} finals"] = finals(found)
        made[f"{name} betas"] = betas(found)
        made[f"{name} last models"] = speed_ups(version.cells, last_models(path_of(name)))
    made["rates"] = by_rate(groups(SCALE.quick, recorded(path_of("quick"))))
    made["control"] = control(groups(TABLE2.quick, recorded(path_of("quick"))))
    return {name: markdown(table) for name, table in made.items()}


if __name__ == "__main__":
    table_command(PAGE, tables)
