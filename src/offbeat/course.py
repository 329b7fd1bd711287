"""What changes as a run goes on, and so what a checkpoint holds."""

import secrets
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.aggregation import Aggregate, Opening
from offbeat.checkpoint import Checkpoint
from offbeat.core import AnyAlgorithm, Cohort, Saved, Task
from offbeat.engines.engine import Engine, Gathered, Keeps, Session, Veiled
from offbeat.errors import DivergedError, InputError
from offbeat.problem import Statistics
from offbeat.schedule.dispatch import Dispatch
from offbeat.schedule.filled import Filled, Filling
from offbeat.schedule.flow import Flow
from offbeat.schedule.staleness import Equal, Weights
from offbeat.snapshot import Sent, Snapshot, Starting

_LEAST_PIECE, _MOST_PIECE = 10, 100  # clients whose uploads are held at once in the full-participation start


class Course:
    """One run under way."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        engine: Engine,
        dispatch: Dispatch,
        weights: Weights,
        buffer: int,
        rounds: int,
        limit: float,
        aggregate: Aggregate,
        seed: int,
    ) -> None:
        self.algorithm = algorithm
        self.weights = weights
        self.rounds = rounds
        self.clients = engine.clients
        x, self.statistics = engine.initial()
        opening = Opening(
            algorithm, x, dispatch, weights, buffer, engine.clients, rounds, limit, seed, engine.availability
        )
        self.aggregation = aggregate.open(opening)
        source = dispatch.source(seed)
        if self.aggregation.hides_sample:
            source.hide(secrets.randbits(62))
        self.session: Session = engine.open(algorithm, seed, source)
        if isinstance(self.session, Veiled):
            self.session.veil(self.aggregation.hiding)
        self.flow: Filling = Flow(
            self.session,
            dispatch,
            source,
            engine.clients,
            buffer,
            limit,
            engine.availability,
            aggregate.participation,
            self._keep if isinstance(self.session, Keeps) else lambda: None,
        )
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
            "aggregate": repr(aggregate),
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

    def ended(self) -> str | None:
        """Why no further step may be taken."""
        used_up = self.flow.ended()
        if used_up and self.aggregation.private:
            used_up = f"the privacy budget is spent: {used_up}"
        return self.aggregation.ended() or used_up

    def learned(self, gathered: Gathered) -> Statistics:
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

    def begin(self, observe: Callable[[Starting], None]) -> Snapshot:
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
            rest = self.clients - self._done
            size = rest // max(1, rest // piece)  # so that no piece is small: a secure sum would refuse it
            tasks = filled.tasks[self._done : self._done + size]
            self.whole = False
            gathered = self.session.gather(tasks, 0)
            self.count(filled._replace(tasks=tasks), gathered)
            self._started = self.flow.counts.started
            check(gathered, tasks, "in the start: check the model and the data")
            self.learned(gathered)
            total = self.aggregation.collect(
                gathered.uploads, tasks, describe(tasks, 0, self.clients, Equal())
            )
            part = trees.leaves(total)
            self._sum = [a + b for a, b in zip(self._sum, part, strict=True)] if self._sum else part
            self._done, self.whole = self._done + len(tasks), True
            if self._done < self.clients:
                observe(Starting(self._done, self.clients, partial(self.save, 0), self.session.confirm))
        everybody = describe(filled.tasks, 0, self.clients, Equal())
        mean = self.aggregation.release(trees.rebuild(trees.shape(total), self._sum), everybody)
        self.state = warmup.step(self.state, mean, everybody)
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
        renamed = facts["settings"]["aggregate"].replace(" amplified=", " simulate_amplification=")
        known = facts["settings"] | {"aggregate": renamed}
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
        self.aggregation.load(Saved(facts["aggregate"], _under("aggregate", tensors)))
        self.version = facts["version"]
        self.sent = Sent(*facts["sent"])
        self._done = facts["start"]
        if self._done:
            count = sum(name.startswith("start.") for name in tensors)
            self._sum = [tensors[f"start.{n}"].to(device) for n in range(count)]
            self._cut = checkpoint
        else:
            self._load_session(checkpoint)

    def _keep(self) -> None:
        if isinstance(self.session, Keeps):
            self.session.keep(self.flow.save())

    def _load_session(self, checkpoint: Checkpoint) -> None:
        facts, tensors = checkpoint
        self.session.load(Saved(facts["session"], _under("session", tensors)))
        kept = self.session.kept() if isinstance(self.session, Keeps) else None
        self.flow.load(kept or facts["flow"])
        self._started = self.flow.counts.started


def describe(tasks: tuple[Task, ...], version: int, population: int, weights: Weights) -> Cohort:
    """What the server knows of a full buffer."""
    staleness = tuple(version - task.version for task in tasks)
    return Cohort(version, population, staleness, tuple(weights(age) for age in staleness))


def check(gathered: Gathered, tasks: tuple[Task, ...], where: str) -> None:
    """Stop before a NaN or infinite upload touches the state."""
    bad = set()
    for leaf in trees.leaves(gathered.uploads):
        rows = leaf.reshape(len(tasks), -1)
        if bool(torch.isfinite(rows.sum(1)).all()):  # one pass; a sum that overflows is looked into
            continue
        finite = torch.isfinite(rows).all(1)
        bad |= {task for task, good in zip(tasks, finite.tolist(), strict=True) if not good}
    if bad:
        raise DivergedError(f"the update of {names(bad)} became NaN or infinite {where}.")


def _under(part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part of a checkpoint, by their own names."""
    mine = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{part}.")}
    return {name.removeprefix(f"{part}."): tensor for name, tensor in mine.items()}


def names(tasks: Iterable[Task]) -> str:
    """Whose tasks these are, in words."""
    clients = sorted({task.client for task in tasks})
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"
