"""Properties of virtual time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core import Task
from offbeat.schedule.availability import Dropout
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import RoundRefill
from offbeat.schedule.rng import FadasScriptRng, KeyedRng, Rng

LAWS = ["constant:1", "constant:0", "exponential:1", "tiers:large", "half-normal:2"]


def clock(law: str, draws: Rng, dropout: Dropout | None = None) -> Clock:
    return Clock(parse_delay(law).bind(draws, 1000), draws, dropout)


@given(st.sampled_from(LAWS), st.lists(st.one_of(st.just("next"), st.floats(0, 5)), max_size=60))
def test_time_never_goes_back_and_nothing_is_left_behind(law: str, moves: list[str | float]) -> None:
    time = clock(law, KeyedRng(1), Dropout(0.3, patience=2.0))
    flying: set[Task] = set()
    now = 0.0
    for number, move in enumerate(moves):
        time.start(Task(number, number, 0))
        flying.add(Task(number, number, 0))
        if isinstance(move, float):
            time.wait(now + move - 2)
        else:
            arrival = time.next()
            flying.remove(arrival.task)
            assert arrival.started <= arrival.time <= time.now
        assert time.now >= now
        assert time.busy == len(flying)
        now = time.now


def test_arrivals_come_in_the_order_in_which_they_fall_due() -> None:
    time = clock("exponential:1", KeyedRng(0))
    for client in range(200):
        time.start(Task(client, 0, 0))
    dues = [time.next().time for _ in range(200)]
    assert dues == sorted(dues)
    assert len(set(dues)) == 200


def test_ties_are_broken_by_the_order_of_starting() -> None:
    time = clock("constant:3", KeyedRng(0))
    for client in (5, 1, 9, 2):
        time.start(Task(client, 0, 0))
    assert [time.next().task.client for _ in range(4)] == [5, 1, 9, 2]
    assert time.now == 3


def test_a_lost_task_is_noticed_after_patience_times_its_duration() -> None:
    draws = KeyedRng(0)
    time = clock("constant:2", draws, Dropout(0.5, patience=3.0))
    for client in range(100):
        time.start(Task(client, 0, 0))
    arrivals = [time.next() for _ in range(100)]
    assert {(arrival.lost, arrival.time) for arrival in arrivals} == {(False, 2.0), (True, 6.0)}


def test_a_sure_task_is_never_lost() -> None:
    time = clock("constant:2", KeyedRng(0), Dropout(0.99))
    for client in range(100):
        time.start(Task(client, 0, 0), sure=True)
    assert not any(time.next().lost for _ in range(100))


def test_what_falls_due_during_a_wait_keeps_its_own_time() -> None:
    time = clock("constant:2", KeyedRng(0))
    time.start(Task(0, 0, 0))
    time.wait(10.0)
    assert time.next().time == 2.0
    assert time.now == 10.0


def test_a_duration_depends_on_client_and_visit_alone() -> None:
    one, other = clock("exponential:1", KeyedRng(0)), clock("exponential:1", KeyedRng(0))
    one.start(Task(1, 0, 0))
    one.start(Task(2, 0, 4))
    other.start(Task(2, 7, 4))
    found = {arrival.task.client: arrival.time for arrival in (one.next(), one.next())}
    assert other.next().time == found[2]
    assert found[1] != found[2]


@pytest.mark.parametrize("source", [KeyedRng, FadasScriptRng])
def test_a_saved_clock_goes_on_alike(source: type[KeyedRng] | type[FadasScriptRng]) -> None:
    draws = source(4)
    time = clock("tiers:mild", draws, Dropout(0.2))
    for client in range(30):
        time.start(Task(client, 0, 0))
    for _ in range(10):
        time.next()
    saved = json.loads(json.dumps([time.save(), draws.save()]))
    fresh = source(4)
    again = clock("tiers:mild", fresh, Dropout(0.2))
    again.load(saved[0])
    fresh.load(saved[1])
    for which in (time, again):
        for client in range(5):
            which.start(Task(client, 1, 1))
    assert [time.next() for _ in range(25)] == [again.next() for _ in range(25)]
    assert time.now == again.now
    assert time.busy == again.busy == 0


def test_an_empty_clock_has_no_next() -> None:
    with pytest.raises(IndexError):
        clock("constant:1", RoundRefill(1).source(0)).next()
