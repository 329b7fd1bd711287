"""The command line: the parser, the commands, exit codes, and errors in one sentence.

A command's module is imported when the command is used, so that help and small commands start quickly.
"""

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from offbeat.cli.options import option_name
from offbeat.errors import DivergedError, InputError, naming_settings, unknown_name
from offbeat.files import is_disk_full
from offbeat.renamed import check_name, check_part_of_task


class Command(NamedTuple):
    """A command: `NAME_command` of a module of this package."""

    module: str
    help: str
    options: str = ""  # the module of `add_NAME_options`, if it is another


_COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "run": Command("run", "train one method", "options"),
        "compare": Command(
            "compare", "train several methods on the same clients, delays and batches", "options"
        ),
        "tune": Command("tune", "search over the learning rates of a method", "options"),
        "schedule": Command("inspect", "simulate the schedule alone, without training"),
        "advise": Command("advise", "compare values of concurrency and buffer for delays or a run's trace"),
        "algorithms": Command("inspect", "list the methods, or show one"),
        "check": Command("inspect", "check a method, of this package or of another"),
        "privacy": Command("privacy", "compute the noise for an epsilon, or the epsilon of a noise or a run"),
        "audit": Command("audit", "attack the pipeline of a private run, to test its epsilon"),
        "replay": Command("replay", "compute a run again from its trace"),
        "report": Command("inspect", "show runs as one page, with figures"),
        "new": Command("new_app", "write a small app to deploy"),
        "serve": Command("deploy", "run a deployment: the server"),
        "join": Command("deploy", "run a deployment: a site"),
        "keys": Command("deploy", "make certificates and keys for a deployment"),
        "helper": Command("deploy", "run the second server of secure aggregation"),
    }
)


_OTHER_WORDS: Mapping[str, str] = MappingProxyType(  # words that users may try, and the right command
    {
        "list": "algorithms",
        "methods": "algorithms",
        "train": "run",
        "simulate": "run",
        "start": "run",
        "resume": "run",
        "server": "serve",
        "client": "join",
        "site": "join",
        "init": "new",
        "plot": "report",
    }
)
_HELP, _VERSION = ("-h", "--help", "help"), ("-V", "--version", "version")


class Parser(argparse.ArgumentParser):
    """Reports errors as one sentence, and accepts no abbreviated options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ').rstrip('.')}; see '{self.prog} --help'.")


class _Version(argparse.Action):
    """Prints the version, which takes a while to look up."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        from importlib.metadata import version

        print(f"{parser.prog} {version('offbeat')}")
        parser.exit()


def parse(words: Sequence[str]) -> argparse.Namespace:
    """A command and its options; a setting that was not given is absent."""
    if not words:
        raise InputError(f"name a command, one of {', '.join(_COMMANDS)}; see 'offbeat --help'.")
    name, *others = words
    if name in _HELP and others and others[0] in _COMMANDS:
        name, others = others[0], ["--help"]
    if name in _HELP:
        parser(()).parse_args(["--help"])
    if name in _VERSION:
        parser(()).parse_args(["--version"])
    if name == "reproduce":
        raise InputError("this command is now 'python -m experiments', run from a checkout of offbeat.")
    if name in _OTHER_WORDS:
        raise InputError(f"unknown command '{name}': did you mean {_OTHER_WORDS[name]}?")
    if name not in _COMMANDS:
        raise unknown_name("command", name, _COMMANDS)
    given = parse_options(_add_options(name, Parser(prog=f"offbeat {name}")), others)
    given.command = name
    return given


def parse_options(command: Parser, words: Sequence[str]) -> argparse.Namespace:
    """The options of one command; unknown and renamed ones are named in a sentence."""
    given, rest = command.parse_known_intermixed_args(words)
    for word in rest:
        if word.startswith("-"):
            option = word.partition("=")[0]
            if option == "--amplified":
                from offbeat.privacy.ledger import amplification_refused

                raise amplification_refused("--max-participations", "--simulate-amplification")
            name = option.removeprefix("--").replace("-", "_")
            check_name(name)
            if "--task" in command._option_string_actions:
                check_part_of_task(name, "", "task")
            if "--set" in command._option_string_actions:
                _check_parameter(option, name)
            raise unknown_name("option", option, command._option_string_actions)
    if rest:
        raise InputError(f"unexpected argument '{rest[0]}'; see '{command.prog} --help'.")
    return given


def _check_parameter(option: str, name: str) -> None:
    """Reject a hyperparameter that is written as an option."""
    from offbeat.algorithms import CATALOGUE

    known = {each for method in CATALOGUE.values() for each in method.parameters()}
    name = {"lr": "local_lr", "learning_rate": "local_lr"}.get(name, name)
    if name in known:
        raise InputError(
            f"'{option}' is not an option but a parameter of methods: write --set {name}=VALUE; 'offbeat "
            "algorithms METHOD' shows the parameters of a method."
        )


def parser(commands: Sequence[str] = tuple(_COMMANDS)) -> Parser:
    """The parser of the program, with the options of some commands."""
    program = Parser(
        prog="offbeat", description="Asynchronous federated learning that needs no step-size tuning."
    )
    program.add_argument("-V", "--version", action=_Version, nargs=0, help="show the version and exit")
    added = program.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, command in _COMMANDS.items():
        each = added.add_parser(name, help=command.help)
        if name in commands:
            _add_options(name, each)
    return program


def _add_options(name: str, command: Parser) -> Parser:
    module = _COMMANDS[name].options or _COMMANDS[name].module
    _function(module, f"add_{name}_options")(command)
    command.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return command


def _function(module: str, name: str) -> Callable[..., Any]:
    try:
        loaded = import_module(f"offbeat.cli.{module}")
    except ModuleNotFoundError as error:
        if module != "deploy" or str(error.name).startswith("offbeat"):
            raise
        raise InputError(f"{error.name} is not installed: install 'offbeat[deploy]'.") from None
    function: Callable[..., Any] = getattr(loaded, name)
    return function


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""

    def command(words: Sequence[str]) -> int:
        given = parse(words)
        code: int = _function(_COMMANDS[given.command].module, f"{given.command}_command")(given)
        return code

    return run_program(command, arguments)


def run_program(program: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a program on its arguments; errors become one sentence and an exit code."""
    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    logging.getLogger("offbeat.engines.execution").setLevel(logging.INFO)  # which execution was chosen
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may have characters that a terminal lacks
    try:
        with naming_settings(option_name):
            code = program(words)
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
        reason = "the disk is full" if is_disk_full(error) else error.strerror or error
        what = f"{error.filename or 'a file'} could not be read or written ({reason})"
        return _fail(f"{what}: everything saved before is complete.", 1, words)
    except MemoryError:
        return _fail("there is not enough memory: use fewer clients or a smaller model.", 1, words)
    except KeyboardInterrupt:
        return _fail("interrupted.", 130, words)


def _open_missing_streams() -> None:
    """Open /dev/null in place of standard streams that are closed."""
    if sys.stdout is not None and sys.stderr is not None:
        return
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _fail(sentence: str, code: int, words: Sequence[str]) -> int:
    """Print the sentence, and also as JSON if `--json` was given."""
    print(f"offbeat: {sentence}", file=sys.stderr)
    if "--json" in words:
        print(json.dumps({"error": sentence}))
    return code
