"""What a map of AdaMasFL's claims says: its table, what is counted below it, and its drawing."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple

import numpy as np

from experiments.reproduce.measures import LastModel, paired
from experiments.reproduce.tables import UNTOLD
from offbeat.report.chart import Axis, Figure, Series
from offbeat.report.svg import draw, standalone

TUNED = ("fedbuff", "defedavg", "ca2fl")
SWEPT = ("fedbuff", "defedavg")  # whose concurrency is changed, too
FACTORS = (3, 10)  # by which the theorem's rates are multiplied, which is a model of weights so much smaller
SPLITS = {"iid": "i.i.d.", "dirichlet:0.5": "Dir(0.5)", "dirichlet:0.1": "Dir(0.1)"}
CLOSE = 40  # updates a buffer, from which on 90 at work are hardly more delay than the least
FLAT = 0.02  # of accuracy, that may be lost on the way to the highest concurrency
DRAWN = "dirichlet:0.5"
CAPTION = f"AdaMasFL's accuracy minus that of the best tuned method, by S K T, {SPLITS[DRAWN]}"
HEAD = (
    "",
    "(SKT)^(1/4)",
    "adamasfl",
    "decayed",
    "best tuned",
    "margin",
    f"rates x {', x '.join(map(str, FACTORS))}",
    "change to 90 at work: adamasfl, decayed, fedbuff, defedavg",
    "padamfed, -vr, tuned fedavg",
    "runs",
)


class Place(NamedTuple):
    """One place of the map."""

    split: str
    cohort: int  # S
    steps: int  # K
    rounds: int  # T

    @property
    def work(self) -> int:
        """S K T."""
        return self.cohort * self.steps * self.rounds

    @property
    def theorem(self) -> tuple[float, float]:
        """The local and the server's rate of Theorem 2."""
        together = self.cohort * self.steps
        return 1 / (self.steps * self.rounds**0.5), together**0.25 / self.rounds**0.75

    @property
    def concurrencies(self) -> tuple[int, int, int]:
        """The least, the one at which rates are chosen, and the most of a hundred clients."""
        least, middle = (50, 70) if self.cohort > CLOSE else (20, 40) if self.cohort > 10 else (10, 40)
        return least, middle, 90

    @property
    def title(self) -> str:
        """As in the table."""
        return f"{SPLITS[self.split]}, S {self.cohort}, K {self.steps}, T {self.rounds}"


class Measured(NamedTuple):
    """What is known of one place: accuracies of last models, minus infinity where a run diverged."""

    place: Place
    printed: Mapping[int, float]  # by concurrency
    decayed: Mapping[int, float]
    longer: Mapping[int, float]  # by factor
    tuned: Mapping[str, float]  # at the best rates
    rates: Mapping[str, float]  # these local rates
    swept: Mapping[str, Mapping[int, float]]  # by method and concurrency
    synchronous: Mapping[str, float]

    @property
    def best(self) -> str:
        """The best of the tuned methods."""
        return max(self.tuned, key=self.tuned.__getitem__)

    def margin(self, accuracy: float) -> float:
        """By how much an accuracy is above that of the best tuned method."""
        return accuracy - self.tuned[self.best]

    @property
    def middle(self) -> float:
        """AdaMasFL's accuracy at the theorem's rates, where the others were tuned."""
        return self.printed[self.place.concurrencies[1]]

    def change(self, by: Mapping[int, float]) -> float:
        """From the least to the highest concurrency."""
        least, _, most = self.place.concurrencies
        return by[most] - by[least]

    @property
    def rows(self) -> tuple[tuple[str, Mapping[int, float]], ...]:
        """By concurrency, what is looked at for flatness."""
        others = ((method, self.swept.get(method, {})) for method in SWEPT)
        return (("adamasfl", self.printed), ("decayed", self.decayed), *others)

    @property
    def finite(self) -> bool:
        """Whether no run diverged of those that several seeds are compared by."""
        values = [*self.printed.values(), *self.tuned.values()]
        return all(
            map(math.isfinite, [*values, *(each for by in self.swept.values() for each in by.values())])
        )


def texts(one: Measured | None) -> tuple[str, ...]:
    """A line of the table, between its title and path and its number of runs."""
    if one is None:
        return ("not run", *[""] * (len(HEAD) - 4))
    middle = one.place.concurrencies[1]
    return (
        _say(one.middle),
        _say(one.decayed.get(middle)),
        f"{_say(one.tuned[one.best])} ({one.best}, local {one.rates[one.best]:g})",
        f"{one.margin(one.middle):+.3f}",
        ", ".join(_say(one.longer.get(factor)) for factor in FACTORS),
        ", ".join(_shift(one, by) for _, by in one.rows),
        ", ".join(_say(one.synchronous.get(method)) for method in ("padamfed", "padamfed-vr", "fedavg")),
    )


def notes(known: Sequence[Measured]) -> list[str]:
    """What the map says, counted."""
    if not known:
        return ["Not run yet."]
    return [_above(known), _flat(known), *_synchronous(known), _path(known)]


def _above(known: Sequence[Measured]) -> str:
    ways: tuple[tuple[str, Callable[[Measured], float | None]], ...] = (
        ("at the theorem's rates", lambda one: one.middle),
        ("decayed", lambda one: one.decayed.get(one.place.concurrencies[1])),
        ("at the better of the longer rates", lambda one: max(one.longer.values(), default=None)),
    )
    words = []
    for name, accuracy in ways:
        margins = [one.margin(value) for one in known if (value := accuracy(one)) is not None]
        count = sum(value > 0 for value in margins)
        test = f"sign test p = {sign_test(count, len(margins)):.2g}"
        words.append(f"{name} in {count} of {len(margins)} places (best {max(margins):+.3f}, {test})")
    return f"AdaMasFL above the best tuned method: {', '.join(words)}."


def _flat(known: Sequence[Measured]) -> str:
    words = []
    for cohort in sorted({one.place.cohort for one in known}):
        own = [one for one in known if one.place.cohort == cohort]
        counts: dict[str, list[bool]] = {}
        for one in own:
            for name, by in one.rows:
                if len(by) == len(one.place.concurrencies):
                    counts.setdefault(name, []).append(one.change(by) > -FLAT)
        listed = ", ".join(f"{name} in {sum(each)} of {len(each)}" for name, each in counts.items())
        words.append(f"S {cohort}: {listed}")
    whole = [one for one in known if len(one.swept) == len(SWEPT)]
    steadier = sum(
        one.change(one.printed) > max(one.change(one.swept[method]) for method in SWEPT) for one in whole
    )
    return (
        f"Nearly flat, less than {FLAT:g} lower at 90 at work than at the least: {'; '.join(words)}. "
        f"AdaMasFL is steadier than FedBuff and DeFedAvg in {steadier} of {len(whole)} places."
    )


def _synchronous(known: Sequence[Measured]) -> Iterable[str]:
    whole = [one for one in known if len(one.synchronous) == 3]
    pairs = (("padamfed", "fedavg"), ("padamfed-vr", "fedavg"), ("padamfed-vr", "padamfed"))
    words = []
    for ours, other in pairs:
        count = sum(one.synchronous[ours] > one.synchronous[other] for one in whole)
        words.append(
            f"{ours} above {'tuned ' if other == 'fedavg' else ''}{other} in {count} of {len(whole)}"
        )
    if whole:
        yield f"Synchronous: {', '.join(words)}."


def _path(known: Sequence[Measured]) -> str:
    """Whether the length of its path explains the margin."""
    words = []
    for cohort in sorted({one.place.cohort for one in known}):
        own = [one for one in known if one.place.cohort == cohort and one.longer]
        gains = [max(one.longer.values()) - one.middle for one in own]
        if gains:
            count = sum(gain > 0 for gain in gains)
            words.append(f"{count} of {len(gains)} places with S {cohort} (mean {mean(gains):+.3f})")
    works, margins = [float(one.place.work) for one in known], [one.margin(one.middle) for one in known]
    found = rank_correlation(works, margins)
    correlated = "" if math.isnan(found) else f"rank correlation of the margin with S K T {found:+.2f}; "
    return f"Is it the length of the path? {correlated}longer rates are better in {', '.join(words)}."


def drawing(known: Iterable[Measured], name: str) -> dict[str, str]:
    """SVG by file name, none without runs: a line for each S at the theorem's rates, and at the longest."""
    points: dict[str, dict[int, list[float]]] = {}
    for one in known:
        place, most = one.place, max(FACTORS)
        lines = {f"S {place.cohort}": one.middle, f"S {place.cohort}, rates x {most}": one.longer.get(most)}
        for label, accuracy in lines.items():
            if place.split == DRAWN and accuracy is not None and math.isfinite(accuracy):
                points.setdefault(label, {}).setdefault(place.work, []).append(one.margin(accuracy))
    series = tuple(
        Series(style, label, np.array(sorted(by), float), np.array([mean(by[work]) for work in sorted(by)]))
        for style, (label, by) in enumerate(sorted(points.items()))
    )
    if not series:
        return {}
    axes = Axis("S K T", log=True), Axis("accuracy above the best tuned method")
    return {f"{name}.svg": standalone(draw(Figure(name, CAPTION, *axes, series)), dark=True)}


def paired_note(seeds: Sequence[Measured]) -> str:
    """Both claims of one place over its seeds; the other method is the best, or steadiest, of the first."""
    first = seeds[0]
    best = first.best
    steady = max(SWEPT, key=lambda method: first.change(first.swept[method]))
    say = LastModel().say
    margins = paired([one.middle - one.tuned[best] for one in seeds], say)
    changes = paired([one.change(one.printed) - one.change(one.swept[steady]) for one in seeds], say)
    return (
        f"{first.place.title}, {len(seeds)} seeds: adamasfl minus {best} {margins}; its change with "
        f"the concurrency minus that of {steady} {changes}."
    )


def sign_test(count: int, of: int) -> float:
    """The two-sided p of so many or fewer, or as many on the other side, of fair coins."""
    tail = min(count, of - count)
    return min(1.0, math.ldexp(2 * sum(math.comb(of, k) for k in range(tail + 1)), -of))


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's, where equal values share the mean of their ranks; NaN where all are equal."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]

    if min(len(set(xs)), len(set(ys))) < 2:
        return math.nan
    return float(np.corrcoef(ranks(xs), ranks(ys))[0, 1])


def _say(accuracy: float | None) -> str:
    if accuracy is None:
        return UNTOLD
    return f"{accuracy:.3f}" if math.isfinite(accuracy) else "diverged"


def _shift(one: Measured, by: Mapping[int, float]) -> str:
    if len(by) < len(one.place.concurrencies):
        return UNTOLD
    change = one.change(by)
    return f"{change:+.3f}" if math.isfinite(change) else "diverged"
