"""A scheduler with its clock, and settings of it for property tests."""

from math import inf
from typing import Any

from hypothesis import strategies as st

from offbeat.schedule.availability import Always, Availability, Cycle, Dropout
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import (
    Asynchronous,
    Dispatch,
    OpenSlots,
    Phases,
    Poisson,
    RoundRefill,
    Synchronous,
)
from offbeat.schedule.participation import Participation
from offbeat.schedule.scheduler import Scheduler


def make_scheduler(
    dispatch: Dispatch,
    population: int,
    buffer: int,
    participation: Participation = Participation(),
    *,
    seed: int = 0,
    delays: str = "exponential:1",
    limit: float = inf,
    dropout: float = 0.0,
    availability: Availability = Always(),
    watch: Any = lambda clock: clock,
) -> tuple[Scheduler, Any]:
    """The scheduler and the clock it runs on, which `watch` may wrap."""
    draws = dispatch.source(seed)
    clock = watch(Clock(parse_delay(delays).bind(draws, population), draws, Dropout(dropout)))
    return Scheduler(clock, dispatch, draws, population, buffer, limit, availability, participation), clock


@st.composite
def scheduler_settings(draw: st.DrawFn, most_clients: int = 30, phases: bool = True) -> dict[str, Any]:
    """Arguments of `make_scheduler`: every dispatcher, with losses, limits and absence."""
    population = draw(st.integers(1, most_clients))
    concurrency = draw(st.integers(1, population))
    buffer = draw(st.integers(1, concurrency))
    dispatchers: list[Dispatch] = [
        Synchronous(concurrency),
        Asynchronous(concurrency),
        Asynchronous(concurrency, eager=False),
        RoundRefill(concurrency),
        Poisson(concurrency / population),
        OpenSlots(concurrency, draw(st.integers(1, concurrency))),
    ]
    return {
        "dispatch": draw(st.sampled_from([*dispatchers, Phases(buffer)] if phases else dispatchers)),
        "population": population,
        "buffer": buffer,
        "seed": draw(st.integers(0, 5)),
        "delays": draw(st.sampled_from(["constant:0", "constant:1", "exponential:1", "tiers:large"])),
        "limit": draw(st.sampled_from([inf, 0, 2])),
        "dropout": draw(st.sampled_from([0.0, 0.4])),
        "availability": draw(st.sampled_from([Always(), Cycle(3.0, 0.4), Cycle(50.0, 0.02)])),
    }
