"""A deployment without processes: real sites, a network in memory, and time that passes when asked to."""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from offbeat import Asynchronous, Examples, Population, Problem, Sequential, Setting, Steps, build, trees
from offbeat.aggregate.compression import parse_compression
from offbeat.aggregate.mean import Aggregator, Mean
from offbeat.core import AnyAlgorithm, Task, Visit
from offbeat.deploy.config import NetworkConfig
from offbeat.deploy.protocol.strict_json import Reason
from offbeat.deploy.protocol.transport import Reply, TransportError
from offbeat.deploy.server.exchange import SessionConfig
from offbeat.deploy.server.session import DeployedEngine
from offbeat.deploy.site.site import Site
from offbeat.engines.local import ClientMemory, SequentialExecutor, TaskStart
from offbeat.schedule.dispatch import Dispatch, TimedDispatch
from offbeat.schedule.staleness import Equal, StalenessWeights
from offbeat.training import checkpoint
from offbeat.training.build import RunSpec
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder, read_jsonl
from offbeat.training.loop import describe_cohort
from offbeat.training.replay import replay
from offbeat.training.runner import Progress, run_experiment
from worlds import SEED, World, each, make_world

BUFFER, ROUNDS = 3, 8


@contextmanager
def ramdisk() -> Iterator[Path]:
    """A folder in memory, where there is such a thing: thousands of small files are written and synced."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


class Clock:
    """Seconds that pass in sleep alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@dataclass
class Letter:
    """A message on its way, and when its answer will be there."""

    number: str
    node: int
    kind: str
    note: str
    payload: bytes
    due: float


@dataclass
class Network:
    """Sites by node; each does one thing after another. `meddle` may change, add or take away answers."""

    clock: Clock
    random: Random = field(default_factory=lambda: Random(0))
    meddle: Callable[[Letter, Reply], list[Reply]] = lambda letter, reply: [reply]
    trouble: Callable[[str], None] = lambda call: None  # called before and after all else; may raise
    sites: dict[int, Site] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)  # there, but not in the list
    letters: dict[str, Letter] = field(default_factory=dict)
    extra: list[Reply] = field(default_factory=list)  # that nobody asked for
    honest: dict[Task, set[bytes]] = field(default_factory=dict)  # payloads that sites gave
    count: int = 0
    backlog: frozenset[str] = frozenset()
    _free: dict[int, float] = field(default_factory=dict)

    def join(self, site: Site) -> int:
        self.count += 1
        self.sites[self.count] = site
        return self.count

    def leave(self, node: int) -> Site:
        for letter in self.letters.values():
            if letter.node == node:
                letter.due = math.inf
        return self.sites.pop(node)

    def nodes(self) -> frozenset[int]:
        self.trouble("nodes")
        return frozenset(self.sites) - self.hidden

    def key(self, node: int) -> bytes:
        return b""

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        self.trouble("push")
        if node not in self.sites:
            raise TransportError("no such node")
        self.count += 1
        number = f"m{self.count}"
        if kind == "recall":  # it comes while the site is at work, which sends what it has soon after
            due = self.clock.now + 0.1
            self.sites[node].answer(kind, header, payload)
            for letter in self.letters.values():
                letter.due = min(letter.due, due) if letter.node == node else letter.due
        else:
            due = max(self.clock.now, self._free.get(node, 0.0)) + self.random.uniform(0.2, 3.0)
            self._free[node] = due
        self.letters[number] = Letter(number, node, kind, header, payload, due)
        self.trouble("pushed")
        return number

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        self.trouble("pull")
        replies, self.extra = self.extra, []
        for number in message_ids:
            letter = self.letters.get(number)
            if letter is not None and letter.due <= self.clock.now and letter.node in self.sites:
                del self.letters[number]
                replies += self.meddle(letter, self.answer(letter))
        self.trouble("pulled")
        return replies

    def answer(self, letter: Letter) -> Reply:
        note, payload = self.sites[letter.node].answer(letter.kind, letter.note, letter.payload)
        if letter.kind == "task":
            self.honest.setdefault(Task(*json.loads(letter.note)["task"]), set()).add(payload)
        return Reply(letter.number, letter.node, note, payload, None)


class Log:
    """Everything that a session tells."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def tell(self, event: str, /, **fields: Any) -> None:
        self.events.append((event, fields))

    def those(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]

    def count(self, name: str) -> int:
        return len(self.those(name))

    def tasks(self, name: str) -> list[Task]:
        return [Task(*(fields[each] for each in Task._fields)) for fields in self.those(name)]

    def reasons(self) -> list[Reason]:
        return [fields["reason"] for fields in self.those("rejected")]

    def sentences(self) -> list[str]:
        return [fields["sentence"] for fields in self.those("rejected")]


@dataclass
class Deployment:
    """One run over a network: its method, and where everything lies."""

    place: Path
    name: str = "ca2fl"
    clients: int = 5
    rounds: int = ROUNDS
    buffer: int = BUFFER
    dispatch: Dispatch = Asynchronous(4)
    max_staleness: float = math.inf
    weights: StalenessWeights = Equal()
    terms: dict[str, Any] = field(default_factory=dict)
    compress: str | None = None
    aggregate: Aggregator = Mean()
    steps: int = 3
    site_clocks: dict[int, Callable[[], float]] = field(
        default_factory=dict
    )  # where they are not the real one

    def __post_init__(self) -> None:
        self.world: World = make_world(self.clients)
        self.clock = Clock()
        self.network = Network(self.clock)
        self.log = Log()
        self.setting = Setting(self.buffer, 3, self.rounds)
        self.algorithm: AnyAlgorithm = build(self.name, self.setting, {})
        self.folder = self.place / "run"

    def site(self, client: int) -> Site:
        """Opens its folder; a second one of the same client needs the first to be closed."""
        world = self.world

        def load(name: str) -> Examples:
            mine = world.population.parts[int(name)]
            return Examples(*trees.map(lambda leaf: leaf[mine], tuple(world.population.data)))

        module = world.problem.module(*world.problem.initial())
        clock = self.site_clocks.get(client, time.perf_counter)
        return Site(str(client), self.place / f"site-{client}", load, lambda: module, each, clock=clock)

    @contextmanager
    def joined(self) -> Iterator["Deployment"]:
        """Everybody is there, and goes in the end."""
        for client in range(self.clients):
            self.network.join(self.site(client))
        try:
            yield self
        finally:
            for site in self.network.sites.values():
                site.close()

    @property
    def plan(self) -> dict[str, Any]:
        return site_plan(
            algorithm=self.name,
            setting=list(self.setting),
            work=["steps", self.steps, 4],
            seed=SEED,
            clients=self.clients,
            **({} if self.compress is None else {"compress": self.compress}),
        )

    def engine(self, **options: Any) -> DeployedEngine:
        given = {"deadline": 20.0, "poll": 0.5} | self.terms
        own = {each.name: given.pop(each.name) for each in fields(SessionConfig) if each.name in given}
        terms = SessionConfig(self.plan, self.clients, NetworkConfig(**given), **own)
        return DeployedEngine(
            self.network,
            self.world.problem,
            terms,
            self.folder,
            self.log,
            **{"clock": self.clock, "sleep": self.clock.sleep} | options,
        )

    def serve(
        self, resume: bool = False, look: Callable[[Progress], None] = lambda progress: None, **options: Any
    ) -> None:
        """Run until the end, as a server does."""
        experiment = Experiment.of(
            algorithm=self.name,
            clients=self.clients,
            buffer=self.buffer,
            rounds=self.rounds,
            seed=SEED,
            compress=self.compress,
        )
        trial = RunSpec(
            self.algorithm,
            self.engine(**options),
            self.dispatch,
            self.weights,
            self.max_staleness,
            self.world.problem,
            None,
            None,
            self.aggregate,
            {},
        )
        opened = RunFolder.resume if resume else RunFolder.begin
        with opened(self.folder, experiment.settings()) as folder:
            for progress in run_experiment(experiment, trial, folder, save_every=1):
                look(progress)

    def model(self) -> Tensor:
        """What the run ended with."""
        saved = checkpoint.load(self.folder / "checkpoint" / "state.safetensors")
        assert saved.facts["version"] == self.rounds
        return saved.tensors["state.0"]

    def trace(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder, "trace"))

    def retold(self) -> Tensor:
        """The model of a plain loop over the trace: no session, no network, no journal."""
        nominal = self.buffer if isinstance(self.dispatch, TimedDispatch) else None
        return retell(
            self.algorithm, self.world.problem, self.population(), self.trace(), self.weights, nominal=nominal
        )

    def simulated(self) -> Tensor:
        """The model of the sequential simulator from the trace."""
        shots = replay(
            self.algorithm,
            Sequential(self.world.problem, self.population()),
            self.trace(),
            dispatch=self.dispatch,
            buffer=self.buffer,
            rounds=self.rounds,
            weights=self.weights,
            max_staleness=self.max_staleness,
            aggregate=self.aggregate,
            compress=parse_compression(self.compress),
            seed=SEED,
        )
        return list(shots)[-1].x

    def population(self) -> Population:
        """The clients by their numbers, which sites get in the order of coming."""
        roster = json.loads((self.folder / "roster.json").read_text())
        mine = self.world.population
        names = [int(roster.get(str(client), {"name": client})["name"]) for client in range(self.clients)]
        parts = [mine.parts[name] for name in names]
        return Population(mine.data, parts, Steps(self.steps, 4))

    def files(self) -> set[Task]:
        """Accepted uploads that are still on the disk."""
        names = [path.stem.split("-") for path in (self.folder / "journal").glob("*.upload")]
        return {Task(*map(int, name)) for name in names}


def site_plan(**changes: Any) -> dict[str, Any]:
    """What a server tells a site of a run of FedBuff over three sites, with these changes."""
    plan = {
        "algorithm": "fedbuff",
        "parameters": {},
        "setting": [2, 3, 8],
        "work": ["steps", 3, 2],
        "weight_decay": 0.0,
        "precision": "auto",
        "seed": 0,
        "clients": 3,
    }
    return plan | changes


def retell(
    algorithm: AnyAlgorithm,
    problem: Problem,
    population: Population,
    lines: list[dict[str, Any]],
    weights: StalenessWeights = Equal(),
    seed: int = SEED,
    nominal: int | None = None,
) -> Tensor:
    """Each step of a trace: its tasks one by one from the versions they began with, and then their mean.

    With a nominal cohort, by which the sum of their updates is divided.
    """
    clients = len(population)
    x, statistics = problem.initial()
    state, work = algorithm.init(x), SequentialExecutor(problem, population)
    memories = {client: ClientMemory.initial(algorithm, problem) for client in range(clients)}
    messages: dict[int, Any] = {}
    for line in lines:
        start = line["version"] == 0
        version = 0 if start else line["version"] - 1
        method = algorithm.warmup() if start else algorithm
        assert method is not None
        messages[version] = method.broadcast(state, version)
        tasks = [Task(*task[:3]) for task in line["tasks"]]
        uploads = []
        for task in tasks:
            visit = Visit(torch.tensor(task.version), torch.tensor(0))
            begin = TaskStart(messages[task.version], statistics, memories[task.client], visit)
            done = trees.map(lambda leaf: leaf[0], work(method, [task], [begin], seed))
            memories[task.client] = done.memories
            uploads.append(done.uploads)
        cohort = describe_cohort(tuple(tasks), version, clients, Equal() if start else weights)
        if not uploads:
            continue
        mean = mean_of(uploads, cohort.weights)
        if nominal is not None:
            mean = trees.map(lambda leaf, count=len(uploads): leaf * count / nominal, mean)
        state = method.step(state, mean, cohort)
    result: Tensor = state.x
    return result


def mean_of(uploads: list[Any], weights: Sequence[float]) -> Any:
    def mean(*leaves: Tensor) -> Any:
        return sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True)) / len(leaves)

    return trees.map(mean, *uploads)
