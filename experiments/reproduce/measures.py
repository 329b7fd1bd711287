"""What is read off the curves of a setting, one curve for each seed."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from experiments.reproduce.records import Curve
from experiments.reproduce.study import TAIL
from offbeat.report.chart import PERCENT, PLAIN, Unit


class Score(NamedTuple):
    """A figure as text, and how good it is: higher is better, whatever it measures."""

    merit: float
    text: str


class Measure(Protocol):
    """From curves to a figure."""

    def __call__(self, curves: Sequence[Curve]) -> Score:
        """Of one setting; at least one curve."""
        ...


@runtime_checkable
class AccuracyMeasure(Protocol):
    """A measure by accuracy."""

    def accuracy(self, curve: Curve) -> float:
        """Of one run, from 0 to 1; of one that diverged that of the untrained model."""
        ...

    def say(self, accuracy: float) -> str:
        """As in the study's table."""
        ...

    @property
    def unit(self) -> Unit:
        """In which the table has it."""
        ...


@dataclass(frozen=True)
class LastRounds:
    """Accuracy in per cent in the last rounds, mean and deviation; of several seeds those of their means."""

    def __call__(self, curves: Sequence[Curve]) -> Score:
        failed = _failed(curves)
        if failed:
            return failed
        tails = [[100 * value for value in curve.accuracies[-TAIL:]] for curve in curves]
        values = tails[0] if len(tails) == 1 else [statistics.mean(tail) for tail in tails]
        mean = statistics.mean(values)
        return Score(mean, f"{mean:.2f} ± {_deviation(values):.2f}")

    def accuracy(self, curve: Curve) -> float:
        return _untrained(curve) if curve.failure else statistics.mean(curve.accuracies[-TAIL:])

    def say(self, accuracy: float) -> str:
        return f"{100 * accuracy:.2f}"

    @property
    def unit(self) -> Unit:
        return PERCENT


@dataclass(frozen=True)
class LastModel:
    """Accuracy of the last model, mean and deviation over seeds."""

    def __call__(self, curves: Sequence[Curve]) -> Score:
        failed = _failed(curves)
        if failed:
            return failed
        values = [curve.accuracies[-1] for curve in curves]
        mean = statistics.mean(values)
        return Score(mean, f"{mean:.3f}" + (f" ± {_deviation(values):.3f}" if len(values) > 1 else ""))

    def accuracy(self, curve: Curve) -> float:
        return _untrained(curve) if curve.failure else curve.accuracies[-1]

    def say(self, accuracy: float) -> str:
        return f"{accuracy:.3f}"

    @property
    def unit(self) -> Unit:
        return PLAIN


@dataclass(frozen=True)
class TimeTo:
    """Virtual time until an accuracy is reached, mean over seeds; where it is not, the best there was."""

    target: float

    def __call__(self, curves: Sequence[Curve]) -> Score:
        best = statistics.mean(curve.best for curve in curves)
        places = [(curve, curve.reached(self.target)) for curve in curves]
        times = [curve.times[place] for curve, place in places if place is not None]
        if len(times) < len(curves):
            return Score(-math.inf, f"not reached (best {best:.3f})")
        mean = statistics.mean(times)
        return Score(-mean, f"{mean:.1f}")


PAIRED = 3  # seeds of a paired test, whose t has two degrees of freedom


def paired(differences: Sequence[float], say: Callable[[float], str]) -> str:
    """Mean and deviation of the differences of three seeds, and the p of a paired t-test, two-sided."""
    if len(differences) != PAIRED:
        raise ValueError(f"the test is for {PAIRED} seeds, not {len(differences)}")
    mean, spread = statistics.mean(differences), statistics.stdev(differences)
    words = f"{'-' if mean < 0 else '+'}{say(abs(mean))} ± {say(spread)}"
    t = math.inf if spread == 0 else abs(mean) / (spread / math.sqrt(PAIRED))
    p = 0.0 if math.isinf(t) else 1 - t / math.sqrt(2 + t * t)
    return f"{words} (p = {p:.2g})"


def _failed(curves: Sequence[Curve]) -> Score | None:
    count = sum(curve.failure is not None for curve in curves)
    if not count:
        return None
    return Score(-math.inf, "diverged" if count == len(curves) else f"diverged, {count} of {len(curves)}")


def _untrained(curve: Curve) -> float:
    return curve.accuracies[0] if curve.accuracies else 0.0


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
