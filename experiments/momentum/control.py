"""Momentum without delay on digits, all that momentum approximation can restore: into control.json."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from settings import BETAS, DIGITS, RULES

from offbeat.running import run
from offbeat.trial import prepare


def main() -> None:
    """Every beta and rate of the quick grid, with synchronous rounds of the same size."""
    torch.set_num_threads(1)
    best: dict[str, dict[str, float]] = {}
    for rule in RULES:
        for beta in BETAS:
            cells = [
                cell for cell in DIGITS.cells(rule, False) if (cell.method, cell.beta) == ("fedbuff", beta)
            ]
            reached = []
            for cell in cells:
                made = replace(DIGITS.experiment(cell), dispatch="synchronous", limit=None)
                steps = run(made, prepare(made))
                reached.append(max(step.record["accuracy"] for step in steps if step.record))
            best.setdefault(rule, {})[f"{beta:g}"] = max(reached)
            print(rule, beta, f"{max(reached):.4f}", flush=True)
    (Path(__file__).parent / "control.json").write_text(json.dumps(best, indent=1) + "\n")


if __name__ == "__main__":
    main()
