"""Which graphs are kept."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from offbeat.engines.cuda import GraphCache


def ask(graphs: GraphCache[int], key: int, made: list[int]) -> bool:
    """As streams do: recorded where it is welcome, else computed without."""

    def record() -> Any:
        made.append(key)
        return key

    return graphs.accepts(key) and bool(graphs.make(key, record) == key)


def test_a_circle_of_more_shapes_than_there_is_room_for_is_recorded_once() -> None:
    graphs: GraphCache[int] = GraphCache(4)
    made: list[int] = []
    for turn in range(200):
        ask(graphs, turn % 7, made)
    assert made == [0, 1, 2, 3]


def test_shapes_that_are_done_with_make_room() -> None:
    graphs: GraphCache[int] = GraphCache(4)
    made: list[int] = []
    for key in range(4):
        ask(graphs, key, made)
    for turn in range(60):
        ask(graphs, 10 + turn % 4, made)
    assert sorted(made[4:]) == [10, 11, 12, 13]


@given(st.lists(st.integers(0, 9), max_size=80), st.integers(1, 5))
def test_no_more_are_kept_than_there_is_room_for_and_none_that_is_there_is_turned_away(
    keys: list[int], room: int
) -> None:
    graphs: GraphCache[int] = GraphCache(room)
    made: list[int] = []
    for key in keys:
        there = key in made and key in graphs._graphs
        before = len(made)
        answered = ask(graphs, key, made)
        assert len(graphs) <= room
        if there:
            assert answered
            assert len(made) == before
