"""The words of the command line, and how they become an experiment.

An option that was not given is absent, not a default: a resumed run then takes it from its folder.
"""

import argparse
import dataclasses
import inspect
import types
import typing
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn, TypeAlias

from offbeat.algorithms import Entry, find
from offbeat.errors import InputError, unknown
from offbeat.experiment import Experiment

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Experiment)}

_Table: TypeAlias = dict[str, tuple[type, str, str]]

_DATA: _Table = {
    "data": (str, "NAME", "digits, mnist, fashion-mnist, cifar10 or shakespeare"),
    "data_dir": (str, "DIR", "where the data lies; without it, it is downloaded once"),
    "model": (str, "NAME", "logistic, mlp, cnn or charformer; default: by data"),
    "partition": (str, "LAW", "iid, dirichlet:ALPHA[:LEAST], shards:N, quantity:ALPHA or natural"),
}
_TIME: _Table = {
    "clients": (int, "N", "how many clients there are"),
    "dispatch": (str, "NAME", "synchronous, asynchronous, rounds or poisson; default: the method's own"),
    "hand_out": (
        str,
        "WHEN",
        "whether the replacement of the update that fills a buffer starts before or after it",
    ),
    "buffer": (int, "S", "updates per server step; default: 10, or the method's own"),
    "concurrency": (int, "N", "clients at work at the same time"),
    "delays": (
        str,
        "LAW",
        "constant:S, uniform:A:B, half-normal:S, exponential:S, log-normal:M:S, "
        "tiers:mild, tiers:large or recorded:FILE",
    ),
    "availability": (str, "LAW", "always or cycle:PERIOD:SHARE"),
    "dropout": (float, "P", "probability that a task is lost"),
    "limit": (int, "N", "drop updates staler than this"),
    "rounds": (int, "T", "server steps"),
    "seed": (int, "N", "fixes everything"),
}
_WORK: _Table = {
    "weights": (
        str,
        "LAW",
        "of stale updates: constant, polynomial:A or hinge:A:B; default: the method's own",
    ),
    "local_steps": (int, "K", "minibatches per task"),
    "local_epochs": (int, "E", "whole passes per task instead of a number of minibatches"),
    "batch_size": (int, "N", "examples per minibatch"),
    "weight_decay": (float, "W", "added to the loss as W/2 |x|^2"),
    "average": (float, "DECAY", "evaluate the exponential average of the models, such as 0.99"),
    "every": (int, "N", "evaluate every N server steps; default: 20 times"),
    "engine": (str, "NAME", "auto, sequential or vectorised"),
    "device": (str, "NAME", "cpu or cuda"),
}


class Parser(argparse.ArgumentParser):
    """One sentence for what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.rstrip('.')}; see '{self.prog} --help'.")


def parser() -> Parser:
    """All commands."""
    main = Parser("offbeat", description="Asynchronous federated learning that needs no step-size tuning.")
    main.add_argument("--version", action="version", version=f"offbeat {version('offbeat')}")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    run = commands.add_parser("run", help="train one method", argument_default=argparse.SUPPRESS)
    run.add_argument("algorithm", nargs="?", metavar="ALGORITHM", help="see 'offbeat algorithms' [adamasfl]")
    _add_experiment(run)
    run.add_argument("--resume", action="store_true", help="go on with the run in --out")
    run.add_argument(
        "--save-every", type=int, metavar="N", help="checkpoint every N server steps; default: by time"
    )

    compare = commands.add_parser(
        "compare",
        help="train several on the same clients, delays and batches",
        argument_default=argparse.SUPPRESS,
    )
    compare.add_argument(
        "algorithms", nargs="+", metavar="ALGORITHM", help="two or more; see 'offbeat algorithms'"
    )
    _add_experiment(compare)
    compare.add_argument("--target", type=float, help="accuracy to reach; default: 95 %% of the best")

    schedule = commands.add_parser(
        "schedule", help="simulate time alone, without training", argument_default=argparse.SUPPRESS
    )
    _add(schedule, _TIME)
    schedule.add_argument("--json", action="store_true", help="print one JSON object")

    algorithms = commands.add_parser("algorithms", help="list the methods, or show one")
    algorithms.add_argument("name", nargs="?", metavar="NAME")
    algorithms.add_argument("--json", action="store_true", help="print one JSON object")
    return main


def _add_experiment(command: argparse.ArgumentParser) -> None:
    for table in (_DATA, _TIME, _WORK):
        _add(command, table)
    command.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        help="a hyperparameter; may be repeated; METHOD.NAME for one of several",
    )
    command.add_argument(
        "--out", metavar="DIR", help="where to write; default: the next free folder in runs/"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _add(command: argparse.ArgumentParser, table: _Table) -> None:
    for name, (kind, word, text) in table.items():
        default = _DEFAULTS[name]
        shown = text if default is None or "default:" in text else f"{text} [{default}]"
        command.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar=word, help=shown.replace("%", "%%")
        )


def experiment_options(given: argparse.Namespace) -> dict[str, Any]:
    """Those of the options given that are fields of an experiment."""
    return {name: value for name, value in vars(given).items() if name in _DEFAULTS}


def parameters(algorithm: str, settings: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """`name=value` texts as typed hyperparameters of one method; `other.name=value` is for another."""
    entry = find(algorithm)
    values: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set takes NAME=VALUE, not '{text}'.")
        method, dot, own = name.rpartition(".")
        if dot and find(method) is not entry:
            continue
        values[own] = _convert(entry, algorithm, own, value)
    return tuple(sorted(values.items()))


def _convert(entry: Entry, algorithm: str, name: str, value: str) -> Any:
    if name not in entry.parameters():
        raise unknown(f"parameter of {algorithm}", name, entry.parameters())
    kind = _kind(entry.parameters()[name])
    try:
        return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    except (ValueError, KeyError):
        word = {float: "a number", int: "a whole number", bool: "true or false"}[kind]
        raise InputError(f"the parameter {name} of {algorithm} must be {word}, not '{value}'.") from None


def _kind(parameter: inspect.Parameter) -> type:
    """float, int or bool, also where None is allowed."""
    annotation = parameter.annotation
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    kind: type = annotation
    return kind
