"""Attacks on privacy that a leader, a reader of models or another client may try; none of them may work."""

import math
from typing import Any

import pytest
import torch

from offbeat import Asynchronous, FedOpt
from offbeat.aggregate.mean import AggregationContext
from offbeat.aggregate.private import Private, PrivateAggregation
from offbeat.aggregate.secure import Secure
from offbeat.algorithms.fedopt import Upload
from offbeat.core import Cohort, Task
from offbeat.privacy import clipping
from offbeat.privacy.correlated import BandedNoise, IndependentNoise, NoiseCorrelation, TreeNoise
from offbeat.privacy.mechanism import AdaptiveClipping
from offbeat.privacy.secure.terms import ShortBatchError
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import Equal, Polynomial

METHOD = FedOpt(0.1, 1.0)
LOW_PRECISION = [torch.bfloat16, torch.float16, torch.float32]
ONCE = Participation(max_participations=1, min_separation=1)


def opened(private: Private, dtype: torch.dtype, size: int, buffer: int) -> PrivateAggregation:
    x = torch.zeros(size, dtype=dtype)
    return private.open(
        AggregationContext(
            METHOD, x, Asynchronous(buffer), Equal(), buffer, 10 * buffer, 10, math.inf, seed=0
        )
    )


def release(made: PrivateAggregation, uploads: torch.Tensor, first: int = 0) -> torch.Tensor:
    count = len(uploads)
    cohort = Cohort(0, 10 * count, (0,) * count, (1.0,) * count)
    tasks = [Task(first + client, 0, 0) for client in range(count)]
    mean: Upload = made.release(made.collect(Upload(uploads), tasks, cohort), cohort)
    return mean.delta


# --- the dtype of the model


@pytest.mark.parametrize(
    ("dtype", "others", "noise"),
    [(torch.bfloat16, 4112, 1.0), (torch.float16, 4098, 0.8), (torch.float32, 4112, 1.0)],
)
def test_rounding_to_the_dtype_does_not_tell_whether_a_client_is_there(
    dtype: torch.dtype, others: int, noise: float
) -> None:
    """The sum of the others lies just below the middle of two numbers of the dtype, and the client's above.

    Where sum and noise are rounded to them, the noise is lost and every output is told apart.
    """
    trials, released = 25, []
    for present in (0.0, 1.0):
        uploads = torch.zeros(4200, 1, dtype=dtype)
        uploads[:others] = 1.0
        uploads[-1] = present
        looks = [
            Private.of(METHOD, 1.0, noise, 1e-5, participation=ONCE, noise_seed=seed + int(1000 * present))
            for seed in range(trials)
        ]
        released.append([release(opened(private, dtype, 1, 4200), uploads).item() for private in looks])
    absent, present_ones = (torch.tensor(each, dtype=torch.float64) for each in released)
    best = max(
        (int((absent < threshold).sum()) + int((present_ones >= threshold).sum())) / (2 * trials)
        for threshold in torch.cat([absent, present_ones]).unique()
    )
    # the likelihood ratio test of the two Gaussians is right with probability Phi(1 / (2 noise)) <= 0.74
    assert best < 0.93


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("correlation", [IndependentNoise(), TreeNoise(), BandedNoise(3)], ids=str)
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_the_noise_of_a_model_of_any_dtype_has_the_promised_deviation(
    dtype: torch.dtype, correlation: NoiseCorrelation, secure: bool
) -> None:
    """Within one per cent; the sum is zero, so that the released mean is the noise."""
    size, count, noise = 100_000, 6, 0.5
    bound = math.sqrt(size) * 8
    summation: dict[str, Any] = {"summation": Secure(5)} if secure else {}
    private = Private.of(
        METHOD, bound, noise, 1e-5, participation=ONCE, correlation=correlation, noise_seed=1, **summation
    )
    uploads = torch.full((count, size), 4.0, dtype=dtype)
    uploads[::2] = -4.0
    released = release(opened(private, dtype, size, count), uploads)
    assert released.dtype == dtype
    promised = noise * (bound + (2.0**-17 * math.sqrt(size) if secure else 0))
    assert (released.double() * count).std().item() == pytest.approx(promised, rel=0.01)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("correlation", [IndependentNoise(), TreeNoise(), BandedNoise(3)], ids=str)
def test_a_large_sum_leaves_the_noise_as_it_is(dtype: torch.dtype, correlation: NoiseCorrelation) -> None:
    """The noised sum is looked at before it is rounded to the model's dtype."""
    size, count, noise = 100_000, 40, 1.0
    private = Private.of(
        METHOD, 4e4, noise / 4e4, 1e-5, participation=ONCE, correlation=correlation, noise_seed=1
    )
    uploads = torch.full((count, size), 100.0, dtype=dtype)
    released = release(opened(private, torch.float64, size, count), uploads) * count
    assert released.mean().item() == pytest.approx(100.0 * count, abs=0.02)
    assert (released - 100.0 * count).std().item() == pytest.approx(noise, rel=0.01)


def test_answers_of_adaptive_clipping_are_counted_exactly() -> None:
    made = opened(
        Private.of(METHOD, 1.0, 2.0, 1e-5, participation=ONCE, adaptive=AdaptiveClipping()),
        torch.bfloat16,
        1,
        4200,
    )
    cohort = Cohort(0, 42000, (0,) * 4200, (1.0,) * 4200)
    uploads = Upload(torch.zeros(4200, 1, dtype=torch.bfloat16))
    total = made.collect(uploads, [Task(client, 0, 0) for client in range(4200)], cohort)
    assert total.answers.tolist() == [2100.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bound", [1e-2, 1.0, 30.0])
def test_clipping_in_low_precision_never_exceeds_the_bound(dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for size in (1, 7, 1000, 100_000):
        part = torch.randn(5, size, generator=generator).mul(40).to(dtype)
        clipped, _ = clipping.clip(part, bound)
        assert float(clipped.double().norm(dim=1).max()) <= bound


# --- weights that the leader chooses


def test_a_fresh_update_cannot_be_read_from_a_sum_with_stale_ones() -> None:
    """Five clients, of which one is fresh: the sum would point where its update points."""
    weights, minimum, size = Polynomial(2.0), 5, 200
    context = AggregationContext(
        METHOD, torch.zeros(size), Asynchronous(20), weights, 10, 50, 10, math.inf, seed=0
    )
    generator = torch.Generator().manual_seed(2)
    uploads = torch.randn(5, size, generator=generator)
    tasks = [Task(0, 3, 0), *(Task(client, 0, 0) for client in range(1, 5))]
    cohort = Cohort(3, 50, (0, 3, 3, 3, 3), tuple(weights(age) for age in (0, 3, 3, 3, 3)))
    with pytest.raises(ShortBatchError, match=r"hide each other like 1\.54 clients of equal weight"):
        Secure(minimum).open(context).total((uploads,), tasks, cohort)
