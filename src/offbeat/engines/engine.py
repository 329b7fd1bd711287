"""What the loop asks of an engine, simulated or real."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from offbeat.aggregate.mean import SecureEncoding
from offbeat.core import AnyAlgorithm, SavedState, Task, Vector
from offbeat.nn.problem import Statistics
from offbeat.schedule.availability import Availability
from offbeat.schedule.clock import Timeline
from offbeat.schedule.rng import Rng
from offbeat.trees import Tree


class ClientUpdates(NamedTuple):
    """What a full buffer brings."""

    uploads: Tree  # leaves (tasks, ...)
    statistics: Statistics  # the plain mean of the clients' running statistics


class Session(Timeline, Protocol):
    """One run on an engine: it tells time, holds what is in flight, and does the local work."""

    def publish(self, version: int, algorithm: AnyAlgorithm, message: Tree, statistics: Statistics) -> None:
        """Make a version known, and whose local half clients now run."""
        ...

    def gather(self, tasks: Sequence[Task], version: int) -> ClientUpdates:
        """The uploads of tasks that arrived and were accepted; their clients' memory is committed."""
        ...

    def forget(self, tasks: Sequence[Task]) -> None:
        """These tasks were dropped or lost: nothing of them is computed or committed."""
        ...

    def save(self) -> SavedState: ...

    def confirm(self) -> None:
        """What `save` last gave is in its place: nothing older will be loaded again."""
        ...

    def load(self, saved: SavedState) -> None: ...

    def close(self) -> None:
        """The run is over: let go of workers."""
        ...


@runtime_checkable
class PersistentSession(Protocol):
    """A session that loses nothing of a buffer half full, for what arrives there was real work."""

    def keep(self, flow: dict[str, Any]) -> None:
        """An arrival was dealt with, and this is what the flow has come to."""
        ...

    def kept(self) -> dict[str, Any] | None:
        """After `load`: what was kept last, if anything was since that save."""
        ...


@runtime_checkable
class SecureEncodingSession(Protocol):
    """A session whose clients can hide what they send by themselves."""

    def veil(self, hiding: Callable[[], SecureEncoding | None]) -> None:
        """Told once, before anything is published; to be asked anew for each version."""
        ...


class Engine(Protocol):
    """A place where client work can run."""

    @property
    def clients(self) -> int:
        """How many clients there are."""
        ...

    @property
    def availability(self) -> Availability:
        """When they are there."""
        ...

    def initial(self) -> tuple[Vector, Statistics]:
        """The model and running statistics that training starts from."""
        ...

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Rng) -> Session:
        """Begin a run."""
        ...
