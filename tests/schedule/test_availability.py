"""Clients that are away, and tasks that are lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import InputError
from offbeat.schedule.availability import Always, Cycle, Dropout, parse_availability


@given(st.integers(0, 100), st.floats(0, 1e6))
def test_always_is_always(client: int, now: float) -> None:
    assert Always().bind(0)(client, now) == now


@given(st.floats(0.1, 100), st.floats(0.05, 1), st.integers(0, 50), st.floats(0, 1e4))
def test_a_client_that_is_away_returns_within_its_period(
    period: float, share: float, client: int, now: float
) -> None:
    back = Cycle(period, share).bind(1)
    returns = back(client, now)
    assert now <= returns <= now + (1 - share) * period * (1 + 1e-9) + 1e-9
    if returns > now:
        shortly = returns + share * period / 2
        assert back(client, shortly) == shortly
        almost = now + (returns - now) / 2
        assert back(client, almost) == pytest.approx(returns)


def test_a_cycle_holds_its_share_for_every_client_with_its_own_phase() -> None:
    back = Cycle(10, 0.3).bind(0)
    moments = [10 * step / 1000 for step in range(1000)]
    for client in range(5):
        assert sum(back(client, now) == now for now in moments) == pytest.approx(300, abs=2)
    assert len({back(client, 0.0) for client in range(5)}) > 2


def test_another_seed_is_another_phase() -> None:
    cycle = Cycle(10, 0.1)
    assert [cycle.bind(0)(c, 0.0) for c in range(9)] != [cycle.bind(1)(c, 0.0) for c in range(9)]


def test_tasks_are_lost_as_often_as_said_and_the_same_ones_each_time() -> None:
    lost = [Dropout(0.2).loses(5, client, visit) for client in range(100) for visit in range(100)]
    assert sum(lost) == pytest.approx(2000, abs=160)  # four standard deviations
    assert lost == [Dropout(0.2).loses(5, client, visit) for client in range(100) for visit in range(100)]
    assert not any(Dropout().loses(5, client, 0) for client in range(1000))


@pytest.mark.parametrize("text", ["always", "cycle:24:0.25"])
def test_availability_and_its_text_are_one(text: str) -> None:
    assert str(parse_availability(text)) == text


@pytest.mark.parametrize("probability", [-0.1, 1.0, float("nan")])
def test_a_bad_drop_out_is_one_sentence(probability: float) -> None:
    with pytest.raises(InputError, match="drop-out"):
        Dropout(probability)


def test_patience_is_a_finite_number() -> None:
    with pytest.raises(InputError, match="patience"):
        Dropout(0.5, patience=float("inf"))
