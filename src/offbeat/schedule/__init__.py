"""The schedule of a run, without tensors: who is given tasks and when updates arrive."""

from offbeat.schedule.availability import Always, Availability, Cycle, Dropout, parse_availability
from offbeat.schedule.clock import Arrival, Clock, Timeline
from offbeat.schedule.delays import (
    Constant,
    Delay,
    Exponential,
    HalfNormal,
    LogNormal,
    Recorded,
    Tiers,
    Uniform,
    parse_delay,
)
from offbeat.schedule.dispatch import (
    Asynchronous,
    Dispatch,
    Poisson,
    RandomAllocation,
    RoundRefill,
    Synchronous,
    TimedPoisson,
    parse_dispatch,
)
from offbeat.schedule.rng import FadasScriptRng, KeyedRng, Rng
from offbeat.schedule.scheduler import Buffer, Scheduler, TaskCounts
from offbeat.schedule.staleness import Equal, Hinge, Polynomial, StalenessWeights, parse_weights
from offbeat.schedule.statistics import ScheduleSummary, iterate_buffers, simulate, summarise
from offbeat.schedule.timed import TimedScheduler, make_scheduler

__all__ = [
    "Always",
    "Arrival",
    "Asynchronous",
    "Availability",
    "Buffer",
    "Clock",
    "Constant",
    "Cycle",
    "Delay",
    "Dispatch",
    "Dropout",
    "Equal",
    "Exponential",
    "FadasScriptRng",
    "HalfNormal",
    "Hinge",
    "KeyedRng",
    "LogNormal",
    "Poisson",
    "Polynomial",
    "RandomAllocation",
    "Recorded",
    "Rng",
    "RoundRefill",
    "ScheduleSummary",
    "Scheduler",
    "StalenessWeights",
    "Synchronous",
    "TaskCounts",
    "Tiers",
    "TimedPoisson",
    "TimedScheduler",
    "Timeline",
    "Uniform",
    "iterate_buffers",
    "make_scheduler",
    "parse_availability",
    "parse_delay",
    "parse_dispatch",
    "parse_weights",
    "simulate",
    "summarise",
]
