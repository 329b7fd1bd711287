"""`offbeat check`: whether a method satisfies what engines, checkpoints and deployments rely on.

The method is run on a small softmax regression in double precision, with clients of different sizes.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from offbeat import draws, trees
from offbeat.aggregate.uploads import ConstantGradient
from offbeat.algorithms import Setting, build, find
from offbeat.core import AnyAlgorithm, Batch, Batches, Cohort, Vector, Visit, traits_of
from offbeat.data.population import Epochs, Examples, Population
from offbeat.engines.local import TaskGradient
from offbeat.engines.process_pool import Workers
from offbeat.engines.simulation import Sequential, Vectorised
from offbeat.errors import error_summary
from offbeat.nn.problem import Problem, cross_entropies
from offbeat.schedule.delays import Exponential
from offbeat.schedule.dispatch import Dispatch, parse_dispatch
from offbeat.schedule.staleness import parse_weights
from offbeat.training.evaluate import evaluate
from offbeat.training.loop import Snapshot, train

_CLIENTS, _FEATURES, _CLASSES, _BUFFER, _ROUNDS = 8, 5, 3, 4, 6
_SIZE = 1009  # parameters of a model on which vectors are counted: nothing else has this length
_TOLERANCE = 1e-9  # relative, between engines


class Finding(NamedTuple):
    """The result of one check; `problem` says what failed, None: nothing."""

    check: str
    problem: str | None


class _Failure(Exception):  # noqa: N818
    """Why a check fails, in a sentence."""


def check_method(name: str) -> Iterator[Finding]:
    """Run every check on a method of the catalogue, with its default parameters."""
    method = find(name)
    try:
        algorithm = build(name, Setting(_BUFFER, 3, _ROUNDS), {})
    except Exception as error:
        yield Finding("builds with its default parameters", _sentence(error))
        return
    yield Finding("builds with its default parameters", None)
    dispatch = parse_dispatch(
        method.dispatch,
        concurrency=6,
        buffer=method.buffer or _BUFFER,
        population=_CLIENTS,
        hand_out="before",
    )
    run = _Runner(algorithm, dispatch, method.buffer or _BUFFER, method.weights, method.max_staleness)
    checks: dict[str, Callable[[], None]] = {
        "its functions are pure": lambda: _check_purity(algorithm),
        "its local work runs under vmap": lambda: _check_vmap(algorithm),
        "a run with its own protocol stays finite": lambda: _check_finite(run),
        "many clients in one vmap give the same model": lambda: run.check_engine(Vectorised),
        "worker processes give the same model": lambda: run.check_engine(Workers),
        "a resumed run gives the same model": lambda: _check_resume(run),
        "it sends and stores what its entry says": lambda: _check_cost(name, algorithm),
    }
    for title, check in checks.items():
        try:
            check()
        except Exception as error:
            yield Finding(title, _sentence(error))
        else:
            yield Finding(title, None)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, _Failure) else f"{error_summary(error)}."


def _problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    module = nn.Linear(_FEATURES, _CLASSES).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return Problem(module, cross_entropies)


def _population() -> Population:
    """Clients with 3 to 13 examples, so that they take different numbers of steps."""
    rng = draws.generator(0, "method check")
    sizes = rng.integers(3, 14, _CLIENTS)
    inputs = torch.from_numpy(rng.normal(size=(sizes.sum(), _FEATURES)))
    targets = torch.from_numpy(rng.integers(0, _CLASSES, sizes.sum()))
    parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    return Population(Examples(inputs, targets), list(parts), Epochs(1, 4))


@dataclasses.dataclass(frozen=True)
class _Runner:
    """Runs of the method under its own protocol."""

    algorithm: AnyAlgorithm
    dispatch: Dispatch
    buffer: int
    weights: str
    max_staleness: int | None

    def snapshots(self, engine: Any = Sequential, **options: Any) -> Iterator[Snapshot]:
        made = engine(_problem(), _population(), Exponential(1.0))
        if engine is Workers:
            made = dataclasses.replace(made, workers=2)
        limit = float("inf") if self.max_staleness is None else self.max_staleness
        return train(
            self.algorithm,
            made,
            dispatch=self.dispatch,
            buffer=self.buffer,
            rounds=_ROUNDS,
            weights=parse_weights(self.weights),
            max_staleness=limit,
            **options,
        )

    def model(self, engine: Any = Sequential, **options: Any) -> Vector:
        *_, last = self.snapshots(engine, **options)
        return last.x

    def check_engine(self, engine: Any) -> None:
        expected, found = self.model(), self.model(engine)
        difference = float((found - expected).norm() / expected.norm())
        if not difference <= _TOLERANCE:
            raise _Failure(
                f"the model differs by {difference:.2g} of its norm from that of the sequential engine: "
                "`local` must compute with tensors alone, without branches on their values."
            )


def _check_finite(run: _Runner) -> None:
    problem, population = _problem(), _population()
    start, _ = problem.initial()
    x = run.model()
    losses = [evaluate(problem, each, population.data)["loss"] for each in (start, x)]
    if not all(map(np.isfinite, losses)):
        raise _Failure("the loss becomes NaN or infinite: lower its default rates.")
    if torch.equal(x, start):
        raise _Failure("the model does not change: `step` has to return a state with a new `x`.")


def _check_resume(run: _Runner) -> None:
    saved = None
    for snapshot in run.snapshots():
        if snapshot.version == _ROUNDS // 2:
            saved = copy.deepcopy(snapshot.checkpoint())
    if saved is None:
        raise _Failure("the run ended before half of its server steps.")
    if not torch.equal(snapshot.x, run.model(resume=saved)):
        raise _Failure("the model differs: all state has to be in what `init` and `memory` return.")


def _local_work(algorithm: AnyAlgorithm) -> tuple[Batches, Visit]:
    data = _population().data
    assert isinstance(data, Examples)
    batches = Batches(
        tuple(Batch((data.inputs[at : at + 4], data.targets[at : at + 4])) for at in (0, 4)),
        (Batch((data.inputs[:8], data.targets[:8])),),
    )
    rank: Any = torch.tensor(0) if traits_of(algorithm).reads_rank else ()
    return batches, Visit(torch.tensor(0), torch.tensor(0), rank)


def _check_vmap(algorithm: AnyAlgorithm) -> None:
    """Map the local work of two clients; a method that does not map runs one client at a time."""
    problem = _problem()
    x, statistics = problem.initial()
    batches, visit = _local_work(algorithm)

    def local(message: Any, memory: Any) -> Any:
        gradient = TaskGradient(problem, problem.differentiate, statistics)
        return algorithm.local(message, memory, batches, visit, gradient)[0]

    pair = (algorithm.broadcast(algorithm.init(x), 0), algorithm.memory(x))
    leaves = trees.leaves(pair)
    spec = trees.structure(pair)

    def mapped(*parts: torch.Tensor) -> Any:
        return tuple(trees.leaves(local(*trees.unflatten(spec, list(parts)))))

    try:
        torch.func.vmap(mapped)(*(torch.stack([leaf, leaf]) for leaf in leaves))
    except RuntimeError:
        raise _Failure(
            "it does not, so its clients are computed one at a time: use torch.where in place of branches on "
            "values, and no operations in place."
        ) from None


def _check_purity(algorithm: AnyAlgorithm) -> None:
    """Call each function twice; the results must be equal, and the arguments unchanged."""
    problem = _problem()
    x, statistics = problem.initial()
    state, memory = algorithm.init(x), algorithm.memory(x)
    batches, visit = _local_work(algorithm)

    def gradient() -> TaskGradient:
        return TaskGradient(problem, problem.differentiate_by_autograd, statistics)

    message = _twice("init", lambda: algorithm.init(x), x) and _twice(
        "broadcast", lambda: algorithm.broadcast(state, 0), state
    )
    upload, _ = _twice(
        "local",
        lambda: algorithm.local(message, memory, batches, visit, gradient()),
        (message, memory, batches),
    )
    cohort = Cohort(0, _CLIENTS, (0,), (1.0,))
    _twice("step", lambda: algorithm.step(state, upload, cohort), (state, upload))


def _twice(name: str, function: Callable[[], Any], arguments: Any) -> Any:
    before = [leaf.clone() for leaf in trees.leaves(arguments)]
    first, second = function(), function()
    if not _equal(trees.leaves(first), trees.leaves(second)):
        raise _Failure(f"`{name}` gives another result when it is called again with the same arguments.")
    if not _equal(before, trees.leaves(arguments)):
        raise _Failure(f"`{name}` changes its arguments: use operations that are not in place.")
    return first


def _equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def _check_cost(name: str, algorithm: AnyAlgorithm) -> None:
    """Count the vectors of a round, and compare them with the entry."""
    x, cost = torch.zeros(_SIZE), find(name).cost
    state, memory = algorithm.init(x), algorithm.memory(x)
    batch, visit = Batch((torch.zeros(1),)), Visit(torch.tensor(0), torch.tensor(0))
    messages, uploads = [], []
    for version in range(1 + traits_of(algorithm).two_phases):
        messages.append(algorithm.broadcast(state, version))
        batches = Batches((batch,), (batch,))
        uploads.append(algorithm.local(messages[-1], memory, batches, visit, ConstantGradient(0.0))[0])
    found = [
        sum(leaf.numel() in (0, _SIZE) for leaf in trees.leaves(each))
        for each in (messages, uploads, memory, state)
    ]
    extra = [trees.numel(messages) - found[0] * _SIZE, trees.numel(uploads) - found[1] * _SIZE]
    if (*found, *extra) != tuple(cost):
        names = ", ".join(
            f"{field}={count}" for field, count in zip(cost._fields, (*found, *extra), strict=True)
        )
        raise _Failure(f"its entry says otherwise: register it with cost=offbeat.Cost({names}).")
