"""What a tuning study tries: the ranges of the search, and the plan of a new or a resumed study."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.algorithms import Setting, build, find
from offbeat.algorithms.registry import search_range
from offbeat.errors import InputError, setting_name, unknown_name
from offbeat.files import replace_file, with_checksum, without_checksum
from offbeat.training.experiment import Experiment
from offbeat.training.folder import STUDY_FILE

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "halving", "none")
_FORMAT = 1


@dataclass(frozen=True)
class SearchRange:
    """The values to try for one hyperparameter: an interval, or a list of values."""

    name: str
    low: float = 0.0
    high: float = 0.0
    values: tuple[Any, ...] = ()
    whole: bool = False

    @property
    def log(self) -> bool:
        """Whether it is searched on a logarithmic scale."""
        return not self.values and self.low > 0

    def __str__(self) -> str:
        if self.values:
            return f"{self.name}={','.join(map(str, self.values))}"
        return f"{self.name}={self.low:g}:{self.high:g}"

    def distribution(self) -> "optuna.distributions.BaseDistribution":
        """The range as a distribution of Optuna."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.values:
            return CategoricalDistribution(self.values)
        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)


def search_space(
    algorithm: str, given: Sequence[SearchRange], parameters: Mapping[str, Any]
) -> tuple[SearchRange, ...]:
    """The given ranges, checked; by default those of the method's learning rates that are not fixed."""
    space = tuple(given)
    if not space:
        known = {name: each.default for name, each in find(algorithm).parameters().items()}
        ranges = {name: search_range(name, known[name]) for name in known if name not in parameters}
        space = tuple(SearchRange(name, *ends) for name, ends in ranges.items() if ends is not None)
    if not space:
        raise InputError(
            f"there is nothing to search: {algorithm} has no learning rate left to tune; name parameters "
            f"with {setting_name('search')}, or tune another method."
        )
    names = [each.name for each in space]
    for each in space:
        if names.count(each.name) > 1:
            raise InputError(f"{each.name} is searched twice: give one range for it.")
        if each.name in parameters:
            raise InputError(f"{each.name} is both set and searched: leave out one of the two.")
        if not each.values and not (math.isfinite(each.low) and each.low < each.high < math.inf):
            raise InputError(
                f"the range of {each.name} from {each.low:g} to {each.high:g} is empty: give a lower and a "
                "higher finite number."
            )
        for value in each.values or (each.low, each.high):
            value = int(value) if each.whole else value
            build(algorithm, Setting(10, 10, 100), dict(parameters) | {each.name: value})
    return space


@dataclass(frozen=True)
class StudyPlan:
    """Everything that determines which hyperparameters a study tries."""

    experiment: Experiment  # the settings of every trial, apart from the parameters that are searched
    space: tuple[SearchRange, ...]
    sampler: str = "tpe"
    pruner: str = "median"
    baseline: str | None = Experiment.algorithm  # a method to compare with, which is not tuned
    trials: int = 20  # unless another number is given

    def __post_init__(self) -> None:
        for kind, name, known in (("sampler", self.sampler, SAMPLERS), ("pruner", self.pruner, PRUNERS)):
            if name not in known:
                raise unknown_name(kind, name, known)
        if self.sampler == "grid":
            for each in self.space:
                if not each.values:
                    raise InputError(
                        f"a grid needs the values of {each.name}, not a range: give them as in "
                        f"{each.name}=0.01,0.1,1."
                    )

    @property
    def grid(self) -> list[dict[str, Any]]:
        """The combinations of a grid, in order."""
        names = [each.name for each in self.space]
        return [
            dict(zip(names, values, strict=True))
            for values in itertools.product(*(each.values for each in self.space))
        ]

    def of_trial(self, parameters: Mapping[str, Any]) -> Experiment:
        """The experiment of one trial."""
        return replace(
            self.experiment,
            parameters=tuple(sorted((dict(self.experiment.parameters) | dict(parameters)).items())),
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as values that JSON gives back unchanged."""
        values = {
            "experiment": self.experiment.settings(),
            "search": [
                [each.name, each.low, each.high, list(each.values), each.whole] for each in self.space
            ],
            "sampler": self.sampler,
            "pruner": self.pruner,
            "baseline": self.baseline,
            "trials": self.trials,
            "format": _FORMAT,
        }
        found: dict[str, Any] = json.loads(json.dumps(values))
        return found

    def write(self, folder: Path) -> None:
        """Write the plan of a new study to its folder."""
        text = json.dumps(with_checksum(self.as_dict()), indent=1)
        replace_file(folder / STUDY_FILE, f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> "StudyPlan":
        """The plan of the study in a folder."""
        path = folder / STUDY_FILE
        try:
            found = without_checksum(json.loads(path.read_bytes()))
            space = [
                SearchRange(name, low, high, tuple(values), whole)
                for name, low, high, values, whole in found["search"]
            ]
            experiment = Experiment.from_settings(found["experiment"])
            names = ("sampler", "pruner", "baseline", "trials")
            return cls(experiment, tuple(space), **{name: found[name] for name in names})
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"{folder} contains no study to resume: leave out {setting_name('resume')} to start one."
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is damaged or was edited: restore it from a backup.") from None


def new_plan(
    settings: Mapping[str, Any],
    parameters: Mapping[str, Any],
    ranges: Sequence[SearchRange],
    options: Mapping[str, Any],
    trials: int | None,
) -> StudyPlan:
    """The plan of a new study; `options` are the sampler, pruner and baseline that were given."""
    experiment = Experiment.of(**{**settings, "parameters": tuple(sorted(parameters.items()))})
    space = search_space(experiment.algorithm, ranges, parameters)
    plan = StudyPlan(experiment, space, **_plan_options(options))
    if plan.baseline is not None:
        find(plan.baseline)
    default = len(plan.grid) if plan.sampler == "grid" else plan.trials
    return replace(plan, trials=default if trials is None else trials)


def resumed_plan(
    out: Path,
    settings: Mapping[str, Any],
    parameters: Mapping[str, Any] | None,
    ranges: Sequence[SearchRange] | None,
    options: Mapping[str, Any],
) -> StudyPlan:
    """The plan of the study in a folder; settings that are given as well must be those of the study."""
    known = StudyPlan.read(out)
    own = known.experiment
    algorithm = settings.get("algorithm", own.algorithm)
    if algorithm != own.algorithm:
        raise InputError(
            f"the study in {out} is of {own.algorithm}, not of {algorithm}: name another "
            f"{setting_name('out')}."
        )
    fixed = dict(own.parameters) if parameters is None else dict(parameters)
    values = own.settings() | dict(settings) | {"parameters": tuple(sorted(fixed.items()))}
    space = known.space if ranges is None else search_space(algorithm, ranges, fixed)
    rest = {"sampler": known.sampler, "pruner": known.pruner, "baseline": known.baseline}
    _check_same(out, known, StudyPlan(Experiment.of(**values), space, **rest | _plan_options(options)))
    return known


def _plan_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as fields of a plan, where the baseline `none` is None."""
    return {name: None if (name, value) == ("baseline", "none") else value for name, value in options.items()}


def _check_same(folder: Path, known: StudyPlan, given: StudyPlan) -> None:
    """Reject settings that differ from those of a study that is resumed."""
    before, now = known.as_dict(), given.as_dict()
    before |= before.pop("experiment")
    now |= now.pop("experiment")
    for name in before.keys() - {"trials"}:
        was, asked = before[name], now[name]
        if was == asked:
            continue
        if name == "search":
            was, asked = (" ".join(map(str, plan.space)) for plan in (known, given))
        elif name == "parameters":
            was, asked = (
                ", ".join(f"{each}={value}" for each, value in values.items()) or "none"
                for values in (was, asked)
            )
        raise InputError(
            f"the study in {folder} was started with another {setting_name(name)} ({was}, not {asked}): "
            f"leave it out to resume the study, or name another {setting_name('out')}."
        )
