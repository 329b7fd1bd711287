"""Bounds on how often a client contributes: kept under losses, limits and absence, until nobody is left."""

import json
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from offbeat.errors import InputError
from offbeat.schedule.dispatch import (
    Asynchronous,
    Dispatch,
    Phases,
    Queues,
    Synchronous,
)
from offbeat.schedule.participation import Participation
from offbeat.schedule.scheduler import Buffer, Scheduler
from schedule_world import make_scheduler, scheduler_settings

STEPS = 80  # more than any of these populations can fill


def play(flow: Scheduler, begin: int = 0, end: int = STEPS) -> list[Buffer]:
    """Fill buffers as the loop does: as long as nothing speaks against it."""
    steps: list[Buffer] = []
    for version in range(begin, end):
        if flow.ended():
            break
        steps.append(flow.fill(version))
    return steps


def contributions(steps: list[Buffer]) -> dict[int, list[int]]:
    """The steps that each client contributed to."""
    found = defaultdict(list)
    for step in steps:
        for task in step.tasks:
            found[task.client].append(step.version)
    return found


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    """Those of any scheduler, with bounds that it can keep."""
    options = draw(scheduler_settings(24, phases=False))
    apart = draw(st.integers(0, min(4, options["population"] // options["buffer"])))
    return options | {"participation": Participation(draw(st.sampled_from([1, 2, 3])), apart)}


@given(settings(), st.booleans())
def test_under_any_settings_bounds_are_kept_until_nobody_is_left_to_fill_a_buffer(
    options: dict[str, Any], start: bool
) -> None:
    bounds = options["participation"]
    assert bounds.max_participations is not None
    assume(not start or bounds.max_participations > 1)
    flow, _ = make_scheduler(**options)
    before = len(flow.everyone().tasks) // options["population"] if start else 0
    steps = play(flow)
    made = contributions(steps)
    assert max(map(len, made.values())) <= bounds.max_participations - before
    assert all(two - one >= bounds.min_separation for each in made.values() for one, two in pairwise(each))
    assert str(flow.ended()).startswith("too few clients may still contribute")
    ended = steps[-1].version + 1
    free = [
        bounds.max_participations - before - len(each)
        for each in (made.get(client, []) for client in range(options["population"]))
        if not each or ended - each[-1] >= bounds.min_separation
    ]
    possible = sum(free) if bounds.min_separation == 0 else sum(left > 0 for left in free)
    assert possible < options["buffer"], "the run ended although another buffer could be filled"


@given(settings(), st.integers(0, 6))
def test_saved_after_any_step_and_loaded_it_has_the_same_future(options: dict[str, Any], cut: int) -> None:
    flow, clock = make_scheduler(**options)
    cut = len(play(flow, end=cut))
    saved = json.loads(json.dumps([flow.save(), clock.save()]))
    expected = play(flow, cut)
    again, clock = make_scheduler(**options)
    clock.load(saved[1])
    again.load(saved[0])
    assert play(again, cut) == expected
    assert again.ended() == flow.ended()
    assert again.counts == flow.counts


@given(settings())
def test_bounds_that_never_bind_change_no_draw(options: dict[str, Any]) -> None:
    free, _ = make_scheduler(**options | {"participation": Participation()})
    wide, _ = make_scheduler(**options | {"participation": Participation(max_participations=10_000)})
    assert [free.fill(version) for version in range(6)] == [wide.fill(version) for version in range(6)]
    assert wide.ended() is None


def test_without_bounds_nothing_of_them_is_saved() -> None:
    flow, _ = make_scheduler(Asynchronous(3), 9, 2, Participation())
    flow.fill(0)
    assert flow.save().keys() == {"clients", "visits", "pool", "counts", "draws"}
    assert flow.ended() is None


def test_a_task_that_is_lost_or_dropped_is_no_contribution() -> None:
    flow, _ = make_scheduler(Asynchronous(6), 12, 3, Participation(1, 1), dropout=0.5, limit=0)
    steps = play(flow)
    assert len(steps) == 4  # all 12 clients contributed once
    assert flow.counts.lost > 0
    assert flow.counts.dropped > 0


def test_contributions_apart_go_on_for_ever_where_only_their_gap_is_bounded() -> None:
    flow, _ = make_scheduler(Asynchronous(4), 12, 4, Participation(min_separation=3))
    steps = play(flow)
    assert len(steps) == STEPS
    made = contributions(steps)
    assert all(two - one >= 3 for each in made.values() for one, two in pairwise(each))
    assert flow.ended() is None
    again, clock = make_scheduler(Asynchronous(4), 12, 4, Participation(min_separation=3))
    clock.load({"now": 0.0, "serial": 0, "flights": []})
    again.load(json.loads(json.dumps(flow.save())))


def test_a_client_is_twice_in_a_buffer_only_where_contributions_may_be_0_apart() -> None:
    repeated = {}
    for apart in (0, 1):
        flow, _ = make_scheduler(Asynchronous(4), 4, 4, Participation(STEPS, apart))
        steps = play(flow, end=30)
        repeated[apart] = sum(len({task.client for task in step.tasks}) < 4 for step in steps)
    assert repeated[0] > 0
    assert repeated[1] == 0


def test_the_start_is_one_contribution_of_everybody() -> None:
    flow, _ = make_scheduler(Synchronous(3), 9, 3, Participation(2, 1))
    flow.everyone()
    assert len(play(flow)) == 3


def test_a_start_that_leaves_nothing_to_follow_is_refused() -> None:
    flow, _ = make_scheduler(Synchronous(3), 9, 3, Participation(1))
    with pytest.raises(InputError, match="only 1 per client is allowed"):
        flow.everyone()
    assert flow.counts.started == 0


@pytest.mark.parametrize("dispatch", [Phases(2), Queues(4)])
@pytest.mark.parametrize("bounds", [Participation(3), Participation(min_separation=1)])
def test_dispatchers_that_ask_a_client_again_at_once_are_refused(
    dispatch: Dispatch, bounds: Participation
) -> None:
    with pytest.raises(InputError, match="cannot be bounded under phases or queues"):
        make_scheduler(dispatch, 9, 2, bounds)


def test_too_few_clients_for_contributions_that_far_apart_are_refused() -> None:
    with pytest.raises(InputError, match=r"4 server steps apart take 12 clients .* there are 11"):
        make_scheduler(Asynchronous(5), 11, 3, Participation(min_separation=4))
    make_scheduler(Asynchronous(5), 12, 3, Participation(min_separation=4))


@pytest.mark.parametrize(("most", "apart"), [(0, 0), (-1, 0), (None, -1)])
def test_bounds_below_the_least_are_refused(most: int | None, apart: int) -> None:
    with pytest.raises(InputError):
        Participation(most, apart)


def test_the_cost_of_a_task_does_not_depend_on_how_many_clients_there_are() -> None:
    seconds = {}
    for population in (10_000, 10_000_000):
        flow, _ = make_scheduler(Asynchronous(200), population, 100, Participation(3, 5))
        begun = time.process_time()
        for version in range(40):
            assert flow.ended() is None
            flow.fill(version)
        seconds[population] = time.process_time() - begun
    assert seconds[10_000_000] < 5 * seconds[10_000] + 0.05  # a scan would be hundreds of times slower


@pytest.mark.parametrize("former", [{"most": 3}, {"apart": 1}])
def test_former_keywords_are_answered_with_those_of_now(former: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"is now (max_participations|min_separation)"):
        Participation(**former)
