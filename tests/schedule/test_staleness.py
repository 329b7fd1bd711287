"""Weights of stale updates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.schedule.staleness import Equal, Hinge, Polynomial, parse_weights

# By hand, from the formulas of the FedAsync paper.
HAND = {
    "constant": {0: 1.0, 100: 1.0},
    "polynomial:0.5": {0: 1.0, 3: 0.5, 99: 0.1},
    "polynomial:2": {0: 1.0, 1: 0.25},
    "hinge:10:4": {0: 1.0, 4: 1.0, 5: 1 / 11, 6: 1 / 21},
}


@pytest.mark.parametrize("text", HAND)
def test_weights_are_the_papers(text: str) -> None:
    weigh = parse_weights(text)
    assert {age: weigh(age) for age in HAND[text]} == pytest.approx(HAND[text])


@given(st.sampled_from([Equal(), Polynomial(0.3), Hinge(2, 1)]), st.integers(0, 1000))
def test_an_older_update_never_counts_more(weigh: Equal | Polynomial | Hinge, age: int) -> None:
    assert 0 < weigh(age + 1) <= weigh(age) <= weigh(0) == 1


@pytest.mark.parametrize("text", HAND)
def test_weights_and_their_text_are_one(text: str) -> None:
    assert str(parse_weights(text)) == text


def test_the_papers_values_are_the_defaults() -> None:
    assert parse_weights("polynomial") == Polynomial(0.5)
    assert parse_weights("hinge") == Hinge(10, 4)
