"""The training loop, a generator that yields a snapshot after each server step, and the state of a run.

The caller of `train` owns the `for` loop. `RunState` holds all that changes during a run, and so all that a
checkpoint contains.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.compression import Compressed, Compression, check_compression
from offbeat.aggregate.mean import AggregationContext, Aggregator, FiniteCheck, Mean, PrivacyCost
from offbeat.aggregate.robust import RobustAggregation
from offbeat.aggregate.uploads import probe_upload, shrinks_without_updates
from offbeat.algorithms import Setting, build
from offbeat.algorithms.rates import unwrapped
from offbeat.core import AnyAlgorithm, Cohort, SavedState, Task, Vector, traits_of
from offbeat.engines.engine import (
    ClientUpdates,
    Engine,
    GrowingSession,
    PersistentSession,
    PersonalSession,
    SecureEncodingSession,
    Session,
    StreamingSession,
    TunedSession,
)
from offbeat.errors import (
    InputError,
    check_attributes,
    check_whole,
    renamed_parameters,
    setting_name,
)
from offbeat.nn.problem import Statistics, mean_statistics
from offbeat.renamed import current_repr
from offbeat.schedule.dispatch import Dispatch, Phases, RoundRefill, TimedDispatch
from offbeat.schedule.parsing import check_number
from offbeat.schedule.scheduler import Buffer, BufferSource, TaskBook, TaskCounts
from offbeat.schedule.staleness import Equal, StalenessWeights
from offbeat.schedule.timed import make_scheduler, nominal_cohort
from offbeat.training.checkpoint import Checkpoint
from offbeat.trees import Tree

_MIN_PIECE, _MAX_PIECE = 10, 100  # clients whose uploads are held at once in the full-participation start


class Traffic(NamedTuple):
    """Numbers sent so far: down with every task that started, up with every task that arrived.

    Compressed uploads count as the numbers of the model's dtype that take as many bytes.
    """

    down: int = 0
    up: int = 0


class StartProgress(NamedTuple):
    """The progress of the full-participation start."""

    done: int
    clients: int
    checkpoint: Callable[[], Checkpoint]
    confirm: Callable[[], None]


class Snapshot(NamedTuple):
    """The server after `version` steps.

    Attributes:
        version: The server steps taken so far.
        time: The virtual time in seconds.
        state: The state of the method at the server.
        statistics: The running statistics of the module.
        cohort: Whose updates made this version; None before the first step.
        filled: The tasks behind this version, with their times; for version 0 those of the start.
        counts: All tasks so far, by their state.
        sent: Numbers sent so far, down and up.
        spent: A function that gives the privacy spent so far, if it is counted.
        ended: Why the run ends before its last round, if it does.
        checkpoint: A function that gives all that is needed to resume here.
        confirm: To be called once the last checkpoint is on the disk.
        settle: Raises if this step diverged.
        execution: How local work is computed, if that was chosen by a trial.
        personal: A function that gives the personal layers of a client, if there are any.
    """

    version: int
    time: float
    state: Any
    statistics: Statistics
    cohort: Cohort | None
    filled: Buffer | None
    counts: TaskCounts
    sent: Traffic
    spent: Callable[[], PrivacyCost | None]
    ended: str | None
    checkpoint: Callable[[], Checkpoint]
    confirm: Callable[[], None]
    settle: Callable[[], None] = lambda: None
    execution: Callable[[], dict[str, Any] | None] = lambda: None
    personal: Callable[[int], Statistics] = lambda client: {}

    @property
    def x(self) -> Vector:
        """The model; raises if training diverged, which on a GPU is found out late."""
        self.settle()
        x: Vector = self.state.x
        return x


@renamed_parameters(limit="max_staleness")
def train(
    algorithm: AnyAlgorithm,
    engine: Engine,
    *,
    dispatch: Dispatch,
    buffer: int,
    rounds: int,
    weights: StalenessWeights = Equal(),
    max_staleness: float = math.inf,
    aggregate: Aggregator = Mean(),
    compress: Compression | None = None,
    seed: int = 0,
    resume: Checkpoint | None = None,
    observe_start: Callable[[StartProgress], None] = lambda starting: None,
) -> Iterator[Snapshot]:
    """Train for `rounds` server steps, each on the mean of `buffer` updates.

    The first snapshot is version 0, after the start; a resumed run continues with the version after its
    checkpoint.

    Args:
        algorithm: The method, such as `FedOpt(0.1, 1.0)`.
        engine: What computes the work of clients, such as `Vectorised`.
        dispatch: When tasks start, such as `Asynchronous(20)`.
        buffer: The updates of a server step.
        rounds: The number of server steps.
        weights: The weight of an update by its staleness.
        max_staleness: The staleness above which an update is dropped.
        aggregate: How updates become their mean: `Mean()`, or `Private`.
        compress: How clients compress their uploads: `EightBit()` or `TopK(share)`; None: not at all.
        seed: The seed of all draws.
        resume: A checkpoint to continue from.
        observe_start: Called with the progress of a full-participation start; it may take a checkpoint.
    """
    _check_arguments(algorithm, engine, dispatch, weights, aggregate, resume)
    check_whole("the buffer", buffer, None)
    check_whole("the number of rounds", rounds)
    check_whole("the seed", seed, 0)
    check_number("the largest staleness", max_staleness, infinite=True)
    check_fit(algorithm, dispatch, weights, rounds, max_staleness)
    run = RunState(
        algorithm, engine, dispatch, weights, buffer, rounds, max_staleness, aggregate, seed, compress
    )
    try:
        yield from server_steps(run, resume, observe_start)
    finally:
        run.session.close()


def _check_arguments(
    algorithm: object, engine: object, dispatch: object, weights: object, aggregate: object, resume: object
) -> None:
    """Reject arguments of a wrong kind, such as a name or a class in place of a value."""
    method = "an instance of a method, such as offbeat.FedOpt(0.1, 1.0), or offbeat.build(name, ...)"
    check_attributes("the algorithm", algorithm, ["init", "local", "step", "broadcast", "memory"], method)
    check_attributes("the engine", engine, ["clients", "initial", "open"], "one such as offbeat.Vectorised")
    check_attributes("the dispatch", dispatch, ["source", "check"], "one such as offbeat.Asynchronous(20)")
    check_attributes("weights", weights, ["__call__"], "weights such as offbeat.Polynomial(0.5)")
    check_attributes("aggregate", aggregate, ["open"], "an aggregation such as offbeat.Mean()")
    if resume is not None:
        check_attributes("resume", resume, ["facts"], "what offbeat.checkpoint.load(file) returns")


def server_steps(
    run: "RunState", resume: Checkpoint | None, observe_start: Callable[[StartProgress], None]
) -> Iterator[Snapshot]:
    """The start, and one server step after another."""
    algorithm, aggregation = run.algorithm, run.aggregation
    if resume is not None:
        run.load(resume)
    if resume is None or resume.facts["start"]:
        yield run.start(observe_start)
    for version in range(run.version, run.rounds):
        if run.ended():
            return
        run.consistent = False
        run.publish(version, algorithm)
        run.summed = summed = BufferSum(run, version, run.weights)
        filled = run.scheduler.fill(version)
        run.session.forget(filled.dropped + filled.lost)
        summed.finish(filled.tasks)
        run.count_traffic(filled, summed.upload_size)
        cohort = describe_cohort(filled.tasks, version, run.clients, run.weights)
        known = run.known_cohort(cohort)
        state = algorithm.step(run.state, aggregation.release(summed.total, known), known)
        check = summed.check
        check.add_model(state.x)
        statistics = summed.new_statistics()
        run.state, run.statistics, run.version, run.consistent = state, statistics, version + 1, True
        run.check, run.summed = check, None
        if not run.checks_later or run.version == run.rounds:
            run.settle()
        yield run.snapshot(cohort, filled)


class RunState:
    """All that changes during a run."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        engine: Engine,
        dispatch: Dispatch,
        weights: StalenessWeights,
        buffer: int,
        rounds: int,
        max_staleness: float,
        aggregate: Aggregator,
        seed: int,
        compress: Compression | None = None,
    ) -> None:
        check_compression(algorithm, compress, aggregate)
        self.algorithm = algorithm
        self.dispatch = dispatch
        self.buffer = buffer
        self.weights = weights
        self.rounds = rounds
        self.clients = engine.clients
        x, self.statistics = engine.initial()
        context = AggregationContext(
            algorithm,
            x,
            dispatch,
            weights,
            buffer,
            engine.clients,
            rounds,
            max_staleness,
            seed,
            engine.availability,
        )
        self.aggregation = aggregate.open(context)
        rng = dispatch.source(seed)
        if self.aggregation.hides_sample:
            rng.hide(secrets.randbits(256))
        self.compressed = None if compress is None else Compressed(algorithm, compress, len(x))
        self.session: Session = engine.open(self.compressed or algorithm, seed, rng)
        if isinstance(self.session, TunedSession):
            self.session.expect(buffer, rounds)
        # on a GPU, waiting for a check would leave the device idle
        self.checks_later = works_asynchronously(x.device) and not self.aggregation.private
        sizes = [trees.numel(probe_upload(algorithm, x, version)) for version in (0, 1)]
        self.piece = self.aggregation.piece(max(sizes))  # uploads that are added at a time
        streams = isinstance(self.session, StreamingSession) and self.session.streams
        self.gathered_at_once = self.piece if streams else None  # uploads; None: those of a buffer
        self.growing: GrowingSession | None = None  # the session, if it hands over a growing part of a buffer
        if self.piece and isinstance(self.session, GrowingSession) and self.session.grows:
            self.growing = self.session
        self.summed: BufferSum | None = None  # of the buffer that is being filled
        self.check: FiniteCheck | None = None  # of the last step, if its result is not known yet
        if isinstance(self.session, SecureEncodingSession):
            self.session.set_secure_encoding(self.aggregation.secure_encoding, self.aggregation.private)
        self.scheduler: BufferSource = make_scheduler(
            self.session,
            dispatch,
            rng,
            engine.clients,
            buffer,
            max_staleness,
            engine.availability,
            aggregate.participation,
            self._save_progress if isinstance(self.session, PersistentSession) else lambda: None,
        )
        self.state = algorithm.init(x)
        self.version = 0
        self.sent = Traffic()
        self._done = 0  # clients that have finished the start
        self._start_sum: list[Tensor] = []  # of their uploads, leaf by leaf
        self._start_checkpoint: Checkpoint | None = None  # where the run resumes in its start
        self.consistent = True  # False during a step and after a failed one
        self._settings = {
            "algorithm": repr(algorithm),
            "dispatch": repr(dispatch),
            "buffer": buffer,
            "limit": str(max_staleness),
            "seed": seed,
            "clients": engine.clients,
            "model size": len(x),
            "aggregate": repr(aggregate),
            "compress": None if compress is None else repr(compress),
        }

    def publish(self, version: int, algorithm: AnyAlgorithm) -> None:
        """Publish the state to clients."""
        message = algorithm.broadcast(self.state, version)
        self._started, self._message_size = (
            self.scheduler.counts.started,
            trees.numel((message, self.statistics)),
        )
        if self.compressed is not None:
            begun = algorithm is self.algorithm
            algorithm = self.compressed if begun else replace(self.compressed, start=True)
        self.session.publish(version, algorithm, message, self.statistics)

    def settle(self) -> None:
        """Raise if the last step diverged."""
        if self.check is not None:
            self.check.settle()
            self.check = None

    def count_traffic(self, filled: Buffer, upload: int) -> None:
        """Count the numbers that one step sent: `upload` for each upload, including dropped ones."""
        started = self.scheduler.counts.started - self._started
        arrived = len(filled.tasks) + len(filled.dropped)
        self.sent = Traffic(self.sent.down + started * self._message_size, self.sent.up + arrived * upload)

    def upload_size(self, updates: ClientUpdates, count: int) -> int:
        """The size of one of `count` uploads, with the statistics beside it."""
        uploads = trees.numel(updates.uploads) // count
        if self.compressed is not None:
            sent = sum(leaf.nbytes for leaf in trees.leaves(updates.uploads))
            uploads = -(-sent // (count * self.state.x.element_size()))
        return uploads + trees.numel(updates.statistics) // count

    def decode(self, uploads: Tree) -> Tree:
        """Uploads with plain vectors in place of compressed ones."""
        return uploads if self.compressed is None else self.compressed.decode(uploads)

    def no_uploads(self) -> Tree:
        """The uploads of a timed release to which no client contributed."""
        upload = probe_upload(self.algorithm, self.state.x)
        return trees.map(lambda leaf: leaf.new_zeros((0, *leaf.shape)), upload)

    def known_cohort(self, cohort: Cohort) -> Cohort:
        """What the server's step may know about a cohort, which is secret under a timed dispatch."""
        if not isinstance(self.dispatch, TimedDispatch):
            return cohort
        return nominal_cohort(self.dispatch, cohort.version, self.clients, self.buffer, self.weights)

    def ended(self) -> str | None:
        """Why no further step may be taken, if so."""
        used_up = self.scheduler.ended()
        if used_up and self.aggregation.private:
            used_up = f"the privacy budget is spent: {used_up}"
        return self.aggregation.ended() or used_up

    @property
    def keeps_statistics(self) -> bool:
        """Whether running statistics stay: in private and robust runs nothing may bypass the sum."""
        return self.aggregation.private or isinstance(self.aggregation, RobustAggregation)

    def check_statistics(self, statistics: Statistics) -> None:
        """Reject statistics that clients have changed, if they must stay constant."""
        for name, value in mean_statistics(statistics).items():
            if not torch.allclose(value.double(), self.statistics[name].double()):
                raise InputError(
                    f"the running statistic {name} would leave clients beside the aggregation: "
                    "use a module with GroupNorm in place of BatchNorm."
                )

    def start(self, observe: Callable[[StartProgress], None]) -> Snapshot:
        """The full-participation start, or the rest of it, where the algorithm has one."""
        warmup = self.algorithm.warmup()
        if warmup is None:
            return self.snapshot(None, None)
        self.publish(0, warmup)
        filled = self.scheduler.everyone()  # the same for a run that was interrupted in its start
        if self._start_checkpoint is not None:
            self._load_session(self._start_checkpoint)
        piece = max(_MIN_PIECE, min(_MAX_PIECE, self.clients // 20))
        while self._done < self.clients:
            rest = self.clients - self._done
            size = rest // max(1, rest // piece)  # no piece is small: secure aggregation would refuse it
            tasks = filled.tasks[self._done : self._done + size]
            self.consistent = False
            summed = BufferSum(self, 0, Equal(), "in the start: check the model and the data")
            summed.finish(tasks)
            self.count_traffic(filled._replace(tasks=tasks), summed.upload_size)
            self._started = self.scheduler.counts.started
            total = summed.total
            part = trees.leaves(total)
            self._start_sum = (
                [a + b for a, b in zip(self._start_sum, part, strict=True)] if self._start_sum else part
            )
            self._done, self.consistent = self._done + len(tasks), True
            if self._done < self.clients:
                observe(StartProgress(self._done, self.clients, partial(self.save, 0), self.session.confirm))
        everyone = describe_cohort(filled.tasks, 0, self.clients, Equal())
        mean = self.aggregation.release(trees.unflatten(trees.structure(total), self._start_sum), everyone)
        self.state = warmup.step(self.state, mean, everyone)
        self._done, self._start_sum = 0, []
        return self.snapshot(None, filled)

    def snapshot(self, cohort: Cohort | None, filled: Buffer | None) -> Snapshot:
        return Snapshot(
            self.version,
            self.session.now,
            self.state,
            self.statistics,
            cohort,
            filled,
            self.scheduler.counts,
            self.sent,
            self.aggregation.spent(),
            self.ended() if self.version < self.rounds else None,
            partial(self.save, self.version),
            self.session.confirm,
            self.check.settle if self.check else lambda: None,
            self.session.execution if isinstance(self.session, TunedSession) else lambda: None,
            self.session.personal if isinstance(self.session, PersonalSession) else lambda client: {},
        )

    def save(self, version: int) -> Checkpoint:
        if version == self.version:
            self.settle()  # raises if the step diverged
        if version != self.version or not self.consistent:
            raise InputError(
                f"the run has left version {version}: take a checkpoint of a snapshot before the next one."
            )
        saved, summed = self.session.save(), self.aggregation.save()
        tensors = {f"state.{n}": leaf for n, leaf in enumerate(trees.leaves(self.state))}
        tensors |= {f"statistics.{name}": value for name, value in self.statistics.items()}
        tensors |= {f"session.{name}": value for name, value in saved.tensors.items()}
        tensors |= {f"aggregate.{name}": value for name, value in summed.tensors.items()}
        tensors |= {f"start.{n}": leaf for n, leaf in enumerate(self._start_sum)}
        facts = {
            "version": self.version,
            "settings": self._settings,
            "sent": self.sent,
            "start": self._done,
            "flow": self.scheduler.save(),
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
            if known.get(name) != now
        ]
        if differing:
            raise InputError(f"the checkpoint is of another run: {'; '.join(differing)}.")
        spec, device = trees.structure(self.state), self.state.x.device
        kept = sum(name.startswith("state.") for name in tensors)
        if kept != spec.num_leaves:
            raise InputError(
                f"the checkpoint's server state has {kept} parts, and that of this method now has "
                f"{spec.num_leaves}: another version of the method wrote it. Start the run again, or "
                "finish it with the version of offbeat that began it."
            )
        leaves = [tensors[f"state.{n}"].to(device) for n in range(spec.num_leaves)]
        self.state = trees.unflatten(spec, leaves)
        self.statistics = {name: tensors[f"statistics.{name}"].to(device) for name in self.statistics}
        self.aggregation.load(SavedState(facts["aggregate"], _with_prefix("aggregate", tensors)))
        self.version = facts["version"]
        self.sent = Traffic(*facts["sent"])
        self._done = facts["start"]
        if self._done:
            count = sum(name.startswith("start.") for name in tensors)
            self._start_sum = [tensors[f"start.{n}"].to(device) for n in range(count)]
            self._start_checkpoint = checkpoint
        else:
            self._load_session(checkpoint)

    def _save_progress(self) -> None:
        if isinstance(self.session, PersistentSession):
            self.session.save_progress(self.scheduler.save())
            if self.summed is not None and isinstance(self.scheduler, TaskBook):
                self.summed.add(self.scheduler.buffered)

    def _load_session(self, checkpoint: Checkpoint) -> None:
        facts, tensors = checkpoint
        self.session.load(SavedState(facts["session"], _with_prefix("session", tensors)))
        kept = self.session.saved_progress() if isinstance(self.session, PersistentSession) else None
        self.scheduler.load(kept or facts["flow"])
        self._started = self.scheduler.counts.started


class BufferSum:
    """The sum of the uploads of one server step.

    Uploads are added in the order of the buffer, in pieces that follow from its aggregation and the size of
    an upload alone: sums are the same to the bit, whether an engine computes a buffer as a whole, or a
    deployed server adds each piece once it has arrived, or again after it was resumed.
    """

    def __init__(
        self, run: RunState, version: int, weights: StalenessWeights, where: str | None = None
    ) -> None:
        self._run, self._version, self._weights, self._where = run, version, weights, where
        self._added = 0  # tasks
        self._statistics: list[Statistics] = []
        self.total: Tree | None = None
        self.upload_size = trees.numel(run.statistics)  # if there is no upload
        self.check = FiniteCheck(version + 1)

    def add(self, tasks: tuple[Task, ...]) -> None:
        """Add what is complete of a buffer that is being filled, where pieces are gathered one by one."""
        if self._run.gathered_at_once:
            self._gather(tasks[: len(tasks) - len(tasks) % self._run.gathered_at_once])

    def finish(self, tasks: tuple[Task, ...]) -> None:
        """Add the rest of a full buffer."""
        if tasks:
            self._gather(tasks)
        else:
            self._collect(self._run.no_uploads(), ())
        self._run.settle()  # of the last step, now that the device has more to do

    def new_statistics(self) -> Statistics:
        """The running statistics after the step."""
        if not self._statistics:
            return self._run.statistics
        names = self._statistics[0]
        return mean_statistics({name: torch.cat([part[name] for part in self._statistics]) for name in names})

    def _gather(self, tasks: tuple[Task, ...]) -> None:
        """Gather and add the tasks that were not added yet."""
        growing, piece = self._run.growing, self._run.piece
        if growing and piece:
            for updates in growing.gather_growing(tasks, self._version):
                ready = len(trees.leaves(updates.uploads)[0])
                rows = slice(self._added, ready if ready == len(tasks) else ready - ready % piece)
                if some := tasks[rows]:
                    self._take(trees.map(lambda leaf, rows=rows: leaf[rows], updates), some)
                    self._added = rows.stop
            return
        at_once = self._run.gathered_at_once or len(tasks)
        while some := tasks[self._added : self._added + at_once]:
            updates = self._run.session.gather(some, self._version)
            self.check.check_uploads(self._where)  # of earlier pieces, which are then no longer held
            self._take(updates, some)
            self._added += len(some)

    def _take(self, updates: ClientUpdates, tasks: tuple[Task, ...]) -> None:
        run, piece = self._run, self._run.piece or len(tasks)
        self.upload_size = run.upload_size(updates, len(tasks))
        if run.keeps_statistics:
            run.check_statistics(updates.statistics)
        else:
            self._statistics.append(updates.statistics)
        if len(tasks) <= piece:
            self._collect(run.decode(updates.uploads), tasks)
            return
        for first in range(0, len(tasks), piece):
            rows = slice(first, first + piece)
            part = trees.map(lambda leaf, rows=rows: leaf[rows], updates.uploads)
            self._collect(run.decode(part), tasks[rows])

    def _collect(self, uploads: Tree, tasks: tuple[Task, ...]) -> None:
        self.check.add_uploads(uploads, tasks)
        if self._where is not None or not self._run.checks_later:  # nothing settles the check of a start
            self.check.check_uploads(self._where)
        cohort = describe_cohort(tasks, self._version, self._run.clients, self._weights)
        self.total = self._run.aggregation.collect(uploads, tasks, cohort, self.total)


def describe_cohort(
    tasks: tuple[Task, ...], version: int, population: int, weights: StalenessWeights
) -> Cohort:
    """What the server knows of a full buffer."""
    staleness = tuple(version - task.version for task in tasks)
    return Cohort(version, population, staleness, tuple(weights(age) for age in staleness))


def works_asynchronously(device: torch.device) -> bool:
    """Whether a device computes asynchronously."""
    return device.type == "cuda"


def _with_prefix(part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part of a checkpoint, without its prefix."""
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{part}.")}
    return {name.removeprefix(f"{part}."): tensor for name, tensor in own.items()}


def check_fit(
    algorithm: AnyAlgorithm, dispatch: Dispatch, weights: StalenessWeights, rounds: int, max_staleness: float
) -> None:
    """Reject a method under a protocol that it is not defined for."""
    name = type(unwrapped(algorithm)).__name__
    if not isinstance(weights, Equal) and trees.leaves(algorithm.memory(torch.zeros(1))):
        # sums over clients' memory, such as the mean of control variates, would break
        raise InputError(f"{name} has no staleness weights, since its clients keep memory: use constant.")
    if isinstance(dispatch, TimedDispatch) and shrinks_without_updates(algorithm):
        raise InputError(
            f"{name} averages models, and the number of uploads varies between releases by a clock: use a "
            "method that averages updates."
        )
    if traits_of(algorithm).two_phases:
        if not isinstance(dispatch, Phases):
            raise InputError(f"{name} needs each cohort twice in a row: use phases dispatch.")
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
        oldest = min(max_staleness, rounds - 1)
        if oldest >= span:
            raise InputError(
                f"{name} with a span of {span} takes updates of a staleness below that, "
                f"and here it may reach {oldest:.0f}: lower the staleness limit, or raise the span."
            )


def check_extendable(name: str, parameters: Mapping[str, Any], rounds: int, later: int) -> None:
    """Reject the extension of a run whose rates depend on its number of rounds, which is found by a trial."""
    if len({repr(build(name, Setting(1, 1, each), parameters)) for each in (rounds, later)}) > 1:
        raise InputError(
            f"{name} sets its rates by {setting_name('rounds')}, so {later} in place of {rounds} is another "
            f"run: name another {setting_name('out')}, or use a method whose rates do not depend on it, such "
            "as cadence."
        )
