"""What a deployment costs: offbeat over Flower beside a bare Flower loop, and the server's memory.

    python benchmarks/deployed.py [--sizes 200000 11000000] [--updates 20] [--turns 2] [--nodes 2]
    python benchmarks/deployed.py --memory [--updates 2000] [--sizes 100000]

Without `--memory`, for each size: one SuperLink and its nodes as processes of this machine, each node started
by `offbeat join`. On them a bare loop (bare_flower/: arrays of that size out and back, NumPy alone) and
FedBuff with a model of that size and next to no work take turns, at the same concurrency, buffer and poll.
An update's latency is from when its message was sent until its answer was here: checked and on the
disk, in offbeat's case. `between` is from there until the node's next message was sent, which for offbeat
has the server's step and its checkpoint in it. What each takes to start, and the first message of each
node, are not counted. No two arrays are the same, for Flower sends what it has sent before only once.
Every process computes with one thread: sites would not share a machine. `cpu` is the processor time of all
processes of both kinds, from the first message to the last answer, for each update: other work on the machine
changes it less than it changes the rest.

With `--memory`: the same server and sites in one process and no network, for the resident memory over many
updates, and for what an update costs without Flower. The slope leaves out the first fifth.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from deployment.in_memory import weigh
from deployment.meter import Meter
from deployment.wide import BUFFER, write_task

HERE = Path(__file__).parent
LIMIT = 300.0  # seconds for one turn
REST = 20.0  # seconds for nodes to be done with tasks of a run that is over, which can upset the next one


class Trip(NamedTuple):
    """One update; times in seconds."""

    node: int
    sent: float
    done: float


class Turn(NamedTuple):
    """What one system did at a stretch."""

    trips: list[Trip]
    work: list[float]  # seconds at sites, as far as known

    @property
    def ends(self) -> tuple[float, float]:
        """When the first message was sent and the last answer here."""
        return min(trip.sent for trip in self.trips), max(trip.done for trip in self.trips)

    @property
    def seconds(self) -> float:
        begin, end = self.ends
        return end - begin

    @property
    def between(self) -> list[float]:
        """From each answer to the next message to the same node."""
        waits = []
        for trip in self.trips:
            after = [
                other.sent for other in self.trips if other.node == trip.node and other.sent >= trip.done
            ]
            waits += [min(after) - trip.done] if after else []
        return waits


@contextmanager
def network(folder: Path, size: int, nodes: int, port: int) -> Iterator[str]:
    """A SuperLink and nodes of which each is a site; the SuperLink's address."""
    from offbeat.deploy.flower.commands import (
        ChildProcess,
        SuperLinkAddress,
        start_superlink,
        wait_for_superlink,
        write_flower_home,
    )

    link = SuperLinkAddress(f"127.0.0.1:{port}", None)
    write_flower_home(folder / "home", link)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    children = [start_superlink("127.0.0.1", port, folder, None)]
    try:
        wait_for_superlink(link, 60.0, children[0].is_alive, folder / "superlink.log")
        for node in range(nodes):
            words = [sys.executable, "-m", "offbeat", "join", "--superlink", link.address, "--insecure"]
            words += ["--data", f"wide_{size}:load", "--name", f"site-{node}"]
            words += ["--folder", str(folder / f"site-{node}")]
            children.append(ChildProcess(words, environment, folder / f"site-{node}.log"))
        yield link.address
    finally:
        for child in reversed(children):
            child.stop(timeout=30.0)


def await_file(path: Path, log: Path) -> None:
    """Wait until something has been written."""
    limit = time.monotonic() + LIMIT
    while not path.exists():
        if time.monotonic() > limit:
            raise SystemExit(f"deployed: {path.name} did not come: {log.read_text()[-2000:]}")
        time.sleep(0.5)


def bare_turn(folder: Path, name: str, given: argparse.Namespace, size: int, updates: int) -> Turn:
    """Flower alone."""
    from offbeat.deploy.flower import commands

    out, told = folder / f"{name}.json", folder / f"{name}.toml"
    told.write_text(
        f'size = {size}\nnodes = {given.nodes}\nupdates = {updates}\npoll = {given.poll}\nout = "{out}"\n'
    )
    commands.submit_run(folder / "home", HERE / "bare_flower", told)
    await_file(out, folder / "superlink.log")
    return Turn([Trip(*each) for each in json.loads(out.read_text())][:updates], [])


def offbeat_turn(folder: Path, name: str, settings: Path, address: str, updates: int) -> Turn:
    """`offbeat serve` on the same SuperLink."""
    out = folder / name
    words = [sys.executable, "-m", "offbeat", "serve", str(settings), "--superlink", address]
    done = subprocess.run(
        [*words, "--out", str(out)], timeout=LIMIT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"deployed: offbeat serve failed: {done.stderr[-2000:]}")
    sent: dict[int, float] = {}
    trips, work = [], []
    for line in (out / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        now = datetime.fromisoformat(event["time"]).timestamp()
        if event["event"] == "sent":
            sent[event["client"]] = now
        elif event["event"] == "accepted":
            trips.append(Trip(event["client"], sent[event["client"]], now))
            work.append(event["work"])
    return Turn(trips[:updates], work[:updates])


def facts(turns: Sequence[Turn], meter: Meter) -> dict[str, Any]:
    """Of all turns of one system."""
    latencies = [trip.done - trip.sent for turn in turns for trip in turn.trips]
    work = [seconds for turn in turns for seconds in turn.work]
    return {
        "updates": len(latencies),
        "rate": len(latencies) / sum(turn.seconds for turn in turns),
        "latency": [float(each) for each in np.percentile(latencies, (5, 50, 95))],
        "mean": statistics.fmean(latencies),
        "cpu": sum(meter.between(*turn.ends) for turn in turns) / len(latencies),
        "between": statistics.median([each for turn in turns for each in turn.between] or [0.0]),
        "work": statistics.median(work) if work else None,
    }


def compare(given: argparse.Namespace, size: int, port: int) -> dict[str, Any]:
    """Turn by turn over one SuperLink."""
    updates = max(BUFFER, given.updates // given.turns // BUFFER * BUFFER)
    turns: dict[str, list[Turn]] = {"bare": [], "offbeat": []}
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="offbeat-") as name:
        folder = Path(name)
        settings = write_task(folder, size, given.nodes, updates, given.poll)
        with network(folder, size, given.nodes, port) as address:
            for turn in range(given.turns):
                turns["bare"].append(bare_turn(folder, f"bare-{turn}", given, size, updates))
                turns["offbeat"].append(offbeat_turn(folder, f"run-{turn}", settings, address, updates))
                time.sleep(REST)
    meter.close()
    bare, ours = facts(turns["bare"], meter), facts(turns["offbeat"], meter)
    return {
        "size": size,
        "bare": bare,
        "offbeat": ours,
        "latency_ratio": ours["latency"][1] / bare["latency"][1],
        "mean_ratio": ours["mean"] / bare["mean"],
        "seconds_an_update_ratio": bare["rate"] / ours["rate"],
        "cpu_ratio": ours["cpu"] / bare["cpu"],
        "flowers_part": min(1.0, bare["latency"][1] / ours["latency"][1]),
    }


def print_weights(found: dict[str, Any]) -> None:
    """How the memory went."""
    print(f"{found['size']:,} weights, {found['updates']:,} updates, server and sites in one process")
    for count, weight in found["mib"]:
        print(f"{count:>8,} updates {weight:10.1f} MiB")
    print(f"slope {found['kib_an_update']:.3f} KiB an update; {found['ms_an_update']:.1f} ms an update")


def print_comparison(found: dict[str, Any]) -> None:
    """Two rows and what they say."""
    for name in ("bare", "offbeat"):
        row = found[name]
        low, middle, high = row["latency"]
        work = "" if row["work"] is None else f"{row['work']:10.3f}"
        print(
            f"{found['size']:>12,} {name:<8}{row['updates']:>8}{row['rate']:>10.3f}"
            f"{low:>8.2f}{middle:>7.2f}{high:>7.2f}{row['between']:>9.2f}{row['cpu']:>7.2f}{work}"
        )
    print(
        f"{'':>13}offbeat / bare: latency {found['latency_ratio']:.3f}, "
        f"time an update {found['seconds_an_update_ratio']:.3f}, processor time {found['cpu_ratio']:.3f}; "
        f"Flower's own part of the latency {100 * found['flowers_part']:.0f} %"
    )


def main() -> None:
    """Print a table and, on the last line, the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", help="weights of the model")
    parser.add_argument("--updates", type=int, help="of each system and size [20; 2000 with --memory]")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--poll", type=float, default=0.5, help="seconds between two looks of a server")
    parser.add_argument("--port", type=int, default=27100, help="the SuperLink's")
    parser.add_argument("--memory", action="store_true", help="no network: the memory of the server")
    parser.add_argument("--quick", action="store_true", help="the memory of few updates, to see that it runs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.memory or given.quick:
        size, updates = (1_000, 50) if given.quick else (100_000, 2_000)
        rows = [
            weigh(each, given.nodes, (given.updates or updates) // BUFFER * BUFFER)
            for each in given.sizes or [size]
        ]
        for row in rows:
            print_weights(row)
        print(json.dumps({"memory": rows}))
        return
    given.updates = given.updates or 20
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order: nothing stays behind
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{given.nodes} nodes, poll {given.poll} s, {given.turns} turns each; seconds")
    heads = f"{'p5':>8}{'p50':>7}{'p95':>7}{'between':>9}{'cpu':>7}{'work':>10}"
    print(f"{'weights':>12} {'':<8}{'updates':>8}{'an s':>10}{heads}")
    rows = []
    for place, size in enumerate(given.sizes or [200_000, 11_000_000]):
        rows.append(compare(given, size, given.port + place))
        print_comparison(rows[-1])
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
