"""What Flower's own commands are given: environment, a connection, and the app to run.

SuperLinks and SuperNodes as child processes.

Flower's `flwr` command, for what is asked of a SuperLink: run, list, stop, register.
"""

import json
import os
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509

from offbeat.deploy.process import ChildProcess, free_port
from offbeat.errors import InputError

CONNECTION = "serve"  # the name of the only SuperLink that our commands know
# Unless the user has set them: nothing is reported to Flower, and tasks begin soon.
_DEFAULT_ENVIRONMENT = {
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
_SERVER = "from offbeat.deploy.flower.server import server_app\n\napp = server_app()\n"
_CLIENT = "from offbeat.deploy.flower.client import client_app\n\napp = client_app()\n"


class SuperLinkAddress(NamedTuple):
    """How a SuperLink is reached."""

    address: str  # host:port
    authority: Path | None  # the certificate that it is known by; None: in plain sight


def find_command(name: str) -> str:
    """Where one of Flower's commands is."""
    here = str(Path(sys.executable).parent)
    found = shutil.which(name, path=here) or shutil.which(name)
    if found is None:
        raise InputError(f"the command {name} of Flower is not there: install 'offbeat[deploy]'.")
    return found


def flower_environment(home: Path) -> dict[str, str]:
    """Ours, with a home for Flower's files; its commands start each other by name."""
    own = dict(os.environ)
    places = [str(Path(sys.executable).parent), *filter(None, [own.get("PATH")])]
    return _DEFAULT_ENVIRONMENT | own | {"FLWR_HOME": str(home.absolute()), "PATH": os.pathsep.join(places)}


def write_flower_home(home: Path, link: SuperLinkAddress) -> None:
    """The folder that Flower's commands find their SuperLink in."""
    home.mkdir(parents=True, exist_ok=True)
    secure = (
        "insecure = true"
        if link.authority is None
        else _toml_line("root-certificates", str(link.authority.absolute()))
    )
    text = (
        f"[superlink]\n{_toml_line('default', CONNECTION)}\n\n"
        f"[superlink.{CONNECTION}]\n{_toml_line('address', link.address)}\n{secure}\n"
    )
    (home / "config.toml").write_text(text)


def write_flower_app(folder: Path, config: Mapping[str, Any]) -> tuple[Path, Path]:
    """The app that is submitted, and the file with what it is told."""
    package = folder / "app" / _PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "pyproject.toml").write_text(_PROJECT)
    for name, text in (("__init__", ""), ("server", _SERVER), ("client", _CLIENT)):
        (package / f"{name}.py").write_text(text)
    told = folder / "run.toml"
    told.write_text("".join(f"{_toml_line(name, value)}\n" for name, value in config.items()))
    return package.parent, told


def _toml_line(name: str, value: str | bool) -> str:
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}"
    escaped = "".join(
        f"\\u{ord(sign):04x}" if sign in '"\\' or not sign.isprintable() else sign for sign in value
    )
    return f'{name} = "{escaped}"'


LOOPBACK = "127.0.0.1"  # where a SuperLink of ours listens
_HEALTH_TIMEOUT = 5.0  # seconds for an answer
_HEALTH_INTERVAL = 0.2  # seconds between two questions


class Certificates(NamedTuple):
    """What `offbeat keys` wrote for a server."""

    authority: Path
    server: Path
    key: Path
    sites: Path  # a folder with a folder for each

    def public_keys(self) -> list[Path]:
        """Of the sites, by name."""
        return sorted(self.sites.glob("*/key.pub"))


def find_certificates(folder: Path) -> Certificates:
    """The files in a folder from `offbeat keys`, or a sentence on the first that is missing."""
    found = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key", folder / "sites")
    for path in found[:3]:
        check_readable(path, "make them with 'offbeat keys'")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(found.server, found.key)
        context.load_verify_locations(found.authority)
    except (ssl.SSLError, OSError):
        raise InputError(
            f"the certificates in {folder} do not fit each other: make them anew with 'offbeat keys'."
        ) from None
    if not found.public_keys():
        raise InputError(f"{found.sites} has no key of any site: add one with 'offbeat keys --add-site'.")
    return found


def check_loopback_certificate(certificates: Certificates) -> None:
    """Refuse a certificate that is not good for a SuperLink behind a gate on this machine."""
    server = x509.load_pem_x509_certificate(certificates.server.read_bytes())
    try:
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    if LOOPBACK not in map(str, names.get_values_for_type(x509.IPAddress)):
        raise InputError(
            f"{certificates.server} is not good for {LOOPBACK}, where --start has the SuperLink listen: "
            "make certificates anew with 'offbeat keys', which adds it."
        )


def check_readable(path: Path, remedy: str) -> None:
    """Refuse a file that is not there or not ours to read."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): {remedy}.") from None


def start_superlink(host: str, port: int, folder: Path, certificates: Certificates | None) -> ChildProcess:
    """A SuperLink whose database and log lie in a folder."""
    words = [find_command("flower-superlink"), "--host", host, "--port", str(port)]
    words += ["--database", str(folder / "superlink.db"), "--disable-runtime-dependency-installation"]
    if certificates is None:
        words += ["--insecure"]
    else:
        words += ["--ssl-ca-certfile", str(certificates.authority.absolute())]
        words += ["--ssl-certfile", str(certificates.server.absolute())]
        words += ["--ssl-keyfile", str(certificates.key.absolute()), "--enable-supernode-auth"]
    return ChildProcess(words, flower_environment(folder / "home"), folder / "superlink.log")


def start_supernode(
    link: SuperLinkAddress, folder: Path, key: Path | None, told: Mapping[str, str], log: Path
) -> ChildProcess:
    """A SuperNode; `told` goes into its environment, and so into that of the apps it starts."""
    words = [find_command("flower-supernode"), "--superlink", link.address, "--port", str(free_port())]
    if link.authority is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(link.authority.absolute())]
    if key is not None:
        words += ["--auth-supernode-private-key", str(key.absolute())]
    return ChildProcess(words, flower_environment(folder) | dict(told), log)


def superlink_problem(link: SuperLinkAddress) -> str | None:
    """Why a SuperLink does not answer; None if it does."""
    context = None if link.authority is None else ssl.create_default_context(cafile=str(link.authority))
    scheme = "http" if context is None else "https"
    try:
        with urllib.request.urlopen(
            f"{scheme}://{link.address}/health", timeout=_HEALTH_TIMEOUT, context=context
        ):
            return None
    except urllib.error.HTTPError as error:
        return f"it answers with HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", None) or error)


def wait_for_superlink(
    link: SuperLinkAddress, seconds: float, alive: Callable[[], bool], log: Path | None = None
) -> None:
    """Wait until a SuperLink answers; a sentence if it does not, or has ended."""
    limit = time.monotonic() + seconds
    while (why := superlink_problem(link)) is not None:
        where = f"; see {log}" if log else ""
        if not alive():
            raise InputError(f"the SuperLink ended as it began{where}.")
        if time.monotonic() > limit:
            raise InputError(f"the SuperLink at {link.address} does not answer ({why}){where}.")
        time.sleep(_HEALTH_INTERVAL)


_COMMAND_TIMEOUT = 120.0  # seconds for one command
_KEY_IN_USE = "already in use"  # what Flower says of a key that it has


class FlowerError(Exception):
    """Flower could not do it; its own words."""


def submit_run(home: Path, app: Path, told: Path) -> str:
    """Start a run; its number."""
    said = _flwr(home, "run", str(app), CONNECTION, "--run-config", str(told))
    return str(said["run-id"])


def is_run_finished(home: Path, run: str) -> bool:
    """Whether a run has finished, however it did."""
    runs = _flwr(home, "ls", CONNECTION, "--run-id", run).get("runs") or [{}]
    return str(runs[0].get("status", "")).startswith("finished")


def stop_run(home: Path, run: str) -> None:
    """End a run, if it is still there."""
    _flwr(home, "stop", run, CONNECTION)


def register_key(home: Path, key: Path) -> None:
    """Let the SuperNode with this public key in."""
    try:
        _flwr(home, "supernode", "register", str(key), CONNECTION)
    except FlowerError as error:
        if _KEY_IN_USE not in str(error):
            raise InputError(f"the key {key} cannot be registered ({error}): check the file.") from None


def _flwr(home: Path, *words: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [find_command("flwr"), *words, "--format", "json"],
            env=flower_environment(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT,
            check=False,
            start_new_session=True,  # Ctrl-C is ours to hear
        )
    except subprocess.TimeoutExpired:
        raise FlowerError(f"no answer in {_COMMAND_TIMEOUT:.0f} s") from None
    try:
        said = json.loads(done.stdout)
    except ValueError:
        said = {}
    if done.returncode != 0 or not isinstance(said, dict) or not said.get("success"):
        words_of = said.get("error-message") if isinstance(said, dict) else None
        raise FlowerError(_last_line(words_of or done.stderr.strip() or done.stdout))
    return said


def _last_line(text: str) -> str:
    """The last line that says anything, which in Flower's output is the reason."""
    lines = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "no reason given")
