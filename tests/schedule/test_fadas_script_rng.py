"""FADAS's scripts: their drawing order against the published delays, and all that they do, replicated."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import Asynchronous, Epochs, Sequential, Setting, Vectorised, build, train
from offbeat.core import AnyAlgorithm, Batches, Visit
from offbeat.deploy.server.setup import check_deployable
from offbeat.engines.engine import Engine
from offbeat.engines.process_pool import Workers
from offbeat.errors import InputError
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import TIER_RANGES, Tiers
from offbeat.schedule.dispatch import RoundRefill
from offbeat.schedule.rng import FadasScriptRng
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.statistics import simulate
from offbeat.training.replay import replay
from oracles.fadas_scripts import fadas_scripts
from worlds import SEED, World, make_world, play, trace


def flow(kind: str, clients: int, concurrency: int, buffer: int, seed: int = 42) -> Scheduler:
    dispatch = RoundRefill(concurrency)
    draws = dispatch.source(seed)
    return Scheduler(Clock(Tiers(kind).bind(draws, clients), draws), dispatch, draws, clients, buffer)


# The first row is printed in the paper (500 steps, seed 42); the others come from the authors' scripts.
PUBLISHED = [
    ("large", 50, 25, 5, (127, 10.89, 6.0)),
    ("mild", 100, 20, 10, (5, 3.10, 3.0)),
    ("large", 50, 15, 5, (53, 7.23, 2.0)),
    ("large", 50, 35, 5, (206, 13.73, 9.0)),
    ("large", 50, 25, 3, (212, 12.24, 8.0)),
    ("large", 50, 25, 10, (53, 7.67, 2.0)),
]


@pytest.mark.parametrize(("kind", "clients", "concurrency", "buffer", "expected"), PUBLISHED)
def test_the_published_delays_come_out(
    kind: str, clients: int, concurrency: int, buffer: int, expected: tuple[int, float, float]
) -> None:
    summary = simulate(flow(kind, clients, concurrency, buffer), 500)
    found = summary.staleness_max, round(summary.staleness_mean_of_max, 2), summary.staleness_median_of_max
    assert found == expected


# Counted in the authors' scripts with their seed.
@pytest.mark.parametrize(("clients", "counts"), [(50, [29, 14, 7]), (100, [57, 27, 16]), (10, [5, 3, 2])])
def test_the_authors_seed_gives_their_tiers(clients: int, counts: list[int]) -> None:
    tier = FadasScriptRng(42).tiers(1.0, clients)
    assert np.bincount([tier(client) for client in range(clients)]).tolist() == counts


def replica(
    kind: str, clients: int, concurrency: int, buffer: int, seed: int, rounds: int
) -> list[list[tuple[int, int]]]:
    """Scheduler (R) with plain lists: remaining times, sorted and shortened round by round."""
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    tiers = numpy.dirichlet([3, 2, 1], size=clients).argmax(axis=1)
    chosen = [int(client) for client in numpy.choice(clients, concurrency, replace=False)]
    pending: list[list[float]] = []  # remaining time, client, version
    history = []
    for version in range(rounds):
        pending += [[python.uniform(*TIER_RANGES[kind][tiers[client]]), client, version] for client in chosen]
        pending.sort(key=lambda job: job[0])
        done, pending = pending[:buffer], pending[buffer:]
        for job in pending:
            job[0] -= done[-1][0]
        history.append([(int(client), int(started)) for _, client, started in done])
        working = {client for _, client, _ in pending}
        chosen = python.sample([client for client in range(clients) if client not in working], buffer)
    return history


@pytest.mark.parametrize("seed", [0, 7])
def test_every_task_is_that_of_round_by_round_refill(seed: int) -> None:
    steps = flow("large", 30, 12, 4, seed)
    found = [[(task.client, task.version) for task in steps.fill(version).tasks] for version in range(150)]
    assert found == replica("large", 30, 12, 4, seed, 150)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_cannot_take_is_one_sentence(seed: int) -> None:
    with pytest.raises(InputError, match="seed"):
        FadasScriptRng(seed)


LARGE = ((1.0, 2.0), (3.0, 5.0), (50.0, 80.0))  # in the paper
RATES = {"local_lr": 0.2, "server_lr": 0.03}
ENGINES: dict[str, Callable[[World], Engine]] = {
    "sequential": lambda world: Sequential(world.problem, world.population, Tiers("large")),
    "vectorised": lambda world: Vectorised(world.problem, world.population, Tiers("large")),
    "ahead": lambda world: Vectorised(world.problem, world.population, Tiers("large"), ahead=6),
    "workers": lambda world: Workers(world.problem, world.population, Tiers("large"), workers=1),
}


def trailing(method: str = "fadas", buffer: int = 3, **given: Any) -> AnyAlgorithm:
    return build(method, Setting(buffer, 3, 12), RATES | given | {"trailing": True})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("method", "given", "known"),
    [
        ("fadas", {}, {}),
        ("fadas", {"unbiased": True}, {"correct": True}),
        ("fadas-da", {"unbiased": True}, {"correct": True, "threshold": 1}),
    ],
)
def test_a_trailing_run_is_that_of_the_scripts(
    method: str, given: dict[str, Any], known: dict[str, Any], engine: str
) -> None:
    world = make_world(clients=12, work=Epochs(1, 4))
    shots = play(trailing(method, **given), ENGINES[engine](world), RoundRefill(7), rounds=12)
    models, used = fadas_scripts(
        world.oracle,
        12,
        shots[0].x.numpy(),
        seconds=LARGE,
        concurrency=7,
        buffer=3,
        rounds=12,
        seed=SEED,
        **RATES | known,
    )
    assert [[task[:2] for task in step] for step in trace(shots)] == used
    assert max(t - began for t, step in enumerate(used) for _, began in step) > 2
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)


def test_trailing_is_not_what_the_paper_says() -> None:
    """But for the first step, which nobody can trail."""
    world = make_world()
    plain, late = (
        play(method, ENGINES["sequential"](world), RoundRefill(5))
        for method in (build("fadas", Setting(3, 3, 8), RATES), trailing())
    )
    assert torch.equal(plain[1].x, late[1].x)
    assert not torch.allclose(plain[-1].x, late[-1].x, rtol=0, atol=1e-3)


def test_with_a_buffer_of_one_nobody_trails() -> None:
    """For the last of one is everybody."""
    world = make_world()
    plain, late = (
        play(method, ENGINES["sequential"](world), RoundRefill(5), buffer=1)
        for method in (build("fadas", Setting(1, 3, 8), RATES), trailing(buffer=1))
    )
    assert all(torch.equal(one.x, other.x) for one, other in zip(plain, late, strict=True))


@pytest.mark.parametrize("engine", ["sequential", "ahead"])
@pytest.mark.parametrize("cut", [0, 2, 5])
def test_a_cut_run_goes_on_with_those_who_trail(cut: int, engine: str) -> None:
    world = make_world()
    options = {"dispatch": RoundRefill(5), "buffer": 3, "rounds": 8, "seed": SEED}
    whole = list(train(trailing(), ENGINES[engine](world), **options))
    shots = train(trailing(), ENGINES[engine](world), **options)
    saved = next(shot.checkpoint() for shot in shots if shot.version == cut)
    rest = list(train(trailing(), ENGINES[engine](world), resume=saved, **options))
    assert [shot.version for shot in rest] == list(range(cut + 1, 9))
    assert all(torch.equal(one.x, other.x) for one, other in zip(whole[cut + 1 :], rest, strict=True))


def test_trailing_is_refused_where_nobody_knows_the_order_of_starting() -> None:
    world = make_world()
    engine = ENGINES["sequential"](world)
    with pytest.raises(InputError, match="use dispatch round-refill"):
        play(trailing(), engine, Asynchronous(5))
    with pytest.raises(InputError, match="a trace does not contain"):
        next(replay(trailing(), engine, [], dispatch=RoundRefill(5), buffer=3))
    with pytest.raises(InputError, match="which a site does not know"):
        check_deployable("fadas", trailing())
    method = trailing()
    message = method.broadcast(method.init(torch.zeros(2)), 0)
    visit = Visit(torch.tensor(0), torch.tensor(0))
    with pytest.raises(InputError, match="use a simulated one"):
        method.local(message, (), Batches(()), visit, world.problem)
