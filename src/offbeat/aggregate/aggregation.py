"""What the loop asks of whatever turns uploads into a mean: plain, private, or summed in secret."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from offbeat.aggregate.terms import is_simulated
from offbeat.core import AnyAlgorithm, Cohort, Saved, Task, Vector
from offbeat.schedule.availability import Always, Availability
from offbeat.schedule.dispatch import Dispatch
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import Weights
from offbeat.trees import Tree


class Opening(NamedTuple):
    """The run that an aggregation is opened for."""

    algorithm: AnyAlgorithm
    x: Vector  # the initial model
    dispatch: Dispatch
    weights: Weights
    buffer: int
    population: int
    rounds: int
    limit: float
    seed: int
    availability: Availability = Always()
    answers: int | None = None  # numbers beside each upload in a private sum; None: uploads are summed as is


class Hiding(NamedTuple):
    """How clients hide what they send by themselves, so that the server need not be trusted to."""

    facts: dict[str, Any]  # what a client of this version must know, as JSON
    examine: Callable[[Task, bytes, bytes], None]  # refuses a sealed seed and signature that cannot be added


class Spent(NamedTuple):
    """What a run has told so far about any one client."""

    epsilon: float
    delta: float
    releases: int
    terms: str  # under which assumptions, in a sentence

    @property
    def simulated(self) -> bool:
        """Whether epsilon counts on amplification that does not hold, and so is no guarantee."""
        return is_simulated(self.terms)


class Aggregation(Protocol):
    """One run's way from uploads to means; it can be saved between two server steps."""

    def collect(self, uploads: Tree, tasks: Sequence[Task], cohort: Cohort) -> Tree:
        """What these uploads (leaves stacked over tasks) come to as a sum, which adds up over calls."""
        ...

    def release(self, total: Tree, cohort: Cohort) -> Tree:
        """The mean of one server step, from the sums of all that was collected for it."""
        ...

    @property
    def private(self) -> bool:
        """Whether nothing may leave clients but by `release`."""
        ...

    @property
    def hides_sample(self) -> bool:
        """Whether it must stay a secret who was chosen."""
        ...

    def hiding(self) -> Hiding | None:
        """How clients of this version hide uploads; None: they send them as they are."""
        ...

    def ended(self) -> str | None:
        """Why there may be no further release, in a sentence."""
        ...

    def spent(self) -> Callable[[], Spent | None]:
        """The privacy spent up to now, where it is counted; slow to compute, so only when asked for."""
        ...

    def save(self) -> Saved: ...

    def load(self, saved: Saved) -> None: ...


class Aggregate(Protocol):
    """A way from uploads to means."""

    @property
    def participation(self) -> Participation:
        """How often a client may contribute, which the loop keeps to."""
        ...

    def open(self, opening: Opening) -> Aggregation:
        """Begin a run, or refuse one whose assumptions do not hold."""
        ...
