"""Momentum approximation (Yu et al. 2024, arXiv 2402.09247): Table 1, the gap to synchronous rounds by C."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import NamedTuple

from experiments.reproduce.measures import PAIRED, LastRounds, paired
from experiments.reproduce.records import Curve
from experiments.reproduce.study import Cell, Study, Table, Version
from experiments.reproduce.tables import entries_of
from experiments.studies.momentum import BETA, LIMIT, RULES
from offbeat.training.experiment import Experiment

# Table 1: by rule and C, 100 (accuracy without delay - accuracy with it) / accuracy without, MA and MA-light.
CLAIMED = {
    ("fedavgm", 50): (5.17, 7.68),
    ("fedavgm", 100): (3.17, 4.25),
    ("fedavgm", 200): (2.18, 3.44),
    ("fedavgm", 400): (1.39, 2.80),
    ("fedadam", 50): (7.26, 11.94),
    ("fedadam", 100): (2.47, 4.51),
    ("fedadam", 200): (0.52, 1.87),
    ("fedadam", 400): (0.46, 0.40),
}
COHORTS = (50, 100, 200, 400)
SYNCHRONOUS, METHODS = "no delay", ("ma", "ma-light")
SEEDS = (0, 1, 2)  # the first has all rates, and the others its best
CLIENTS, EXAMPLES = 12_000, 5  # of Fashion-MNIST's 60,000 examples each
STARTED = 1.2  # tasks started from each version, per task that a step takes
# Of STARTED C tasks per version with half-normal delays, those of so many versions are at work: a step takes
# those of 20 versions at most, 1 / 1.2 of the law lies below 1.38, and its mean is 0.80.
_AT_WORK = 11.6
_RATES = {"fedavgm": (0.3, 1.0), "fedadam": (0.01, 0.03, 0.1)}  # the paper's ranges, for every method alike


class Gap(NamedTuple):
    """One row of the table: accuracies in per cent at the best rates, -inf where every run diverged.

    The rates are the best of the first seed; accuracies are means over the seeds that have them.
    """

    rule: str
    cohort: int
    accuracies: Mapping[str, float]
    rates: Mapping[str, float]
    seeds: tuple[Mapping[str, float], ...] = ()  # accuracies of each seed

    def relative(self, method: str) -> float:
        """How far a method under delay is below synchronous rounds, in per cent of the latter."""
        if not math.isfinite(self.accuracies[SYNCHRONOUS]):
            return math.nan
        return 100 * (1 - self.accuracies[method] / self.accuracies[SYNCHRONOUS])

    def nearer(self) -> str:
        """How much more accurate MA is than MA-light, by a paired test where there are three seeds."""
        full, light = METHODS
        ahead = [each[full] - each[light] for each in self.seeds]
        whole = len(ahead) == PAIRED and all(map(math.isfinite, ahead))
        return paired(ahead, lambda value: f"{value:.2f}") if whole else ""


def rate_to_idle(cohort: int) -> int:
    """The tasks per version to ask for, so that 1.2 C start though only idle clients are drawn."""
    started = STARTED * cohort
    idle = CLIENTS - _AT_WORK * started
    return round(started * CLIENTS / idle)


def cells_of(model: str | None, pooled: int) -> tuple[Cell, ...]:
    """Of each rule and C synchronous rounds with momentum, and both approximations, at the same rates."""
    return tuple(
        Cell(_title(rule, cohort), method, _experiment(rule, cohort, method, rate, model), pooled=pooled)
        for rule in RULES
        for cohort in COHORTS
        for method in (SYNCHRONOUS, *METHODS)
        for rate in _RATES[rule]
    )


def _experiment(rule: str, cohort: int, method: str, rate: float, model: str | None) -> Experiment:
    delayed = method != SYNCHRONOUS
    parameters: dict[str, float | bool] = {"local_lr": 0.3, "server_lr": rate}
    if rule == "fedadam":
        parameters["eps"] = 0.01
    if delayed:
        parameters |= {"beta": BETA, "span": LIMIT + 1}
    elif rule == "fedadam":
        parameters["beta1"] = BETA
    else:
        parameters |= {"beta": BETA, "averaged": True}
    return Experiment.of(
        algorithm=f"{method}-{rule}" if delayed else rule,
        parameters=tuple(parameters.items()),
        data="fashion-mnist",
        clients=CLIENTS,
        partition="dirichlet:0.5",
        dispatch="poisson" if delayed else "synchronous",
        buffer=cohort,
        concurrency=rate_to_idle(cohort) if delayed else cohort,
        delays="half-normal:1",
        weights="polynomial:0.5" if delayed else "constant",
        max_staleness=LIMIT if delayed else None,
        local_steps=1,
        batch_size=EXAMPLES,
        rounds=2000,
        ema_decay=0.99,
        eval_every=50,
        **({} if model is None else {"model": model}),
    )


def repeated(cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> tuple[Cell, ...]:
    """The best run of each place with the other seeds, of rows all of whose runs are recorded."""
    return tuple(
        replace(cell, experiment=replace(cell.experiment, seed=seed))
        for place in CLAIMED
        for cell in _chosen(cells, found, _title(*place)).values()
        for seed in SEEDS[1:]
    )


def _chosen(cells: tuple[Cell, ...], found: Mapping[str, Curve], row: str) -> dict[str, Cell]:
    """By method the run of the first seed with the best rate; none before all are recorded."""
    own = [cell for cell in cells if cell.row == row and cell.experiment.seed == SEEDS[0]]
    if not own or any(cell.key not in found for cell in own):
        return {}
    entries = entries_of(own, found, LastRounds())
    return {cell.column: cell for cell in own if cell.rates == entries[row, cell.column].rates}


def gaps(cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> tuple[Gap, ...]:
    """The rows of which all runs of the first seed are recorded."""
    made, measure = [], LastRounds()
    for rule, cohort in CLAIMED:
        chosen = _chosen(cells, found, _title(rule, cohort))
        if not chosen:
            continue
        rates = {method: float(dict(c.experiment.parameters)["server_lr"]) for method, c in chosen.items()}
        seeds = []
        for seed in SEEDS:
            same = {m: replace(c, experiment=replace(c.experiment, seed=seed)) for m, c in chosen.items()}
            if all(cell.key in found for cell in same.values()):
                seeds.append({method: measure([found[cell.key]]).merit for method, cell in same.items()})
        accuracies = {method: mean(each[method] for each in seeds) for method in chosen}
        made.append(Gap(rule, cohort, accuracies, rates, tuple(seeds)))
    return tuple(made)


def gap_table(cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> Table:
    """Accuracies and relative gaps beside the paper's, and whether the gaps shrink as C grows."""
    known = {(gap.rule, gap.cohort): gap for gap in gaps(cells, found)}
    lines = []
    for place, told in CLAIMED.items():
        row = _title(*place)
        own = {cell.key for cell in cells if cell.row == row}
        done = len(own & found.keys())
        texts, nearer = ["", "", "", ""], ""
        if place in known:
            gap = known[place]
            texts = [_accuracy(gap, method) for method in (SYNCHRONOUS, *METHODS)]
            texts.append(" / ".join(_signed(gap.relative(method)) for method in METHODS))
            nearer = gap.nearer()
        runs = str(done) if done == len(own) else f"{done} of {len(own)}"
        lines.append((row, *texts, " / ".join(f"{each:.2f}" for each in told), nearer, runs))
    head = (
        "rule, C",
        "no delay",
        "MA",
        "MA-light",
        "gap of MA / light, %",
        "claimed",
        "MA minus light",
        "runs",
    )
    return Table(head, tuple(lines), tuple(_trends(known)))


def _trends(known: Mapping[tuple[str, int], Gap]) -> list[str]:
    """From the smallest to the largest C, of rules all of whose rows are known."""
    notes = []
    for rule in RULES:
        if any((rule, cohort) not in known for cohort in COHORTS):
            continue
        for place, method in enumerate(METHODS):
            first, last = (known[rule, cohort].relative(method) for cohort in (COHORTS[0], COHORTS[-1]))
            told = (CLAIMED[rule, cohort][place] for cohort in (COHORTS[0], COHORTS[-1]))
            claimed = " to ".join(f"{each:.2f}" for each in told)
            word = "shrinks" if last < first else "does not shrink"
            notes.append(
                f"{rule}, {method}: from C = {COHORTS[0]} to {COHORTS[-1]} the gap {word}, {_signed(first)} "
                f"to {_signed(last)} % (claimed {claimed})."
            )
    return notes


def _accuracy(gap: Gap, method: str) -> str:
    value = gap.accuracies[method]
    return f"{value:.2f} (rate {gap.rates[method]:g})" if math.isfinite(value) else "diverged"


def _signed(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "diverged"


def _title(rule: str, cohort: int) -> str:
    return f"{rule}, C = {cohort}"


_FULL, _QUICK = cells_of(None, 1), cells_of("mlp", 4)
TABLE1 = Study(
    "momentum-table1",
    "momentum",
    "arXiv 2402.09247, Table 1",
    "accuracy below synchronous rounds, in per cent of theirs: it shrinks as C grows from 50 to 400",
    Version(_FULL, gap_table, 9000, partial(repeated, _FULL)),
    Version(_QUICK, gap_table, 28_000, partial(repeated, _QUICK)),
    "Not told: the delays' scale, the tasks started from each version (here 1.2 C), the exponent of "
    "staleness (here 0.5), the solver and when accuracy is read (here the mean of the last five versions). "
    "StackOverflow is not at hand: Fashion-MNIST, 12,000 clients with five examples each, which are one "
    "local step. Busy clients are not drawn.",
)
