"""Options of the command line: how settings become options, and options an experiment."""

import argparse
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args

from offbeat.errors import InputError, unknown_name
from offbeat.training.experiment import Experiment
from offbeat.training.schema import NamedSetting, settings_of

if TYPE_CHECKING:
    from offbeat.algorithms import Method

_MAX_DIGITS = 18  # of a count
_DISPATCH_WITHOUT_CONCURRENCY = ("synchronous", "phases", "allocation", "timed-poisson")


def folder_name(text: str) -> str:
    """The name of a folder; rejects an empty path, which would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a folder, or leave it out")
    return text


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def whole_number(text: str) -> int:
    """An integer, which may be written as 1e7."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if value.is_finite() and value.adjusted() > _MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"'{text}' is too large")
    if not value.is_finite() or value != value.to_integral_value():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number")
    return int(value)


_CONVERTERS: dict[type, Callable[[str], Any]] = {str: str, int: whole_number, float: number}


def option_name(name: str) -> str:
    """A setting as the command line spells it, for error messages."""
    if name == "algorithm":
        return "the method"
    if name == "parameters":
        return "--set"
    if name.startswith("parameters."):
        return f"--set {name.removeprefix('parameters.')}"
    return f"--{name.replace('_', '-')}"


def add_settings(
    command: argparse._ActionsContainer,
    group: str,
    cls: type = Experiment,
    *,
    methods_own: bool = True,
    only: Collection[str] = (),
) -> None:
    """Add an option for each setting of a group, or for some of them.

    An option that is not given is absent from the result, so that a resumed run takes it from its folder.
    `methods_own` describes the defaults that depend on the method as such.
    """
    for each in settings_of(cls).values():
        if each.info.group == group and (not only or each.name in only):
            _add_setting(command, each, methods_own)


def _add_setting(command: argparse._ActionsContainer, each: NamedSetting, methods_own: bool) -> None:
    name, text = option_name(each.name), each.help.replace("%", "%%")
    if each.type is bool:
        command.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    default = (methods_own and each.info.default_text) or each.default
    command.add_argument(
        name,
        type=_CONVERTERS[each.type],
        default=argparse.SUPPRESS,
        metavar=each.info.metavar,
        help=text if default is None else f"{text} [{default}]",
    )


def add_experiment(command: argparse.ArgumentParser) -> None:
    """Add the options that set up an experiment, and where it is written."""
    for group in ("data", "schedule", "training"):
        add_settings(command, group)
    privacy = command.add_argument_group(
        "privacy", "all but --secure need --clip, unless the method bounds all its uploads"
    )
    clip = settings_of(Experiment)["clip"]
    privacy.add_argument(
        "--clip", action="append", default=argparse.SUPPRESS, metavar=clip.info.metavar, help=clip.help
    )
    add_settings(privacy, "privacy")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a hyperparameter; may be repeated; METHOD.NAME for one of several methods",
    )
    command.add_argument(
        "--out", type=folder_name, metavar="DIR", help="where to write [the next free folder in runs/]"
    )


def add_run_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat run`."""
    command.add_argument(
        "algorithm",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="ALGORITHM",
        help=f"see 'offbeat algorithms' [{Experiment.algorithm}]",
    )
    add_experiment(command)
    command.add_argument(
        "--resume",
        action="store_true",
        help="resume the run in --out; a larger --rounds extends it, if no rate depends on that",
    )
    command.add_argument(
        "--save-every",
        type=whole_number,
        metavar="N",
        help="checkpoint every N server steps [from time to time]",
    )
    trackers = command.add_argument_group(
        "trackers", "also send the records there; a resumed run continues there"
    )
    trackers.add_argument("--tensorboard", metavar="DIR", help="event files, in a folder of DIR")
    trackers.add_argument("--wandb", metavar="PROJECT", help="Weights & Biases")
    trackers.add_argument("--mlflow", metavar="URI", help="MLflow: a server, or sqlite:///FILE")


def add_compare_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat compare`."""
    command.add_argument(
        "algorithms", nargs="+", metavar="ALGORITHM", help="two or more; see 'offbeat algorithms'"
    )
    add_experiment(command)
    command.add_argument(
        "--target",
        type=number,
        metavar="VALUE",
        help="value of the metric to reach [within 5 %% of the best]",
    )


def add_tune_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat tune`."""
    command.add_argument(
        "algorithm", nargs="?", default=argparse.SUPPRESS, metavar="ALGORITHM", help="the method to tune"
    )
    study = command.add_argument_group("study")
    study.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="NAME=LOW:HIGH",
        help="search a hyperparameter in a range, on a logarithmic scale, or among values as in "
        "NAME=0.1,0.3,1; may be repeated [the method's learning rates, around their defaults]",
    )
    study.add_argument(
        "--trials", type=whole_number, metavar="N", help="trials of the whole study [20, or the whole grid]"
    )
    study.add_argument(
        "--jobs", type=whole_number, default=1, metavar="N", help="trials at a time, each in a process [1]"
    )
    for name, default, text in (
        ("--sampler", "tpe", "tpe learns from earlier trials; random; or grid, all values in order"),
        ("--pruner", "median", "stop trials early: median, halving (successive halving) or none"),
        ("--baseline", Experiment.algorithm, "a method to compare with, run once without tuning, or none"),
    ):
        study.add_argument(name, default=argparse.SUPPRESS, metavar="NAME", help=f"{text} [{default}]")
    study.add_argument("--resume", action="store_true", help="resume the study in --out")
    add_experiment(command)


def experiment_options(given: argparse.Namespace) -> dict[str, Any]:
    """The given options that are settings of an experiment, with absolute paths."""
    options = {name: value for name, value in vars(given).items() if name in settings_of(Experiment)}
    if "local_steps" in options and "local_epochs" in options:
        raise InputError("--local-steps and --local-epochs exclude each other: give one of them.")
    if "data_dir" in options:
        options["data_dir"] = str(Path(options["data_dir"]).absolute())
    if "clip" in options:
        options["clip"] = ",".join(options["clip"])
    kind, _, path = options.get("delays", "").partition(":")
    if kind in ("recorded", "devices") and path:
        options["delays"] = f"{kind}:{Path(path).absolute()}"
    kind, _, path = options.get("availability", "").partition(":")
    if kind == "recorded" and path:
        options["availability"] = f"{kind}:{Path(path).absolute()}"
    return options


def warn_of_unused_concurrency(given: argparse.Namespace, experiments: Iterable[Experiment]) -> None:
    """Warn if a concurrency was given and no method uses it."""
    rules = {experiment.dispatch for experiment in experiments}
    if hasattr(given, "concurrency") and rules <= set(_DISPATCH_WITHOUT_CONCURRENCY):
        logging.getLogger("offbeat").warning(
            "--concurrency is ignored: with %s dispatch as many clients are at work as --buffer takes.",
            " or ".join(sorted(rules)),
        )


def parse_parameters(
    algorithm: str, settings: Sequence[str], among: Collection[str] = ()
) -> tuple[tuple[str, Any], ...]:
    """`name=value` texts as typed hyperparameters of one method; `other.name=value` is for another."""
    from offbeat.algorithms import find

    entry = find(algorithm)
    values: dict[tuple[str, str], Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set takes NAME=VALUE, not '{text}'.")
        method, _, own = name.rpartition(".")
        if method and method not in (algorithm, *among):
            raise unknown_name("method in --set", method, {algorithm, *among})
        if method in ("", algorithm):
            if (method, own) in values:
                raise InputError(f"--set gives {name} twice: leave one out.")
            values[method, own] = _convert_parameter(entry, algorithm, own, value, among)
    special_last = sorted(values.items(), key=lambda item: item[0])
    return tuple(sorted({own: value for (_, own), value in special_last}.items()))


def _convert_parameter(entry: "Method", algorithm: str, name: str, value: str, among: Collection[str]) -> Any:
    from offbeat.algorithms import find

    if name not in entry.parameters():
        if any(name in find(other).parameters() for other in among):
            raise InputError(
                f"{algorithm} has no parameter {name}: write METHOD.{name}=VALUE for one that has."
            )
        raise unknown_name(f"parameter of {algorithm}", name, entry.parameters())
    kind = _parameter_type(entry.parameters()[name])
    if kind is str:
        return value
    try:
        converted = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        if not math.isfinite(converted):
            raise ValueError
        return converted
    except (ValueError, KeyError):
        word = {float: "a finite number", int: "a whole number", bool: "true or false"}[kind]
        raise InputError(f"the parameter {name} of {algorithm} must be {word}, not '{value}'.") from None


def _parameter_type(parameter: inspect.Parameter) -> type:
    """float, int, bool or str, also if None is allowed."""
    annotation: Any = parameter.annotation
    if isinstance(annotation, UnionType):
        annotation = next(each for each in get_args(annotation) if each is not NoneType)
    kind: type = annotation
    return kind
