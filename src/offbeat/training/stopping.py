"""Rules that end a run before its last server step: a target, missing progress, or a budget.

Targets and patience are checked at evaluations, budgets at every server step. The reason is in the last
checkpoint. A run that was ended by one of these rules continues if it is resumed with a setting that its last
record does not fulfil.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from offbeat.errors import InputError, setting_name, unknown_name
from offbeat.schedule.dispatch import TIMED_DISPATCH_NAMES
from offbeat.training.experiment import Experiment

SETTINGS = ("stop_at", "patience", "max_time", "max_bytes", "max_client_updates")
_SECRET = ("max_bytes", "max_client_updates")  # depend on the number of clients that contributed


class BestRecord(NamedTuple):
    """The best evaluation so far by the main metric."""

    value: float | None = None
    version: int = 0
    since: int = 0  # evaluations without a better one


@dataclass(frozen=True)
class StopRules:
    """What ends a run early; None: nothing of that kind."""

    metric: str  # the one to compare by
    rising: frozenset[str]  # metrics that improve as they grow
    target: tuple[str, float] | None = None
    patience: int | None = None
    max_time: float | None = None
    max_bytes: float | None = None
    max_client_updates: int | None = None

    @classmethod
    def of(cls, experiment: Experiment, goals: Mapping[str, str], *, evaluated: bool = True) -> Self:
        """The rules of an experiment, whose task has these goals; rules without an effect are refused."""
        target = None if experiment.stop_at is None else parse_target(experiment.stop_at)
        if target is not None and target[0] not in goals:
            raise unknown_name(f"metric in {setting_name('stop_at')}", target[0], goals)
        for name in ("stop_at", "patience"):
            if getattr(experiment, name) is not None and not evaluated:
                raise InputError(
                    f"{setting_name(name)} looks at evaluations, and this run has no test data: give some, "
                    "or leave it out."
                )
        for name in _SECRET:
            if getattr(experiment, name) is not None and experiment.dispatch in TIMED_DISPATCH_NAMES:
                raise InputError(
                    f"the end by {setting_name(name)} would reveal how many clients contributed, which "
                    f"{experiment.dispatch} dispatch keeps secret: use {setting_name('max_time')}."
                )
        return cls(
            next(iter(goals)),
            frozenset(name for name, goal in goals.items() if goal == "max"),
            target,
            experiment.patience,
            experiment.max_time,
            experiment.max_bytes,
            experiment.max_client_updates,
        )

    def over_budget(self, time: float, bytes_sent: int, client_updates: int) -> str | None:
        """Why a server step is the last one by its costs so far, if it is."""
        if self.max_time is not None and time >= self.max_time:
            return f"the time of {self.max_time:g} seconds is over"
        if self.max_bytes is not None and bytes_sent >= self.max_bytes:
            return f"{bytes_sent} bytes were sent, and {setting_name('max_bytes')} is {self.max_bytes:g}"
        if self.max_client_updates is not None and client_updates >= self.max_client_updates:
            return (
                f"there were {client_updates} client updates, and {setting_name('max_client_updates')} is "
                f"{self.max_client_updates}"
            )
        return None

    def satisfied(self, record: Mapping[str, Any], best: BestRecord) -> str | None:
        """Why an evaluation is the last one, if it is."""
        if self.target is not None:
            name, goal = self.target
            value = record.get(name)
            if value is not None and (value >= goal if name in self.rising else value <= goal):
                return (
                    f"{name} reached its target of {goal:g} at server step {record['version']} ({value:.4g})"
                )
        if self.patience is not None and best.since >= self.patience:
            return (
                f"{self.metric} has not improved in {best.since} evaluations since server step {best.version}"
            )
        return None

    def improve(self, best: BestRecord, record: Mapping[str, Any]) -> BestRecord:
        """The best evaluation after another one."""
        value = record.get(self.metric)
        if value is None:
            return best
        sign = 1 if self.metric in self.rising else -1
        if best.value is None or sign * value > sign * best.value:
            return BestRecord(value, record["version"])
        return best._replace(since=best.since + 1)

    def last_reason(self, record: Mapping[str, Any], best: BestRecord) -> str | None:
        """Why a run whose last record is this one may not continue, if so."""
        costs = (record["time"], record["bytes"], record["client_updates"])
        return self.over_budget(*costs) or self.satisfied(record, best)


def parse_target(text: str) -> tuple[str, float]:
    """A metric and the value to reach, written as METRIC:VALUE."""
    name, colon, value = text.rpartition(":")
    try:
        goal = float(value)
    except ValueError:
        goal = math.nan
    if not (name and colon) or not math.isfinite(goal):
        raise InputError(f"{setting_name('stop_at')} takes METRIC:VALUE, such as accuracy:0.9, not '{text}'.")
    return name, goal
