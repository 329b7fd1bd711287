"""Asynchronous federated learning that needs no step-size tuning and keeps data private.

Public names are imported when they are first asked for: a program that needs none of them, such as
the one that passes a site's messages on, does not wait for torch.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat import checkpoint, models
    from offbeat.aggregate.mean import Mean
    from offbeat.aggregate.private import Private
    from offbeat.aggregate.secure import Secure
    from offbeat.algorithms import CATALOGUE, Setting, build
    from offbeat.algorithms.adamasfl import AdaMasFL
    from offbeat.algorithms.cadence import Cadence
    from offbeat.algorithms.fadas import fadas
    from offbeat.algorithms.fedasync import FedAsync
    from offbeat.algorithms.fedopt import FedOpt
    from offbeat.core import Algorithm, Batch, Batches, Cohort, Gradient, Task, Vector, Visit, scan, sgd
    from offbeat.engines.simulated import Sequential, Vectorised
    from offbeat.errors import DivergedError, InputError
    from offbeat.evaluate import accuracy, ema, evaluate
    from offbeat.experiment import Experiment
    from offbeat.population.batches import Epochs, Steps
    from offbeat.population.homes import Anywhere, InRam, Mapped, OnDevice
    from offbeat.population.partition import Dirichlet, Iid, Natural, Quantity, Shards
    from offbeat.population.population import Examples, Population
    from offbeat.population.sources import Source, load
    from offbeat.precision import Precision
    from offbeat.privacy.accountant import calibrate
    from offbeat.problem import Problem
    from offbeat.schedule.availability import Always, Cycle, Dropout
    from offbeat.schedule.delays import Constant, Exponential, HalfNormal, LogNormal, Tiers, Uniform
    from offbeat.schedule.dispatch import Asynchronous, Phases, Poisson, Queues, RoundRefill, Synchronous
    from offbeat.schedule.participation import Participation
    from offbeat.schedule.recorded import Recorded
    from offbeat.schedule.staleness import Equal, Hinge, Polynomial
    from offbeat.snapshot import Snapshot
    from offbeat.train import train

__version__ = version("offbeat")

__all__ = [
    "CATALOGUE",
    "AdaMasFL",
    "Algorithm",
    "Always",
    "Anywhere",
    "Asynchronous",
    "Batch",
    "Batches",
    "Cadence",
    "Cohort",
    "Constant",
    "Cycle",
    "Dirichlet",
    "DivergedError",
    "Dropout",
    "Epochs",
    "Equal",
    "Examples",
    "Experiment",
    "Exponential",
    "FedAsync",
    "FedOpt",
    "Gradient",
    "HalfNormal",
    "Hinge",
    "Iid",
    "InRam",
    "InputError",
    "LogNormal",
    "Mapped",
    "Mean",
    "Natural",
    "OnDevice",
    "Participation",
    "Phases",
    "Poisson",
    "Polynomial",
    "Population",
    "Precision",
    "Private",
    "Problem",
    "Quantity",
    "Queues",
    "Recorded",
    "RoundRefill",
    "Secure",
    "Sequential",
    "Setting",
    "Shards",
    "Snapshot",
    "Source",
    "Steps",
    "Synchronous",
    "Task",
    "Tiers",
    "Uniform",
    "Vector",
    "Vectorised",
    "Visit",
    "accuracy",
    "build",
    "calibrate",
    "checkpoint",
    "ema",
    "evaluate",
    "fadas",
    "load",
    "models",
    "scan",
    "sgd",
    "train",
]

_MODULES = ("checkpoint", "models")
_NAMES = {
    "offbeat.aggregate.mean": ("Mean",),
    "offbeat.aggregate.private": ("Private",),
    "offbeat.aggregate.secure": ("Secure",),
    "offbeat.algorithms": ("CATALOGUE", "Setting", "build"),
    "offbeat.algorithms.adamasfl": ("AdaMasFL",),
    "offbeat.algorithms.cadence": ("Cadence",),
    "offbeat.algorithms.fadas": ("fadas",),
    "offbeat.algorithms.fedasync": ("FedAsync",),
    "offbeat.algorithms.fedopt": ("FedOpt",),
    "offbeat.core": (
        "Algorithm",
        "Batch",
        "Batches",
        "Cohort",
        "Gradient",
        "Task",
        "Vector",
        "Visit",
        "scan",
        "sgd",
    ),
    "offbeat.engines.simulated": ("Sequential", "Vectorised"),
    "offbeat.errors": ("DivergedError", "InputError"),
    "offbeat.evaluate": ("accuracy", "ema", "evaluate"),
    "offbeat.experiment": ("Experiment",),
    "offbeat.population.batches": ("Epochs", "Steps"),
    "offbeat.population.homes": ("Anywhere", "InRam", "Mapped", "OnDevice"),
    "offbeat.population.partition": ("Dirichlet", "Iid", "Natural", "Quantity", "Shards"),
    "offbeat.population.population": ("Examples", "Population"),
    "offbeat.population.sources": ("Source", "load"),
    "offbeat.precision": ("Precision",),
    "offbeat.privacy.accountant": ("calibrate",),
    "offbeat.problem": ("Problem",),
    "offbeat.schedule.availability": ("Always", "Cycle", "Dropout"),
    "offbeat.schedule.delays": ("Constant", "Exponential", "HalfNormal", "LogNormal", "Tiers", "Uniform"),
    "offbeat.schedule.dispatch": (
        "Asynchronous",
        "Phases",
        "Poisson",
        "Queues",
        "RoundRefill",
        "Synchronous",
    ),
    "offbeat.schedule.participation": ("Participation",),
    "offbeat.schedule.recorded": ("Recorded",),
    "offbeat.schedule.staleness": ("Equal", "Hinge", "Polynomial"),
    "offbeat.snapshot": ("Snapshot",),
    "offbeat.train": ("train",),
}
_HOMES = MappingProxyType({name: home for home, names in _NAMES.items() for name in names})


class _Package(ModuleType):
    """The package, which imports what it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        elif name in _MODULES:
            value = import_module(f"offbeat.{name}")
        else:
            raise AttributeError(f"module 'offbeat' has no attribute '{name}'", name=name, obj=self)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # `train` and `evaluate` are functions here: importing the modules of these names leaves them be
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
