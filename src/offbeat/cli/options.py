"""Numbers and places as the command line has them.

How what was given on the command line becomes settings of an experiment.
"""

import argparse
import dataclasses
import inspect
import logging
import math
import types
import typing
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from offbeat.algorithms import Method, find
from offbeat.errors import InputError, unknown_name
from offbeat.training.experiment import Experiment

_MAX_DIGITS = 18  # that a count may have


def folder_name(text: str) -> str:
    """Of a folder; an empty one would be the folder of now, which nobody means."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a folder, or leave it out")
    return text


def whole_number(text: str) -> int:
    """Digits."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def number(text: str) -> float:
    """Any."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def large_count(text: str) -> int:
    """A whole number that may be written as 1e7."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if not value.is_finite() or value.adjusted() > _MAX_DIGITS or value != value.to_integral_value():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, or far too large")
    return int(value)


_EXPERIMENT_FIELDS = {field.name for field in dataclasses.fields(Experiment)}
_DISPATCH_WITHOUT_CONCURRENCY = ("synchronous", "phases")


def experiment_options(given: argparse.Namespace) -> dict[str, Any]:
    """Those of the options given that are fields of an experiment; files by their full path."""
    options = {name: value for name, value in vars(given).items() if name in _EXPERIMENT_FIELDS}
    if "local_steps" in options and "local_epochs" in options:
        raise InputError("--local-steps and --local-epochs exclude each other: give one of them.")
    if "data_dir" in options:
        options["data_dir"] = str(Path(options["data_dir"]).absolute())
    if "clip" in options:
        options["clip"] = ",".join(options["clip"])
    law, _, path = options.get("delays", "").partition(":")
    if law == "recorded" and path:
        options["delays"] = f"{law}:{Path(path).absolute()}"
    return options


def warn_of_unused_concurrency(given: argparse.Namespace, experiments: Iterable[Experiment]) -> None:
    """Say of a concurrency that was given that nobody asks for it."""
    rules = {experiment.dispatch for experiment in experiments}
    if hasattr(given, "concurrency") and rules <= set(_DISPATCH_WITHOUT_CONCURRENCY):
        logging.getLogger("offbeat").warning(
            "--concurrency is ignored: with %s dispatch as many clients are at work as --buffer takes.",
            " or ".join(sorted(rules)),
        )


def warn_of_exhausted_clients(experiment: Experiment) -> None:
    """Say of bounded contributions that they cannot last for all server steps."""
    if experiment.most is None:
        return
    steps = experiment.clients * experiment.most // experiment.buffer
    if steps < experiment.rounds:
        logging.getLogger("offbeat").warning(
            "%d clients that contribute %d times at most last for %d of the %d server steps: "
            "raise --most or --clients, or lower --rounds.",
            *(experiment.clients, experiment.most, steps, experiment.rounds),
        )


def parse_parameters(
    algorithm: str, settings: Sequence[str], among: Collection[str] = ()
) -> tuple[tuple[str, Any], ...]:
    """`name=value` texts as typed hyperparameters of one method; `other.name=value` is for another."""
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


def _convert_parameter(entry: Method, algorithm: str, name: str, value: str, among: Collection[str]) -> Any:
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
    """float, int, bool or str, also where None is allowed."""
    annotation = parameter.annotation
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    kind: type = annotation
    return kind
