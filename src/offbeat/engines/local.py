"""One task's local work as a function of tensors alone, which can be mapped over clients or captured."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from offbeat import draws, trees
from offbeat.core import AnyAlgorithm, Batch, Batches, Task, wants_whole
from offbeat.engines.places import Places, pad
from offbeat.engines.work import Results, Start, key_of, take
from offbeat.gradient import TaskGradient
from offbeat.population.population import Indices, Population
from offbeat.problem import Differentiate, Problem
from offbeat.trees import Tree

log = logging.getLogger(__name__)

Local: TypeAlias = Callable[["Inputs"], Results]


class Inputs(NamedTuple):
    """All that tasks depend on; every leaf of both is stacked over tasks, or of one task."""

    start: Start
    key: Tensor  # for layers that draw
    places: dict[str, tuple[Tensor, ...]]  # field of Batches -> places, and a mask if any is padding


class Drawn(NamedTuple):
    """What is drawn for tasks: keys, the examples of minibatches, and all of them where that is wanted."""

    keys: list[int]
    items: list[list[Indices]]
    whole: list[list[Indices]]

    @classmethod
    def of(cls, algorithm: AnyAlgorithm, tasks: Sequence[Task], population: Population, seed: int) -> "Drawn":
        """What these tasks train on."""
        whole = wants_whole(algorithm)
        return cls(
            [key_of(draws.torch_seed(seed, "module", task.client, task.visit)) for task in tasks],
            [population.indices(task.client, task.visit, seed) for task in tasks],
            [population.everything(task.client) for task in tasks] if whole else [],
        )

    def pick(self, rows: Sequence[int]) -> dict[str, Places]:
        """Those of some rows, padded."""
        parts = {"items": self.items, "whole": self.whole}
        return {name: pad([part[row] for row in rows]) for name, part in parts.items() if part}


def inputs(
    starts: Sequence[Start], keys: Sequence[int], places: dict[str, Places], device: torch.device
) -> Inputs:
    """Stacked over tasks, on the device; what is not there yet is sent without waiting."""
    visits = trees.over(lambda leaf: send(leaf, device), trees.stack([start.visit for start in starts]))
    message, statistics, memory = trees.stack([start[:3] for start in starts])
    key = send(torch.tensor(keys), device)
    return Inputs(Start(message, statistics, memory, visits), key, _sent(places, device))


def rows_of(
    starts: Sequence[Start], keys: Sequence[int], places: dict[str, Places], device: torch.device
) -> list[Inputs]:
    """The same task by task, with nothing copied that is on the device already."""
    visits = trees.over(lambda leaf: send(leaf, device), trees.stack([start.visit for start in starts]))
    moved, key = _sent(places, device), send(torch.tensor(keys), device)

    def row(tree: Tree, number: int) -> Tree:
        return trees.over(lambda leaf: leaf[number], tree)

    return [
        Inputs(start._replace(visit=row(visits, number)), key[number], row(moved, number))
        for number, start in enumerate(starts)
    ]


def _sent(places: dict[str, Places], device: torch.device) -> dict[str, tuple[Tensor, ...]]:
    return {
        name: tuple(
            send(torch.from_numpy(part), device)
            for part in ((each.places,) if each.full else (each.places, each.mask))
        )
        for name, each in places.items()
    }


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; from pinned memory, since a copy from any other would wait for all that is queued."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def local_work(
    algorithm: AnyAlgorithm, problem: Problem, population: Population, differentiate: Differentiate
) -> Local:
    """The work of one task."""

    def one(given: Inputs) -> Results:
        start = given.start
        batches = Batches(
            **{name: _unstack(population, problem, *part) for name, part in given.places.items()}
        )
        grad = TaskGradient(problem, differentiate, problem.with_keys(start.statistics, given.key))
        upload, memory = algorithm.local(start.message, start.memory, batches, start.visit, grad)
        return Results(upload, memory, problem.without_keys(grad.statistics))

    return one


def _unstack(
    population: Population, problem: Problem, places: Tensor, mask: Tensor | None = None
) -> tuple[Batch, ...]:
    """(steps, examples) places to one minibatch per step."""
    data = take(population, places, problem)
    return tuple(
        Batch(trees.over(lambda leaf, k=k: leaf[k], data), None if mask is None else mask[k])
        for k in range(len(places))
    )


class Padding:
    """Whether minibatches of this problem may be padded; tried once, when it first matters."""

    def __init__(self, problem: Problem, population: Population) -> None:
        self._problem = problem
        self._population = population
        self._fine: bool | None = None

    def allows(self, places: dict[str, Places]) -> bool:
        """Whether these can be computed as they are padded."""
        if not any(part.partial for part in places.values()):
            return True
        if self._fine is None:
            first = torch.arange(min(5, self._population.data.total))
            self._fine = self._problem.paddable(Batch(take(self._population, first, self._problem)))
        return self._fine


def join(groups: Sequence[Sequence[int]], parts: Sequence[Results]) -> Results:
    """Results of groups of rows, in the order of the rows."""
    if len(parts) == 1:
        return parts[0]
    places = [place for group in groups for place in group]
    order = sorted(range(len(places)), key=places.__getitem__)

    def reorder(*leaves: Any) -> Tree:
        whole = torch.cat(leaves)
        return whole[send(torch.tensor(order), whole.device)]

    joined: Results = trees.over(reorder, *parts)
    return joined
