"""Timed releases: who contributes to which, when they are made, and that clients do not affect each other."""

import hashlib
import json
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest
from scipy.stats import chisquare

from offbeat.core import SamplingEvent
from offbeat.errors import InputError
from offbeat.schedule.availability import Availability, Cycle, Dropout, NextAvailable
from offbeat.schedule.clock import Arrival, Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import (
    Asynchronous,
    Dispatch,
    Poisson,
    RandomAllocation,
    TimedPoisson,
    parse_dispatch,
)
from offbeat.schedule.scheduler import Buffer
from offbeat.schedule.staleness import Equal, Polynomial
from offbeat.schedule.timed import TimedScheduler, make_scheduler, nominal_cohort


@dataclass(frozen=True)
class Without:
    """Clients that come and go, and one that never comes."""

    client: int | None
    others: Availability

    def bind(self, seed: int) -> NextAvailable:
        back = self.others.bind(seed)
        return lambda client, now: inf if client == self.client else back(client, now)


def schedule(
    dispatch: Dispatch,
    rounds: int,
    *,
    population: int = 60,
    buffer: int = 6,
    delays: str = "exponential:1",
    dropout: float = 0.0,
    availability: Availability | None = None,
    seed: int = 3,
) -> list[Buffer]:
    draws = dispatch.source(seed)
    clock = Clock(parse_delay(delays).bind(draws, population), draws, Dropout(dropout))
    steps = make_scheduler(clock, dispatch, draws, population, buffer, availability=availability)
    return [steps.fill(version) for version in range(rounds)]


TIMED = [RandomAllocation(1.5, 10, 4), RandomAllocation(1.5, 10), TimedPoisson(1.5, 0.1, 3)]


def test_in_each_epoch_every_client_is_allocated_to_one_release() -> None:
    dispatch = RandomAllocation(1.0, slots=7)
    draws = dispatch.source(0)
    for epoch in range(3):
        members = [dispatch.members(7 * epoch + slot, 50, draws).tolist() for slot in range(1, 8)]
        assert sorted(client for clients in members for client in clients) == list(range(50))


@pytest.mark.parametrize("secret", [None, 3**160])
@pytest.mark.parametrize("dispatch", [RandomAllocation(1.0, slots=20), TimedPoisson(1.0, 0.05)])
def test_clients_are_drawn_as_the_sampling_event_says(
    dispatch: RandomAllocation | TimedPoisson, secret: int | None
) -> None:
    # The accounting relies on the event alone, so the draws must have its distribution.
    event = dispatch.sampling(200)
    draws, population = dispatch.source(1), 4_000
    if secret is not None:
        draws.hide(secret)
    counts = np.array([len(dispatch.members(release, population, draws)) for release in range(1, 201)])
    rate = event.rate if event.rate is not None else 1 / (event.slots or 1)
    assert event.times * (event.slots or 1) == 200
    assert abs(counts.sum() / 200 / population - rate) < 5 * (rate / 200 / population) ** 0.5
    assert chisquare(counts).pvalue > 1e-4
    hidden = dispatch.source(1)
    hidden.hide(12345)
    assert dispatch.members(1, population, hidden).tolist() != dispatch.members(1, population, draws).tolist()


def test_an_epoch_that_has_begun_counts_as_a_whole() -> None:
    assert RandomAllocation(1.0, 10).sampling(20) == SamplingEvent(2, slots=10)
    assert RandomAllocation(1.0, 10).sampling(21) == SamplingEvent(3, slots=10)
    assert TimedPoisson(1.0, 0.1).sampling(21) == SamplingEvent(21, rate=0.1)


@pytest.mark.parametrize("availability", [None, Cycle(4.0, 0.7)])
@pytest.mark.parametrize("dispatch", TIMED)
def test_other_clients_tasks_do_not_depend_on_whether_a_client_is_there(
    dispatch: Dispatch, availability: Availability | None
) -> None:
    # This is what the proof rests on, and what a buffer of fixed size does not have.
    def others(client: int | None) -> list[tuple[float, list[tuple[int, ...]]]]:
        away = Without(client, availability or Cycle(1.0, 1.0))
        return [
            (
                step.time,
                [(*task, at) for task, at in zip(step.tasks, step.arrived, strict=True) if task.client != 7],
            )
            for step in schedule(dispatch, 40, dropout=0.1, availability=away)
        ]

    assert others(7) == others(None)
    assert sum(len(tasks) for _, tasks in others(None)) > 50


@pytest.mark.parametrize("dispatch", [Asynchronous(12), Poisson(0.1)])
def test_other_clients_tasks_do_depend_on_it_where_a_buffer_must_be_full(dispatch: Dispatch) -> None:
    here, away = (
        [[task for task in step.tasks if task.client != 7] for step in schedule(dispatch, 40, availability=a)]
        for a in (None, Without(7, Cycle(1.0, 1.0)))
    )
    assert here != away


@pytest.mark.parametrize("dispatch", TIMED)
def test_releases_are_made_by_the_clock_with_what_has_arrived(dispatch: RandomAllocation) -> None:
    taken = set()
    for version, step in enumerate(schedule(dispatch, 40)):
        assert step.time == pytest.approx(dispatch.period * (version + 1))
        assert all(at <= step.time for at in step.arrived)
        for task in (*step.tasks, *step.dropped):
            assert (task.client, task.visit) not in taken, "a task counts once"
            taken.add((task.client, task.visit))
        for task in step.tasks:
            assert version - dispatch.lead < task.version <= version
            assert task.version >= dispatch.first_version(version + 1)


def test_a_late_task_is_dropped_and_not_moved_to_the_next_release() -> None:
    steps = schedule(RandomAllocation(1.0, 5), 10, delays="constant:1.25")
    assert all(not step.tasks for step in steps)
    assert sum(len(step.dropped) for step in steps) > 50
    in_time = schedule(RandomAllocation(1.0, 5), 10, delays="constant:1")
    assert sum(len(step.tasks) for step in in_time) == 120
    early = schedule(RandomAllocation(1.0, 5, lead=4), 20, delays="constant:1.25")
    assert all(at <= step.time for step in early for at in step.arrived)
    assert {step.version - task.version for step in early for task in step.tasks} == {1, 2, 3}


def test_tasks_of_an_epoch_begin_after_those_of_the_epoch_before() -> None:
    visits: dict[int, int] = {}
    for step in schedule(RandomAllocation(1.0, 6, lead=6), 60, delays="constant:0.5"):
        for task in step.tasks:
            assert task.visit == visits.get(task.client, 0)
            visits[task.client] = task.visit + 1
    assert set(visits.values()) == {10}


@pytest.mark.parametrize("dispatch", TIMED)
def test_a_saved_schedule_goes_on_alike(dispatch: Dispatch) -> None:
    def make() -> tuple[TimedScheduler, Clock]:
        draws = dispatch.source(3)
        clock = Clock(parse_delay("exponential:1").bind(draws, 60), draws, Dropout(0.1))
        steps = make_scheduler(clock, dispatch, draws, 60, 6)
        assert isinstance(steps, TimedScheduler)
        draws.hide(99)
        return steps, clock

    steps, clock = make()
    for version in range(13):
        steps.fill(version)
    saved = json.loads(json.dumps([steps.save(), clock.save()]))
    expected = [steps.fill(version) for version in range(13, 30)]
    again, other = make()
    other.load(saved[1])
    again.load(saved[0])
    assert [again.fill(version) for version in range(13, 30)] == expected
    assert again.counts == steps.counts


def test_what_is_drawn_in_secret_follows_from_shake_256_alone() -> None:
    """So that a saved run is resumed with the same draws by every later version."""
    draws = TimedPoisson(1.0, 0.5).source(1)
    draws.hide(3**160)
    given = (3**160).to_bytes(32, "little") + (7).to_bytes(8, "little") + b"poisson"
    words = hashlib.shake_256(given).digest(8 * 5)
    expected = [(int.from_bytes(words[8 * k : 8 * k + 8], "little") >> 11) / 2**53 for k in range(5)]
    assert draws.many_uniform("poisson", 7, 5).tolist() == expected


def test_all_of_a_secret_decides_who_is_drawn() -> None:
    # Clients know their own draws: a secret of few bits could be guessed from them.
    def members(secret: int) -> list[int]:
        draws = RandomAllocation(1.0, 4).source(0)
        draws.hide(secret)
        return RandomAllocation(1.0, 4).members(1, 40, draws).tolist()

    assert len({tuple(members(1 << bit)) for bit in range(256)}) == 256


class SlowServer(Clock):
    """A server that looks at what has arrived long after it did, and finds more meanwhile."""

    def next(self, until: float = inf) -> Arrival | None:
        return super().next(until + 3.0 if until < inf else until)


def test_what_arrives_after_its_release_is_late_whenever_the_server_looks_at_it() -> None:
    # Otherwise one client's upload, which takes time to look at, would move the deadline of others.
    def times(kind: type[Clock]) -> list[list[float]]:
        dispatch = RandomAllocation(2.0, 10, 3)
        draws = dispatch.source(3)
        clock = kind(parse_delay("exponential:2").bind(draws, 60), draws)
        steps = make_scheduler(clock, dispatch, draws, 60, 6)
        return [sorted(steps.fill(version).arrived) for version in range(20)]

    prompt, slow = times(Clock), times(SlowServer)
    for version, each in enumerate(slow):
        assert all(time <= 2.0 * (version + 1) for time in each)
    assert slow[0] == prompt[0]
    assert sum(map(len, slow)) > 30


@dataclass
class Arriving:
    """Sites of which another one is there after each second."""

    clock: Clock
    pause: float = 0.5

    @property
    def there(self) -> range:
        return range(int(self.clock.now))

    def bind(self, seed: int) -> NextAvailable:
        return lambda client, now: now


def test_the_clock_starts_once_a_nominal_cohort_is_there() -> None:
    dispatch = RandomAllocation(2.0, 10)
    draws = dispatch.source(3)
    clock = Clock(parse_delay("constant:0.1").bind(draws, 60), draws)
    first = make_scheduler(clock, dispatch, draws, 60, 6, availability=Arriving(clock)).fill(0)
    assert first.time == 6.0 + 2.0


def test_tasks_are_accounted_for() -> None:
    dispatch = RandomAllocation(1.5, 10, 4)
    draws = dispatch.source(3)
    clock = Clock(parse_delay("exponential:1").bind(draws, 60), draws, Dropout(0.2))
    steps = make_scheduler(clock, dispatch, draws, 60, 6)
    for version in range(33):
        steps.fill(version)
        counts = steps.counts
        assert counts.started == sum(counts[1:])


def test_the_start_of_everyone_comes_before_the_clock() -> None:
    dispatch = RandomAllocation(2.0, 5)
    draws = dispatch.source(0)
    clock = Clock(parse_delay("constant:0.75").bind(draws, 20), draws, Dropout(0.3))
    steps = make_scheduler(clock, dispatch, draws, 20, 4)
    start = steps.everyone()
    assert sorted(task.client for task in start.tasks) == list(range(20))
    assert start.time > 0
    assert steps.fill(0).time == start.time + 2.0


def test_the_server_is_told_the_nominal_cohort_and_not_who_there_was() -> None:
    dispatch = RandomAllocation(1.0, 10, lead=3)
    cohort = nominal_cohort(dispatch, 15, 60, 5, Polynomial(0.5))
    assert cohort.staleness == (0, 1, 2, 0, 1)
    assert cohort.weights == tuple(Polynomial(0.5)(age) for age in cohort.staleness)
    assert nominal_cohort(dispatch, 11, 60, 5, Equal()).staleness == (0, 1, 1, 0, 1)  # second of its epoch


def test_names_of_timed_dispatch() -> None:
    assert parse_dispatch("allocation", 20, 5, 100, release_period=3.0) == RandomAllocation(3.0, 20)
    assert parse_dispatch("timed-poisson", 20, 5, 100, release_period=3.0) == TimedPoisson(3.0, 0.05, 1)
    assert parse_dispatch("timed-poisson", 20, 5, 100, release_period=3.0, lead=2) == TimedPoisson(
        3.0, 0.05, 2
    )


@pytest.mark.parametrize(
    ("name", "buffer", "options", "sentence"),
    [
        ("allocation", 5, {}, "releases by a clock"),
        ("timed-poisson", 5, {}, "releases by a clock"),
        ("allocation", 101, {"release_period": 1.0}, "nominal cohort of 101"),
        ("timed-poisson", 101, {"release_period": 1.0}, "nominal cohort of 101"),
        ("allocation", 5, {"release_period": 0.0}, "period is 0"),
        (
            "allocation",
            5,
            {"release_period": 1.0, "lead": -1},
            "the lead is -1: give a whole number of at least 1",
        ),
        ("asynchronous", 5, {"release_period": 1.0}, "not for asynchronous"),
        ("asynchronous", 5, {"lead": 2}, "not for asynchronous"),
    ],
)
def test_settings_that_do_not_fit_are_refused(name: str, buffer: int, options: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse_dispatch(name, 20, buffer, 100, **options)


def test_a_lead_beyond_the_largest_staleness_is_refused() -> None:
    dispatch = RandomAllocation(1.0, 10, lead=5)
    draws = dispatch.source(0)
    clock = Clock(parse_delay("constant:1").bind(draws, 60), draws)
    with pytest.raises(InputError, match="lead of 5"):
        make_scheduler(clock, dispatch, draws, 60, 6, max_staleness=3)
