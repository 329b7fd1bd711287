"""The command, also as `python -m offbeat`: Ctrl-C while everything is being loaded is one sentence, too."""

import os
import signal
import sys


def main() -> int:
    """Load the command line, then run one command; the exit code."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from offbeat.cli.main import main as command  # takes a second or two

    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, usual)
    return command()


def _leave(number: int, frame: object) -> None:
    """At once, for nothing has begun, and an exception might be taken for a library that is missing."""
    os.write(sys.stderr.fileno(), b"offbeat: interrupted.\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
