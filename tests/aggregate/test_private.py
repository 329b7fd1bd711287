"""Private means, alone and in whole runs."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from offbeat import (
    CATALOGUE,
    AdaMasFL,
    Always,
    Asynchronous,
    Cycle,
    Exponential,
    FedAsync,
    FedOpt,
    InputError,
    Poisson,
    Polynomial,
    Sequential,
    Setting,
    Vectorised,
    build,
    fadas,
    train,
)
from offbeat.aggregate.mean import AggregationContext, Aggregator, Mean
from offbeat.aggregate.private import Private, PrivateAggregation
from offbeat.aggregate.secure import Secure
from offbeat.aggregate.uploads import server_reads_staleness
from offbeat.algorithms.adamasfl import Upload as TwoVectors
from offbeat.algorithms.fadas import Shrink
from offbeat.algorithms.fedopt import Upload
from offbeat.core import AnyAlgorithm, Cohort, Task
from offbeat.privacy.accountant import PldAccountant, RdpAccountant, Releases
from offbeat.privacy.clipping import clip
from offbeat.privacy.correlated import BandedNoise, IndependentNoise, NoiseCorrelation, TreeNoise
from offbeat.privacy.mechanism import AdaptiveClipping, seeded_key, subkey
from offbeat.renamed import current_repr
from offbeat.schedule.availability import Availability
from offbeat.schedule.dispatch import Dispatch, Phases, Queues
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import Equal, StalenessWeights
from offbeat.training import checkpoint
from offbeat.training.loop import Snapshot
from oracles.private import private_mean
from worlds import CLASSES, FEATURES, make_world

PLAIN = FedOpt(0.1, 1.0)
UNIT = AdaMasFL(0.05, 0.1, 0.5)
BOUNDED = Participation(max_participations=50, min_separation=1)
FREE: dict[str, Any] = {"participation": Participation()}  # nothing is claimed where there is no noise


def opened(
    private: Private,
    algorithm: AnyAlgorithm = PLAIN,
    *,
    size: int = 4,
    buffer: int = 3,
    dispatch: Dispatch = Asynchronous(5),
    weights: StalenessWeights = Equal(),
    population: int = 1000,
    rounds: int = 100,
    availability: Availability = Always(),
    dtype: torch.dtype = torch.float64,
) -> PrivateAggregation:
    x = torch.zeros(size, dtype=dtype)
    return private.open(
        AggregationContext(
            algorithm, x, dispatch, weights, buffer, population, rounds, math.inf, 0, availability
        )
    )


def cohort(count: int, weights: tuple[float, ...] | None = None) -> Cohort:
    return Cohort(0, 1000, (0,) * count, weights or (1.0,) * count)


def tasks(count: int, first: int = 0) -> list[Task]:
    return [Task(first + client, 0, 0) for client in range(count)]


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def engine(module: nn.Module | None = None, clients: int = 8) -> Sequential:
    world = make_world(clients, module=module)
    return Sequential(world.problem, world.population, Exponential(1.0))


def run(aggregate: Aggregator, algorithm: AnyAlgorithm = PLAIN, **others: Any) -> list[Snapshot]:
    options = {"dispatch": Asynchronous(5), "buffer": 3, "rounds": 6} | others
    return list(train(algorithm, engine(), aggregate=aggregate, **options))


# --- the mean itself


@pytest.mark.parametrize("weights", [Equal(), Polynomial(0.5)])
def test_without_bound_and_noise_it_is_the_mean_bit_for_bit(weights: StalenessWeights) -> None:
    nothing = Private.of(PLAIN, math.inf, 0.0, 1e-5, **FREE)
    private, plain = run(nothing, weights=weights), run(Mean(), weights=weights)
    for left, right in zip(private, plain, strict=True):
        assert torch.equal(left.x, right.x)
    spent = private[-1].spent()
    assert spent is not None
    assert spent.epsilon == math.inf
    assert spent.terms == "no noise was added, so nothing is private."


def test_two_vectors_and_a_start_without_bound_and_noise_are_the_mean_too() -> None:
    nothing = Private.of(UNIT, {"descent": math.inf, "shift": math.inf}, 0.0, 1e-5, **FREE)
    assert torch.equal(run(nothing, UNIT)[-1].x, run(Mean(), UNIT)[-1].x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_private_mean_is_the_oracles_given_the_same_noise(dtype: torch.dtype) -> None:
    private = Private.of(
        UNIT, {"shift": 0.7}, 1.3, 1e-5, participation=BOUNDED, noise_seed=5, shares=(("shift", 0.8),)
    )
    lazy = dataclasses.replace(UNIT, lazy=True)
    made = opened(private, lazy, dtype=dtype)
    stream = IndependentNoise().open(subkey(seeded_key(5), "steps"))
    for step in range(3):
        uploads = TwoVectors(randn(3, 4, seed=step).to(dtype), randn(3, 4, seed=10 + step).to(dtype))
        now = cohort(3, (1.0, 0.5, 0.25))
        mean = made.release(made.collect(uploads, tasks(3, 3 * step), now), now)
        like = torch.zeros(4, dtype=torch.float64)
        oracle = private_mean(
            [
                {"descent": uploads.descent[n].double().numpy(), "shift": uploads.shift[n].double().numpy()}
                for n in range(3)
            ],
            now.weights,
            {"descent": 1.0, "shift": 0.7},
            {"descent": 1.3 / 0.6, "shift": 1.3 * 0.7 / 0.8},
            {name: stream.draw(step, n, like).numpy() for n, name in enumerate(("descent", "shift"))},
        )
        tolerance = 1e-14 if dtype == torch.float64 else 1e-6
        np.testing.assert_allclose(mean.descent.numpy(), oracle["descent"], rtol=0, atol=tolerance)
        np.testing.assert_allclose(mean.shift.numpy(), oracle["shift"], rtol=0, atol=tolerance)
        assert mean.shift.dtype == dtype


@pytest.mark.parametrize("nominal", [None, 50])
def test_the_noise_has_the_promised_standard_deviation(nominal: int | None) -> None:
    private = Private.of(
        UNIT, {"shift": 0.2}, 1.5, 1e-5, participation=BOUNDED, noise_seed=1, nominal=nominal
    )
    made = opened(private, dataclasses.replace(UNIT, lazy=True), buffer=5)
    zeros = TwoVectors(torch.zeros(5, 20_000), torch.zeros(5, 20_000))
    mean = made.release(made.collect(zeros, tasks(5), cohort(5)), cohort(5))
    scale = 1.0 if nominal is None else 5 / 50
    for field, bound in ((mean.descent, 1.0), (mean.shift, 0.2)):
        promised = scale * 1.5 * bound * math.sqrt(2) / 5
        # the standard error of a standard deviation of n draws is its 1 / sqrt(2 n)-th part
        assert field.std().item() == pytest.approx(promised, rel=4 / math.sqrt(2 * 20_000))
        assert abs(field.mean().item()) < 4 * promised / math.sqrt(20_000)
    assert ("SIMULATION: the noise is scaled by 5/50" in made.spent()().terms) == (nominal is not None)


def test_a_nominal_cohort_of_one_leaves_the_noise_of_a_buffer_of_one_as_it_is() -> None:
    means = []
    for nominal in (None, 1):
        private = Private.of(
            UNIT, {"shift": 0.2}, 1.5, 1e-5, participation=BOUNDED, noise_seed=1, nominal=nominal
        )
        made = opened(private, dataclasses.replace(UNIT, lazy=True), buffer=1)
        zeros = TwoVectors(torch.zeros(1, 20), torch.zeros(1, 20))
        means.append(made.release(made.collect(zeros, tasks(1), cohort(1)), cohort(1)))
    assert torch.equal(means[0].shift, means[1].shift)
    assert means[0].shift.std() > 0


def test_stamps_are_noised_as_equations_16_to_19_have_it() -> None:
    algorithm = build("ma-fedavgm", Setting(3, 3, 10), {})
    sigma = 0.9
    private = Private.of(algorithm, 0.2, sigma, 1e-5, participation=BOUNDED, noise_seed=2)
    made = opened(private, algorithm)
    span, counts, deltas = 21, [], []
    for step in range(300):
        stamp = torch.eye(span, dtype=torch.float64)[[0, 0, 3]]
        uploads = Upload(torch.zeros(3, 20, dtype=torch.float64), stamp)
        mean = made.release(made.collect(uploads, tasks(3, 3 * step), cohort(3)), cohort(3))
        counts.append(mean.stamp * 3)
        deltas.append(mean.delta * 3)
    every, expected = torch.stack(counts), torch.zeros(span, dtype=torch.float64)
    expected[0], expected[3] = 2.0, 1.0
    xi, near = 2.4004 * sigma, 4 / math.sqrt(2 * 300 * 20)
    assert (every - expected).std().item() == pytest.approx(xi, rel=near)
    assert (every.mean(0) - expected).abs().max().item() < 4.5 * xi / math.sqrt(300)
    assert torch.stack(deltas).std().item() == pytest.approx(1.1 * 0.2 * sigma, rel=near)


def test_a_client_cannot_be_twice_in_one_release() -> None:
    made = opened(Private.of(PLAIN, 1.0, 1.0, 1e-5, participation=BOUNDED))
    now = cohort(3)
    with pytest.raises(InputError, match="client 7 contributed twice"):
        made.collect(Upload(randn(3, 4)), [Task(7, 0, 0), Task(2, 0, 0), Task(7, 0, 1)], now)


def test_weights_above_one_are_refused_whenever_they_come() -> None:
    made = opened(Private.of(PLAIN, 1.0, 1.0, 1e-5, participation=BOUNDED))
    with pytest.raises(InputError, match="weights above 1"):
        made.collect(Upload(randn(2, 4)), tasks(2), cohort(2, (1.0, 1.5)))


# --- what it refuses


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"bounds": (("delta", 0.0),)}, "bound of delta is 0.0: give a number above 0"),
        ({"bounds": (("delta", -1.0),)}, "bound of delta is -1.0"),
        ({"bounds": (("delta", math.nan),)}, "bound of delta is nan"),
        ({"bounds": (("delta", math.inf),)}, "bound of delta is infinite, so no noise hides it"),
        ({"bounds": (("delta", 1.0), ("delta", 2.0))}, "two bounds"),
        ({"noise": -0.1}, "noise multiplier is -0.1"),
        ({"noise": math.nan}, "noise multiplier is nan"),
        ({"noise": math.inf}, "noise multiplier is inf"),
        ({"delta": 0.0}, "delta is 0"),
        ({"delta": 1.0}, "delta is 1"),
        ({"epsilon": 0.0}, "epsilon is 0"),
        ({"epsilon": math.inf}, "epsilon is inf"),
        ({"epsilon": 1.0, "noise": 0.0}, "budget but no noise"),
        ({"nominal": 0}, "nominal cohort is 0"),
        ({"participation": Participation(max_participations=5)}, "twice in one server step"),
        ({"simulate_amplification": True, "participation": Participation()}, "twice in one server step"),
        ({"simulate_amplification": True, "correlation": TreeNoise()}, "correlated noise is not amplified"),
        (
            {"adaptive": AdaptiveClipping(), "correlation": BandedNoise(2)},
            "correlated noise needs fixed bounds",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], says: str) -> None:
    right = {"bounds": (("delta", 1.0),), "noise": 1.0, "delta": 1e-5, "participation": BOUNDED}
    Private(**right)
    with pytest.raises(InputError, match=says) as error:
        Private(**(right | wrong))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "options", "says"),
    [
        ({"participation": Participation(min_separation=1)}, {}, "must be bounded: give"),
        ({}, {"dispatch": Phases(3)}, "cannot be bounded under phases or queues"),
        ({}, {"dispatch": Queues(5)}, "cannot be bounded under phases or queues"),
        ({"simulate_amplification": True}, {}, "only Poisson sampling amplifies"),
        (
            {"simulate_amplification": True},
            {"dispatch": Poisson(0.1), "weights": Polynomial()},
            "use constant ones",
        ),
        (
            {"simulate_amplification": True},
            {"dispatch": Poisson(0.1), "algorithm": fadas(0.1, 0.1, damp=Shrink(5))},
            "FedOpt's server uses the staleness",
        ),
        (
            {"simulate_amplification": True},
            {"dispatch": Poisson(0.1), "availability": Cycle(10.0, 0.1)},
            "drawn more often when fewer are available",
        ),
        ({"summation": Secure(minimum=2), "bounds": (("delta", 1e4),)}, {}, None),
        (
            {"summation": Secure(minimum=2), "bounds": (("delta", 11_000.0),)},
            {},
            "bound of delta is 11000, and secure aggregation holds 10922.7 a number",
        ),
        ({"nominal": 2}, {}, "nominal cohort of 2 is below the buffer of 3"),
        ({"bounds": (("delat", 1.0),)}, {}, "unknown upload field 'delat': did you mean delta"),
        ({"bounds": ()}, {}, "field delta has no bound"),
        ({"shares": (("delta", 0.5),)}, {}, "squares of the shares add up to 0.25"),
        ({"adaptive": AdaptiveClipping(noise=0.1)}, {}, "leaves nothing for the rest"),
        ({"adaptive": AdaptiveClipping(), "bounds": (("shift", 1.0),)}, {"algorithm": UNIT}, None),
        (
            {"adaptive": AdaptiveClipping(), "noise": 0.0, "bounds": (("delta", math.inf),)},
            {},
            "no bound to move",
        ),
        ({"epsilon": 0.01}, {}, "not one server step fits"),
    ],
)
def test_runs_that_do_not_meet_the_assumptions_are_refused(
    settings: dict[str, Any], options: dict[str, Any], says: str | None
) -> None:
    right = {"bounds": (("delta", 1.0),), "noise": 1.0, "delta": 1e-5, "participation": BOUNDED}
    private = Private(**(right | settings))
    if says is None:
        opened(private, **options)
        return
    with pytest.raises(InputError, match=says) as error:
        opened(private, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "algorithm", [PLAIN, FedAsync(0.1), fadas(0.1, 0.1), fadas(0.1, 0.1, damp=Shrink(math.inf))]
)
def test_a_server_that_does_not_read_staleness_may_simulate_amplification(algorithm: AnyAlgorithm) -> None:
    opened(
        Private.of(algorithm, 1.0, 1.0, 1e-5, simulate_amplification=True), algorithm, dispatch=Poisson(0.1)
    )


def test_servers_that_read_staleness_are_found_by_trying_them() -> None:
    methods = {name: build(name, Setting(3, 3, 10), {}) for name in CATALOGUE}
    assert [name for name, method in methods.items() if server_reads_staleness(method)] == [
        "cadence",
        "fadas-da",
    ]


def test_a_budget_of_one_contribution_is_enough_and_so_are_weights_below_one() -> None:
    private = Private.of(PLAIN, 1.0, 1.0, 1e-5, participation=BOUNDED)
    once = PldAccountant().epsilon([Releases(1.0, 1)], 1e-5)

    @dataclasses.dataclass(frozen=True)
    class Halves:
        def __call__(self, staleness: int) -> float:
            return 0.5

    opened(dataclasses.replace(private, epsilon=once), weights=Halves())
    with pytest.raises(InputError, match="not one server step fits"):
        opened(dataclasses.replace(private, epsilon=0.99 * once), weights=Halves())


def test_bounds_are_asked_for_by_field_where_there_are_several() -> None:
    scaffold = build("scaffold", Setting(3, 3, 10), {})
    with pytest.raises(InputError, match="Scaffold has 2 fields to bound, delta and shift"):
        Private.of(scaffold, 1.0, 1.0, 1e-5, participation=BOUNDED)
    with pytest.raises(InputError, match="field shift has no bound"):
        Private.of(scaffold, {"delta": 1.0}, 1.0, 1e-5, participation=BOUNDED)
    assert Private.of(UNIT, 0.5, 1.0, 1e-5, participation=BOUNDED).bounds == (("shift", 0.5),)


def test_a_method_that_bounds_all_fields_is_asked_for_none() -> None:
    cadence = build("cadence", Setting(3, 3, 10), {})
    own = opened(Private.of(cadence, None, 1.0, 1e-5, participation=BOUNDED), cadence)
    assert own.bounds == {"descent": 1.0, "shift": 2.0, "ratio": 1.0}
    tighter = opened(Private.of(cadence, {"shift": 0.5}, 1.0, 1e-5, participation=BOUNDED), cadence)
    assert tighter.bounds == own.bounds | {"shift": 0.5}
    with pytest.raises(InputError, match="descent by 1, shift by 2"):
        Private.of(cadence, 0.5, 1.0, 1e-5, participation=BOUNDED)
    with pytest.raises(InputError, match="field shift has no bound"):
        Private.of(UNIT, None, 1.0, 1e-5, participation=BOUNDED)


def test_running_statistics_do_not_leave_without_noise() -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    private = Private.of(PLAIN, 1.0, 1.0, 1e-5, participation=BOUNDED)
    with pytest.raises(InputError, match="GroupNorm in place of BatchNorm"):
        list(train(PLAIN, engine(module), dispatch=Asynchronous(5), buffer=3, rounds=2, aggregate=private))


# --- whole runs


def test_adamasfl_runs_under_noise_and_counts_its_start() -> None:
    private = Private.of(UNIT, 0.5, 2.0, 1e-5, participation=BOUNDED)
    often = np.zeros(8, int)
    for shot in train(UNIT, engine(), dispatch=Asynchronous(5), buffer=3, rounds=6, aggregate=private):
        assert shot.filled is not None
        for task in shot.filled.tasks:
            often[task.client] += 1
        spent = shot.spent()
        assert spent is not None
        assert spent.releases == shot.version + 1
        assert spent.epsilon == pytest.approx(
            PldAccountant().epsilon([Releases(2.0, int(often.max()))], 1e-5)
        )
        assert "no client contributes more than 50 times" in spent.terms
    assert not torch.equal(shot.x, run(private, UNIT)[-1].x)  # the key is secret, and so another


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("correlation", [IndependentNoise(), TreeNoise(), BandedNoise(3)])
def test_a_cut_private_run_goes_on_with_the_same_noise_and_ledger(
    correlation: Any, seed: int | None, tmp_path: Path
) -> None:
    private = Private.of(
        PLAIN, 0.5, 1.0, 1e-5, participation=BOUNDED, correlation=correlation, noise_seed=seed
    )
    options = {"dispatch": Asynchronous(5), "buffer": 3, "rounds": 8, "aggregate": private}
    whole = []
    for shot in train(PLAIN, engine(), **options):
        if shot.version == 4:
            checkpoint.save(tmp_path / "state.safetensors", shot.checkpoint())
        whole.append(shot)
    saved = checkpoint.load(tmp_path / "state.safetensors")
    rest = list(train(PLAIN, engine(), resume=saved, **options))
    for left, right in zip(whole[5:], rest, strict=True):
        assert torch.equal(left.x, right.x)
    assert whole[-1].spent() == rest[-1].spent()
    assert (saved.facts["aggregate"]["key"] is None) == (seed is not None)
    assert ("follow from a seed" in rest[-1].spent().terms) == (seed is not None)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "correlation", [IndependentNoise(), TreeNoise(), BandedNoise(3)], ids=lambda shape: shape.name
)
def test_two_ways_to_go_on_have_noise_that_cancels_only_where_their_sums_are_the_same(
    correlation: NoiseCorrelation,
) -> None:
    size, noise = 4000, 2.0
    private = Private.of(PLAIN, 1.0, noise, 1e-5, participation=BOUNDED, correlation=correlation)
    now = cohort(3)

    def release(made: PrivateAggregation, step: int, seed: int) -> torch.Tensor:
        uploads = Upload(randn(3, size, seed=seed))
        mean: Upload = made.release(made.collect(uploads, tasks(3, 3 * step), now), now)
        plain = clip(uploads, 1.0)[0].delta.sum(0) / 3
        return 3 * (mean.delta - plain)

    before = opened(private, size=size)
    for step in range(3):
        release(before, step, step)
    ways = [opened(private, size=size) for _ in range(3)]
    for way in ways:
        way.load(before.save())
    same, again, other = (
        [release(way, step, seed + step) for step in (3, 4)]
        for way, seed in zip(ways, (0, 0, 9), strict=True)
    )
    for a, b, c in zip(same, again, other, strict=True):
        assert torch.equal(a, b)
        # what was drawn before the checkpoint may be the same in both, a fresh draw of each is not
        assert float((a - c).std()) > 1.3 * noise


def test_a_private_run_cut_in_its_start_goes_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["offbeat.training.loop"], "_MIN_PIECE", 3)
    private = Private.of(UNIT, 0.5, 1.0, 1e-5, participation=BOUNDED, adaptive=AdaptiveClipping())
    options = {"dispatch": Asynchronous(5), "buffer": 3, "rounds": 4, "aggregate": private}
    seen: list[checkpoint.Checkpoint] = []
    whole = list(train(UNIT, engine(), observe_start=lambda now: seen.append(now.checkpoint()), **options))
    assert seen
    for saved in seen:
        rest = list(train(UNIT, engine(), resume=saved, **options))
        assert all(torch.equal(left.x, right.x) for left, right in zip(whole, rest, strict=True))
        assert whole[-1].spent() == rest[-1].spent()


def saved_terms(shot: Any) -> str:
    return str(shot.checkpoint().facts["aggregate"]["spent"]["terms"])


def test_amplification_is_not_claimed_with_a_buffer_of_fixed_size() -> None:
    with pytest.raises(InputError) as error:
        Private.of(PLAIN, 0.5, 2.0, 1e-5, amplified=True)
    said = str(error.value)
    assert said.startswith(
        "amplification by sampling does not hold for a buffer of fixed size, where another"
    )
    assert "bound how often a client contributes with Participation(max_participations=...)" in said
    assert said.endswith("or give simulate_amplification=True for a figure that is not a guarantee.")
    assert not Private.of(
        PLAIN, 0.5, 2.0, 1e-5, participation=BOUNDED, amplified=False
    ).simulate_amplification


def test_a_checkpoint_of_before_goes_on_whichever_name_its_setting_had() -> None:
    for claims in ({"simulate_amplification": True}, {"participation": BOUNDED}):
        private = Private.of(PLAIN, 0.5, 2.0, 1e-5, noise_seed=1, **claims)
        options: dict[str, Any] = {"dispatch": Poisson(0.3), "buffer": 3, "rounds": 6, "aggregate": private}
        whole, saved = [], None
        for shot in train(PLAIN, engine(), **options):
            whole.append(shot)
            saved = shot.checkpoint() if shot.version == 3 else saved
        assert saved is not None
        named = saved.facts["settings"]["aggregate"].replace("simulate_amplification=", "amplified=")
        assert "amplified=" in named
        facts = saved.facts | {"settings": saved.facts["settings"] | {"aggregate": named}}
        rest = list(train(PLAIN, engine(), resume=saved._replace(facts=facts), **options))
        assert torch.equal(rest[-1].x, whole[-1].x)


def test_the_budget_of_a_simulation_stops_it_at_the_last_step_that_fits() -> None:
    private = Private.of(PLAIN, 0.5, 2.0, 1e-5, epsilon=5.0, simulate_amplification=True)
    # 8 clients and a buffer of 3: each step is accounted at a rate of 3/8, not the dispatcher's 0.3
    shots = run(private, dispatch=Poisson(0.3), rounds=50)
    last = shots[-1].version
    here, beyond = (PldAccountant().epsilon([Releases(2.0, n, 3 / 8)], 1e-5) for n in (last, last + 1))
    assert here <= 5.0 < beyond
    assert shots[-1].ended == (
        f"the simulated budget (no privacy guarantee) of epsilon 5 is spent after {last} server steps."
    )
    assert [shot.ended for shot in shots[:-1]] == [None] * (len(shots) - 1)
    spent = shots[-1].spent()
    assert spent is not None
    assert spent.epsilon == here
    assert spent.simulated
    assert spent.terms.startswith(
        "SIMULATION: this is not a privacy guarantee, since amplification by sampling"
    )
    assert "computed as amplified by Poisson sampling at rate 0.375" in spent.terms
    assert saved_terms(shots[-1]) == spent.terms


def test_a_start_is_accounted_without_amplification() -> None:
    private = Private.of(UNIT, 0.5, 2.0, 1e-5, simulate_amplification=True, accountant=RdpAccountant())
    shots = run(private, UNIT, dispatch=Poisson(0.3))
    spent = shots[-1].spent()
    assert spent is not None
    expected = RdpAccountant().epsilon([Releases(2.0, 1), Releases(2.0, 6, 3 / 8)], 1e-5)
    assert spent.epsilon == pytest.approx(expected)
    assert "the start with all clients is counted without amplification" in spent.terms


@pytest.mark.parametrize(
    ("correlation", "noise"), [(IndependentNoise(), 4.0), (TreeNoise(), 7.0), (BandedNoise(2), 6.0)]
)
def test_a_bounded_runs_budget_stops_it_and_a_checkpoint_resumes_to_the_same_stop(
    correlation: Any, noise: float
) -> None:
    private = Private.of(PLAIN, 0.5, noise, 1e-5, epsilon=2.0, participation=BOUNDED, correlation=correlation)
    options = {"dispatch": Asynchronous(5), "buffer": 3, "rounds": 60, "aggregate": private}
    shots, saved = [], None
    for shot in train(PLAIN, engine(), **options):
        if shot.version == 2:
            saved = shot.checkpoint()
        shots.append(shot)
    last = shots[-1].checkpoint()
    assert 2 < shots[-1].version < 60
    assert shots[-1].ended is not None
    assert shots[-1].ended.startswith("the privacy budget of epsilon 2 is spent after")
    assert shots[-1].spent().epsilon <= 2.0  # type: ignore[union-attr]
    rest = list(train(PLAIN, engine(), resume=saved, **options))
    assert torch.equal(rest[-1].x, shots[-1].x)
    assert rest[-1].ended == shots[-1].ended
    assert list(train(PLAIN, engine(), resume=last, **options)) == []
    with pytest.raises(InputError, match=r"another run: aggregate was .*epsilon=2.0.*now .*epsilon=20.0"):
        list(
            train(
                PLAIN,
                engine(),
                resume=last,
                **(options | {"aggregate": dataclasses.replace(private, epsilon=20.0)}),
            )
        )


def test_a_bounded_budget_ends_when_some_client_has_contributed_as_often_as_fits() -> None:
    private = Private.of(PLAIN, 0.5, 4.0, 1e-5, epsilon=2.0, participation=BOUNDED)
    often = max(n for n in range(1, 50) if PldAccountant().epsilon([Releases(4.0, n)], 1e-5) <= 2.0)
    shots = run(private, rounds=60)
    counts = np.zeros((len(shots), 8), int)
    for place, shot in enumerate(shots[1:], 1):
        counts[place] = counts[place - 1]
        assert shot.filled is not None
        for task in shot.filled.tasks:
            counts[place, task.client] += 1
    assert counts[-2].max() == often - 1
    assert counts[-1].max() == often
    assert f"some client contributed {often} times" in str(shots[-1].ended)


def test_correlated_noise_is_accounted_by_its_sensitivity() -> None:
    private = Private.of(PLAIN, 0.5, 4.0, 1e-5, participation=BOUNDED, correlation=TreeNoise())
    shots = run(private)
    most = max(
        sum(task.client == client for s in shots[1:] for task in s.filled.tasks) for client in range(8)
    )  # type: ignore[union-attr]
    sensitivity = TreeNoise().sensitivity(6, most, 1)
    spent = shots[-1].spent()
    assert spent is not None
    assert spent.epsilon == pytest.approx(PldAccountant().epsilon([Releases(4.0 / sensitivity, 1)], 1e-5))
    assert "noise is correlated over server steps (tree)" in spent.terms


def test_what_a_checkpoint_says_of_privacy_can_be_read_without_the_run(tmp_path: Path) -> None:
    private = Private.of(PLAIN, 0.5, 4.0, 1e-5, participation=BOUNDED)
    shot = run(private)[-1]
    checkpoint.save(tmp_path / "state.safetensors", shot.checkpoint())
    said = checkpoint.load(tmp_path / "state.safetensors").facts["aggregate"]["spent"]
    spent = shot.spent()
    assert spent is not None
    releases = [Releases(*each) for each in said["releases"]]
    assert said["accountant"] == "pld"
    assert PldAccountant().epsilon(releases, said["delta"]) == spent.epsilon
    assert (said["made"], said["terms"]) == (spent.releases, spent.terms)


def test_the_key_is_in_the_checkpoint_and_nowhere_else() -> None:
    private = Private.of(PLAIN, 0.5, 4.0, 1e-5, participation=BOUNDED)
    shot = run(private)[-1]
    facts = shot.checkpoint().facts
    key = facts["aggregate"]["key"]
    assert len(bytes.fromhex(key)) == 32
    facts["aggregate"]["key"] = ""
    assert key not in repr(facts)
    assert key not in repr(private)
    assert key not in repr(shot.spent())


def test_a_bound_that_adapts_moves_towards_the_norms_and_is_saved() -> None:
    private = Private.of(
        PLAIN, 50.0, 0.5, 1e-5, participation=BOUNDED, adaptive=AdaptiveClipping(0.5, rate=1.0)
    )
    options = {"dispatch": Asynchronous(8), "buffer": 6, "rounds": 30, "aggregate": private}
    bounds, saved = [], None
    for shot in train(PLAIN, engine(), **options):
        now = shot.checkpoint()
        bounds.append(now.facts["aggregate"]["bounds"]["delta"])
        if shot.version == 10:
            saved = now
    assert bounds[0] == 50.0
    assert bounds[-1] < 5.0
    rest = list(train(PLAIN, engine(), resume=saved, **options))
    assert rest[-1].checkpoint().facts["aggregate"]["bounds"]["delta"] == bounds[-1]


def test_a_bound_that_adapts_stops_at_what_can_be_summed_in_secret() -> None:
    secure = Secure(minimum=2)
    private = Private.of(
        PLAIN, 1.0, 0.0, 1e-5, adaptive=AdaptiveClipping(rate=50.0), summation=secure, **FREE
    )
    made, now = opened(private), cohort(3)
    made.release(made.collect(Upload(100 * randn(3, 4)), tasks(3), now), now)
    assert made.bounds["delta"] == pytest.approx(10922.66, rel=1e-4)  # (2^31 - 1) / 3 / 2^16


def test_bounds_that_the_algorithm_guarantees_do_not_adapt() -> None:
    private = Private.of(UNIT, 50.0, 1.0, 1e-5, participation=BOUNDED, adaptive=AdaptiveClipping())
    bounds = run(private, UNIT)[-1].checkpoint().facts["aggregate"]["bounds"]
    assert bounds["descent"] == 1.0
    assert bounds["shift"] != 50.0


@pytest.mark.parametrize("name", ["ma-fedavgm", "ma-light-fedadam"])
def test_noise_secure_sums_and_momentum_approximation_in_one_run(name: str) -> None:
    algorithm = build(name, Setting(3, 3, 8), {"local_lr": 0.1})
    private = Private.of(algorithm, 0.5, 0.1, 1e-5, participation=BOUNDED, noise_seed=4)
    options = {"algorithm": algorithm, "rounds": 8, "max_staleness": 20}
    plain = run(private, **options)
    secure = run(dataclasses.replace(private, summation=Secure(minimum=3, bits=20)), **options)
    assert torch.isfinite(plain[-1].x).all()
    torch.testing.assert_close(secure[-1].x, plain[-1].x, rtol=0, atol=1e-3)
    assert not torch.equal(secure[-1].x, plain[-1].x)


def test_engines_agree_under_noise() -> None:
    private = Private.of(UNIT, 0.5, 0.3, 1e-5, participation=BOUNDED, noise_seed=4)
    world = make_world()
    left, right = (
        list(
            train(
                UNIT,
                kind(world.problem, world.population, Exponential(1.0)),
                dispatch=Asynchronous(5),
                buffer=3,
                rounds=5,
                aggregate=private,
            )
        )[-1].x
        for kind in (Sequential, Vectorised)
    )
    torch.testing.assert_close(left, right, rtol=0, atol=1e-11)


def test_a_delta_that_promises_little_is_told_with_the_epsilon() -> None:
    for delta, told in ((1e-5, False), (0.2, True)):
        spent = run(Private.of(PLAIN, 1.0, 1.0, delta, participation=BOUNDED), rounds=1)[-1].spent()
        assert spent is not None
        assert ("delta is not below one in the 8 clients" in spent.terms) == told


def test_a_snapshot_tells_what_was_spent_when_it_was_taken() -> None:
    shots = run(Private.of(PLAIN, 1.0, 1.0, 1e-5, participation=Participation(9, 1)))
    told = [shot.spent().epsilon for shot in shots]  # type: ignore[union-attr]
    assert told == sorted(told)
    assert told[0] == 0.0 < told[1] < told[-1]


def test_a_checkpoint_with_a_key_is_its_owners_alone(tmp_path: Path) -> None:
    shot = run(Private.of(PLAIN, 1.0, 1.0, 1e-5, participation=Participation(9, 1)))[-1]
    tmp_path.chmod(0o755)
    checkpoint.save(tmp_path / "private", shot.checkpoint())
    checkpoint.save(tmp_path / "plain", run(Mean())[-1].checkpoint())
    assert (tmp_path / "private").stat().st_mode & 0o077 == 0
    assert (tmp_path / "plain").stat().st_mode & 0o040


def test_who_is_drawn_is_a_secret_where_that_is_simulated_to_amplify_and_goes_on_after_a_resume() -> None:
    def drawn(seed: int | None, **others: Any) -> list[Any]:
        aggregate = Private.of(PLAIN, 1.0, 1.0, 1e-5, simulate_amplification=True, noise_seed=seed)
        return run(aggregate, dispatch=Poisson(0.5), rounds=6, **others)

    def tasks_of(shots: list[Any]) -> list[Any]:
        return [shot.filled.tasks for shot in shots if shot.filled]

    once, again = drawn(None), drawn(None)
    assert tasks_of(once) != tasks_of(again)  # although the run's seed is the same
    assert tasks_of(drawn(1)) == tasks_of(drawn(2))  # a simulation's sample follows from that seed
    saved: list[Any] = []
    aggregate = Private.of(PLAIN, 1.0, 1.0, 1e-5, simulate_amplification=True)
    setting: dict[str, Any] = {"dispatch": Poisson(0.5), "buffer": 3, "rounds": 6, "aggregate": aggregate}
    whole = []
    for shot in train(PLAIN, engine(), **setting):
        whole.append(shot)
        if shot.version == 3:
            saved.append(shot.checkpoint())
    rest = list(train(PLAIN, engine(), **setting, resume=saved[0]))
    assert tasks_of(whole)[3:] == tasks_of(rest)
    assert torch.equal(whole[-1].x, rest[-1].x)


def test_the_names_of_earlier_checkpoints_are_read_as_the_present_ones() -> None:
    """As 0.4 wrote them."""
    before = (
        "Private(bounds=(('delta', 0.5),), noise=1.0, delta=1e-05, epsilon=None, amplified=False, "
        "participation=Participation(max_participations=50, apart=1), shares=(), correlation=Independent(), "
        "accountant=Pld(cells=100000), adaptive=Quantile(quantile=0.5, rate=0.2, noise=None), nominal=None, "
        "summation=PlainSum(), noise_seed=None)"
    )
    now = Private((("delta", 0.5),), 1.0, 1e-5, participation=BOUNDED, adaptive=AdaptiveClipping())
    assert current_repr(before) == repr(now) == current_repr(repr(now))
