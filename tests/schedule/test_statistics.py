"""Summaries of schedules, against sums over plain lists."""

import json
from statistics import mean, median

import pytest

from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.schedule.availability import Dropout
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import Asynchronous, Synchronous
from offbeat.schedule.scheduler import Buffer, Scheduler
from offbeat.schedule.statistics import iterate_buffers, simulate, summarise


def flow(population: int = 30, limit: float = 6) -> Scheduler:
    dispatch = Asynchronous(12)
    draws = dispatch.source(3)
    clock = Clock(parse_delay("tiers:large").bind(draws, population), draws, Dropout(0.1))
    return Scheduler(clock, dispatch, draws, population, 4, limit)


@pytest.mark.parametrize("rounds", [1, 2, 75, 76])
def test_a_summary_is_what_lists_would_say(rounds: int) -> None:
    steps = list(iterate_buffers(flow(), rounds))
    ages = [age for step in steps for age in step.staleness]
    worst = [max(step.staleness) for step in steps]
    waits = [step.time - back for step in steps for back in step.arrived]
    summary = simulate(flow(), rounds)
    assert summary.staleness_max == max(ages)
    assert summary.staleness_mean_of_max == pytest.approx(mean(worst))
    assert summary.staleness_median_of_max == median(worst)
    assert summary.staleness_mean == pytest.approx(mean(ages))
    assert summary.staleness_counts == {age: ages.count(age) for age in sorted(set(ages))}
    assert summary.steps == rounds
    assert summary.time == steps[-1].time
    assert summary.time_per_step == pytest.approx(steps[-1].time / rounds)
    assert summary.waiting_mean == pytest.approx(mean(waits))
    assert summary.waiting_max == max(waits)
    assert summary.consumed == len(ages)
    assert summary.dropped == sum(len(step.dropped) for step in steps)
    assert summary.lost == sum(len(step.lost) for step in steps)
    assert summary.client_updates == summary.consumed + summary.dropped
    assert summary.in_flight == 12
    assert summary.started == summary.client_updates + summary.lost + summary.in_flight
    assert summary.clients == len({task.client for step in steps for task in step.tasks})


def test_drops_and_losses_show_up() -> None:
    summary = simulate(flow(limit=2), 200)
    assert summary.dropped > 0
    assert summary.lost > 0
    assert summary.staleness_max == 2


def test_a_hand_made_schedule_by_hand() -> None:
    dispatch = Synchronous(2)
    draws = dispatch.source(0)
    empty = Scheduler(Clock(parse_delay("constant:1").bind(draws, 9), draws), dispatch, draws, 9, 2)
    steps = [
        Buffer(0, 2.0, (Task(1, 0, 0), Task(2, 0, 0)), (0.0, 0.0), (1.0, 2.0), (), ()),
        Buffer(1, 5.0, (Task(1, 0, 1), Task(3, 1, 0)), (1.0, 2.0), (5.0, 5.0), (), ()),
    ]
    summary = summarise(steps, empty)
    assert (summary.staleness_max, summary.staleness_mean_of_max, summary.staleness_median_of_max) == (
        1,
        0.5,
        0.5,
    )
    assert (summary.staleness_mean, summary.staleness_counts) == (0.25, {0: 3, 1: 1})
    assert (summary.waiting_mean, summary.waiting_max) == (0.25, 1.0)
    assert (summary.time, summary.time_per_step, summary.clients) == (5.0, 2.5, 3)


def test_a_summary_is_json() -> None:
    summary = simulate(flow(), 20).as_dict()
    assert json.loads(json.dumps(summary)) == summary


@pytest.mark.parametrize("rounds", [0, -3])
def test_no_rounds_are_refused(rounds: int) -> None:
    with pytest.raises(InputError, match="rounds"):
        simulate(flow(), rounds)


def test_no_steps_are_refused() -> None:
    with pytest.raises(InputError, match="no server steps"):
        summarise([], flow())
