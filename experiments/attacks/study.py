"""What malicious clients do to an asynchronous run, by aggregation.

    python -m experiments.attacks.study             # trains what has no record yet: minutes on a CPU
    python -m experiments.attacks.study --write     # writes the tables into README.md

An attacker does the work of its task and sends something else: its update with the sign reversed (`flip`), or
ten times as long and reversed (`scale`). A `fast` attacker also answers after a tenth of a second, so that it
is idle, and given a task, more often than others. Each run is appended to records.jsonl as it ends.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from offbeat import draws, trees
from offbeat.core import AnyAlgorithm, Task, Vector
from offbeat.engines.engine import ClientUpdates, Engine, Session
from offbeat.engines.simulation import SimulatedEngine
from offbeat.errors import DivergedError
from offbeat.nn.problem import Statistics
from offbeat.schedule.delays import Delay
from offbeat.schedule.rng import Rng
from offbeat.training.build import build_run
from offbeat.training.experiment import Experiment
from offbeat.training.runner import run_experiment

HERE = Path(__file__).parent
RECORDS, PAGE = HERE / "records.jsonl", HERE / "README.md"
AGGREGATES = ("mean", "norm-bound", "trimmed-mean:0.2", "median", "geometric-median")
SHARES, SEEDS = (0.0, 0.1, 0.2), (0, 1, 2)
ATTACKS = ("flip", "scale", "fast flip", "fast scale")
FACTORS = {"flip": -1.0, "scale": -10.0}
FAST = 0.1  # seconds


def settings(aggregate: str, seed: int) -> Experiment:
    """FedBuff on digits, 20 clients at work and 10 updates a step."""
    return Experiment.of(
        algorithm="fedbuff",
        parameters=(("local_lr", 0.2), ("server_lr", 1.0)),
        data="digits",
        clients=100,
        partition="dirichlet:0.5",
        rounds=150,
        buffer=10,
        concurrency=20,
        aggregate=aggregate,
        seed=seed,
    )


def attackers(share: float, clients: int, seed: int) -> frozenset[int]:
    """Who attacks; with a larger share it is these and others."""
    order = draws.generator(seed, "attackers").permutation(clients)
    return frozenset(order[: round(share * clients)].tolist())


class AttackedSession:
    """A session in which some clients send other updates than they computed."""

    def __init__(self, session: Session, who: frozenset[int], factor: float) -> None:
        self._session, self._who, self._factor = session, who, factor
        self.used = self.malicious = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def gather(self, tasks: Sequence[Task], version: int) -> ClientUpdates:
        updates = self._session.gather(tasks, version)
        factors = torch.tensor([self._factor if task.client in self._who else 1.0 for task in tasks])
        self.used += len(tasks)
        self.malicious += sum(task.client in self._who for task in tasks)
        uploads = trees.map(
            lambda leaf: leaf * factors.to(leaf).view(-1, *[1] * (leaf.dim() - 1)), updates.uploads
        )
        return updates._replace(uploads=uploads)


class AttackedEngine:
    """An engine with attackers among its clients."""

    def __init__(self, engine: Engine, who: frozenset[int], factor: float) -> None:
        self._engine, self._who, self._factor = engine, who, factor
        self.clients, self.availability = engine.clients, engine.availability

    def initial(self) -> tuple[Vector, Statistics]:
        return self._engine.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, rng: Rng) -> Any:
        self.session = AttackedSession(self._engine.open(algorithm, seed, rng), self._who, self._factor)
        return self.session


@dataclass(frozen=True)
class FastAttackers:
    """Delays in which attackers answer almost at once."""

    delays: Delay
    who: frozenset[int]

    def bind(self, draws: Rng, population: int) -> Callable[[int, int, float], float]:
        usual = self.delays.bind(draws, population)
        return lambda client, visit, u: FAST if client in self.who else usual(client, visit, u)


def measure(aggregate: str, attack: str, share: float, seed: int) -> dict[str, Any]:
    """One run."""
    experiment = settings(aggregate, seed)
    spec = build_run(experiment)
    who = attackers(share, experiment.clients, seed)
    kind = attack.split()[-1]
    simulated = spec.engine
    assert isinstance(simulated, SimulatedEngine)
    if attack.startswith("fast"):
        simulated = replace(simulated, delays=FastAttackers(simulated.delays, who))  # type: ignore[type-var]
    engine = AttackedEngine(simulated, who, FACTORS[kind])
    accuracy = None
    try:
        for progress in run_experiment(experiment, spec._replace(engine=engine)):
            accuracy = progress.record["accuracy"] if progress.record else accuracy
    except DivergedError:
        accuracy = None
    session = engine.session
    return {
        "aggregate": aggregate,
        "attack": attack if share else None,
        "share": share,
        "seed": seed,
        "accuracy": accuracy,
        "malicious": round(session.malicious / max(1, session.used), 4),
    }


def runs() -> list[tuple[str, str | None, float, int]]:
    """Every run; without attackers all attacks are the same."""
    return [
        (aggregate, attack if share else None, share, seed)
        for seed in SEEDS
        for share in SHARES
        for attack in (ATTACKS if share else ATTACKS[:1])
        for aggregate in AGGREGATES
    ]


def key(record: dict[str, Any]) -> tuple[str, str | None, float, int]:
    """The run that a record is of."""
    return record["aggregate"], record["attack"], record["share"], record["seed"]


def records() -> list[dict[str, Any]]:
    """Those that are there."""
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []


def table() -> str:
    """The mean accuracy over seeds with the worst in brackets, and the share of malicious updates."""
    found = {key(record): record for record in records()}
    heads = ["attack", "attackers", "malicious updates", *(f"`{name}`" for name in AGGREGATES)]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    cases = [(None, 0.0), *((attack, share) for attack in ATTACKS for share in SHARES if share)]
    for attack, share in cases:
        each = {name: [found[name, attack, share, seed] for seed in SEEDS] for name in AGGREGATES}
        malicious = mean(record["malicious"] for record in each["mean"])
        cells = [_accuracy([record["accuracy"] for record in each[name]]) for name in AGGREGATES]
        rows.append(
            f"| {attack or 'none'} | {share:.0%} | {malicious:.0%} | ".replace("%", " %")
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(rows)


def _accuracy(values: list[float | None]) -> str:
    good = [value for value in values if value is not None]
    if len(good) < len(values):
        return "diverged" if not good else f"{mean(good):.3f} (diverged)"
    return f"{mean(good):.3f} ({min(good):.3f})"


def page() -> str:
    """README.md with the table of the records."""
    text = PAGE.read_text()
    before, rest = text.split("<!-- table -->")
    _, after = rest.split("<!-- end -->")
    return f"{before}<!-- table -->\n\n{table()}\n\n<!-- end -->{after}"


def main() -> None:
    """Train, or write the page."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--write", action="store_true", help="write the table into README.md")
    arguments.add_argument("--most", type=int, metavar="N", help="train N runs at most")
    options = arguments.parse_args()
    if options.write:
        PAGE.write_text(page())
        return
    done = {key(record) for record in records()}
    for aggregate, attack, share, seed in [run for run in runs() if run not in done][: options.most]:
        record = measure(aggregate, attack or ATTACKS[0], share, seed)
        with RECORDS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
