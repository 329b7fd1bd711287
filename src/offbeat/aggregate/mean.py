"""The weighted mean as it is, without noise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offbeat import trees
from offbeat.aggregate.aggregation import Hiding, Opening
from offbeat.aggregate.summation import PlainSum, Summation, Summing
from offbeat.core import Cohort, Saved, Task
from offbeat.schedule.participation import Participation
from offbeat.trees import Tree


@dataclass(frozen=True)
class Mean:
    """The sum of weighted uploads over how many there are, so that its sensitivity is known."""

    summation: Summation = PlainSum()

    @property
    def participation(self) -> Participation:
        return Participation()

    def open(self, opening: Opening) -> "Averaging":
        return Averaging(self.summation.open(opening), self.summation.secret)


@dataclass(frozen=True)
class Averaging:
    """One run's means."""

    summing: Summing
    private: bool  # what is summed in secret may not leave clients beside the sum either

    def collect(self, uploads: Tree, tasks: Sequence[Task], cohort: Cohort) -> Tree:
        return self.summing.total(uploads, tasks, cohort)

    def release(self, total: Tree, cohort: Cohort) -> Tree:
        return trees.over(lambda leaf: leaf / len(cohort.weights), total)

    @property
    def hides_sample(self) -> bool:
        return False

    def hiding(self) -> Hiding | None:
        return self.summing.hiding()

    def ended(self) -> None:
        return None

    def spent(self) -> Callable[[], None]:
        return lambda: None

    def save(self) -> Saved:
        return self.summing.save()

    def load(self, saved: Saved) -> None:
        self.summing.load(saved)
