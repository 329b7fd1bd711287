"""Who starts when: properties under every dispatcher, by a timeline that keeps watch."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.schedule import scheduler as flow_module
from offbeat.schedule.availability import Cycle, NextAvailable
from offbeat.schedule.clock import Arrival, Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import (
    Asynchronous,
    Dispatch,
    DispatchEvent,
    Phases,
    Poisson,
    Queues,
    RoundRefill,
    Synchronous,
)
from offbeat.schedule.scheduler import Buffer, Scheduler
from schedule_world import make_scheduler, scheduler_settings


@dataclass
class Watched:
    """A clock that checks what passes through it and keeps a log."""

    clock: Clock
    flying: set[int] = field(default_factory=set)
    visits: dict[int, int] = field(default_factory=dict)
    log: list[tuple[str, Task]] = field(default_factory=list)
    peak: int = 0

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def busy(self) -> int:
        return self.clock.busy

    def start(self, task: Task, *, sure: bool = False, until: float = inf) -> None:
        assert task.client not in self.flying, "a client in flight got a second task"
        assert task.visit == self.visits.get(task.client, 0), "visits are counted from 0"
        self.flying.add(task.client)
        self.visits[task.client] = task.visit + 1
        self.log.append(("start", task))
        self.peak = max(self.peak, len(self.flying))
        self.clock.start(task, sure=sure)

    def next(self) -> Arrival:
        before = self.clock.now
        arrival = self.clock.next()
        assert self.clock.now >= before, "time went back"
        self.flying.remove(arrival.task.client)
        self.log.append(("back", arrival.task))
        return arrival

    def wait(self, until: float) -> None:
        self.clock.wait(until)


def make(*given: Any, **options: Any) -> tuple[Scheduler, Watched]:
    """A scheduler on a clock that keeps watch."""
    return make_scheduler(*given, **options, watch=Watched)


@given(scheduler_settings())
def test_under_any_settings_the_loop_goes_on_and_every_task_is_accounted_for(options: dict[str, Any]) -> None:
    flow, watched = make(**options)
    time = 0.0
    for version in range(12):
        filled = flow.fill(version)
        counts = flow.counts
        assert len(filled.tasks) == flow.buffer
        assert all(0 <= age <= options["limit"] for age in filled.staleness)
        assert filled.time >= max(filled.arrived) >= 0
        assert all(begun <= back for begun, back in zip(filled.started, filled.arrived, strict=True))
        assert filled.time >= time
        assert list(filled.arrived) == sorted(filled.arrived)
        assert all(version - task.version > options["limit"] for task in filled.dropped)
        assert counts.waiting == 0
        assert counts.consumed == (version + 1) * flow.buffer
        assert counts.in_flight == len(watched.flying)
        assert counts.started == counts.consumed + counts.dropped + counts.lost + counts.in_flight
        assert counts.started == sum(watched.visits.values())
        assert counts.client_updates == counts.consumed + counts.dropped
        pool = flow.save()["pool"]  # all but those in flight are idle again
        assert (pool[0] if isinstance(options["dispatch"], Phases) else pool) == sorted(watched.flying)
        time = filled.time


@given(scheduler_settings(), st.integers(0, 8))
def test_saved_after_any_step_and_loaded_it_has_the_same_future(options: dict[str, Any], cut: int) -> None:
    flow, watched = make(**options)
    for version in range(cut):
        flow.fill(version)
    saved = json.loads(json.dumps({"flow": flow.save(), "clock": watched.clock.save()}))
    expected = [flow.fill(version) for version in range(cut, cut + 4)]
    again, fresh = make(**options)
    fresh.clock.load(saved["clock"])
    again.load(saved["flow"])
    fresh.flying = {flight[2] for flight in saved["clock"]["flights"]}
    fresh.visits = dict(zip(saved["flow"]["clients"], saved["flow"]["visits"], strict=True))
    assert [again.fill(version) for version in range(cut, cut + 4)] == expected
    assert again.counts == flow.counts


@given(scheduler_settings())
def test_the_same_seed_gives_the_same_schedule(options: dict[str, Any]) -> None:
    one, _ = make(**options)
    other, _ = make(**options)
    assert [one.fill(version) for version in range(5)] == [other.fill(version) for version in range(5)]


def test_another_seed_gives_another_schedule() -> None:
    runs = [make(Asynchronous(5), 20, 3, seed=seed)[0].fill(0) for seed in (0, 1)]
    assert runs[0] != runs[1]


@pytest.mark.parametrize("dispatch", [Asynchronous(7), Asynchronous(7, eager=False)])
def test_the_concurrency_is_kept(dispatch: Asynchronous) -> None:
    flow, watched = make(dispatch, 30, 4)
    for version in range(50):
        flow.fill(version)
        assert len(watched.flying) == (7 if dispatch.eager else 6)
    assert watched.peak == 7
    flying = 0
    for before, (what, _) in pairwise([("", Task(0, 0, 0)), *watched.log]):
        flying += 1 if what == "start" else -1
        if before[0] == "back" and dispatch.eager:
            assert what == "start"  # each arrival is replaced at once
    assert flying == len(watched.flying)


def versions_of_starts(watched: Watched) -> list[int]:
    return [task.version for what, task in watched.log if what == "start"]


def test_an_eager_replacement_of_the_last_arrival_starts_from_the_old_version() -> None:
    flow, watched = make(Asynchronous(3), 10, 2, delays="constant:1")
    flow.fill(0)
    flow.fill(1)
    assert versions_of_starts(watched) == [0, 0, 0, 0, 0, 1, 1]


def test_a_patient_replacement_of_the_last_arrival_starts_from_the_new_version() -> None:
    flow, watched = make(Asynchronous(3, eager=False), 10, 2, delays="constant:1")
    flow.fill(0)
    flow.fill(1)
    assert versions_of_starts(watched) == [0, 0, 0, 0, 1, 1]


def test_a_synchronous_cohort_is_of_different_clients_and_never_stale() -> None:
    flow, watched = make(Synchronous(6), 9, 6)
    for version in range(30):
        filled = flow.fill(version)
        assert len({task.client for task in filled.tasks}) == 6
        assert filled.staleness == (0,) * 6
        assert filled.time == max(filled.arrived)
    assert watched.peak == 6


def test_a_synchronous_cohort_is_topped_up_when_tasks_are_lost() -> None:
    flow, _ = make(Synchronous(6), 9, 6, dropout=0.5)
    lost = 0
    for version in range(30):
        filled = flow.fill(version)
        assert filled.staleness == (0,) * 6
        assert len({task.client for task in filled.tasks}) == 6
        lost += len(filled.lost)
    assert lost == flow.counts.lost > 60


def test_a_client_whose_update_waits_is_not_chosen_while_others_are_idle() -> None:
    flow, _ = make(Asynchronous(5), 20, 5)
    for version in range(100):
        assert len({task.client for task in flow.fill(version).tasks}) == 5


def test_when_nobody_else_is_idle_a_client_may_be_twice_in_a_buffer() -> None:
    flow, watched = make(Asynchronous(4), 4, 4)
    repeated = 0
    for version in range(50):
        filled = flow.fill(version)
        assert len(watched.flying) == 4
        repeated += len({task.client for task in filled.tasks}) < 4
    assert repeated > 5


def test_a_client_is_its_own_replacement_after_a_drop_only_when_nobody_is_idle() -> None:
    flow, watched = make(Asynchronous(3), 12, 3, limit=0)
    for version in range(60):
        flow.fill(version)
    assert flow.counts.dropped > 20
    for (what, task), (then, other) in pairwise(watched.log):
        if (what, then) == ("back", "start"):
            assert task.client != other.client


def test_all_idle_clients_are_equally_likely() -> None:
    flow, watched = make(Asynchronous(5), 25, 5, delays="constant:1")
    for version in range(1000):
        flow.fill(version)
    counts = [watched.visits[client] for client in range(25)]
    assert min(counts) > 160  # 200 each; four standard deviations of a binomial are 56 at most
    assert max(counts) < 240


def test_a_poisson_cohort_is_every_idle_client_at_its_rate() -> None:
    flow, watched = make(Poisson(0.5), 20, 1, delays="constant:0")
    sizes = []
    for version in range(400):
        begun = len(watched.log)
        flow.fill(version)
        sizes.append(sum(what == "start" for what, _ in watched.log[begun:]))
    assert min(sizes) < max(sizes)
    assert {task.client for _, task in watched.log} == set(range(20))


def test_a_poisson_draw_of_nobody_is_drawn_again() -> None:
    flow, watched = make(Poisson(0.01), 5, 2)
    assert len(flow.fill(0).tasks) == 2
    assert watched.peak <= 2


def test_a_poisson_client_that_is_away_is_not_replaced_by_another() -> None:
    rate, share = 0.5, 0.25
    flow, watched = make(Poisson(rate), 400, 1, delays="constant:0", availability=Cycle(1e9, share))
    flow.fill(0)
    assert len(watched.log) - 1 == pytest.approx(400 * rate * share, abs=35)  # four standard deviations


def test_a_rate_that_never_starts_anybody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "MAX_EMPTY_DISPATCHES", 20)
    with pytest.raises(InputError, match="raise the rate"):
        make(Poisson(1e-12), 5, 2)[0].fill(0)


@dataclass(frozen=True)
class Gone:
    """Nobody ever comes, or nobody but one."""

    but: int = -1

    def bind(self, seed: int) -> NextAvailable:
        return lambda client, now: now if client == self.but else inf


@pytest.mark.parametrize("dispatch", [Synchronous(2), Asynchronous(2), RoundRefill(2), Poisson(0.9)])
def test_a_population_that_never_comes_is_refused(dispatch: Dispatch) -> None:
    with pytest.raises(InputError, match="no client is ever available"):
        make(dispatch, 5, 2, availability=Gone())[0].fill(0)


def test_away_clients_are_waited_for() -> None:
    flow, watched = make(Asynchronous(2), 3, 2, delays="constant:1", availability=Cycle(1000.0, 0.001))
    filled = flow.fill(0)
    assert filled.time > 10
    assert flow.counts.started == len([what for what, _ in watched.log if what == "start"])


def test_in_a_starved_cycle_the_clients_there_do_the_work() -> None:
    flow, watched = make(Asynchronous(20), 40, 5, availability=Cycle(20.0, 0.5))
    back = Cycle(20.0, 0.5).bind(0)
    for version in range(40):
        filled = flow.fill(version)
        for task, begun in zip(filled.tasks, filled.started, strict=True):
            assert back(task.client, begun) == pytest.approx(begun, abs=1e-6)
    assert len(watched.visits) == 40


def test_everyone_takes_part_once_from_version_0_and_none_is_lost() -> None:
    flow, watched = make(Asynchronous(3), 25, 2, dropout=0.9)
    filled = flow.everyone()
    assert sorted(filled.tasks) == [Task(client, 0, 0) for client in range(25)]
    assert filled.time == max(filled.arrived)
    assert set(filled.started) == {0.0}
    assert not filled.lost
    assert flow.counts.consumed == flow.counts.started == 25
    assert not watched.flying
    assert all(task.visit >= 1 for task in flow.fill(0).tasks)


def test_everyone_starts_as_soon_as_it_is_there() -> None:
    cycle = Cycle(100.0, 0.3)
    flow, _ = make(Synchronous(3), 25, 3, delays="constant:1", availability=cycle)
    filled = flow.everyone()
    back = cycle.bind(0)
    for task, begun, end in zip(filled.tasks, filled.started, filled.arrived, strict=True):
        assert begun == back(task.client, 0.0)
        assert end == begun + 1
    assert filled.time == max(filled.arrived)


def test_everyone_cannot_begin_in_the_middle() -> None:
    flow, _ = make(Asynchronous(3), 25, 2)
    flow.fill(0)
    with pytest.raises(InputError, match="in flight"):
        flow.everyone()


def test_everyone_needs_everyone() -> None:
    with pytest.raises(InputError, match="client 0 is never available"):
        make(Asynchronous(1), 3, 1, availability=Gone(but=1))[0].everyone()


@pytest.mark.parametrize("limit", [-1, float("nan")])
def test_a_bad_limit_is_one_sentence(limit: float) -> None:
    with pytest.raises(InputError, match="largest staleness"):
        make(Asynchronous(1), 3, 1, limit=limit)


def test_a_buffer_that_cannot_fill_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="buffer of 3 exceeds the cohort of 2"):
        make(Synchronous(2), 5, 3)


def test_staleness_is_the_age_in_versions() -> None:
    tasks = (Task(0, 3, 0), Task(1, 5, 0))
    assert Buffer(5, 1.0, tasks, (0.0, 0.0), (1.0, 1.0), (), ()).staleness == (2, 0)


def test_a_cohort_is_asked_twice_in_a_row_and_then_another_is() -> None:
    flow, _ = make(Phases(4), 100, 4)
    cohorts = [sorted(task.client for task in flow.fill(version).tasks) for version in range(8)]
    assert cohorts[0::2] == cohorts[1::2]
    assert len({tuple(cohort) for cohort in cohorts}) == 4


def test_when_some_of_a_cohort_are_lost_others_take_their_place_and_the_loop_goes_on() -> None:
    flow, _ = make(Phases(4), 100, 4, dropout=0.4)
    filled = [flow.fill(version) for version in range(30)]
    assert all(len(step.tasks) == 4 for step in filled)
    assert flow.counts.lost > 5


def test_queues_send_each_version_to_clients_drawn_from_all_busy_or_not() -> None:
    draws = Queues(8).source(0)
    clock = Clock(parse_delay("tiers:large").bind(draws, 10), draws)
    flow = Scheduler(clock, Queues(8), draws, 10, 4)
    visits: dict[int, list[tuple[int, float, float]]] = {}
    for version in range(60):
        filled = flow.fill(version)
        assert flow.counts.in_flight == 4
        for task, begun, back in zip(filled.tasks, filled.started, filled.arrived, strict=True):
            visits.setdefault(task.client, []).append((task.visit, begun, back))
    for each in visits.values():
        assert [visit for visit, _, _ in each] == list(range(len(each)))  # first come, first served
        assert all(before[2] <= after[1] for before, after in pairwise(each))
    assert sum(map(len, visits.values())) == 240


def test_a_queue_is_saved_and_goes_on_as_it_would_have() -> None:
    def fresh() -> tuple[Scheduler, Clock]:
        draws = Queues(9).source(3)
        clock = Clock(parse_delay("tiers:mild").bind(draws, 10), draws)
        return Scheduler(clock, Queues(9), draws, 10, 3), clock

    flow, clock = fresh()
    for version in range(7):
        flow.fill(version)
    saved = json.loads(json.dumps([flow.save(), clock.save()]))
    expected = [flow.fill(version) for version in range(7, 15)]
    again, clock = fresh()
    clock.load(saved[1])
    again.load(saved[0])
    assert [again.fill(version) for version in range(7, 15)] == expected


def test_queues_send_what_neither_is_out_nor_waits_in_the_buffer() -> None:
    rule = Queues(8)
    assert rule.count(9, 3, 2, DispatchEvent.PUBLISHED, rule.source(0)) == 8 - 3 - 2
    assert {rule.count(9, 3, 2, event, rule.source(0)) for event in DispatchEvent} == {0, 3}
