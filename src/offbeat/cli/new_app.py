"""`offbeat new`: writes a small app from the templates that ship with the package."""

import argparse
import importlib.resources
import importlib.util
import json
import keyword
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import NamedTuple

from offbeat.errors import InputError
from offbeat.files import atomic_dir, write_new

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_MAX_NAME = 32  # characters
_FOLDER_NAMES = frozenset({"build", "env", "lib", "venv"})  # that tools take for their own
_TEMPLATE_SUFFIX = ".txt"  # so that tools do not take a template for code of this project
_PACKAGE = "package"  # stands for the name of the app's package
_SERVICE = "service"  # the folder with systemd units and a container file
_DOT_PREFIX = "dot-"  # stands for a leading dot


class NewApp(NamedTuple):
    """The files of a new app, and the commands that start it from its folder."""

    folder: Path
    package: str
    files: tuple[str, ...]
    commands: tuple[str, ...]


def add_new_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat new`."""
    command.add_argument("name", metavar="NAME", help="of the app and of its folder")
    command.add_argument("--folder", default=".", metavar="PARENT", help="where to put it [here]")
    command.add_argument("--service", action="store_true", help="add systemd units and a container file")


def new_command(given: argparse.Namespace) -> int:
    """Write the app, and print the commands that start it."""
    app = create_app(given.name, Path(given.folder), service=given.service)
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


def create_app(name: str, parent: Path, *, service: bool = False) -> NewApp:
    """Write the app `name` into a new folder of the same name; `service` adds units and a container file."""
    package = _package_name(name)
    folder = parent / name
    values = {"name": name, "package": package}
    with atomic_dir(folder, 0o755) as part:
        for path, text in _templates():
            if path.parts[0] == _SERVICE and not service:
                continue
            target = Path(package, *path.parts[1:]) if path.parts[0] == _PACKAGE else path
            write_new(part / target, Template(text).substitute(values).encode())
    files = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
    return NewApp(folder, package, tuple(files), _commands(package))


def _commands(package: str) -> tuple[str, ...]:
    join = f"offbeat join --superlink 127.0.0.1:8000 --insecure --task {package}.task:task --name"
    return ("offbeat serve serve.toml", *(f"{join} site-{number}" for number in range(3)))


def _package_name(name: str) -> str:
    """Return the name of the app's Python package."""
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise InputError(
            f"'{name}' cannot be the name of an app: use at most {_MAX_NAME} lower-case letters, digits and "
            "single hyphens, beginning with a letter."
        )
    package = name.replace("-", "_")
    found = importlib.util.find_spec(package)
    reserved = keyword.iskeyword(package) or package in sys.stdlib_module_names
    if reserved or package in _FOLDER_NAMES or (found and found.origin):
        raise InputError(f"'{name}' has another meaning to Python or its tools: choose another name.")
    return package


def _templates() -> Iterator[tuple[Path, str]]:
    """Yield the path of each file in the app, and its template."""
    root = importlib.resources.files("offbeat.deploy") / "template"
    for path, file in _files(root, Path()):
        name = path.name.removesuffix(_TEMPLATE_SUFFIX)
        yield path.with_name(name.replace(_DOT_PREFIX, ".", 1)), file.read_text("utf-8")


def _files(folder: Traversable, path: Path) -> Iterator[tuple[Path, Traversable]]:
    for each in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if each.is_dir():
            yield from _files(each, path / each.name)
        elif each.name.endswith(_TEMPLATE_SUFFIX):
            yield path / each.name, each
