"""A table or a figure of a paper as values: the runs that it takes, and what is made of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from experiments.reproduce.records import PLACE, Curve
from offbeat.training.experiment import Experiment

TAIL = 5  # rounds at the end that are evaluated whatever else is


@dataclass(frozen=True)
class Cell:
    """One run: where its figure stands, and what is run."""

    row: str
    column: str
    experiment: Experiment
    scale: int = 1  # server steps that count as one round: those of a method that steps on each arrival
    tested: int | None = None  # about so many test examples, evenly spaced; None: all
    writers: bool = False  # the clients of MNIST are those who wrote its digits
    pooled: int = 1  # images are averaged over squares of so many pixels a side, for smaller models

    @property
    def key(self) -> str:
        """The same for runs that should come out the same."""
        settings = {n: value for n, value in self.experiment.settings().items() if n not in PLACE}
        smaller = () if self.pooled == 1 else (self.pooled,)
        return json.dumps([settings, self.scale, self.tested, self.writers, *smaller], sort_keys=True)

    @property
    def rates(self) -> str:
        """What the method was given, in short."""
        given = self.experiment.parameters
        return ", ".join(f"{name.removesuffix('_lr')} {_short(value)}" for name, value in given)

    def shortened(self, rounds: int | None) -> "Cell":
        """The same with fewer rounds, to try it out."""
        if rounds is None:
            return self
        made = self.experiment
        steps = min(made.rounds, rounds * self.scale)
        return replace(self, experiment=replace(made, rounds=steps, eval_every=min(made.eval_every, steps)))

    @property
    def gradients(self) -> int:
        """Local steps in all, about: clients' epochs are counted as if all had as many examples."""
        made = self.experiment
        local = made.local_steps
        if made.local_epochs is not None:
            local = made.local_epochs * max(1, round(_TRAINED[made.subject] / made.clients / made.batch_size))
        return made.rounds * made.buffer * local


_TRAINED = {
    "cifar10": 50_000,
    "digits": 1437,
    "fashion-mnist": 60_000,
    "mnist": 60_000,
    "mrpc": 3668,
    "rte": 2490,
    "shakespeare": 3_000_000,
    "sst2": 67_349,
}


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class Table(NamedTuple):
    """Columns, rows, and sentences below them."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@runtime_checkable
class DrawnTable(Protocol):
    """What makes a table and drawings of its own."""

    @property
    def caption(self) -> str:
        """What the drawings show."""
        ...

    def __call__(self, cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> Table:
        """The table."""
        ...

    def drawings(self, cells: tuple[Cell, ...], found: Mapping[str, Curve], name: str) -> dict[str, str]:
        """SVG by file name; none without runs."""
        ...


Tabulate: TypeAlias = Callable[[tuple[Cell, ...], Mapping[str, Curve]], Table]


@dataclass(frozen=True)
class Version:
    """The cells of a study, in full or quick, and their table."""

    cells: tuple[Cell, ...]
    tabulate: Tabulate
    pace: float  # local steps a second: of an H200 in full, of two cores where it is quick
    follow: Callable[[Mapping[str, Curve]], tuple[Cell, ...]] | None = None  # cells that depend on records

    def after(self, found: Mapping[str, Curve]) -> "Version":
        """With the cells that follow from what is recorded, such as a grid's next rate, before the others."""
        return self if self.follow is None else replace(self, cells=(*self.follow(found), *self.cells))

    @property
    def minutes(self) -> float:
        """About how long it takes there, by that pace."""
        return sum({cell.key: cell.gradients for cell in self.cells}.values()) / self.pace / 60


@dataclass(frozen=True)
class Study:
    """One table or figure."""

    name: str
    paper: str  # the folder of its records, shared by all of a paper's
    source: str
    shows: str
    full: Version
    quick: Version
    unknown: str  # what the paper does not tell, and so was chosen here


def summary_of(study: Study) -> dict[str, Any]:
    """What a study is, in few words."""
    return {"name": study.name, "source": study.source, "shows": study.shows, "unknown": study.unknown}
