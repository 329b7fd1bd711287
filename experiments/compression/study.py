"""Accuracy against the bytes of uploads: 8 bits a number, and the largest few with error feedback.

    python -m experiments.compression.study             # trains what has no record yet: minutes on a CPU
    python -m experiments.compression.study --write     # writes the table into README.md

Each run is `offbeat run METHOD --compress SPEC --seed N` with the rates below, and is appended to
records.jsonl as it ends.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from offbeat.training.build import build_run
from offbeat.training.experiment import Experiment
from offbeat.training.runner import run_experiment

HERE = Path(__file__).parent
RECORDS, PAGE = HERE / "records.jsonl", HERE / "README.md"
COMPRESSIONS = (None, "8bit", "topk:0.125", "topk:0.025")
METHODS: dict[str, dict[str, float]] = {
    "fedbuff": {"local_lr": 0.2, "server_lr": 1.0},
    "fadas": {"local_lr": 0.2, "server_lr": 0.01},
    "cadence": {},
}
SEEDS = (0, 1, 2)


def settings(method: str, compress: str | None, seed: int) -> Experiment:
    """Digits with the MLP: 100 clients of Dir(0.5), 20 at work, 10 updates a step."""
    return Experiment.of(
        algorithm=method,
        parameters=tuple(METHODS[method].items()),
        data="digits",
        rounds=200,
        compress=compress,
        seed=seed,
    )


def measure(method: str, compress: str | None, seed: int) -> dict[str, Any]:
    """One run."""
    experiment = settings(method, compress, seed)
    *_, last = run_experiment(experiment, build_run(experiment))
    assert last.record is not None
    return {
        "method": method,
        "compress": compress,
        "seed": seed,
        "accuracy": last.record["accuracy"],
        "loss": round(last.record["loss"], 5),
        "bytes_up": 4 * last.record["floats_up"],
        "client_updates": last.record["client_updates"],
    }


def key(record: dict[str, Any]) -> tuple[str, str | None, int]:
    """The run that a record is of."""
    return record["method"], record["compress"], record["seed"]


def records() -> list[dict[str, Any]]:
    """Those that are there."""
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []


def table() -> str:
    """The mean over seeds and the worst in brackets, and the bytes of one upload."""
    found = {key(record): record for record in records()}
    rows = [
        "| method | compression | bytes an upload | of the size | accuracy | loss |",
        "|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        for compress in COMPRESSIONS:
            each = [found[method, compress, seed] for seed in SEEDS]
            plain = [found[method, None, seed] for seed in SEEDS]
            size, whole = (mean(r["bytes_up"] / r["client_updates"] for r in part) for part in (each, plain))
            accuracy = [record["accuracy"] for record in each]
            rows.append(
                f"| {method} | {f'`{compress}`' if compress else 'none'} | {size:,.0f} | {size / whole:.3f}"
                f" | "
                f"{mean(accuracy):.3f} ({min(accuracy):.3f}) | {mean(r['loss'] for r in each):.3f} |"
            )
    return "\n".join(rows)


def page() -> str:
    """README.md with the table of the records."""
    before, rest = PAGE.read_text().split("<!-- table -->")
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
    runs = [(method, compress, seed) for seed in SEEDS for method in METHODS for compress in COMPRESSIONS]
    for run in [run for run in runs if run not in done][: options.most]:
        record = measure(*run)
        with RECORDS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
