"""A run whose clients keep far more than RAM should hold: resident memory, time, disk, and a kill.

    python benchmarks/client_memory.py [--clients 20000] [--parameters 200000] [--rounds 200]
                                       [--kills 1] [--save-every 10] [--folder DIR]

AdaMasFL with every client's control variate in a file, its full start included. One run goes
through; another is killed (SIGKILL) and resumed until it is done. Both must end with the same model
and the same rows for all clients. Gradients are cheap on purpose: a table with ten numbers for each
of many words, and two examples of four words a client. Files are removed when they are done with.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat import AdaMasFL, Asynchronous, Examples, Mapped, Population, Problem, Sequential, Steps, train
from offbeat.data.client_store import make_client_store
from offbeat.training import checkpoint

BUFFER, CONCURRENCY, CLASSES, EXAMPLES, WORDS = 10, 20, 10, 2, 4


class Sum(nn.Module):
    """The sum of the words' numbers, as logits."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.words = nn.Embedding(parameters // CLASSES, CLASSES)
        nn.init.zeros_(self.words.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (examples, classes)."""
        summed: Tensor = self.words(inputs).sum(1)
        return summed


def build(clients: int, parameters: int, folder: Path) -> Sequential:
    """Clients with two examples each, and their memory in the folder."""
    draws = np.random.default_rng(0)
    inputs = torch.from_numpy(draws.integers(0, parameters // CLASSES, (clients * EXAMPLES, WORDS)))
    targets = torch.from_numpy(draws.integers(0, CLASSES, clients * EXAMPLES))
    parts = list(np.arange(clients * EXAMPLES).reshape(clients, EXAMPLES))
    population = Population(Examples(inputs, targets), parts, Steps(1, EXAMPLES))
    return Sequential(Problem(Sum(parameters), cross_entropy), population, memory=Mapped(folder))


def live(given: argparse.Namespace, folder: Path) -> None:
    """One life of a run: begins, or goes on from its checkpoint; says every version as it is reached."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    state = folder / "state"
    resume = checkpoint.load(state) if state.exists() else None
    shots = train(
        AdaMasFL.tuned(BUFFER, 1, given.rounds),
        build(given.clients, given.parameters, folder),
        dispatch=Asynchronous(CONCURRENCY),
        buffer=BUFFER,
        rounds=given.rounds,
        resume=resume,
    )
    started = 0.0
    for shot in shots:
        if shot.version == 0:
            started = time.perf_counter() - begun
        if shot.version % given.save_every == 0 or shot.version == given.rounds:
            checkpoint.save(state, shot.checkpoint())
            shot.confirm()
        print(shot.version, flush=True)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes in one unit of ru_maxrss
    facts = {
        "start_seconds": round(started, 1),
        "seconds": round(time.perf_counter() - begun, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20),
        "disk_gb": round(_disk(folder) / 1e9, 2),
        "checkpoint_mb": round(state.stat().st_size / 1e6, 2),
    }
    print(json.dumps(facts | _digest(given, folder)))


def _disk(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def _digest(given: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Of the model and of every client's row, as the last checkpoint has them."""
    facts, tensors = checkpoint.load(folder / "state")
    x, session = tensors["state.0"], facts["session"]
    memories = make_client_store(Mapped(folder), torch.zeros_like(x), given.clients, torch.device("cpu"))
    memories.load(session["clients"], [tensors[f"session.memory.{n}"] for n in range(session["columns"])])
    rows = hashlib.blake2b(digest_size=16)
    for client in range(given.clients):
        rows.update(memories.read(client).numpy().data)
    model = hashlib.blake2b(x.numpy().data, digest_size=16)
    return {"model": model.hexdigest(), "rows": rows.hexdigest()}


def spend(given: argparse.Namespace, folder: Path, kill_at: int | None = None) -> dict[str, Any] | None:
    """One life in a process of its own; None if it was killed soon after a version."""
    words = [f"--{name}={getattr(given, name)}" for name in ("clients", "parameters", "rounds")]
    program = [sys.executable, __file__, *words, f"--save-every={given.save_every}", f"--live={folder}"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        last = ""
        for last in child.stdout:
            if last.strip() == str(kill_at):
                time.sleep(random.uniform(0, 0.2))
                child.kill()
    if kill_at is not None and child.returncode < 0:
        return None
    if child.returncode:
        raise SystemExit(child.returncode)
    facts: dict[str, Any] = json.loads(last)
    return facts


def main() -> None:
    """Print what was measured, and the same as a line of JSON."""
    parser = argparse.ArgumentParser(
        description="Client memory in a file: resident memory, time, disk, kills."
    )
    parser.add_argument("--clients", type=int, default=20_000)
    parser.add_argument("--parameters", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument(
        "--folder", type=Path, help="where to put files for a while; default: a temporary one"
    )
    parser.add_argument("--live", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.live:
        live(given, given.live)
        return
    if given.folder:
        given.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="offbeat-", dir=given.folder))
    try:
        whole = spend(given, folder)
        print("went through:", whole, flush=True)
        shutil.rmtree(folder)
        folder.mkdir()
        moments = sorted(random.sample(range(given.rounds), given.kills))
        killed = sum(spend(given, folder, moment) is None for moment in moments)
        resumed = spend(given, folder)
        print(f"killed {killed} times, after versions {moments}:", resumed, flush=True)
    finally:
        shutil.rmtree(folder)
    assert whole
    assert resumed
    same = all(whole[name] == resumed[name] for name in ("model", "rows"))
    size = 4 * given.clients * given.parameters / 1e9
    print(f"{size:.1f} GB of client memory, {os.cpu_count()} cores; the same bits: {same}")
    print(json.dumps({"whole": whole, "resumed": resumed, "killed": killed, "same": same}))
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
