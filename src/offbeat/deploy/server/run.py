"""One run at the server: the loop of a simulation, with sites at the other end of a transport.

The run's folder also records how the run ended (`outcome.json`); a file `stop` in it asks the server to save
and end. Sites are informed when the server ends.
"""

import contextlib
import dataclasses
import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from filelock import FileLock, Timeout

from offbeat.aggregate.mean import PlainSum
from offbeat.core import AnyAlgorithm
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.monitor.http import serve_page
from offbeat.deploy.monitor.observer import Monitor, Observer
from offbeat.deploy.monitor.state import EventFields, EventName, RunInfo
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.transport import Transport, TransportError
from offbeat.deploy.server.exchange import SessionConfig
from offbeat.deploy.server.registry import ClientRegistry
from offbeat.deploy.server.session import DeployedEngine, StopRequested, max_upload_bytes
from offbeat.deploy.server.setup import ServerSetup, secure_summation, set_up
from offbeat.errors import DiskFullError, DivergedError, InputError, naming_settings
from offbeat.files import is_disk_full, replace_file, unwritable
from offbeat.nn.problem import Problem
from offbeat.training import checkpoint, settings_file
from offbeat.training.build import resolved_settings
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.experiment import is_deployment
from offbeat.training.folder import RunFolder, check_free, read_jsonl
from offbeat.training.runner import RunOutcome, resumed_outcome, run_experiment, saved_model
from offbeat.training.standardise import Scaling, sum_over_clients
from offbeat.training.stopping import SETTINGS as STOP_SETTINGS


def check_run_folder(folder: Path | None, resume: bool, config: ServeConfig) -> None:
    """Refuse a folder without a run to resume, with another run, or with a run of other settings."""
    if folder is None:
        if resume:
            raise InputError("--resume needs --out, the folder of the run to resume.")
        return
    if not resume:
        if (folder / "settings.json").exists():
            raise InputError(f"{folder} already holds a run: name another --out, or add --resume.")
        check_free(folder)
        return
    if (folder / "settings.json").exists():  # otherwise it was stopped before it began
        if not is_deployment(settings_file.read(folder, verify=True)):
            raise InputError(f"the run in {folder} is a simulation: resume it with 'offbeat run'.")
        with naming_settings(lambda name: "--out" if name == "out" else name):
            settings_file.compare(folder, config.settings())
    elif not (folder / "flower").is_dir():
        raise InputError(f"{folder} contains no run to resume: leave out --resume to start one there.")


def resumed_noise(folder: Path) -> float | None:
    """The noise multiplier that an earlier start of the run was calibrated to."""
    if not (folder / "settings.json").exists():
        return None
    noise = settings_file.read(folder, verify=True).get("resolved", {}).get("noise")
    return None if noise is None else float(noise)


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Let only one command at a time supervise a run's folder."""
    own = folder / "flower"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)  # the SuperLink's log may name sites
    lock = FileLock(own / "lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another 'offbeat serve' supervises {folder}: wait for it, or name another --out."
        ) from None
    with held:
        yield


STOP_FILE = "stop"  # asks the server to save and end
SET_ASIDE_FILE = "set-aside"  # asks a resumed server not to use the uploads in its buffer, once
_OUTCOME_FILE = "outcome.json"
_PLAN_FILE = "plan.json"  # what sites are asked for before training


class ServeOutcome(NamedTuple):
    """How a run ended; without `ended`, `error` and `stopped` it took all its steps."""

    version: int | None  # the last one that was saved
    ended: str | None = None  # why it ended before the last version
    error: str | None = None  # what went wrong, in a sentence
    stopped: bool = False  # on request; it can be resumed
    spent: dict[str, Any] | None = None  # the privacy cost, if the run is private


def write_outcome(folder: Path, outcome: ServeOutcome) -> None:
    """Write the outcome, which is the last thing that a server does."""
    _write_json(folder / _OUTCOME_FILE, outcome._asdict())


def read_outcome(folder: Path) -> ServeOutcome | None:
    """The outcome, or None while there is none."""
    facts = _read_json(folder / _OUTCOME_FILE)
    return None if facts is None else ServeOutcome(**facts)


def remove_outcome(folder: Path) -> None:
    """Remove the outcome of an earlier server."""
    (folder / _OUTCOME_FILE).unlink(missing_ok=True)


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    replace_file(path, json.dumps(facts, indent=1).encode())


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return facts


def write_model(folder: Path, algorithm: AnyAlgorithm, problem: Problem) -> None:
    """Write the model of the last checkpoint as safetensors; the averaged one if the run averages."""
    saved = checkpoint.load(folder / "checkpoint" / "state.safetensors", problem.device)
    module = problem.module(*saved_model(saved, algorithm, problem))
    facts = {"version": saved.facts["version"]}
    checkpoint.save(folder / "model.safetensors", Checkpoint(facts, dict(module.state_dict())))


_LOG = logging.getLogger("offbeat")
_LOCK_TIMEOUT = 90.0  # seconds for an earlier server to end
_END_TIMEOUT, _END_POLL = 5.0, 0.1  # seconds for sites to answer that they know of the end


class ServeRequest(NamedTuple):
    """What a server is started with."""

    settings: Path
    folder: Path
    resume: bool
    authenticated: bool  # whether nodes have keys
    sites: Path | None = None  # a folder with the public keys of sites, by name


def serve(
    request: ServeRequest,
    connect: Callable[[int], Transport],
    sleep: Callable[[float], None] = time.sleep,
) -> ServeOutcome:
    """Run until the end, a stop or a failure, and write the outcome.

    `connect` makes the transport, given the most bytes that an upload may have. `sleep` waits so many
    seconds, or until an upload has arrived. A crash and a full disk leave no outcome: the run can be resumed.
    """
    request.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(request.folder / "server.lock").acquire(timeout=_LOCK_TIMEOUT):
        remove_outcome(request.folder)
        try:
            outcome = _serve(request, connect, sleep)
        except DiskFullError as error:
            return ServeOutcome(None, error=str(error))
        except InputError as error:
            outcome = ServeOutcome(None, error=str(error))
        except OSError as error:  # of the disk: errors of the network are the transport's
            outcome = ServeOutcome(None, error=str(unwritable(Path(error.filename or request.folder), error)))
            if is_disk_full(error):
                return outcome
        for name in (STOP_FILE, SET_ASIDE_FILE):
            (request.folder / name).unlink(missing_ok=True)
        write_outcome(request.folder, outcome)
        return outcome


def _serve(
    request: ServeRequest, connect: Callable[[int], Transport], sleep: Callable[[float], None]
) -> ServeOutcome:
    config = ServeConfig.read(request.settings)
    known = settings_file.read(request.folder, verify=True).get("resolved", {}) if request.resume else {}
    _check_registry(config, request)
    run_id = known.get("run") or secrets.token_hex(16)
    stop = (request.folder / STOP_FILE).exists
    if config.experiment.clip is not None:
        (request.folder / "events.jsonl").touch(mode=0o600)  # it shows who contributed when
    with contextlib.closing(Monitor(_run_info(request.folder, config), request.folder)) as monitor:
        summation = secure_summation(config, bytes.fromhex(run_id), monitor)
        setup = set_up(config, known.get("noise"), summation)
        session = _session_config(config, setup, request.authenticated)
        scaling = Scaling.from_settings({"resolved": known})
        limit = max_upload_bytes(setup.algorithm, setup.problem, session)
        if config.experiment.standardise:
            limit = max(limit, max_upload_bytes(setup.moments(), setup.problem, session))
        engine = DeployedEngine(
            transport := connect(limit),
            setup.problem,
            session,
            request.folder,
            monitor,
            stop=stop,
            sleep=sleep,
            sites=request.sites,
            set_aside=request.folder / SET_ASIDE_FILE if request.resume else None,
        )
        if config.experiment.standardise:
            try:
                scaling = scaling or agree_on_scaling(config, setup, engine)
            except StopRequested:
                announce_end(transport, outcome := ServeOutcome(None, stopped=True))
                return outcome
            setup = setup.standardised(scaling)
            session = dataclasses.replace(session, plan=setup.site_plan)
            engine = dataclasses.replace(engine, problem=setup.problem, config=session)
        if request.resume:
            opened = RunFolder.resume(request.folder, config.settings())
            changed = {name: getattr(config.experiment, name) for name in STOP_SETTINGS}
            settings_file.revise(request.folder, **changed)
        else:
            resolved = resolved_settings(config.experiment, setup.run_spec(engine))
            resolved |= {"noise": setup.noise, "run": run_id}
            opened = RunFolder.begin(request.folder, config.settings() | {"resolved": resolved})
        shutil.rmtree(request.folder / "prepare", ignore_errors=True)  # now that the settings have its result
        with opened as folder, _live_page(config, monitor):
            if request.resume:
                monitor.recall(read_jsonl(request.folder, "records"))
            if folder.notice is not None:
                monitor.tell("notice", sentence=folder.notice)
            outcome = _train(setup, engine, folder, monitor, stop)
            monitor.tell("ended", sentence=outcome.ended or outcome.error)
            announce_end(transport, outcome)
            if folder.version is not None:
                write_model(request.folder, setup.algorithm, setup.problem)
            return outcome


class _PreparationObserver(NamedTuple):
    """Passes on what concerns an operator; the counts of a monitor are of training alone."""

    observer: Observer

    def tell(self, event: EventName, /, **fields: Unpack[EventFields]) -> None:
        if event in ("rejected", "unreachable", "reachable"):
            self.observer.tell(event, **fields)


def agree_on_scaling(config: ServeConfig, setup: ServerSetup, training: DeployedEngine) -> Scaling:
    """Wait for the sites, and have them agree on the mean and the standard deviation of each feature.

    A server that ended before all sites had answered continues with the answers that it has.
    """
    method, folder, observer = setup.moments(), training.folder / "prepare", training.observer
    sites, plan = config.prepare.sites or config.experiment.clients, setup.site_plan
    plan = {name: value for name, value in plan.items() if name not in ("standardise", "compress")}
    plan["prepare"] = [method.features, method.classes]
    before = _read_json(folder / _PLAN_FILE)
    if before is None or before["plan"] != json.loads(json.dumps(plan)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        before = {"plan": plan, "run": secrets.token_hex(16)}
        _write_json(folder / _PLAN_FILE, before)
    engine = dataclasses.replace(
        training,
        config=dataclasses.replace(training.config, plan=plan, clients=sites),
        folder=folder,
        observer=_PreparationObserver(observer),
        set_aside=None,
        roster=training.folder / "roster.json",
    )
    run_id = bytes.fromhex(before["run"])
    summation = secure_summation(config, run_id, observer, limbs=True) or PlainSum()
    agreed = f"on the scales of {method.features} features."
    observer.tell("notice", sentence=f"waiting for {sites} sites to agree {agreed}")
    limbs = sum_over_clients(method, engine, summation, config.experiment.seed)
    observer.tell("notice", sentence=f"{sites} sites agreed {agreed}")
    return Scaling.of(limbs, method.features)


def announce_end(
    transport: Transport,
    outcome: ServeOutcome,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Tell all connected sites that the server ends, and wait a few seconds for their answers."""
    finished = not outcome.stopped and outcome.error is None
    if finished:
        sentence = f"the run is over after {outcome.version} server steps."
    else:
        sentence = "the server saved its run and ended; it can be resumed."
    header = messages.encode_message(messages.RunEnd(finished, sentence))
    with contextlib.suppress(TransportError):
        nodes = transport.nodes()
        waiting = {transport.push(node, "end", header, b"", _END_TIMEOUT) for node in nodes}
        deadline = clock() + _END_TIMEOUT
        while waiting and clock() < deadline:
            waiting -= {reply.message_id for reply in transport.pull(sorted(waiting))}
            sleep(_END_POLL if waiting else 0.0)


def _train(
    setup: ServerSetup, engine: DeployedEngine, folder: RunFolder, monitor: Monitor, stop: Callable[[], bool]
) -> ServeOutcome:
    experiment = setup.experiment
    evaluated = setup.test is not None
    before = resumed_outcome(folder, experiment, setup.task.goals, evaluated=evaluated)
    if before.ended or folder.version == experiment.rounds:
        return _outcome(folder, before)
    outcome: RunOutcome | None = None
    error, stopped = None, False
    try:
        for progress in run_experiment(experiment, setup.run_spec(engine), folder, save_every=1, stop=stop):
            outcome = progress.outcome
            monitor.stepped(progress)
            monitor.tell("saved", version=progress.version)
            if (epsilon := (progress.record or {}).get("epsilon")) is not None:
                monitor.tell("spent", epsilon=epsilon)
    except StopRequested:
        stopped = True
    except DiskFullError:
        raise
    except DivergedError as failure:
        error = _divergence_advice(str(failure))
    except InputError as failure:
        error = str(failure)
    if outcome is None:
        return ServeOutcome(folder.version, error=error, stopped=stopped)
    finished = outcome.ended is not None or folder.version == experiment.rounds
    return _outcome(folder, outcome)._replace(error=error, stopped=not finished and error is None)


def _outcome(folder: RunFolder, outcome: RunOutcome) -> ServeOutcome:
    spent = outcome.spent.as_json() if outcome.spent else None
    return ServeOutcome(folder.version, outcome.ended, spent=spent)


def _divergence_advice(diverged: str) -> str:
    """What happened, and what can still be done, since the settings of a run cannot change."""
    return (
        f"{diverged.removesuffix('.').removesuffix(': lower the rates')}: resume it with --set-aside to "
        "continue without the uploads in its buffer, or start another run with lower learning rates."
    )


def _check_registry(config: ServeConfig, request: ServeRequest) -> None:
    """Refuse to resume if a site could become another client, or be impersonated although it has a key."""
    path = request.folder / "roster.json"
    members = ClientRegistry(path, config.experiment.clients, bound=False).members
    lines = read_jsonl(request.folder, "trace") if (request.folder / "trace.jsonl").exists() else ()
    clients = {int(task[0]) for line in lines for task in line["tasks"]}
    uploads = (request.folder / "journal").glob("*.upload")  # a run may have some before its first step
    clients |= {int(path.name.split("-")[0]) for path in uploads if path.name.split("-")[0].isdecimal()}
    if not clients <= members.keys():
        raise InputError(f"{path} does not have all clients of this run: restore it from a backup.")
    keyed = any(member.key is not None for member in members.values())
    if keyed and not request.authenticated and config.network.bind_names is None:
        raise InputError(
            "the sites of this run are known by their keys: resume it with --certificates, or set "
            "bind_names = false in [network] if any node may use their names from now on."
        )


def _session_config(config: ServeConfig, setup: ServerSetup, authenticated: bool) -> SessionConfig:
    network = config.network
    return SessionConfig(
        setup.site_plan,
        config.experiment.clients,
        network,
        authenticated if network.bind_names is None else network.bind_names,
    )


def _run_info(folder: Path, config: ServeConfig) -> RunInfo:
    names = [each.name for each in dataclasses.fields(RunInfo) if each.name != "run"]
    return RunInfo(folder.absolute().name, *(getattr(config.experiment, name) for name in names))


@contextmanager
def _live_page(config: ServeConfig, monitor: Monitor) -> Iterator[None]:
    """The live page, if it is configured; the run continues without it if it cannot be served."""
    with contextlib.ExitStack() as stack:
        try:
            if config.page.port:
                stack.enter_context(serve_page(monitor, config.page.port, config.page.host))
        except InputError as error:
            _LOG.warning("there is no live page: %s", error)
        yield
