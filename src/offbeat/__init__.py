"""Asynchronous federated learning for PyTorch, simulated under a virtual clock or over real sites.

Public names are imported on first use, so that a program that needs none of them, such as the relay
of a site's messages, starts without importing torch.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.aggregate.mean import Mean
    from offbeat.aggregate.private import Private
    from offbeat.aggregate.secure import Secure
    from offbeat.algorithms import CATALOGUE, Setting, build
    from offbeat.algorithms.adamasfl import AdaMasFL
    from offbeat.algorithms.cadence import Cadence
    from offbeat.algorithms.fadas import fadas
    from offbeat.algorithms.fedasync import FedAsync
    from offbeat.algorithms.fedopt import FedOpt
    from offbeat.core import (
        Algorithm,
        Batch,
        Batches,
        Cohort,
        Gradient,
        Task,
        Traits,
        Vector,
        Visit,
        scan,
        sgd,
    )
    from offbeat.data.client_store import Anywhere, InRam, Mapped, OnDevice
    from offbeat.data.datasets import Source, load
    from offbeat.data.partition import Dirichlet, Iid, Natural, Quantity, Shards
    from offbeat.data.population import Epochs, Examples, Population, Steps
    from offbeat.engines.simulation import Sequential, Vectorised
    from offbeat.errors import DivergedError, InputError
    from offbeat.nn import models
    from offbeat.nn.problem import Precision, Problem
    from offbeat.privacy.accountant import calibrate
    from offbeat.schedule.availability import Always, Cycle, Dropout
    from offbeat.schedule.delays import Constant, Exponential, HalfNormal, LogNormal, Recorded, Tiers, Uniform
    from offbeat.schedule.dispatch import Asynchronous, Phases, Poisson, Queues, RoundRefill, Synchronous
    from offbeat.schedule.participation import Participation
    from offbeat.schedule.staleness import Equal, Hinge, Polynomial
    from offbeat.training import checkpoint
    from offbeat.training.evaluate import accuracy, ema, evaluate
    from offbeat.training.experiment import Experiment
    from offbeat.training.loop import Snapshot, train

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
    "Traits",
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

_MODULES = {"checkpoint": "offbeat.training.checkpoint", "models": "offbeat.nn.models"}
_NAMES = {
    "offbeat.aggregate.mean": ("Mean",),
    "offbeat.aggregate.private": ("Private",),
    "offbeat.aggregate.secure": ("Secure",),
    "offbeat.algorithms": (
        "CATALOGUE",
        "Setting",
        "build",
    ),
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
        "Traits",
        "Vector",
        "Visit",
        "scan",
        "sgd",
    ),
    "offbeat.data.client_store": (
        "Anywhere",
        "InRam",
        "Mapped",
        "OnDevice",
    ),
    "offbeat.data.datasets": (
        "Source",
        "load",
    ),
    "offbeat.data.partition": (
        "Dirichlet",
        "Iid",
        "Natural",
        "Quantity",
        "Shards",
    ),
    "offbeat.data.population": (
        "Epochs",
        "Examples",
        "Population",
        "Steps",
    ),
    "offbeat.engines.simulation": (
        "Sequential",
        "Vectorised",
    ),
    "offbeat.errors": (
        "DivergedError",
        "InputError",
    ),
    "offbeat.nn.problem": (
        "Precision",
        "Problem",
    ),
    "offbeat.privacy.accountant": ("calibrate",),
    "offbeat.schedule.availability": (
        "Always",
        "Cycle",
        "Dropout",
    ),
    "offbeat.schedule.delays": (
        "Constant",
        "Exponential",
        "HalfNormal",
        "LogNormal",
        "Recorded",
        "Tiers",
        "Uniform",
    ),
    "offbeat.schedule.dispatch": (
        "Asynchronous",
        "Phases",
        "Poisson",
        "Queues",
        "RoundRefill",
        "Synchronous",
    ),
    "offbeat.schedule.participation": ("Participation",),
    "offbeat.schedule.staleness": (
        "Equal",
        "Hinge",
        "Polynomial",
    ),
    "offbeat.training.evaluate": (
        "accuracy",
        "ema",
        "evaluate",
    ),
    "offbeat.training.experiment": ("Experiment",),
    "offbeat.training.loop": (
        "Snapshot",
        "train",
    ),
}
_HOMES = MappingProxyType({name: home for home, names in _NAMES.items() for name in names})


class _Package(ModuleType):
    """The package, which imports what it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        elif name in _MODULES:
            value = import_module(_MODULES[name])
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
