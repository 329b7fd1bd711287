"""What any worker is made of: the problem and the clients as they were sent, and a way to compute."""

import io
import logging
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import Visit
from offbeat.engines.how import How
from offbeat.engines.orders import Done, Failed, Order
from offbeat.engines.work import OneByOne, Start, Work
from offbeat.errors import InputError
from offbeat.population.population import Population
from offbeat.problem import Problem
from offbeat.trees import Tree


@dataclass(frozen=True)
class Alone:
    """Client by client."""

    def work(self, problem: Problem, population: Population) -> Work:
        return OneByOne(problem, population)


def send_off(problem: Problem, population: Population, how: How) -> Tree:
    """All that a worker needs, as tensors: the examples, and the rest as bytes."""
    others = {
        field.name: getattr(population, field.name) for field in fields(population) if field.name != "data"
    }
    file = io.BytesIO()
    try:
        # torch's format, so that tensors can be loaded to another device
        torch.save((problem, others, how), file, pickle_module=cloudpickle, pickle_protocol=5)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the module, the loss or the clients cannot be sent to another process ({reason}): "
            "leave out what cannot be pickled, or use the sequential engine."
        ) from None
    return tuple(population.data), torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


class Body:
    """Does orders; made from what `send_off` gave."""

    def __init__(self, sent: Tree, device: torch.device) -> None:
        data, rest = sent
        self._device = device
        problem, others, how = torch.load(
            io.BytesIO(rest.numpy().tobytes()), map_location=device, weights_only=False
        )
        population = Population(data=trees.over(self._move, data), **others)
        self._work: Work = how.work(problem, population)
        self._remarks = _Remarks()
        logger = logging.getLogger("offbeat")
        logger.addHandler(self._remarks)
        logger.propagate = False

    def do(self, order: Order, messages: Sequence[Tree]) -> Done:
        """The results of an order, from its messages (with statistics), in their order."""
        placed = [trees.over(self._move, message) for message in messages]
        starts = []
        for numbers, which, memory in zip(order.visits, order.which, order.memories, strict=True):
            visit = Visit(*(torch.tensor(number) for number in numbers))
            message, statistics = placed[which]
            starts.append(Start(message, statistics, trees.over(self._move, memory), visit))
        results = self._work(order.algorithm, order.tasks, starts, order.seed)
        return Done(order.number, results, self._remarks.taken())

    def _move(self, leaf: Tensor) -> Tensor:
        return leaf.to(self._device)


class _Remarks(logging.Handler):
    """Keeps what is logged, for the process that gave the order to say."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(record.getMessage())

    def taken(self) -> tuple[str, ...]:
        kept, self._kept = tuple(self._kept), []
        return kept


def attempt(number: int, action: Callable[[], Any]) -> Any:
    """What the action gives, or its error in a form that travels."""
    try:
        return action()
    except Exception as error:
        return Failed(number, _portable(error))


def _portable(error: Exception) -> Exception:
    text = "".join(traceback.format_exception(error))
    try:
        same: Exception = pickle.loads(cloudpickle.dumps(error))
        if str(same) != str(error):
            raise TypeError
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
    same.__cause__ = same.__context__ = None
    same.add_note(f"In a worker:\n{text}")
    return same
