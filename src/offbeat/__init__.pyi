"""The public names of offbeat; `__init__.py` imports each of them on first use."""

from offbeat.aggregate.compression import EightBit as EightBit
from offbeat.aggregate.compression import TopK as TopK
from offbeat.aggregate.mean import Mean as Mean
from offbeat.aggregate.private import Private as Private
from offbeat.aggregate.robust import (
    GeometricMedian as GeometricMedian,
)
from offbeat.aggregate.robust import (
    Median as Median,
)
from offbeat.aggregate.robust import (
    NormBound as NormBound,
)
from offbeat.aggregate.robust import (
    TrimmedMean as TrimmedMean,
)
from offbeat.aggregate.secure import Secure as Secure
from offbeat.algorithms import CATALOGUE as CATALOGUE
from offbeat.algorithms import Cost as Cost
from offbeat.algorithms import Setting as Setting
from offbeat.algorithms import build as build
from offbeat.algorithms import register as register
from offbeat.algorithms.adamasfl import AdaMasFL as AdaMasFL
from offbeat.algorithms.cadence import Cadence as Cadence
from offbeat.algorithms.fadas import fadas as fadas
from offbeat.algorithms.fedasync import FedAsync as FedAsync
from offbeat.algorithms.fedopt import FedOpt as FedOpt
from offbeat.api import RunResult as RunResult
from offbeat.api import run as run
from offbeat.api import tune as tune
from offbeat.core import (
    Algorithm as Algorithm,
)
from offbeat.core import (
    Batch as Batch,
)
from offbeat.core import (
    Batches as Batches,
)
from offbeat.core import (
    Cohort as Cohort,
)
from offbeat.core import (
    Gradient as Gradient,
)
from offbeat.core import (
    Task as Task,
)
from offbeat.core import (
    Traits as Traits,
)
from offbeat.core import (
    Vector as Vector,
)
from offbeat.core import (
    Visit as Visit,
)
from offbeat.core import (
    scan as scan,
)
from offbeat.core import (
    sgd as sgd,
)
from offbeat.data.client_store import (
    Anywhere as Anywhere,
)
from offbeat.data.client_store import (
    InRam as InRam,
)
from offbeat.data.client_store import (
    Mapped as Mapped,
)
from offbeat.data.client_store import (
    OnDevice as OnDevice,
)
from offbeat.data.datasets import Source as Source
from offbeat.data.datasets import load as load
from offbeat.data.partition import (
    Dirichlet as Dirichlet,
)
from offbeat.data.partition import (
    Iid as Iid,
)
from offbeat.data.partition import (
    Natural as Natural,
)
from offbeat.data.partition import (
    Quantity as Quantity,
)
from offbeat.data.partition import (
    Shards as Shards,
)
from offbeat.data.population import (
    Epochs as Epochs,
)
from offbeat.data.population import (
    Examples as Examples,
)
from offbeat.data.population import (
    Population as Population,
)
from offbeat.data.population import (
    Steps as Steps,
)
from offbeat.data.sources import ClientData as ClientData
from offbeat.engines.simulation import Sequential as Sequential
from offbeat.engines.simulation import Vectorised as Vectorised
from offbeat.errors import DivergedError as DivergedError
from offbeat.errors import InputError as InputError
from offbeat.nn import models as models
from offbeat.nn.problem import Precision as Precision
from offbeat.nn.problem import Problem as Problem
from offbeat.privacy.accountant import calibrate as calibrate
from offbeat.schedule.advice import Advice as Advice
from offbeat.schedule.advice import ScheduleChoice as ScheduleChoice
from offbeat.schedule.advice import advise as advise
from offbeat.schedule.availability import Always as Always
from offbeat.schedule.availability import ClientCycle as ClientCycle
from offbeat.schedule.availability import Cycle as Cycle
from offbeat.schedule.availability import Dropout as Dropout
from offbeat.schedule.availability import RecordedLinks as RecordedLinks
from offbeat.schedule.clock import FixedDeadline as FixedDeadline
from offbeat.schedule.clock import QuantileDeadline as QuantileDeadline
from offbeat.schedule.clock import TaskLimits as TaskLimits
from offbeat.schedule.delays import (
    Constant as Constant,
)
from offbeat.schedule.delays import (
    Exponential as Exponential,
)
from offbeat.schedule.delays import (
    HalfNormal as HalfNormal,
)
from offbeat.schedule.delays import (
    LogNormal as LogNormal,
)
from offbeat.schedule.delays import (
    Recorded as Recorded,
)
from offbeat.schedule.delays import (
    Tiers as Tiers,
)
from offbeat.schedule.delays import (
    Uniform as Uniform,
)
from offbeat.schedule.devices import DeviceProfile as DeviceProfile
from offbeat.schedule.devices import Devices as Devices
from offbeat.schedule.devices import Phones as Phones
from offbeat.schedule.dispatch import (
    Asynchronous as Asynchronous,
)
from offbeat.schedule.dispatch import (
    OpenSlots as OpenSlots,
)
from offbeat.schedule.dispatch import (
    Phases as Phases,
)
from offbeat.schedule.dispatch import (
    Poisson as Poisson,
)
from offbeat.schedule.dispatch import (
    Queues as Queues,
)
from offbeat.schedule.dispatch import (
    RandomAllocation as RandomAllocation,
)
from offbeat.schedule.dispatch import (
    RoundRefill as RoundRefill,
)
from offbeat.schedule.dispatch import (
    Synchronous as Synchronous,
)
from offbeat.schedule.dispatch import (
    TimedPoisson as TimedPoisson,
)
from offbeat.schedule.participation import Participation as Participation
from offbeat.schedule.staleness import Equal as Equal
from offbeat.schedule.staleness import Hinge as Hinge
from offbeat.schedule.staleness import Polynomial as Polynomial
from offbeat.training import checkpoint as checkpoint
from offbeat.training.evaluate import ClientMetrics as ClientMetrics
from offbeat.training.evaluate import accuracy as accuracy
from offbeat.training.evaluate import ema as ema
from offbeat.training.evaluate import evaluate as evaluate
from offbeat.training.evaluate import evaluate_clients as evaluate_clients
from offbeat.training.experiment import Experiment as Experiment
from offbeat.training.loop import Snapshot as Snapshot
from offbeat.training.loop import train as train
from offbeat.training.standardise import standardise as standardise
from offbeat.training.task import LearningTask as LearningTask
from offbeat.tuning import StudyResult as StudyResult
from offbeat.tuning import TrialResult as TrialResult

__version__: str
