import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.aggregate.mean import MeanAggregation, PlainSum, PrivacyCost
from offbeat.aggregate.uploads import ConstantGradient
from offbeat.core import Batch, Cohort
from offbeat.trees import Tree


def cohort(weights: list[float]) -> Cohort:
    return Cohort(3, 10, (0,) * len(weights), tuple(weights))


def weighted_mean(uploads: Tree, made: Cohort) -> Tree:
    averaging = MeanAggregation(PlainSum(), private=False)
    return averaging.release(averaging.collect(uploads, (), made), made)


@given(st.lists(st.floats(0.1, 2.0), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_mean_divides_by_how_many_there_are_and_does_not_depend_on_their_order(weights, random) -> None:  # type: ignore[no-untyped-def]
    uploads = torch.randn(len(weights), 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean = weighted_mean((uploads,), cohort(weights))[0]
    by_hand = sum(w * u for w, u in zip(weights, uploads, strict=True)) / len(weights)
    torch.testing.assert_close(mean, by_hand, rtol=0, atol=1e-14)
    order = list(range(len(weights)))
    random.shuffle(order)
    shuffled = weighted_mean((uploads[order],), cohort([weights[place] for place in order]))[0]
    torch.testing.assert_close(mean, shuffled, rtol=0, atol=1e-14)


def test_the_share_and_the_mean_weight_are_what_they_say() -> None:
    made = cohort([1.0, 0.5])
    assert made.share == 0.2
    assert made.mean_weight == 0.75


@pytest.mark.parametrize("numbers", [1, 6, 7, 1000])
def test_rows_that_are_converted_a_few_at_a_time_are_all_added(
    monkeypatch: pytest.MonkeyPatch, numbers: int
) -> None:
    """Of three numbers each: so many numbers at a time are one row, two rows or all."""
    monkeypatch.setattr("offbeat.aggregate.mean._ADDED", numbers)
    uploads = torch.arange(15, dtype=torch.float32).reshape(5, 3)
    total = PlainSum().total((uploads,), (), cohort([1.0, 2.0, 4.0, 8.0, 16.0]), torch.float64)[0]
    assert total.tolist() == [sum(2**row * (3 * row + column) for row in range(5)) for column in range(3)]


def test_the_json_of_a_privacy_cost_has_null_for_infinity_alone() -> None:
    cost = PrivacyCost(math.inf, 1e-5, 3, "no noise", 2.5)
    assert cost.as_json() == {
        "epsilon": None, "delta": 1e-5, "releases": 3, "terms": "no noise", "unamplified": 2.5
    }  # fmt: skip


def test_a_constant_gradient_descends_by_its_own_value() -> None:
    gradient, x, batch = ConstantGradient(3.0), torch.tensor([1.0, -2.0]), Batch((torch.zeros(1),))
    assert gradient.descend(x, batch, 0.5).tolist() == [-0.5, -3.5]
    assert torch.equal(gradient.descend(x, batch, 0.5), x - 0.5 * gradient(x, batch))
    assert float(gradient.with_loss(x, batch)[1]) == 3.0
