"""FADAS, Fig. 1: what the threshold of delay, the concurrency and the buffer do under large delays.

The paper shows curves and says in words how they lie; so claims are words, beside figures of ours. Rates
are those of the setting that the other tables use, whatever is varied.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiments.reproduce.measures import LastRounds, Measure, Score, TimeTo
from experiments.reproduce.records import Curve
from experiments.reproduce.study import Cell, Study, Table, Version
from experiments.studies.fadas import CNN, LARGE, QUICK, REDUCED, SEED, SOURCE, Rates, both, cell, pace

THRESHOLDS = (1, 4, 8, 10)
CONCURRENCIES = (15, 25, 35)
BUFFERS = (3, 5, 10)
TRIPS = 1500  # of clients: what the smallest buffer takes in 500 rounds
METHODS = ("fadas", "fadas-da")
_LAST = 3  # records of the curve that are averaged, since single ones waver


class SettingKey(NamedTuple):
    """One setting; runs of several seeds share it."""

    method: str
    threshold: int = 1  # of delay, for fadas-da alone
    concurrency: int = LARGE["concurrency"]
    buffer: int = LARGE["buffer"]


@dataclass(frozen=True)
class AtVersion:
    """Accuracy in per cent about a version: the mean of the last records up to there, over seeds."""

    version: int
    every: int  # versions between records; the last rounds have more, which would be of another stretch

    def __call__(self, curves: Sequence[Curve]) -> Score:
        means = []
        for curve in curves:
            known = [
                accuracy
                for version, accuracy in zip(curve.versions, curve.accuracies, strict=True)
                if version <= self.version and version % self.every == 0
            ]
            if max(curve.versions, default=-1) < self.version:
                return Score(-math.inf, "diverged" if curve.failure else "not reached")
            means.append(100 * statistics.mean(known[-_LAST:]))
        mean = statistics.mean(means)
        return Score(mean, f"{mean:.2f}" + (f" ± {statistics.stdev(means):.2f}" if means[1:] else ""))


class FigureRow(NamedTuple):
    """A row of the table: the same setting for both methods."""

    name: str
    measure: Measure
    setting: SettingKey  # its method is filled in
    methods: tuple[str, ...] = METHODS

    def place(self, method: str) -> SettingKey | None:
        """Where that method's figure is from."""
        return self.setting._replace(method=method) if method in self.methods else None


class PaperClaim(NamedTuple):
    """In which order some figures are claimed to lie."""

    what: str
    words: str
    figures: tuple[tuple[str, str], ...]  # line and method


@dataclass(frozen=True)
class Ablations:
    """Settings by method, and below them the order that is claimed beside the one that was found."""

    target: float  # of accuracy, for time
    every: int  # versions between records

    @property
    def reaching(self) -> str:
        """What is timed."""
        return f"time to {100 * self.target:.0f} %"

    def lines(self) -> tuple[FigureRow, ...]:
        """The rows."""
        last = LastRounds()
        buffers = [SettingKey("", buffer=buffer) for buffer in BUFFERS]
        return (
            *(FigureRow(f"tau_c {t}", last, SettingKey("", threshold=t), METHODS[1:]) for t in THRESHOLDS),
            *(FigureRow(f"M_c {c}", last, SettingKey("", concurrency=c)) for c in CONCURRENCIES),
            *(FigureRow(f"M {b.buffer}, by rounds", last, b) for b in buffers),
            *(
                FigureRow(f"M {b.buffer}, by trips", AtVersion(TRIPS // b.buffer, self.every), b)
                for b in buffers
            ),
            *(FigureRow(f"M {b.buffer}, {self.reaching}", TimeTo(self.target), b) for b in buffers),
        )

    def claims(self) -> tuple[PaperClaim, ...]:
        """What the paper says of Fig. 1."""
        made = [
            PaperClaim(
                "threshold",
                "tau_c 8 slightly before 1, 4 and 10",
                tuple((f"tau_c {t}", METHODS[1]) for t in THRESHOLDS),
            )
        ]
        for c in CONCURRENCIES:
            words = "fadas before fadas-da" if c == CONCURRENCIES[-1] else "fadas-da before fadas"
            made.append(PaperClaim(f"M_c {c}", words, tuple((f"M_c {c}", method) for method in METHODS)))
        for kind, words in (
            ("by rounds", "10, 5, 3"),
            ("by trips", "10, 5, 3"),
            (self.reaching, "3 first"),
        ):
            for method in METHODS:
                figures = tuple((f"M {b}, {kind}", method) for b in BUFFERS)
                made.append(PaperClaim(f"{method}, M {kind}", words, figures))
        return tuple(made)

    def __call__(self, cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> Table:
        groups: dict[SettingKey, list[Cell]] = {}
        for one in cells:
            groups.setdefault(place_of(one), []).append(one)
        figures: dict[tuple[str, str], Score] = {}
        rows = []
        for line in self.lines():
            texts, keys = [], []
            for method in METHODS:
                place = line.place(method)
                own = [] if place is None else groups.get(place, [])
                keys += [one.key for one in own]
                curves = [found[one.key] for one in own if one.key in found]
                if own and len(curves) == len(own):
                    figures[line.name, method] = line.measure(curves)
                    texts.append(figures[line.name, method].text)
                else:
                    texts.append("not run" if own else "")
            done = sum(key in found for key in keys)
            rows.append((line.name, *texts, str(done) if done == len(keys) else f"{done} of {len(keys)}"))
        return Table(("", *METHODS, "runs"), tuple(rows), tuple(_judge(c, figures) for c in self.claims()))


def place_of(one: Cell) -> SettingKey:
    """The setting of a run."""
    made = one.experiment
    threshold = int(dict(made.parameters).get("tau_c", 1))
    return SettingKey(made.algorithm, threshold, made.concurrency, made.buffer)


def _judge(claim: PaperClaim, figures: Mapping[tuple[str, str], Score]) -> str:
    """The order that was found, best first; what has no figure is named apart."""
    start = f"{claim.what}: claimed {claim.words}; measured"
    if any(name not in figures for name in claim.figures):
        return f"{start} not yet."
    ranked = sorted(claim.figures, key=lambda name: -figures[name].merit)
    shown = [_short(name, claim) for name in ranked if math.isfinite(figures[name].merit)]
    missed = [_short(name, claim) for name in ranked if not math.isfinite(figures[name].merit)]
    return f"{start} {', '.join([*shown, *(f'{name} (none)' for name in missed)])}."


def _short(name: tuple[str, str], claim: PaperClaim) -> str:
    """What is varied: the method, or the number in the name of the line."""
    line, method = name
    return method if len({each for each, _ in claim.figures}) == 1 else line.split(",")[0].split()[1]


def places() -> tuple[SettingKey, ...]:
    """Every setting once."""
    made = [SettingKey(METHODS[1], threshold=t) for t in THRESHOLDS]
    for method in METHODS:
        made += [SettingKey(method, concurrency=c) for c in CONCURRENCIES]
        made += [SettingKey(method, buffer=b) for b in BUFFERS]
    return tuple(dict.fromkeys(made))


def runs(setting: dict[str, object], fadas: Rates, adaptive: Rates, seeds: Iterable[int]) -> tuple[Cell, ...]:
    """All settings with these rates; the threshold of 1 is the method's own and is not given again."""
    made = []
    for seed in seeds:
        for place in places():
            given = (("tau_c", float(place.threshold)),) if place.threshold != 1 else ()
            rates = fadas if place.method == METHODS[0] else (*adaptive, *given)
            row = f"{place.method}, tau_c {place.threshold}" if given else place.method
            swept = {"concurrency": place.concurrency, "buffer": place.buffer, "seed": seed}
            one = cell(row, 0.1, rates, setting | LARGE, **swept)
            made.append(Cell(row, f"M_c {place.concurrency}, M {place.buffer}", one.experiment))
    return tuple(made)


_FULL = runs(CNN, both(0.1, 3e-4), both(0.1, 3e-3), (SEED,))
FIG1 = Study(
    "fadas-fig1",
    "fadas",
    f"{SOURCE}, Fig. 1",
    "what tau_c, the concurrency M_c and the buffer M do to FADAS on CIFAR-10 under large delays",
    Version(_FULL, Ablations(0.4, CNN["eval_every"]), pace(_FULL)),
    Version(
        runs(QUICK | {"eval_every": 5}, both(0.1, 1e-2), both(0.1, 3e-2), (SEED, 43, 44)),
        Ablations(0.9, 5),
        2000,
    ),
    "Not told: how the data was split (here Dir(0.1)), the rates where something is varied (here those of "
    "the usual setting), tau_c in (b) to (f) (here 1), and any number but one: time is to about 70 %. By "
    f"trips: after {TRIPS} client trips. {REDUCED} Here all is with the CNN.",
)
