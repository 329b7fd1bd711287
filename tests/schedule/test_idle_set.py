"""The set of idle clients, against a plain sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.schedule.pool import IdleSet


@given(st.integers(1, 20_000), st.data())
def test_it_agrees_with_a_sorted_list_under_any_history(population: int, data: st.DataObject) -> None:
    idle = IdleSet(population)
    model = set(range(population))
    for client in data.draw(st.lists(st.integers(0, population - 1), max_size=60)):
        if client in model:
            idle.take(client)
            model.remove(client)
        else:
            idle.give(client)
            model.add(client)
    ranked = sorted(model)
    assert len(idle) == len(model)
    assert idle.taken() == sorted(set(range(population)) - model)
    ranks = data.draw(st.lists(st.integers(0, population - 1), max_size=20))
    assert [idle.pick(rank) for rank in ranks if rank < len(ranked)] == [
        ranked[rank] for rank in ranks if rank < len(ranked)
    ]
    assert [client in idle for client in ranks] == [client in model for client in ranks]


@pytest.mark.parametrize("population", [1, 2, 3, 255, 256, 257, 4095, 4096, 4097, 8193])
def test_every_rank_is_right_at_the_edges_of_buckets(population: int) -> None:
    taken = [client for client in range(population) if client % 3 == 1]
    idle = IdleSet(population, taken)
    assert [idle.pick(rank) for rank in range(len(idle))] == [c for c in range(population) if c % 3 != 1]


def test_it_depends_on_the_set_alone() -> None:
    one, other = IdleSet(10_000), IdleSet(10_000, [7, 9_999])
    for client in (5, 9_999, 7):
        one.take(client)
    one.give(5)
    assert one.taken() == other.taken()
    assert [one.pick(rank) for rank in (0, 6, 7, 9_997)] == [other.pick(rank) for rank in (0, 6, 7, 9_997)]


def test_a_population_of_a_billion_costs_nothing() -> None:
    idle = IdleSet(10**9, range(0, 10**9, 10**7))
    assert len(idle) == 10**9 - 100
    assert idle.pick(0) == 1
    assert idle.pick(10**9 - 101) == 10**9 - 1


@pytest.mark.parametrize("client", [-1, 3, 7])
def test_who_is_taken_or_does_not_exist_cannot_be_taken(client: int) -> None:
    with pytest.raises(ValueError, match="not idle"):
        IdleSet(7, [3]).take(client)


def test_who_is_idle_cannot_be_given_back() -> None:
    with pytest.raises(ValueError, match="not taken"):
        IdleSet(7, [3]).give(2)


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_beyond_the_idle_is_refused(rank: int) -> None:
    with pytest.raises(IndexError):
        IdleSet(7, [3]).pick(rank)
