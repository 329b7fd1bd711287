"""One task, simulated first and then deployed over three sites on this machine, without a change.

Run `python three_sites.py` here. On real machines the server and each site run one command of `deployed`,
with the keys that `offbeat keys` makes in place of --insecure.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import offbeat
from offbeat.deploy.network import free_port

SITES = ("north", "south", "east")
SETTINGS = """
[task]
function = "three_sites:task"
[training]
algorithm = "fedbuff"
clients = 3
buffer = 2
rounds = 12
local_steps = 20
eval_every = 4
parameters = { local_lr = 0.5 }
"""


def load(site: str) -> offbeat.Examples:
    """Return the patients of one site; a real site would read its own files here."""
    return patients(SITES.index(site))


def patients(seed: int) -> offbeat.Examples:
    """Stand for real records."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(200, 4, generator=generator)
    return offbeat.Examples(inputs, (inputs[:, 0] > inputs[:, 1]).long())


def task() -> offbeat.LearningTask:
    """Return the task, for the simulation, for the server and for every site."""
    data = offbeat.ClientData.from_function(load, SITES)
    return offbeat.LearningTask(module=lambda: nn.Linear(4, 2), data=data, test=lambda: patients(9))


def simulated() -> float:
    """Train under a virtual clock."""
    result = offbeat.run(task(), "fedbuff", rounds=12, buffer=2, local_steps=20, parameters={"local_lr": 0.5})
    return float(result.records[-1]["accuracy"])


def deployed() -> float:
    """Train over three sites, each a process that has its own data alone."""
    Path("serve.toml").write_text(SETTINGS)
    port, offbeat_command = str(free_port()), [sys.executable, "-m", "offbeat"]
    serve = [*offbeat_command, "serve", "serve.toml", "--port", port, "--json"]
    join = [*offbeat_command, "join", "--superlink", f"127.0.0.1:{port}", "--insecure", "--once"]
    join += ["--task", "three_sites:task"]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    sites = [subprocess.Popen([*join, "--name", name, "--folder", f"sites/{name}"]) for name in SITES]
    try:
        answer, _ = server.communicate(timeout=300)
        return float(json.loads(answer.splitlines()[-1])["last"]["accuracy"])
    finally:
        for process in (server, *sites):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    print(f"simulated: accuracy {simulated():.3f}")
    print(f"deployed: accuracy {deployed():.3f}")
