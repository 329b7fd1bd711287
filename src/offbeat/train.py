"""The loop: a generator of snapshots, one per server step; the caller owns the `for`."""

import math
from collections.abc import Callable, Iterator

import torch

from offbeat.aggregate.aggregation import Aggregate
from offbeat.aggregate.mean import Mean
from offbeat.checkpoint import Checkpoint
from offbeat.core import AnyAlgorithm
from offbeat.course import Course, check, describe, names
from offbeat.engines.engine import Engine
from offbeat.errors import DivergedError, InputError
from offbeat.fit import check_fit
from offbeat.schedule.dispatch import Dispatch
from offbeat.schedule.staleness import Equal, Weights
from offbeat.snapshot import Snapshot, Starting


def train(
    algorithm: AnyAlgorithm,
    engine: Engine,
    *,
    dispatch: Dispatch,
    buffer: int,
    rounds: int,
    weights: Weights = Equal(),
    limit: float = math.inf,
    aggregate: Aggregate = Mean(),
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
    check_fit(algorithm, dispatch, weights, rounds, limit)
    run = Course(algorithm, engine, dispatch, weights, buffer, rounds, limit, aggregate, seed)
    try:
        yield from steps(run, resume, observe_start)
    finally:
        run.session.close()


def steps(
    run: Course, resume: Checkpoint | None, observe_start: Callable[[Starting], None]
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
        cohort = describe(filled.tasks, version, run.clients, run.weights)
        check(gathered, filled.tasks, f"at server step {version + 1}: lower the rates")
        statistics = run.learned(gathered)
        total = aggregation.collect(gathered.uploads, filled.tasks, cohort)
        state = algorithm.step(run.state, aggregation.release(total, cohort), cohort)
        if not bool(torch.isfinite(state.x).all()):
            raise DivergedError(
                f"the model became NaN or infinite at server step {version + 1} "
                f"(its updates came from {names(filled.tasks)}): lower the rates."
            )
        run.state, run.statistics, run.version, run.whole = state, statistics, version + 1, True
        yield run.snapshot(cohort, filled)
