"""Engines under a virtual clock: the sequential and the vectorised one, and the session of a simulated run.

Nothing has to be computed when a task starts or ends: `gather` computes a full buffer at once, each
task from the message of its own version, and then commits the clients' memory. A task that was dropped
or lost is never committed. Where clients keep memory and one is in a buffer twice, the buffer is computed in
waves, so that its second visit sees what its first visit stored.

To keep a GPU busy, tasks that are still in flight may be computed ahead of their buffer: their version
exists, what their client remembers is known, and the clock knows which tasks arrive next. They are
queued beside the server's own work, and checkpoints hold what was computed but not yet used.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.uploads import clients_read_staleness, probe_upload
from offbeat.core import AnyAlgorithm, SavedState, Task, Vector, Visit, traits_of
from offbeat.data.client_store import Anywhere, MemoryBackend, make_client_store
from offbeat.data.population import Population
from offbeat.engines.cuda import SideStream
from offbeat.engines.engine import ClientUpdates
from offbeat.engines.execution import Autotune, AutotuneExecutor, Execution, announce_compiler
from offbeat.engines.local import (
    ClientMemory,
    Executor,
    GrowingExecutor,
    PlansAhead,
    PrefersLargeGroups,
    ReportsExecution,
    SequentialExecutor,
    TaskResults,
    TaskStart,
    check_module,
    task_key,
    threads_for,
)
from offbeat.errors import InputError, check_attributes, renamed_parameters
from offbeat.nn.problem import Problem, Statistics
from offbeat.schedule.availability import Always, Availability, Dropout
from offbeat.schedule.clock import Arrival, Clock, TaskLimits
from offbeat.schedule.delays import Delay, Tiers
from offbeat.schedule.devices import TaskWork, for_work
from offbeat.schedule.rng import Rng
from offbeat.trees import Tree

_MIN_GROUP = 8  # tasks that are worth computing together
_SPARSE_GROUP = 4  # results are copied out of a group once fewer than one in this many is still needed


_TASKS_ON_GPU = 64  # computed at once
_MEMORY_SHARE = 0.1  # of a GPU's memory, for results that were computed ahead


class SimulatedEngine(ABC):
    """What engines under a virtual clock share; each has an executor of its own."""

    problem: Problem
    population: Population
    delays: Delay
    availability: Availability
    dropout: Dropout
    memory: MemoryBackend
    limits: TaskLimits

    def __post_init__(self) -> None:
        check_attributes("the problem", self.problem, ["initial", "outputs"], "an offbeat.Problem")
        check_attributes("the population", self.population, ["parts", "work"], "an offbeat.Population")
        check_attributes("delays", self.delays, ["bind"], 'delays such as offbeat.Tiers("mild")')
        check_attributes("availability", self.availability, ["bind"], "one such as offbeat.Always()")
        check_attributes("limits", self.limits, ["deadline"], "an offbeat.TaskLimits")
        check_attributes("dropout", self.dropout, ["loses"], "one such as offbeat.Dropout(0.1)")

    @abstractmethod
    def make_executor(self) -> Executor:
        """The executor of one run."""

    @abstractmethod
    def tasks_at_once(self) -> int:
        """How many tasks to compute together, some ahead of their buffer; 0: those of the buffer."""

    @property
    def clients(self) -> int:
        return len(self.population)

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, rng: Rng) -> "Simulation":
        work = task_work(algorithm, self.problem, self.population)
        seconds = for_work(self.delays, work).bind(rng, self.clients)
        clock = Clock(seconds, rng, self.dropout, self.limits, work.steps)
        check_module(algorithm, self.problem, self.population, seed)
        executor = self.make_executor()
        ahead = self.tasks_at_once()
        threads = partial(threads_for, self.problem) if isinstance(self, Vectorised) else nullcontext
        return Simulation(
            algorithm, self.problem, clock, executor, seed, self.memory, self.clients, ahead, threads
        )


@dataclass(frozen=True)
class Sequential(SimulatedEngine):
    """One client after another: the reference.

    Attributes:
        problem: The module and the loss.
        population: The clients and their examples.
        delays: How long tasks take.
        availability: When clients can be given a task.
        dropout: How often tasks are lost.
        memory: Where the memory of clients is kept.
        limits: When tasks end before their work is done.
    """

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    memory: MemoryBackend = Anywhere()
    limits: TaskLimits = TaskLimits()

    def make_executor(self) -> Executor:
        return SequentialExecutor(self.problem, self.population)

    def tasks_at_once(self) -> int:
        return 0


@renamed_parameters(how="execution")
@dataclass(frozen=True)
class Vectorised(SimulatedEngine):
    """Many clients at once, at most `chunk` of them; on a GPU also ahead of their buffer.

    Attributes:
        problem: The module and the loss.
        population: The clients and their examples.
        delays: How long tasks take.
        availability: When clients can be given a task.
        dropout: How often tasks are lost.
        chunk: The largest number of clients that are computed at once; None: as many as fit, on a CPU
            into its caches.
        memory: Where the memory of clients is kept.
        execution: How the clients are computed; None: what a trial finds to be fastest.
        ahead: How many tasks are computed at once, some ahead of their buffer; None: 64 on a GPU.
        limits: When tasks end before their work is done.
    """

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    chunk: int | None = None
    memory: MemoryBackend = Anywhere()
    execution: Execution | None = None  # None: by a trial
    ahead: int | None = None  # tasks computed at once, some ahead of their buffer; None: 64 on a GPU
    limits: TaskLimits = TaskLimits()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None and self.execution is not None:
            raise InputError("an execution has a chunk of its own: give chunk there, such as Vmap(chunk).")

    def make_executor(self) -> Executor:
        return (self.execution or Autotune(self.chunk)).executor(self.problem, self.population)

    def tasks_at_once(self) -> int:
        if self.ahead is not None or self.problem.device.type != "cuda":
            return self.ahead or 0
        total = torch.cuda.get_device_properties(self.problem.device).total_memory
        return max(1, min(_TASKS_ON_GPU, int(_MEMORY_SHARE * total / (8 * self.problem.size))))


def task_work(algorithm: AnyAlgorithm, problem: Problem, population: Population) -> TaskWork:
    """The steps of each client's task, and the bytes of a message and of an upload."""
    x, statistics = problem.initial()
    message = (algorithm.broadcast(algorithm.init(x), 0), statistics)
    upload = (probe_upload(algorithm, x), statistics)
    down, up = (sum(leaf.nbytes for leaf in trees.leaves(tree)) for tree in (message, upload))
    return TaskWork(population.steps, down, up)


class TaskRanks:
    """The order in which the tasks of each version started, where the algorithm asks for it."""

    def __init__(self, algorithm: AnyAlgorithm) -> None:
        self._wanted = traits_of(algorithm).reads_rank
        self._ranks: dict[Task, int] = {}  # of tasks in flight or waiting
        self._version = -1  # the newest, from which all tasks start
        self._started = 0  # tasks that started from it

    def start(self, task: Task) -> None:
        """Count one more task of its version."""
        if not self._wanted:
            return
        if task.version != self._version:
            self._version, self._started = task.version, 0
        self._ranks[task] = self._started
        self._started += 1

    def of(self, task: Task) -> Tensor | tuple[()]:
        """How many tasks of the same version started before it."""
        return torch.tensor(self._ranks[task]) if self._wanted else ()

    def forget(self, tasks: Iterable[Task]) -> None:
        """Drop tasks that are done."""
        for task in tasks:
            self._ranks.pop(task, None)

    def save(self) -> list[list[int]]:
        """The ranks of tasks in flight, as JSON; between two versions, before any task of the next."""
        return [[*task, rank] for task, rank in self._ranks.items()]

    def load(self, rows: Sequence[Sequence[int]]) -> None:
        """Restore what `save` gave."""
        self._ranks = {Task(client, version, visit): rank for client, version, visit, rank in rows}
        self._version, self._started = -1, 0


class Completion(Protocol):
    """The end of the work that was queued so far."""

    def take(self, results: Tree) -> None:
        """Make the caller's next work wait for it, and hand the results to the caller's stream."""
        ...


class ComputeStream(Protocol):
    """Where an engine's work is queued."""

    @contextmanager
    def running(self, used: Tree) -> Iterator[None]:
        """Queue what is computed inside here, after all that the caller has queued so far."""
        ...

    def mark(self) -> Completion: ...


class CurrentStream:
    """The caller's own stream; on a CPU, work is done at once."""

    @contextmanager
    def running(self, used: Tree) -> Iterator[None]:
        yield

    def mark(self) -> "CurrentStream":
        return self

    def take(self, results: Tree) -> None:
        pass


class ComputedTask(NamedTuple):
    """One task's row among results that were computed together."""

    results: TaskResults
    row: int
    completion: Completion


class Simulation:
    """A session under a virtual clock; computes up to `ahead` tasks at once where as many are in flight."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        problem: Problem,
        clock: Clock,
        executor: Executor,
        seed: int,
        backend: MemoryBackend,
        clients: int,
        ahead: int = 0,
        threads: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        x, statistics = problem.initial()
        self._algorithm = algorithm
        self._clock = clock
        self._executor = executor
        self._seed = seed
        self._device = problem.device
        self._initial = (algorithm.init(x), statistics)
        initial = ClientMemory.initial(algorithm, problem)
        self._remembers = bool(trees.leaves(initial))  # whether a visit depends on earlier ones
        self._make_store = partial(make_client_store, backend, initial, clients, problem.device)
        self._store = self._make_store()
        self._messages: dict[int, Tree] = {}
        self._references: Counter[int] = Counter()  # tasks in flight or waiting, by version
        self._current = 0
        self._ranks = TaskRanks(algorithm)
        self._stream: ComputeStream = CurrentStream()
        if problem.device.type == "cuda":
            self._stream = SideStream(problem.device)
        self._threads = threads
        self._ahead = 0 if ahead and clients_read_staleness(algorithm) else ahead
        self._computed: dict[Task, ComputedTask] = {}
        self._open_visits: dict[int, list[int]] = {}  # by client, in order; kept where tasks run ahead

    @property
    def now(self) -> float:
        return self._clock.now

    @property
    def busy(self) -> int:
        return self._clock.busy

    def expect(self, buffer: int, rounds: int) -> None:
        if isinstance(self._executor, PlansAhead):
            self._executor.expect(buffer, rounds)
        announce_compiler(self._executor, self._algorithm, buffer)

    def execution(self) -> dict[str, Any] | None:
        return self._executor.report() if isinstance(self._executor, ReportsExecution) else None

    @property
    def streams(self) -> bool:
        return isinstance(self._executor, SequentialExecutor)

    @property
    def grows(self) -> bool:
        return isinstance(self._executor, GrowingExecutor) and self._executor.grows and not self._ahead

    @property
    def recalls(self) -> bool:
        return self._clock.recalls

    def recall(self, version: int) -> Sequence[Task]:
        recalled = self._clock.recall(version)
        for task in recalled:
            self._computed.pop(task, None)
        return recalled

    def end_early(self, task: Task, steps: int) -> None:
        self._clock.end_early(task, steps)

    def start(self, task: Task, *, sure: bool = False, until: float = inf) -> None:
        self._references[task.version] += 1
        self._ranks.start(task)
        if self._ahead:
            self._open_visits.setdefault(task.client, []).append(task.visit)
        self._clock.start(task, sure=sure)

    def next(self, until: float = inf) -> Arrival | None:
        return self._clock.next(until)

    def wait(self, until: float) -> None:
        self._clock.wait(until)

    def publish(self, version: int, algorithm: AnyAlgorithm, message: Tree, statistics: Statistics) -> None:
        self._algorithm = algorithm
        self._messages[version] = (message, statistics)
        self._current = version
        self._drop_messages()

    def gather(self, tasks: Sequence[Task], version: int) -> ClientUpdates:
        waves = _waves(tasks) if self._remembers else [list(range(len(tasks)))]
        results = [self._run_wave([tasks[row] for row in wave], version) for wave in waves]
        whole = results[0] if len(waves) == 1 else self._join(waves, results)
        self.forget(tasks)
        self._copy_sparse_groups()
        self._launch(self._upcoming(), version)
        return ClientUpdates(whole.uploads, whole.statistics)

    def gather_growing(self, tasks: Sequence[Task], version: int) -> Iterator[ClientUpdates]:
        executor, repeated = self._executor, len({task.client for task in tasks}) < len(tasks)
        if not isinstance(executor, GrowingExecutor) or (self._remembers and repeated):
            yield self.gather(tasks, version)
            return
        starts = [self._task_start(task, version) for task in tasks]
        for results in executor.growing(self._algorithm, tasks, starts, self._seed):
            yield ClientUpdates(results.uploads, results.statistics)
        self._store.write([task.client for task in tasks], results.memories)
        self.forget(tasks)

    def forget(self, tasks: Sequence[Task]) -> None:
        self._references.subtract(task.version for task in tasks)
        self._clock.forget(tasks)
        self._ranks.forget(tasks)
        for task in tasks:
            self._computed.pop(task, None)
            visits = self._open_visits.get(task.client, [])
            if task.visit in visits:
                visits.remove(task.visit)
            if not visits:
                self._open_visits.pop(task.client, None)
        self._drop_messages()

    def personal(self, client: int) -> Statistics:
        memory: ClientMemory = self._store.read(client)
        return memory.personal

    def save(self) -> SavedState:
        clients, columns = self._store.save()
        tensors = {f"memory.{leaf}": column for leaf, column in enumerate(columns)}
        for version, message in self._messages.items():
            for leaf, tensor in enumerate(trees.leaves(message)):
                tensors[f"message.{version}.{leaf}"] = tensor
        computed = list(self._computed)
        if computed:
            for leaf, tensor in enumerate(trees.leaves(self._take(computed))):
                tensors[f"ready.{leaf}"] = tensor
        facts = {
            "ready": computed,
            "way": self._executor.chosen if isinstance(self._executor, AutotuneExecutor) else None,
            "clock": self._clock.save(),
            "holders": sorted(self._references.items()),
            "ranks": self._ranks.save(),
            "current": self._current,
            "versions": sorted(self._messages),
            "clients": clients,
            "columns": len(columns),
            "mapped": self._store.mapped,
        }
        return SavedState(facts, tensors)

    def confirm(self) -> None:
        self._store.confirm()

    def load(self, saved: SavedState) -> None:
        facts, tensors = saved
        self._clock.load(facts["clock"])
        self._references = Counter(dict(facts["holders"]))
        self._current = facts["current"]
        self._ranks.load(facts.get("ranks", []))
        self._store = self._make_store(mapped=facts["mapped"])
        self._store.load(facts["clients"], [tensors[f"memory.{leaf}"] for leaf in range(facts["columns"])])
        self._messages = {version: self._load_message(version, tensors) for version in facts["versions"]}
        if isinstance(self._executor, AutotuneExecutor) and facts["way"] is not None:
            self._executor.choose(facts["way"], self._algorithm)
        self._open_visits = {}
        if self._ahead:
            for task in sorted(self._clock.flying(), key=lambda task: task.visit):
                self._open_visits.setdefault(task.client, []).append(task.visit)
        self._load_computed([Task(*task) for task in facts["ready"]], tensors)

    def close(self) -> None:
        self._executor.close()

    def _run_wave(self, tasks: list[Task], version: int) -> TaskResults:
        """Compute tasks of distinct clients and commit their memory."""
        missing = [task for task in tasks if task not in self._computed]
        if missing and isinstance(self._executor, PrefersLargeGroups) and self._executor.large:
            missing = missing + self._upcoming(used=len(tasks) - len(missing))
        self._launch(missing, version)
        results = self._take(tasks)
        self._store.write([task.client for task in tasks], results.memories)
        return results

    def _upcoming(self, used: int = 0) -> list[Task]:
        """Tasks in flight to compute next, in the order of their arrival; a small group is put off.

        Of the results that were computed ahead, `used` are about to be used.
        """
        count = self._ahead - (len(self._computed) - used)
        if count < min(_MIN_GROUP, self._ahead) or not count:
            return []
        flying = [task for task in self._clock.upcoming(self._ahead) if task not in self._computed]
        if self._remembers:
            flying = [task for task in flying if self._open_visits[task.client][0] == task.visit]
        able = flying[:count]
        return able if len(able) >= min(_MIN_GROUP, self._ahead) else []

    def _launch(self, tasks: list[Task], version: int) -> None:
        if not tasks:
            return
        starts = [self._task_start(task, version) for task in tasks]
        with self._threads(), self._stream.running(starts):
            results = self._executor(self._algorithm, tasks, starts, self._seed)
        completion = self._stream.mark()
        for row, task in enumerate(tasks):
            self._computed[task] = ComputedTask(results, row, completion)

    def _task_start(self, task: Task, version: int) -> TaskStart:
        message, statistics = self._messages[task.version]
        began = torch.tensor(task.version)
        key = task_key(self._algorithm, task, self._seed)
        visit = Visit(began, version - began, self._ranks.of(task), key)
        steps = self._clock.steps_of(task)
        return TaskStart(message, statistics, self._store.read(task.client), visit, steps or ())

    def _take(self, tasks: Sequence[Task]) -> TaskResults:
        """The computed results of these tasks, in their order."""
        found = [self._computed[task] for task in tasks]
        first = found[0].results
        for results, _, completion in {id(each.results): each for each in found}.values():
            completion.take(results)
        whole = len(trees.leaves(first)[0]) == len(tasks)
        if whole and all(each.results is first and each.row == row for row, each in enumerate(found)):
            return first
        rows = [trees.map(lambda leaf, row=each.row: leaf[row], each.results) for each in found]
        taken: TaskResults = trees.stack(rows)
        return taken

    def _copy_sparse_groups(self) -> None:
        """Copy the few results that stragglers still need, so that they do not hold a whole group."""
        groups: dict[int, list[Task]] = {}
        for task, each in self._computed.items():
            groups.setdefault(id(each.results), []).append(task)
        for tasks in groups.values():
            rows = len(trees.leaves(self._computed[tasks[0]].results)[0])
            if _SPARSE_GROUP * len(tasks) < rows:
                results, completion = self._take(tasks), CurrentStream()  # copied on the caller's stream
                self._computed |= {
                    task: ComputedTask(results, row, completion) for row, task in enumerate(tasks)
                }

    def _join(self, waves: list[list[int]], results: list[TaskResults]) -> TaskResults:
        """The results of waves, in the order of their tasks."""
        order = torch.tensor([row for wave in waves for row in wave]).argsort().to(self._device)
        whole: TaskResults = trees.map(lambda *parts: torch.cat(parts)[order], *results)
        return whole

    def _drop_messages(self) -> None:
        """Drop messages that no task in flight started from."""
        for version in [v for v in self._messages if v != self._current and not self._references[v]]:
            del self._messages[version], self._references[version]

    def _load_message(self, version: int, tensors: dict[str, Tensor]) -> Tree:
        state, statistics = self._initial
        structure = trees.structure((self._algorithm.broadcast(state, version), statistics))
        names = [f"message.{version}.{leaf}" for leaf in range(structure.num_leaves)]
        return trees.unflatten(structure, [tensors[name].to(self._device) for name in names])

    def _load_computed(self, tasks: list[Task], tensors: dict[str, Tensor]) -> None:
        self._computed = {}
        if not tasks:
            return
        start = self._task_start(tasks[0], self._current)
        structure = trees.structure(self._executor(self._algorithm, tasks[:1], [start], self._seed))
        leaves = [tensors[f"ready.{leaf}"].to(self._device) for leaf in range(structure.num_leaves)]
        results = trees.unflatten(structure, leaves)
        completion = self._stream.mark()
        self._computed = {task: ComputedTask(results, row, completion) for row, task in enumerate(tasks)}


def _waves(tasks: Sequence[Task]) -> list[list[int]]:
    """Rows of tasks such that no client is in a wave twice, earlier visits in earlier waves."""
    waves: list[list[int]] = []
    seen: Counter[int] = Counter()
    for row, task in enumerate(tasks):
        turn = seen[task.client]
        seen[task.client] += 1
        if turn == len(waves):
            waves.append([])
        waves[turn].append(row)
    return waves
