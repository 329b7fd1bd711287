"""The command line: one sentence and exit code 2 for bad input, never a traceback."""

from offbeat.cli.main import main

__all__ = ["main"]
