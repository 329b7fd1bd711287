"""Does PAdaMFed-VR's momentum turn round when clients walk far in a task? The method in plain loops.

    python -m experiments.padamfed.turning --data-dir DIR --local-lr 0.003

Setting of Fig. 2, MNIST i.i.d., in full, with draws of its own and fewer rounds, at the rates of T = 400.
Nothing of the project's engines or algorithms is used, so it is also a second opinion on them.
Each round's accuracy (on 2,000 test images), the norm of the momentum and its cosine with the one
before are printed, and written to turning.json beside this file under the local rate.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat.data.datasets import load
from offbeat.nn import models

CLIENTS, COHORT, STEPS, ROUNDS, BATCH, TESTED = 100, 10, 10, 400, 32, 2000
BETA = GAMMA = (COHORT * STEPS) ** (1 / 3) / ROUNDS ** (2 / 3)


class Problem:
    """A module whose weights are one vector, and who has which images."""

    def __init__(self, data_dir: str | None) -> None:
        source = load("mnist", data_dir)
        self.images, self.labels = source.train.inputs.float(), source.train.targets
        self.tested = source.test.inputs[:TESTED].float(), source.test.targets[:TESTED]
        self.module: nn.Module = models.build("cnn", (1, 28, 28), 10, seed=0)
        self.draws = np.random.default_rng(0)
        self.parts = np.array_split(self.draws.permutation(len(self.images)), CLIENTS)

    def batch(self, client: int) -> Tensor:
        return torch.from_numpy(self.draws.choice(self.parts[client], BATCH, replace=False))

    def gradient(self, x: Tensor, batch: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(x, self.module.parameters())
        self.module.zero_grad()
        cross_entropy(self.module(self.images[batch]), self.labels[batch]).backward()
        return torch.cat(
            [each.grad.reshape(-1) for each in self.module.parameters() if each.grad is not None]
        )

    def accuracy(self, x: Tensor) -> float:
        nn.utils.vector_to_parameters(x, self.module.parameters())
        with torch.no_grad():
            return float((self.module(self.tested[0]).argmax(1) == self.tested[1]).float().mean())


def turning(problem: Problem, local_lr: float, rounds: int) -> list[dict[str, float]]:
    """Each round's accuracy, norm of the momentum and cosine with the last one."""
    x = nn.utils.parameters_to_vector(problem.module.parameters()).detach().clone()
    last = x
    own = [
        sum(problem.gradient(x, problem.batch(client)) for _ in range(STEPS)) / STEPS
        for client in range(CLIENTS)
    ]
    mean = sum(own) / CLIENTS
    momentum, rows = mean, []
    for _ in range(rounds):
        drawn = problem.draws.choice(CLIENTS, COHORT, replace=False)
        way = kept = before = fresh = torch.zeros_like(x)
        news = {}
        for client in drawn:
            y, raw = x, torch.zeros_like(x)
            for _ in range(STEPS):
                batch = problem.batch(client)
                new, old = problem.gradient(y, batch), problem.gradient(last, batch)
                u = new + BETA * (mean - own[client]) + (1 - BETA) * (momentum - old)
                y, raw, before = y - local_lr * u / u.norm(), raw + new / STEPS, before + old / STEPS / COHORT
            way = way + (x - y) / (local_lr * STEPS * COHORT)
            news[client], fresh, kept = raw, fresh + raw / COHORT, kept + own[client] / COHORT
        turned = fresh + BETA * (mean - kept) + (1 - BETA) * (momentum - before)
        cosine = float(turned @ momentum / turned.norm() / momentum.norm())
        mean = mean + sum(raw - own[client] for client, raw in news.items()) / CLIENTS
        for client, raw in news.items():
            own[client] = raw
        momentum, last, x = turned, x, x - GAMMA * way
        row = {"accuracy": problem.accuracy(x), "norm": float(momentum.norm()), "cosine": cosine}
        rows.append({name: round(value, 4) for name, value in row.items()})
        print(len(rows), rows[-1], flush=True)
    return rows


def main() -> None:
    """Runs one local rate and keeps its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir")
    parser.add_argument("--local-lr", type=float, required=True)
    parser.add_argument("--rounds", type=int, default=36)
    made = parser.parse_args()
    rows = turning(Problem(made.data_dir), made.local_lr, made.rounds)
    path = Path(__file__).with_name("turning.json")
    known = json.loads(path.read_text()) if path.exists() else {}
    lines = [f'"{rate}": {json.dumps(each)}' for rate, each in {**known, str(made.local_lr): rows}.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
