"""Noise that the helper adds: what the server sees, how much it is, what it is worth, and what is refused."""

import dataclasses
import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant as LibraryAccountant
from scipy.stats import chi2, norm

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Exponential,
    FedOpt,
    InputError,
    Polynomial,
    Sequential,
    train,
)
from offbeat.aggregate.mean import AggregationContext
from offbeat.aggregate.private import Private, PrivateAggregation
from offbeat.aggregate.secure import Secure
from offbeat.algorithms.fedopt import Upload
from offbeat.core import AnyAlgorithm, Cohort, Task
from offbeat.privacy.accountant import PldAccountant, RdpAccountant
from offbeat.privacy.correlated import BandedNoise
from offbeat.privacy.mechanism import AdaptiveClipping
from offbeat.renamed import current_repr
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import Equal, StalenessWeights
from worlds import make_world

METHOD = FedOpt(0.1, 1.0)
SIZE, COUNT, BOUND, NOISE = 40_000, 6, 3.0, 1.2
ROUNDED = BOUND + 2.0**-17 * math.sqrt(SIZE)  # the norm after rounding to fixed point


def private(algorithm: AnyAlgorithm = METHOD, source: str = "helper", **others: Any) -> Private:
    given: dict[str, Any] = {
        "participation": Participation(max_participations=4, min_separation=1),
        "accountant": RdpAccountant(),
        "summation": Secure(5),
        "noise_source": source,
    }
    return Private.of(algorithm, BOUND, NOISE, 1e-5, **given | others)


def opened(
    made: Private,
    size: int = SIZE,
    weights: StalenessWeights = Equal(),
    algorithm: AnyAlgorithm = METHOD,
    dtype: torch.dtype = torch.float32,
) -> PrivateAggregation:
    x = torch.zeros(size, dtype=dtype)
    return made.open(
        AggregationContext(algorithm, x, Asynchronous(20), weights, COUNT, 50, 10, math.inf, seed=0)
    )


def collect(
    made: PrivateAggregation, uploads: torch.Tensor, cohort: Cohort | None = None, version: int = 0
) -> Any:
    count = len(uploads)
    now = cohort or Cohort(version, 50, (0,) * count, (1.0,) * count)
    tasks = [Task(client, now.version - age, version) for client, age in enumerate(now.staleness)]
    return made.collect(Upload(uploads), tasks, now), now


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_server_sees_a_sum_with_the_promised_noise_and_adds_none(dtype: torch.dtype) -> None:
    made = opened(private(noise_seed=1), dtype=dtype)
    uploads = torch.zeros(COUNT, SIZE, dtype=dtype)
    uploads[:, 0] = 1.0
    total, now = collect(made, uploads)
    seen = total.uploads.delta.numpy().copy()
    seen[0] -= COUNT
    promised = NOISE * ROUNDED
    low, high = chi2.ppf([1e-5, 1 - 1e-5], SIZE)
    assert low < ((seen / promised) ** 2).sum() < high
    assert seen.std() == pytest.approx(promised, rel=0.01)
    assert np.array_equal(seen * 2**16, np.round(seen * 2**16)), "noise is whole units"
    released = made.release(total, now).delta
    assert released.dtype == dtype
    assert torch.equal(released, (total.uploads.delta / COUNT).to(dtype))


def test_both_servers_noise_is_a_root_of_two_larger() -> None:
    made = opened(private(source="both", noise_seed=1))
    total, now = collect(made, torch.zeros(COUNT, SIZE))
    helper = total.uploads.delta
    released = made.release(total, now).delta.double() * COUNT
    assert helper.std().item() == pytest.approx(NOISE * ROUNDED, rel=0.01)
    assert (released - helper).std().item() == pytest.approx(NOISE * ROUNDED, rel=0.01)
    assert released.std().item() == pytest.approx(math.sqrt(2) * NOISE * ROUNDED, rel=0.01)
    assert abs(torch.corrcoef(torch.stack([helper, released - helper]))[0, 1].item()) < 5 / math.sqrt(SIZE)


def test_noise_is_in_units_of_weighted_sums_and_for_each_field_its_own() -> None:
    weights = Polynomial(0.5)
    made = opened(
        private(noise_seed=1, adaptive=AdaptiveClipping(noise=3.0), summation=Secure(4)), weights=weights
    )
    ages = (0, 0, 0, 1, 1, 1)
    now = Cohort(3, 50, ages, tuple(weights(age) for age in ages))
    total, _ = collect(made, torch.zeros(COUNT, SIZE), now)
    rest = AdaptiveClipping(noise=3.0).rest(NOISE, COUNT, 1)
    assert total.uploads.delta.std().item() == pytest.approx(rest * ROUNDED, rel=0.01)
    answers = []
    for seed in range(300):
        small = opened(
            private(noise_seed=seed, adaptive=AdaptiveClipping(noise=3.0), summation=Secure(4)), 1, weights
        )
        answers.append(collect(small, torch.zeros(COUNT, 1), now)[0].answers.item())
    weight = sum(round(256 * weights(age)) for age in ages) / 256
    assert np.mean(answers) == pytest.approx(0.5 * weight, abs=1)
    low, high = chi2.ppf([1e-4, 1 - 1e-4], 300)
    assert low < sum((answer - 0.5 * weight) ** 2 for answer in answers) / 3.0**2 < high


def test_the_noise_of_a_step_is_the_same_for_the_same_sum_and_fresh_for_another() -> None:
    secret = opened(private(), 50)
    saved = secret.save()
    uploads = torch.zeros(COUNT, 50)

    def again(changed: torch.Tensor, version: int = 0) -> torch.Tensor:
        other = opened(private(), 50)
        other.load(saved)
        found: torch.Tensor = collect(other, changed, version=version)[0].uploads.delta
        return found

    first = collect(secret, uploads)[0].uploads.delta
    assert torch.equal(again(uploads), first)
    assert not torch.equal(again(uploads, 1), first)
    moved = uploads.clone()
    moved[0, 0] = 0.5
    assert int((again(moved) - first).count_nonzero()) > 40
    assert not torch.equal(collect(opened(private(), 50), uploads)[0].uploads.delta, first), "keys are secret"


def test_a_run_learns_resumes_and_repeats_under_the_helpers_noise() -> None:
    def run(**others: Any) -> list[Any]:
        world = make_world(clients=9)
        engine = Sequential(world.problem, world.population, Exponential(1.0))
        options = {"dispatch": Asynchronous(8), "buffer": 6, "rounds": 5} | others
        aggregate = private(noise_seed=3, summation=Secure(5), participation=Participation(5, 1))
        return list(train(METHOD, engine, aggregate=aggregate, **options))

    whole = run()
    assert torch.equal(whole[-1].x, run()[-1].x)
    world = make_world(clients=9)
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    aggregate = private(noise_seed=3, summation=Secure(5), participation=Participation(5, 1))
    for snapshot in train(METHOD, engine, aggregate=aggregate, dispatch=Asynchronous(8), buffer=6, rounds=5):
        if snapshot.version == 2:
            saved = snapshot.checkpoint()
            break
    assert torch.equal(run(resume=saved)[-1].x, whole[-1].x)
    spent = whole[-1].spent()
    assert "holds against the server and against those who see its models" in spent.terms
    assert "not against the helper" in spent.terms


# --- what it is worth


def library_epsilon(noise: float, count: int, delta: float) -> float:
    accountant = LibraryAccountant()
    accountant.compose(dp_accounting.ZCDpEvent(1 / (2 * noise**2)), count)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(
    ("noise", "count", "delta"), [(1.0, 1, 1e-5), (4.0, 10, 1e-6), (0.7, 3, 1e-7), (20.0, 400, 1e-6)]
)
def test_epsilon_is_that_of_a_library_for_concentrated_differential_privacy(
    noise: float, count: int, delta: float
) -> None:
    """The discrete Gaussian is rho-zCDP with rho = 1 / (2 sigma^2), jointly over all coordinates."""
    made = dataclasses.replace(
        private(participation=Participation(count, 1), noise_seed=0), noise=noise, delta=delta
    )
    run = opened(made, 1)
    zero = torch.zeros(COUNT, 1)
    for step in range(min(count, 3)):
        total, now = collect(run, zero, version=step)
        run.release(total, now)
    spent = run.spent()()
    assert spent.epsilon == pytest.approx(library_epsilon(noise, min(count, 3), delta), rel=1e-6)


@pytest.mark.parametrize("sigma", [0.6, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("sensitivity", [1, 2, 7])
def test_a_coordinates_exact_privacy_loss_is_within_the_claim(sigma: float, sensitivity: int) -> None:
    """One coordinate, by the library's privacy loss distribution of the discrete Gaussian itself."""
    exact = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        sigma * sensitivity, sensitivity, value_discretization_interval=1e-3
    )
    claimed = library_epsilon(sigma, 1, 1e-5)
    assert exact.get_epsilon_for_delta(1e-5) <= claimed
    assert exact.get_epsilon_for_delta(1e-5) >= 0.75 * claimed, "the claim is not idle"


# --- an attack by the server on what it sees


def shift_found_by_the_server(source: str, noise: float, sums: int = 100) -> float:
    """A 99 % lower bound on the shift by one client in units of the noise, of which 1 / noise is claimed.

    A canary spends its whole bound on the even coordinates; the odd ones show what the noise alone does. The
    best test of the two is by their sums, which are normal to within what so many sums can show.
    """
    scale, size = NOISE * (BOUND + 2.0**-17 * math.sqrt(150)), 150
    direction = torch.zeros(size, dtype=torch.float64)
    direction[::2] = 1 / math.sqrt(size / 2)
    uploads = torch.zeros(COUNT, size)
    uploads[0] = BOUND * direction
    present, absent = [], []
    for seed in range(sums):
        run = opened(dataclasses.replace(private(source=source, noise_seed=seed), noise=noise), size)
        seen = collect(run, uploads)[0].uploads.delta / scale
        present.append(float(seen @ direction))
        absent.append(float(seen @ direction.roll(1)))
    spread = math.sqrt((np.var(present, ddof=1) + np.var(absent, ddof=1)) / 2)
    gap = (np.mean(present) - np.mean(absent)) / spread
    return float(gap - norm.ppf(0.99) * math.sqrt(2 / sums + gap**2 / (4 * sums)))


@pytest.mark.parametrize("source", ["helper", "both"])
def test_an_audit_by_the_server_does_not_contradict_the_claim(source: str) -> None:
    assert 0.4 / NOISE < shift_found_by_the_server(source, NOISE) <= 1 / NOISE


def test_an_audit_by_the_server_would_find_half_the_noise() -> None:
    assert shift_found_by_the_server("helper", NOISE / 2) > 1 / NOISE


# --- what is refused


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"source": "nobody"}, "unknown source of noise 'nobody'"),
        ({"correlation": BandedNoise(3), "participation": Participation(3, 3)}, "use independent noise"),
        (
            {"participation": Participation(None, 1), "simulate_amplification": True},
            "its noise is not amplified",
        ),
    ],
)
def test_settings_that_the_helper_cannot_serve_are_refused(others: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        private(**others)


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"summation": Private.__dataclass_fields__["summation"].default}, "needs secure aggregation"),
        ({"accountant": PldAccountant()}, "use the rdp accountant"),
        ({"summation": Secure(5, bits=26)}, "with its noise takes"),
    ],
)
def test_runs_that_the_helper_cannot_serve_are_refused(others: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        opened(private(**others), 1)


def test_a_start_of_everybody_and_no_noise_at_all_are_refused() -> None:
    start = AdaMasFL(0.05, 0.1, 0.5)
    made = Private.of(
        start,
        {"shift": 1.0},
        1.0,
        1e-5,
        participation=Participation(4, 1),
        accountant=RdpAccountant(),
        summation=Secure(5),
        noise_source="helper",
    )
    with pytest.raises(InputError, match="each of which would get the helper's noise"):
        opened(made, 1, algorithm=start)
    with pytest.raises(InputError, match="no noise for the helper to add"):
        dataclasses.replace(private(), noise=0.0)


def test_a_checkpoint_of_before_has_noise_from_the_server() -> None:
    made = private(source="server")
    before = repr(made).replace(", noise_source='server')", ")")
    assert before != repr(made)
    assert current_repr(before) == current_repr(repr(made)) == repr(made)
