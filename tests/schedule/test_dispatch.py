"""How many tasks the dispatchers ask for, and what they refuse."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import InputError
from offbeat.schedule.dispatch import (
    Asynchronous,
    Dispatch,
    DispatchEvent,
    OpenSlots,
    Poisson,
    RoundRefill,
    Synchronous,
    current_name,
    parse_dispatch,
)
from offbeat.schedule.rng import FadasScriptRng, KeyedRng
from offbeat.schedule.scheduler import Buffer
from schedule_world import make_scheduler, scheduler_settings

# dispatch, busy, waiting -> how many when published, arrived, filled
TABLE = [
    (Synchronous(10), 0, 0, (10, 0, 0)),
    (Synchronous(10), 0, 7, (3, 0, 0)),
    (Synchronous(10), 4, 0, (6, 0, 0)),
    (Asynchronous(20), 20, 0, (0, 0, 0)),
    (Asynchronous(20), 19, 3, (1, 1, 1)),
    (Asynchronous(20, eager=False), 19, 3, (1, 1, 0)),
    (RoundRefill(20), 15, 5, (5, 0, 0)),
    (OpenSlots(20, 4), 17, 3, (0, 0, 0)),
    (OpenSlots(20, 4), 16, 3, (4, 4, 0)),
]


@pytest.mark.parametrize(("dispatch", "busy", "waiting", "counts"), TABLE)
def test_they_ask_for_what_is_missing(
    dispatch: Dispatch, busy: int, waiting: int, counts: tuple[int, ...]
) -> None:
    draws = KeyedRng(0)
    assert tuple(dispatch.count(50, busy, waiting, moment, draws) for moment in DispatchEvent) == counts


def test_poisson_counts_are_binomial() -> None:
    draws = KeyedRng(0)
    counts = [Poisson(0.1).count(100, 3, 2, DispatchEvent.PUBLISHED, draws) for _ in range(2000)]
    assert sum(counts) / 2000 == pytest.approx(10, abs=0.3)
    assert sum((count - 10) ** 2 for count in counts) / 2000 == pytest.approx(9, abs=1.2)
    assert Poisson(0.1).count(100, 3, 2, DispatchEvent.ARRIVED, draws) == 0
    assert Poisson(1.0).count(100, 3, 2, DispatchEvent.PUBLISHED, draws) == 100


def test_rounds_alone_draw_as_the_scripts_do() -> None:
    assert isinstance(RoundRefill(2).source(1), FadasScriptRng)
    for dispatch in (Synchronous(2), Asynchronous(2), Poisson(0.5)):
        assert isinstance(dispatch.source(1), KeyedRng)


@given(st.integers(1, 40), st.data())
def test_chosen_ranks_are_different_and_in_range(size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, size))
    for draws in (KeyedRng(size), FadasScriptRng(size)):
        for _ in range(3):
            ranks = draws.ranks(size, count)
            assert len(set(ranks)) == len(ranks) == count
            assert set(ranks) <= set(range(size))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_every_rank_is_as_likely_in_every_place(count: int) -> None:
    draws = KeyedRng(0)
    chosen = [draws.ranks(5, count) for _ in range(4000)]
    for place in range(count):
        counts = [sum(ranks[place] == rank for ranks in chosen) for rank in range(5)]
        assert counts == pytest.approx([800] * 5, abs=102)  # four standard deviations


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_of_too_many_bits_is_one_sentence(seed: int) -> None:
    with pytest.raises(InputError, match="seed"):
        KeyedRng(seed)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("synchronous", {}, Synchronous(5)),
        ("asynchronous", {}, Asynchronous(20)),
        ("asynchronous", {"hand_out": "after"}, Asynchronous(20, eager=False)),
        ("round-refill", {}, RoundRefill(20)),
        ("poisson", {}, Poisson(0.2)),
        ("poisson", {"rate": 0.5}, Poisson(0.5)),
    ],
)
def test_names_become_dispatchers(name: str, options: dict[str, Any], expected: Dispatch) -> None:
    assert parse_dispatch(name, 20, 5, 100, **options) == expected


def test_a_synchronous_cohort_may_be_smaller_than_a_concurrency_that_it_does_not_use() -> None:
    assert parse_dispatch("synchronous", 20, 5, 10) == Synchronous(5)


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        (("asynchron", 20, 5, 100), {}, "did you mean asynchronous"),
        (("asynchronous", 20, 21, 100), {}, "buffer of 21 exceeds the concurrency of 20"),
        (("round-refill", 20, 21, 100), {}, "buffer of 21 exceeds the concurrency of 20"),
        (("asynchronous", 20, 5, 10), {}, "concurrency of 20 exceeds the 10 clients"),
        (("round-refill", 20, 5, 10), {}, "concurrency of 20 exceeds the 10 clients"),
        (("poisson", 20, 5, 10), {}, "concurrency of 20"),
        (("synchronous", 20, 11, 10), {}, "buffer of 11 exceeds the 10 clients"),
        (("poisson", 5, 11, 10), {}, "buffer of 11 exceeds the 10 clients"),
        (("synchronous", 20, 0, 10), {}, "buffer is 0"),
        (("asynchronous", 0, 1, 10), {}, "the concurrency is 0: give a whole number of at least 1"),
        (("synchronous", 1, 1, 0), {}, "0 clients"),
        (("poisson", 5, 1, 10), {"rate": 0.0}, "rate"),
        (("poisson", 5, 1, 10), {"rate": 1.5}, "rate"),
        (("asynchronous", 5, 1, 10), {"hand_out": "befor"}, "did you mean before"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    arguments: tuple[str, int, int, int], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        parse_dispatch(*arguments, **options)


def test_a_former_name_is_answered_with_the_one_of_now() -> None:
    with pytest.raises(InputError, match="the dispatch 'rounds' is now called 'round-refill': use that name"):
        parse_dispatch("rounds", 20, 5, 100)
    assert current_name("rounds") == "round-refill"
    assert current_name("poisson") == "poisson"


@pytest.mark.parametrize("count", [1, 3])
def test_every_choice_has_a_key_of_its_own(count: int) -> None:
    """Choices that share a key would choose the same clients again and again."""
    rng = KeyedRng(4)
    drawn = [tuple(rng.ranks(1_000, count)) for _ in range(50)]
    assert len(set(drawn)) == 50
    assert len({rank for ranks in drawn for rank in ranks}) > 40 * count
    again = KeyedRng(4)
    again.load(KeyedRng(4, choices=count).save())
    assert tuple(again.ranks(1_000, count)) == drawn[1]


@given(
    population=st.integers(1, 20),
    data=st.data(),
    delays=st.sampled_from(["constant:1", "exponential:1", "tiers:large"]),
    seed=st.integers(0, 5),
)
def test_open_slots_are_synchronous_and_asynchronous_at_their_ends(
    population: int, data: st.DataObject, delays: str, seed: int
) -> None:
    """K = B = O is FedAvg's rounds, and O = 1 the asynchronous protocol with hand-out after the step."""
    concurrency = data.draw(st.integers(1, population))
    buffer = data.draw(st.integers(1, concurrency))

    def buffers(dispatch: Dispatch, size: int) -> list[Buffer]:
        scheduler, _ = make_scheduler(dispatch, population, size, seed=seed, delays=delays)
        return [scheduler.fill(version) for version in range(8)]

    ends = OpenSlots(concurrency, concurrency)
    assert buffers(ends, concurrency) == buffers(Synchronous(concurrency), concurrency)
    assert buffers(OpenSlots(concurrency), buffer) == buffers(Asynchronous(concurrency, eager=False), buffer)


@given(settings=scheduler_settings(phases=False), slots=st.integers(1, 30))
def test_tasks_start_only_once_enough_slots_are_open(settings: dict[str, Any], slots: int) -> None:
    most = settings["population"]
    needed = min(slots, most)
    dispatch = OpenSlots(most, needed)
    for busy in range(most + 1):
        for moment in DispatchEvent:
            count = dispatch.count(most - busy, busy, 0, moment, dispatch.source(0))
            free = most - busy
            assert count == (free if free >= needed and moment is not DispatchEvent.FILLED else 0)
    scheduler, _ = make_scheduler(**settings | {"dispatch": dispatch})
    for version in range(4):
        filled = scheduler.fill(version)
        assert len(filled.tasks) == settings["buffer"]
        assert scheduler.counts.in_flight <= most


@pytest.mark.parametrize(
    ("slots", "sentence"),
    [
        (0, "the number of open slots is 0: give a whole number of at least 1"),
        (6, "6 open slots exceed the concurrency of 5"),
    ],
)
def test_open_slots_beyond_the_concurrency_are_refused(slots: int, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        OpenSlots(5, slots).check(3, 10)


def test_open_slots_have_a_name_and_belong_to_it() -> None:
    assert parse_dispatch("open-slots", 5, 3, 10) == OpenSlots(5, 1)
    assert parse_dispatch("open-slots", 5, 3, 10, open_slots=4) == OpenSlots(5, 4)
    with pytest.raises(InputError, match=r"is for .*dispatch open-slots, not for poisson: leave it out"):
        parse_dispatch("poisson", 5, 3, 10, open_slots=4)
    with pytest.raises(InputError, match="6 open slots exceed the concurrency of 5"):
        parse_dispatch("open-slots", 5, 3, 10, open_slots=6)
