"""The drawing order of FADAS's scripts, against the delays that the paper prints and a plain replica."""

import random

import numpy as np
import pytest

from offbeat.errors import InputError
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import TIERS, Tiers
from offbeat.schedule.dispatch import RoundRefill
from offbeat.schedule.fadas_scripts import ScriptDraws
from offbeat.schedule.flow import Flow
from offbeat.schedule.statistics import simulate


def flow(kind: str, clients: int, concurrency: int, buffer: int, seed: int = 42) -> Flow:
    dispatch = RoundRefill(concurrency)
    draws = dispatch.source(seed)
    return Flow(Clock(Tiers(kind).bind(draws, clients), draws), dispatch, draws, clients, buffer)


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
    tier = ScriptDraws(42).tiers(1.0, clients)
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
        pending += [[python.uniform(*TIERS[kind][tiers[client]]), client, version] for client in chosen]
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
        ScriptDraws(seed)
