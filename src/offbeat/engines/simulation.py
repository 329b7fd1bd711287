"""Which of the tasks that start from a version each one is, for an algorithm that asks.

Client work under a virtual clock: one run.

Nothing has to be computed when a task starts or ends; `gather` computes a full buffer at once, each
task from the message of its own version, and then commits memory. A task that was dropped or lost
is never committed. If a client is twice in one buffer, the buffer is computed in waves, so that its
second visit sees what its first left.

To keep a GPU full, tasks that are still in flight may be computed ahead of their buffer: their
version exists, their client has nothing else under way, and the clock knows who comes next. They
are queued beside the server's own work, and what was computed but not yet used is in checkpoints.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.uploads import clients_read_staleness
from offbeat.core import AnyAlgorithm, SavedState, Task, Visit, traits_of
from offbeat.data.client_store import MemoryBackend, make_client_store
from offbeat.engines.cuda import Completion, CurrentStream, compute_stream
from offbeat.engines.engine import ClientUpdates
from offbeat.engines.execution import AutotuneExecutor
from offbeat.engines.local import Executor, PrefersLargeGroups, TaskResults, TaskStart
from offbeat.nn.problem import Problem, Statistics, mean_statistics
from offbeat.schedule.clock import Arrival, Clock
from offbeat.trees import Tree


class TaskRanks:
    """Counted from 0 as tasks start; where nobody asks, nothing is kept."""

    def __init__(self, algorithm: AnyAlgorithm) -> None:
        self._wanted = traits_of(algorithm).reads_rank
        self._known: dict[Task, int] = {}  # tasks in flight or waiting
        self._version = -1  # the newest; tasks start from no other
        self._started = 0  # from it

    def start(self, task: Task) -> None:
        """One more of its version."""
        if not self._wanted:
            return
        if task.version != self._version:
            self._version, self._started = task.version, 0
        self._known[task] = self._started
        self._started += 1

    def of(self, task: Task) -> Tensor | tuple[()]:
        """How many started before it from its version."""
        return torch.tensor(self._known[task]) if self._wanted else ()

    def forget(self, tasks: Iterable[Task]) -> None:
        """These are done with."""
        for task in tasks:
            self._known.pop(task, None)

    def save(self) -> list[list[int]]:
        """Those in flight, as JSON; between two versions, when nothing has started from the next."""
        return [[*task, rank] for task, rank in self._known.items()]

    def load(self, rows: Sequence[Sequence[int]]) -> None:
        """Go on from what `save` gave."""
        self._known = {Task(client, version, visit): rank for client, version, visit, rank in rows}
        self._version, self._started = -1, 0


_MIN_GROUP = 8  # tasks that are worth computing together
_SPARSE_GROUP = 4  # a group of which less than one in so many is still needed is given up


class ComputedTask(NamedTuple):
    """One task's part of what was computed together."""

    results: TaskResults
    row: int
    mark: Completion


class Simulation:
    """One run under a virtual clock."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        problem: Problem,
        clock: Clock,
        work: Executor,
        seed: int,
        home: MemoryBackend,
        clients: int,
        ahead: int = 0,
    ) -> None:
        x, statistics = problem.initial()
        self._algorithm = algorithm
        self._clock = clock
        self._work = work
        self._seed = seed
        self._device = problem.device
        self._initial = (algorithm.init(x), statistics)
        self._make_memories = partial(make_client_store, home, algorithm.memory(x), clients, problem.device)
        self._memories = self._make_memories()
        self._messages: dict[int, Tree] = {}
        self._holders: Counter[int] = Counter()  # tasks in flight or waiting, by version
        self._current = 0
        self._ranks = TaskRanks(algorithm)
        self._lane = compute_stream(problem.device)
        self._ahead = (
            0 if ahead and clients_read_staleness(algorithm) else ahead
        )  # tasks to compute at once, where so many are in flight
        self._ready: dict[Task, ComputedTask] = {}
        self._open: dict[int, list[int]] = {}  # visits of clients that are not settled yet, in order

    @property
    def now(self) -> float:
        return self._clock.now

    @property
    def busy(self) -> int:
        return self._clock.busy

    def start(self, task: Task, *, sure: bool = False) -> None:
        self._holders[task.version] += 1
        self._ranks.start(task)
        if self._ahead:
            self._open.setdefault(task.client, []).append(task.visit)
        self._clock.start(task, sure=sure)

    def next(self) -> Arrival:
        return self._clock.next()

    def wait(self, until: float) -> None:
        self._clock.wait(until)

    def publish(self, version: int, algorithm: AnyAlgorithm, message: Tree, statistics: Statistics) -> None:
        self._algorithm = algorithm
        self._messages[version] = (message, statistics)
        self._current = version
        self._sweep()

    def gather(self, tasks: Sequence[Task], version: int) -> ClientUpdates:
        waves = _waves(tasks)
        results = [self._wave([tasks[place] for place in wave], version) for wave in waves]
        whole = results[0] if len(waves) == 1 else self._join(waves, results)
        self.forget(tasks)
        self._let_go()
        self._launch(self._upcoming(), version)
        return ClientUpdates(whole.uploads, mean_statistics(whole.statistics))

    def forget(self, tasks: Sequence[Task]) -> None:
        self._holders.subtract(task.version for task in tasks)
        self._ranks.forget(tasks)
        for task in tasks:
            self._ready.pop(task, None)
            visits = self._open.get(task.client, [])
            if task.visit in visits:
                visits.remove(task.visit)
            if not visits:
                self._open.pop(task.client, None)
        self._sweep()

    def save(self) -> SavedState:
        clients, columns = self._memories.save()
        tensors = {f"memory.{leaf}": column for leaf, column in enumerate(columns)}
        for version, message in self._messages.items():
            for leaf, tensor in enumerate(trees.leaves(message)):
                tensors[f"message.{version}.{leaf}"] = tensor
        ready = list(self._ready)
        if ready:
            for leaf, tensor in enumerate(trees.leaves(self._take(ready))):
                tensors[f"ready.{leaf}"] = tensor
        facts = {
            "ready": ready,
            "way": self._work.chosen if isinstance(self._work, AutotuneExecutor) else None,
            "clock": self._clock.save(),
            "holders": sorted(self._holders.items()),
            "ranks": self._ranks.save(),
            "current": self._current,
            "versions": sorted(self._messages),
            "clients": clients,
            "columns": len(columns),
            "mapped": self._memories.mapped,
        }
        return SavedState(facts, tensors)

    def confirm(self) -> None:
        self._memories.confirm()

    def load(self, saved: SavedState) -> None:
        facts, tensors = saved
        self._clock.load(facts["clock"])
        self._holders = Counter(dict(facts["holders"]))
        self._current = facts["current"]
        self._ranks.load(facts.get("ranks", []))
        self._memories = self._make_memories(mapped=facts["mapped"])
        self._memories.load(facts["clients"], [tensors[f"memory.{leaf}"] for leaf in range(facts["columns"])])
        self._messages = {version: self._message(version, tensors) for version in facts["versions"]}
        if isinstance(self._work, AutotuneExecutor) and facts["way"] is not None:
            self._work.choose(facts["way"])
        self._open = {}
        if self._ahead:
            for task in sorted(self._clock.flying(), key=lambda task: task.visit):
                self._open.setdefault(task.client, []).append(task.visit)
        self._load_ready([Task(*task) for task in facts["ready"]], tensors)

    def close(self) -> None:
        self._work.close()

    def _message(self, version: int, tensors: dict[str, Tensor]) -> Tree:
        state, statistics = self._initial
        shape = trees.structure((self._algorithm.broadcast(state, version), statistics))
        names = [f"message.{version}.{leaf}" for leaf in range(shape.num_leaves)]
        return trees.unflatten(shape, [tensors[name].to(self._device) for name in names])

    def _wave(self, tasks: list[Task], version: int) -> TaskResults:
        """Results of tasks of distinct clients; their memory is committed."""
        missing = [task for task in tasks if task not in self._ready]
        if missing and isinstance(self._work, PrefersLargeGroups) and self._work.large:
            missing = missing + self._upcoming()
        self._launch(missing, version)
        results = self._take(tasks)
        self._memories.write([task.client for task in tasks], results.memories)
        return results

    def _upcoming(self) -> list[Task]:
        """Tasks in flight to compute next, those first that will arrive first; few are left for later."""
        count = self._ahead - len(self._ready)
        if count < min(_MIN_GROUP, self._ahead) or not count:
            return []
        flying = [task for task in self._clock.upcoming(self._ahead) if task not in self._ready]
        able = [task for task in flying if self._open[task.client][0] == task.visit][:count]
        return able if len(able) >= min(_MIN_GROUP, self._ahead) else []

    def _launch(self, tasks: list[Task], version: int) -> None:
        if not tasks:
            return
        starts = [self._begin(task, version) for task in tasks]
        with self._lane.running(starts):
            results = self._work(self._algorithm, tasks, starts, self._seed)
        mark = self._lane.mark()
        for row, task in enumerate(tasks):
            self._ready[task] = ComputedTask(results, row, mark)

    def _take(self, tasks: Sequence[Task]) -> TaskResults:
        """What was computed for these tasks, in their order."""
        found = [self._ready[task] for task in tasks]
        first = found[0].results
        for results, _, mark in {id(each.results): each for each in found}.values():
            mark.take(results)
        whole = len(trees.leaves(first)[0]) == len(tasks)
        if whole and all(each.results is first and each.row == row for row, each in enumerate(found)):
            return first
        rows = [trees.map(lambda leaf, row=each.row: leaf[row], each.results) for each in found]
        taken: TaskResults = trees.stack(rows)
        return taken

    def _let_go(self) -> None:
        """Copy out what stragglers still need of a group, so that they do not hold all of it."""
        groups: dict[int, list[Task]] = {}
        for task, each in self._ready.items():
            groups.setdefault(id(each.results), []).append(task)
        for tasks in groups.values():
            rows = len(trees.leaves(self._ready[tasks[0]].results)[0])
            if _SPARSE_GROUP * len(tasks) < rows:
                results, mark = (
                    self._take(tasks),
                    CurrentStream(),
                )  # copied by the caller, for whom it is ready
                self._ready |= {task: ComputedTask(results, row, mark) for row, task in enumerate(tasks)}

    def _load_ready(self, tasks: list[Task], tensors: dict[str, Tensor]) -> None:
        self._ready = {}
        if not tasks:
            return
        start = self._begin(tasks[0], self._current)
        shape = trees.structure(self._work(self._algorithm, tasks[:1], [start], self._seed))
        leaves = [tensors[f"ready.{leaf}"].to(self._device) for leaf in range(shape.num_leaves)]
        results = trees.unflatten(shape, leaves)
        mark = self._lane.mark()
        self._ready = {task: ComputedTask(results, row, mark) for row, task in enumerate(tasks)}

    def _begin(self, task: Task, version: int) -> TaskStart:
        message, statistics = self._messages[task.version]
        began = torch.tensor(task.version)
        visit = Visit(began, version - began, self._ranks.of(task))
        return TaskStart(message, statistics, self._memories.read(task.client), visit)

    def _join(self, waves: list[list[int]], results: list[TaskResults]) -> TaskResults:
        """Results of waves, in the order of their tasks."""
        order = torch.tensor([place for wave in waves for place in wave]).argsort().to(self._device)
        whole: TaskResults = trees.map(lambda *parts: torch.cat(parts)[order], *results)
        return whole

    def _sweep(self) -> None:
        """Let go of messages that nobody in flight started from."""
        for version in [v for v in self._messages if v != self._current and not self._holders[v]]:
            del self._messages[version], self._holders[version]


def _waves(tasks: Sequence[Task]) -> list[list[int]]:
    """Places of tasks such that no client is twice in a wave, earlier visits in earlier waves."""
    waves: list[list[int]] = []
    seen: Counter[int] = Counter()
    for place, task in enumerate(tasks):
        turn = seen[task.client]
        seen[task.client] += 1
        if turn == len(waves):
            waves.append([])
        waves[turn].append(place)
    return waves
