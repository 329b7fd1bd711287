"""Private means, joint payloads and secure sums: what the equations say, and the code against it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from offbeat import AdaMasFL, Asynchronous, Exponential, FedOpt, Polynomial, Setting, Vectorised, build
from offbeat.aggregate.mean import AggregationContext, PlainSum, Summation
from offbeat.aggregate.private import Private
from offbeat.aggregate.secure import Secure
from offbeat.core import AnyAlgorithm, Cohort, SavedState, Task
from offbeat.privacy.correlated import IndependentNoise, NoiseStream
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import Equal, StalenessWeights
from offbeat.training.loop import Snapshot, train
from oracles.fixed_point import decode, encode, fixed_point_sum
from oracles.private import (
    clean_row,
    clip,
    joint_sensitivity,
    payload_deviations,
    private_mean,
    stamp_scale,
)
from oracles.private_momentum import private_momentum
from oracles.replay import Run
from oracles.server_rules import adam, identity
from oracles.weights import constant, polynomial
from worlds import SEED, World, make_world, trace

FINITE = {"allow_nan": False, "allow_infinity": False}


@given(arrays(np.float64, 5, elements=st.floats(-1e6, 1e6)), st.floats(1e-3, 1e3))
def test_clipping_keeps_the_direction_and_bounds_the_length(x: np.ndarray, bound: float) -> None:
    clipped = clip(x, bound)
    assert np.linalg.norm(clipped) <= bound * (1 + 1e-12)
    np.testing.assert_allclose(clipped * np.linalg.norm(x), x * np.linalg.norm(clipped), rtol=1e-9, atol=1e-9)
    if np.linalg.norm(x) < bound * (1 - 1e-12):
        np.testing.assert_array_equal(clipped, x)


@given(st.floats(0.1, 10), st.floats(1.01, 50), st.floats(0.01, 100))
def test_the_scale_of_equation_17_gives_counts_their_noise(sigma: float, ratio: float, bound: float) -> None:
    """Invariant 8: sigma S / gamma = xi."""
    xi = ratio * sigma
    gamma = stamp_scale(sigma, xi, bound)
    on_sum, on_counts = payload_deviations(sigma, bound, gamma)
    assert on_counts == pytest.approx(xi, rel=1e-9)
    assert on_sum == pytest.approx(sigma * bound * xi / np.sqrt(xi**2 - sigma**2), rel=1e-9)
    # and the whole release is one Gaussian of multiplier sigma: the fields' precisions add up
    assert (bound / on_sum) ** 2 + (1 / on_counts) ** 2 == pytest.approx(sigma**-2, rel=1e-9)


def test_a_tenth_more_sensitivity_is_noise_of_2_4004_on_counts() -> None:
    """S = 1.1 S_delta, as in the paper's experiments: gamma = sqrt(.21) S_delta, xi = 2.4004 sigma."""
    gamma = 0.21**0.5 * 0.3
    assert joint_sensitivity([0.3, gamma]) == pytest.approx(1.1 * 0.3)
    on_sum, on_counts = payload_deviations(0.8, 0.3, gamma)
    assert on_sum == pytest.approx(0.8 * 1.1 * 0.3)
    assert on_counts / 0.8 == pytest.approx(2.4004, abs=5e-5)
    assert stamp_scale(0.8, on_counts, 0.3) == pytest.approx(gamma)


@given(st.data())
def test_one_upload_moves_the_sum_by_no_more_than_the_joint_sensitivity(data: st.DataObject) -> None:
    field = arrays(np.float64, 3, elements=st.floats(-10, 10))
    uploads = data.draw(st.lists(st.fixed_dictionaries({"a": field, "b": field}), min_size=2, max_size=4))
    weights = data.draw(st.lists(st.floats(0, 1), min_size=len(uploads), max_size=len(uploads)))
    bounds = {"a": 0.7, "b": 2.0}
    none = {"a": np.zeros(3), "b": np.zeros(3)}
    still = {"a": 0.0, "b": 0.0}
    whole = private_mean(uploads, weights, bounds, still, none)
    without = private_mean([*uploads[:-1], none], weights, bounds, still, none)
    moved = [len(uploads) * np.linalg.norm(whole[name] - without[name]) for name in bounds]
    assert np.hypot(*moved) <= joint_sensitivity([0.7, 2.0]) * (1 + 1e-9)


def test_the_noise_goes_on_the_sum_once() -> None:
    uploads = [{"a": np.array([3.0, 4.0])}, {"a": np.array([0.3, 0.4])}]
    mean = private_mean(uploads, [0.5, 1.0], {"a": 1.0}, {"a": 2.0}, {"a": np.array([1.0, -1.0])})
    np.testing.assert_allclose(mean["a"], [(0.3 + 0.3 + 2) / 2, (0.4 + 0.4 - 2) / 2], rtol=1e-15)


def test_a_noisy_row_is_cut_to_what_can_be() -> None:
    row = np.array([0.4, -0.2, 0.3, 1.7, 0.9])  # at step 3, with a span of 3: versions 1 to 3
    np.testing.assert_allclose(clean_row(row, 3, 3, 0.8), 0.8 / 1.1 * np.array([0, 0, 0.3, 0.8, 0]))
    exact = np.array([0, 0.25, 0.5, 0.25, 0])
    np.testing.assert_allclose(clean_row(exact, 3, 3, 1.0), exact, rtol=1e-15)


@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 20))
def test_fixed_point_is_exact_on_its_own_numbers(number: int, bits: int) -> None:
    assert decode(encode(number / 2**bits, bits), bits) == number / 2**bits


@given(
    st.lists(arrays(np.float64, 3, elements=st.floats(-50, 50, **FINITE)), min_size=1, max_size=9),
    st.integers(1, 3),
)
def test_a_fixed_point_sum_is_the_sum_up_to_rounding(uploads: list[np.ndarray], weight: int) -> None:
    weights = [weight + k % 2 for k in range(len(uploads))]
    total = fixed_point_sum(uploads, weights, 16)
    exact = np.sum([w * x for w, x in zip(weights, uploads, strict=True)], axis=0)
    assert np.abs(total - exact).max() <= sum(weights) * 2.0**-17 + 1e-9


def test_a_fixed_point_sum_wraps_where_it_does_not_fit() -> None:
    np.testing.assert_array_equal(
        fixed_point_sum([np.array([2.0**15 - 1, -1.5]), np.array([1.0, 0.25])], [1, 2], 16),
        [-(2.0**15) + 1, -1.0],
    )
    assert [encode(x, 0) for x in (0.5, 1.5, -0.5, -1.0)] == [0, 2, 0, 2**32 - 1]


@dataclass(frozen=True)
class Overheard:
    """Independent noise, of which a test keeps a copy."""

    heard: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)  # by step and place in the upload
    name: str = "overheard"

    def sensitivity(self, steps: int, most: int | None, apart: int) -> float:
        return IndependentNoise().sensitivity(steps, most, apart)

    def open(self, key: bytes) -> "Overhearing":
        return Overhearing(IndependentNoise().open(key), self.heard)


class Overhearing(NamedTuple):
    stream: NoiseStream
    heard: dict[tuple[int, int], np.ndarray]

    def draw(self, step: int, field: int, like: torch.Tensor, mark: bytes = b"") -> torch.Tensor:
        drawn = self.stream.draw(step, field, like, mark)
        self.heard[step, field] = drawn.numpy().copy()
        return drawn

    def save(self) -> SavedState:
        return self.stream.save()

    def load(self, saved: SavedState) -> None:
        self.stream.load(saved)


class TwoFields(NamedTuple):
    """As AdaMasFL's upload."""

    descent: torch.Tensor
    shift: torch.Tensor


def opening(algorithm: AnyAlgorithm, weights: StalenessWeights, buffer: int) -> AggregationContext:
    x = torch.zeros(3, dtype=torch.float64)
    return AggregationContext(algorithm, x, Asynchronous(5), weights, buffer, 9, 4, float("inf"), 1)


def a_cohort(weights: StalenessWeights, staleness: tuple[int, ...]) -> Cohort:
    return Cohort(7, 9, staleness, tuple(weights(s) for s in staleness))


@settings(max_examples=25)
@given(
    st.lists(arrays(np.float64, (2, 3), elements=st.floats(-5, 5, **FINITE)), min_size=2, max_size=6),
    st.floats(0.2, 4),
    st.floats(0.05, 3),
    st.integers(0, 99),
)
def test_a_private_mean_equals_its_oracle_given_the_same_noise(
    drawn: list[np.ndarray], noise: float, bound: float, seed: int
) -> None:
    overheard = Overheard()
    private = Private(
        (("shift", bound),),  # AdaMasFL's descents have norm 1 by themselves
        noise,
        1e-5,
        participation=Participation(max_participations=3, min_separation=1),
        shares=(("descent", 0.6), ("shift", 0.8)),
        correlation=overheard,
        noise_seed=seed,
    )
    run = private.open(opening(AdaMasFL(0.1, 0.1, 0.5, lazy=True), Equal(), len(drawn)))
    cohort = a_cohort(Equal(), tuple(k % 3 for k in range(len(drawn))))
    stacked = torch.from_numpy(np.stack(drawn))
    tasks = [Task(k, 7 - s, 0) for k, s in enumerate(cohort.staleness)]
    mean = run.release(run.collect(TwoFields(stacked[:, 0], stacked[:, 1]), tasks, cohort), cohort)
    known = private_mean(
        [{"descent": x[0], "shift": x[1]} for x in drawn],
        cohort.weights,
        {"descent": 1.0, "shift": bound},
        {"descent": noise / 0.6, "shift": noise * bound / 0.8},
        {"descent": overheard.heard[0, 0], "shift": overheard.heard[0, 1]},
    )
    np.testing.assert_allclose(mean.descent.numpy(), known["descent"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(mean.shift.numpy(), known["shift"], rtol=0, atol=1e-12)
    assert len(overheard.heard) == 2


class Way(NamedTuple):
    method: str
    rates: dict[str, float]
    oracle: dict[str, object]
    weights: StalenessWeights = Equal()


WAYS = {
    "ma-fedavgm": Way("ma-fedavgm", {"server_lr": 0.5, "penalty": 0.1}, {"penalty": 0.1}),
    "ma-fedadam fading": Way(
        "ma-fedadam",
        {"server_lr": 0.03, "penalty": 0.05, "beta2": 0.95, "eps": 0.02},
        {"penalty": 0.05, "rule": adam(0.95, 0.02), "weight": polynomial(0.5)},
        Polynomial(0.5),
    ),
    "ma-light-fedavgm": Way("ma-light-fedavgm", {"server_lr": 0.5}, {"lightly": True}),
}
BOUND, NOISE, SPAN = 0.2, 0.5, 5


def run_privately(
    world: World, way: Way, overheard: Overheard, summation: Summation = PlainSum()
) -> list[Snapshot]:
    algorithm = build(way.method, Setting(5, 3, 9), {"local_lr": 0.2, "beta": 0.8, "span": SPAN} | way.rates)
    private = Private(
        (("delta", BOUND),),
        NOISE,
        1e-5,
        participation=Participation(max_participations=99, min_separation=1),
        correlation=overheard,
        summation=summation,
        noise_seed=3,
    )
    engine = Vectorised(world.problem, world.population, Exponential(1.0))
    return list(
        train(
            algorithm,
            engine,
            dispatch=Asynchronous(8),
            buffer=5,
            rounds=9,
            weights=way.weights,
            max_staleness=SPAN - 1,
            aggregate=private,
            seed=SEED,
        )
    )


def oracle_models(world: World, way: Way, shots: list[Snapshot], overheard: Overheard) -> list[np.ndarray]:
    """The paper's payload: S = 1.1 S_delta, so that xi = 1.1 / sqrt(.21) sigma."""
    noise = [(overheard.heard[t, 0], overheard.heard[t, 1]) for t in range(len(shots) - 1)]
    return private_momentum(
        Run(world.oracle, 8, shots[0].x.numpy(), trace(shots)),
        local_lr=0.2,
        server_lr=way.rates["server_lr"],
        bound=BOUND,
        sigma=NOISE,
        xi=1.1 / 0.21**0.5 * NOISE,
        noise=noise,
        beta=0.8,
        span=SPAN,
        **{"rule": identity, "weight": constant} | way.oracle,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", WAYS)
def test_private_momentum_approximation_equals_its_oracle_given_the_same_noise(name: str) -> None:
    world, overheard = make_world(), Overheard()
    shots = run_privately(world, WAYS[name], overheard)
    models = oracle_models(world, WAYS[name], shots, overheard)
    assert overheard.heard[0, 1].shape == (SPAN,)
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)
    assert max(max(shot.cohort.staleness) for shot in shots[1:] if shot.cohort) > 1
    assert np.abs(models[-1] - models[0]).max() > 1e-2


@settings(max_examples=25)
@given(
    st.lists(arrays(np.float64, 4, elements=st.floats(-20, 20, **FINITE)), min_size=5, max_size=9),
    st.integers(4, 18),
)
def test_a_secure_sum_is_the_fixed_point_sum_to_the_bit(drawn: list[np.ndarray], bits: int) -> None:
    run = Secure(minimum=5, bits=bits).open(opening(FedOpt(0.1, 1.0), Equal(), len(drawn)))
    cohort = a_cohort(Equal(), tuple(k % 3 for k in range(len(drawn))))
    tasks = [Task(k, 7 - s, 0) for k, s in enumerate(cohort.staleness)]
    total = run.total((torch.from_numpy(np.stack(drawn)),), tasks, cohort)
    np.testing.assert_array_equal(total[0].numpy(), fixed_point_sum(drawn, [1] * len(drawn), bits))


def test_a_secure_sum_weighs_by_public_whole_numbers() -> None:
    drawn = [np.array([0.3 * k, -1.7, 2.0**-9 * k]) for k in range(6)]
    run = Secure(minimum=5, bits=10, weight_bits=6).open(opening(FedOpt(0.1, 1.0), Polynomial(0.5), 6))
    cohort = a_cohort(Polynomial(0.5), (0, 1, 2, 3, 0, 1))
    tasks = [Task(k, 7 - s, 0) for k, s in enumerate(cohort.staleness)]
    total = run.total((torch.from_numpy(np.stack(drawn)),), tasks, cohort)
    whole = [round(weight * 64) for weight in cohort.weights]
    assert whole == [64, 45, 37, 32, 64, 45]
    np.testing.assert_array_equal(total[0].numpy(), fixed_point_sum(drawn, whole, 10) / 64)


def test_noise_secure_sums_and_momentum_approximation_in_one_run_stay_near_the_oracle() -> None:
    """Within what fixed point rounds away; the noise is a little larger for what rounding may lengthen."""
    world, plain, secret = make_world(), Overheard(), Overheard()
    shots = run_privately(world, WAYS["ma-fedavgm"], secret, Secure(minimum=3, bits=20))
    models = oracle_models(world, WAYS["ma-fedavgm"], shots, secret)
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-5)
    open_shots = run_privately(world, WAYS["ma-fedavgm"], plain)
    assert trace(open_shots) == trace(shots)
    for step, noise in plain.heard.items():
        np.testing.assert_array_equal(secret.heard[step], noise)
