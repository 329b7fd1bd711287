"""Momentum without delay on digits, all that momentum approximation can restore: into control.json."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from experiments.studies.momentum import TABLE2, beta_of

from offbeat.training.build import build_run
from offbeat.training.runner import run_experiment


def main() -> None:
    """Every beta and rate of FedBuff in the quick grid, with synchronous rounds of the same size."""
    torch.set_num_threads(1)
    best: dict[str, dict[str, float]] = {}
    for cell in TABLE2.quick.cells:
        if cell.column != "fedbuff" or cell.experiment.clip is not None:
            continue
        made = replace(cell.experiment, dispatch="synchronous", max_staleness=None)
        steps = run_experiment(made, build_run(made))
        reached = max(step.record["accuracy"] for step in steps if step.record)
        rule, beta = made.algorithm, f"{beta_of(cell):g}"
        known = best.setdefault(rule, {})
        known[beta] = max(known.get(beta, 0.0), reached)
        print(rule, beta, f"{reached:.4f}", flush=True)
    (Path(__file__).parent / "control.json").write_text(json.dumps(best, indent=1) + "\n")


if __name__ == "__main__":
    main()
