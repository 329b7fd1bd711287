"""`offbeat new`: a small app that trains over sites, to begin from.

`offbeat keys`: certificates and keys for a deployment, and who is to be given which.

`offbeat helper`: the second server of secure sums.

`offbeat join`: one site of a deployment, until it is told to stop.

`offbeat serve`: one deployed run, from its settings to its model.
"""

import argparse
import importlib.util
import json
import platform
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from cryptography import x509

from offbeat.aggregate.secure import Secure as InSecret
from offbeat.cli import terminal
from offbeat.cli.new_app import create_app
from offbeat.cli.options import folder_name, whole_number
from offbeat.cli.terminal import StopRequest, stop_signals
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.flower.commands import (
    Certificates,
    SuperLinkAddress,
    check_loopback_certificate,
    check_readable,
    find_certificates,
)
from offbeat.deploy.flower.supernode import SiteOptions
from offbeat.deploy.flower.supernode import run_site as keep_joined
from offbeat.deploy.flower.supervisor import ListenAddress, Supervisor, running_backend
from offbeat.deploy.helper.protocol import read_token
from offbeat.deploy.keys import add_site_keys, create_keys
from offbeat.deploy.network import (
    TlsFiles,
    bind_socket,
    check_tls,
    format_address,
    is_loopback,
    parse_address,
)
from offbeat.deploy.network import check_port_free as check_port
from offbeat.deploy.server.run import (
    SET_ASIDE_FILE,
    ServeOutcome,
    check_run_folder,
    lock_run_folder,
    read_outcome,
    resumed_noise,
)
from offbeat.deploy.server.setup import ServerSetup, set_up
from offbeat.deploy.site.relay import site_folder
from offbeat.errors import InputError
from offbeat.training.folder import claim_folder, read_jsonl


def add_new_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    command.add_argument("name", metavar="NAME", help="of the app and of its folder")
    command.add_argument("--folder", default=".", metavar="PARENT", help="where to put it [here]")


def new_command(given: argparse.Namespace) -> int:
    """Write it, and say how to start it."""
    app = create_app(given.name, Path(given.folder))
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


_DAYS = 365
_LOOPBACK = "localhost,127.0.0.1"


def add_keys_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    command.add_argument(
        "--out", default="keys", type=folder_name, metavar="FOLDER", help="a new folder to write [keys]"
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
        "--days", type=whole_number, metavar="N", help=f"how long certificates are good for [{_DAYS}]"
    )
    command.add_argument(
        "--add-site", metavar="NAME", help="a key for one more site, in a folder from before"
    )


def keys_command(given: argparse.Namespace) -> int:
    """Write them, and say what to copy where."""
    folder = Path(given.out)
    if given.add_site is not None:
        for name in ("hosts", "sites", "helper_hosts", "days"):
            if getattr(given, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} is for new keys: leave it out with --add-site.")
        add_site_keys(folder, given.add_site)
        sites = [given.add_site]
    else:
        for name in ("hosts", "sites"):
            if getattr(given, name) is None:
                raise InputError(f"--{name} is missing: give it, with commas between names, or --add-site.")
        sites = _split(given.sites)
        days = _DAYS if given.days is None else given.days
        create_keys(folder, _split(given.hosts), sites, _split(given.helper_hosts or _LOOPBACK), days)
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
    terminal.print_pairs(
        f"{folder}: who is to have what; certificates end on {until:%Y-%m-%d}", everybody | places
    )
    return 0


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


_HELPER_PORT = 9443


def add_helper_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    command.add_argument("--key", required=True, metavar="FILE", help="secret; made if it is not there")
    command.add_argument("--store", required=True, metavar="FILE", help="what was counted; goes with the key")
    command.add_argument("--token", required=True, metavar="FILE", help="what the server shows to be served")
    command.add_argument("--certificate", metavar="FILE", help="by which the server knows this helper")
    command.add_argument("--certificate-key", metavar="FILE", help="the certificate's key")
    command.add_argument("--host", default="127.0.0.1", help="address to serve on [127.0.0.1]")
    command.add_argument(
        "--port", type=whole_number, default=_HELPER_PORT, metavar="N", help=f"[{_HELPER_PORT}]; 0: any"
    )
    command.add_argument(
        "--sites", metavar="FOLDER", help="public keys of sites (*.pub): only what they signed is added"
    )
    command.add_argument(
        "--minimum",
        type=whole_number,
        default=2,
        metavar="N",
        help="refuse runs with sums of fewer sites [2]",
    )
    command.add_argument(
        "--insecure", action="store_true", help="no certificate; for trials on this machine alone"
    )


def helper_command(given: argparse.Namespace) -> int:
    """Serve until told to stop."""
    try:
        from offbeat.deploy.helper import server as service  # has packages of its own
    except ImportError as error:
        raise InputError(
            f"the helper needs the package {error.name}: install it with pip install 'offbeat[deploy]'."
        ) from None
    from offbeat.deploy.helper.protocol import read_token
    from offbeat.deploy.helper.server import HelperService
    from offbeat.deploy.keys import read_site_keys

    if given.minimum < 2:
        raise InputError(f"a sum of {given.minimum} sites hides nobody: give --minimum 2 or more.")
    pair = [given.certificate, given.certificate_key]
    tls = None
    if given.insecure:
        if any(pair) or not is_loopback(given.host):
            raise InputError("--insecure is for trials on this machine: use 127.0.0.1, and no certificate.")
    elif None in pair:
        raise InputError("give --certificate and --certificate-key, such as offbeat keys makes them.")
    else:
        tls = TlsFiles(*map(Path, pair))
        check_tls(tls)
    token = read_token(Path(given.token))
    sites = None if given.sites is None else read_site_keys(Path(given.sites))
    with bind_socket(given.host, given.port) as socket:
        key, store = service.open_key_and_store(Path(given.key), Path(given.store))
        desk = HelperService(key, store, sites, given.minimum)
        try:
            _interrupt_on_signals()
            _announce_helper(given, socket.getsockname()[1], desk.info.key.hex(), sites)
            service.build_server(desk, token, tls).run(sockets=[socket])
        except KeyboardInterrupt:
            pass
        finally:
            desk.close()
    return 0


def _announce_helper(given: argparse.Namespace, port: int, key: str, sites: object) -> None:
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


def _interrupt_on_signals() -> None:
    """A service is stopped by SIGTERM as it is by Ctrl-C."""

    def stop(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SITE_STOPPING = b"\noffbeat: the site signs off; the same again stops at once.\n"


def add_join_options(command: argparse.ArgumentParser) -> None:
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
        "--minimum",
        type=whole_number,
        metavar="N",
        help="secure sums of so many sites or more, and nothing else",
    )
    command.add_argument("--insecure", action="store_true", help="talk in plain sight; for a first try")


def join_command(given: argparse.Namespace) -> int:
    """Check what can be checked, then serve."""
    own, link = _site_options(given), _superlink_of_site(given)
    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not there: install 'offbeat[deploy]'.")
    with stop_signals(_SITE_STOPPING) as stop:
        keep_joined(own, link, _print_message, stop, lambda facts: _print_ready(own, facts))
        if given.json:
            print(json.dumps({"name": own.name, "folder": str(own.folder), "superlink": link.address}))
        return 0


def _site_options(given: argparse.Namespace) -> SiteOptions:
    name = given.name or platform.node() or "site"
    if not _SITE_NAME.fullmatch(name):
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
    return SiteOptions(name, folder.absolute(), given.data, given.module, given.losses, *trust)


def _superlink_of_site(given: argparse.Namespace) -> SuperLinkAddress:
    parse_address(given.superlink)
    if given.insecure:
        if given.certificate or given.key:
            raise InputError(
                "--insecure goes with neither --certificate nor --key: leave it out, or both of them."
            )
        return SuperLinkAddress(given.superlink, None)
    if given.certificate is None:
        raise InputError("--certificate is missing, by which the server is known: give it, or --insecure.")
    certificate = Path(given.certificate)
    check_readable(certificate, "name the ca.crt that the server's keys came with")
    return SuperLinkAddress(given.superlink, certificate)


def _print_ready(own: SiteOptions, facts: dict[str, Any]) -> None:
    print(f"{own.name}: {facts['examples']:,} examples; what it keeps is in {own.folder}", flush=True)


def _print_message(sentence: str) -> None:
    print(f"offbeat: {sentence}", file=sys.stderr, flush=True)


_SUPERLINK_HOST, _SUPERLINK_PORT = "127.0.0.1", 8000
_SERVER_STOPPING = b"\noffbeat: the run is saved first; the same again stops at once.\n"
_EVENT_SENTENCES = {
    "joined": "{name} joined as client {client}",
    "left": "client {client} left",
    "aside": "client {client} failed, and gets no task for {seconds:.0f} s",
    "rejected": "rejected from node {node} ({reason}): {sentence}",
    "set_aside": "the upload of client {client} from version {version} is set aside",
    "unreachable": "the network is away: {sentence}",
    "reachable": "the network is reachable again",
}


def add_serve_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    command.add_argument("settings", metavar="SETTINGS", help="a TOML file; 'offbeat new' writes one")
    command.add_argument(
        "--out",
        type=folder_name,
        metavar="DIR",
        help="where to write; default: the next free folder in runs/",
    )
    command.add_argument("--resume", action="store_true", help="go on with the run in --out")
    command.add_argument(
        "--set-aside",
        action="store_true",
        help="with --resume: do not use the uploads that wait in the buffer",
    )
    command.add_argument(
        "--superlink", metavar="HOST:PORT", help="a SuperLink that runs on this machine already"
    )
    command.add_argument("--start", action="store_true", help="start a SuperLink, too")
    command.add_argument(
        "--host", metavar="HOST", help=f"with --start: where sites find it [{_SUPERLINK_HOST}]"
    )
    command.add_argument(
        "--port", type=whole_number, metavar="PORT", help=f"with --start [{_SUPERLINK_PORT}]"
    )
    command.add_argument(
        "--certificates", metavar="DIR", help="from 'offbeat keys': TLS, and sites with keys"
    )


def serve_command(given: argparse.Namespace) -> int:
    """Check everything, start what is to be started, and see the run through."""
    settings = Path(given.settings)
    plan = ServeConfig.read(settings)
    out = None if given.out is None else Path(given.out)
    if given.set_aside and not given.resume:
        raise InputError("--set-aside is for a run that goes on: give --resume and --out, or leave it out.")
    check_run_folder(out, given.resume, plan)
    certificates = None if given.certificates is None else find_certificates(Path(given.certificates))
    superlink = _superlink_of_server(given, certificates)
    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not there: install 'offbeat[deploy]'.")
    if out is not None and given.resume and (before := _finished_outcome(out)):
        print(f"offbeat: the run in {out} had finished already.", file=sys.stderr)
        return _finish_serve(given, plan, out, before, 0)
    if plan.secure is not None:
        read_token(plan.near(plan.secure.token))  # or complains
    stage = _check_stage(settings, plan, out if given.resume else None)
    if plan.page.port:
        check_port(plan.page.host, plan.page.port, "port of [watch]")
    if isinstance(superlink, ListenAddress):
        check_port(superlink.host, superlink.port)
    folder = claim_folder(Path("runs"), f"serve-{plan.experiment.algorithm}") if out is None else out
    with stop_signals(_SERVER_STOPPING) as stop, lock_run_folder(folder):
        if given.set_aside:
            (folder / SET_ASIDE_FILE).touch()
        else:
            (folder / SET_ASIDE_FILE).unlink(missing_ok=True)
        return _supervise(given, stage, folder, superlink, certificates, stop)


def _supervise(
    given: argparse.Namespace,
    stage: ServerSetup,
    folder: Path,
    superlink: SuperLinkAddress | ListenAddress,
    certificates: Certificates | None,
    stop: StopRequest,
) -> int:
    plan, seen = stage.config, _TerminalObserver()
    try:
        with running_backend(folder, Path(given.settings), superlink, certificates) as flower:
            _announce_server(plan, folder, superlink, certificates)
            outcome = Supervisor(folder, flower, seen, stop).run()
    except KeyboardInterrupt:
        outcome = ServeOutcome(None, stopped=True)
    return _finish_serve(given, plan, folder, outcome, stop.code)


def _superlink_of_server(
    given: argparse.Namespace, certificates: Certificates | None
) -> SuperLinkAddress | ListenAddress:
    if given.start == (given.superlink is not None):
        raise InputError("give --start to have a SuperLink started, or --superlink HOST:PORT, and not both.")
    if given.superlink is not None:
        if given.host is not None or given.port is not None:
            raise InputError("--host and --port are for --start: leave them out.")
        parse_address(given.superlink)
        return SuperLinkAddress(given.superlink, None if certificates is None else certificates.authority)
    host, port = given.host or _SUPERLINK_HOST, _SUPERLINK_PORT if given.port is None else given.port
    if not 0 < port < 65536:
        raise InputError(f"--port must be from 1 to 65535, not {port}.")
    if certificates is not None:
        check_loopback_certificate(certificates)
    elif not is_loopback(host):
        print("offbeat: without --certificates all travels in plain sight.", file=sys.stderr)
    return ListenAddress(host, port)


def _check_stage(settings: Path, plan: ServeConfig, resumed: Path | None) -> ServerSetup:
    """Everything that the server itself would complain of, with secure sums of the same form."""
    summation = None if plan.secure is None else InSecret(plan.secure.minimum)
    noise = None if resumed is None else resumed_noise(resumed)
    try:
        return set_up(plan, noise, summation)
    except InputError as error:
        raise InputError(f"{settings}: {error}") from None


def _finished_outcome(folder: Path) -> ServeOutcome | None:
    outcome = read_outcome(folder)
    return outcome if outcome and not outcome.stopped and outcome.error is None else None


def _announce_server(
    plan: ServeConfig,
    folder: Path,
    superlink: SuperLinkAddress | ListenAddress,
    certificates: Certificates | None,
) -> None:
    experiment = plan.experiment
    address = format_address(*superlink) if isinstance(superlink, ListenAddress) else superlink.address
    if isinstance(superlink, ListenAddress) and superlink.host in (
        "0.0.0.0",
        "::",
    ):  # which is nobody's address
        address = format_address(platform.node() or "SERVER", superlink.port)
    home = plan.code.module.partition(":")[0]
    trust = "--insecure" if certificates is None else "--certificate ca.crt --key key"
    lines = [
        f"{experiment.algorithm}: {experiment.rounds} server steps of {experiment.buffer} updates, "
        f"{experiment.clients} sites; the run is in {folder}",
        "a site joins by",
        f"  offbeat join --superlink {address} {trust} --data {home}:load --name NAME",
    ]
    if plan.page.port:
        lines.append(f"live page: http://{format_address(plan.page.host, plan.page.port)}/")
    print("\n".join(lines), flush=True)


class _TerminalObserver:
    """What a person sees while it runs."""

    def record(self, record: dict[str, Any]) -> None:
        words = [
            f"version {record['version']}",
            f"{record['time']:.0f} s",
            f"{record['client_updates']} updates",
        ]
        words += [
            f"{name} {terminal.format_number(record[name])}"
            for name in ("accuracy", "loss")
            if name in record
        ]
        words += [f"staleness {terminal.format_number(record['staleness_mean'])}"]
        if record.get("epsilon") is not None:
            words += [f"epsilon {terminal.format_number(record['epsilon'])}"]
        print("  ".join(words), flush=True)

    def event(self, event: dict[str, Any]) -> None:
        kind = event.get("event", "")
        stranger = kind == "left" and event.get("client") is None
        if kind in _EVENT_SENTENCES and not stranger and "times" not in event:
            self.message(_EVENT_SENTENCES[kind].format(**event))

    def message(self, sentence: str) -> None:
        print(f"offbeat: {sentence}", file=sys.stderr, flush=True)


def _finish_serve(
    given: argparse.Namespace, plan: ServeConfig, folder: Path, outcome: ServeOutcome, stopped: int
) -> int:
    """Say how it ended, and what to do next where that is not the end."""
    done = not outcome.stopped and outcome.error is None
    words = ["offbeat", "serve", given.settings, "--out", str(folder), "--resume"]
    for name in ("superlink", "host", "port", "certificates"):
        if getattr(given, name) is not None:
            words += [f"--{name}", str(getattr(given, name))]
    again = None if done else shlex.join(words + (["--start"] if given.start else []))
    model = folder / "model.safetensors"
    if outcome.error:
        print(f"offbeat: {outcome.error}", file=sys.stderr)
    elif outcome.ended:
        print(f"offbeat: {outcome.ended}", file=sys.stderr)
    if again:
        print(f"offbeat: what was saved is in {folder}; go on with:\n{again}", file=sys.stderr)
    if given.json:
        records = list(read_jsonl(folder, "records")) if (folder / "records.jsonl").exists() else []
        facts = outcome._asdict() | {
            "finished": done,
            "last": records[-1] if records else None,
            "model": str(model) if model.exists() else None,
            "out": str(folder),
            "resume": again,
            "settings": plan.settings(),
        }
        print(json.dumps(facts))
    elif model.exists():
        print(f"model: {model}")
    if outcome.error:
        return 1
    return stopped if outcome.stopped else 0
