"""Asynchronous federated learning that needs no step-size tuning and keeps data private."""

from importlib.metadata import version

from offbeat import checkpoint, models
from offbeat.aggregate.mean import Mean
from offbeat.aggregate.private import Private
from offbeat.aggregate.secure import Secure
from offbeat.algorithms import CATALOGUE, Setting, build
from offbeat.algorithms.adamasfl import AdaMasFL
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
