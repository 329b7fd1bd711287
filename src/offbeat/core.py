"""The types that every part shares, and the loops that algorithms are written with.

A model is one flat vector. An algorithm is six pure functions over vectors: the server's initial state
(`init`), a client's initial memory (`memory`), what the server sends (`broadcast`), a client's local work
(`local`), the server's step with the mean of the uploads (`step`), and an optional first step in which every
client takes part (`warmup`).

Torch is imported only in functions that create tensors, so that methods can be listed and schedules simulated
without loading it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ForwardRef, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from offbeat import trees
from offbeat.errors import InputError
from offbeat.trees import Tree

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = ForwardRef("Tensor", module="torch")  # torch takes a second to import

Vector: TypeAlias = Tensor  # (d,)
Rate: TypeAlias = float | Tensor  # a learning rate; as a tensor () it may differ between mapped tasks


class Batch(NamedTuple):
    """One minibatch.

    Attributes:
        data: Inputs and targets, whose first axis is the examples.
        mask: False on examples that are padding; None: all are real.
    """

    data: Tree  # leaves (examples, ...)
    mask: Tensor | None = None  # (examples,)

    @property
    def active(self) -> Tensor | None:
        """A scalar, false if the whole batch is padding; None: nothing is padded."""
        return None if self.mask is None else self.mask.any()


class Batches(NamedTuple):
    """The minibatches of one task, in order.

    Attributes:
        items: The minibatches in order.
        whole: All examples of the client once, if the method asks for them with `Traits.full_pass`.
    """

    items: tuple[Batch, ...]
    whole: tuple[Batch, ...] = ()

    @property
    def steps(self) -> Tensor | int:
        """The number of minibatches that are not padding."""
        counts = [1 if batch.active is None else batch.active.long() for batch in self.items]
        return sum(counts)


class Gradient(Protocol):
    """The gradient of a minibatch's loss at x."""

    def __call__(self, x: Vector, batch: Batch, /) -> Vector: ...

    def with_loss(self, x: Vector, batch: Batch, /) -> tuple[Vector, Tensor]:
        """The gradient and the loss."""
        ...

    def descend(self, x: Vector, batch: Batch, lr: "Rate", /) -> Vector:
        """One SGD step, x - lr * gradient; an `x` that this method returned may be overwritten."""
        ...


class Task(NamedTuple):
    """One client's work from one version of the model; `visit` counts its tasks from 0.

    Attributes:
        client: The number of the client.
        version: The version of the model from which it starts.
        visit: How many tasks the client was given before.
    """

    client: int
    version: int
    visit: int


class Visit(NamedTuple):
    """What a client knows about its task's place in the run, as scalars that `vmap` can map over.

    Attributes:
        version: The version of the model from which the task starts.
        staleness: How many server steps were taken since that version when the update is used.
        rank: How many tasks of this version started before, for `Traits.reads_rank`.
        key: An integer to key random draws of the task by, for `Traits.reads_key`.
    """

    version: Tensor  # ()
    staleness: Tensor  # ()
    rank: Tensor | tuple[()] = ()
    key: Tensor | tuple[()] = ()  # () int64


class Cohort(NamedTuple):
    """What the server knows about a full buffer.

    Attributes:
        version: The server steps taken so far.
        population: The number of all clients.
        staleness: The staleness of each update.
        weights: The weight of each update.
    """

    version: int
    population: int
    staleness: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def share(self) -> float:
        """The size of the cohort as a fraction of the population."""
        return len(self.staleness) / self.population

    @property
    def mean_weight(self) -> float:
        """The mean of the weights."""
        return sum(self.weights) / len(self.weights)


class SamplingEvent(NamedTuple):
    """How one client's contributions to releases are drawn: `times` independent draws.

    With `slots`, each draw chooses one of that number of releases; with `rate`, each draw decides with that
    probability whether the client contributes to one release.
    """

    times: int
    rate: float | None = None
    slots: int | None = None


class SavedState(NamedTuple):
    """A part of a checkpoint: values for JSON, and tensors by name."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


State = TypeVar("State")
Message = TypeVar("Message")
Memory = TypeVar("Memory")
Upload = TypeVar("Upload")


class Algorithm(Protocol[State, Message, Memory, Upload]):
    """A federated optimiser; every method is pure, and `local` is written for one client.

    State, message, memory and upload are trees of tensors; the state has a field `x`, the model.
    An update is the start of the local work minus its end, so the server subtracts it.
    """

    def init(self, x: Vector) -> State: ...

    def memory(self, x: Vector) -> Memory: ...

    def broadcast(self, state: State, version: int) -> Message: ...

    def local(
        self, message: Message, memory: Memory, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Memory]: ...

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State: ...

    def warmup(self) -> Self | None:
        """The algorithm for one step with all clients before training; None: there is no such step."""
        ...


class Traits(NamedTuple):
    """What an algorithm needs or guarantees beyond its six functions, stated in a field `traits`.

    Attributes:
        full_pass: `local` reads `Batches.whole`, all examples of the client.
        repeats_batches: `local` takes two gradients of one minibatch, so the loss must be repeatable.
        two_phases: Each cohort is given a task twice in a row, in an even and in the following odd version.
        reads_staleness: `local` reads `Visit.staleness`, which is known only when the task arrives.
        reads_rank: `local` reads `Visit.rank`, which only a simulation of all tasks knows.
        reads_key: `local` reads `Visit.key`.
        span: The staleness of an accepted update must be below this number; None: any staleness.
        bounds: Fields of the upload whose norm has a known bound.
        shares: The shares of fields in the sensitivity under noise; the other fields have equal shares.
    """

    full_pass: bool = False
    repeats_batches: bool = False
    two_phases: bool = False
    reads_staleness: bool = False
    reads_rank: bool = False
    reads_key: bool = False
    span: int | None = None
    bounds: Mapping[str, float] = MappingProxyType({})
    shares: Mapping[str, float] = MappingProxyType({})


AnyAlgorithm: TypeAlias = Algorithm[Any, Any, Any, Any]
Carry = TypeVar("Carry")


def scan(step: Callable[[Carry, Batch], Carry], carry: Carry, batches: Batches) -> Carry:
    """Fold `step` over the minibatches; those that are all padding have no effect.

    Args:
        step: The function from a value and a minibatch to the next value.
        carry: The first value.
        batches: The minibatches.
    """
    for batch in batches.items:
        moved = step(carry, batch)
        active = batch.active
        carry = moved if active is None else where(active, moved, carry)
    return carry


def where(condition: Tensor, yes: Carry, no: Carry) -> Carry:
    """`torch.where` over trees."""
    chosen: Carry = trees.map(lambda a, b: a.where(condition, b), yes, no)
    return chosen


def zeros_like(x: Vector) -> Vector:
    """A vector of zeros."""
    return x.new_zeros(x.shape)


def descend(x: Vector, direction: Vector, lr: Rate) -> Vector:
    """`x - lr * direction`."""
    if isinstance(lr, float | int):
        return x.sub(direction, alpha=lr)
    return x - lr * direction


class LocalOptimizer(Protocol):
    """Turns the gradients of one task into steps; its state is reset for each task."""

    def init(self, x: Vector) -> Tree: ...

    def __call__(self, x: Vector, gradient: Vector, state: Any, lr: Rate) -> tuple[Vector, Any]:
        """The next x and state."""
        ...


class LocalRule(NamedTuple):
    """An optimiser with its rate and a bound on gradient norms, which `sgd` accepts in place of a rate."""

    lr: Rate
    optimizer: LocalOptimizer
    max_norm: float | None = None

    def step(self, x: Vector, state: Any, gradient: Vector) -> tuple[Vector, Any]:
        """The next x and the optimiser's next state."""
        if self.max_norm is not None:
            gradient = gradient * (self.max_norm / gradient.norm()).clamp_max(1.0)
        return self.optimizer(x, gradient, state, self.lr)


def sgd(
    x: Vector,
    batches: Batches,
    grad: Gradient | Callable[[Vector, Batch], Vector],
    lr: Rate | LocalRule,
) -> Vector:
    """Run local SGD, or the local optimiser that comes with the rate.

    Args:
        x: The model to start from.
        batches: The minibatches of the task.
        grad: The gradient of a minibatch, or another function of model and minibatch, such as a gradient with
            a proximal term.
        lr: The learning rate, or a local optimiser.
    """
    if isinstance(lr, LocalRule):
        rule = lr
        start = (x, rule.optimizer.init(x))
        return scan(lambda carry, batch: rule.step(*carry, grad(carry[0], batch)), start, batches)[0]
    descend = getattr(grad, "descend", None) or (lambda y, batch, lr: y - lr * grad(y, batch))
    return scan(lambda y, batch: descend(y, batch, lr), x, batches)


def traits_of(algorithm: AnyAlgorithm) -> Traits:
    """The `traits` of an algorithm, or the defaults if it has none."""
    traits = getattr(algorithm, "traits", Traits())
    if not isinstance(traits, Traits):
        raise InputError(f"the traits of {type(algorithm).__name__} must be a Traits value, not {traits!r}.")
    return traits


def full_gradient(x: Vector, batches: Batches, grad: Gradient) -> Vector:
    """The gradient at x of the client's loss over all its examples."""
    total, count = zeros_like(x), x.new_zeros(())
    for batch in batches.whole:
        size = len(trees.leaves(batch.data)[0]) if batch.mask is None else batch.mask.sum()
        total = total + size * grad(x, batch)
        count = count + size
    return total / count
