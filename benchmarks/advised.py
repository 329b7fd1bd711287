"""Whether the trace of one deployment predicts another: `offbeat advise` against sites over Flower.

    python benchmarks/advised.py [--sites 6] [--record 2 2] [--predict 4 2] [--updates 80]

`offbeat serve` with TLS and keys, and its sites by `offbeat join`, all as processes of this machine.
The work of a task is a sleep: site n takes n + 2 times `--pace` seconds, give or take a fifth, so that the
slowest of six takes three and a half times as long as the fastest. A first deployment runs at the concurrency
and the buffer of `--record`. `offbeat advise` is given its folder and predicts those of `--predict`, at which
a second deployment then runs. Rates and staleness of both deployments are those of their
traces, once all sites have joined.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from offbeat.deploy.keys import create_keys
from offbeat.report.trace import read_lines

LIMIT = 400.0  # seconds for one deployment
MEASURES = ("updates_per_second", "steps_per_second", "staleness_mean")
TASK = """\
import random
import time

import torch
from offbeat import Examples, LearningTask
from torch import nn

work = 0.0  # seconds of a task at this site

class Slow(nn.Linear):
    def forward(self, inputs):
        time.sleep(work * random.uniform(0.8, 1.2))
        return super().forward(inputs)

def load(site):
    global work
    work = (int(site.removeprefix("site-")) + 2) * {pace}
    return Examples(torch.eye(4, 10), torch.arange(4))

def task():
    return LearningTask(module=lambda: Slow(10, 4), data=load)
"""
SETTINGS = """\
[task]
function = "slow_sites:task"
[training]
algorithm = "fedbuff"
parameters = {{ local_lr = 0.01, server_lr = 0.1 }}
clients = {sites}
concurrency = {concurrency}
buffer = {buffer}
rounds = {rounds}
eval_every = {rounds}
local_steps = 1
batch_size = 4
[watch]
port = 0
"""


def deploy(folder: Path, sites: int, concurrency: int, buffer: int, updates: int, pace: float) -> Path:
    """Run a deployment to its end; where its run is."""
    folder.mkdir()
    names = [f"site-{number}" for number in range(sites)]
    create_keys(folder / "keys", ["127.0.0.1"], names, ["127.0.0.1"], 2)
    (folder / "slow_sites.py").write_text(TASK.format(pace=pace))
    text = SETTINGS.format(sites=sites, concurrency=concurrency, buffer=buffer, rounds=updates // buffer)
    (folder / "serve.toml").write_text(text)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with contextlib.ExitStack() as stack:

        def start(name: str, *words: str) -> "subprocess.Popen[bytes]":
            with (folder / f"{name}.log").open("wb") as log:
                child = subprocess.Popen(
                    [sys.executable, "-m", "offbeat", *words],
                    cwd=folder,
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            stack.callback(child.kill)
            return child

        joined = {
            name: start(
                *(name, "join", "--superlink", f"127.0.0.1:{port}", "--certificate", "keys/ca.crt"),
                *("--key", f"keys/sites/{name}/key", "--task", "slow_sites:task", "--name", name),
                *("--folder", name, "--once"),
            )
            for name in names
        }
        wait_for(folder, joined)
        server = start(
            *("server", "serve", "serve.toml", "--port", port, "--certificates", "keys"),
            *("--out", "run"),
        )
        limit = time.monotonic() + LIMIT
        while server.poll() is None:
            if time.monotonic() > limit:
                fail("the deployment took too long", folder / "server.log")
            time.sleep(0.2)
        if server.returncode:
            fail("offbeat serve failed", folder / "server.log")
    return folder / "run"


def wait_for(folder: Path, joined: "dict[str, subprocess.Popen[bytes]]") -> None:
    """Wait until each site has said something: it has loaded its data, and waits for its server."""
    limit = time.monotonic() + LIMIT
    while not all((folder / f"{name}.log").stat().st_size for name in joined):
        for name, process in joined.items():
            if process.poll() is not None or time.monotonic() > limit:
                fail(f"{name} did not start", folder / f"{name}.log")
        time.sleep(0.2)


def fail(reason: str, log: Path) -> NoReturn:
    """End with the last words of a process."""
    raise SystemExit(f"advised: {reason}: {log.read_text()[-2000:]}")


def measured(run: Path, sites: int) -> dict[str, float]:
    """What a deployment did once the sites had joined: without its first two updates of each."""
    steps = list(read_lines(run / "trace.jsonl"))
    used = 0
    while used < 2 * sites:
        first = steps.pop(0)
        used += len(first["tasks"])
    seconds = steps[-1]["time"] - first["time"]
    staleness = [step["version"] - 1 - task[1] for step in steps for task in step["tasks"]]
    rates = len(staleness) / seconds, len(steps) / seconds
    return dict(zip(MEASURES, (*rates, sum(staleness) / len(staleness)), strict=True))


def predicted(run: Path, concurrency: int, buffer: int) -> dict[str, float]:
    """What `offbeat advise` computes for other settings."""
    words = ["--concurrency", str(concurrency), "--buffer", str(buffer), "--updates", "20000", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "advise", str(run), *words], check=True, stdout=subprocess.PIPE
    )
    (choice,) = json.loads(done.stdout)["choices"]
    return {name: choice[name] for name in MEASURES}


def main() -> None:
    """Print a table and, on the last line, the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=6)
    parser.add_argument("--record", type=int, nargs=2, default=(2, 2), metavar=("CONCURRENCY", "BUFFER"))
    parser.add_argument("--predict", type=int, nargs=2, default=(4, 2), metavar=("CONCURRENCY", "BUFFER"))
    parser.add_argument("--updates", type=int, default=80, help="of each deployment")
    parser.add_argument("--pace", type=float, default=0.6, help="seconds of work")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="offbeat-") as name:
        (concurrency, buffer), (other, size) = given.record, given.predict
        first = deploy(Path(name) / "first", given.sites, concurrency, buffer, given.updates, given.pace)
        recorded, expected = measured(first, given.sites), predicted(first, other, size)
        second = deploy(Path(name) / "second", given.sites, other, size, given.updates, given.pace)
        found = measured(second, given.sites)
    rows: dict[str, Any] = {
        each: {
            "recorded": round(recorded[each], 3),
            "predicted": round(expected[each], 3),
            "measured": round(found[each], 3),
            "error": round(expected[each] / found[each] - 1, 3),
        }
        for each in MEASURES
    }
    print("| | recorded | predicted | measured | error |\n|---|---|---|---|---|")
    for each, row in rows.items():
        cells = " | ".join(f"{value:.3f}" for value in list(row.values())[:3])
        print(f"| {each} | {cells} | {row['error']:+.1%} |")
    print(json.dumps({"sites": given.sites, "record": given.record, "predict": given.predict, **rows}))


if __name__ == "__main__":
    main()
