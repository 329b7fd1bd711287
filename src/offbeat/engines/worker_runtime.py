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
from offbeat.data.population import Population
from offbeat.engines.execution import Execution
from offbeat.engines.local import Executor, SequentialExecutor, TaskStart
from offbeat.engines.worker_pool import WorkDone, WorkFailed, WorkOrder
from offbeat.errors import InputError
from offbeat.nn.problem import Problem
from offbeat.trees import Tree


@dataclass(frozen=True)
class Serial:
    """Client by client."""

    def work(self, problem: Problem, population: Population) -> Executor:
        return SequentialExecutor(problem, population)


def pack_worker(problem: Problem, population: Population, how: Execution) -> Tree:
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


class WorkerRuntime:
    """Does orders; made from what `send_off` gave."""

    def __init__(self, sent: Tree, device: torch.device) -> None:
        data, rest = sent
        self._device = device
        problem, others, how = torch.load(
            io.BytesIO(rest.numpy().tobytes()), map_location=device, weights_only=False
        )
        population = Population(data=trees.map(self._move, data), **others)
        self._work: Executor = how.work(problem, population)
        self._remarks = _LogCollector()
        logger = logging.getLogger("offbeat")
        logger.addHandler(self._remarks)
        logger.propagate = False

    def do(self, order: WorkOrder, messages: Sequence[Tree]) -> WorkDone:
        """The results of an order, from its messages (with statistics), in their order."""
        placed = [trees.map(self._move, message) for message in messages]
        starts = []
        for numbers, which, memory in zip(order.visits, order.which, order.memories, strict=True):
            visit = Visit(*(torch.tensor(number) for number in numbers))
            message, statistics = placed[which]
            starts.append(TaskStart(message, statistics, trees.map(self._move, memory), visit))
        results = self._work(order.algorithm, order.tasks, starts, order.seed)
        return WorkDone(order.number, results, self._remarks.taken())

    def _move(self, leaf: Tensor) -> Tensor:
        return leaf.to(self._device)


class _LogCollector(logging.Handler):
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
        return WorkFailed(number, _portable_error(error))


def _portable_error(error: Exception) -> Exception:
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
