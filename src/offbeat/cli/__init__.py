"""The command line `offbeat`, with one module per command; bad input gives one sentence and exit code 2."""

from offbeat.cli.main import main

__all__ = ["main"]
