"""What the bench's records come to: an outcome for each system, and the figures that were aimed at."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import mean
from typing import Any, NamedTuple

from experiments.reproduce.tuning_cost import Cost, expected_best
from experiments.tuning_free.bench import competes, score, wider, within
from experiments.tuning_free.runs import DEFAULT, named
from experiments.tuning_free.systems import FORM, GRIDS, OURS, PRINTED, SEEDS, SYSTEMS, TASKS, cells, whole

from offbeat.data.shakespeare import ALPHABET

FIRST = SEEDS[0]  # the seed of the grids
CLASSES = dict.fromkeys(TASKS, 10) | {"Shakespeare by role, transformer": len(ALPHABET)}

Record = dict[str, Any]
System = dict[str, Any]


class Rival(NamedTuple):
    """One setting of a competitor."""

    method: str
    words: dict[str, Any]
    scores: dict[int, float]  # by seed, best of last model and averages
    failed: bool = False  # on some seed


class Outcome(NamedTuple):
    """What one system's runs gave; accuracies are fractions."""

    system: System
    ours: dict[int, float]  # by seed, last model
    diverged: int  # of ours
    former: bool  # ours are of an earlier form
    rivals: tuple[Rival, ...]  # every setting that was tried
    printed: float | None  # AdaMasFL, last model
    missing: dict[str, int]  # runs by method; wider: beyond grids; finals: on other seeds

    @property
    def finalists(self) -> tuple[Rival, ...]:
        """Each competitor's setting that is highest on the grids' seed, of those that diverged on none."""
        best: dict[str, Rival] = {}
        for rival in self.rivals:
            if FIRST in rival.scores and not rival.failed:
                before = best.setdefault(rival.method, rival)
                best[rival.method] = max(before, rival, key=lambda each: each.scores[FIRST])
        return tuple(best.values())

    @property
    def best(self) -> Rival | None:
        """The finalist that is highest in the mean over the seeds that it has."""
        return max(self.finalists, key=lambda rival: mean(rival.scores.values()), default=None)

    @property
    def judged(self) -> bool:
        """Whether all our seeds and all grids are there; not what lies beyond, or is on other seeds."""
        return not self.missing.keys() - {"wider", "finals"}

    @property
    def shortfall(self) -> float | None:
        """How far ours is behind the best, over the seeds that both have; None: runs are missing."""
        best = self.best
        if not self.judged or best is None:
            return None
        return mean(best.scores[seed] - self.ours[seed] for seed in self.shared)

    @property
    def shared(self) -> list[int]:
        """The seeds that ours and the best have."""
        return sorted(self.ours.keys() & (self.best.scores.keys() if self.best else ()))

    def grid(self, method: str, wider: bool = False) -> list[float]:
        """What a competitor's grid gave, or the settings beyond it that were tried, on the grids' seed."""
        asked = GRIDS[self.system["task"]].get(method, ())
        tried = [rival for rival in self.rivals if rival.method == method]
        return [
            rival.scores[FIRST]
            for rival in tried
            if FIRST in rival.scores and (rival.words in asked) != wider
        ]

    def tried(self, method: str) -> list[float]:
        """Both."""
        return self.grid(method) + self.grid(method, wider=True)

    def curve(self, method: str) -> tuple[float, ...]:
        """The best to expect by runs spent: on the grid, at random, then one after another beyond it."""
        expected = expected_best(self.grid(method))
        return (*expected, *list(accumulate(self.grid(method, wider=True), max, initial=expected[-1]))[1:])


class Flatness(NamedTuple):
    """Systems that differ in concurrency alone."""

    outcomes: tuple[Outcome, ...]

    @property
    def spread(self) -> float | None:
        """Between the highest mean over seeds and the lowest; None: fewer than two systems have runs."""
        means = [mean(outcome.ours.values()) for outcome in self.outcomes if outcome.ours]
        return max(means) - min(means) if len(means) > 1 else None


def outcomes(found: Iterable[Record], systems: Sequence[System] = SYSTEMS) -> tuple[Outcome, ...]:
    """One for each system, whether it has runs or not; of two records of one run the later counts."""
    kept = list({(named(record), _form(record)): record for record in found}.values())
    wanted, more = list(cells()), list(wider(kept))
    return tuple(
        _outcome(
            system,
            [record for record in kept if within(record, system)],
            [cell for cell in wanted if within(cell, system)],
            sum(within(cell, system) for cell in more),
        )
        for system in systems
    )


def flatnesses(made: Iterable[Outcome]) -> tuple[Flatness, ...]:
    """Groups of two systems and more."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in made:
        rest = {name: value for name, value in outcome.system.items() if name != "concurrency"}
        groups.setdefault(str(sorted(rest.items())), []).append(outcome)
    return tuple(Flatness(tuple(group)) for group in groups.values() if len(group) > 1)


def costs(made: Sequence[Outcome]) -> tuple[Cost, ...]:
    """By task, over its systems that have all runs, on the grids' seed: what is expected of runs spent."""
    spent = []
    for task in dict.fromkeys(outcome.system["task"] for outcome in made):
        there = [outcome for outcome in made if outcome.system["task"] == task and outcome.judged]
        spent.append(Cost(OURS[0], task, _mean([(outcome.ours[FIRST],) for outcome in there]), tuned=False))
        spent += [
            Cost(method, task, _mean([outcome.curve(method) for outcome in there])) for method in GRIDS[task]
        ]
        known = [outcome.printed for outcome in there if outcome.printed is not None]
        if known and len(known) == len(there):
            spent.append(Cost(PRINTED[0], task, (mean(known),), tuned=False))
    return tuple(spent)


def _mean(curves: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """One that ends before others stays where it is."""
    longest = max(map(len, curves), default=0)
    return tuple(mean(curve[min(place, len(curve) - 1)] for curve in curves) for place in range(longest))


def _form(record: Record) -> int:
    return int(record.get("form", 1))


def _worth(record: Record, task: str, own: bool) -> float:
    """A run that diverged counts as guessing."""
    if record["failure"]:
        return 1 / CLASSES[task]
    return float(record["last"]) if own else score(record)


def _outcome(system: System, found: Sequence[Record], wanted: Sequence[Record], beyond: int) -> Outcome:
    task = system["task"]
    every = [record for record in found if (record["method"], record["words"]) == OURS]
    latest = max((_form(record) for record in every), default=FORM)
    own = {record["seed"]: record for record in every if _form(record) == latest}
    rivals: dict[tuple[str, str], Rival] = {}
    for record in found:
        if competes(record):
            key = record["method"], str(sorted(record["words"].items()))
            rival = rivals.setdefault(key, Rival(record["method"], record["words"], {}))
            rival.scores[record["seed"]] = _worth(record, task, own=False)
            rivals[key] = rival._replace(failed=rival.failed or bool(record["failure"]))
    printed = next((r for r in found if (r["method"], r["words"]) == PRINTED and r["seed"] == FIRST), None)
    known = {named(record) for record in found if record["method"] != OURS[0]}
    known |= {named(record | {"form": FORM}) for record in own.values()}
    missing: dict[str, int] = {}
    for cell in wanted:
        if named(cell) not in known:
            missing[cell["method"]] = missing.get(cell["method"], 0) + 1
    missing |= {"wider": beyond} if beyond else {}
    made = Outcome(
        system,
        {seed: _worth(record, task, own=True) for seed, record in sorted(own.items())},
        sum(bool(record["failure"]) for record in own.values()),
        latest < FORM,
        tuple(rivals.values()),
        None if printed is None else _worth(printed, task, own=True),
        missing,
    )
    finals = sum(len(SEEDS) - len(rival.scores) for rival in made.finalists)
    return made._replace(missing=missing | {"finals": finals}) if finals else made


def described(system: System) -> tuple[str, str]:
    """A system in words, and its sizes."""
    at: Mapping[str, Any] = DEFAULT | whole(system)
    words = [f"{at['concurrency']} of {at['clients']} at work"]
    kind, _, alpha = str(at["partition"]).partition(":")
    if kind == "dirichlet":
        words.insert(0, f"Dir({alpha})")
    if at["delays"] != DEFAULT["delays"]:
        words.append(f"{at['delays'].removeprefix('tiers:')} delays")
    if at["precision"] != DEFAULT["precision"]:
        words.append(at["precision"])
    sizes = ", ".join(str(at[name]) for name in ("buffer", "steps", "rounds", "batch"))
    return f"{system['task']}: {', '.join(words)}", sizes
