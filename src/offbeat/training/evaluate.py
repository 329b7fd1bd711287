"""Loss and metrics of a model vector, over a test set or client by client; moving averages of models.

A metric is a function of outputs and targets, or an object with `reset`, `update` and `compute`, such as
those of torchmetrics. A function that returns one number for each example is averaged over the examples.
A function that returns a single number, such as an area under the ROC curve, is called once with all
outputs, since its mean over minibatches would be another number.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import Vector
from offbeat.data.population import Examples, ExampleSource, check_examples
from offbeat.data.sources import ClientData
from offbeat.errors import InputError, describe, error_summary
from offbeat.nn.problem import Problem, Statistics
from offbeat.trees import Tree


@runtime_checkable
class AccumulatingMetric(Protocol):
    """A metric that accumulates over batches, such as those of torchmetrics."""

    def reset(self) -> None: ...

    def update(self, outputs: Any, targets: Any, /) -> None: ...

    def compute(self) -> Any: ...


# a function: outputs, targets -> one number for each example, or a single number for all examples
Metric: TypeAlias = Callable[[Any, Any], Tensor | float] | AccumulatingMetric

LOSS = "loss"
_CPU_BATCH, _GPU_BATCH = 100, 1000  # examples that are computed at once
_WORST_SHARE = 0.1  # of the clients
_NOT_DEFINED = re.compile("No (positive|negative) samples")  # how torchmetrics warns


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """(examples,) 1 where the largest output is the target.

    Args:
        outputs: The outputs of the module, with the classes on the last axis.
        targets: The class of each example.
    """
    return (outputs.argmax(-1) == targets).double()


@torch.no_grad()
def evaluate(
    problem: Problem,
    x: Vector,
    examples: Examples | ExampleSource | tuple[Tree, Tree],
    metrics: Mapping[str, Metric] | None = None,
    *,
    statistics: Statistics | None = None,
    batch_size: int | None = None,
) -> dict[str, float]:
    """The mean loss and the metrics over examples, with the module in evaluation mode.

    Args:
        problem: The module and the loss.
        x: The model.
        examples: The test set.
        metrics: Functions of outputs and targets, or torchmetrics objects, by name. NaN: the metric is not
            defined on these examples.
        statistics: The running statistics of a module that has them.
        batch_size: The number of examples that are computed at once; no value depends on it. None: 100 on a
            CPU, whose caches hold what its layers compute of so many, and 1,000 on a GPU.
    """
    meters = _meters(problem, metrics)
    for inputs, targets in _batches(examples, batch_size, problem.device):
        outputs = problem.outputs(x, inputs, statistics)
        for meter in meters.values():
            meter.update(outputs, targets)
    return {name: meter.compute() for name, meter in meters.items()}


class ClientMetrics(NamedTuple):
    """Metrics over all test examples, and of each client.

    Attributes:
        pooled: Each metric over all test examples.
        clients: Each metric by name of the client; NaN: it is not defined there.
        lower_is_better: The metrics whose worst values are the largest.
    """

    pooled: dict[str, float]
    clients: dict[str, dict[str, float]]
    lower_is_better: frozenset[str] = frozenset({LOSS})

    def summary(self) -> dict[str, float]:
        """Each metric over all examples, and its mean, worst tenth and spread over clients.

        The worst tenth is the mean over the tenth of the clients (at least one) with the worst values, and
        the spread is the standard deviation over clients. Clients on which a metric is not defined, such as
        an area under the ROC curve with one class, do not count.
        """
        found: dict[str, float] = {}
        for name, value in self.pooled.items():
            each = np.array([one for one in self.clients[name].values() if not np.isnan(one)])
            found[name] = value
            found |= summarise_clients(name, each, lower_is_better=name in self.lower_is_better)
        return found


def summarise_clients(name: str, values: Any, *, lower_is_better: bool) -> dict[str, float]:
    """The mean, worst tenth and spread of a metric over clients, by the names that records use."""
    if not len(values):
        return dict.fromkeys((f"{name}_mean", f"{name}_worst_tenth", f"{name}_spread"), math.nan)
    ordered = np.sort(values)[::-1] if lower_is_better else np.sort(values)
    count = max(1, round(_WORST_SHARE * len(ordered)))
    return {
        f"{name}_mean": float(ordered.mean()),
        f"{name}_worst_tenth": float(ordered[:count].mean()),
        f"{name}_spread": float(ordered.std()),
    }


@torch.no_grad()
def evaluate_clients(
    problem: Problem,
    x: Vector,
    data: ClientData,
    metrics: Mapping[str, Metric] | None = None,
    *,
    statistics: Statistics | None = None,
    batch_size: int | None = None,
    lower_is_better: Collection[str] = (),
    personal: Callable[[str], Statistics] | None = None,
) -> ClientMetrics:
    """The mean loss and the metrics over all test examples, and on the test examples of each client.

    Args:
        problem: The module and the loss.
        x: The model.
        data: The test sets of the clients; one without examples is left out.
        metrics: As for `evaluate`.
        statistics: The running statistics of a module that has them.
        batch_size: As for `evaluate`.
        lower_is_better: Names of metrics whose worst values are the largest, beside the loss.
        personal: The personal layers of a client by its name; None: those of the module, for each client.
    """
    pooled = _meters(problem, metrics)
    clients: dict[str, dict[str, float]] = {name: {} for name in pooled}
    for client in data.names or ():
        examples = data.examples(client)
        if not examples.total:
            continue
        own = _meters(problem, metrics)
        model = problem.bind(x, statistics, personal(client) if personal else None)
        for inputs, targets in _batches(examples, batch_size, problem.device):
            outputs = model(inputs)
            for meter in (*own.values(), *pooled.values()):
                meter.update(outputs, targets)
        for name, meter in own.items():
            try:
                clients[name][client] = meter.compute()
            except InputError:  # the pooled metric fails as well unless the client merely lacks a class
                clients[name][client] = math.nan
    if not any(clients.values()):
        raise InputError("no client has test examples: give at least one of them some.")
    values = {name: meter.compute() for name, meter in pooled.items()}
    return ClientMetrics(values, clients, frozenset({LOSS, *lower_is_better}))


def ema(average: Vector, x: Vector, decay: float) -> Vector:
    """The exponential moving average of models after one more server step.

    Args:
        average: The average so far.
        x: The newest model.
        decay: The weight of the average so far.
    """
    return decay * average + (1 - decay) * x


def _meters(problem: Problem, metrics: Mapping[str, Metric] | None) -> "dict[str, _Meter]":
    if not isinstance(metrics, Mapping | None):
        raise InputError(
            f"the metrics are {describe(metrics)}: give a dictionary of functions by name, such as "
            '{"accuracy": offbeat.accuracy}.'
        )
    meters: dict[str, _Meter] = {LOSS: _MeanLoss(LOSS, problem.loss)}
    for name, metric in (metrics or {}).items():
        if isinstance(metric, AccumulatingMetric):
            meters[name] = _Accumulator(name, metric, problem.device)
        elif callable(metric):
            meters[name] = _FunctionMeter(name, metric)
        else:
            raise InputError(
                f"the metric '{name}' is a {type(metric).__name__}: give a function of outputs and targets, "
                "or an object with reset, update and compute."
            )
    return meters


class _Meter(Protocol):
    """Collects one metric over batches."""

    def update(self, outputs: Any, targets: Any) -> None: ...

    def compute(self) -> float: ...


class _MeanLoss:
    """The mean over examples; a loss of one number for each batch is a mean over that batch."""

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        self._name, self._function = name, function
        self._total, self._count = 0.0, 0

    def update(self, outputs: Any, targets: Any) -> None:
        size = len(trees.leaves(targets)[0])
        self.add(_tensor(self._function(outputs, targets)), size)

    def add(self, values: Tensor, size: int) -> None:
        self._total += size * float(values.double().mean())
        self._count += size

    def compute(self) -> float:
        return self._total / self._count


class _FunctionMeter:
    """A function of outputs and targets.

    The first batch shows whether it returns a number for each example. If it does not, or fails there (a
    batch may lack a class), all outputs are collected and the function is called once.
    """

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        self._name, self._function = name, function
        self._mean: _MeanLoss | None = None
        self._collected: list[tuple[Tree, Tree]] = []

    def update(self, outputs: Any, targets: Any) -> None:
        size = len(trees.leaves(targets)[0])
        if self._mean is None and not self._collected:
            try:
                values = _tensor(self._function(outputs, targets))
            except Exception:  # it may work with all outputs; if not, `compute` says why
                values = torch.tensor(0.0)
            if values.ndim and len(values) == size:
                self._mean = _MeanLoss(self._name, self._function)
                self._mean.add(values, size)
                return
        if self._mean is not None:
            self._mean.update(outputs, targets)
        else:
            self._collected.append(trees.map(lambda leaf: leaf.cpu(), (outputs, targets)))

    def compute(self) -> float:
        if self._mean is not None:
            return self._mean.compute()
        outputs, targets = trees.map(lambda *leaves: torch.cat(leaves), *self._collected)
        return _number(self._name, lambda: self._function(outputs, targets))


class _Accumulator:
    """A copy of a metric that accumulates by itself, such as one of torchmetrics."""

    def __init__(self, name: str, metric: AccumulatingMetric, device: torch.device) -> None:
        self._name = name
        self._metric = copy.deepcopy(metric)
        if isinstance(self._metric, torch.nn.Module):
            self._metric.to(device)
        self._metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        wide = trees.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, outputs)
        _attempt(self._name, lambda: self._metric.update(wide, targets))

    def compute(self) -> float:
        return _number(self._name, self._metric.compute)


def _number(name: str, compute: Callable[[], Any]) -> float:
    """One number; NaN if the metric warns that it is not defined on these examples."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = _attempt(name, compute)
    for each in caught:
        if each.category.__name__ == "UndefinedMetricWarning" or _NOT_DEFINED.match(str(each.message)):
            return math.nan
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if isinstance(value, Mapping):
        raise InputError(f"the metric '{name}' gives several values: give each a name of its own in metrics.")
    try:
        number = _tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"the metric '{name}' gives a {type(value).__name__}: return one number, or one for each example."
        ) from None
    if number.numel() != 1:
        raise InputError(
            f"the metric '{name}' gives {number.numel()} numbers: return one number, or one for each example."
        )
    return float(number)


def _tensor(value: Any) -> Tensor:
    """A tensor of the same precision; torch would round a Python number to single precision."""
    return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))


def _attempt(name: str, compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except Exception as error:
        raise InputError(
            f"the metric '{name}' could not be computed ({error_summary(error)}): check that it suits "
            "the outputs of the module and the classes of the test set."
        ) from error


def _batches(
    examples: Examples | ExampleSource | tuple[Tree, Tree], size: int | None, device: torch.device
) -> Iterator[tuple[Tree, Tree]]:
    if size is None:
        size = _CPU_BATCH if device.type == "cpu" else _GPU_BATCH
    if isinstance(examples, ExampleSource) and not isinstance(examples, Examples):
        for start in range(0, examples.total, size):
            yield examples.gather(np.arange(start, min(start + size, examples.total))).to(device)
        return
    examples = check_examples(examples)
    count = examples.total
    for start in range(0, count, size):
        inputs, targets = trees.map(lambda leaf, at=start: leaf[at : at + size].to(device), tuple(examples))
        yield inputs, targets
