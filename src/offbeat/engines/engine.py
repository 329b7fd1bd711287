"""The protocols of an engine, simulated or deployed, as the training loop uses them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from offbeat.aggregate.mean import SecureEncoding
from offbeat.core import AnyAlgorithm, SavedState, Task, Vector
from offbeat.nn.problem import Statistics
from offbeat.schedule.availability import Availability
from offbeat.schedule.clock import Timeline
from offbeat.schedule.rng import Rng
from offbeat.trees import Tree


class ClientUpdates(NamedTuple):
    """The uploads of tasks, and the running statistics of their clients; leaves (tasks, ...)."""

    uploads: Tree
    statistics: Statistics


class Session(Timeline, Protocol):
    """One run on an engine: it keeps time, holds the tasks in flight, and computes the local work."""

    def publish(self, version: int, algorithm: AnyAlgorithm, message: Tree, statistics: Statistics) -> None:
        """Publish a version, and the algorithm whose local half clients run from now on."""
        ...

    def gather(self, tasks: Sequence[Task], version: int) -> ClientUpdates:
        """The uploads of tasks that arrived and were accepted; commits their clients' memory."""
        ...

    def forget(self, tasks: Sequence[Task]) -> None:
        """Drop tasks that were discarded or lost: nothing of them is computed or committed."""
        ...

    def save(self) -> SavedState: ...

    def confirm(self) -> None:
        """The state that `save` last gave is on the disk: no older one will be loaded."""
        ...

    def load(self, saved: SavedState) -> None: ...

    def close(self) -> None:
        """Release the workers of the run."""
        ...


@runtime_checkable
class PersistentSession(Protocol):
    """A session that can resume in the middle of a buffer, because its uploads were real work."""

    def save_progress(self, scheduler: dict[str, Any]) -> None:
        """Store the scheduler's state after each arrival."""
        ...

    def saved_progress(self) -> dict[str, Any] | None:
        """After `load`: the scheduler's state that was stored last, if any was since that save."""
        ...


@runtime_checkable
class StreamingSession(Protocol):
    """A session that can hand over the uploads of a buffer in pieces, so that few are in memory at once."""

    @property
    def streams(self) -> bool:
        """Whether it does; not if the tasks of a buffer are computed together."""
        ...


@runtime_checkable
class GrowingSession(Protocol):
    """A session that can hand over the first uploads of a buffer while it computes the others."""

    @property
    def grows(self) -> bool:
        """Whether it does; not if it waits for all of them anyway."""
        ...

    def gather_growing(self, tasks: Sequence[Task], version: int) -> Iterator[ClientUpdates]:
        """As `gather`, for the first of the tasks, for more of them each time, and at last for all."""
        ...


@runtime_checkable
class PersonalSession(Protocol):
    """A session that has its clients' personal layers, since it simulates the clients."""

    def personal(self, client: int) -> Statistics:
        """The personal layers of a client; the initial ones before its first visit."""
        ...


@runtime_checkable
class TunedSession(Protocol):
    """A session that chooses how to compute by the length of the run."""

    def expect(self, buffer: int, rounds: int) -> None:
        """The run has that many server steps with that many updates each; called before the first."""
        ...

    def execution(self) -> dict[str, Any] | None:
        """What was chosen, and by which figures; None where there was no choice, or not yet."""
        ...


@runtime_checkable
class SecureEncodingSession(Protocol):
    """A session whose clients encode their uploads for secure aggregation themselves."""

    def set_secure_encoding(self, encoding: Callable[[], SecureEncoding | None], private: bool) -> None:
        """Called once before the first version is published; `encoding` is to be called for each version.

        In a `private` run uploads are clipped when they are summed. None may be rejected for its norm: what
        one client uploads would decide about the upload of another, which the noise does not cover.
        """
        ...


class Engine(Protocol):
    """Where the clients' local work runs."""

    @property
    def clients(self) -> int:
        """The number of clients."""
        ...

    @property
    def availability(self) -> Availability:
        """When clients are available."""
        ...

    def initial(self) -> tuple[Vector, Statistics]:
        """The model and running statistics that training starts from."""
        ...

    def open(self, algorithm: AnyAlgorithm, seed: int, rng: Rng) -> Session:
        """Start a run."""
        ...
