"""A crew of Ray actors: on the cores or GPUs of this machine or of many."""

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.engines import packing
from offbeat.engines.body import Body, attempt
from offbeat.engines.orders import Done, Failed, Lost, Order
from offbeat.engines.reach import connect, disconnect, find_ray
from offbeat.errors import InputError
from offbeat.trees import Tree

_SILENCE = 3600.0  # seconds without a single result after which a cluster is given up
_PATIENCE = 120.0  # seconds for a cluster to start all workers


class Actor:
    """What runs on the cluster."""

    def __init__(self, sent: tuple[Tree, NDArray[np.uint8]], device: str, paths: list[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path]  # for the user's own modules
        torch.set_num_threads(1)
        self._body = attempt(0, lambda: Body(_unpack(sent), torch.device(device)))

    def process(self) -> int:
        """Its id, which also says that it is up."""
        return os.getpid()

    def do(self, order: Order, memories: tuple[Tree, NDArray[np.uint8]]) -> Done | Failed:
        """Results are packed; errors are answers, since Ray would dress them up."""
        if isinstance(self._body, Failed):
            return Failed(order.number, self._body.error)
        body: Body = self._body

        def action() -> Done:
            messages = [_unpack(each) for each in find_ray().get(list(order.messages))]
            done = body.do(order._replace(memories=_unpack(memories)), messages)
            return replace(done, results=_pack(done.results))

        answer: Done | Failed = attempt(order.number, action)
        return answer


class Actors:
    """Workers on a cluster, as many as it has places if none are asked for."""

    def __init__(self, sent: Tree, workers: int | None, address: str | None, gpus: float, cores: int) -> None:
        self._ray = find_ray()
        self._connected = connect(address, max(cores, workers or 0))
        self._running: dict[Any, int] = {}
        self._crew: list[Any] = []
        try:
            count = self._count(workers, gpus)
            self._make = self._ray.remote(Actor).options(
                num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self._device = "cuda" if gpus else "cpu"
            self._sent = self._ray.put(_pack(sent))
            self._crew = [self._start() for _ in range(count)]
            self._await()
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> int:
        return len(self._crew)

    def ids(self) -> list[int]:
        """Of the processes, where they run."""
        found: list[int] = self._ray.get([actor.process.remote() for actor in self._crew])
        return found

    def place(self, tree: Tree) -> Any:
        return self._ray.put(_pack(tree))

    def remove(self, placed: Any) -> None:
        pass  # Ray counts references

    def give(self, worker: int, order: Order) -> None:
        memories = _pack(list(order.memories))
        self._running[self._crew[worker].do.remote(order._replace(memories=()), memories)] = worker

    def wait(self) -> Sequence[tuple[int, Done | Failed] | Lost]:
        first, others = self._ray.wait(list(self._running), num_returns=1, timeout=_SILENCE)
        if not first:
            raise InputError(
                f"the cluster has not answered for {_SILENCE / 60:.0f} minutes: "
                "see that its machines are up, and go on from the last checkpoint."
            )
        more, _ = self._ray.wait(others, num_returns=len(others), timeout=0) if others else ([], [])
        return [self._hear(each, self._running.pop(each)) for each in [*first, *more]]

    def replace(self, worker: int) -> None:
        with contextlib.suppress(Exception):  # it is gone already, most of the time
            self._ray.kill(self._crew[worker])
        self._crew[worker] = self._start()

    def clear(self) -> None:
        pass

    def close(self) -> None:
        if self._connected:
            self._connected = False
            disconnect(self._ray)
        elif self._ray.is_initialized():
            for actor in self._crew:
                self._ray.kill(actor)
        self._crew, self._running = [], {}

    def _hear(self, ready: Any, worker: int) -> tuple[int, Done | Failed] | Lost:
        try:
            answer: Done | Failed = self._ray.get(ready)
        except self._ray.exceptions.RayTaskError:
            raise  # a fault of ours: what the user's code raises is an answer
        except self._ray.exceptions.RayError as error:
            return Lost(worker, str(error).strip().splitlines()[0].rstrip(".") or type(error).__name__)
        if isinstance(answer, Done):
            answer = replace(answer, results=_unpack(answer.results))
        return worker, answer

    def _start(self) -> Any:
        paths = [path or str(Path.cwd()) for path in sys.path]
        return self._make.remote(self._sent, self._device, paths)

    def _count(self, workers: int | None, gpus: float) -> int:
        room = self._ray.cluster_resources()
        places = int(room.get("CPU", 0))
        if gpus:
            places = min(places, int(room.get("GPU", 0) / gpus))
        count = workers or places
        if not 1 <= count <= places:
            kind = f"{gpus:g} GPU and a core" if gpus else "a core"
            raise InputError(
                f"the cluster has room for {places} workers with {kind} each, not for {max(1, count)}: "
                "use fewer --workers or a larger cluster."
            )
        return count

    def _await(self) -> None:
        up = [actor.process.remote() for actor in self._crew]
        _, missing = self._ray.wait(up, num_returns=len(up), timeout=_PATIENCE)
        if missing:
            raise InputError(
                f"the cluster has not started {len(missing)} of {len(up)} workers in {_PATIENCE:.0f} s: "
                "use fewer --workers, or wait until others leave it."
            )


def _pack(tree: Tree) -> tuple[Tree, NDArray[np.uint8]]:
    slots, room = packing.pack(tree)
    return slots, room.numpy()


def _unpack(packed: tuple[Tree, NDArray[np.uint8]]) -> Tree:
    """As views of Ray's memory, which nobody writes to."""
    slots, room = packed
    return packing.read(slots, _view(room))


def _view(room: NDArray[np.uint8]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(room)
