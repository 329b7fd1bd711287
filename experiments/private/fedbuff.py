"""Cadence, which has no rates to choose, against FedBuff with the best of its rates, under the same noise.

    python -m experiments.private.fedbuff --data digits          # a few minutes on a CPU
    python -m experiments.private.fedbuff --data digits-500      # the same
    python -m experiments.private.fedbuff --data fashion-mnist   # with --data-dir DIR if they are there
    python -m experiments.private.fedbuff --table

For digits and Fashion-MNIST population, cohort, delays and ways are those of `ways.py`, at epsilon 8.
`digits-500` has 500 clients and no larger population in name, so that noise matters: it is the example of
docs/private.md with a seed for the noise. FedBuff's server rate falls linearly to zero. On seed 0 it has a
grid of local rates, server rates and clipping bounds, which goes on around its best setting, by a factor of
two, until no neighbour does better; the best setting runs on the other seeds, too. Each run is appended to
records/DATA-fedbuff.jsonl as it ends, and is not repeated.
"""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.private.ways import HERE, SEEDS, _cell, settings, train

from offbeat.training.experiment import Experiment

EPSILON = 8.0
WAYS = {
    "digits": ("independent", "timed"),
    "fashion-mnist": ("independent", "timed"),
    "digits-500": ("independent",),
}
Rates = tuple[float, float, float]  # local rate, server rate, clipping bound
GRID: tuple[Rates, ...] = tuple(itertools.product((0.05, 0.2, 0.8), (0.5, 2.0), (0.25, 1.0)))
Record = dict[str, Any]


def read(data: str) -> list[Record]:
    """The records of a data set."""
    file = HERE / "records" / f"{data}-fedbuff.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def rates_of(record: Record) -> Rates:
    """The rates of a run of FedBuff."""
    return record["local_lr"], record["server_lr"], record["clip"]


def of_fedbuff(records: list[Record], way: str, seed: int) -> dict[Rates, float]:
    """Accuracy by rates."""
    some = [each for each in records if (each["way"], each["seed"]) == (way, seed)]
    return {rates_of(each): each["accuracy"] for each in some if each["method"] == "fedbuff"}


def neighbours(rates: Rates) -> list[Rates]:
    """One rate twice as large, or half as large."""
    made = [list(rates) for _ in range(6)]
    for n, each in enumerate(made):
        each[n // 2] *= (0.5, 2.0)[n % 2]
    return [(local, server, clip) for local, server, clip in made]


def next_rates(records: list[Record], way: str) -> list[Rates]:
    """What of the grid has not run, or else what is next to the best and has not run."""
    found = of_fedbuff(records, way, SEEDS[0])
    left = [rates for rates in GRID if rates not in found]
    if left:
        return left
    best = max(found, key=lambda rates: found[rates])
    return [rates for rates in neighbours(best) if rates not in found]


def system(data: str, way: str, seed: int) -> Experiment:
    """The run without its method, which brings its own clipping bound."""
    if data != "digits-500":
        return settings(data, way, "without", EPSILON, seed, "cpu")
    return Experiment.of(
        algorithm="cadence",
        clients=500,
        buffer=100,
        concurrency=200,
        rounds=40,
        clip="descent=1",
        epsilon=EPSILON,
        delta=1e-5,
        max_participations=10,
        noise_seed=seed,
        seed=seed,
        eval_every=40,
    )


def measure(data: str, way: str, method: str, seed: int, folder: str | None, rates: Rates | None) -> None:
    """One run, and its record."""
    changes: dict[str, Any] = {
        "algorithm": method,
        "clip": "descent=1",
        "parameters": (("noisy", True), ("variates", False)),
    }
    about: Record = {"way": way, "method": method, "seed": seed}
    if rates is not None:
        about |= dict(zip(("local_lr", "server_lr", "clip"), rates, strict=True))
        changes["parameters"] = (("local_lr", rates[0]), ("server_lr", rates[1]))
        changes |= {"clip": f"delta={rates[2]:g}", "server_lr_schedule": "linear"}
    if folder is not None:
        changes["data_dir"] = folder
    record = about | train(dataclasses.replace(system(data, way, seed), **changes), None)
    file = HERE / "records" / f"{data}-fedbuff.jsonl"
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)


def measure_all(data: str, way: str, folder: str | None) -> None:
    """All runs that have no record yet."""
    for seed in SEEDS:
        about = (way, "cadence", seed)
        if about not in {(each["way"], each["method"], each["seed"]) for each in read(data)}:
            measure(data, way, "cadence", seed, folder, None)
    while left := next_rates(read(data), way):
        measure(data, way, "fedbuff", SEEDS[0], folder, left[0])
    best = best_rates(read(data), way)
    for seed in SEEDS[1:]:
        if best not in of_fedbuff(read(data), way, seed):
            measure(data, way, "fedbuff", seed, folder, best)


def best_rates(records: list[Record], way: str) -> Rates:
    """FedBuff's best on the first seed."""
    found = of_fedbuff(records, way, SEEDS[0])
    return max(found, key=lambda rates: found[rates])


def table() -> str:
    """Mean and range over seeds, in per cent."""
    rows = [
        "| data, way | Cadence | FedBuff at its best | its local rate, server rate and clip | settings "
        "tried | ahead by |",
        "|---|---|---|---|---|---|",
    ]
    for data, way in [(data, way) for data, ways in WAYS.items() for way in ways]:
        records = read(data)
        best = best_rates(records, way)
        ours = [
            100 * each["accuracy"] for each in records if (each["way"], each["method"]) == (way, "cadence")
        ]
        theirs = [100 * of_fedbuff(records, way, seed)[best] for seed in SEEDS]
        tried = len(of_fedbuff(records, way, SEEDS[0]))
        words = ", ".join(f"{rate:g}" for rate in best)
        rows.append(
            f"| {data}, {way} | {_cell(ours)} | {_cell(theirs)} | {words} | {tried} | "
            f"{mean(ours) - mean(theirs):+.1f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", choices=WAYS, default="digits")
    parser.add_argument("--data-dir", type=Path, help="folder of the data; without it they are downloaded")
    parser.add_argument("--table", action="store_true", help="print the table of all records")
    given = parser.parse_args()
    if given.table:
        print(table())
        return
    for way in WAYS[given.data]:
        measure_all(given.data, way, None if given.data_dir is None else str(given.data_dir))


if __name__ == "__main__":
    main()
