"""What is checked of a run's folder before anything is started in it.

What a server leaves in its run's folder for whoever started it: that it runs, and how it ended.

The trained model as a file that any program with safetensors can read.

One run at the server: the same loop as a simulation's, with sites at the other end of a post.
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


def check_run_folder(folder: Path | None, resume: bool, plan: ServeConfig) -> None:
    """Refuse a folder that has no run to go on with, or one of other settings, or one not asked for."""
    if folder is None:
        if resume:
            raise InputError("--resume needs --out, the folder of the run to go on with.")
        return
    if not resume:
        if (folder / "settings.json").exists():
            raise InputError(f"{folder} holds a run already: name another --out, or add --resume.")
        check_free(folder)
        return
    if (folder / "settings.json").exists():  # else it was stopped before its first site came
        known, now = settings_file.read(folder), plan.settings()
        different = [
            f"{name} was {known.get(name)} and is now {now[name]}"
            for name in now
            if known.get(name) != now[name]
        ]
        if "task" not in known:
            raise InputError(f"the run in {folder} is a simulation: go on with it by 'offbeat run'.")
        if different:
            raise InputError(
                f"{folder} was begun with other settings ({'; '.join(different)}): "
                "put them back to resume it, or name another --out."
            )
    elif not (folder / "flower").is_dir():
        raise InputError(f"{folder} holds no run to resume: leave out --resume to start one there.")


def resumed_noise(folder: Path) -> float | None:
    """What an earlier start of the run came to."""
    if not (folder / "settings.json").exists():
        return None
    noise = settings_file.read(folder).get("resolved", {}).get("noise")
    return None if noise is None else float(noise)


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """One command at a time sees to a folder."""
    own = folder / "flower"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)  # the SuperLink's database holds updates as they come
    lock = FileLock(own / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another 'offbeat serve' sees to {folder}: wait for it, or name another --out."
        ) from None
    try:
        yield
    finally:
        lock.release()


STOP_FILE = "stop"  # a file of this name asks the server to save and end
SET_ASIDE_FILE = "set-aside"  # one of this name: it is not to use the uploads that wait in its buffer, once
_OUTCOME_FILE = "outcome.json"
_SERVER_FILE = "server.json"


class ServeOutcome(NamedTuple):
    """How a run ended; neither `ended` nor `error` nor `stopped`: it took all its steps."""

    version: int | None  # the last that was saved
    ended: str | None = None  # why it ended before the last version asked for
    error: str | None = None  # what went wrong, in a sentence
    stopped: bool = False  # it was asked to, and can be resumed
    spent: dict[str, Any] | None = None  # privacy, where it is counted


class ServerProcess(NamedTuple):
    """The process that a run is in."""

    pid: int
    born: str | None  # when, as the operating system has it; a number may be given to somebody else later


def write_outcome(folder: Path, outcome: ServeOutcome) -> None:
    """The last thing that a server does."""
    _write_json(folder / _OUTCOME_FILE, outcome._asdict())


def read_outcome(folder: Path) -> ServeOutcome | None:
    """None while there is none."""
    facts = _read_json(folder / _OUTCOME_FILE)
    return None if facts is None else ServeOutcome(**facts)


def remove_outcome(folder: Path) -> None:
    """It is of an earlier server."""
    (folder / _OUTCOME_FILE).unlink(missing_ok=True)


def write_server(folder: Path) -> None:
    """Say that this process is the server."""
    _write_json(folder / _SERVER_FILE, ServerProcess(os.getpid(), _start_time(os.getpid()))._asdict())


def read_server(folder: Path) -> ServerProcess | None:
    """None while none has begun."""
    facts = _read_json(folder / _SERVER_FILE)
    return None if facts is None else ServerProcess(**facts)


def remove_server(folder: Path) -> None:
    """It is gone."""
    (folder / _SERVER_FILE).unlink(missing_ok=True)


def is_running(server: ServerProcess) -> bool:
    """Whether that very process is still there, and is more than a name in a table."""
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
    """From its state on; None where there is no /proc."""
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
    """The module's weights by name, of the last checkpoint; their average where that was asked for."""
    saved = checkpoint.load(folder / "checkpoint" / "state.safetensors", problem.device)
    x, statistics = problem.initial()
    shape = trees.structure(algorithm.init(x))
    state = trees.unflatten(shape, [saved.tensors[f"state.{n}"] for n in range(shape.num_leaves)])
    known = {name: saved.tensors[f"statistics.{name}"] for name in statistics}
    module = problem.module(saved.tensors.get("average", state.x), known)
    facts = {"version": saved.facts["version"]}
    checkpoint.save(folder / MODEL_FILE, Checkpoint(facts, dict(module.state_dict())))


_LOG = logging.getLogger("offbeat")
_LOCK_TIMEOUT = 90.0  # seconds for a server from before to be gone


class ServeRequest(NamedTuple):
    """What a server is started with."""

    settings: Path
    folder: Path
    resume: bool
    authenticated: bool  # whether nodes have keys
    sites: Path | None = None  # a folder with the public keys of sites, by name


def serve(ask: ServeRequest, post: Callable[[int], Transport]) -> ServeOutcome:
    """Run until the end, a stop or a failure, and leave word of it; `post` is told the size of an upload.

    What is nobody's fault, such as a kill, leaves no word: the run can be resumed.
    """
    ask.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(ask.folder / "server.lock").acquire(timeout=_LOCK_TIMEOUT):
        remove_outcome(ask.folder)
        write_server(ask.folder)
        try:
            outcome = _serve(ask, post)
        except InputError as error:
            outcome = ServeOutcome(None, error=str(error))
        except OSError as error:  # of the disk: what the network does is a matter of the post
            outcome = ServeOutcome(
                None,
                error=f"{error.filename or ask.folder} cannot be written ({error.strerror or error}): "
                "check the disk, then resume the run.",
            )
        for name in (STOP_FILE, SET_ASIDE_FILE):
            (ask.folder / name).unlink(missing_ok=True)
        write_outcome(ask.folder, outcome)
        return outcome


def _serve(ask: ServeRequest, post: Callable[[int], Transport]) -> ServeOutcome:
    plan = ServeConfig.read(ask.settings)
    known = settings_file.read(ask.folder).get("resolved", {}) if ask.resume else {}
    _check_registry(plan, ask)
    number = known.get("run") or secrets.token_hex(16)
    stage = set_up(plan, known.get("noise"), secure_summation(plan, bytes.fromhex(number)))
    terms = _session_config(plan, stage, ask.authenticated)
    stop = (ask.folder / STOP_FILE).exists
    watch = Monitor(_run_info(ask.folder, plan), ask.folder)
    with contextlib.closing(watch):
        engine = DeployedEngine(
            post(max_upload_bytes(stage.algorithm, stage.problem, terms)),
            stage.problem,
            terms,
            ask.folder,
            watch,
            stop=stop,
            sites=ask.sites,
            set_aside=ask.folder / SET_ASIDE_FILE if ask.resume else None,
        )
        trial = stage.trial(engine)
        came_to = resolved_settings(plan.experiment, trial) | {"noise": stage.noise, "run": number}
        asked = plan.settings() | {"resolved": came_to}
        opened = (
            RunFolder.resume(ask.folder, plan.settings())
            if ask.resume
            else RunFolder.begin(ask.folder, asked)
        )
        with opened as folder, _live_page(plan, watch):
            if ask.resume:
                watch.recall(read_jsonl(ask.folder, "records"))
            outcome = _train(plan, stage, engine, folder, watch, stop)
            watch.ended(outcome.ended or outcome.error)
            if folder.version is not None:
                write_model(ask.folder, stage.algorithm, stage.problem)
            return outcome


def _train(
    plan: ServeConfig,
    stage: ServerSetup,
    engine: DeployedEngine,
    folder: RunFolder,
    watch: Monitor,
    stop: Callable[[], bool],
) -> ServeOutcome:
    before = saved_outcome(folder.resumed)
    if before.ended or folder.version == plan.experiment.rounds:
        return ServeOutcome(folder.version, before.ended, spent=_privacy_facts(before.spent))
    last: Progress | None = None
    error, stopped = None, False
    try:
        for progress in run_experiment(plan.experiment, stage.trial(engine), folder, save_every=1, stop=stop):
            last = progress
            _report_progress(watch, progress)
    except StopRequested:
        stopped = True
    except DivergedError as failure:
        error = _divergence_advice(str(failure))
    except InputError as failure:
        error = str(failure)
    outcome = last.outcome if last else None
    if outcome is None:
        return ServeOutcome(folder.version, error=error, stopped=stopped)
    finished = outcome.ended is not None or folder.version == plan.experiment.rounds
    return ServeOutcome(
        folder.version, outcome.ended, error, not finished and error is None, _privacy_facts(outcome.spent)
    )


def _divergence_advice(diverged: str) -> str:
    """What happened, and what can be done about it where settings cannot change any more."""
    return (
        f"{diverged.removesuffix('.').removesuffix(': lower the rates')}: resume it with --set-aside to go "
        "on without the uploads that wait in its buffer, or begin another run with lower rates."
    )


def _report_progress(watch: Monitor, progress: Progress) -> None:
    watch.stepped(progress, list(progress.ages))
    watch.saved(progress.version)
    if progress.record is not None:
        watch.spent(progress.record.get("epsilon"))


def _check_registry(plan: ServeConfig, ask: ServeRequest) -> None:
    """Refuse to go on where a site could become another client, or anybody pass for a site that has a key."""
    place = ask.folder / "roster.json"
    members = ClientRegistry(place, plan.experiment.clients, bound=False).members
    lines = read_jsonl(ask.folder, "trace") if (ask.folder / "trace.jsonl").exists() else ()
    if any(task[0] not in members for line in lines for task in line["tasks"]):
        raise InputError(f"{place} does not know all clients of this run: put it back as it was.")
    keyed = any(member.node is not None for member in members.values())
    if keyed and not ask.authenticated and plan.network.bind_names is None:
        raise InputError(
            "the sites of this run are known by their keys: resume it with --certificates, "
            "or say bound = false in [network] if anybody may now pass for them."
        )


def _privacy_facts(spent: PrivacyCost | None) -> dict[str, Any] | None:
    """As JSON has it, which knows no infinity."""
    if spent is None:
        return None
    return spent._asdict() | {"epsilon": spent.epsilon if math.isfinite(spent.epsilon) else None}


def _session_config(plan: ServeConfig, stage: ServerSetup, authenticated: bool) -> SessionConfig:
    network = plan.network
    return SessionConfig(
        stage.note,
        plan.experiment.clients,
        deadline=network.deadline,
        poll=network.poll,
        patience=network.patience,
        most_bytes=network.max_upload_bytes,
        most_norm=network.max_update_norm,
        bound=authenticated if network.bind_names is None else network.bind_names,
    )


def _run_info(folder: Path, plan: ServeConfig) -> RunInfo:
    experiment = plan.experiment
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
def _live_page(plan: ServeConfig, watch: Monitor) -> Iterator[None]:
    """The live page, where there is to be one; a run does not end for want of it."""
    if not plan.page.port:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(serve_page(watch, plan.page.port, plan.page.host))
        except InputError as error:
            _LOG.warning("there is no live page: %s", error)
        yield
