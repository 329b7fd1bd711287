"""What tests of workers elsewhere share: an engine that outlasts a run, and what to compare."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Cadence,
    Epochs,
    Exponential,
    FedOpt,
    Sequential,
    Setting,
    build,
    train,
)
from offbeat.engines.simulation import Simulation
from offbeat.engines.worker_pool import PoolExecutor, guided_chunks
from offbeat.schedule.clock import Clock
from worlds import CLASSES, FEATURES, SEED, World, make_world

METHODS = {
    "adamasfl": AdaMasFL(0.05, 0.1, 0.5),  # clients keep a vector
    "cadence": Cadence.tuned(3),
    "fedavg": FedOpt(0.1, 1.0),
    "scaffold": build("scaffold", Setting(3, 3, 8), {}),
    "ca2fl": build("ca2fl", Setting(3, 3, 8), {}),
}
DELAYS = Exponential(1.0)


class Lasting:
    """An engine whose workers serve one run after another, since their start takes seconds."""

    def __init__(self, world: World, pool: Any) -> None:
        self.engine = Sequential(world.problem, world.population, DELAYS)
        self.pool = pool
        self.ahead = 0
        self.clients, self.availability = self.engine.clients, self.engine.availability
        self.initial = self.engine.initial

    def open(self, algorithm: Any, seed: int, rng: Any) -> Simulation:
        clock = Clock(DELAYS.bind(rng, self.clients), rng)
        executor = PoolExecutor(self.pool, torch.device("cpu"), guided_chunks)
        executor.close = lambda: None  # type: ignore[method-assign]
        backend = self.engine.memory
        return Simulation(
            algorithm, self.engine.problem, clock, executor, seed, backend, self.clients, self.ahead
        )


def ragged() -> World:
    """Epochs of unequal length, a norm with statistics, and a module that draws."""
    torch.manual_seed(3)
    layers = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, CLASSES)
    return make_world(work=Epochs(2, 4, least=2), module=nn.Sequential(*layers).double())


def same(one: Any, other: Any) -> None:
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left.x, right.x, rtol=0, atol=1e-10)
        torch.testing.assert_close(left.statistics, right.statistics, rtol=0, atol=1e-10)
        assert left.time == right.time
    assert not torch.equal(one[0].x, one[-1].x)


def identical(one: Any, other: Any) -> None:
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left.x, right.x)


def steps(algorithm: Any, engine: Any, rounds: int) -> Iterator[Any]:
    return train(algorithm, engine, dispatch=Asynchronous(5), buffer=3, rounds=rounds, seed=SEED)
