"""What Flower's own commands are given: environment, a connection, and the app to run."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import InputError

CONNECTION = "serve"  # the name of the only SuperLink that our commands know
# Unless the user has set them: nothing is reported to Flower, and tasks begin soon.
_DEFAULTS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
_PACKAGE = "offbeat_app"
_PROJECT = f"""\
[project]
name = "offbeat-run"
version = "1.0.0"
description = "A run of offbeat"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "offbeat"

[tool.flwr.app.components]
serverapp = "{_PACKAGE}.server:app"
clientapp = "{_PACKAGE}.client:app"

[tool.flwr.app.config]
settings = ""
folder = ""
resume = false
authenticated = false
sites = ""
"""
_SERVER = "from offbeat.deploy.flower_server import server_app\n\napp = server_app()\n"
_CLIENT = "from offbeat.deploy.flower_client import client_app\n\napp = client_app()\n"


class Link(NamedTuple):
    """How a SuperLink is reached."""

    address: str  # host:port
    authority: Path | None  # the certificate that it is known by; None: in plain sight


def command(name: str) -> str:
    """Where one of Flower's commands is."""
    here = str(Path(sys.executable).parent)
    found = shutil.which(name, path=here) or shutil.which(name)
    if found is None:
        raise InputError(f"the command {name} of Flower is not there: install 'offbeat[deploy]'.")
    return found


def environment(home: Path) -> dict[str, str]:
    """Ours, with a home for Flower's files; its commands start each other by name."""
    own = dict(os.environ)
    places = [str(Path(sys.executable).parent), *filter(None, [own.get("PATH")])]
    return _DEFAULTS | own | {"FLWR_HOME": str(home.absolute()), "PATH": os.pathsep.join(places)}


def write_home(home: Path, link: Link) -> None:
    """The folder that Flower's commands find their SuperLink in."""
    home.mkdir(parents=True, exist_ok=True)
    secure = (
        "insecure = true"
        if link.authority is None
        else _pair("root-certificates", str(link.authority.absolute()))
    )
    text = (
        f"[superlink]\n{_pair('default', CONNECTION)}\n\n"
        f"[superlink.{CONNECTION}]\n{_pair('address', link.address)}\n{secure}\n"
    )
    (home / "config.toml").write_text(text)


def write_app(folder: Path, config: Mapping[str, Any]) -> tuple[Path, Path]:
    """The app that is submitted, and the file with what it is told."""
    package = folder / "app" / _PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "pyproject.toml").write_text(_PROJECT)
    for name, text in (("__init__", ""), ("server", _SERVER), ("client", _CLIENT)):
        (package / f"{name}.py").write_text(text)
    told = folder / "run.toml"
    told.write_text("".join(f"{_pair(name, value)}\n" for name, value in config.items()))
    return package.parent, told


def _pair(name: str, value: str | bool) -> str:
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}"
    escaped = "".join(
        f"\\u{ord(sign):04x}" if sign in '"\\' or not sign.isprintable() else sign for sign in value
    )
    return f'{name} = "{escaped}"'
