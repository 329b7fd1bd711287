"""Loss and metrics of a model vector, and exponential moving averages of models."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import Vector
from offbeat.data.population import Examples
from offbeat.nn.problem import Problem, Statistics
from offbeat.trees import Tree


@runtime_checkable
class AccumulatingMetric(Protocol):
    """A metric that accumulates over batches, such as those of torchmetrics."""

    def reset(self) -> None: ...

    def update(self, outputs: Any, targets: Any, /) -> None: ...

    def compute(self) -> Any: ...


Metric: TypeAlias = (
    Callable[[Any, Any], Tensor | float] | AccumulatingMetric
)  # outputs, targets -> () or (examples,)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """(examples,) 1 where the largest output is the target."""
    return (outputs.argmax(-1) == targets).double()


@torch.no_grad()
def evaluate(
    problem: Problem,
    x: Vector,
    examples: Examples | tuple[Tree, Tree],
    metrics: Mapping[str, Metric] | None = None,
    *,
    statistics: Statistics | None = None,
    batch_size: int = 1000,
) -> dict[str, float]:
    """The mean loss and the metrics over examples, with the module in evaluation mode."""
    functions: dict[str, Metric] = {"loss": problem.loss, **(metrics or {})}
    totals = dict.fromkeys(functions, 0.0)
    for tally in functions.values():
        if isinstance(tally, AccumulatingMetric):
            tally.reset()
    count = 0
    for inputs, targets in _batches(examples, batch_size):
        size = len(trees.leaves(targets)[0])
        outputs = problem.outputs(x, inputs, statistics)
        for name, function in functions.items():
            if isinstance(function, AccumulatingMetric):
                function.update(outputs, targets)
            else:
                totals[name] += size * float(torch.as_tensor(function(outputs, targets)).double().mean())
        count += size
    return {
        name: float(function.compute()) if isinstance(function, AccumulatingMetric) else totals[name] / count
        for name, function in functions.items()
    }


def ema(average: Vector, x: Vector, decay: float) -> Vector:
    """The exponential moving average of models after one more server step."""
    return decay * average + (1 - decay) * x


def _batches(examples: tuple[Tree, Tree], size: int) -> Iterator[tuple[Tree, Tree]]:
    count = len(trees.leaves(examples[1])[0])
    for start in range(0, count, size):
        inputs, targets = trees.map(lambda leaf, at=start: leaf[at : at + size], tuple(examples))
        yield inputs, targets
