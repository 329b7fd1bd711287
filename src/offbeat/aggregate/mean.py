"""The interface between the training loop and aggregation, checks and sums of uploads, and the plain mean."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.uploads import ClippingBounds, NoiseRequest
from offbeat.core import AnyAlgorithm, Cohort, SavedState, Task, Vector
from offbeat.errors import DivergedError
from offbeat.privacy.ledger import is_simulated
from offbeat.schedule.availability import Always, Availability
from offbeat.schedule.dispatch import Dispatch
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import StalenessWeights
from offbeat.trees import Tree


class AggregationContext(NamedTuple):
    """The run that an aggregation is opened for."""

    algorithm: AnyAlgorithm
    x: Vector  # the initial model
    dispatch: Dispatch
    weights: StalenessWeights
    buffer: int
    population: int
    rounds: int
    max_staleness: float
    seed: int
    availability: Availability = Always()
    answers: int | None = None  # numbers beside each upload in a private sum; None: the sum is not private


class SecureEncoding(NamedTuple):
    """How clients encode what they send for secure aggregation."""

    facts: dict[str, Any]  # what a client that starts from this version needs to know, as JSON
    examine: Callable[[Task, bytes, bytes], None]  # raises for a seed or a signature that cannot be used


class PrivacyCost(NamedTuple):
    """The privacy cost of a run so far for any one client."""

    epsilon: float
    delta: float
    releases: int
    terms: str  # the assumptions, in a sentence
    unamplified: float | None = None  # epsilon against those who see who contributed when; None: the same

    @property
    def simulated(self) -> bool:
        """Whether epsilon assumes amplification that does not hold, and so is not a guarantee."""
        return is_simulated(self.terms)

    def as_json(self) -> dict[str, Any]:
        """As JSON, which has no infinity."""
        return {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in self._asdict().items()
        }


class Aggregation(Protocol):
    """The aggregation of one run; it can be saved between two server steps."""

    def piece(self, numbers: int) -> int | None:
        """How many uploads of `numbers` numbers to collect in one call; None: all of a server step.

        Every engine collects the same pieces in the same order, so that the sums are the same to the bit.
        """
        ...

    def collect(self, uploads: Tree, tasks: Sequence[Task], cohort: Cohort, onto: Tree | None = None) -> Tree:
        """The sum of these uploads (leaves stacked over tasks); sums of several calls add up.

        If a server step is collected in pieces, `onto` is the sum of the earlier pieces, and is overwritten.
        """
        ...

    def release(self, total: Tree, cohort: Cohort) -> Tree:
        """The mean of one server step, from the sum of all uploads that were collected for it."""
        ...

    @property
    def private(self) -> bool:
        """Whether uploads may only be used through `release`."""
        ...

    @property
    def hides_sample(self) -> bool:
        """Whether the sample of clients must stay secret."""
        ...

    def secure_encoding(self) -> SecureEncoding | None:
        """How clients of this version encode uploads; None: they send them in the clear."""
        ...

    def ended(self) -> str | None:
        """Why there may be no further release, in a sentence; None if there may be."""
        ...

    def spent(self) -> Callable[[], PrivacyCost | None]:
        """A function that computes the privacy spent up to now, which is slow; its result may be None."""
        ...

    def save(self) -> SavedState: ...

    def load(self, saved: SavedState) -> None: ...


class Aggregator(Protocol):
    """A kind of aggregation, with its settings."""

    @property
    def participation(self) -> Participation:
        """How often a client may contribute, which the loop keeps to."""
        ...

    def open(self, context: AggregationContext) -> Aggregation:
        """Begin a run; raises if its assumptions do not hold."""
        ...


class RunningSum(Protocol):
    """The sums of one run; they can be saved between two server steps."""

    @property
    def largest(self) -> float:
        """The largest number that an upload may hold."""
        ...

    def piece(self, numbers: int) -> int | None:
        """How many uploads of `numbers` numbers are added at a time; None: all of a server step."""
        ...

    def total(
        self,
        payload: Tree,
        tasks: Sequence[Task],
        cohort: Cohort,
        dtype: torch.dtype | None = None,
        noise: NoiseRequest | None = None,
        onto: Tree | None = None,
    ) -> Tree:
        """The weighted sum over tasks, from leaves (tasks, ...) to leaves (...).

        It is computed in `dtype`; None: in that of each leaf. `noise` is the noise that a helper adds.
        `onto` is the sum of earlier pieces, to which this one is added in place.
        """
        ...

    def secure_encoding(self, clip: ClippingBounds | None = None) -> SecureEncoding | None:
        """How clients clip and encode what is summed; None: they do not."""
        ...

    def save(self) -> SavedState: ...

    def load(self, saved: SavedState) -> None: ...


class Summation(Protocol):
    """A kind of sum, with its settings."""

    @property
    def secret(self) -> bool:
        """Whether no server sees a single upload."""
        ...

    @property
    def rounding(self) -> float:
        """The largest rounding error of a coordinate of an upload, by which norms can grow."""
        ...

    def open(self, context: AggregationContext) -> RunningSum:
        """Begin a run; raises if it cannot be summed in this way."""
        ...


_ADDED = 1 << 22  # numbers that are added at a time, and converted to another dtype for it
_ADDED_ON_GPU = 1 << 26  # where each addition takes several launches


@dataclass(frozen=True)
class PlainSum:
    """The server sees every upload and adds them."""

    _on_gpu: bool = field(default=False, repr=False)

    @property
    def secret(self) -> bool:
        return False

    @property
    def rounding(self) -> float:
        return 0.0

    @property
    def largest(self) -> float:
        return math.inf

    def open(self, context: AggregationContext) -> "PlainSum":
        return PlainSum(context.x.is_cuda)

    def piece(self, numbers: int) -> int:
        return max(1, (_ADDED_ON_GPU if self._on_gpu else _ADDED) // max(1, numbers))

    def total(
        self,
        payload: Tree,
        tasks: Sequence[Task],
        cohort: Cohort,
        dtype: torch.dtype | None = None,
        noise: NoiseRequest | None = None,
        onto: Tree | None = None,
    ) -> Tree:
        assert noise is None  # `Private` asks for it under secure aggregation only

        def add(stack: Tensor, earlier: Tensor | None = None) -> Tensor:
            own = stack.dtype if stack.is_floating_point() else torch.get_default_dtype()
            if not len(stack):  # nothing has arrived for a timed release
                return stack.new_zeros(stack.shape[1:], dtype=dtype or own)
            # from pinned memory, since another copy would wait for all that is queued on a GPU
            weights = torch.tensor(cohort.weights, dtype=dtype or own, pin_memory=stack.is_cuda)
            weights = weights.to(stack.device, non_blocking=True)
            rows = stack.reshape(len(stack), -1)
            # rows of another dtype are converted a few at a time, so that no second copy of all exists
            count = len(rows) if own == weights.dtype else self.piece(rows.shape[1])
            total = None if earlier is None else earlier.view(-1)
            for start in range(0, len(rows), count):
                piece = slice(start, start + count)
                some = rows[piece].to(weights.dtype)
                # row after row onto the sum, as one product of all rows does
                total = weights[piece] @ some if total is None else total.addmv_(some.T, weights[piece])
            assert total is not None
            return total.view(stack.shape[1:])

        return trees.map(add, payload) if onto is None else trees.map(add, payload, onto)

    def secure_encoding(self, clip: ClippingBounds | None = None) -> None:
        return None

    def save(self) -> SavedState:
        return SavedState({}, {})

    def load(self, saved: SavedState) -> None:
        pass


class FiniteCheck:
    """Whether the uploads and the model of a server step are finite; on a GPU without waiting for it."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._tasks: list[Task] = []
        self._rows: list[tuple[Tensor, tuple[Task, ...]]] = []  # uploads that may not be finite
        self._finite: list[Tensor] = []  # whether they are
        self._copied: torch.cuda.Event | None = None

    def add_uploads(self, uploads: Tree, tasks: tuple[Task, ...]) -> None:
        """Check these uploads as well."""
        self._tasks.extend(tasks)
        for leaf in trees.leaves(uploads) if tasks else ():
            rows = leaf.reshape(len(tasks), -1)
            self._rows.append((rows, tasks))
            # one pass; if a sum overflows, every number is checked
            self._finite.append(torch.isfinite(rows.sum(1)).all())

    def add_model(self, x: Vector) -> None:
        """Check the model that the uploads led to as well, and have the result sent to the CPU."""
        flags = torch.stack([*self._finite, torch.isfinite(x).all()])
        if not x.is_cuda:
            self._flags = flags
            return
        self._flags = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
        self._flags.copy_(flags, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def check_uploads(self, where: str | None = None) -> None:
        """Raise if an upload is NaN or infinite, before the state is changed."""
        bad = set()
        for (rows, tasks), finite in zip(self._rows, self._finite, strict=True):
            if bool(finite):
                continue
            each = torch.isfinite(rows).all(1).tolist()
            bad |= {task for task, good in zip(tasks, each, strict=True) if not good}
        if bad:
            where = where or f"at server step {self._step}: lower the rates"
            raise DivergedError(f"the update of {client_names(bad)} became NaN or infinite {where}.")
        self._rows, self._finite = [], []

    def settle(self) -> None:
        """Wait for the result, and raise if something was not finite."""
        if self._copied is not None:
            self._copied.synchronize()
        if bool(self._flags.all()):
            self._rows, self._finite = [], []  # which a snapshot would hold as long as it is kept
            return
        self.check_uploads()
        if not self._flags[-1]:
            raise DivergedError(
                f"the model became NaN or infinite at server step {self._step} "
                f"(its updates came from {client_names(self._tasks)}): lower the rates."
            )


def client_names(tasks: Iterable[Task]) -> str:
    """The clients of these tasks, as text."""
    clients = sorted({task.client for task in tasks})
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"


@dataclass(frozen=True)
class Mean:
    """The sum of weighted uploads divided by their number, so that its sensitivity is known.

    Attributes:
        summation: How uploads are summed: plainly, or by secure aggregation.
    """

    summation: Summation = PlainSum()

    @property
    def participation(self) -> Participation:
        return Participation()

    def open(self, context: AggregationContext) -> "MeanAggregation":
        return MeanAggregation(self.summation.open(context), self.summation.secret)


@dataclass(frozen=True)
class MeanAggregation:
    """The means of one run."""

    summing: RunningSum
    private: bool  # under secure aggregation clients may send nothing beside the sum

    def piece(self, numbers: int) -> int | None:
        return self.summing.piece(numbers)

    def collect(self, uploads: Tree, tasks: Sequence[Task], cohort: Cohort, onto: Tree | None = None) -> Tree:
        return self.summing.total(uploads, tasks, cohort, onto=onto)

    def release(self, total: Tree, cohort: Cohort) -> Tree:
        return trees.map(lambda leaf: leaf / len(cohort.weights), total)

    @property
    def hides_sample(self) -> bool:
        return False

    def secure_encoding(self) -> SecureEncoding | None:
        return self.summing.secure_encoding()

    def ended(self) -> None:
        return None

    def spent(self) -> Callable[[], None]:
        return lambda: None

    def save(self) -> SavedState:
        return self.summing.save()

    def load(self, saved: SavedState) -> None:
        self.summing.load(saved)
