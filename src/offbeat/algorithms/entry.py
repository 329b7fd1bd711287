"""What the catalogue knows of a method."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Concatenate, NamedTuple

import torch

from offbeat import trees
from offbeat.core import AnyAlgorithm, Batch, Batches, Vector, Visit

_PROBE_SIZE = 1009  # of a model to try a method on: as long as nothing else that a method holds


class Setting(NamedTuple):
    """What the system defines: S, K and T."""

    cohort: int  # updates per server step
    steps: int  # local steps per task
    rounds: int  # server steps


@dataclass(frozen=True)
class Method:
    """One method of the catalogue."""

    build: Callable[Concatenate[Setting, ...], AnyAlgorithm]
    summary: str
    paper: str
    dispatch: str  # of the paper's protocol
    weights: str = "constant"  # of stale updates, unless the user says otherwise
    buffer: int | None = None  # of the paper's protocol, where it fixes one
    limit: int | None = None  # of staleness, in the paper's protocol
    theory: str = ""  # the rates that the paper's theorem asks for
    private: tuple[tuple[str, bool | float | str], ...] = ()  # parameters of private runs, unless given
    bare: tuple[tuple[str, bool | float | str], ...] = ()  # and of those without a clip of their own

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The hyperparameters, with defaults."""
        every = inspect.signature(self.build).parameters
        return {name: p for name, p in every.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def vectors(self) -> dict[str, int]:
        """What a round sends and what is kept, in model-sized vectors, read off the method at work."""
        algorithm = self.build(Setting(1, 1, 1))
        x = torch.zeros(_PROBE_SIZE)
        state, memory = algorithm.init(x), algorithm.memory(x)
        visit = Visit(torch.tensor(0), torch.tensor(0))
        empty = Batch((torch.zeros(1),))
        down = up = 0
        for version in range(2 if self.dispatch == "phases" else 1):
            message = algorithm.broadcast(state, version)
            upload, _ = algorithm.local(message, memory, Batches((empty,), (empty,)), visit, _ZeroGradient())
            down += _count_vectors(message)
            up += _count_vectors(upload)
        return {"down": down, "up": up, "client": _count_vectors(memory), "server": _count_vectors(state)}


def _count_vectors(tree: trees.Tree) -> int:
    """Vectors of the model's size; an empty one is a place for one."""
    return sum(leaf.numel() in (0, _PROBE_SIZE) for leaf in trees.leaves(tree))


class _ZeroGradient:
    """The gradient of nothing."""

    def __call__(self, x: Vector, batch: Batch, /) -> Vector:
        return torch.zeros_like(x)

    def with_loss(self, x: Vector, batch: Batch, /) -> tuple[Vector, torch.Tensor]:
        return torch.zeros_like(x), torch.zeros(())

    def descend(self, x: Vector, batch: Batch, lr: float, /) -> Vector:
        return x
