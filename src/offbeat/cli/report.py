"""`offbeat report`: runs as one page, with figures."""

import argparse
import json
import sys
from pathlib import Path

from offbeat.report.making import make


def add_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    command.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run; several are compared")
    command.add_argument(
        "-o",
        "--out",
        default="report.html",
        metavar="PAGE",
        help="the page; its figures go to a folder beside it [report.html]",
    )
    command.add_argument(
        "--anyway", action="store_true", help="also where data, model or clients of the runs differ"
    )
    command.add_argument(
        "--fairness",
        action="store_true",
        help="also how well the last model serves each client; loads the runs' data",
    )


def report(given: argparse.Namespace) -> int:
    """Write it, and say where."""
    made = make(
        [Path(run) for run in given.runs], Path(given.out), anyway=given.anyway, with_fairness=given.fairness
    )
    if made.without_png:
        print(f"offbeat: {made.without_png}", file=sys.stderr)
    if made.secret:
        print(
            f"offbeat: the simulated epsilon of {', '.join(made.secret)} rests on a secret sample, of which "
            "this page tells: keep it as secret as the run's folder.",
            file=sys.stderr,
        )
    if given.json:
        found = made._asdict() | {"page": str(made.page), "folder": str(made.folder)}
        print(json.dumps(found))
    else:
        print(f"written to {made.page}; figures and their numbers are in {made.folder}")
    return 0
