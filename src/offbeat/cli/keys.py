"""`offbeat keys`: certificates and keys for a deployment, and who is to be given which."""

import argparse
import json
from pathlib import Path

from cryptography import x509

from offbeat.cli import show
from offbeat.cli.numbers import place, whole
from offbeat.deploy.keys import add_site, make
from offbeat.errors import InputError

_DAYS = 365
_LOOPBACK = "localhost,127.0.0.1"


def add_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    command.add_argument(
        "--out", default="keys", type=place, metavar="FOLDER", help="a new folder to write [keys]"
    )
    command.add_argument(
        "--hosts", metavar="HOST,...", help="names and addresses that sites reach the server by"
    )
    command.add_argument("--sites", metavar="NAME,...", help="the sites that are to have keys")
    command.add_argument(
        "--helper-hosts",
        metavar="HOST,...",
        help=f"names and addresses of the secure-sum helper [{_LOOPBACK}]",
    )
    command.add_argument(
        "--days", type=whole, metavar="N", help=f"how long certificates are good for [{_DAYS}]"
    )
    command.add_argument(
        "--add-site", metavar="NAME", help="a key for one more site, in a folder from before"
    )


def keys(given: argparse.Namespace) -> int:
    """Write them, and say what to copy where."""
    folder = Path(given.out)
    if given.add_site is not None:
        for name in ("hosts", "sites", "helper_hosts", "days"):
            if getattr(given, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} is for new keys: leave it out with --add-site.")
        add_site(folder, given.add_site)
        sites = [given.add_site]
    else:
        for name in ("hosts", "sites"):
            if getattr(given, name) is None:
                raise InputError(f"--{name} is missing: give it, with commas between names, or --add-site.")
        sites = _split(given.sites)
        days = _DAYS if given.days is None else given.days
        make(folder, _split(given.hosts), sites, _split(given.helper_hosts or _LOOPBACK), days)
    until = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()).not_valid_after_utc
    if given.json:
        print(json.dumps({"folder": str(folder), "sites": sites, "until": until.isoformat()}))
        return 0
    places = {f"site {site}": f"sites/{site}: its key, and ca.crt to know the server by" for site in sites}
    everybody = {
        "server": "ca.crt, server.pem, server.key, helper.token and sites/*/key.pub, as they lie here",
        "helper": "helper.pem, helper.key, helper.token and sites/*/key.pub, where sums are secret",
        "nobody": "ca.key: whoever has it can pass for the server",
    }
    if given.add_site is not None:
        public = f"sites/{given.add_site}/key.pub, where the others lie"
        everybody = {"server": public, "helper": f"{public}; it reads them at its start, so restart it"}
    show.pairs(f"{folder}: who is to have what; certificates end on {until:%Y-%m-%d}", everybody | places)
    return 0


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]
