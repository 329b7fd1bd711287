"""The tables of README.md on training, from the records: printed, or with `--write` put into it."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
FILES = {
    "fashion-mnist": HERE / "records" / "fashion-mnist.jsonl",
    "shakespeare": HERE / "records" / "shakespeare.jsonl",
    "shakespeare-longer": HERE / "records" / "shakespeare-longer.jsonl",
    "digits": HERE / "quick.jsonl",
}
RUNS = 12  # in a group: FedBuff at four betas, MA and MA-light, two rates each
NEAR = 0.98  # of the baseline's best, for the second pair of columns

# Table 2 of arXiv 2402.09247: speed-up of MA and of MA-light, by rule and privacy; FLAIR, then StackOverflow.
CLAIMED = {
    ("fedavgm", False): ((3.56, 3.01), (3.96, 3.30)),
    ("fedadam", False): ((2.20, 1.66), (1.62, 1.30)),
    ("fedavgm", True): ((2.57, 2.09), (2.06, 1.80)),
    ("fedadam", True): ((1.61, 1.15), (1.50, 1.55)),
}
TITLES = {"fedavgm": "FedAvgM", "fedadam": "FedAdam"}


class Run(NamedTuple):
    """One cell and its curve."""

    method: str
    beta: float
    server_lr: float
    versions: Sequence[int]
    scores: Sequence[float]
    failure: str | None

    @property
    def best(self) -> float:
        """The highest point of the curve, even if it diverged later."""
        return max(self.scores, default=0.0)

    @property
    def end(self) -> float | None:
        """Nothing if it diverged."""
        return None if self.failure else self.scores[-1]

    def reaches(self, target: float) -> int | None:
        """The first version that is as good."""
        found = (
            version for version, score in zip(self.versions, self.scores, strict=True) if score >= target
        )
        return next(found, None)


class Group(NamedTuple):
    """The runs that are compared with each other."""

    data: str
    private: bool
    rule: str
    runs: tuple[Run, ...]

    @property
    def baseline(self) -> Run:
        """The run of FedBuff with the best metric; of equals the first to reach it."""
        return min(self.of("fedbuff"), key=lambda run: (-run.best, run.reaches(run.best) or 0))

    def of(self, method: str) -> list[Run]:
        """All rates and betas of a method."""
        return [run for run in self.runs if run.method == method]

    def first(self, method: str, target: float) -> int | None:
        """When the fastest of a method's runs is as good."""
        found = [version for run in self.of(method) if (version := run.reaches(target)) is not None]
        return min(found, default=None)


def groups(data: str, curve: str = "average") -> list[Group]:
    """Those of a data set that are complete; `curve` is of the averaged or the last model."""
    path = FILES[data]
    records: dict[tuple[bool, str], dict[str, Run]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        cell = one["cell"]
        run = Run(cell["method"], cell["beta"], cell["server_lr"], one["version"], one[curve], one["failure"])
        records.setdefault((cell["private"], cell["rule"]), {})[json.dumps(cell)] = run
    found = [Group(data, *key, tuple(runs.values())) for key, runs in records.items() if len(runs) == RUNS]
    return sorted(found, key=lambda group: (group.private, group.rule == "fedadam"))


def speedups(found: Iterable[Group]) -> str:
    """Steps to the best metric of the best baseline, and how many times fewer; beside what is claimed."""
    head = [
        "data, rule",
        "best FedBuff",
        "its best",
        "steps to it: FedBuff",
        "MA",
        "light",
        "speed-up MA / light",
        "claimed: FLAIR",
        "claimed: SO",
        f"steps to {NEAR:.0%} of it: FedBuff / MA / light",
    ]
    rows = []
    for group in found:
        base = group.baseline
        own = base.reaches(base.best)
        steps = [group.first(method, base.best) for method in ("ma", "ma-light")]
        near = [group.first(method, NEAR * base.best) for method in ("fedbuff", "ma", "ma-light")]
        claims = [" / ".join(f"{one:.2f}" for one in pair) for pair in CLAIMED[group.rule, group.private]]
        rows.append(
            [
                _title(group),
                f"beta {base.beta:g}, rate {base.server_lr:g}",
                f"{base.best:.4f}",
                _count(own),
                *map(_count, steps),
                " / ".join(_ratio(own, one) for one in steps),
                *claims,
                " / ".join(map(_count, near)),
            ]
        )
    return _table(head, rows)


def finals(found: Iterable[Group]) -> str:
    """The best and the last metric of each method's best run."""
    rows = []
    for group in found:
        cells = []
        for method in ("fedbuff", "ma", "ma-light"):
            run = max(group.of(method), key=lambda one: one.best)
            end = "diverged" if run.end is None else f"{run.end:.4f}"
            cells.append(f"{run.best:.4f} / {end}, rate {run.server_lr:g}")
        rows.append([_title(group), *cells])
    return _table(["data, rule", "FedBuff: best / last", "MA", "MA-light"], rows)


def betas(found: Iterable[Group]) -> str:
    """The best metric of FedBuff at each beta, over the rates; how many of its runs diverged."""
    rows, names = [], list[str]()
    for group in found:
        runs = group.of("fedbuff")
        tried = sorted({run.beta for run in runs})
        names = [f"{beta:g}" for beta in tried]
        best = [f"{max(run.best for run in runs if run.beta == beta):.4f}" for beta in tried]
        rows.append([_title(group), *best, str(sum(run.failure is not None for run in group.runs))])
    return _table(["data, rule", *(f"beta {name}" for name in names), "diverged, of all"], rows)


def tables() -> dict[str, str]:
    """Everything between markers, by the name of its marker."""
    made = {}
    for name, data in (
        ("full", ("fashion-mnist", "shakespeare", "shakespeare-longer")),
        ("quick", ("digits",)),
    ):
        found = [group for one in data for group in groups(one)]
        last = [group for one in data for group in groups(one, "last")]
        empty = "Not run yet."
        made[f"{name} speed-ups"] = speedups(found) if found else empty
        made[f"{name} finals"] = finals(found) if found else empty
        made[f"{name} betas"] = betas(found) if found else empty
        made[f"{name} last models"] = speedups(last) if last else empty
    made["control"] = control()
    return made


def control() -> str:
    """The best accuracy of each beta without delay, and what the approximations have of it under delay."""
    found: dict[str, dict[str, float]] = json.loads((HERE / "control.json").read_text())
    plain = {group.rule: group for group in groups("digits") if not group.private}
    rows = []
    for rule, best in found.items():
        runs = {method: max(run.best for run in plain[rule].of(method)) for method in ("ma", "ma-light")}
        naive = max(run.best for run in plain[rule].of("fedbuff") if run.beta == 0.9)
        numbers = [*best.values(), naive, *runs.values()]
        rows.append([TITLES[rule], *(f"{number:.4f}" for number in numbers)])
    head = ["rule", *(f"no delay, beta {beta}" for beta in next(iter(found.values())))]
    return _table([*head, "delay, naive 0.9", "delay, MA 0.9", "delay, MA-light 0.9"], rows)


def written(page: str, made: Mapping[str, str]) -> str:
    """The page with each table between its markers."""
    for name, text in made.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        if page.count(start) != 1:
            raise SystemExit(f"{PAGE.name} must have one marker for '{name}', not {page.count(start)}.")
        before, _, rest = page.partition(start)
        after = rest.partition(end)[2]
        page = f"{before}{start}\n{text}\n\n{end}{after}"
    return page


def _title(group: Group) -> str:
    return f"{group.data}{' + DP' if group.private else ''}, {TITLES[group.rule]}"


def _count(version: int | None) -> str:
    return "not reached" if version is None else str(version)


def _ratio(own: int | None, other: int | None) -> str:
    return f"{own / other:.2f}" if own and other else "–"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    lines: list[Any] = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the tables, or put them into the page."""
    parser = argparse.ArgumentParser(description="Make the tables of README.md from the records.")
    parser.add_argument("--write", action="store_true", help="put them between their markers in README.md")
    made = tables()
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(), made))
        return
    for name, text in made.items():
        print(f"{name}\n\n{text}\n")


if __name__ == "__main__":
    main()
