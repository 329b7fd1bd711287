"""Robust aggregation: the oracles, what a few attackers can and cannot do, and what is refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.optimize import minimize
from torch import nn

from offbeat import (
    Asynchronous,
    Experiment,
    FedOpt,
    GeometricMedian,
    InputError,
    Mean,
    Median,
    NormBound,
    Polynomial,
    RoundRefill,
    Sequential,
    Setting,
    Synchronous,
    TimedPoisson,
    TrimmedMean,
    Vectorised,
    build,
    train,
)
from offbeat.aggregate.mean import Aggregator
from offbeat.aggregate.robust import RobustAggregation, RobustRule, parse_aggregate
from offbeat.algorithms.rates import LocallyOptimized
from offbeat.core import Cohort
from offbeat.schedule.dispatch import Dispatch
from offbeat.training.build import build_run
from oracles import robust as oracle
from oracles.weights import constant, polynomial
from worlds import CLASSES, FEATURES, make_world, play, trace

RULES: dict[str, tuple[Any, oracle.Rule]] = {
    "trimmed mean": (TrimmedMean(0.25), lambda rows: oracle.trimmed_mean(rows, len(rows) // 4)),
    "median": (Median(), oracle.median),
    "geometric median": (GeometricMedian(), lambda rows: oracle.geometric_median(rows, 1e-6, 8)),
    "median norm": (NormBound(), oracle.norm_bounded),
    "norm bound": (NormBound(0.05), lambda rows: oracle.norm_bounded(rows, 0.05)),
}
MIDDLES = ["trimmed mean", "median", "geometric median"]


def aggregate(rule: RobustRule, rows: Any, weights: tuple[float, ...] | None = None) -> torch.Tensor:
    stack = torch.as_tensor(rows)
    cohort = Cohort(3, 10, (0,) * len(stack), weights or (1.0,) * len(stack))
    made = RobustAggregation(rule)
    result: torch.Tensor = made.release(made.collect((stack,), (), cohort), cohort)[0]
    return result


matrices = arrays.arrays(
    np.float64,
    st.tuples(st.integers(4, 12), st.integers(1, 5)),
    elements=st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 6)),
)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40)
@given(rows=matrices)
def test_an_aggregate_is_the_oracles(name: str, rows: Any) -> None:
    rule, expected = RULES[name]
    np.testing.assert_allclose(aggregate(rule, rows).numpy(), expected(rows), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40)
@given(rows=matrices, order=st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter(name: str, rows: Any, order: Any) -> None:
    rule, places = RULES[name][0], list(range(len(rows)))
    order.shuffle(places)
    np.testing.assert_allclose(aggregate(rule, rows[places]), aggregate(rule, rows), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", MIDDLES)
@settings(max_examples=40)
@given(rows=matrices, seed=st.integers(0, 100), size=st.sampled_from([1e3, 1e8, 1e12]))
def test_as_many_attackers_as_a_rule_stands_move_it_no_further_than_the_others_reach(
    name: str, rows: Any, seed: int, size: float
) -> None:
    rule = RULES[name][0]
    most = len(rows) // 4 if name == "trimmed mean" else (len(rows) - 1) // 3
    attacked = rows.copy()
    rng = np.random.default_rng(seed)
    attacked[rng.permutation(len(rows))[:most]] = size * rng.normal(size=(most, rows.shape[1]))
    spread = np.abs(rows).max() + 1e-6
    assert aggregate(rule, attacked).abs().max() <= 10 * np.sqrt(rows.shape[1]) * spread


@pytest.mark.parametrize("name", MIDDLES)
def test_a_majority_of_attackers_breaks_every_rule(name: str) -> None:
    rows = np.zeros((9, 2))
    rows[:6] = 1e6
    assert aggregate(RULES[name][0], rows).abs().max() > 1e5


@settings(max_examples=40)
@given(rows=matrices)
def test_one_attacker_breaks_the_mean_and_a_norm_bound_limits_it(rows: Any) -> None:
    rows[0] = 1e9
    cohort = Cohort(0, 10, (0,) * len(rows), (1.0,) * len(rows))
    context: Any = SimpleNamespace(x=torch.zeros(1))
    plain = Mean().open(context)
    assert plain.release(plain.collect((torch.as_tensor(rows),), (), cohort), cohort)[0].abs().max() > 1e7
    bounded = aggregate(NormBound(1.0), rows)
    assert float(bounded.norm()) <= 1 + 1e-12


def test_the_iteration_goes_to_the_geometric_median() -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(11, 4))
    found = minimize(lambda x: np.linalg.norm(rows - x, axis=1).sum(), rows.mean(0), tol=1e-12).x
    np.testing.assert_allclose(aggregate(GeometricMedian(iterations=500), rows), found, atol=1e-5)
    np.testing.assert_allclose(aggregate(GeometricMedian(), rows), found, atol=2e-2)


@settings(max_examples=40)
@given(rows=matrices, weights=st.lists(st.floats(0.1, 1), min_size=12, max_size=12))
def test_without_trimming_it_is_the_plain_mean_with_its_staleness_weights(
    rows: Any, weights: list[float]
) -> None:
    own = tuple(weights[: len(rows)])
    expected = sum(w * row for w, row in zip(own, rows, strict=True)) / len(rows)
    np.testing.assert_allclose(aggregate(TrimmedMean(0.0), rows, own), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [Sequential, Vectorised])
@pytest.mark.parametrize(
    ("dispatch", "fading"), [(Asynchronous(7), True), (Synchronous(4), False), (RoundRefill(6), True)]
)
@pytest.mark.parametrize("name", RULES)
def test_fedbuff_under_a_rule_is_the_oracle(name: str, fading: bool, dispatch: Dispatch, kind: Any) -> None:
    world = make_world()
    rule, expected = RULES[name]
    weights = {"weights": Polynomial(0.5)} if fading else {}
    engine = kind(world.problem, world.population)
    shots = play(FedOpt(0.1, 0.5), engine, dispatch, buffer=4, rounds=5, aggregate=rule, **weights)
    models = oracle.robust_fedbuff(
        world.oracle,
        shots[0].x.numpy(),
        trace(shots),
        expected,
        local_lr=0.1,
        server_lr=0.5,
        weight=polynomial(0.5) if fading else constant,
    )
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)


def test_a_run_resumes_to_the_bit_and_names_another_rule() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population)
    options: dict[str, Any] = {"dispatch": Asynchronous(6), "buffer": 4, "rounds": 6}
    whole = list(train(FedOpt(0.1, 1.0), engine, aggregate=Median(), **options))
    cut = train(FedOpt(0.1, 1.0), engine, aggregate=Median(), **options)
    saved = next(shot.checkpoint() for shot in cut if shot.version == 3)
    rest = list(train(FedOpt(0.1, 1.0), engine, aggregate=Median(), resume=saved, **options))
    assert torch.equal(whole[-1].x, rest[-1].x)
    with pytest.raises(InputError, match=r"aggregate was Median\(\), now TrimmedMean"):
        next(train(FedOpt(0.1, 1.0), engine, aggregate=TrimmedMean(0.25), resume=saved, **options))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("mean", Mean()),
        ("trimmed-mean:0.2", TrimmedMean(0.2)),
        ("median", Median()),
        ("geometric-median", GeometricMedian()),
        ("geometric-median:0.001:32", GeometricMedian(0.001, 32)),
        ("norm-bound", NormBound()),
        ("norm-bound:0.5", NormBound(0.5)),
    ],
)
def test_a_rule_has_a_name(text: str, value: Aggregator) -> None:
    assert parse_aggregate(text) == value


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"buffer": 4}, "a share of 0.2 of a buffer of 4 is less than one update"),
        ({"algorithm": build("scaffold", Setting(3, 3, 8), {})}, "Scaffold has no robust aggregation"),
        ({"algorithm": build("adamasfl", Setting(3, 3, 8), {})}, "AdaMasFL has no robust aggregation"),
        (
            {"algorithm": LocallyOptimized(build("adamasfl", Setting(3, 3, 8), {}), max_norm=1.0)},
            "AdaMasFL has no robust aggregation",
        ),
        ({"dispatch": TimedPoisson(1.0, 0.5)}, "releases by a clock have any number of updates"),
        ({"buffer": 2, "aggregate": Median()}, "a median of 2 updates protects against no attacker"),
        (
            {"algorithm": build("ma-fedavgm", Setting(3, 3, 8), {})},
            "from the mean of their stamps",
        ),
    ],
)
def test_a_run_that_needs_a_mean_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    world = make_world()
    options = {
        "algorithm": FedOpt(0.1, 1.0),
        "engine": Sequential(world.problem, world.population),
        "dispatch": Asynchronous(7),
        "buffer": 5,
        "rounds": 3,
        "aggregate": TrimmedMean(0.2),
    }
    with pytest.raises(InputError, match=sentence):
        next(train(**options | changes))


def test_running_statistics_are_refused_since_they_are_averaged() -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    world = make_world(module=module)
    engine = Sequential(world.problem, world.population)
    with pytest.raises(InputError, match="would leave clients beside the aggregation"):
        play(FedOpt(0.1, 1.0), engine, Asynchronous(5), aggregate=Median())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"secure": True}, "which secure aggregation hides from the server"),
        (
            {"clip": "1", "noise": 1.0, "delta": 1e-3, "max_participations": 3},
            "is not a sum, and the noise of differential privacy",
        ),
    ],
)
def test_secure_and_private_sums_are_refused_and_say_why(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Experiment.of(algorithm="fedbuff", aggregate="median", **given)


def test_an_experiment_has_the_aggregation_that_it_names() -> None:
    spec = build_run(Experiment.of(algorithm="fedbuff", aggregate="trimmed-mean:0.2", rounds=2))
    assert spec.aggregate == TrimmedMean(0.2)
