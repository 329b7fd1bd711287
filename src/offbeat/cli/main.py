"""Entry point: one command, its exit code, and one sentence where it cannot be done."""

import json
import logging
import os
import sys
from collections.abc import Sequence

from offbeat.cli.catalogue import algorithms
from offbeat.cli.compare import compare
from offbeat.cli.helper import helper
from offbeat.cli.join import join
from offbeat.cli.keys import keys
from offbeat.cli.new import new
from offbeat.cli.options import parse
from offbeat.cli.privacy import privacy
from offbeat.cli.replay import replay
from offbeat.cli.report import report
from offbeat.cli.reproduce import reproduce
from offbeat.cli.run import run
from offbeat.cli.schedule import schedule
from offbeat.cli.serve import serve
from offbeat.errors import DivergedError, InputError

_COMMANDS = {
    "run": run,
    "compare": compare,
    "schedule": schedule,
    "algorithms": algorithms,
    "privacy": privacy,
    "replay": replay,
    "reproduce": reproduce,
    "report": report,
    "serve": serve,
    "join": join,
    "keys": keys,
    "helper": helper,
    "new": new,
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
