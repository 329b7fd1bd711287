"""The loop: a generator of snapshots, one per server step; the caller owns the `for`."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate import weighted_mean
from offbeat.checkpoint import Checkpoint
from offbeat.core import AnyAlgorithm, Cohort, Task, TwoTrips, Vector
from offbeat.engines.engine import Engine, Gathered, Saved, Session
from offbeat.errors import DivergedError, InputError
from offbeat.problem import Statistics
from offbeat.schedule.dispatch import Dispatch, Phases
from offbeat.schedule.filled import Counts, Filled
from offbeat.schedule.flow import Flow
from offbeat.schedule.staleness import Equal, Weights
from offbeat.trees import Tree

Aggregate: TypeAlias = Callable[[Tree, Cohort], Tree]  # stacked uploads, cohort -> mean

_LEAST_PIECE, _MOST_PIECE = 10, 100  # clients whose uploads are held at once in the full-participation start


class Sent(NamedTuple):
    """Numbers sent so far: down with every task that started, up with every one that came back."""

    down: int = 0
    up: int = 0


class Starting(NamedTuple):
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
    filled: Filled | None  # the tasks behind it, with their times; for version 0 those of the start
    counts: Counts  # where all tasks so far are
    sent: Sent
    checkpoint: Callable[[], Checkpoint]  # all that is needed to go on from here
    confirm: Callable[[], None]  # the last checkpoint is in its place, so what only older ones need may go

    @property
    def x(self) -> Vector:
        """The model."""
        x: Vector = self.state.x
        return x


def train(
    algorithm: AnyAlgorithm,
    engine: Engine,
    *,
    dispatch: Dispatch,
    buffer: int,
    rounds: int,
    weights: Weights = Equal(),
    limit: float = math.inf,
    aggregate: Aggregate = weighted_mean,
    seed: int = 0,
    resume: Checkpoint | None = None,
    observe_start: Callable[[Starting], None] = lambda starting: None,
) -> Iterator[Snapshot]:
    """Train for `rounds` server steps, each on the mean of `buffer` updates.

    The first snapshot is version 0, after the start; a resumed run goes on with the version
    after its checkpoint. An update older than `limit` versions is dropped. `observe_start` is told
    how far the start is, for methods that have one, and may take a checkpoint of it.
    """
    if rounds < 1:
        raise InputError(f"rounds must be at least 1, not {rounds}.")
    check_fit(algorithm, dispatch, weights, rounds)
    run = _Run(algorithm, engine, dispatch, buffer, limit, seed)
    if resume is not None:
        run.load(resume)
    if resume is None or resume.facts["start"]:
        yield run.begin(aggregate, observe_start)
    for version in range(run.version, rounds):
        run.whole = False
        run.publish(version, algorithm)
        filled = run.flow.fill(version)
        run.session.forget(filled.dropped + filled.lost)
        gathered = run.session.gather(filled.tasks, version)
        run.count(filled, gathered)
        cohort = _describe(filled.tasks, version, engine.clients, weights)
        _check(gathered, filled.tasks, f"at server step {version + 1}: lower the rates")
        state = algorithm.step(run.state, aggregate(gathered.uploads, cohort), cohort)
        if not bool(torch.isfinite(state.x).all()):
            raise DivergedError(
                f"the model became NaN or infinite at server step {version + 1} "
                f"(its updates came from {_names(filled.tasks)}): lower the rates."
            )
        run.state, run.statistics, run.version, run.whole = state, gathered.statistics, version + 1, True
        yield run.snapshot(cohort, filled)


class _Run:
    """What changes as a run goes on, and so what a checkpoint holds."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        engine: Engine,
        dispatch: Dispatch,
        buffer: int,
        limit: float,
        seed: int,
    ) -> None:
        self.algorithm = algorithm
        self.clients = engine.clients
        source = dispatch.source(seed)
        self.session: Session = engine.open(algorithm, seed, source)
        self.flow = Flow(self.session, dispatch, source, engine.clients, buffer, limit, engine.availability)
        x, self.statistics = engine.initial()
        self.state = algorithm.init(x)
        self.version = 0
        self.sent = Sent()
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
        }

    def publish(self, version: int, algorithm: AnyAlgorithm) -> None:
        """Make the state known to clients."""
        message = algorithm.broadcast(self.state, version)
        self._started, self._message = self.flow.counts.started, trees.size((message, self.statistics))
        self.session.publish(version, algorithm, message, self.statistics)

    def count(self, filled: Filled, gathered: Gathered) -> None:
        """Add what one step sent; an update that came too late was sent all the same."""
        upload = trees.size(gathered.uploads) // len(filled.tasks) + trees.size(gathered.statistics)
        started = self.flow.counts.started - self._started
        back = len(filled.tasks) + len(filled.dropped)
        self.sent = Sent(self.sent.down + started * self._message, self.sent.up + back * upload)

    def begin(self, aggregate: Aggregate, observe: Callable[[Starting], None]) -> Snapshot:
        """The full-participation start, or the rest of it, where the algorithm has one."""
        warmup = self.algorithm.warmup()
        if warmup is None:
            return self.snapshot(None, None)
        self.publish(0, warmup)
        filled = self.flow.everyone()  # the same for a run that was cut off in its start
        if self._cut is not None:
            self._load_session(self._cut)
        piece = max(_LEAST_PIECE, min(_MOST_PIECE, self.clients // 20))
        while self._done < self.clients:
            tasks = filled.tasks[self._done : self._done + piece]
            self.whole = False
            gathered = self.session.gather(tasks, 0)
            self.count(filled._replace(tasks=tasks), gathered)
            self._started = self.flow.counts.started
            _check(gathered, tasks, "in the start: check the model and the data")
            mean = aggregate(gathered.uploads, _describe(tasks, 0, self.clients, Equal()))
            part = [len(tasks) / self.clients * leaf for leaf in trees.leaves(mean)]
            self._sum = [a + b for a, b in zip(self._sum, part, strict=True)] if self._sum else part
            self._done, self.whole = self._done + len(tasks), True
            if self._done < self.clients:
                observe(Starting(self._done, self.clients, partial(self.save, 0), self.session.confirm))
        everybody = _describe(filled.tasks, 0, self.clients, Equal())
        self.state = warmup.step(self.state, trees.rebuild(trees.shape(mean), self._sum), everybody)
        self._done, self._sum = 0, []
        return self.snapshot(None, filled)

    def snapshot(self, cohort: Cohort | None, filled: Filled | None) -> Snapshot:
        return Snapshot(
            self.version,
            self.session.now,
            self.state,
            self.statistics,
            cohort,
            filled,
            self.flow.counts,
            self.sent,
            partial(self.save, self.version),
            self.session.confirm,
        )

    def save(self, version: int) -> Checkpoint:
        if version != self.version or not self.whole:
            raise InputError(
                f"the run has left version {version}: take a checkpoint of a snapshot before the next one."
            )
        saved = self.session.save()
        tensors = {f"state.{n}": leaf for n, leaf in enumerate(trees.leaves(self.state))}
        tensors |= {f"statistics.{name}": value for name, value in self.statistics.items()}
        tensors |= {f"session.{name}": value for name, value in saved.tensors.items()}
        tensors |= {f"start.{n}": leaf for n, leaf in enumerate(self._sum)}
        facts = {
            "version": self.version,
            "settings": self._settings,
            "sent": self.sent,
            "start": self._done,
            "flow": self.flow.save(),
            "session": saved.facts,
        }
        return Checkpoint(facts, tensors)

    def load(self, checkpoint: Checkpoint) -> None:
        facts, tensors = checkpoint
        known = facts["settings"]
        differing = [
            f"{name} was {known[name]}, now {now}"
            for name, now in self._settings.items()
            if known[name] != now
        ]
        if differing:
            raise InputError(f"the checkpoint is of another run: {'; '.join(differing)}.")
        spec, device = trees.shape(self.state), self.state.x.device
        leaves = [tensors[f"state.{n}"].to(device) for n in range(spec.num_leaves)]
        self.state = trees.rebuild(spec, leaves)
        self.statistics = {name: tensors[f"statistics.{name}"].to(device) for name in self.statistics}
        self.version = facts["version"]
        self.sent = Sent(*facts["sent"])
        self._done = facts["start"]
        if self._done:
            count = sum(name.startswith("start.") for name in tensors)
            self._sum = [tensors[f"start.{n}"].to(device) for n in range(count)]
            self._cut = checkpoint
        else:
            self._load_session(checkpoint)

    def _load_session(self, checkpoint: Checkpoint) -> None:
        facts, tensors = checkpoint
        mine = {name: tensor for name, tensor in tensors.items() if name.startswith("session.")}
        session = {name.removeprefix("session."): tensor for name, tensor in mine.items()}
        self.session.load(Saved(facts["session"], session))
        self.flow.load(facts["flow"])
        self._started = self.flow.counts.started


def check_fit(algorithm: AnyAlgorithm, dispatch: Dispatch, weights: Weights, rounds: int) -> None:
    """Refuse a method under a protocol that it is not defined for."""
    name = type(algorithm).__name__
    if not isinstance(weights, Equal) and trees.leaves(algorithm.memory(torch.zeros(1))):
        # sums over what clients keep, such as the mean of control variates, would break
        raise InputError(f"{name} has no staleness weights, since its clients keep memory: use constant.")
    if isinstance(algorithm, TwoTrips) and algorithm.two_trips:
        if not isinstance(dispatch, Phases):
            raise InputError(f"{name} asks each cohort twice in a row: use phases dispatch.")
        if rounds % 2:
            raise InputError(
                f"{name} takes two server steps a round: give an even number of rounds, not {rounds}."
            )


def _describe(tasks: tuple[Task, ...], version: int, population: int, weights: Weights) -> Cohort:
    staleness = tuple(version - task.version for task in tasks)
    return Cohort(version, population, staleness, tuple(weights(age) for age in staleness))


def _check(gathered: Gathered, tasks: tuple[Task, ...], where: str) -> None:
    """Stop before a NaN or infinite upload touches the state."""
    bad = set()
    for leaf in trees.leaves(gathered.uploads):
        finite = torch.isfinite(leaf.reshape(len(tasks), -1)).all(1)
        bad |= {task for task, good in zip(tasks, finite.tolist(), strict=True) if not good}
    if bad:
        raise DivergedError(f"the update of {_names(bad)} became NaN or infinite {where}.")


def _names(tasks: Iterable[Task]) -> str:
    clients = sorted({task.client for task in tasks})
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"
