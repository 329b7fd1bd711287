"""One run at the server: the same loop as a simulation's, with sites at the other end of a post."""

import contextlib
import logging
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from offbeat import settings
from offbeat.aggregate.aggregation import Spent
from offbeat.deploy.board import Outline
from offbeat.deploy.engine import Deployed, most_bytes
from offbeat.deploy.model import write_model
from offbeat.deploy.outcome import SET_ASIDE, STOP, Outcome, forget_outcome, write_outcome, write_server
from offbeat.deploy.page import serving
from offbeat.deploy.plan import Plan
from offbeat.deploy.post import Post
from offbeat.deploy.roster import Roster
from offbeat.deploy.secure_sums import summation_of
from offbeat.deploy.session import Stopped
from offbeat.deploy.stage import Stage, set_up
from offbeat.deploy.terms import Terms
from offbeat.deploy.watch import Watch
from offbeat.errors import DivergedError, InputError
from offbeat.folder import Folder, read_lines
from offbeat.running import Progress, outcome_of, run
from offbeat.trial import resolved

_LOG = logging.getLogger("offbeat")
_BEFORE = 90.0  # seconds for a server from before to be gone


class Ask(NamedTuple):
    """What a server is started with."""

    settings: Path
    folder: Path
    resume: bool
    authenticated: bool  # whether nodes have keys
    sites: Path | None = None  # a folder with the public keys of sites, by name


def serve(ask: Ask, post: Callable[[int], Post]) -> Outcome:
    """Run until the end, a stop or a failure, and leave word of it; `post` is told the size of an upload.

    What is nobody's fault, such as a kill, leaves no word: the run can be resumed.
    """
    ask.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(ask.folder / "server.lock").acquire(timeout=_BEFORE):
        forget_outcome(ask.folder)
        write_server(ask.folder)
        try:
            outcome = _serve(ask, post)
        except InputError as error:
            outcome = Outcome(None, error=str(error))
        except OSError as error:  # of the disk: what the network does is a matter of the post
            outcome = Outcome(
                None,
                error=f"{error.filename or ask.folder} cannot be written ({error.strerror or error}): "
                "see to the disk, then resume the run.",
            )
        for name in (STOP, SET_ASIDE):
            (ask.folder / name).unlink(missing_ok=True)
        write_outcome(ask.folder, outcome)
        return outcome


def _serve(ask: Ask, post: Callable[[int], Post]) -> Outcome:
    plan = Plan.read(ask.settings)
    known = settings.read(ask.folder).get("resolved", {}) if ask.resume else {}
    _check_roster(plan, ask)
    number = known.get("run") or secrets.token_hex(16)
    stage = set_up(plan, known.get("noise"), summation_of(plan, bytes.fromhex(number)))
    terms = _terms(plan, stage, ask.authenticated)
    stop = (ask.folder / STOP).exists
    watch = Watch(_outline(ask.folder, plan), ask.folder)
    with contextlib.closing(watch):
        engine = Deployed(
            post(most_bytes(stage.algorithm, stage.problem, terms)),
            stage.problem,
            terms,
            ask.folder,
            watch,
            stop=stop,
            sites=ask.sites,
            set_aside=ask.folder / SET_ASIDE if ask.resume else None,
        )
        trial = stage.trial(engine)
        came_to = resolved(plan.experiment, trial) | {"noise": stage.noise, "run": number}
        asked = plan.settings() | {"resolved": came_to}
        opened = Folder.resume(ask.folder, plan.settings()) if ask.resume else Folder.begin(ask.folder, asked)
        with opened as folder, _page(plan, watch):
            if ask.resume:
                watch.recall(read_lines(ask.folder, "records"))
            outcome = _train(plan, stage, engine, folder, watch, stop)
            watch.ended(outcome.ended or outcome.error)
            if folder.version is not None:
                write_model(ask.folder, stage.algorithm, stage.problem)
            return outcome


def _train(
    plan: Plan, stage: Stage, engine: Deployed, folder: Folder, watch: Watch, stop: Callable[[], bool]
) -> Outcome:
    before = outcome_of(folder.resumed)
    if before.ended or folder.version == plan.experiment.rounds:
        return Outcome(folder.version, before.ended, spent=_facts(before.spent))
    last: Progress | None = None
    error, stopped = None, False
    try:
        for progress in run(plan.experiment, stage.trial(engine), folder, save_every=1, stop=stop):
            last = progress
            _tell(watch, progress)
    except Stopped:
        stopped = True
    except DivergedError as failure:
        error = _advice(str(failure))
    except InputError as failure:
        error = str(failure)
    outcome = last.outcome if last else None
    if outcome is None:
        return Outcome(folder.version, error=error, stopped=stopped)
    finished = outcome.ended is not None or folder.version == plan.experiment.rounds
    return Outcome(
        folder.version, outcome.ended, error, not finished and error is None, _facts(outcome.spent)
    )


def _advice(diverged: str) -> str:
    """What happened, and what can be done about it where settings cannot change any more."""
    return (
        f"{diverged.removesuffix('.').removesuffix(': lower the rates')}: resume it with --set-aside to go "
        "on without the uploads that wait in its buffer, or begin another run with lower rates."
    )


def _tell(watch: Watch, progress: Progress) -> None:
    watch.stepped(progress, list(progress.ages))
    watch.saved(progress.version)
    if progress.record is not None:
        watch.spent(progress.record.get("epsilon"))


def _check_roster(plan: Plan, ask: Ask) -> None:
    """Refuse to go on where a site could become another client, or anybody pass for a site that has a key."""
    place = ask.folder / "roster.json"
    members = Roster(place, plan.experiment.clients, bound=False).members
    lines = read_lines(ask.folder, "trace") if (ask.folder / "trace.jsonl").exists() else ()
    if any(task[0] not in members for line in lines for task in line["tasks"]):
        raise InputError(f"{place} does not know all clients of this run: put it back as it was.")
    keyed = any(member.node is not None for member in members.values())
    if keyed and not ask.authenticated and plan.network.bound is None:
        raise InputError(
            "the sites of this run are known by their keys: resume it with --certificates, "
            "or say bound = false in [network] if anybody may now pass for them."
        )


def _facts(spent: Spent | None) -> dict[str, Any] | None:
    """As JSON has it, which knows no infinity."""
    if spent is None:
        return None
    return spent._asdict() | {"epsilon": spent.epsilon if math.isfinite(spent.epsilon) else None}


def _terms(plan: Plan, stage: Stage, authenticated: bool) -> Terms:
    network = plan.network
    return Terms(
        stage.note,
        plan.experiment.clients,
        deadline=network.deadline,
        poll=network.poll,
        patience=network.patience,
        most_bytes=network.most_bytes,
        most_norm=network.most_norm,
        bound=authenticated if network.bound is None else network.bound,
    )


def _outline(folder: Path, plan: Plan) -> Outline:
    experiment = plan.experiment
    return Outline(
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
def _page(plan: Plan, watch: Watch) -> Iterator[None]:
    """The live page, where there is to be one; a run does not end for want of it."""
    if not plan.page.port:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(serving(watch, plan.page.port, plan.page.host))
        except InputError as error:
            _LOG.warning("there is no live page: %s", error)
        yield
