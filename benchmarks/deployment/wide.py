"""A model of any size with next to no work, and the settings of a run with it."""

from pathlib import Path

BUFFER = 2
TASK = """\
import torch
from offbeat import Examples, LearningTask
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn({size}) / {size} ** 0.5)

    def forward(self, inputs):
        return inputs * (1 + self.weight.square().sum())

def load(site):
    return Examples(torch.eye(4, 10), torch.arange(4))

def task():
    return LearningTask(module=Wide, data=load)
"""
SETTINGS = """\
[task]
function = "wide_{size}:task"
[training]
algorithm = "fedbuff"
parameters = {{ local_lr = 0.01, server_lr = 0.1 }}
clients = {nodes}
concurrency = {nodes}
buffer = {buffer}
rounds = {rounds}
eval_every = {rounds}
local_steps = 1
batch_size = 4
[network]
deadline = 300
[watch]
port = {page}
"""


def write_task(
    folder: Path, size: int, nodes: int, updates: int, buffer: int = BUFFER, page: int = 0
) -> Path:
    """A model of that size and the settings of a run with it; where the settings are."""
    (folder / f"wide_{size}.py").write_text(TASK.format(size=size))
    settings, rounds = folder / "serve.toml", max(1, updates // buffer)
    settings.write_text(SETTINGS.format(size=size, nodes=nodes, buffer=buffer, rounds=rounds, page=page))
    return settings
