"""Private training by timed releases: what is summed, what it costs, and what is refused."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import (
    Asynchronous,
    Constant,
    Cycle,
    Equal,
    Exponential,
    Participation,
    Polynomial,
    Private,
    Sequential,
    Setting,
    Vectorised,
    build,
)
from offbeat.aggregate.mean import AggregationContext, Mean
from offbeat.aggregate.secure import Secure
from offbeat.aggregate.uploads import shrinks_without_updates
from offbeat.algorithms import CATALOGUE, find
from offbeat.algorithms.fedopt import FedOpt
from offbeat.core import AnyAlgorithm, traits_of
from offbeat.errors import InputError
from offbeat.privacy.accountant import RdpAccountant, gaussian_epsilon
from offbeat.privacy.correlated import TreeNoise
from offbeat.privacy.mechanism import AdaptiveClipping
from offbeat.schedule.availability import NextAvailable
from offbeat.schedule.dispatch import Dispatch, RandomAllocation, TimedPoisson
from offbeat.training.loop import Snapshot, train
from offbeat.training.replay import replay
from oracles.weights import polynomial
from worlds import SEED, make_world, trace

ALLOCATION = RandomAllocation(1.0, 4, lead=3)
PLAIN = FedOpt(0.1, 1.0)


def run(
    aggregate: Any,
    algorithm: AnyAlgorithm = PLAIN,
    dispatch: Dispatch = ALLOCATION,
    *,
    clients: int = 8,
    engine: Callable[..., Any] = Sequential,
    **others: Any,
) -> list[Snapshot]:
    world = make_world(clients)
    made = engine(world.problem, world.population, others.pop("delays", Exponential(0.8)))
    options = {"buffer": 2, "rounds": 12, "seed": SEED} | others
    return list(train(algorithm, made, dispatch=dispatch, aggregate=aggregate, **options))


def private(algorithm: AnyAlgorithm = PLAIN, **others: Any) -> Private:
    return Private.of(algorithm, 0.5, 1.0, 1e-5, **{"noise_seed": 0} | others)


def test_the_step_is_the_clipped_sum_over_the_nominal_cohort() -> None:
    # By NumPy: local descents of the tasks in the trace, clipped, weighted, summed and divided by 2.
    clip, nominal, weight = 0.05, 2, polynomial(0.5)
    bounded = Private.of(PLAIN, clip, 0.0, 1e-5)
    shots = run(bounded, weights=Polynomial(0.5))
    world = make_world(8)
    models, shortened, sizes = [world.problem.initial()[0].numpy().copy()], 0, set()
    for t, step in enumerate(trace(shots)):
        total = np.zeros_like(models[0])
        sizes.add(len(step))
        for client, version, visit in step:
            x = models[version].copy()
            for k in range(world.oracle.steps(client, visit)):
                x -= 0.1 * world.oracle.gradient(client, visit, k, x)
            descent = models[version] - x
            norm = np.linalg.norm(descent)
            shortened += norm > clip
            total += weight(t - version) * descent * min(1.0, clip / norm)
        models.append(models[t] - total / nominal)
    assert len(sizes) > 1  # allocation is secret, so which sizes occur differs from run to run
    assert shortened
    for shot, x in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), x, atol=1e-10)


def test_a_release_to_which_nothing_arrived_is_noise_alone() -> None:
    shots = run(private(), delays=Constant(50.0), rounds=3)
    assert all(shot.filled is not None and not shot.filled.tasks for shot in shots[1:])
    steps = torch.stack([after.x - before.x for before, after in pairwise(shots)])
    assert 0.15 < float(steps.std()) < 0.35  # noise of 0.5 over a nominal cohort of 2
    assert all(torch.equal(shot.x, shots[0].x) for shot in run(Mean(), delays=Constant(50.0), rounds=3))


def test_two_epsilons_are_told_and_the_amplified_one_follows_from_the_dispatch() -> None:
    spent = run(private(), dispatch=RandomAllocation(50.0, 4))[-1].spent()
    assert spent is not None
    assert spent.unamplified == pytest.approx(gaussian_epsilon(math.sqrt(3), 1e-5))  # 12 releases, 1 of 4
    assert spent.epsilon < 0.75 * spent.unamplified
    assert "each client contributes to one of every 4 releases" in spent.terms
    assert "nominal cohort of 2" in spent.terms
    assert not spent.simulated
    poisson = run(private(), dispatch=TimedPoisson(1.0, 0.25))[-1].spent()
    assert poisson is not None
    assert poisson.unamplified is not None
    assert poisson.epsilon < poisson.unamplified


@pytest.mark.parametrize("dispatch", [RandomAllocation(1.0, 4), TimedPoisson(1.0, 0.25)])
def test_neither_epsilon_tells_how_often_anybody_contributed(dispatch: Dispatch) -> None:
    # It did: the one against those who see connections was computed from the most frequent client.
    def told(delay: float) -> tuple[float, float | None, int]:
        last = run(private(), dispatch=dispatch, delays=Constant(delay))[-1]
        cost = last.spent()
        assert cost is not None
        return cost.epsilon, cost.unamplified, last.counts.consumed

    prompt, late = told(0.5), told(50.0)
    assert prompt[2] > late[2] == 0
    assert prompt[:2] == late[:2]


def test_the_budget_ends_a_run_with_the_last_epoch_that_fits() -> None:
    one = run(private(), dispatch=RandomAllocation(1.0, 4), rounds=4)[-1].spent()
    assert one is not None
    shots = run(private(epsilon=one.epsilon * 1.001), dispatch=RandomAllocation(1.0, 4), rounds=12)
    assert shots[-1].version == 4
    assert shots[-1].ended is not None
    assert "budget" in shots[-1].ended


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_method_trains_by_timed_releases_or_says_why_not(name: str) -> None:
    entry = find(name)
    algorithm = build(name, Setting(2, 3, 12), {})
    limit = math.inf if entry.max_staleness is None else entry.max_staleness
    if traits_of(algorithm).two_phases or traits_of(algorithm).reads_rank:
        sentence: str | None = "phases dispatch|round-refill"
    elif shrinks_without_updates(algorithm):
        sentence = "averages models"
    else:
        sentence = None
    fixed = {"max_staleness": limit, "rounds": 12}
    if sentence is not None:
        with pytest.raises(InputError, match=sentence):
            run(Mean(), algorithm, **fixed)
        return
    shots = run(Mean(), algorithm, engine=Vectorised, **fixed)
    assert bool(torch.isfinite(shots[-1].x).all())
    assert not torch.equal(shots[-1].x, shots[0].x)


def test_methods_that_average_models_are_few() -> None:
    methods = {name: build(name, Setting(2, 3, 12), {}) for name in CATALOGUE}
    assert sorted(name for name, method in methods.items() if shrinks_without_updates(method)) == [
        "fafed",
        "fedasync",
    ]


@pytest.mark.parametrize(
    "name", ["ma-fedavgm", "ma-light-fedadam", "scaffold", "masfl", "cadence", "fadas-da"]
)
def test_methods_train_privately_by_timed_releases(name: str) -> None:
    algorithm = build(name, Setting(2, 3, 12), {"variates": False} if name == "cadence" else {})
    clip = {"cadence": None, "scaffold": {"delta": 0.5, "shift": 0.5}}.get(name, 0.5)
    entry = find(name)
    limit = math.inf if entry.max_staleness is None else entry.max_staleness
    own = Private.of(algorithm, clip, 1.0, 1e-5, noise_seed=0)
    shots = run(own, algorithm, rounds=6, max_staleness=limit, dispatch=RandomAllocation(1.0, 4, lead=2))
    spent = shots[-1].spent()
    assert spent is not None
    assert 0 < spent.epsilon < (spent.unamplified or 0)


def test_adaptive_clipping_divides_by_the_nominal_cohort() -> None:
    # With nothing arriving the noisy share of answers is about a half, whoever was drawn.
    adaptive = AdaptiveClipping(0.5, 0.2, noise=1e-2)
    own = Private.of(PLAIN, 0.5, 1e-3, 1e-5, adaptive=adaptive, noise_seed=0)
    moved = run(own, delays=Constant(50.0), rounds=5)
    facts = moved[-1].checkpoint().facts["aggregate"]["bounds"]
    assert facts["delta"] == pytest.approx(0.5, rel=1e-2)


def test_a_run_that_is_resumed_gives_the_same_bits() -> None:
    secret = private(noise_seed=None)
    whole = []
    for shot in train_world(secret):
        if shot.version == 5:
            saved = shot.checkpoint()
        whole.append(shot)
    rest = list(train_world(secret, resume=saved))
    assert [shot.version for shot in rest] == list(range(6, 13))
    assert torch.equal(rest[-1].x, whole[-1].x)
    assert rest[-1].counts == whole[-1].counts


def train_world(aggregate: Private, **others: Any) -> Any:
    world = make_world(8)
    engine = Sequential(world.problem, world.population, Exponential(0.8))
    options = {"buffer": 2, "rounds": 12, "seed": SEED} | others
    return train(PLAIN, engine, dispatch=ALLOCATION, aggregate=aggregate, **options)


def test_the_sample_follows_from_a_secret_and_not_from_the_seed() -> None:
    one, other = (trace(run(private(noise_seed=None))) for _ in range(2))
    assert one != other
    assert trace(run(private())) == trace(run(private()))


def test_a_trace_of_timed_releases_can_be_replayed() -> None:
    shots = run(private())
    lines = [
        {
            "version": shot.version,
            "time": shot.time,
            "tasks": [
                [*task, a, b]
                for task, a, b in zip(
                    shot.filled.tasks, shot.filled.started, shot.filled.arrived, strict=True
                )
            ],
            "dropped": shot.filled.dropped,
            "lost": shot.filled.lost,
        }
        for shot in shots
        if shot.filled is not None
    ]
    world = make_world(8)
    engine = Sequential(world.problem, world.population, Exponential(0.8))
    again = list(
        replay(PLAIN, engine, lines, dispatch=ALLOCATION, buffer=2, aggregate=private(), seed=SEED, rounds=12)
    )
    assert torch.equal(again[-1].x, shots[-1].x)


class ByData:
    """An availability that nothing is known about."""

    def bind(self, seed: int) -> NextAvailable:
        return lambda client, now: now


@pytest.mark.parametrize(
    ("settings", "options", "says"),
    [
        ({}, {}, None),
        ({}, {"availability": Cycle(5.0, 0.5)}, None),
        ({}, {"weights": Polynomial(0.5)}, None),
        ({}, {"dispatch": TimedPoisson(1.0, 0.01)}, None),
        ({"accountant": RdpAccountant()}, {"dispatch": TimedPoisson(1.0, 0.01)}, None),
        ({"simulate_amplification": True}, {}, "is proved: do not simulate it"),
        ({"participation": Participation(5, 1)}, {}, "leave the participation out"),
        ({"correlation": TreeNoise()}, {}, "correlated noise is not amplified"),
        ({"summation": Secure(minimum=2)}, {}, "reveals who was drawn"),
        ({}, {"availability": ByData()}, "ByData might depend on other clients"),
        ({}, {"dispatch": TimedPoisson(1.0, 0.01, lead=2)}, "works for a later one"),
        (
            {"participation": Participation(min_separation=1)},
            {"dispatch": Asynchronous(5)},
            "must be bounded",
        ),
    ],
)
def test_what_the_proof_does_not_cover_is_refused(
    settings: dict[str, Any], options: dict[str, Any], says: str | None
) -> None:
    context = AggregationContext(
        PLAIN, torch.zeros(4), RandomAllocation(1.0, 100, 3), Equal(), 10, 1000, 100, math.inf, 0
    )._replace(**options)
    aggregate = private(**settings)
    if says is None:
        assert aggregate.open(context).private
        return
    with pytest.raises(InputError, match=says) as error:
        aggregate.open(context)
    assert "\n" not in str(error.value)


def test_allocation_is_not_counted_by_rdp() -> None:
    with pytest.raises(InputError, match="rdp accountant does not count random allocation"):
        run(private(accountant=RdpAccountant()), rounds=4)[-1].spent()
