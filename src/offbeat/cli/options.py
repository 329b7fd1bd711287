"""The words of the command line.

An option that was not given is absent, not a default: a resumed run then takes it from its folder.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn, TypeAlias

from offbeat.errors import InputError, unknown
from offbeat.experiment import Experiment

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Experiment)}

_Table: TypeAlias = dict[str, tuple[Callable[[str], Any], str, str]]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


_DATA: _Table = {
    "data": (str, "NAME", "digits, mnist, fashion-mnist, cifar10 or shakespeare"),
    "data_dir": (str, "DIR", "where the data lies; without it, it is downloaded once; digits needs none"),
    "model": (str, "NAME", "logistic, mlp, cnn or charformer"),
    "partition": (
        str,
        "LAW",
        "iid, dirichlet:ALPHA[:LEAST], quantity:ALPHA[:LEAST], shards[:N] or natural; "
        "LEAST defaults to 1; 0 may leave clients empty, which a run refuses",
    ),
}
_TIME: _Table = {
    "clients": (_whole, "N", "how many clients there are"),
    "dispatch": (str, "NAME", "synchronous, asynchronous, rounds, poisson, phases or queues"),
    "hand_out": (str, "WHEN", "before or after the server step: when the client that fills it is replaced"),
    "buffer": (_whole, "S", "updates per server step"),
    "concurrency": (_whole, "N", "clients at work at the same time"),
    "delays": (
        str,
        "LAW",
        "constant:S, uniform:A:B, half-normal:S, exponential:S, log-normal:M:S, "
        "tiers:KIND[:GAMMA] or recorded:FILE; KIND is mild or large, a GAMMA below 1 makes more clients slow",
    ),
    "availability": (str, "LAW", "always or cycle:PERIOD:SHARE"),
    "dropout": (_number, "P", "probability that a task is lost"),
    "limit": (_whole, "N", "drop updates staler than this"),
    "rounds": (_whole, "T", "server steps"),
    "seed": (_whole, "N", "fixes everything"),
}
_WORK: _Table = {
    "weights": (str, "LAW", "of stale updates: constant, polynomial:A or hinge:A:B"),
    "local_steps": (_whole, "K", "minibatches per task"),
    "local_epochs": (_whole, "E", "whole passes per task instead of a number of minibatches"),
    "batch_size": (_whole, "N", "examples per minibatch"),
    "weight_decay": (_number, "W", "added to the loss as W/2 |x|^2"),
    "average": (_number, "DECAY", "evaluate the exponential average of the models, such as 0.99"),
    "every": (_whole, "N", "evaluate every N server steps"),
    "engine": (str, "NAME", "auto, sequential or vectorised"),
    "device": (str, "NAME", "cpu or cuda"),
    "memory": (str, "PLACE", "of what clients keep: ram, device, mapped (a file), or auto, by size"),
}

# What stands in for a default of its own.
_METHODS_OWN = {
    "model": "by data",
    "dispatch": "the method's own",
    "buffer": "10, or the method's own",
    "weights": "the method's own",
    "every": "20 times",
}


class Parser(argparse.ArgumentParser):
    """One sentence for what is wrong, and no guessing at shortened options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ').rstrip('.')}; see '{self.prog} --help'.")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """A command and its options; one that sets up an experiment and was not given is absent."""
    main, commands = _parsers()
    if not words:
        raise InputError(f"name a command, one of {', '.join(commands)}; see 'offbeat --help'.")
    name, *others = words
    if name in ("-h", "--help", "--version"):
        main.parse_args([name])
    if name not in commands:
        raise unknown("command", name, commands)
    given, rest = commands[name].parse_known_intermixed_args(others)
    for word in rest:
        if word.startswith("-"):
            raise unknown("option", word.partition("=")[0], commands[name]._option_string_actions)
    if rest:
        raise InputError(f"there is no place for '{rest[0]}'; see 'offbeat {name} --help'.")
    given.command = name
    return given


def parser() -> Parser:
    """All commands."""
    return _parsers()[0]


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    main = Parser(
        prog="offbeat", description="Asynchronous federated learning that needs no step-size tuning."
    )
    main.add_argument("--version", action="version", version=f"offbeat {version('offbeat')}")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    run = commands.add_parser("run", help="train one method", argument_default=argparse.SUPPRESS)
    run.add_argument("algorithm", nargs="?", metavar="ALGORITHM", help="see 'offbeat algorithms' [adamasfl]")
    _add_experiment(run)
    run.add_argument("--resume", action="store_true", default=False, help="go on with the run in --out")
    run.add_argument(
        "--save-every",
        type=_whole,
        default=None,
        metavar="N",
        help="checkpoint every N server steps; default: by time",
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
    compare.add_argument(
        "--target",
        type=_number,
        default=None,
        metavar="ACCURACY",
        help="accuracy to reach; default: 95 %% of the best",
    )

    schedule = commands.add_parser(
        "schedule", help="simulate time alone, without training", argument_default=argparse.SUPPRESS
    )
    _add(schedule, _TIME, {})
    _add_json(schedule)

    algorithms = commands.add_parser("algorithms", help="list the methods, or show one")
    algorithms.add_argument("name", nargs="?", metavar="NAME")
    _add_json(algorithms)
    return main, {"run": run, "compare": compare, "schedule": schedule, "algorithms": algorithms}


def _add_experiment(command: argparse.ArgumentParser) -> None:
    for table in (_DATA, _TIME, _WORK):
        _add(command, table, _METHODS_OWN)
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a hyperparameter; may be repeated; METHOD.NAME for one of several",
    )
    command.add_argument(
        "--out", default=None, metavar="DIR", help="where to write; default: the next free folder in runs/"
    )
    _add_json(command)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", action="store_true", default=False, help="the last line of the output is one JSON object"
    )


def _add(command: argparse.ArgumentParser, table: _Table, own: Mapping[str, str]) -> None:
    for name, (kind, word, text) in table.items():
        default = own.get(name, _DEFAULTS[name])
        shown = text if default is None else f"{text} [{default}]"
        command.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar=word, help=shown.replace("%", "%%")
        )
