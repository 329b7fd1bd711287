"""A learning task as one value: the module, the data by client, and how the model is evaluated.

The same value is trained by `offbeat.run`, by the commands `run` and `compare` with `--task`, and over
sites by `serve` and `join`. The data sets and models that the command line has by name become tasks as well.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from offbeat.algorithms import find
from offbeat.core import Vector
from offbeat.data.datasets import Source, load
from offbeat.data.partition import Partition, parse_partition, split_alike
from offbeat.data.population import Epochs, Examples, ExampleSource, Population, Steps
from offbeat.data.readers import labels_of, read_examples
from offbeat.data.sources import ClientData, client_data
from offbeat.errors import InputError, error_summary, setting_name, with_article
from offbeat.nn import models
from offbeat.nn.layers import RandomCropFlip
from offbeat.nn.problem import Loss, Problem, Statistics, cross_entropies
from offbeat.schedule.delays import Delay, parse_delay
from offbeat.training.evaluate import ClientMetrics, Metric, accuracy, evaluate, evaluate_clients
from offbeat.training.experiment import SAMPLE_FIELDS, Experiment, personal_layers

MakeModule: TypeAlias = Callable[[], nn.Module]
FROM_TASK = "task"  # the setting `partition` or `delays` of a run whose task has its own


@dataclass(frozen=True, kw_only=True)
class LearningTask:
    """What is trained, on whose data, and how it is evaluated.

    Attributes:
        module: The model, or a function that makes it; its weights then follow from the seed of the run.
        data: The training data by client: `ClientData`, a dictionary of clients, or a function from the name
            of a client to its data. Data that are not divided yet (a pair of arrays, a torch or Hugging Face
            data set, or a data set of `offbeat.load`) are divided among simulated clients by a partition.
        test: The test data, or a function without arguments that loads them. `ClientData` and dictionaries
            have test data for each client, whose metrics are then recorded as well. None: the test set of a
            data set of `offbeat.load`, otherwise nothing is evaluated.
        loss: The loss of outputs and targets, for each example or for the batch.
        metrics: Metrics of outputs and targets by name; runs are compared by the first one. None: accuracy if
            the loss is the default one, otherwise only the loss.
        lower_is_better: The names of metrics that improve as they fall; `loss` always does.
        partition: How data that are not divided yet are given to clients, as a value or as text such as
            "dirichlet:0.5"; the setting `partition` has precedence.
        delays: How long the tasks of clients take in a simulation, as a value or as text such as
            "exponential:1"; the setting `delays` has precedence.
        personal: Patterns for the names of layers that stay at the client, such as ["head"] or ["*.norm*"];
            the setting `personal` has precedence.
        name: A short name, for titles and folders.
    """

    module: nn.Module | MakeModule
    data: Any
    test: Any = None
    loss: Loss = cross_entropies
    metrics: Mapping[str, Metric] | None = None
    lower_is_better: Collection[str] = ()
    partition: Partition | str | None = None
    delays: Delay | str | None = None
    personal: Collection[str] = ()
    name: str = "task"

    def __post_init__(self) -> None:
        if isinstance(self.personal, str):
            object.__setattr__(self, "personal", personal_layers(self.personal))
        layers: Collection[object] = self.personal
        if not all(isinstance(each, str) and personal_layers(each) == (each,) for each in layers):
            raise InputError(
                f"the personal layers of a task must be names or patterns, not {self.personal!r}: write "
                'personal=["head"], for example.'
            )
        for name in ("module", "loss"):
            if not callable(getattr(self, name)):
                raise InputError(
                    f"the {name} of a task must be a {_KINDS[name]}, not {_kind(getattr(self, name))}."
                )
        if self.metrics is not None:
            metrics: Any = self.metrics
            if not isinstance(metrics, Mapping) or not all(isinstance(each, str) for each in metrics):
                raise InputError(
                    "the metrics of a task must be a dictionary of functions by name, such as "
                    f'{{"accuracy": offbeat.accuracy}}, not {_kind(self.metrics)}.'
                )
            for name, metric in self.metrics.items():
                if not (callable(metric) or hasattr(metric, "compute")):
                    raise InputError(f"the metric {name} of a task must be a function, not {_kind(metric)}.")
                if name in _RECORD_FIELDS:
                    raise InputError(f"a metric cannot be called {name}, a field of every record: rename it.")
        unknown = [
            name for name in self.lower_is_better if name != "loss" and name not in (self.metrics or {})
        ]
        if isinstance(self.lower_is_better, str) or unknown:
            raise InputError(
                f"lower_is_better must list names of the metrics, not {self.lower_is_better!r}: add the "
                "metric, or leave the name out."
            )
        if not self.name or not set(self.name) <= _NAME_CHARACTERS:
            raise InputError(
                f"a task cannot be called {self.name!r}: use letters, digits, hyphens and underscores."
            )
        if isinstance(self.data, Mapping) or (callable(self.data) and not isinstance(self.data, Source)):
            object.__setattr__(self, "data", client_data(self.data))
        if isinstance(self.partition, str):
            parse_partition(self.partition)
        if isinstance(self.delays, str):
            parse_delay(self.delays)

    @property
    def client_names(self) -> tuple[str, ...] | None:
        """The names of the clients, where the data are divided among clients."""
        return self.data.names if isinstance(self.data, ClientData) else None

    @property
    def scored_by(self) -> Mapping[str, Metric]:
        """The metrics, with the default."""
        if self.metrics is not None:
            return self.metrics
        return {"accuracy": accuracy} if self.loss is cross_entropies else {}

    @property
    def goals(self) -> dict[str, str]:
        """The metrics, the main one first: "max" if higher values are better, otherwise "min"."""
        goals = {
            name: "min"
            if name in self.lower_is_better or getattr(metric, "higher_is_better", None) is False
            else "max"
            for name, metric in self.scored_by.items()
        }
        return goals | {"loss": "min"}

    @property
    def default_buffer(self) -> int | None:
        """Updates per server step of a run with these clients, unless given or fixed by the method."""
        names = self.client_names
        return None if names is None else max(1, min(Experiment.buffer, len(names) // 2))

    def defaults(self, algorithm: str) -> dict[str, Any]:
        """The settings of a run that follow from the task, unless they are given."""
        values: dict[str, Any] = {"data": None, "model": None}
        names = self.client_names
        if names is not None:
            values |= {
                "clients": len(names),
                "partition": FROM_TASK,
                "concurrency": min(Experiment.concurrency, len(names)),
            }
            if find(algorithm).buffer is None:
                values["buffer"] = self.default_buffer
        elif self.partition is not None:
            values["partition"] = self.partition if isinstance(self.partition, str) else FROM_TASK
        if self.delays is not None:
            values["delays"] = self.delays if isinstance(self.delays, str) else FROM_TASK
        if self.personal:
            values["personal"] = ",".join(self.personal)
        return values

    def make_module(self, seed: int = 0) -> nn.Module:
        """The module; the weights of one that is made by a function follow from the seed."""
        if isinstance(self.module, nn.Module):
            return self.module
        return seeded_module(self.module, seed)

    def check_clients(self, clients: int) -> None:
        """Reject another number of clients than the task has."""
        names = self.client_names
        if names is not None and clients != len(names):
            raise InputError(
                f"the task has {len(names)} clients, not {clients}: leave out {setting_name('clients')}."
            )

    def parse_delays(self, text: str) -> Delay:
        """The delays of a run with this setting."""
        if text != FROM_TASK:
            return parse_delay(text)
        if self.delays is None or isinstance(self.delays, str):
            raise InputError("the task has no delays of its own: give them with the setting of that name.")
        return self.delays

    def population(self, experiment: Experiment, work: Steps | Epochs) -> Population:
        """The clients of a simulation with their data."""
        if isinstance(self.data, ClientData):
            return self.data.population(work)
        partition = self._parse_partition(experiment.partition)
        if isinstance(self.data, Source):
            examples: Examples | ExampleSource = self.data.train
            labels, groups = self.data.labels, self.data.groups
        else:
            examples = read_examples(self.data)
            labels, groups = labels_of(examples), None
        parts = partition.split(labels, experiment.clients, experiment.seed, groups)
        return Population(examples, parts, work)

    def client_weights(self, population: Population, measure: str) -> list[float]:
        """The number of each client's examples, or its effective number of classes."""
        clients = range(len(population))
        if measure == "examples":
            return [float(population.size(client)) for client in clients]
        labels = self.data.labels if isinstance(self.data, Source) else labels_of(population.data)
        weights = []
        for client in clients:
            counts = np.unique(labels[population.parts[client]], return_counts=True)[1]
            shares = counts / counts.sum()
            weights.append(float(np.exp(-(shares * np.log(shares)).sum())))
        return weights

    def personal_test_data(self, population: Population) -> ClientData | None:
        """Test data by client; a common test set is divided by label, as the training data are."""
        test = self.test_data()
        if test is None or isinstance(test, ClientData):
            return test
        if self.client_names is not None:
            raise InputError(
                "a model with personal layers is evaluated client by client: give test data by client, such "
                "as those of ClientData.split."
            )
        labels = self.data.labels if isinstance(self.data, Source) else labels_of(population.data)
        owned = [population.parts[client] for client in range(len(population))]
        parts = split_alike(labels, owned, labels_of(test))
        names = [str(client) for client in range(len(population))]
        return ClientData.from_function(lambda name: test.gather(parts[int(name)]), names=names)

    def site_examples(self, name: str) -> Examples:
        """The examples of one site of a deployment; nothing of other sites is read."""
        if not isinstance(self.data, ClientData):
            raise InputError(
                "the data of this task are not divided among sites: give offbeat.ClientData, a dictionary of "
                "sites, or a function from the name of a site to its data."
            )
        return self.data.examples(name)

    def site_test(self, name: str) -> Examples | None:
        """The test examples of one site, for its personal model; None if it has none."""
        try:
            test = self.test_data() if self.personal else None
        except InputError:  # a common test set, which the server alone may have
            return None
        if not isinstance(test, ClientData) or (test.names is not None and name not in test.names):
            return None
        return test.examples(name)

    def _parse_partition(self, text: str) -> Partition:
        if text != FROM_TASK:
            return parse_partition(text)
        if self.partition is None or isinstance(self.partition, str):
            raise InputError("the task has no partition of its own: give one with the setting of that name.")
        return self.partition

    def test_data(self) -> Examples | ExampleSource | ClientData | None:
        """The test data, by client if they are given so; None: nothing is evaluated."""
        if self.test is None:
            return self.data.test if isinstance(self.data, Source) else None
        value = self.test
        if callable(value):
            try:
                value = value()
            except Exception as error:
                raise InputError(f"the test data could not be loaded: {failure(error)}") from error
        if isinstance(value, ClientData | Mapping):
            return client_data(value)
        examples = read_examples(value)
        if not examples.total:
            raise InputError("the test data have no rows: give at least one example.")
        return examples

    def evaluate(
        self,
        problem: Problem,
        x: Vector,
        data: Examples | ExampleSource | ClientData,
        statistics: Statistics | None = None,
        personal: Callable[[int], Statistics] | None = None,
    ) -> tuple[dict[str, float], ClientMetrics | None]:
        """The loss and the metrics of a model, and those of each client if the test data are by client.

        `personal` gives the personal layers of a client by its number; clients that never trained, and
        clients that are in the test data only, have those of the module.
        """
        if not isinstance(data, ClientData):
            return evaluate(problem, x, data, self.scored_by, statistics=statistics), None
        falling = [name for name, goal in self.goals.items() if goal == "min"]
        known = self.client_names or data.names or ()
        numbers = {name: client for client, name in enumerate(known)}

        def layers(name: str) -> Statistics:
            return personal(numbers[name]) if personal and name in numbers else {}

        found = evaluate_clients(
            problem,
            x,
            data,
            self.scored_by,
            statistics=statistics,
            lower_is_better=falling,
            personal=layers,
        )
        return found.summary(), found


_KINDS = {"module": "torch.nn.Module or a function that makes one", "loss": "function"}
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_RECORD_FIELDS = SAMPLE_FIELDS | {"version", "time", "loss", "epsilon", "simulated_epsilon"}


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def named_task(
    experiment: Experiment, source: Source | None = None, module: nn.Module | None = None
) -> LearningTask:
    """The task of an experiment that names its data and model; `source` and `module` take their place."""
    if experiment.task is not None:
        return load_task(experiment.task, experiment.seed)
    assert experiment.data is not None
    source = source or load(experiment.data, Path(experiment.data_dir) if experiment.data_dir else None)
    if module is None:
        name = experiment.model or models.default_model(source.name)
        module = models.build(name, tuple(source.train.inputs.shape[1:]), source.classes, experiment.seed)
        models.check_inputs(name, source.train.inputs, source.classes)
        if experiment.augment == "crop-flip":
            if source.train.inputs.ndim != 4:
                raise InputError(
                    f"{setting_name('augment')} crop-flip needs images, which {source.name} does not have: "
                    f"leave {setting_name('augment')} out."
                )
            module = nn.Sequential(RandomCropFlip(source.train.inputs.amin((0, 2, 3))), module)
    return LearningTask(module=module, data=source, name=source.name)


def load_task(text: str, seed: int = 0, option: str | None = None) -> LearningTask:
    """The task that the function `package.module:function` returns; what it draws follows from the seed."""
    option = option or setting_name("task")
    function = import_function(text, option)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            task = function()
        except Exception as error:
            raise InputError(f"{option} '{text}' failed: {failure(error)}") from error
    if not isinstance(task, LearningTask):
        raise InputError(f"{option} '{text}' returned {_kind(task)}: return an offbeat.LearningTask.")
    return task


def import_function(text: str, option: str) -> Callable[..., Any]:
    """Import the function that `package.module:function` names; the current folder is searched as well."""
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute):
        raise InputError(f"{option} '{text}' does not name a function: write package.module:function.")
    module = import_module(name, option)
    try:
        found = getattr(module, attribute)
    except AttributeError:
        raise InputError(
            f"{option} '{text}' does not exist: the module '{name}' has no '{attribute}'; "
            "define it, or name another function."
        ) from None
    if not callable(found):
        kind = with_article(type(found).__name__)
        raise InputError(f"{option} '{text}' is {kind}, not a function: name a function.")
    function: Callable[..., Any] = found
    return function


def function_name(function: Callable[..., Any], option: str) -> str:
    """The name by which `import_function` finds a function, so that a run that uses it can be resumed."""
    home, attribute = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if getattr(sys.modules.get(home), attribute, None) is not function:
        raise InputError(
            f"{option} must be a function that can be imported by its name, so that the run can be resumed: "
            "define it at the top of a module."
        )
    return f"{home}:{attribute}"


def import_module(name: str, option: str) -> Any:
    """Import a module by name; the current folder is searched as well."""
    current = str(Path.cwd())
    if current not in sys.path:
        sys.path.insert(0, current)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(
                f"there is no module '{error.name}' for {option}: neither in {current} nor among the "
                "installed packages."
            ) from None
        raise InputError(
            f"the module '{name}' of {option} cannot be imported: {first_line(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(
            f"the module '{name}' of {option} cannot be imported: {first_line(error)}"
        ) from error


def make_module(make: MakeModule) -> nn.Module:
    """Make a model; any problem is raised as an `InputError`."""
    try:
        module = make()
    except Exception as error:
        raise InputError(f"the model could not be created: {first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"the model is a {type(module).__name__}: return a torch.nn.Module.")
    return module


def seeded_module(make: MakeModule, seed: int) -> nn.Module:
    """Make a module whose initial weights follow from a seed, unless it loads them from elsewhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_module(make)


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message, as a sentence."""
    return f"{error_summary(error)}."


def failure(error: Exception) -> str:
    """An error of the user's code in a sentence, with file and line; an `InputError` has its own sentence."""
    if isinstance(error, InputError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    others = "site-packages", str(Path(__file__).parents[1])
    own = [frame for frame in frames if not any(folder in frame.filename for folder in others)]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{error_summary(error)}{where}."
