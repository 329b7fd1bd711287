"""The words of the command line.

An option that was not given is absent, not a default: a resumed run then takes it from its folder.

Entry point: one command, its exit code, and one sentence where it cannot be done.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NoReturn, TypeAlias

from experiments.__main__ import reproduce_command

from experiments import __main__
from offbeat.cli import deploy, inspect, privacy, replay
from offbeat.cli.compare import compare_command
from offbeat.cli.deploy import helper_command, join_command, keys_command, new_command, serve_command
from offbeat.cli.inspect import algorithms_command, report_command, schedule_command
from offbeat.cli.options import folder_name, number, whole_number
from offbeat.cli.privacy import privacy_command
from offbeat.cli.replay import replay_command
from offbeat.cli.run import add_tracker_options, run_command
from offbeat.errors import DivergedError, InputError, unknown_name
from offbeat.privacy.ledger import amplification_refused
from offbeat.training.experiment import Experiment

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
    "clients": (whole_number, "N", "how many clients there are"),
    "dispatch": (str, "NAME", "synchronous, asynchronous, rounds, poisson, phases or queues"),
    "hand_out": (str, "WHEN", "before or after the server step: when the client that fills it is replaced"),
    "buffer": (whole_number, "S", "updates per server step"),
    "concurrency": (whole_number, "N", "clients at work at the same time"),
    "delays": (
        str,
        "LAW",
        "constant:S, uniform:A:B, half-normal:S, exponential:S, log-normal:M:S, "
        "tiers:KIND[:GAMMA] or recorded:FILE; KIND is mild or large, a GAMMA below 1 makes more clients slow",
    ),
    "availability": (str, "LAW", "always or cycle:PERIOD:SHARE"),
    "dropout": (number, "P", "probability that a task is lost"),
    "limit": (whole_number, "N", "drop updates staler than this"),
    "rounds": (whole_number, "T", "server steps"),
    "seed": (whole_number, "N", "fixes everything"),
}
_WORK: _Table = {
    "weights": (str, "LAW", "of stale updates: constant, polynomial:A or hinge:A:B"),
    "local_steps": (whole_number, "K", "minibatches per task"),
    "local_epochs": (whole_number, "E", "whole passes per task instead of a number of minibatches"),
    "batch_size": (whole_number, "N", "examples per minibatch"),
    "weight_decay": (number, "W", "added to the loss as W/2 |x|^2"),
    "average": (number, "DECAY", "evaluate the exponential average of the models, such as 0.99"),
    "every": (whole_number, "N", "evaluate every N server steps"),
    "engine": (str, "NAME", "auto, sequential, vectorised, workers (processes here) or ray (a cluster)"),
    "device": (str, "NAME", "cpu or cuda"),
    "how": (str, "NAME", "on a GPU: auto (by a trial), mapped, columns, eager, streamed or compiled"),
    "precision": (str, "NAME", "of a GPU's products: torch (as it is set), float32, tf32 or bfloat16"),
    "workers": (whole_number, "N", "of the engines workers and ray; default: one for each core"),
    "ray_address": (str, "HOST:PORT", "a Ray cluster that runs already, or auto to find it"),
    "memory": (str, "PLACE", "of what clients keep: ram, device, mapped (a file), or auto, by size"),
}

_PRIVACY: _Table = {
    "noise": (number, "SIGMA", "multiplier of the noise on sums; default: computed from --epsilon"),
    "epsilon": (number, "E", "budget: training ends before it would be exceeded"),
    "delta": (number, "D", "probability beside epsilon, such as 1e-6"),
    "most": (whole_number, "N", "contributions of a client at most; needed for a guarantee"),
    "apart": (
        whole_number,
        "N",
        "server steps between two of them at least; default: 1, or as the noise needs it",
    ),
    "noise_shape": (str, "SHAPE", "over server steps: independent, tree or banded:B"),
    "accountant": (str, "NAME", "pld or rdp"),
    "adaptive_clip": (number, "QUANTILE", "let the bounds follow this quantile of the clients' norms"),
    "nominal_cohort": (
        whole_number,
        "N",
        "simulations only: noise as small as if a buffer were of this size",
    ),
    "noise_seed": (whole_number, "N", "simulations only: noise that anybody can repeat"),
}

# What stands in for a default of its own.
_METHOD_DEFAULTS = {
    "model": "by data",
    "dispatch": "the method's own",
    "buffer": "10, or the method's own",
    "weights": "the method's own",
    "every": "20 times",
}

# Commands whose modules say what their words are.
_OTHER_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "replay": (replay.add_options, "compute a run again from its trace"),
    "report": (inspect.add_report_options, "show runs as one page, with figures"),
    "reproduce": (__main__.add_options, "run a paper's table or figure again, claimed beside measured"),
    "privacy": (privacy.add_options, "noise for an epsilon, or epsilon of a noise or of a run"),
    "new": (deploy.add_new_options, "write a small app, to be deployed"),
    "serve": (deploy.add_serve_options, "run a deployment: the server's side"),
    "join": (deploy.add_join_options, "run a deployment: a site's side"),
    "keys": (deploy.add_keys_options, "make certificates and keys for a deployment"),
    "helper": (deploy.add_helper_options, "serve as the second server of secure sums"),
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
        raise unknown_name("command", name, commands)
    given, rest = commands[name].parse_known_intermixed_args(others)
    for word in rest:
        if word.startswith("-"):
            raise unknown_name("option", word.partition("=")[0], commands[name]._option_string_actions)
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
        type=whole_number,
        default=None,
        metavar="N",
        help="checkpoint every N server steps; default: by time",
    )
    add_tracker_options(run)

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

    for name, (add_options, text) in _OTHER_COMMANDS.items():
        command = commands.add_parser(name, help=text)
        add_options(command)
        _add_json(command)
    return main, dict(commands.choices)


def _add_experiment(command: argparse.ArgumentParser) -> None:
    for table in (_DATA, _TIME, _WORK):
        _add(command, table, _METHOD_DEFAULTS)
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
        type=folder_name,
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


_COMMANDS = {
    "run": run_command,
    "compare": compare_command,
    "schedule": schedule_command,
    "algorithms": algorithms_command,
    "privacy": privacy_command,
    "replay": replay_command,
    "reproduce": reproduce_command,
    "report": report_command,
    "serve": serve_command,
    "join": join_command,
    "keys": keys_command,
    "helper": helper_command,
    "new": new_command,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        given = parse(words)
        code = _COMMANDS[given.command](given)
        sys.stdout.flush()
        return code
    except InputError as error:
        return _fail(str(error), 2, words)
    except DivergedError as error:
        return _fail(str(error), 1, words)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        what = f"{error.filename or 'a file'} could not be read or written ({error.strerror or error})"
        return _fail(f"{what}: what was saved before is whole.", 1, words)
    except MemoryError:
        return _fail("there is not enough memory: use fewer clients or a smaller model.", 1, words)
    except KeyboardInterrupt:
        return _fail("interrupted.", 130, words)


def _fail(sentence: str, code: int, words: Sequence[str]) -> int:
    """Say it to a person, and to a program that asked for JSON."""
    print(f"offbeat: {sentence}", file=sys.stderr)
    if "--json" in words:
        print(json.dumps({"error": sentence}))
    return code
