"""Personal heads: each client keeps the last layer of the model, and the others are shared.

Thirty clients have a few classes each of the digits of scikit-learn, by a Dirichlet partition of 0.1. The
same method trains one model for everybody, and then one with personal heads, both tested client by client.

    python examples/personal.py
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import offbeat


class Network(nn.Module):
    """A body that is shared, and a head that stays at the client."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs))
        return outputs


def make_task() -> offbeat.LearningTask:
    """The digits by client, with three tenths of each client's examples as its test data."""
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
    clients = offbeat.ClientData.from_partition((inputs, digits.target), "dirichlet:0.1:10", 30, seed=0)
    train, test = clients.split(0.3)
    return offbeat.LearningTask(module=Network, data=train, test=test, name="digits-by-client")


def main() -> None:
    """Train with and without personal heads, and print the accuracy over clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="server steps [%(default)s]")
    given = parser.parse_args()
    task = make_task()
    print(f"{'':14}  server steps  mean accuracy  worst tenth")
    with TemporaryDirectory() as folder:
        for name, personal in (("one model", ()), ("personal heads", ("head",))):
            result = offbeat.run(
                replace(task, personal=personal),
                "fedbuff",
                rounds=given.rounds,
                eval_every=max(1, given.rounds // 4),
                out=Path(folder) / name.replace(" ", "-"),
                progress=False,
            )
            for record in result.records[1:]:
                mean, worst = record["accuracy_mean"], record["accuracy_worst_tenth"]
                print(f"{name:14}  {record['version']:12}  {mean:13.3f}  {worst:11.3f}")


if __name__ == "__main__":
    main()
