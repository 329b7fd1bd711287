"""Where AdaMasFL's and PAdaMFed's claims hold, over S, K, T and the split: a map, since the slides tell none.

Rates of the tuned methods are chosen at one concurrency from a grid by factors of 3 that goes on until its
best rate has a worse neighbour on both sides; with those rates the concurrency is then changed, and more
seeds are run at the places that decide. These cells follow from the records of others.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.reproduce.records import Curve
from experiments.reproduce.study import Cell, Table
from experiments.studies.fadas import Rates, both
from experiments.studies.map_table import (
    CAPTION,
    FACTORS,
    HEAD,
    SWEPT,
    TUNED,
    Measured,
    Place,
    drawing,
    notes,
    paired_note,
    texts,
)
from offbeat.training.experiment import Experiment

LADDER = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
PRINTED, DECAYED = "adamasfl", "adamasfl, decayed"
LONGER = {factor: f"adamasfl, rates x {factor}" for factor in FACTORS}


@dataclass(frozen=True)
class ClaimMap:
    """The places of a map, with which data and model, and which of them have more seeds."""

    places: tuple[Place, ...]
    brief: tuple[Place, ...]  # of which fewer methods are run, and AdaMasFL's concurrency alone is changed
    lasting: tuple[Place, ...]  # of these, the ones where that of others is changed, too
    decisive: tuple[Place, ...]
    setting: Mapping[str, Any]
    pooled: int = 1
    seeds: tuple[int, ...] = (1, 2)  # besides 0, of the decisive ones

    def cells(self) -> tuple[Cell, ...]:
        """What needs no records: methods without a grid, and the first three rates of each grid."""
        return tuple(cell for place in self.places for cell in self._first(place))

    def follow(self, found: Mapping[str, Curve]) -> tuple[Cell, ...]:
        """The next rates of grids whose best is at an end, and what is run at the best rates."""
        return tuple(cell for place in self.places for cell in self._next(place, found))

    def cell(self, place: Place, row: str, rates: Rates, at: int, seed: int = 0) -> Cell:
        """One run."""
        method = row.partition(",")[0]
        synchronous = method in ("fedavg", "padamfed", "padamfed-vr")
        decay = {"server_lr_schedule": "linear", "local_lr_schedule": "linear"} if row == DECAYED else {}
        made = Experiment.of(
            **self.setting,
            **decay,
            algorithm=method,
            parameters=rates,
            partition=place.split,
            buffer=place.cohort,
            local_steps=place.steps,
            rounds=place.rounds,
            eval_every=max(1, place.rounds // 10),
            concurrency=place.cohort if synchronous else at,
            seed=seed,
        )
        column = "synchronous" if synchronous else str(at)
        return Cell(f"{place.title}: {row}", column, made, pooled=self.pooled)

    def grid(self, place: Place, method: str, found: Mapping[str, Curve]) -> tuple[list[Cell], Rates | None]:
        """The rates after the first three that were or are to be tried; the best one once it is enclosed."""
        begun = [dict(rates)["local_lr"] for rates in first(place)]
        low, high = LADDER.index(begun[0]), LADDER.index(begun[-1])
        while True:
            rates = LADDER[low : high + 1]
            tried = {
                rate: self.cell(place, method, both(rate, 1.0), place.concurrencies[1]) for rate in rates
            }
            more = [cell for rate, cell in tried.items() if rate not in begun]
            if any(cell.key not in found for cell in tried.values()):
                return more, None
            merits = [merit(found[cell.key]) for cell in tried.values()]
            best = max(range(len(merits)), key=merits.__getitem__)
            if best == 0 and low > 0:
                low -= 1
            elif best == len(merits) - 1 and high < len(LADDER) - 1:
                high += 1
            else:
                return more, both(rates[best], 1.0)

    def measured(self, place: Place, found: Mapping[str, Curve], seed: int = 0) -> Measured | None:
        """What is known of a place, once AdaMasFL and the tuned methods have run."""

        def merits(row: str, rates: Rates, counts: Iterable[int]) -> dict[int, float]:
            cells = {at: self.cell(place, row, rates, at, seed) for at in counts}
            return {at: merit(found[cell.key]) for at, cell in cells.items() if cell.key in found}

        local, server = place.theorem
        middle = place.concurrencies[1]
        chosen = {method: self.grid(place, method, found)[1] for method in self._tuned(place)}
        rates = {method: given for method, given in chosen.items() if given is not None}
        swept = {method: merits(method, given, place.concurrencies) for method, given in rates.items()}
        printed = merits(PRINTED, (), place.concurrencies)
        tuned = {method: by[middle] for method, by in swept.items() if method in TUNED and middle in by}
        if middle not in printed or len(tuned) < len([m for m in self._tuned(place) if m in TUNED]):
            return None
        longer = {
            factor: found_at
            for factor, row in LONGER.items()
            for found_at in merits(row, both(factor * local, factor * server), (middle,)).values()
        }
        synchronous = {
            row: by[middle]
            for row, given in (("padamfed", ()), ("padamfed-vr", ()), ("fedavg", rates.get("fedavg")))
            if given is not None and middle in (by := merits(row, given, (middle,)))
        }
        return Measured(
            place,
            printed,
            merits(DECAYED, both(local, 2 * server), place.concurrencies),
            longer,
            tuned,
            {method: dict(given)["local_lr"] for method, given in rates.items()},
            {method: swept[method] for method in SWEPT if len(swept[method]) == len(place.concurrencies)},
            synchronous,
        )

    @property
    def caption(self) -> str:
        """What the drawing shows."""
        return CAPTION

    def __call__(self, cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> Table:
        rows, known = [], []
        for place in self.places:
            one = self.measured(place, found)
            known += [] if one is None else [one]
            keys = {cell.key for cell in cells if cell.row.startswith(f"{place.title}:")}
            done = len(keys & found.keys())
            runs = str(done) if done == len(keys) else f"{done} of {len(keys)}"
            rows.append((place.title, f"{place.work**0.25:.1f}", *texts(one), runs))
        return Table(HEAD, tuple(rows), (*notes(known), *self._paired(found)))

    def drawings(self, cells: tuple[Cell, ...], found: Mapping[str, Curve], name: str) -> dict[str, str]:
        """SVG by file name."""
        return drawing([one for place in self.places if (one := self.measured(place, found))], name)

    def _tuned(self, place: Place) -> tuple[str, ...]:
        return SWEPT if place in self.brief else (*TUNED, "fedavg")

    def _first(self, place: Place) -> Iterable[Cell]:
        middle = place.concurrencies[1]
        local, server = place.theorem
        yield from (self.cell(place, PRINTED, (), at) for at in place.concurrencies)
        for factor, row in LONGER.items():
            yield self.cell(place, row, both(factor * local, factor * server), middle)
        yield from (self.cell(place, method, rates, middle) for method in SWEPT for rates in first(place))
        if place in self.brief:
            return
        yield from (self.cell(place, TUNED[-1], rates, middle) for rates in first(place))
        decayed = both(local, 2 * server)
        yield from (self.cell(place, DECAYED, decayed, at) for at in place.concurrencies)
        yield from (self.cell(place, method, (), middle) for method in ("padamfed", "padamfed-vr"))
        yield from (self.cell(place, "fedavg", rates, middle) for rates in first(place))

    def _next(self, place: Place, found: Mapping[str, Curve]) -> Iterable[Cell]:
        least, middle, most = place.concurrencies
        chosen = {}
        for method in self._tuned(place):
            tried, best = self.grid(place, method, found)
            yield from tried
            if best is not None:
                chosen[method] = best
        for method in SWEPT if place not in self.brief or place in self.lasting else ():
            if method in chosen:
                yield from (self.cell(place, method, chosen[method], at) for at in (least, most))
        if place in self.decisive and all(method in chosen for method in TUNED):
            for seed in self.seeds:
                for at in place.concurrencies:
                    yield self.cell(place, PRINTED, (), at, seed)
                    yield from (self.cell(place, method, chosen[method], at, seed) for method in SWEPT)
                yield self.cell(place, TUNED[-1], chosen[TUNED[-1]], middle, seed)

    def _paired(self, found: Mapping[str, Curve]) -> Iterable[str]:
        for place in self.decisive:
            known = [self.measured(place, found, seed) for seed in (0, *self.seeds)]
            whole = [one for one in known if one is not None and len(one.swept) == len(SWEPT) and one.finite]
            if len(whole) == len(known):
                yield paired_note(whole)


def first(place: Place) -> tuple[Rates, ...]:
    """The rates with which a grid begins: the more local steps, the smaller."""
    middle = LADDER.index(0.1) if place.steps < 40 else LADDER.index(0.03)
    return tuple(both(LADDER[middle + step], 1.0) for step in (-1, 0, 1))


def merit(curve: Curve) -> float:
    """The last model's accuracy; minus infinity where it diverged."""
    return -math.inf if curve.failure else curve.accuracies[-1]
