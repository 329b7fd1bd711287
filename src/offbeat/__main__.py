"""The `offbeat` command, also as `python -m offbeat`; an interrupt during imports gives one sentence."""

import os
import signal
import sys


def main() -> int:
    """Load the command line, run one command and return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    from offbeat.cli.main import main as command  # takes a second or two

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    return command()


def _exit_at_once(number: int, frame: object) -> None:
    """Exit at once: an exception during an import could be mistaken for a missing library."""
    os.write(sys.stderr.fileno(), b"offbeat: interrupted.\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
