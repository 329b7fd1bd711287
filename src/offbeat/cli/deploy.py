"""The commands of a deployment: `offbeat keys`, `serve`, `join` and `helper`."""

import argparse
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cryptography import x509

from offbeat.aggregate.secure import Secure
from offbeat.cli import terminal
from offbeat.cli.options import folder_name, whole_number
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.flower.supervisor import Backend, Supervisor
from offbeat.deploy.helper.protocol import read_token
from offbeat.deploy.keys import (
    Certificates,
    add_site_keys,
    create_keys,
    find_certificates,
    read_site_keys,
    renew_certificates,
    revoke_site_keys,
)
from offbeat.deploy.network import (
    TlsFiles,
    bind_socket,
    format_address,
    is_loopback,
    parse_address,
    tls_context,
)
from offbeat.deploy.server.run import (
    SET_ASIDE_FILE,
    ServeOutcome,
    check_run_folder,
    lock_run_folder,
    read_outcome,
    resumed_noise,
)
from offbeat.deploy.server.setup import ServerSetup, set_up
from offbeat.errors import InputError
from offbeat.privacy.secure.terms import DEFAULT_MINIMUM
from offbeat.training.folder import claim_folder, read_jsonl
from offbeat.training.progress import StopRequest, stop_signals

if TYPE_CHECKING:
    from offbeat.deploy.flower.site import SuperLinkAddress
    from offbeat.deploy.site.site import Site, SiteOptions


_DAYS = 365
_LOOPBACK = "localhost,127.0.0.1"


def add_keys_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat keys`."""
    command.add_argument(
        "--out", default="keys", type=folder_name, metavar="FOLDER", help="a new folder to write [keys]"
    )
    command.add_argument(
        "--hosts", metavar="HOST,...", help="names and addresses of the server, as sites reach it"
    )
    command.add_argument("--sites", metavar="NAME,...", help="the sites to make keys for")
    command.add_argument(
        "--helper-hosts",
        metavar="HOST,...",
        help=f"names and addresses of the helper of secure aggregation [{_LOOPBACK}]",
    )
    command.add_argument(
        "--days", type=whole_number, metavar="N", help=f"days for which certificates are valid [{_DAYS}]"
    )
    command.add_argument(
        "--add-site", metavar="NAME", help="make a key for one more site in an existing folder"
    )
    command.add_argument(
        "--revoke-site", metavar="NAME", help="move the key of a site out of an existing folder's sites"
    )
    command.add_argument("--renew", action="store_true", help="issue new certificates in an existing folder")


def keys_command(given: argparse.Namespace) -> int:
    """Write certificates and keys, and print which files go to which machine."""
    folder = Path(given.out)
    change = _change_of_keys(given)
    if change is not None:
        for name in ("hosts", "sites", "helper_hosts", *(() if given.renew else ("days",))):
            if getattr(given, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} is for new keys: leave it out with {change}.")
    if given.revoke_site is not None:
        revoke_site_keys(folder, given.revoke_site)
        if given.json:
            print(json.dumps({"folder": str(folder), "revoked": given.revoke_site}))
        else:
            print(f"delete sites/{given.revoke_site} at the server, which then refuses the key in seconds")
        return 0
    if given.add_site is not None:
        add_site_keys(folder, given.add_site)
        sites = [given.add_site]
    elif given.renew:
        renew_certificates(folder, _DAYS if given.days is None else given.days)
        sites = []
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
    site_files = {f"site {site}": f"sites/{site}: its key, and ca.crt to verify the server" for site in sites}
    recipients = {
        "server": "ca.crt, server.pem, server.key, helper.token and sites/*/key.pub, with the same layout",
        "helper": "helper.pem, helper.key, helper.token and sites/*/key.pub, for secure aggregation",
        "none": "ca.key: anyone who has it can impersonate the server",
    }
    if given.add_site is not None:
        public = f"sites/{given.add_site}/key.pub, beside those of the other sites"
        recipients = {
            "server": public,
            "helper": f"{public}; restart it afterwards",
        }
    if given.renew:
        recipients = {
            "server": "ca.crt and server.pem; a running server notices them within seconds",
            "helper": "helper.pem; restart it afterwards",
            "sites": "ca.crt, before the one that they have expires; the old one works until then",
        }
    terminal.print_pairs(
        f"{folder}: which files go where; certificates expire on {until:%Y-%m-%d}", recipients | site_files
    )
    return 0


def _change_of_keys(given: argparse.Namespace) -> str | None:
    """Return the option that changes an existing folder, of which there may be one."""
    options = ("add_site", "revoke_site", "renew")
    found = [f"--{name.replace('_', '-')}" for name in options if getattr(given, name)]
    if len(found) > 1:
        raise InputError(f"{' and '.join(found)} exclude each other: give one at a time.")
    return found[0] if found else None


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


_HELPER_PORT = 9443


def add_helper_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat helper`."""
    command.add_argument("--key", required=True, metavar="FILE", help="the secret key; made if missing")
    command.add_argument("--store", required=True, metavar="FILE", help="the counted reports, for this key")
    command.add_argument("--token", required=True, metavar="FILE", help="token of the server")
    command.add_argument("--certificate", metavar="FILE", help="the TLS certificate of this helper")
    command.add_argument("--certificate-key", metavar="FILE", help="the certificate's key")
    command.add_argument("--host", default="127.0.0.1", help="address to serve on [127.0.0.1]")
    command.add_argument(
        "--port", type=whole_number, default=_HELPER_PORT, metavar="N", help=f"[{_HELPER_PORT}]; 0: any"
    )
    command.add_argument(
        "--sites",
        metavar="FOLDER",
        help="public keys of sites (*.pub): only signed reports are added",
    )
    command.add_argument(
        "--minimum",
        type=whole_number,
        default=DEFAULT_MINIMUM,
        metavar="N",
        help=f"reject runs with sums over fewer sites [{DEFAULT_MINIMUM}]",
    )
    command.add_argument(
        "--max-participations",
        type=whole_number,
        metavar="N",
        help="the largest number of reports of a site in all runs together; needs --sites",
    )
    command.add_argument("--insecure", action="store_true", help="no certificate; for tests on this machine")


def helper_command(given: argparse.Namespace) -> int:
    """Run the helper until a signal stops it."""
    try:
        from offbeat.deploy.helper import server as service  # has packages of its own
    except ImportError as error:
        raise InputError(
            f"the helper needs the package {error.name}: install it with pip install 'offbeat[deploy]'."
        ) from None
    if given.minimum < 2:
        raise InputError(f"a sum over {given.minimum} sites hides no site: give --minimum 2 or more.")
    if given.max_participations is not None and (given.sites is None or given.max_participations < 1):
        raise InputError("--max-participations is at least 1, and needs --sites, by which sites are known.")
    pair = [given.certificate, given.certificate_key]
    tls = None
    if given.insecure:
        if any(pair) or not is_loopback(given.host):
            raise InputError("--insecure is for trials on this machine: use 127.0.0.1, and no certificate.")
    elif None in pair:
        raise InputError("give --certificate and --certificate-key, which 'offbeat keys' makes.")
    else:
        tls = TlsFiles(*map(Path, pair))
        tls_context(tls)
    token = read_token(Path(given.token))
    sites = None if given.sites is None else read_site_keys(Path(given.sites))
    with bind_socket(given.host, given.port) as socket:
        key, store = service.open_key_and_store(Path(given.key), Path(given.store))
        helper = service.HelperService(key, store, sites, given.minimum, given.max_participations)
        try:
            _interrupt_on_signals()
            _announce_helper(given, socket.getsockname()[1], helper.info.key.hex(), sites)
            service.build_server(helper, token, tls).run(sockets=[socket])
        except KeyboardInterrupt:
            pass
        finally:
            helper.close()
    return 0


def _announce_helper(given: argparse.Namespace, port: int, key: str, sites: object) -> None:
    scheme = "http" if given.insecure else "https"
    url = f"{scheme}://{given.host}:{port}"
    if given.json:
        print(json.dumps({"url": url, "key": key, "signed": sites is not None}), flush=True)
        return
    print(
        f"the helper listens at {url}; its public key, which sites need, is in {given.key}.pub",
        flush=True,
    )
    if sites is None:
        print(
            "without --sites the helper cannot detect reports that the server made up",
            flush=True,
        )


def _interrupt_on_signals() -> None:
    """Let SIGTERM stop the service like an interrupt."""

    def stop(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SITE_STOPPING = b"\noffbeat: the site is disconnecting; interrupt again to stop at once.\n"


def add_join_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat join`."""
    command.add_argument("--superlink", required=True, metavar="HOST:PORT", help="address of the server")
    command.add_argument(
        "--task", metavar="PACKAGE.MODULE:FUNCTION", help="returns the task, an offbeat.LearningTask"
    )
    command.add_argument("--name", metavar="NAME", help="of the site [this machine's]")
    command.add_argument(
        "--folder", metavar="DIR", help="for the state of the site [a folder of this user, by name]"
    )
    command.add_argument("--certificate", metavar="FILE", help="ca.crt, which identifies the server")
    command.add_argument("--key", metavar="FILE", help="this site's private key")
    command.add_argument(
        "--helper-key",
        metavar="FILE",
        help="the public key of the only helper to trust; needed for secure aggregation, and kept",
    )
    command.add_argument(
        "--minimum",
        type=whole_number,
        metavar="N",
        help=f"accept only secure aggregation over at least N sites [{DEFAULT_MINIMUM}]",
    )
    command.add_argument(
        "--once", action="store_true", help="end when the run is over, instead of waiting for the next run"
    )
    command.add_argument("--insecure", action="store_true", help="no encryption; for trying it out")


def join_command(given: argparse.Namespace) -> int:
    """Check the options, then run the site."""
    own, link = _site_options(given), _superlink_of_site(given)
    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not installed: install 'offbeat[deploy]'.")
    from offbeat.deploy.flower.site import run_site  # imports Flower, which takes seconds

    with stop_signals(_SITE_STOPPING) as stop:
        busy = run_site(own, link, terminal.notify, stop, lambda site: _print_ready(own, site))
        if given.json:
            print(json.dumps({"name": own.name, "folder": str(own.folder), "superlink": link.address}))
        if busy is True:  # Python cannot end in order while a thread computes
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        return 0


def _site_options(given: argparse.Namespace) -> "SiteOptions":
    from offbeat.deploy.site.site import SiteOptions, site_folder

    name = given.name or platform.node() or "site"
    if not _SITE_NAME.fullmatch(name):
        raise InputError(
            f"'{name}' cannot be the name of a site: use letters, digits, dots, hyphens and underscores, a "
            "letter or digit first, and 100 of them at most."
        )
    if given.task is None:
        raise InputError("--task is missing: give package.module:function, which returns the task.")
    folder = Path(given.folder) if given.folder else site_folder(name)
    key, helper_key = (None if path is None else Path(path) for path in (given.key, given.helper_key))
    if key is not None:
        _check_readable(key, "name the site's private key")
    if helper_key is not None:
        _check_readable(helper_key, "name the helper's public key")
    if given.minimum is not None and given.minimum < 2:
        raise InputError(f"a secure sum over {given.minimum} sites hides no site: give --minimum 2 or more.")
    return SiteOptions(name, folder.absolute(), given.task, key, helper_key, given.minimum, given.once)


def _check_readable(path: Path, remedy: str) -> None:
    """Raise an `InputError` if a file does not exist or may not be read."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): {remedy}.") from None


def _superlink_of_site(given: argparse.Namespace) -> "SuperLinkAddress":
    from offbeat.deploy.flower.site import SuperLinkAddress

    parse_address(given.superlink)
    if given.insecure:
        if given.certificate or given.key:
            raise InputError(
                "--insecure excludes --certificate and --key: leave it out, or leave both of them out."
            )
        return SuperLinkAddress(given.superlink, None)
    if given.certificate is None:
        raise InputError("--certificate is missing, which identifies the server: give it, or --insecure.")
    certificate = Path(given.certificate)
    _check_readable(certificate, "name the ca.crt that was made with the server's keys")
    return SuperLinkAddress(given.superlink, certificate)


def _print_ready(own: "SiteOptions", site: "Site") -> None:
    print(f"{own.name}: {site.examples:,} examples; its state is in {own.folder}", flush=True)


_SUPERLINK_HOST, _SUPERLINK_PORT = "127.0.0.1", 8000
_SERVER_STOPPING = b"\noffbeat: saving the run; interrupt again to stop at once.\n"
_EVENT_SENTENCES = {
    "joined": "{name} joined as client {client}",
    "left": "client {client} left",
    "aside": "client {client} failed and is not given a task for {seconds:.0f} s",
    "rejected": "rejected from node {node} ({reason}): {sentence}",
    "set_aside": "the upload of client {client} from version {version} is set aside",
    "unreachable": "the network is unreachable: {sentence}",
    "reachable": "the network is reachable again",
    "helper_away": "{sentence}",
    "helper_back": "the helper answers again",
    "notice": "{sentence}",
}


def add_serve_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat serve`."""
    command.add_argument("settings", metavar="SETTINGS", help="a TOML file; 'offbeat new' writes one")
    command.add_argument(
        "--out",
        type=folder_name,
        metavar="DIR",
        help="where to write; default: the next free folder in runs/",
    )
    command.add_argument("--resume", action="store_true", help="resume the run in --out")
    command.add_argument(
        "--set-aside",
        action="store_true",
        help="with --resume: do not use the uploads that wait in the buffer",
    )
    command.add_argument("--start", action="store_true", help=argparse.SUPPRESS)  # was needed once
    command.add_argument("--host", metavar="HOST", help=f"the address for sites [{_SUPERLINK_HOST}]")
    command.add_argument("--port", type=whole_number, metavar="PORT", help=f"their port [{_SUPERLINK_PORT}]")
    command.add_argument(
        "--certificates", metavar="DIR", help="from 'offbeat keys': TLS, and sites with keys"
    )


def serve_command(given: argparse.Namespace) -> int:
    """Check the settings, start the processes, and supervise the run."""
    settings = Path(given.settings)
    plan = ServeConfig.read(settings)
    out = None if given.out is None else Path(given.out)
    if given.set_aside and not given.resume:
        raise InputError("--set-aside is for a resumed run: give --resume and --out, or leave it out.")
    check_run_folder(out, given.resume, plan)
    certificates = None if given.certificates is None else find_certificates(Path(given.certificates))
    listen = _listen_address(given, certificates)
    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not installed: install 'offbeat[deploy]'.")
    if out is not None and given.resume and (before := _finished_outcome(out)):
        print(f"offbeat: the run in {out} had finished already.", file=sys.stderr)
        return _finish_serve(given, plan, out, before, 0)
    if plan.secure is not None:
        read_token(plan.near(plan.secure.token))  # raises if it cannot be read
    setup = _check_setup(settings, plan, out if given.resume else None)
    if plan.page.port:
        bind_socket(plan.page.host, plan.page.port, "port of [watch]").close()  # or raises
    bind_socket(*listen).close()
    folder = claim_folder(Path("runs"), f"serve-{plan.experiment.algorithm}") if out is None else out
    with stop_signals(_SERVER_STOPPING) as stop, lock_run_folder(folder):
        if given.set_aside:
            (folder / SET_ASIDE_FILE).touch()
        else:
            (folder / SET_ASIDE_FILE).unlink(missing_ok=True)
        return _supervise(given, setup, folder, listen, certificates, stop)


def _supervise(
    given: argparse.Namespace,
    setup: ServerSetup,
    folder: Path,
    listen: tuple[str, int],
    certificates: Certificates | None,
    stop: StopRequest,
) -> int:
    plan, observer = setup.config, _TerminalObserver()
    try:
        with Backend(folder, Path(given.settings), listen, certificates) as flower:
            _announce_server(plan, folder, listen, certificates)
            outcome = Supervisor(folder, flower, observer, stop).run()
    except KeyboardInterrupt:
        outcome = ServeOutcome(None, stopped=True)
    return _finish_serve(given, plan, folder, outcome, stop.code)


def _listen_address(given: argparse.Namespace, certificates: Certificates | None) -> tuple[str, int]:
    host, port = given.host or _SUPERLINK_HOST, _SUPERLINK_PORT if given.port is None else given.port
    if not 0 < port < 65536:
        raise InputError(f"--port must be from 1 to 65535, not {port}.")
    if certificates is None and not is_loopback(host):
        print("offbeat: without --certificates connections are not encrypted.", file=sys.stderr)
    return host, port


def _check_setup(settings: Path, plan: ServeConfig, resumed: Path | None) -> ServerSetup:
    """The setup of the server with secure aggregation in one process; raises as the server would."""
    summation = None if plan.secure is None else Secure(plan.secure.minimum)
    noise = None if resumed is None else resumed_noise(resumed)
    try:
        setup = set_up(plan, noise, summation)
        if plan.experiment.standardise:
            setup.moments()  # or raises
        return setup
    except InputError as error:
        raise InputError(f"{settings}: {error}") from None


def _finished_outcome(folder: Path) -> ServeOutcome | None:
    outcome = read_outcome(folder)
    return outcome if outcome and not outcome.stopped and outcome.error is None else None


def _announce_server(
    plan: ServeConfig, folder: Path, listen: tuple[str, int], certificates: Certificates | None
) -> None:
    experiment, (host, port) = plan.experiment, listen
    address = format_address(platform.node() or "SERVER" if host in ("0.0.0.0", "::") else host, port)
    trust = "--insecure" if certificates is None else "--certificate ca.crt --key key"
    lines = [
        f"{experiment.algorithm}: {experiment.rounds} server steps of {experiment.buffer} updates, "
        f"{experiment.clients} sites; the run is in {folder}",
        "a site joins by",
        f"  offbeat join --superlink {address} {trust} --task {plan.code.function} --name NAME",
    ]
    if plan.page.port:
        lines.append(f"live page: http://{format_address(plan.page.host, plan.page.port)}/")
    print("\n".join(lines), flush=True)


class _TerminalObserver:
    """Prints records and events of a running deployment."""

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
        unknown_client = kind == "left" and event.get("client") is None
        if kind in _EVENT_SENTENCES and not unknown_client and "times" not in event:
            self.message(_EVENT_SENTENCES[kind].format(**event))

    def message(self, sentence: str) -> None:
        terminal.notify(sentence)


def _finish_serve(
    given: argparse.Namespace, plan: ServeConfig, folder: Path, outcome: ServeOutcome, stopped: int
) -> int:
    """Print how the run ended and, if it can be resumed, the command for that."""
    done = not outcome.stopped and outcome.error is None
    words = ["offbeat", "serve", given.settings, "--out", str(folder), "--resume"]
    for name in ("host", "port", "certificates"):
        if getattr(given, name) is not None:
            words += [f"--{name}", str(getattr(given, name))]
    again = None if done else shlex.join(words)
    model = folder / "model.safetensors"
    if outcome.error:
        print(f"offbeat: {outcome.error}", file=sys.stderr)
    elif outcome.ended:
        print(f"offbeat: {outcome.ended}", file=sys.stderr)
    if again:
        print(f"offbeat: what was saved is in {folder}; resume with:\n{again}", file=sys.stderr)
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
