"""The method of a run, with the local optimiser and the rate schedules of its settings.

A trial finds whether a method's local steps are those of `core.sgd` and whether its rates may differ between
tasks; otherwise these settings are rejected.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.aggregate.uploads import probe_upload
from offbeat.algorithms import Setting, build, find
from offbeat.algorithms.rates import (
    LOCAL_OPTIMIZERS,
    SCHEDULES,
    ConstantRate,
    LocalAdamW,
    LocallyOptimized,
    LocalSGD,
    Schedule,
    Scheduled,
    WarmupRate,
    has_rate,
    over_rounds,
    schedule_factor,
    with_rate,
)
from offbeat.core import AnyAlgorithm, LocalOptimizer, Rate, Vector
from offbeat.errors import InputError, setting_name
from offbeat.schedule.parsing import parse_spec
from offbeat.training.experiment import Experiment
from offbeat.training.task import import_function
from offbeat.trees import Tree

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # package.module:function


def build_method(experiment: Experiment, setting: Setting, parameters: Mapping[str, Any]) -> AnyAlgorithm:
    """The method of an experiment, with its local optimiser and rate schedules."""
    name = experiment.algorithm
    algorithm = build(name, setting, parameters)
    optimizer, clip = parse_local_optimizer(experiment.local_optimizer), experiment.clip_grad_norm
    if isinstance(optimizer, LocalAdamW) and experiment.weight_decay:
        raise InputError(
            f"adamw has a weight decay of its own: give it as adamw:DECAY, and leave out "
            f"{setting_name('weight_decay')}."
        )
    if optimizer != LocalSGD() or clip is not None:
        algorithm = LocallyOptimized(algorithm, optimizer, clip)
        if not _takes_local_rules(algorithm):
            given = "local_optimizer" if optimizer != LocalSGD() else "clip_grad_norm"
            raise InputError(
                f"{name} takes local steps of its own kind, which {setting_name(given)} would change into "
                "those of another method: leave it out, or use a method of local SGD, such as fedbuff."
            )
    local, server = (
        _parse_schedule(experiment, rate, getattr(experiment, f"{rate}_schedule"), setting.rounds, parameters)
        for rate in ("local_lr", "server_lr")
    )
    if local is None and server is None:
        return algorithm
    if local is not None and not _takes_rates_as_tensors(algorithm):
        raise InputError(
            f"{name} uses its local_lr as a plain number, so {setting_name('local_lr_schedule')} cannot give "
            "each task its own: let it use offbeat.sgd, or write x - self.local_lr * g."
        )
    return Scheduled(algorithm, local, server)


def parse_local_optimizer(text: str) -> LocalOptimizer:
    """The optimiser that a text such as `momentum:0.9` names."""
    return parse_spec("local optimiser", text, LOCAL_OPTIMIZERS)


def parse_schedule(text: str, option: str) -> Schedule:
    """The schedule that a text such as `warmup:20,cosine:0.1` or `package.module:function` names."""
    first, comma, second = text.partition(",")
    if not comma and _FUNCTION.fullmatch(text) and text.partition(":")[0] not in SCHEDULES:
        return import_function(text, option)
    schedule = parse_spec("rate schedule", first, SCHEDULES)
    if not comma:
        return schedule
    if not isinstance(schedule, WarmupRate) or second.strip().startswith("warmup"):
        raise InputError(
            f"{option} '{text}' has two parts: only the first must be a warm-up, as in warmup:20,cosine."
        )
    return schedule.then(parse_schedule(second, option))


def _parse_schedule(
    experiment: Experiment, rate: str, text: str, rounds: int, parameters: Mapping[str, Any]
) -> Schedule | None:
    """The schedule of a rate that the method has; None: it is constant."""
    option = setting_name(f"{rate}_schedule")
    schedule = parse_schedule(text, option)
    if schedule == ConstantRate():
        return None
    known, name = find(experiment.algorithm).parameters(), experiment.algorithm
    if rate not in known:
        raise InputError(
            f"{name} has no {rate} to set, so it has no schedule either: leave out {option}, or use a method "
            "with that rate, such as fedbuff."
        )
    if parameters.get(rate, known[rate].default) is None:
        raise InputError(
            f"{name} computes its {rate} from the run: give {setting_name(f'parameters.{rate}')} to put a "
            f"schedule on it, or leave out {option}."
        )
    whole = over_rounds(schedule, rounds)
    schedule_factor(whole, 0)  # refused before anything is written
    return whole


def _takes_local_rules(algorithm: LocallyOptimized) -> bool:
    """Whether a method's steps go through `core.sgd`."""
    if not has_rate(algorithm, "local_lr"):
        return False
    watched = _WatchedOptimizer()
    try:
        probe_upload(dataclasses.replace(algorithm, optimizer=watched), torch.zeros(1))
    except Exception:  # such as arithmetic with the rule, in code that may be the user's
        return False
    return watched.used


class _WatchedOptimizer:
    """Notes whether it is used."""

    used = False

    def init(self, x: Vector) -> tuple[()]:
        return ()

    def __call__(self, x: Vector, gradient: Vector, state: tuple[()], lr: Rate) -> tuple[Vector, tuple[()]]:
        self.used = True
        return x, state


def _takes_rates_as_tensors(algorithm: AnyAlgorithm) -> bool:
    """Whether a method's clients can be mapped over tasks whose local rates differ."""

    def upload(rate: Tensor) -> Tree:
        return probe_upload(with_rate(algorithm, "local_lr", rate), torch.zeros(1))

    try:
        torch.func.vmap(upload)(torch.ones(2))
    except Exception:  # of code that may be the user's
        return False
    return True


def check_schedules_last(experiment: Experiment, rounds: int) -> None:
    """Reject the extension of a run whose schedules end with it."""
    for rate in ("local_lr_schedule", "server_lr_schedule"):
        text = getattr(experiment, rate)
        schedule = parse_schedule(text, setting_name(rate))
        if over_rounds(schedule, experiment.rounds) != over_rounds(schedule, rounds):
            raise InputError(
                f"{setting_name(rate)} {text} ends with the run, so {rounds} in place of {experiment.rounds} "
                f"server steps is another run: name another {setting_name('out')}, or a schedule with steps "
                "of its own, such as cosine:0.1:500."
            )
