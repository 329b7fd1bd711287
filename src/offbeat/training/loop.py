"""What a run shows of itself after each server step.

Which methods go with which protocols.

What changes as a run goes on, and so what a checkpoint holds.

The loop: a generator of snapshots, one per server step; the caller owns the `for`.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.mean import AggregationContext, Aggregator, Mean, PrivacyCost
from offbeat.aggregate.private import current_repr
from offbeat.algorithms import Setting, build
from offbeat.core import AnyAlgorithm, Cohort, SavedState, Task, Vector, traits_of
from offbeat.engines.engine import ClientUpdates, Engine, PersistentSession, SecureEncodingSession, Session
from offbeat.errors import DivergedError, InputError, setting_name
from offbeat.nn.problem import Statistics
from offbeat.schedule.dispatch import Dispatch, Phases, RoundRefill
from offbeat.schedule.scheduler import Buffer, BufferSource, Scheduler, TaskCounts
from offbeat.schedule.staleness import Equal, StalenessWeights
from offbeat.training.checkpoint import Checkpoint


class Traffic(NamedTuple):
    """Numbers sent so far: down with every task that started, up with every one that came back."""

    down: int = 0
    up: int = 0


class StartProgress(NamedTuple):
    """A run in its full-participation start."""

    done: int
    clients: int
    checkpoint: Callable[[], Checkpoint]
    confirm: Callable[[], None]


class Snapshot(NamedTuple):
    """The server after `version` steps."""

    version: int
    time: float
    state: Any
    statistics: Statistics
    cohort: Cohort | None  # whose updates made this version; None before the first step
    filled: Buffer | None  # the tasks behind it, with their times; for version 0 those of the start
    counts: TaskCounts  # where all tasks so far are
    sent: Traffic
    spent: Callable[[], PrivacyCost | None]  # the privacy spent so far, where it is counted
    ended: str | None  # why no further version will come before the last one asked for
    checkpoint: Callable[[], Checkpoint]  # all that is needed to go on from here
    confirm: Callable[[], None]  # the last checkpoint is in its place, so what only older ones need may go

    @property
    def x(self) -> Vector:
        """The model."""
        x: Vector = self.state.x
        return x


def check_fit(
    algorithm: AnyAlgorithm, dispatch: Dispatch, weights: StalenessWeights, rounds: int, limit: float
) -> None:
    """Refuse a method under a protocol that it is not defined for."""
    name = type(algorithm).__name__
    if not isinstance(weights, Equal) and trees.leaves(algorithm.memory(torch.zeros(1))):
        # sums over what clients keep, such as the mean of control variates, would break
        raise InputError(f"{name} has no staleness weights, since its clients keep memory: use constant.")
    if traits_of(algorithm).two_phases:
        if not isinstance(dispatch, Phases):
            raise InputError(f"{name} asks each cohort twice in a row: use phases dispatch.")
        if rounds % 2:
            raise InputError(
                f"{name} takes two server steps a round: give an even number of rounds, not {rounds}."
            )
    if traits_of(algorithm).reads_rank and not isinstance(dispatch, RoundRefill):
        raise InputError(
            "trailing is defined where tasks are replaced round by round: use "
            f"{setting_name('dispatch')} round-refill."
        )
    if (span := traits_of(algorithm).span) is not None:
        oldest = min(limit, rounds - 1)
        if oldest >= span:
            raise InputError(
                f"{name} with a span of {span} takes updates of a staleness below that, "
                f"and here it may reach {oldest:.0f}: lower the staleness limit, or raise the span."
            )


def check_extendable(name: str, parameters: Mapping[str, Any], rounds: int, later: int) -> None:
    """Refuse a later end for a method whose rates follow from the one it has, which is found by trying."""
    if len({repr(build(name, Setting(1, 1, each), parameters)) for each in (rounds, later)}) > 1:
        raise InputError(
            f"{name} sets its rates by {setting_name('rounds')}, so {later} in place of {rounds} is another "
            f"run: name another {setting_name('out')}; to train until told to stop use a method that does "
            "not, such as cadence."
        )


_MIN_PIECE, _MAX_PIECE = 10, 100  # clients whose uploads are held at once in the full-participation start


class RunState:
    """One run under way."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        engine: Engine,
        dispatch: Dispatch,
        weights: StalenessWeights,
        buffer: int,
        rounds: int,
        limit: float,
        aggregate: Aggregator,
        seed: int,
    ) -> None:
        self.algorithm = algorithm
        self.weights = weights
        self.rounds = rounds
        self.clients = engine.clients
        x, self.statistics = engine.initial()
        opening = AggregationContext(
            algorithm, x, dispatch, weights, buffer, engine.clients, rounds, limit, seed, engine.availability
        )
        self.aggregation = aggregate.open(opening)
        source = dispatch.source(seed)
        if self.aggregation.hides_sample:
            source.hide(secrets.randbits(62))
        self.session: Session = engine.open(algorithm, seed, source)
        if isinstance(self.session, SecureEncodingSession):
            self.session.set_secure_encoding(self.aggregation.hiding)
        self.flow: BufferSource = Scheduler(
            self.session,
            dispatch,
            source,
            engine.clients,
            buffer,
            limit,
            engine.availability,
            aggregate.participation,
            self._keep if isinstance(self.session, PersistentSession) else lambda: None,
        )
        self.state = algorithm.init(x)
        self.version = 0
        self.sent = Traffic()
        self._done = 0  # clients that are through with the start
        self._sum: list[Tensor] = []  # their part of its mean, leaf by leaf
        self._cut: Checkpoint | None = None  # taken in the start, where this run goes on from one
        self.whole = True  # false while a step is under way, or where one failed
        self._settings = {
            "algorithm": repr(algorithm),
            "dispatch": repr(dispatch),
            "buffer": buffer,
            "limit": str(limit),
            "seed": seed,
            "clients": engine.clients,
            "model size": len(x),
            "aggregate": repr(aggregate),
        }

    def publish(self, version: int, algorithm: AnyAlgorithm) -> None:
        """Make the state known to clients."""
        message = algorithm.broadcast(self.state, version)
        self._started, self._message = self.flow.counts.started, trees.numel((message, self.statistics))
        self.session.publish(version, algorithm, message, self.statistics)

    def count(self, filled: Buffer, gathered: ClientUpdates) -> None:
        """Add what one step sent; an update that came too late was sent all the same."""
        upload = trees.numel(gathered.uploads) // len(filled.tasks) + trees.numel(gathered.statistics)
        started = self.flow.counts.started - self._started
        back = len(filled.tasks) + len(filled.dropped)
        self.sent = Traffic(self.sent.down + started * self._message, self.sent.up + back * upload)

    def ended(self) -> str | None:
        """Why no further step may be taken."""
        used_up = self.flow.ended()
        if used_up and self.aggregation.private:
            used_up = f"the privacy budget is spent: {used_up}"
        return self.aggregation.ended() or used_up

    def learned(self, gathered: ClientUpdates) -> Statistics:
        """The running statistics after a step; what is private leaves clients by the aggregation alone."""
        if not self.aggregation.private:
            return gathered.statistics
        for name, value in gathered.statistics.items():
            if not torch.allclose(value.double(), self.statistics[name].double()):
                raise InputError(
                    f"the running statistic {name} would leave clients beside the sum: "
                    "use a module with GroupNorm in place of BatchNorm."
                )
        return self.statistics

    def begin(self, observe: Callable[[StartProgress], None]) -> Snapshot:
        """The full-participation start, or the rest of it, where the algorithm has one."""
        warmup = self.algorithm.warmup()
        if warmup is None:
            return self.snapshot(None, None)
        self.publish(0, warmup)
        filled = self.flow.everyone()  # the same for a run that was cut off in its start
        if self._cut is not None:
            self._load_session(self._cut)
        piece = max(_MIN_PIECE, min(_MAX_PIECE, self.clients // 20))
        while self._done < self.clients:
            rest = self.clients - self._done
            size = rest // max(1, rest // piece)  # so that no piece is small: a secure sum would refuse it
            tasks = filled.tasks[self._done : self._done + size]
            self.whole = False
            gathered = self.session.gather(tasks, 0)
            self.count(filled._replace(tasks=tasks), gathered)
            self._started = self.flow.counts.started
            check_finite(gathered, tasks, "in the start: check the model and the data")
            self.learned(gathered)
            total = self.aggregation.collect(
                gathered.uploads, tasks, describe_cohort(tasks, 0, self.clients, Equal())
            )
            part = trees.leaves(total)
            self._sum = [a + b for a, b in zip(self._sum, part, strict=True)] if self._sum else part
            self._done, self.whole = self._done + len(tasks), True
            if self._done < self.clients:
                observe(StartProgress(self._done, self.clients, partial(self.save, 0), self.session.confirm))
        everybody = describe_cohort(filled.tasks, 0, self.clients, Equal())
        mean = self.aggregation.release(trees.unflatten(trees.structure(total), self._sum), everybody)
        self.state = warmup.step(self.state, mean, everybody)
        self._done, self._sum = 0, []
        return self.snapshot(None, filled)

    def snapshot(self, cohort: Cohort | None, filled: Buffer | None) -> Snapshot:
        return Snapshot(
            self.version,
            self.session.now,
            self.state,
            self.statistics,
            cohort,
            filled,
            self.flow.counts,
            self.sent,
            self.aggregation.spent(),
            self.ended() if self.version < self.rounds else None,
            partial(self.save, self.version),
            self.session.confirm,
        )

    def save(self, version: int) -> Checkpoint:
        if version != self.version or not self.whole:
            raise InputError(
                f"the run has left version {version}: take a checkpoint of a snapshot before the next one."
            )
        saved, summed = self.session.save(), self.aggregation.save()
        tensors = {f"state.{n}": leaf for n, leaf in enumerate(trees.leaves(self.state))}
        tensors |= {f"statistics.{name}": value for name, value in self.statistics.items()}
        tensors |= {f"session.{name}": value for name, value in saved.tensors.items()}
        tensors |= {f"aggregate.{name}": value for name, value in summed.tensors.items()}
        tensors |= {f"start.{n}": leaf for n, leaf in enumerate(self._sum)}
        facts = {
            "version": self.version,
            "settings": self._settings,
            "sent": self.sent,
            "start": self._done,
            "flow": self.flow.save(),
            "session": saved.facts,
            "aggregate": summed.facts,
            "secret": self.aggregation.private,
        }
        return Checkpoint(facts, tensors)

    def load(self, checkpoint: Checkpoint) -> None:
        facts, tensors = checkpoint
        known = facts["settings"] | {"aggregate": current_repr(facts["settings"]["aggregate"])}
        differing = [
            f"{name} was {known[name]}, now {now}"
            for name, now in self._settings.items()
            if known[name] != now
        ]
        if differing:
            raise InputError(f"the checkpoint is of another run: {'; '.join(differing)}.")
        spec, device = trees.structure(self.state), self.state.x.device
        leaves = [tensors[f"state.{n}"].to(device) for n in range(spec.num_leaves)]
        self.state = trees.unflatten(spec, leaves)
        self.statistics = {name: tensors[f"statistics.{name}"].to(device) for name in self.statistics}
        self.aggregation.load(SavedState(facts["aggregate"], _with_prefix("aggregate", tensors)))
        self.version = facts["version"]
        self.sent = Traffic(*facts["sent"])
        self._done = facts["start"]
        if self._done:
            count = sum(name.startswith("start.") for name in tensors)
            self._sum = [tensors[f"start.{n}"].to(device) for n in range(count)]
            self._cut = checkpoint
        else:
            self._load_session(checkpoint)

    def _keep(self) -> None:
        if isinstance(self.session, PersistentSession):
            self.session.save_progress(self.flow.save())

    def _load_session(self, checkpoint: Checkpoint) -> None:
        facts, tensors = checkpoint
        self.session.load(SavedState(facts["session"], _with_prefix("session", tensors)))
        kept = self.session.saved_progress() if isinstance(self.session, PersistentSession) else None
        self.flow.load(kept or facts["flow"])
        self._started = self.flow.counts.started


def describe_cohort(
    tasks: tuple[Task, ...], version: int, population: int, weights: StalenessWeights
) -> Cohort:
    """What the server knows of a full buffer."""
    staleness = tuple(version - task.version for task in tasks)
    return Cohort(version, population, staleness, tuple(weights(age) for age in staleness))


def check_finite(gathered: ClientUpdates, tasks: tuple[Task, ...], where: str) -> None:
    """Stop before a NaN or infinite upload touches the state."""
    bad = set()
    for leaf in trees.leaves(gathered.uploads):
        rows = leaf.reshape(len(tasks), -1)
        if bool(torch.isfinite(rows.sum(1)).all()):  # one pass; a sum that overflows is looked into
            continue
        finite = torch.isfinite(rows).all(1)
        bad |= {task for task, good in zip(tasks, finite.tolist(), strict=True) if not good}
    if bad:
        raise DivergedError(f"the update of {client_names(bad)} became NaN or infinite {where}.")


def _with_prefix(part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part of a checkpoint, by their own names."""
    mine = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{part}.")}
    return {name.removeprefix(f"{part}."): tensor for name, tensor in mine.items()}


def client_names(tasks: Iterable[Task]) -> str:
    """Whose tasks these are, in words."""
    clients = sorted({task.client for task in tasks})
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"


def train(
    algorithm: AnyAlgorithm,
    engine: Engine,
    *,
    dispatch: Dispatch,
    buffer: int,
    rounds: int,
    weights: StalenessWeights = Equal(),
    limit: float = math.inf,
    aggregate: Aggregator = Mean(),
    seed: int = 0,
    resume: Checkpoint | None = None,
    observe_start: Callable[[StartProgress], None] = lambda starting: None,
) -> Iterator[Snapshot]:
    """Train for `rounds` server steps, each on the mean of `buffer` updates.

    The first snapshot is version 0, after the start; a resumed run goes on with the version
    after its checkpoint. An update older than `limit` versions is dropped. `observe_start` is told
    how far the start is, for methods that have one, and may take a checkpoint of it.
    """
    if rounds < 1:
        raise InputError(f"rounds must be at least 1, not {rounds}.")
    check_fit(algorithm, dispatch, weights, rounds, limit)
    run = RunState(algorithm, engine, dispatch, weights, buffer, rounds, limit, aggregate, seed)
    try:
        yield from server_steps(run, resume, observe_start)
    finally:
        run.session.close()


def server_steps(
    run: RunState, resume: Checkpoint | None, observe_start: Callable[[StartProgress], None]
) -> Iterator[Snapshot]:
    """The start, and one server step after another."""
    algorithm, aggregation = run.algorithm, run.aggregation
    if resume is not None:
        run.load(resume)
    if resume is None or resume.facts["start"]:
        yield run.begin(observe_start)
    for version in range(run.version, run.rounds):
        if run.ended():
            return
        run.whole = False
        run.publish(version, algorithm)
        filled = run.flow.fill(version)
        run.session.forget(filled.dropped + filled.lost)
        gathered = run.session.gather(filled.tasks, version)
        run.count(filled, gathered)
        cohort = describe_cohort(filled.tasks, version, run.clients, run.weights)
        check_finite(gathered, filled.tasks, f"at server step {version + 1}: lower the rates")
        statistics = run.learned(gathered)
        total = aggregation.collect(gathered.uploads, filled.tasks, cohort)
        state = algorithm.step(run.state, aggregation.release(total, cohort), cohort)
        if not bool(torch.isfinite(state.x).all()):
            raise DivergedError(
                f"the model became NaN or infinite at server step {version + 1} "
                f"(its updates came from {client_names(filled.tasks)}): lower the rates."
            )
        run.state, run.statistics, run.version, run.whole = state, statistics, version + 1, True
        yield run.snapshot(cohort, filled)
