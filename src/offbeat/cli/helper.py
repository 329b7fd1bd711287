"""`offbeat helper`: the second server of secure sums."""

import argparse
import json
import signal
from pathlib import Path
from typing import NoReturn

from offbeat.cli.numbers import whole
from offbeat.errors import InputError

_PORT = 9443


def add_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    command.add_argument("--key", required=True, metavar="FILE", help="secret; made if it is not there")
    command.add_argument("--store", required=True, metavar="FILE", help="what was counted; goes with the key")
    command.add_argument("--token", required=True, metavar="FILE", help="what the server shows to be served")
    command.add_argument("--certificate", metavar="FILE", help="by which the server knows this helper")
    command.add_argument("--certificate-key", metavar="FILE", help="the certificate's key")
    command.add_argument("--host", default="127.0.0.1", help="address to serve on [127.0.0.1]")
    command.add_argument("--port", type=whole, default=_PORT, metavar="N", help=f"[{_PORT}]; 0: any")
    command.add_argument(
        "--sites", metavar="FOLDER", help="public keys of sites (*.pub): only what they signed is added"
    )
    command.add_argument(
        "--minimum", type=whole, default=2, metavar="N", help="refuse runs with sums of fewer sites [2]"
    )
    command.add_argument(
        "--insecure", action="store_true", help="no certificate; for trials on this machine alone"
    )


def helper(given: argparse.Namespace) -> int:
    """Serve until told to stop."""
    try:
        from offbeat.deploy import helper_service as service  # has packages of its own
        from offbeat.deploy.helper_client import loopback
    except ImportError as error:
        raise InputError(
            f"the helper needs the package {error.name}: install it with pip install 'offbeat[deploy]'."
        ) from None
    from offbeat.deploy.helper_desk import Desk
    from offbeat.deploy.helper_frames import read_token
    from offbeat.deploy.signing import read_sites

    if given.minimum < 2:
        raise InputError(f"a sum of {given.minimum} sites hides nobody: give --minimum 2 or more.")
    pair = [given.certificate, given.certificate_key]
    tls = None
    if given.insecure:
        if any(pair) or not loopback(given.host):
            raise InputError("--insecure is for trials on this machine: use 127.0.0.1, and no certificate.")
    elif None in pair:
        raise InputError("give --certificate and --certificate-key, such as offbeat keys makes them.")
    else:
        tls = service.Tls(*map(Path, pair))
        service.check_tls(tls)
    token = read_token(Path(given.token))
    sites = None if given.sites is None else read_sites(Path(given.sites))
    with service.bound(given.host, given.port) as socket:
        key, store = service.open_store(Path(given.key), Path(given.store))
        desk = Desk(key, store, sites, given.minimum)
        try:
            _stop_by_interrupt()
            _announce(given, socket.getsockname()[1], desk.known.key.hex(), sites)
            service.server(service.application(desk, token), tls).run(sockets=[socket])
        except KeyboardInterrupt:
            pass
        finally:
            desk.close()
    return 0


def _announce(given: argparse.Namespace, port: int, key: str, sites: object) -> None:
    scheme = "http" if given.insecure else "https"
    url = f"{scheme}://{given.host}:{port}"
    if given.json:
        print(json.dumps({"url": url, "key": key, "signed": sites is not None}), flush=True)
        return
    print(
        f"the helper serves at {url}; its public key, for sites to be given, is in {given.key}.pub",
        flush=True,
    )
    if sites is None:
        print("without --sites it cannot tell a site's report from one that the server made up", flush=True)


def _stop_by_interrupt() -> None:
    """A service is stopped by SIGTERM as it is by Ctrl-C."""

    def stop(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
