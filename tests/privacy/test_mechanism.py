"""What clipping, shares, noise and the ledger promise, each on its own."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import Tensor

from offbeat import InputError
from offbeat.privacy import clipping
from offbeat.privacy.accountant import RdpAccountant
from offbeat.privacy.correlated import IndependentNoise, TreeNoise
from offbeat.privacy.ledger import Ledger, PrivacyAccounting, ReleaseTotals
from offbeat.privacy.mechanism import (
    AdaptiveClipping,
    GaussianMechanism,
    check_bounds,
    noise_shares,
    secret_key,
    seeded_key,
    standard_normal,
    subkey,
)
from oracles.private import joint_sensitivity, payload_deviations, stamp_scale


class Upload(NamedTuple):
    delta: Tensor
    extra: Any = ()


def long_norm(part: Any, task: int) -> float:
    """In more digits than the code has."""
    leaves = [part] if isinstance(part, Tensor) else list(part)
    numbers = np.concatenate([leaf[task].double().numpy().ravel() for leaf in leaves]).astype(np.longdouble)
    return np.sqrt((numbers**2).sum())  # type: ignore[no-any-return]


@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([torch.float32, torch.float64]),
    st.floats(-1, 1),
    st.floats(-1, 1),
    st.integers(0, 2**20),
)
@example(1, 1, torch.float32, 1.0, -0.375, 0)  # a factor that is subnormal in single precision
@example(1, 1, torch.float32, 1.0, -1.0, 0)
def test_no_field_is_longer_than_its_bound_after_clipping(
    tasks: int, size: int, dtype: torch.dtype, magnitude: float, bound: float, seed: int
) -> None:
    far = 30 if dtype == torch.float32 else 250  # so that squares overflow and vanish in double precision
    generator = torch.Generator().manual_seed(seed)
    ten = torch.tensor(10.0, dtype=dtype) ** (far * magnitude)
    part = (
        ten * torch.randn(tasks, size, dtype=dtype, generator=generator),
        ten * torch.randn(tasks, 2, 2, dtype=dtype, generator=generator),
    )
    limit = 10.0 ** (far * bound)
    clipped, below = clipping.clip(part, limit)
    for task in range(tasks):
        before, after = long_norm(part, task), long_norm(clipped, task)
        assert after <= limit
        if below[task]:
            assert all(torch.equal(new[task], old[task]) for new, old in zip(clipped, part, strict=True))
        else:
            assert before >= limit * (1 - 1e-12)
            # what vanishes when it is shortened is at most the least number of its type
            assert after >= limit * (1 - 1e-5) - 1e-40


def test_an_infinite_bound_changes_nothing_and_zeros_stay_zeros() -> None:
    part = torch.tensor([[1e300, 1.0], [0.0, 0.0]], dtype=torch.float64)
    assert clipping.clip(part, math.inf)[0] is part
    assert torch.equal(clipping.clip(torch.zeros(2, 3), 1.0)[0], torch.zeros(2, 3))
    assert clipping.norms(torch.zeros(2, 0)).tolist() == [0.0, 0.0]


def test_norms_of_long_float32_vectors_are_those_of_double_precision() -> None:
    row = torch.full((1, 3_000_000), 0.1)
    assert clipping.norms(row).item() == pytest.approx(row.double().norm().item(), rel=1e-12)


def test_fields_are_those_that_hold_something_and_must_be_floats() -> None:
    x = torch.zeros(2, 3)
    assert list(clipping.fields(Upload(x))) == ["delta"]
    assert list(clipping.fields(Upload(x, (x, x)))) == ["delta", "extra"]
    assert list(clipping.fields((x, x))) == ["upload"]
    with pytest.raises(InputError, match="field extra has values other than floats"):
        clipping.fields(Upload(x, torch.zeros(2, dtype=torch.int64)))


@given(st.lists(st.floats(0.01, 0.4), max_size=4), st.integers(1, 4))
def test_squares_of_shares_add_up_to_one(given_ones: list[float], others: int) -> None:
    given_shares = {f"g{n}": share for n, share in enumerate(given_ones)}
    shares = noise_shares([*given_shares, *(f"o{n}" for n in range(others))], given_shares)
    assert sum(share**2 for share in shares.values()) == pytest.approx(1, abs=1e-12)
    assert given_shares.items() <= shares.items()


@pytest.mark.parametrize(
    "shares", [{"a": 0.5, "b": 0.5}, {"a": 1.0}, {"a": 1.5}, {"a": 0.0}, {"a": math.nan}]
)
def test_shares_that_cannot_be_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(InputError, match="share"):
        noise_shares(["a", "b"], shares)


def test_fields_and_bounds_must_match() -> None:
    with pytest.raises(InputError, match="field b has no bound"):
        check_bounds(["a", "b"], {"a": 1.0}, {"a": 1.0})
    with pytest.raises(InputError, match="unknown upload field 'c'"):
        check_bounds(["a", "b"], {"a": 1.0, "b": 1.0, "c": 1.0}, {"c": 1.0})


@given(st.floats(0.1, 10), st.floats(0.01, 10), st.floats(0.01, 10))
def test_all_fields_together_are_one_release_of_the_multiplier(noise: float, a: float, b: float) -> None:
    made = GaussianMechanism(noise, tuple(noise_shares(["a", "b"], {"a": 0.9}).items()), 1.0, 10, None, ())
    bounds = {"a": a, "b": b}
    stds = made.deviations(bounds, {"a": 3, "b": 4}, 0.0)
    assert sum((bounds[name] / stds[name]) ** 2 for name in stds) == pytest.approx(noise**-2)


def test_equation_17_holds_for_the_shares_of_momentum_approximation() -> None:
    """S = 1.1 S_delta is the same as xi = 2.4004 sigma (section 4.3 of arXiv 2402.09247)."""
    sigma, bound = 0.7, 0.2
    shares = noise_shares(["delta", "stamp"], {"stamp": math.sqrt(1 - 1 / 1.1**2)})
    made = GaussianMechanism(sigma, tuple(shares.items()), 1.0, 10, None, ())
    stds = made.deviations({"delta": bound, "stamp": 1.0}, {"delta": 5, "stamp": 21}, 0.0)
    xi = stds["stamp"]
    assert xi / sigma == pytest.approx(2.4004, abs=5e-5)
    gamma = stamp_scale(sigma, xi, bound)
    assert stds["delta"] == pytest.approx(sigma * joint_sensitivity([bound, gamma]), rel=1e-12)
    assert stds["delta"] == pytest.approx(sigma * 1.1 * bound, rel=1e-12)
    assert (stds["delta"], stds["stamp"]) == pytest.approx(payload_deviations(sigma, bound, gamma), rel=1e-12)


def test_rounding_of_every_number_is_covered_by_the_noise() -> None:
    made = GaussianMechanism(2.0, (("a", 1.0),), 0.5, 10, None, ())
    assert made.deviations({"a": 1.0}, {"a": 4}, 0.25) == {"a": 2.0 * 0.5 * (1.0 + 0.25 * 2)}


@given(st.floats(0.1, 5), st.integers(1, 3), st.integers(1, 500), st.floats(0.1, 3))
def test_answers_and_sums_are_together_one_release_of_the_multiplier(
    noise: float, answers: int, cohort: int, bound: float
) -> None:
    names = [f"f{n}" for n in range(answers)]
    made = GaussianMechanism(
        noise, tuple(noise_shares(names, {}).items()), 1.0, cohort, AdaptiveClipping(), tuple(names)
    )
    stds = made.deviations(dict.fromkeys(names, bound), dict.fromkeys(names, 3), 0.0)
    told = sum((bound / std) ** 2 for std in stds.values()) + answers * (0.5 / made.answer_deviation()) ** 2
    assert told == pytest.approx(noise**-2)


def test_answers_get_the_papers_noise_where_the_cohort_is_large() -> None:
    made = GaussianMechanism(1.0, (("a", 1.0),), 1.0, 100, AdaptiveClipping(), ("a",))
    assert made.answer_deviation() == 5.0
    # z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), theorem 1 of Andrew et al. 2021
    assert made.deviations({"a": 1.0}, {"a": 1}, 0.0)["a"] == pytest.approx((1 - 10.0**-2) ** -0.5)


def test_noise_on_answers_that_leaves_nothing_is_refused() -> None:
    made = GaussianMechanism(2.0, (("a", 1.0),), 1.0, 100, AdaptiveClipping(noise=1.0), ("a",))
    with pytest.raises(InputError, match="leaves nothing for the rest: give it more than 1"):
        made.check()


def test_a_moving_bound_settles_at_its_quantile() -> None:
    norms = torch.distributions.LogNormal(0.0, 1.0).icdf((torch.arange(1000) + 0.5) / 1000)
    rule, bound = AdaptiveClipping(0.8), 50.0
    for _ in range(200):
        answers = (norms <= bound).double() - 0.5
        bound = rule.move(bound, answers.sum().item(), len(norms))
    assert bound == pytest.approx(float(norms.quantile(0.8)), rel=0.02)


@pytest.mark.parametrize(
    "wrong", [{"quantile": 0.0}, {"quantile": 1.0}, {"rate": 0.0}, {"noise": -1.0}, {"rate": math.nan}]
)
def test_adaptive_clipping_refuses_what_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="adaptive clipping"):
        AdaptiveClipping(**wrong)


def test_noise_is_standard_normal() -> None:
    draws = standard_normal(seeded_key(1), (3, 0), torch.zeros(40_001, dtype=torch.float64))
    assert kstest(draws.numpy(), "norm").pvalue > 0.01
    again = standard_normal(seeded_key(1), (4, 0), torch.zeros(40_001, dtype=torch.float64))
    assert abs(torch.corrcoef(torch.stack([draws, again]))[0, 1].item()) < 4 / math.sqrt(40_001)
    halves = torch.stack([draws[:20_000], draws[20_001:]])  # the cosines and the sines
    assert abs(torch.corrcoef(halves)[0, 1].item()) < 4 / math.sqrt(20_000)


def test_noise_is_a_function_of_key_and_numbers() -> None:
    like = torch.zeros(3, 5)
    first = standard_normal(seeded_key(1), (3, 0), like)
    assert first.shape == like.shape
    assert first.dtype == like.dtype
    assert torch.equal(first, standard_normal(seeded_key(1), (3, 0), like))
    assert torch.equal(first, standard_normal(seeded_key(1), (3, 0), like.double()).float())
    others = [
        (seeded_key(1), (0, 3)),
        (seeded_key(1 + 2**32), (3, 0)),
        (subkey(seeded_key(1), "start"), (3, 0)),
    ]
    assert not any(torch.equal(first, standard_normal(key, numbers, like)) for key, numbers in others)
    assert secret_key() != secret_key()
    assert standard_normal(seeded_key(1), (0,), torch.zeros(0)).shape == (0,)
    assert standard_normal(seeded_key(1), (0,), torch.zeros(())).shape == ()


def test_the_ledger_counts_the_client_with_the_most() -> None:
    ledger = Ledger(10, max_participations=None, min_separation=1)
    ledger.begin()
    for clients in ([1, 2], [2, 3], [2, 9]):
        ledger.contribute(clients)
        ledger.release()
    assert ledger.tally == ReleaseTotals(start=True, steps=3, largest=3)
    other = Ledger(10, max_participations=None, min_separation=1)
    other.load(ledger.save())
    assert other.tally == ledger.tally
    other.contribute([2])
    assert other.tally.largest == 4


def test_the_ledger_refuses_contributions_that_the_noise_does_not_cover() -> None:
    ledger = Ledger(5, max_participations=3, min_separation=2)
    ledger.begin()
    for clients in ([0], [1], [0], [1]):
        ledger.contribute(clients)
        ledger.release()
    again = Ledger(5, max_participations=3, min_separation=2)
    again.load(ledger.save())
    for each in (ledger, again):
        with pytest.raises(InputError, match="client 1 contributed twice within 2 server steps"):
            each.contribute([1])
        with pytest.raises(InputError, match="client 0 contributed more than 3 times"):
            each.contribute([0])
    with pytest.raises(InputError, match="client 4 contributed twice"):
        ledger.contribute([4, 4])


def test_a_budget_is_the_last_tally_that_fits() -> None:
    free = PrivacyAccounting(0.8, 1e-5, 0.02, None, 1, IndependentNoise(), RdpAccountant())
    steps, contributions = free.budget(2.0, start=False, rounds=10_000)
    assert math.isinf(contributions)
    assert (
        free.epsilon(ReleaseTotals(False, int(steps), 1))
        <= 2.0
        < free.epsilon(ReleaseTotals(False, int(steps) + 1, 1))
    )
    bounded = PrivacyAccounting(5.0, 1e-5, None, 500, 1, IndependentNoise(), RdpAccountant())
    steps, contributions = bounded.budget(2.0, start=True, rounds=10_000)
    assert math.isinf(steps)
    most = int(contributions)
    assert (
        bounded.epsilon(ReleaseTotals(True, most, most))
        <= 2.0
        < bounded.epsilon(ReleaseTotals(True, most + 1, most + 1))
    )


def test_the_start_is_one_of_the_contributions_that_a_budget_of_correlated_noise_allows() -> None:
    tree = PrivacyAccounting(4.0, 1e-5, None, 3, 4, TreeNoise(), RdpAccountant())
    epsilon = tree.epsilon(ReleaseTotals(True, 40, 2))
    steps, _ = tree.budget(epsilon, start=True, rounds=1000)
    assert steps >= 40
    assert tree.epsilon(ReleaseTotals(True, int(steps), 2)) <= epsilon
    assert tree.epsilon(ReleaseTotals(True, int(steps) + 1, 2)) > epsilon
    assert tree.epsilon(ReleaseTotals(True, 40, 3)) > epsilon  # or the number would not matter


def test_a_budget_that_something_else_ends_first_is_infinite() -> None:
    assert PrivacyAccounting(5.0, 1e-5, 0.02, None, 1, IndependentNoise(), RdpAccountant()).budget(
        9.0, False, 10
    ) == (
        math.inf,
        math.inf,
    )
    assert PrivacyAccounting(5.0, 1e-5, None, 2, 1, IndependentNoise(), RdpAccountant()).budget(
        9.0, False, 1000
    ) == (
        math.inf,
        math.inf,
    )
