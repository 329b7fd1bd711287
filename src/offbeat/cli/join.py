"""`offbeat join`: one site of a deployment, until it is told to stop."""

import argparse
import importlib.util
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

from offbeat.cli.numbers import whole
from offbeat.cli.process import stop_signals
from offbeat.deploy.flower_home import Link
from offbeat.deploy.flower_processes import check_readable
from offbeat.deploy.joining import join as keep_joined
from offbeat.deploy.ports import parse_address
from offbeat.deploy.resident_child import Own
from offbeat.deploy.states import site_folder
from offbeat.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_WAIT = b"\noffbeat: the site signs off; the same again stops at once.\n"


def add_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    function = "PACKAGE.MODULE:FUNCTION"
    command.add_argument("--superlink", required=True, metavar="HOST:PORT", help="where the server is")
    command.add_argument(
        "--data", required=True, metavar=function, help="gives the examples of a site, by its name"
    )
    command.add_argument("--module", metavar=function, help="gives the model [module, beside --data]")
    command.add_argument(
        "--losses", metavar=function, help="losses by example [losses beside --data, or the cross entropy]"
    )
    command.add_argument("--name", metavar="NAME", help="of the site [this machine's]")
    command.add_argument(
        "--folder", metavar="DIR", help="for what the site keeps [one of this user's, by name]"
    )
    command.add_argument("--certificate", metavar="FILE", help="ca.crt, which vouches for the server")
    command.add_argument("--key", metavar="FILE", help="this site's private key")
    command.add_argument(
        "--helper-key", metavar="FILE", help="the public key of the only secure-sum helper to trust"
    )
    command.add_argument(
        "--minimum", type=whole, metavar="N", help="secure sums of so many sites or more, and nothing else"
    )
    command.add_argument("--insecure", action="store_true", help="talk in plain sight; for a first try")


def join(given: argparse.Namespace) -> int:
    """Check what can be checked, then serve."""
    own, link = _own(given), _link(given)
    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not there: install 'offbeat[deploy]'.")
    with stop_signals(_WAIT) as stop:
        keep_joined(own, link, _say, stop, lambda facts: _ready(own, facts))
        if given.json:
            print(json.dumps({"name": own.name, "folder": str(own.folder), "superlink": link.address}))
        return 0


def _own(given: argparse.Namespace) -> Own:
    name = given.name or platform.node() or "site"
    if not _NAME.fullmatch(name):
        raise InputError(
            f"'{name}' cannot be the name of a site: use letters, digits, dots, hyphens and underscores, a "
            "letter or digit first, and 100 of them at most."
        )
    folder = Path(given.folder) if given.folder else site_folder(name)
    key, helper_key = (None if path is None else Path(path) for path in (given.key, given.helper_key))
    if key is not None:
        check_readable(key, "name the site's private key")
    if helper_key is not None:
        check_readable(helper_key, "name the helper's public key")
    if given.minimum is not None and given.minimum < 2:
        raise InputError(f"a secure sum of {given.minimum} sites hides nobody: give --minimum 2 or more.")
    trust = key, helper_key, given.minimum
    return Own(name, folder.absolute(), given.data, given.module, given.losses, *trust)


def _link(given: argparse.Namespace) -> Link:
    parse_address(given.superlink)
    if given.insecure:
        if given.certificate or given.key:
            raise InputError(
                "--insecure goes with neither --certificate nor --key: leave it out, or both of them."
            )
        return Link(given.superlink, None)
    if given.certificate is None:
        raise InputError("--certificate is missing, by which the server is known: give it, or --insecure.")
    certificate = Path(given.certificate)
    check_readable(certificate, "name the ca.crt that the server's keys came with")
    return Link(given.superlink, certificate)


def _ready(own: Own, facts: dict[str, Any]) -> None:
    print(f"{own.name}: {facts['examples']:,} examples; what it keeps is in {own.folder}", flush=True)


def _say(sentence: str) -> None:
    print(f"offbeat: {sentence}", file=sys.stderr, flush=True)
