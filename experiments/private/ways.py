"""Accuracy at a given epsilon by four ways: timed releases, independent, banded and BLT noise.

    python -m experiments.private.ways --data digits                    # minutes on a CPU
    python -m experiments.private.ways --data fashion-mnist --device cuda
    python -m experiments.private.ways --data shakespeare --device cuda
    python -m experiments.private.ways --table

Each run is appended to records/DATA.jsonl as it ends, and runs that are there are not repeated. The
population is 10^6 in name: the runs have fewer clients, and the noise of the nominal cohort that the same
share of a million clients would give (`nominal_cohort`), so every epsilon here is that of the large one.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.training.build import build_run, with_computed_noise
from offbeat.training.experiment import Experiment
from offbeat.training.runner import run_experiment

HERE = Path(__file__).parent
POPULATION = 1_000_000
EPSILONS, SEEDS, DELTA = (2.0, 8.0), (0, 1, 2), 1e-7
WAYS = ("timed", "independent", "banded", "blt")
METHODS = {"without": "fedavgm", "with": "ma-fedavgm"}  # momentum approximation


class Task(NamedTuple):
    """What differs between data sets; the rates were chosen without noise."""

    clients: int
    buffer: int
    rounds: int
    clip: float
    local_steps: int
    batch_size: int
    parameters: dict[str, float]
    partition: str


TASKS = {
    "digits": Task(200, 10, 200, 0.5, 2, 5, {"local_lr": 0.1, "server_lr": 0.3}, "dirichlet:1"),
    "fashion-mnist": Task(1000, 20, 1000, 0.5, 5, 20, {"local_lr": 0.05, "server_lr": 0.3}, "dirichlet:0.5"),
    "shakespeare": Task(1000, 20, 1000, 0.5, 5, 20, {"local_lr": 0.5, "server_lr": 0.3}, "natural"),
}


def settings(data: str, way: str, momentum: str, epsilon: float, seed: int, device: str) -> Experiment:
    """One run; each way has the same clients, cohort, rounds, delays and method."""
    task = TASKS[data]
    often = math.ceil(task.rounds * task.buffer / task.clients)
    apart = task.rounds // often
    private: dict[str, Any] = {"max_participations": often + 1}
    if way == "timed":
        private = {"dispatch": "allocation", "release_period": 2.0, "lead": 3}
    elif way != "independent":
        private |= {
            "min_separation": apart // 2,
            "noise_correlation": f"banded:{apart // 2}" if way == "banded" else "blt",
        }
    if way != "timed":
        private |= {"dispatch": "asynchronous", "concurrency": 2 * task.buffer}
    return Experiment.of(
        algorithm=METHODS[momentum],
        parameters=tuple(sorted(task.parameters.items())),
        data=data,
        clients=task.clients,
        partition=task.partition,
        buffer=task.buffer,
        rounds=task.rounds,
        delays="half-normal:1",
        weights="constant",
        max_staleness=10,
        local_steps=task.local_steps,
        batch_size=task.batch_size,
        clip=f"delta={task.clip}",
        epsilon=epsilon,
        delta=DELTA,
        nominal_cohort=task.buffer * POPULATION // task.clients,
        noise_seed=seed,
        seed=seed,
        device=device,
        **private,
    )


def measure(data: str, device: str, most: int | None) -> None:
    """Train what has no record yet."""
    file = HERE / "records" / f"{data}.jsonl"
    file.parent.mkdir(exist_ok=True)
    done = {_key(json.loads(line)) for line in file.read_text().splitlines()} if file.exists() else set()
    runs = 0
    for seed in SEEDS:
        for epsilon in EPSILONS:
            for way in WAYS:
                for momentum in METHODS:
                    if (way, momentum, epsilon, seed) in done or runs == most:
                        continue
                    experiment = settings(data, way, momentum, epsilon, seed, device)
                    spec = build_run(experiment)
                    experiment = with_computed_noise(experiment, spec)
                    *_, last = run_experiment(experiment, spec)
                    assert last.record is not None
                    assert last.outcome is not None
                    assert last.outcome.spent is not None
                    record = {
                        "way": way,
                        "momentum": momentum,
                        "epsilon": epsilon,
                        "seed": seed,
                        "accuracy": last.record["accuracy"],
                        "noise": experiment.noise,
                        "spent": last.outcome.spent.epsilon,
                        "unamplified": last.outcome.spent.unamplified,
                        "version": last.version,
                        "ended": last.outcome.ended,
                    }
                    with file.open("a") as records:
                        records.write(json.dumps(record) + "\n")
                    print(json.dumps(record), flush=True)
                    runs += 1


def _key(record: dict[str, Any]) -> tuple[str, str, float, int]:
    return record["way"], record["momentum"], record["epsilon"], record["seed"]


def table(data: str) -> str:
    """Mean and range over seeds, in per cent."""
    lines = (HERE / "records" / f"{data}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    heads = [f"epsilon {epsilon:g}, {momentum}" for epsilon in EPSILONS for momentum in METHODS]
    rows = [f"| {data} | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for way in WAYS:
        cells = []
        for epsilon in EPSILONS:
            for momentum in METHODS:
                found = [
                    100 * each["accuracy"] for each in records if _key(each)[:3] == (way, momentum, epsilon)
                ]
                mean = sum(found) / len(found) if found else math.nan
                span = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ""
                cells.append(f"{mean:.1f}{span}" if found else "–")
        rows.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Measure, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", choices=TASKS, default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most", type=int, help="runs at most")
    parser.add_argument("--table", action="store_true", help="print the tables of all records")
    given = parser.parse_args()
    if given.table:
        for file in sorted((HERE / "records").glob("*.jsonl")):
            print(table(file.stem), end="\n\n")
    else:
        measure(given.data, given.device, given.most)


if __name__ == "__main__":
    main()
