"""The effects of concurrency, buffer, staleness limit and deadline, computed from the schedule alone.

Each combination is simulated by the scheduler that training uses, for the same number of client updates.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offbeat.draws import randbelow
from offbeat.errors import InputError, check_attributes, check_whole, setting_name
from offbeat.schedule.availability import Availability, Dropout, parse_availability
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Delay, parse_delay
from offbeat.schedule.dispatch import TIMED_DISPATCH_NAMES, PooledDispatch, current_name, parse_dispatch
from offbeat.schedule.parsing import check_kind
from offbeat.schedule.scheduler import Buffer, Scheduler
from offbeat.schedule.statistics import summarise

ACCEPTED_STALENESS = 2.0  # the mean up to which every method works in the tables of docs/choose.md
_MIN_UPDATES, _UPDATES_PER_CLIENT = 5000, 20  # updates that are measured; the latter per busy client
_SETTLING, _MEASURED = 2, 3  # in units of the 99th percentile of the task durations
_MORE_UPDATES = 2  # the largest factor by which more updates are measured if tasks are slow
_PROBES = 2000  # tasks from which that percentile is estimated
_HIGHEST_DEFAULT = 3200  # concurrency
_EQUAL = 0.01  # relative differences up to this count as noise
_AS_FAST = 0.05  # relative loss of server steps that is accepted for more client updates
COHORT_DISPATCH = ("synchronous", "phases")  # whose concurrency is the buffer


@dataclass(frozen=True)
class ScheduleChoice:
    """One combination of settings and its figures; times are virtual seconds.

    Attributes:
        concurrency: Clients that work at the same time.
        buffer: Updates per server step.
        max_staleness: Staler updates are dropped; None: no limit.
        deadline: Seconds after which a task is given up; None: no limit.
        steps_per_second: Server steps.
        updates_per_second: Updates that were used.
        staleness_mean: In versions, over the updates that were used.
        staleness_p90: The 90th percentile of the staleness.
        staleness_max: The stalest update.
        waiting_mean: Seconds from an update's arrival to its server step.
        idle: The share of the clients' time in which they have no task.
        wasted: The share of all finished tasks that was dropped or lost.
        dropped: Updates that arrived too stale.
        lost: Tasks whose update never arrived.
        clients: Different clients whose updates were used.
        steps: Server steps that these figures are over.
        frontier: Whether no other combination is better in some respect and as good in the others: server
            steps, client updates, mean staleness.
    """

    concurrency: int
    buffer: int
    max_staleness: int | None
    deadline: float | None
    steps_per_second: float
    updates_per_second: float
    staleness_mean: float
    staleness_p90: int
    staleness_max: int
    waiting_mean: float
    idle: float
    wasted: float
    dropped: int
    lost: int
    clients: int
    steps: int
    frontier: bool = False

    @property
    def settings(self) -> tuple[int, int, int | None, float | None]:
        """The combination."""
        return self.concurrency, self.buffer, self.max_staleness, self.deadline

    @property
    def words(self) -> str:
        """The combination, in words."""
        limits = [] if self.max_staleness is None else [f"a maximum staleness of {self.max_staleness}"]
        limits += [] if self.deadline is None else [f"a deadline of {self.deadline:g} s"]
        rest = f" (with {' and '.join(limits)})" if limits else ""
        return f"a concurrency of {self.concurrency:,} and a buffer of {self.buffer:,}{rest}"


@dataclass(frozen=True)
class Advice:
    """Every combination, the recommended one, and a sentence about its disadvantages.

    Attributes:
        choices: Every combination with its figures.
        take: The recommended one.
        sentence: The recommendation, and what other combinations do better.
        updates: The number of client updates that each combination was measured over, at least.
        settled: Whether the beginning, until slow clients have returned once or twice, is left out.
    """

    choices: tuple[ScheduleChoice, ...]
    take: ScheduleChoice
    sentence: str
    updates: int
    settled: bool

    def as_dict(self) -> dict[str, Any]:
        """The advice as values for JSON."""
        return asdict(self)


def advise(
    delays: Delay | str,
    clients: int,
    *,
    concurrency: Sequence[int] = (),
    buffer: Sequence[int] = (),
    max_staleness: Sequence[int | None] = (None,),
    deadline: Sequence[float | None] = (None,),
    dispatch: str = "asynchronous",
    hand_out: str = "before",
    availability: Availability | str = "always",
    dropout: Dropout | float = 0.0,
    updates: int | None = None,
    accept_staleness: float = ACCEPTED_STALENESS,
    seed: int = 0,
) -> Advice:
    """Compare combinations of concurrency and buffer by their schedules, without training.

    Args:
        delays: How long tasks take, such as `Tiers("large")` or `"tiers:large"`.
        clients: The number of clients.
        concurrency: The values to compare; empty: up to 80 % of the clients, but at most 3,200.
        buffer: The values to compare; empty: the same as those of the concurrency.
        max_staleness: The limits to compare.
        deadline: The limits on a task's seconds to compare.
        dispatch: The protocol, which must be one whose server steps when the buffer is full.
        hand_out: When the client that fills the buffer is replaced: before or after the server step.
        availability: When clients are available, such as `Cycle(24, 0.3)` or `"cycle:24:0.3"`.
        dropout: The probability that a task is lost.
        updates: The number of client updates to measure, from the start of a run. None: enough for stable
            figures, after the beginning.
        accept_staleness: The mean staleness that is acceptable.
        seed: The seed of all draws.

    Returns:
        The combinations whose buffer is at most the concurrency, and the recommended one: of those with an
        acceptable mean staleness, the one with the most server steps per second and, among those within 5 %
        of it, the most client updates per second.
    """
    source = parse_delay(delays) if isinstance(delays, str) else delays
    check_attributes("delays", source, ["bind"], 'delays such as offbeat.Tiers("mild")')
    check_whole("the number of clients", clients, None)
    check_whole(setting_name("seed"), seed, 0)
    check_kind(setting_name("accept_staleness"), accept_staleness)
    if updates is not None:
        check_whole(setting_name("updates"), updates)
    _check_values("concurrency", concurrency)
    _check_values("buffer", buffer)
    _check_values("max_staleness", max_staleness, 0, none=True)
    _check_values("deadline", deadline, None, none=True)
    if clients < 2:
        raise InputError(f"there is nothing to choose with {clients} of them: give at least 2 clients.")
    dispatch = current_name(dispatch)
    if dispatch in TIMED_DISPATCH_NAMES:
        raise InputError(
            f"{dispatch} dispatch steps by a clock, whatever the concurrency: give a dispatch whose server "
            f"steps when its buffer is full as {setting_name('dispatch')}."
        )
    if not accept_staleness >= 0:
        raise InputError(f"{setting_name('accept_staleness')} must be at least 0, not {accept_staleness}.")
    for limit in deadline:
        if limit is not None and not limit > 0:
            raise InputError(f"{setting_name('deadline')} must be above 0, not {limit}.")
    for most in concurrency:
        if most > clients:
            raise InputError(
                f"the concurrency of {most} exceeds the {clients} clients: lower it or add clients."
            )
    usual = default_sizes(clients)
    levels = sorted(set(concurrency or usual))
    sizes = sorted(set(buffer or ([*usual, *levels] if not concurrency else levels)))
    pairs = [
        (size if dispatch in COHORT_DISPATCH else most, size)
        for most in (levels[-1:] if dispatch in COHORT_DISPATCH else levels)
        for size in sizes
        if size <= most
    ]
    if not pairs:
        raise InputError(
            f"no buffer is as small as a concurrency, so there is nothing to compare: give a smaller "
            f"{setting_name('buffer')} than {sizes[0]} or a larger {setting_name('concurrency')} than "
            f"{levels[-1]}."
        )
    wanted = updates or max(_MIN_UPDATES, _UPDATES_PER_CLIENT * max(most for most, _ in pairs))
    losses = dropout if isinstance(dropout, Dropout) else Dropout(dropout)
    when = parse_availability(availability) if isinstance(availability, str) else availability
    check_attributes("availability", when, ["bind"], "one such as offbeat.Always()")
    scenario = _Scenario(source, clients, dispatch, hand_out, when, losses, seed)
    lengths = scenario.task_seconds()
    for limit in deadline:
        if limit is not None and lengths[len(lengths) // 100] > limit:
            raise InputError(
                f"fewer than one task in a hundred is done within {limit:g} s: give a longer "
                f"{setting_name('deadline')}; the fastest tasks take {lengths[0]:.3g} s."
            )
    slow = 0.0 if updates else lengths[99 * len(lengths) // 100]  # 99 of 100 tasks take no longer
    found = [
        scenario.simulate((most, size, stale, limit), wanted, slow if limit is None else min(slow, limit))
        for most, size in pairs
        for stale in sorted(set(max_staleness), key=_none_last)
        for limit in sorted(set(deadline), key=_none_last)
    ]
    choices = tuple(_with_frontier(found))
    take = _take(choices, accept_staleness)
    return Advice(choices, take, _sentence(choices, take, accept_staleness), wanted, updates is None)


def _check_values(name: str, values: object, least: int | None = 1, *, none: bool = False) -> None:
    """Reject what is not a list of whole numbers from `least` on, or of numbers if `least` is None."""
    if isinstance(values, str) or not isinstance(values, Collection):
        raise InputError(f"{setting_name(name)} is {values!r}: give a list of the values to compare.")
    for value in values:
        if value is None and none:
            continue
        if least is None:
            check_kind(f"a value of {setting_name(name)}", value)
        else:
            check_whole(f"a value of {setting_name(name)}", value, least)


def _none_last(limit: float | None) -> float:
    return math.inf if limit is None else limit


def default_sizes(clients: int) -> list[int]:
    """Five sizes, each twice the one before, up to 80 % of the clients."""
    top = min(_HIGHEST_DEFAULT, max(1, 4 * clients // 5))
    return sorted({max(1, round(top / 2**halvings)) for halvings in range(5)})


@dataclass(frozen=True)
class _Scenario:
    """The settings that all combinations have in common."""

    delays: Delay
    clients: int
    dispatch: str
    hand_out: str
    availability: Availability
    dropout: Dropout
    seed: int

    def task_seconds(self) -> list[float]:
        """The durations of some tasks of different clients, in order."""
        source = parse_dispatch(self.dispatch, 1, 1, self.clients, self.hand_out).source(self.seed)
        seconds = self.delays.bind(source, self.clients)
        chosen = [randbelow(self.clients, self.seed, "probe", number) for number in range(_PROBES)]
        return sorted(seconds(client, 0, (index + 0.5) / _PROBES) for index, client in enumerate(chosen))

    def simulate(
        self, settings: tuple[int, int, int | None, float | None], updates: int, slow: float
    ) -> ScheduleChoice:
        """Measure one combination over `updates` updates; `slow` is 0 to measure from the start of a run."""
        concurrency, buffer, max_staleness, deadline = settings
        dispatch = parse_dispatch(self.dispatch, concurrency, buffer, self.clients, self.hand_out)
        assert isinstance(dispatch, PooledDispatch)
        source = dispatch.source(self.seed)
        clock = Clock(
            self.delays.bind(source, self.clients),
            source,
            self.dropout,
            math.inf if deadline is None else deadline,
        )
        work = _WorkMeter(clock)
        scheduler = Scheduler(
            clock,
            dispatch,
            source,
            self.clients,
            buffer,
            math.inf if max_staleness is None else max_staleness,
            self.availability,
            observe=work.observe,
        )
        steps = -(-updates // buffer)
        first = 0
        while clock.now < _SETTLING * slow and first < _MORE_UPDATES * steps:
            scheduler.fill(first)
            first += 1
        before, begun, worked = scheduler.counts, clock.now, work.seconds
        summary = summarise(_buffers(scheduler, first, steps, begun + _MEASURED * slow), scheduler)
        seconds = summary.time - begun
        if not math.isfinite(summary.time):
            raise InputError("tasks take too long for their times to be added up: give shorter delays.")
        if not seconds > 0:
            raise InputError("tasks take no time at all, so every choice is equally fast: give other delays.")
        dropped, lost = summary.dropped - before.dropped, summary.lost - before.lost
        used = summary.consumed - before.consumed
        return ScheduleChoice(
            concurrency,
            buffer,
            max_staleness,
            deadline,
            steps_per_second=summary.steps / seconds,
            updates_per_second=used / seconds,
            staleness_mean=summary.staleness_mean,
            staleness_p90=summary.staleness_quantile(0.9),
            staleness_max=summary.staleness_max,
            waiting_mean=summary.waiting_mean,
            idle=1 - (work.seconds - worked) / (self.clients * seconds),
            wasted=(dropped + lost) / (used + dropped + lost),
            dropped=dropped,
            lost=lost,
            clients=summary.clients,
            steps=summary.steps,
        )


def _buffers(scheduler: Scheduler, first: int, steps: int, until: float) -> Iterator[Buffer]:
    """At least `steps` buffers from version `first` on, and more until a time, up to twice as many."""
    time = 0.0
    for number in range(_MORE_UPDATES * steps):
        if number >= steps and time >= until:
            return
        filled = scheduler.fill(first + number)
        time = filled.time
        yield filled


class _WorkMeter:
    """Adds up the seconds that clients work."""

    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._since = 0.0
        self._working = 0

    def observe(self) -> None:
        now = self._clock.now
        self.seconds += self._working * (now - self._since)
        self._since, self._working = now, self._clock.working


def _with_frontier(found: Sequence[ScheduleChoice]) -> list[ScheduleChoice]:
    """Mark those that no other one beats."""
    best = [each for each in found if not any(_beats(other, each) for other in found)]
    return [_marked(each) if each in best else each for each in found]


def _marked(choice: ScheduleChoice) -> ScheduleChoice:
    return ScheduleChoice(**asdict(choice) | {"frontier": True})


def _beats(one: ScheduleChoice, two: ScheduleChoice) -> bool:
    """Whether one is better in some respect and as good in the others, up to chance."""
    pairs = [
        (one.steps_per_second, two.steps_per_second),
        (one.updates_per_second, two.updates_per_second),
        (two.staleness_mean, one.staleness_mean),
    ]
    return all(a >= b * (1 - _EQUAL) for a, b in pairs) and any(a > b * (1 + _EQUAL) for a, b in pairs)


def _take(choices: Sequence[ScheduleChoice], accepted: float) -> ScheduleChoice:
    fresh = [each for each in choices if each.staleness_mean <= accepted]
    if not fresh:
        return min(choices, key=lambda each: (each.staleness_mean, -each.updates_per_second))
    fastest = max(each.steps_per_second for each in fresh)
    near = [each for each in fresh if each.steps_per_second >= (1 - _AS_FAST) * fastest]
    return max(near, key=lambda each: (each.updates_per_second, -each.wasted))


def _sentence(choices: Sequence[ScheduleChoice], take: ScheduleChoice, accepted: float) -> str:
    too_stale = "" if take.staleness_mean <= accepted else f", which no choice keeps below {accepted:g}"
    text = f"Take {take.words}: {costs(take)}{too_stale}"
    if take.wasted >= _EQUAL:
        text += f", with {take.wasted:.0%} of the work wasted"
    faster = max(choices, key=lambda each: each.steps_per_second)
    larger = max(choices, key=lambda each: each.updates_per_second)
    if faster.steps_per_second > (1 + _AS_FAST) * take.steps_per_second:
        times = faster.steps_per_second / take.steps_per_second
        text += (
            f"; it gives up {times:.2g} times as many server steps, which {faster.words} would make at a "
            f"mean staleness of {faster.staleness_mean:.3g}"
        )
    elif larger.updates_per_second > (1 + _AS_FAST) * take.updates_per_second:
        times = larger.updates_per_second / take.updates_per_second
        text += (
            f"; it gives up {times:.2g} times as many client updates, which {larger.words} would use at a "
            f"mean staleness of {larger.staleness_mean:.3g}"
        )
    elif len(choices) > 1:
        text += "; it gives up nothing that was compared"
    return f"{text}."


def costs(choice: ScheduleChoice) -> str:
    """The main figures of a choice, in words."""
    return (
        f"{_short(choice.updates_per_second)} client updates and {_short(choice.steps_per_second)} server "
        f"steps per second at a mean staleness of {choice.staleness_mean:.3g}"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
