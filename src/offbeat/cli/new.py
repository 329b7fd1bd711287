"""`offbeat new`: a small app that trains over sites, to begin from."""

import argparse
import json
import shlex
from pathlib import Path

from offbeat.deploy.scaffold import scaffold


def add_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    command.add_argument("name", metavar="NAME", help="of the app and of its folder")
    command.add_argument("--folder", default=".", metavar="PARENT", help="where to put it [here]")


def new(given: argparse.Namespace) -> int:
    """Write it, and say how to start it."""
    app = scaffold(given.name, Path(given.folder))
    if given.json:
        print(json.dumps({"folder": str(app.folder), "package": app.package, "files": list(app.files)}))
        return 0
    print(
        f"{app.folder} is written. In there, start a server in one terminal and three sites in three others:"
    )
    print(f"  cd {shlex.quote(str(app.folder))}")
    for command in app.commands:
        print(f"  {command}")
    print(f"Your model and your data go into {app.package}/task.py; README.md says more.")
    return 0
