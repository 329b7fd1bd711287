"""What offbeat and its peers all do: the CIFAR-10 benchmark of pfl-research, as its baseline.yaml sets it.

1,000 clients with 50 images each, a cohort of 50, one epoch in batches of 10, local rate 0.1, server
rate 1, a mean over clients. This file is imported inside each peer's own environment, so it needs
nothing but torch and NumPy. Data and initial weights travel as files in a folder.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BATCH, LOCAL_LR, SERVER_LR = 10, 0.1, 1.0
_ARRAYS = ("inputs", "targets", "test_inputs", "test_targets")
_MARK = "@"  # begins the lines that are meant for the caller; a peer may print others


@dataclass(frozen=True)
class Shape:
    """How much of it; the defaults are the benchmark's own."""

    clients: int = 1000
    images: int = 50  # of one client
    cohort: int = 50
    dropout: bool = True


class ChannelsFirst(nn.Module):
    """Images as they are stored, (examples, height, width, channels), as convolutions take them."""

    def forward(self, images: Tensor) -> Tensor:
        """A view."""
        return images.permute(0, 3, 1, 2)


def build(dropout: bool) -> nn.Module:
    """Two convolutions and a hidden layer, 1,626,442 weights, drawn as Glorot proposed."""
    drops = (0.25, 0.5) if dropout else (0.0, 0.0)
    module = nn.Sequential(
        ChannelsFirst(),
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *([nn.Dropout(drops[0])] if dropout else []),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        *([nn.Dropout(drops[1])] if dropout else []),
        nn.Linear(128, 10),
    )
    for layer in module:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return module


@dataclass(frozen=True)
class Workload:
    """Client c has the images from c * shape.images on."""

    shape: Shape
    inputs: np.ndarray  # (examples, 32, 32, 3)
    targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray
    weights: list[np.ndarray]  # in the order of the module's parameters

    def module(self) -> nn.Module:
        """With the initial weights."""
        module = build(self.shape.dropout)
        put(module, self.weights)
        return module

    def part(self, client: int) -> slice:
        """Whose images are whose."""
        return slice(client * self.shape.images, (client + 1) * self.shape.images)

    def accuracy(self, module: nn.Module) -> float:
        """The share of test images that a module labels right, in evaluation mode."""
        device = next(module.parameters()).device
        inputs, targets = torch.from_numpy(self.test_inputs), torch.from_numpy(self.test_targets)
        module.eval()
        with torch.no_grad():
            right = [
                (module(block.to(device)).argmax(1).cpu() == truth).sum().item()
                for block, truth in zip(inputs.split(500), targets.split(500), strict=True)
            ]
        module.train()
        return sum(right) / len(targets)

    def save(self, folder: Path) -> None:
        """For `load` in another process."""
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        np.savez(folder / "weights.npz", *self.weights)
        (folder / "shape.json").write_text(json.dumps(asdict(self.shape)))


def load(folder: Path) -> Workload:
    """What `save` left; images are mapped, so that processes share them."""
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="c") for name in _ARRAYS]
    with np.load(folder / "weights.npz") as packed:
        weights = [packed[name] for name in packed.files]
    return Workload(Shape(**json.loads((folder / "shape.json").read_text())), *arrays, weights)


def put(module: nn.Module, weights: list[np.ndarray]) -> None:
    """Weights into a module, in place."""
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(value))


def round_products(precision: str) -> None:
    """What a GPU does in this process."""
    allowed = precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def tell(**facts: Any) -> None:
    """One line to the caller."""
    print(_MARK + json.dumps(facts), flush=True)


def heard(line: str) -> dict[str, Any] | None:
    """What `tell` said, if the line is one of its."""
    facts: dict[str, Any] | None = json.loads(line[len(_MARK) :]) if line.startswith(_MARK) else None
    return facts


def asked() -> int:
    """How many server steps the caller wants next; 0 when it wants no more. Waits."""
    return int(sys.stdin.readline() or 0)
