"""The words of the command line.

An option that was not given is absent, not a default: a resumed run then takes it from its folder.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn, TypeAlias

from offbeat.aggregate.terms import amplification_refused
from offbeat.cli import helper, join, keys, new, privacy, replay, report, reproduce, serve
from offbeat.cli.numbers import number, place, whole
from offbeat.cli.tracking import add_tracking
from offbeat.errors import InputError, unknown
from offbeat.experiment import Experiment

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Experiment)}

_Table: TypeAlias = dict[str, tuple[Callable[[str], Any], str, str]]


_DATA: _Table = {
    "data": (str, "NAME", "digits, mnist, fashion-mnist, cifar10, shakespeare, mrpc, rte or sst2"),
    "data_dir": (
        str,
        "DIR",
        "where the data lies; without it, all but GLUE is downloaded; digits needs none",
    ),
    "model": (str, "NAME", "logistic, mlp, cnn, resnet18, charformer, bert-tiny or bert-base"),
    "partition": (
        str,
        "LAW",
        "iid, dirichlet:ALPHA[:LEAST], quantity:ALPHA[:LEAST], shards[:N] or natural; "
        "LEAST defaults to 1; 0 may leave clients empty, which a run refuses",
    ),
}
_TIME: _Table = {
    "clients": (whole, "N", "how many clients there are"),
    "dispatch": (str, "NAME", "synchronous, asynchronous, rounds, poisson, phases or queues"),
    "hand_out": (str, "WHEN", "before or after the server step: when the client that fills it is replaced"),
    "buffer": (whole, "S", "updates per server step"),
    "concurrency": (whole, "N", "clients at work at the same time"),
    "delays": (
        str,
        "LAW",
        "constant:S, uniform:A:B, half-normal:S, exponential:S, log-normal:M:S, "
        "tiers:KIND[:GAMMA] or recorded:FILE; KIND is mild or large, a GAMMA below 1 makes more clients slow",
    ),
    "availability": (str, "LAW", "always or cycle:PERIOD:SHARE"),
    "dropout": (number, "P", "probability that a task is lost"),
    "limit": (whole, "N", "drop updates staler than this"),
    "rounds": (whole, "T", "server steps"),
    "seed": (whole, "N", "fixes everything"),
}
_WORK: _Table = {
    "weights": (str, "LAW", "of stale updates: constant, polynomial:A or hinge:A:B"),
    "local_steps": (whole, "K", "minibatches per task"),
    "local_epochs": (whole, "E", "whole passes per task instead of a number of minibatches"),
    "batch_size": (whole, "N", "examples per minibatch"),
    "weight_decay": (number, "W", "added to the loss as W/2 |x|^2"),
    "average": (number, "DECAY", "evaluate the exponential average of the models, such as 0.99"),
    "every": (whole, "N", "evaluate every N server steps"),
    "engine": (str, "NAME", "auto, sequential, vectorised, workers (processes here) or ray (a cluster)"),
    "device": (str, "NAME", "cpu or cuda"),
    "how": (str, "NAME", "on a GPU: auto (by a trial), mapped, columns, eager, streamed or compiled"),
    "precision": (str, "NAME", "of a GPU's products: torch (as it is set), float32, tf32 or bfloat16"),
    "workers": (whole, "N", "of the engines workers and ray; default: one for each core"),
    "ray_address": (str, "HOST:PORT", "a Ray cluster that runs already, or auto to find it"),
    "memory": (str, "PLACE", "of what clients keep: ram, device, mapped (a file), or auto, by size"),
}

_PRIVACY: _Table = {
    "noise": (number, "SIGMA", "multiplier of the noise on sums; default: computed from --epsilon"),
    "epsilon": (number, "E", "budget: training ends before it would be exceeded"),
    "delta": (number, "D", "probability beside epsilon, such as 1e-6"),
    "most": (whole, "N", "contributions of a client at most; needed for a guarantee"),
    "apart": (whole, "N", "server steps between two of them at least; default: 1, or as the noise needs it"),
    "noise_shape": (str, "SHAPE", "over server steps: independent, tree or banded:B"),
    "accountant": (str, "NAME", "pld or rdp"),
    "adaptive_clip": (number, "QUANTILE", "let the bounds follow this quantile of the clients' norms"),
    "nominal_cohort": (whole, "N", "simulations only: noise as small as if a buffer were of this size"),
    "noise_seed": (whole, "N", "simulations only: noise that anybody can repeat"),
}

# What stands in for a default of its own.
_METHODS_OWN = {
    "model": "by data",
    "dispatch": "the method's own",
    "buffer": "10, or the method's own",
    "weights": "the method's own",
    "every": "20 times",
}

# Commands whose modules say what their words are.
_WITH_THEIR_OWN_WORDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "replay": (replay.add_options, "compute a run again from its trace"),
    "report": (report.add_options, "show runs as one page, with figures"),
    "reproduce": (reproduce.add_options, "run a paper's table or figure again, claimed beside measured"),
    "privacy": (privacy.add_options, "noise for an epsilon, or epsilon of a noise or of a run"),
    "new": (new.add_options, "write a small app, to be deployed"),
    "serve": (serve.add_options, "run a deployment: the server's side"),
    "join": (join.add_options, "run a deployment: a site's side"),
    "keys": (keys.add_options, "make certificates and keys for a deployment"),
    "helper": (helper.add_options, "serve as the second server of secure sums"),
}


class _Amplified(argparse.Action):
    """An option of before, whose claim does not hold."""

    def __call__(self, *given: object, **others: object) -> NoReturn:
        raise amplification_refused("--most", "--simulate-amplification")


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
    run.add_argument(
        "algorithm",
        nargs="?",
        metavar="ALGORITHM",
        help=f"see 'offbeat algorithms' [{_DEFAULTS['algorithm']}]",
    )
    _add_experiment(run)
    run.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="go on with the run in --out, also past its end with a larger --rounds that sets no rate",
    )
    run.add_argument(
        "--save-every",
        type=whole,
        default=None,
        metavar="N",
        help="checkpoint every N server steps; default: by time",
    )
    add_tracking(run)

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
        type=number,
        default=None,
        metavar="ACCURACY",
        help="accuracy to reach; default: 95 %% of the best",
    )

    schedule = commands.add_parser(
        "schedule", help="simulate time alone, without training", argument_default=argparse.SUPPRESS
    )
    _add(schedule, _TIME, {})
    schedule.add_argument(
        "--momentum",
        type=number,
        default=None,
        metavar="BETA",
        help="also tell how far momentum BETA is from itself without delay, approximated or not",
    )
    _add_json(schedule)

    algorithms = commands.add_parser("algorithms", help="list the methods, or show one")
    algorithms.add_argument("name", nargs="?", metavar="NAME")
    _add_json(algorithms)

    for name, (add_options, text) in _WITH_THEIR_OWN_WORDS.items():
        command = commands.add_parser(name, help=text)
        add_options(command)
        _add_json(command)
    return main, dict(commands.choices)


def _add_experiment(command: argparse.ArgumentParser) -> None:
    for table in (_DATA, _TIME, _WORK):
        _add(command, table, _METHODS_OWN)
    _add_privacy(command)
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a hyperparameter; may be repeated; METHOD.NAME for one of several",
    )
    command.add_argument(
        "--out",
        default=None,
        type=place,
        metavar="DIR",
        help="where to write; default: the next free folder in runs/",
    )
    _add_json(command)


def _add_privacy(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "privacy", "all but --secure need --clip, unless the method bounds all it uploads"
    )
    group.add_argument(
        "--clip",
        action="append",
        metavar="[FIELD=]BOUND",
        help="norm of an upload at most, or of one field of it; may be repeated",
    )
    _add(group, _PRIVACY, {})
    group.add_argument(
        "--simulate-amplification",
        action="store_true",
        help="simulations only: epsilon as if --dispatch poisson amplified it, which is not a guarantee",
    )
    group.add_argument("--amplified", action=_Amplified, nargs=0, help=argparse.SUPPRESS)
    group.add_argument("--secure", action="store_true", help="sums in secret, by two servers")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", action="store_true", default=False, help="the last line of the output is one JSON object"
    )


def _add(command: argparse._ActionsContainer, table: _Table, own: Mapping[str, str]) -> None:
    for name, (kind, word, text) in table.items():
        default = own.get(name, _DEFAULTS[name])
        shown = text if default is None else f"{text} [{default}]"
        command.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar=word, help=shown.replace("%", "%%")
        )
