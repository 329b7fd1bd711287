"""The sites of the campaign: a few examples each, and losses that misbehave where they are told to.

Given to `offbeat join` as `sites:task`; the server has the same model. An order is a file with the name of a
site in the folder that OFFBEAT_ORDERS names; without that variable nothing here misbehaves.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat import Examples, LearningTask

ORDERS = "OFFBEAT_ORDERS"
FEATURES, CLASSES, EXAMPLES = 20, 5, 60


def module() -> nn.Module:
    """The model, the same for all."""
    return nn.Linear(FEATURES, CLASSES)


def load(site: str) -> Examples:
    """A site's own examples, which follow from its name."""
    generator = torch.Generator().manual_seed(sum(site.encode()))
    inputs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    return Examples(inputs, (inputs @ rule).argmax(1))


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each example, unless there is an order to do something else this once."""
    each = cross_entropy(outputs, targets, reduction="none")
    match take(site()):
        case "raise":
            raise ZeroDivisionError("as it was told to")
        case "exit":
            os._exit(1)
        case "hang":
            time.sleep(3600)
        case "nan":
            return each * torch.nan
    return each


def task() -> LearningTask:
    """The task, the same for all."""
    return LearningTask(module=module, data=load, loss=losses)


def site() -> str:
    """Which site this process is."""
    return sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else ""


def take(name: str) -> str | None:
    """The order for a site, which is then gone; that it was taken is written beside it."""
    if not os.environ.get(ORDERS) or not name:
        return None
    path = Path(os.environ[ORDERS]) / name
    try:
        order = path.read_text()
        path.unlink()
    except FileNotFoundError:
        return None
    tell(name, {"order": order})
    return order


def give(folder: Path, name: str, order: str) -> None:
    """Have a site do it at its next task."""
    part = folder / f".{name}.part"
    part.write_text(order)
    part.replace(folder / name)


def tell(name: str, facts: dict[str, object]) -> None:
    """One line on what was done."""
    with (Path(os.environ[ORDERS]) / f"{name}.done").open("a") as file:
        file.write(json.dumps({"time": time.time()} | facts) + "\n")
