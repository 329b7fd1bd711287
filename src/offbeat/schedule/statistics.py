"""Statistics of a schedule without training: how stale updates get and how long they wait."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from offbeat.errors import InputError
from offbeat.schedule.scheduler import Buffer, Scheduler
from offbeat.schedule.timed import TimedScheduler


@dataclass(frozen=True)
class ScheduleSummary:
    """A schedule in numbers; the first three are those of the FADAS paper."""

    staleness_max: int
    staleness_mean_of_max: float  # of each step's stalest update
    staleness_median_of_max: float
    staleness_mean: float
    staleness_counts: dict[int, int]
    steps: int
    time: float
    time_per_step: float
    waiting_mean: float  # from arrival to server step
    waiting_max: float
    started: int
    consumed: int
    dropped: int
    lost: int
    in_flight: int
    client_updates: int  # that arrived, used or not
    clients: int  # distinct clients whose updates were used

    def staleness_quantile(self, share: float) -> int:
        """The smallest staleness that at least this share of the updates do not exceed."""
        counts = Counter(self.staleness_counts)
        return _order_statistic(counts, max(0, ceil(share * counts.total()) - 1))

    def as_dict(self) -> dict[str, Any]:
        """The summary as values for JSON."""
        return asdict(self) | {"staleness_counts": {str(k): n for k, n in self.staleness_counts.items()}}


def iterate_buffers(scheduler: Scheduler | TimedScheduler, rounds: int) -> Iterator[Buffer]:
    """The first `rounds` buffers."""
    if rounds < 1:
        raise InputError(f"there are {rounds} rounds to simulate: give at least 1.")
    return map(scheduler.fill, range(rounds))


def simulate(scheduler: Scheduler | TimedScheduler, rounds: int) -> ScheduleSummary:
    """Simulate `rounds` server steps."""
    return summarise(iterate_buffers(scheduler, rounds), scheduler)


def summarise(steps: Iterable[Buffer], scheduler: Scheduler | TimedScheduler) -> ScheduleSummary:
    """Summarise the buffers of a scheduler without storing them."""
    maxima: Counter[int] = Counter()
    staleness: Counter[int] = Counter()
    seen = bytearray(scheduler.population)
    waited = longest = time = 0.0
    for step in steps:
        ages = step.staleness
        maxima[max(ages, default=0)] += 1
        staleness.update(ages)
        for task in step.tasks:
            seen[task.client] = 1
        time = step.time
        waited += sum(time - arrived for arrived in step.arrived)
        longest = max(longest, time - min(step.arrived, default=time))
    count, tasks, counts = maxima.total(), staleness.total(), scheduler.counts
    if not count:
        raise InputError("there are no server steps to summarise: take at least 1.")
    if not tasks:
        raise InputError("no update arrived in time for its release: lengthen the period or the lead.")
    return ScheduleSummary(
        staleness_max=max(maxima),
        staleness_mean_of_max=_mean(maxima),
        staleness_median_of_max=_median(maxima),
        staleness_mean=_mean(staleness),
        staleness_counts=dict(sorted(staleness.items())),
        steps=count,
        time=time,
        time_per_step=time / count,
        waiting_mean=waited / tasks,
        waiting_max=longest,
        started=counts.started,
        consumed=counts.consumed,
        dropped=counts.dropped,
        lost=counts.lost,
        in_flight=counts.in_flight,
        client_updates=counts.client_updates,
        clients=sum(seen),
    )


def _mean(counts: Counter[int]) -> float:
    return sum(value * count for value, count in counts.items()) / counts.total()


def _median(counts: Counter[int]) -> float:
    total = counts.total()
    return (_order_statistic(counts, (total - 1) // 2) + _order_statistic(counts, total // 2)) / 2


def _order_statistic(counts: Counter[int], rank: int) -> int:
    for value in sorted(counts):
        rank -= counts[value]
        if rank < 0:
            return value
    raise IndexError("rank beyond the last value")
