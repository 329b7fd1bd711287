"""One run at the server: the loop of a simulation, with sites at the other end of a transport.

The run's folder also tells whoever started the server that it is running (`server.json`), and how the run
ended (`outcome.json`); a file `stop` in it asks the server to save and end.
"""

import contextlib
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from offbeat import trees
from offbeat.aggregate.mean import PrivacyCost
from offbeat.core import AnyAlgorithm
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.monitor.http import serve_page
from offbeat.deploy.monitor.observer import Monitor
from offbeat.deploy.monitor.state import RunInfo
from offbeat.deploy.protocol.transport import Transport
from offbeat.deploy.server.exchange import SessionConfig
from offbeat.deploy.server.registry import ClientRegistry
from offbeat.deploy.server.session import DeployedEngine, StopRequested, max_upload_bytes
from offbeat.deploy.server.setup import ServerSetup, secure_summation, set_up
from offbeat.errors import DivergedError, InputError
from offbeat.files import replace_file
from offbeat.nn.problem import Problem
from offbeat.training import checkpoint, settings_file
from offbeat.training.build import resolved_settings
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.folder import RunFolder, check_free, read_jsonl
from offbeat.training.runner import Progress, run_experiment, saved_outcome


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
        known, now = settings_file.read(folder), config.settings()
        different = [
            f"{name} was {known.get(name)} and is now {now[name]}"
            for name in now
            if known.get(name) != now[name]
        ]
        if "task" not in known:
            raise InputError(f"the run in {folder} is a simulation: resume it with 'offbeat run'.")
        if different:
            raise InputError(
                f"{folder} was started with other settings ({'; '.join(different)}): "
                "restore them to resume it, or name another --out."
            )
    elif not (folder / "flower").is_dir():
        raise InputError(f"{folder} holds no run to resume: leave out --resume to start one there.")


def resumed_noise(folder: Path) -> float | None:
    """The noise multiplier that an earlier start of the run was calibrated to."""
    if not (folder / "settings.json").exists():
        return None
    noise = settings_file.read(folder).get("resolved", {}).get("noise")
    return None if noise is None else float(noise)


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Let only one command at a time supervise a run's folder."""
    own = folder / "flower"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)  # the SuperLink's database holds client updates
    lock = FileLock(own / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another 'offbeat serve' supervises {folder}: wait for it, or name another --out."
        ) from None
    try:
        yield
    finally:
        lock.release()


STOP_FILE = "stop"  # asks the server to save and end
SET_ASIDE_FILE = "set-aside"  # asks a resumed server not to use the uploads in its buffer, once
_OUTCOME_FILE = "outcome.json"
_SERVER_FILE = "server.json"


class ServeOutcome(NamedTuple):
    """How a run ended; without `ended`, `error` and `stopped` it took all its steps."""

    version: int | None  # the last one that was saved
    ended: str | None = None  # why it ended before the last version
    error: str | None = None  # what went wrong, in a sentence
    stopped: bool = False  # on request; it can be resumed
    spent: dict[str, Any] | None = None  # the privacy cost, if the run is private


class ServerProcess(NamedTuple):
    """The process that runs the server."""

    pid: int
    born: str | None  # its start time by the operating system, because process ids are reused


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


def write_server(folder: Path) -> None:
    """Record this process as the server."""
    _write_json(folder / _SERVER_FILE, ServerProcess(os.getpid(), _start_time(os.getpid()))._asdict())


def read_server(folder: Path) -> ServerProcess | None:
    """The server's process, or None while none has started."""
    facts = _read_json(folder / _SERVER_FILE)
    return None if facts is None else ServerProcess(**facts)


def remove_server(folder: Path) -> None:
    """Remove the record of a server that has ended."""
    (folder / _SERVER_FILE).unlink(missing_ok=True)


def is_running(server: ServerProcess) -> bool:
    """Whether exactly this process still runs and is not a zombie."""
    try:
        os.kill(server.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _process_state(server.pid) not in ("Z", "X") and _start_time(server.pid) == server.born


def _process_state(pid: int) -> str | None:
    fields = _proc_stat(pid)
    return fields[0] if fields else None


def _start_time(pid: int) -> str | None:
    fields = _proc_stat(pid)
    return fields[19] if fields else None


def _proc_stat(pid: int) -> list[str] | None:
    """The fields of its stat file from the state on; None on systems without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    replace_file(path, json.dumps(facts, indent=1).encode())


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return facts


MODEL_FILE = "model.safetensors"


def write_model(folder: Path, algorithm: AnyAlgorithm, problem: Problem) -> None:
    """Write the model of the last checkpoint as safetensors; the averaged one if the run averages."""
    saved = checkpoint.load(folder / "checkpoint" / "state.safetensors", problem.device)
    x, statistics = problem.initial()
    shape = trees.structure(algorithm.init(x))
    state = trees.unflatten(shape, [saved.tensors[f"state.{n}"] for n in range(shape.num_leaves)])
    known = {name: saved.tensors[f"statistics.{name}"] for name in statistics}
    module = problem.module(saved.tensors.get("average", state.x), known)
    facts = {"version": saved.facts["version"]}
    checkpoint.save(folder / MODEL_FILE, Checkpoint(facts, dict(module.state_dict())))


_LOG = logging.getLogger("offbeat")
_LOCK_TIMEOUT = 90.0  # seconds for an earlier server to end


class ServeRequest(NamedTuple):
    """What a server is started with."""

    settings: Path
    folder: Path
    resume: bool
    authenticated: bool  # whether nodes have keys
    sites: Path | None = None  # a folder with the public keys of sites, by name


def serve(request: ServeRequest, connect: Callable[[int], Transport]) -> ServeOutcome:
    """Run until the end, a stop or a failure, and write the outcome.

    `connect` makes the transport, given the most bytes that an upload may have. A crash leaves no outcome:
    the run can be resumed.
    """
    request.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(request.folder / "server.lock").acquire(timeout=_LOCK_TIMEOUT):
        remove_outcome(request.folder)
        write_server(request.folder)
        try:
            outcome = _serve(request, connect)
        except InputError as error:
            outcome = ServeOutcome(None, error=str(error))
        except OSError as error:  # of the disk: errors of the network are the transport's
            outcome = ServeOutcome(
                None,
                error=f"{error.filename or request.folder} cannot be written ({error.strerror or error}): "
                "check the disk, then resume the run.",
            )
        for name in (STOP_FILE, SET_ASIDE_FILE):
            (request.folder / name).unlink(missing_ok=True)
        write_outcome(request.folder, outcome)
        return outcome


def _serve(request: ServeRequest, connect: Callable[[int], Transport]) -> ServeOutcome:
    config = ServeConfig.read(request.settings)
    known = settings_file.read(request.folder).get("resolved", {}) if request.resume else {}
    _check_registry(config, request)
    run_id = known.get("run") or secrets.token_hex(16)
    setup = set_up(config, known.get("noise"), secure_summation(config, bytes.fromhex(run_id)))
    session = _session_config(config, setup, request.authenticated)
    stop = (request.folder / STOP_FILE).exists
    monitor = Monitor(_run_info(request.folder, config), request.folder)
    with contextlib.closing(monitor):
        engine = DeployedEngine(
            connect(max_upload_bytes(setup.algorithm, setup.problem, session)),
            setup.problem,
            session,
            request.folder,
            monitor,
            stop=stop,
            sites=request.sites,
            set_aside=request.folder / SET_ASIDE_FILE if request.resume else None,
        )
        if request.resume:
            opened = RunFolder.resume(request.folder, config.settings())
        else:
            resolved = resolved_settings(config.experiment, setup.run_spec(engine))
            resolved |= {"noise": setup.noise, "run": run_id}
            opened = RunFolder.begin(request.folder, config.settings() | {"resolved": resolved})
        with opened as folder, _live_page(config, monitor):
            if request.resume:
                monitor.recall(read_jsonl(request.folder, "records"))
            outcome = _train(setup, engine, folder, monitor, stop)
            monitor.ended(outcome.ended or outcome.error)
            if folder.version is not None:
                write_model(request.folder, setup.algorithm, setup.problem)
            return outcome


def _train(
    setup: ServerSetup, engine: DeployedEngine, folder: RunFolder, monitor: Monitor, stop: Callable[[], bool]
) -> ServeOutcome:
    experiment = setup.experiment
    before = saved_outcome(folder.resumed)
    if before.ended or folder.version == experiment.rounds:
        return ServeOutcome(folder.version, before.ended, spent=_privacy_facts(before.spent))
    last: Progress | None = None
    error, stopped = None, False
    try:
        for progress in run_experiment(experiment, setup.run_spec(engine), folder, save_every=1, stop=stop):
            last = progress
            monitor.stepped(progress, list(progress.ages))
            monitor.saved(progress.version)
            if progress.record is not None:
                monitor.spent(progress.record.get("epsilon"))
    except StopRequested:
        stopped = True
    except DivergedError as failure:
        error = _divergence_advice(str(failure))
    except InputError as failure:
        error = str(failure)
    outcome = last.outcome if last else None
    if outcome is None:
        return ServeOutcome(folder.version, error=error, stopped=stopped)
    finished = outcome.ended is not None or folder.version == experiment.rounds
    return ServeOutcome(
        folder.version, outcome.ended, error, not finished and error is None, _privacy_facts(outcome.spent)
    )


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
    if any(task[0] not in members for line in lines for task in line["tasks"]):
        raise InputError(f"{path} does not have all clients of this run: restore it.")
    keyed = any(member.node is not None for member in members.values())
    if keyed and not request.authenticated and config.network.bind_names is None:
        raise InputError(
            "the sites of this run are known by their keys: resume it with --certificates, or set "
            "bind_names = false in [network] if any node may use their names from now on."
        )


def _privacy_facts(spent: PrivacyCost | None) -> dict[str, Any] | None:
    """As JSON, which has no infinity."""
    if spent is None:
        return None
    return spent._asdict() | {"epsilon": spent.epsilon if math.isfinite(spent.epsilon) else None}


def _session_config(config: ServeConfig, setup: ServerSetup, authenticated: bool) -> SessionConfig:
    network = config.network
    return SessionConfig(
        setup.site_plan,
        config.experiment.clients,
        deadline=network.deadline,
        poll=network.poll,
        patience=network.patience,
        max_upload_bytes=network.max_upload_bytes,
        max_update_norm=network.max_update_norm,
        bind_names=authenticated if network.bind_names is None else network.bind_names,
    )


def _run_info(folder: Path, config: ServeConfig) -> RunInfo:
    experiment = config.experiment
    return RunInfo(
        folder.absolute().name,
        experiment.algorithm,
        experiment.clients,
        experiment.buffer,
        experiment.rounds,
        experiment.concurrency,
        experiment.epsilon,
        experiment.delta,
    )


@contextmanager
def _live_page(config: ServeConfig, monitor: Monitor) -> Iterator[None]:
    """The live page, if it is configured; the run continues without it if it cannot be served."""
    if not config.page.port:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(serve_page(monitor, config.page.port, config.page.host))
        except InputError as error:
            _LOG.warning("there is no live page: %s", error)
        yield
