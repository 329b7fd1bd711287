"""Accuracy at a given epsilon by four ways: timed releases, independent, banded and BLT noise.

    python -m experiments.private.ways --data fashion-mnist   # ten minutes on a CPU
    python -m experiments.private.ways --data shakespeare     # with --data-dir DIR where the files are there
    python -m experiments.private.ways --data digits          # an ablation of momentum approximation
    python -m experiments.private.ways --table

Each run is appended to records/DATA.jsonl as it ends, and runs that are there are not repeated. The
population is 10^6 in name: the runs have fewer clients, and the noise of the nominal cohort that the same
share of a million clients would give (`nominal_cohort`), so every epsilon here is that of the large one.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from offbeat import Examples, LearningTask, load
from offbeat.training.build import build_run, with_computed_noise
from offbeat.training.experiment import Experiment
from offbeat.training.runner import run_experiment

HERE = Path(__file__).parent
POPULATION = 1_000_000
EPSILONS, SEEDS, DELTA = (2.0, 8.0), (0, 1, 2), 1e-7
WAYS = ("timed", "independent", "banded", "blt")
METHODS = {"without": "fedavgm", "with": "ma-fedavgm"}  # momentum approximation
# Both average updates with weights that sum to 1, so that the same server rate means the same step. The
# penalty is larger than by default: see the ablation.
PARAMETERS: dict[str, dict[str, Any]] = {"without": {"averaged": True}, "with": {"penalty": 0.01}}


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
    model: str | None


TASKS = {
    "fashion-mnist": Task(
        1000, 10, 500, 0.5, 5, 20, {"local_lr": 0.05, "server_lr": 1.0}, "dirichlet:0.5", "mlp"
    ),
    "shakespeare": Task(1000, 10, 500, 0.5, 5, 20, {"local_lr": 0.5, "server_lr": 1.0}, "natural", None),
    "digits": Task(200, 10, 200, 0.5, 2, 5, {"local_lr": 0.1, "server_lr": 3.0}, "dirichlet:1", "mlp"),
}
TABLES = ("fashion-mnist", "shakespeare")


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
        parameters=tuple(sorted((task.parameters | PARAMETERS[momentum]).items())),
        **({"task": "roles"} if data == "shakespeare" else {"data": data, "model": task.model}),
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
        eval_every=task.rounds,
        **private,
    )


_CONTEXT, _THINNING = 10, 20  # characters that the model reads; one training window of so many is kept


def roles(folder: str | None) -> LearningTask:
    """The next character of a role's lines, from the characters before it."""
    source = load("shakespeare", folder)
    kept = np.arange(0, len(source.labels), _THINNING)
    inputs, targets = source.train
    assert source.groups is not None
    thin = source._replace(
        train=Examples(inputs[kept][:, -_CONTEXT:].long(), targets[kept]),
        test=Examples(source.test.inputs[:, -_CONTEXT:].long(), source.test.targets),
        groups=source.groups[kept],
        labels=source.labels[kept],
    )

    def module() -> nn.Module:
        wide = nn.Linear(16 * _CONTEXT, 64)
        return nn.Sequential(
            nn.Embedding(source.classes, 16), nn.Flatten(), wide, nn.ReLU(), nn.Linear(64, source.classes)
        )

    return LearningTask(module=module, data=thin, name="roles")


def train(experiment: Experiment, task: LearningTask | None) -> dict[str, Any]:
    """One run, as a record."""
    spec = build_run(experiment, task)
    experiment = with_computed_noise(experiment, spec)
    *_, last = run_experiment(experiment, spec)
    assert last.record is not None
    assert last.outcome is not None
    spent = last.outcome.spent
    return {
        "accuracy": last.record["accuracy"],
        "noise": experiment.noise,
        "spent": spent.epsilon if spent else None,
        "unamplified": spent.unamplified if spent else None,
        "version": last.version,
        "ended": last.outcome.ended,
    }


def measure(data: str, seeds: Sequence[int], device: str, most: int | None, folder: str | None) -> None:
    """Train what has no record yet."""
    task = roles(folder) if data == "shakespeare" else None
    wanted = [
        ({"way": way, "momentum": momentum, "epsilon": epsilon, "seed": seed}, {})
        for seed in seeds
        for epsilon in EPSILONS
        for way in WAYS
        for momentum in METHODS
    ]
    if data == "digits":
        wanted = [
            ({"variant": name, "seed": seed}, changes) for seed in seeds for name, changes in ABLATION.items()
        ]
    file = HERE / "records" / f"{data}.jsonl"
    file.parent.mkdir(exist_ok=True)
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    left = [(key, changes) for key, changes in wanted if not any(key.items() <= r.items() for r in records)]
    for key, changes in left[:most]:
        way, momentum = key.get("way", changes.get("way")), key.get("momentum", changes.get("momentum"))
        experiment = settings(data, way, momentum, key.get("epsilon", EPSILONS[0]), key["seed"], device)
        if "parameters" in changes:
            given = dict(experiment.parameters) | changes["parameters"]
            experiment = dataclasses.replace(experiment, parameters=tuple(sorted(given.items())))
        others = {name: changes[name] for name in ("lead",) if name in changes}
        if folder is not None and task is None:
            others["data_dir"] = folder
        record = key | train(dataclasses.replace(experiment, **others), task)
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


# Of momentum approximation on digits at epsilon 2. By default `fedavgm` adds updates up (heavy ball) and
# `ma-fedavgm` averages them, which with beta 0.9 is a tenth of the step at the same server rate.
ABLATION: dict[str, dict[str, Any]] = {
    "timed, fedavgm, heavy ball, rate 0.3": {
        "way": "timed",
        "momentum": "without",
        "parameters": {"averaged": False, "server_lr": 0.3},
    },
    "timed, fedavgm, averaged, rate 0.3": {
        "way": "timed",
        "momentum": "without",
        "parameters": {"server_lr": 0.3},
    },
    "timed, ma-fedavgm, rate 0.3, penalty 1e-4": {
        "way": "timed",
        "momentum": "with",
        "parameters": {"server_lr": 0.3, "penalty": 1e-4},
    },
    "timed, fedavgm, averaged, rate 3": {"way": "timed", "momentum": "without"},
    "timed, ma-fedavgm, rate 3, penalty 1e-4": {
        "way": "timed",
        "momentum": "with",
        "parameters": {"penalty": 1e-4},
    },
    "timed, ma-fedavgm, rate 3, penalty 1e-2": {"way": "timed", "momentum": "with"},
    "timed with lead 1, fedavgm, averaged, rate 3": {"way": "timed", "momentum": "without", "lead": 1},
    "timed with lead 1, ma-fedavgm, rate 3, penalty 1e-4": {
        "way": "timed",
        "momentum": "with",
        "lead": 1,
        "parameters": {"penalty": 1e-4},
    },
    "full buffer, fedavgm, averaged, rate 3": {"way": "independent", "momentum": "without"},
    "full buffer, ma-fedavgm, rate 3, penalty 1e-4": {
        "way": "independent",
        "momentum": "with",
        "parameters": {"penalty": 1e-4},
    },
    "full buffer, ma-fedavgm, rate 3, penalty 1e-2": {"way": "independent", "momentum": "with"},
}


def _key(record: dict[str, Any]) -> tuple[str, str, float, int]:
    return record["way"], record["momentum"], record["epsilon"], record["seed"]


def ablation() -> str:
    """Mean and range over seeds, in per cent."""
    lines = (HERE / "records" / "digits.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    rows = ["| digits, epsilon 2 | accuracy |", "|---|---|"]
    for name in ABLATION:
        found = [100 * each["accuracy"] for each in records if each["variant"] == name]
        rows.append(f"| {name} | {_cell(found)} |")
    return "\n".join(rows)


def _cell(found: list[float]) -> str:
    if not found:
        return "–"
    span = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ""
    return f"{sum(found) / len(found):.1f}{span}"


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
                cells.append(_cell(found))
        rows.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Measure, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", choices=TASKS, default="fashion-mnist")
    parser.add_argument("--data-dir", help="folder of the data; without it they are downloaded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of these seeds only")
    parser.add_argument("--most", type=int, help="runs at most")
    parser.add_argument("--table", action="store_true", help="print the tables of all records")
    given = parser.parse_args()
    if given.table:
        for data in TABLES:
            if (HERE / "records" / f"{data}.jsonl").exists():
                print(table(data), end="\n\n")
        print(ablation())
    else:
        measure(given.data, given.seeds, given.device, given.most, given.data_dir)


if __name__ == "__main__":
    main()
