"""What every worker runs, in a process of this machine or on a cluster: it computes orders."""

import io
import logging
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import Visit
from offbeat.data.population import Population
from offbeat.engines.execution import Execution
from offbeat.engines.local import Executor, TaskStart
from offbeat.engines.worker_pool import WorkDone, WorkFailed, WorkOrder
from offbeat.errors import InputError
from offbeat.nn.problem import Problem
from offbeat.trees import Tree


def pack_worker(problem: Problem, population: Population, execution: Execution) -> Tree:
    """All that a worker needs, as tensors: the examples, and the rest as bytes."""
    others = {field.name: getattr(population, field.name) for field in fields(population)}
    data = tuple(others.pop("data")) if population.in_memory else ()
    file = io.BytesIO()
    try:
        # torch's format, so that tensors can be loaded to another device
        torch.save((problem, others, execution), file, pickle_module=cloudpickle, pickle_protocol=5)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the module, the loss or the clients cannot be sent to another process ({reason}): "
            "leave out what cannot be pickled, or use the sequential engine."
        ) from None
    return data, torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


class WorkerRuntime:
    """Computes orders; made from what `pack_worker` gave."""

    def __init__(self, packed: Tree, device: torch.device) -> None:
        data, rest = packed
        self._device = device
        problem, others, execution = torch.load(
            io.BytesIO(rest.numpy().tobytes()), map_location=device, weights_only=False
        )
        population = Population(**({"data": trees.map(self._move, data)} if data else {}), **others)
        self._executor: Executor = execution.executor(problem, population)
        self._warnings = _WarningCollector()
        logger = logging.getLogger("offbeat")
        logger.addHandler(self._warnings)
        logger.propagate = False

    def run(self, order: WorkOrder, messages: Sequence[Tree]) -> WorkDone:
        """The results of an order, from its messages (with statistics), in their order."""
        moved = [trees.map(self._move, message) for message in messages]
        starts = []
        rows = zip(order.visits, order.which, order.memories, order.steps, strict=True)
        for numbers, which, memory, steps in rows:
            parts: list[Any] = [() if number is None else torch.tensor(number) for number in numbers]
            visit = Visit(*parts)
            message, statistics = moved[which]
            starts.append(TaskStart(message, statistics, trees.map(self._move, memory), visit, steps))
        results = self._executor(order.algorithm, order.tasks, starts, order.seed)
        return WorkDone(order.number, results, self._warnings.take())

    def _move(self, leaf: Tensor) -> Tensor:
        return leaf.to(self._device)


class _WarningCollector(logging.Handler):
    """Collects warnings, for the process that gave the order to log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        messages, self._messages = tuple(self._messages), []
        return messages


def attempt(number: int, action: Callable[[], Any]) -> Any:
    """What the action returns, or its error in a form that can be sent."""
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
