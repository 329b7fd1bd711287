"""When clients come: time without tensors."""

from offbeat.schedule.availability import Always, Availability, Cycle, Dropout, parse_availability
from offbeat.schedule.chance import Draws, KeyedDraws
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import (
    Constant,
    Delay,
    Exponential,
    HalfNormal,
    LogNormal,
    Tiers,
    Uniform,
    parse_delay,
)
from offbeat.schedule.dispatch import (
    Asynchronous,
    Dispatch,
    Poisson,
    RoundRefill,
    Synchronous,
    parse_dispatch,
)
from offbeat.schedule.fadas_scripts import ScriptDraws
from offbeat.schedule.filled import Counts, Filled
from offbeat.schedule.flow import Flow
from offbeat.schedule.recorded import Recorded
from offbeat.schedule.staleness import Equal, Hinge, Polynomial, Weights, parse_weights
from offbeat.schedule.statistics import Summary, fills, simulate, summarise
from offbeat.schedule.timeline import Arrival, Timeline

__all__ = [
    "Always",
    "Arrival",
    "Asynchronous",
    "Availability",
    "Clock",
    "Constant",
    "Counts",
    "Cycle",
    "Delay",
    "Dispatch",
    "Draws",
    "Dropout",
    "Equal",
    "Exponential",
    "Filled",
    "Flow",
    "HalfNormal",
    "Hinge",
    "KeyedDraws",
    "LogNormal",
    "Poisson",
    "Polynomial",
    "Recorded",
    "RoundRefill",
    "ScriptDraws",
    "Summary",
    "Synchronous",
    "Tiers",
    "Timeline",
    "Uniform",
    "Weights",
    "fills",
    "parse_availability",
    "parse_delay",
    "parse_dispatch",
    "parse_weights",
    "simulate",
    "summarise",
]
