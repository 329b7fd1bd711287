"""The `offbeat` command, also as `python -m offbeat`; an interrupt during imports gives one sentence."""

import os
import signal
import sys


def main() -> int:
    """Load the command line, run one command and return its exit code."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from offbeat.cli.main import main as command  # takes a second or two

    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, usual)
    return command()


def _leave(number: int, frame: object) -> None:
    """Exit at once: an exception during an import could be mistaken for a missing library."""
    os.write(sys.stderr.fileno(), b"offbeat: interrupted.\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
