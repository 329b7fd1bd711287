"""What every oracle is given, and the plain local descent that most of them share."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from oracles.weights import Weight

Vector: TypeAlias = npt.NDArray[np.float64]


class Task(NamedTuple):
    """One client's work from one version of the model; any (client, version, visit) tuple will do."""

    client: int
    version: int
    visit: int


Step: TypeAlias = Sequence[tuple[int, int, int]]  # the tasks one server step consumed, in order


class Problem(Protocol):
    """The clients' losses and gradients, on minibatches and on all that a client owns."""

    def gradient(self, client: int, visit: int, k: int, x: Vector) -> Vector:
        """At x, on the k-th minibatch of that visit."""
        ...

    def steps(self, client: int, visit: int) -> int:
        """How many minibatches that visit has."""
        ...

    def loss(self, client: int, visit: int, k: int, x: Vector) -> float:
        """At x, on the k-th minibatch of that visit."""
        ...

    def whole_gradient(self, client: int, x: Vector) -> Vector:
        """At x, of the mean loss over all examples of the client."""
        ...


class Run(NamedTuple):
    """A run that an oracle repeats: the clients' losses, their number, the first model, and who did what."""

    problem: Problem
    population: int
    x0: npt.ArrayLike
    steps: Sequence[Step]


def begin(x0: npt.ArrayLike) -> list[Vector]:
    """The history of models, which so far is version 0."""
    return [np.array(x0, dtype=np.float64)]


def require_prompt(steps: Sequence[Step]) -> None:
    """For methods that are defined by rounds: everybody must work from the newest version."""
    if any(version != t for t, step in enumerate(steps) for _, version, _ in step):
        raise ValueError("this method has rounds: every task of step t must start from version t")


def mean_gradient(problem: Problem, client: int, visit: int, x: Vector) -> Vector:
    """Mean of a visit's minibatch gradients, all at x: nothing moves."""
    count = problem.steps(client, visit)
    return sum((problem.gradient(client, visit, k, x) for k in range(count)), 0 * x) / count


def local_sgd(problem: Problem, client: int, visit: int, x: Vector, lr: float) -> Vector:
    """Where plain descent from x ends."""
    y = x.copy()
    for k in range(problem.steps(client, visit)):
        y = y - lr * problem.gradient(client, visit, k, y)
    return y


def mean_change(problem: Problem, models: list[Vector], step: Step, lr: float, weight: Weight) -> Vector:
    """(1/M) sum of w (end - start), the FedOpt papers' sign: the server adds it."""
    t = len(models) - 1
    total = np.zeros_like(models[0])
    for client, version, visit in step:
        start = models[version]
        total += weight(t - version) * (local_sgd(problem, client, visit, start, lr) - start)
    return total / len(step)
