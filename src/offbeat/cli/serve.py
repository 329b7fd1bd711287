"""`offbeat serve`: one deployed run, from its settings to its model."""

import argparse
import importlib.util
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from offbeat.aggregate.secure import Secure as InSecret
from offbeat.cli import show
from offbeat.cli.numbers import place, whole
from offbeat.cli.process import Stop, stop_signals
from offbeat.deploy.flower_home import Link
from offbeat.deploy.flower_link import Started
from offbeat.deploy.flower_processes import Certificates, check_own, find_certificates
from offbeat.deploy.flower_supervised import held
from offbeat.deploy.helper_frames import read_token
from offbeat.deploy.outcome import SET_ASIDE, Outcome, read_outcome
from offbeat.deploy.plan import Plan
from offbeat.deploy.ports import check_free as check_port
from offbeat.deploy.ports import is_loopback, joined, parse_address
from offbeat.deploy.stage import Stage, set_up
from offbeat.deploy.starting import check_folder, hold, resumed_noise
from offbeat.deploy.supervise import Supervisor
from offbeat.errors import InputError
from offbeat.folder import claim, read_lines

_HOST, _PORT = "127.0.0.1", 8000
_WAIT = b"\noffbeat: the run is saved first; the same again stops at once.\n"
_TOLD = {
    "joined": "{name} joined as client {client}",
    "left": "client {client} left",
    "aside": "client {client} failed, and gets no task for {seconds:.0f} s",
    "rejected": "rejected from node {node} ({reason}): {sentence}",
    "set_aside": "the upload of client {client} from version {version} is set aside",
    "unreachable": "the network is away: {sentence}",
    "reachable": "the network is back",
}


def add_options(command: argparse.ArgumentParser) -> None:
    """The words of this command."""
    command.add_argument("settings", metavar="SETTINGS", help="a TOML file; 'offbeat new' writes one")
    command.add_argument(
        "--out", type=place, metavar="DIR", help="where to write; default: the next free folder in runs/"
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
    command.add_argument("--host", metavar="HOST", help=f"with --start: where sites find it [{_HOST}]")
    command.add_argument("--port", type=whole, metavar="PORT", help=f"with --start [{_PORT}]")
    command.add_argument(
        "--certificates", metavar="DIR", help="from 'offbeat keys': TLS, and sites with keys"
    )


def serve(given: argparse.Namespace) -> int:
    """Check everything, start what is to be started, and see the run through."""
    settings = Path(given.settings)
    plan = Plan.read(settings)
    out = None if given.out is None else Path(given.out)
    if given.set_aside and not given.resume:
        raise InputError("--set-aside is for a run that goes on: give --resume and --out, or leave it out.")
    check_folder(out, given.resume, plan)
    certificates = None if given.certificates is None else find_certificates(Path(given.certificates))
    superlink = _superlink(given, certificates)
    if importlib.util.find_spec("flwr") is None:
        raise InputError("Flower is not there: install 'offbeat[deploy]'.")
    if out is not None and given.resume and (before := _finished(out)):
        print(f"offbeat: the run in {out} had finished already.", file=sys.stderr)
        return _end(given, plan, out, before, 0)
    if plan.secure is not None:
        read_token(plan.near(plan.secure.token))  # or complains
    stage = _check_stage(settings, plan, out if given.resume else None)
    if plan.page.port:
        check_port(plan.page.host, plan.page.port, "port of [watch]")
    if isinstance(superlink, Started):
        check_port(superlink.host, superlink.port)
    folder = claim(Path("runs"), f"serve-{plan.experiment.algorithm}") if out is None else out
    with stop_signals(_WAIT) as stop, hold(folder):
        if given.set_aside:
            (folder / SET_ASIDE).touch()
        else:
            (folder / SET_ASIDE).unlink(missing_ok=True)
        return _supervise(given, stage, folder, superlink, certificates, stop)


def _supervise(
    given: argparse.Namespace,
    stage: Stage,
    folder: Path,
    superlink: Link | Started,
    certificates: Certificates | None,
    stop: Stop,
) -> int:
    plan, seen = stage.plan, _Shown()
    try:
        with held(folder, Path(given.settings), superlink, certificates) as flower:
            _announce(plan, folder, superlink, certificates)
            outcome = Supervisor(folder, flower, seen, stop).watch()
    except KeyboardInterrupt:
        outcome = Outcome(None, stopped=True)
    return _end(given, plan, folder, outcome, stop.code)


def _superlink(given: argparse.Namespace, certificates: Certificates | None) -> Link | Started:
    if given.start == (given.superlink is not None):
        raise InputError("give --start to have a SuperLink started, or --superlink HOST:PORT, and not both.")
    if given.superlink is not None:
        if given.host is not None or given.port is not None:
            raise InputError("--host and --port are for --start: leave them out.")
        parse_address(given.superlink)
        return Link(given.superlink, None if certificates is None else certificates.authority)
    host, port = given.host or _HOST, _PORT if given.port is None else given.port
    if not 0 < port < 65536:
        raise InputError(f"--port must be from 1 to 65535, not {port}.")
    if certificates is not None:
        check_own(certificates)
    elif not is_loopback(host):
        print("offbeat: without --certificates all travels in plain sight.", file=sys.stderr)
    return Started(host, port)


def _check_stage(settings: Path, plan: Plan, resumed: Path | None) -> Stage:
    """Everything that the server itself would complain of, with secure sums of the same form."""
    summation = None if plan.secure is None else InSecret(plan.secure.minimum)
    noise = None if resumed is None else resumed_noise(resumed)
    try:
        return set_up(plan, noise, summation)
    except InputError as error:
        raise InputError(f"{settings}: {error}") from None


def _finished(folder: Path) -> Outcome | None:
    outcome = read_outcome(folder)
    return outcome if outcome and not outcome.stopped and outcome.error is None else None


def _announce(plan: Plan, folder: Path, superlink: Link | Started, certificates: Certificates | None) -> None:
    experiment = plan.experiment
    address = joined(*superlink) if isinstance(superlink, Started) else superlink.address
    if isinstance(superlink, Started) and superlink.host in ("0.0.0.0", "::"):  # which is nobody's address
        address = joined(platform.node() or "SERVER", superlink.port)
    home = plan.code.module.partition(":")[0]
    trust = "--insecure" if certificates is None else "--certificate ca.crt --key key"
    lines = [
        f"{experiment.algorithm}: {experiment.rounds} server steps of {experiment.buffer} updates, "
        f"{experiment.clients} sites; the run is in {folder}",
        "a site joins by",
        f"  offbeat join --superlink {address} {trust} --data {home}:load --name NAME",
    ]
    if plan.page.port:
        lines.append(f"live page: http://{joined(plan.page.host, plan.page.port)}/")
    print("\n".join(lines), flush=True)


class _Shown:
    """What a person sees while it runs."""

    def record(self, record: dict[str, Any]) -> None:
        words = [f"version {record['version']}", f"{record['time']:.0f} s", f"{record['trips']} updates"]
        words += [f"{name} {show.figure(record[name])}" for name in ("accuracy", "loss") if name in record]
        words += [f"staleness {show.figure(record['staleness_mean'])}"]
        if record.get("epsilon") is not None:
            words += [f"epsilon {show.figure(record['epsilon'])}"]
        print("  ".join(words), flush=True)

    def event(self, event: dict[str, Any]) -> None:
        kind = event.get("event", "")
        stranger = kind == "left" and event.get("client") is None
        if kind in _TOLD and not stranger and "times" not in event:
            self.say(_TOLD[kind].format(**event))

    def say(self, sentence: str) -> None:
        print(f"offbeat: {sentence}", file=sys.stderr, flush=True)


def _end(given: argparse.Namespace, plan: Plan, folder: Path, outcome: Outcome, stopped: int) -> int:
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
        records = list(read_lines(folder, "records")) if (folder / "records.jsonl").exists() else []
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
