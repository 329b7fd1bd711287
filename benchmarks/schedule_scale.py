"""Time per task of the schedule against the number of clients: a million tasks each, and no training.

    python benchmarks/schedule_scale.py [--rounds 1000]

The populations take turns of a few server steps, so that a busy machine slows all of them alike.
"""

import argparse
import json
import resource
import sys
import time

from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Tiers
from offbeat.schedule.dispatch import Asynchronous
from offbeat.schedule.scheduler import Scheduler

BUFFER = 1_000
SIZES = ((10_000, 9_000), (20_000, 10_000), (100_000, 10_000), (1_000_000, 10_000))  # clients, concurrency
REFERENCE = 20_000  # the smallest population that leaves a choice at the concurrency of the largest
TURN = 10  # server steps


def build(clients: int, concurrency: int) -> Scheduler:
    """A schedule that has not begun."""
    dispatch = Asynchronous(concurrency)
    draws = dispatch.source(seed=0)
    return Scheduler(Clock(Tiers("mild").bind(draws, clients), draws), dispatch, draws, clients, BUFFER)


def measure(rounds: int) -> list[dict[str, float]]:
    """One row for each population, constructions included."""
    flows: dict[int, Scheduler] = {}
    wall = dict.fromkeys((clients for clients, _ in SIZES), 0.0)
    cpu = dict(wall)
    for start in range(0, rounds, TURN):
        for clients, concurrency in SIZES:
            begun = time.perf_counter(), time.process_time()
            if clients not in flows:
                flows[clients] = build(clients, concurrency)
            for version in range(start, min(start + TURN, rounds)):
                flows[clients].fill(version)
            wall[clients] += time.perf_counter() - begun[0]
            cpu[clients] += time.process_time() - begun[1]
    tasks = rounds * BUFFER
    return [
        {
            "clients": clients,
            "concurrency": concurrency,
            "tasks": tasks,
            "seconds": round(wall[clients], 2),
            "cpu_seconds": round(cpu[clients], 2),
            "cpu_microseconds_per_task": round(cpu[clients] / tasks * 1e6, 2),
            "ratio": round(cpu[clients] / cpu[REFERENCE], 2),
        }
        for clients, concurrency in SIZES
    ]


def main() -> None:
    """Print a table and, on the last line, the same as JSON."""
    parser = argparse.ArgumentParser(
        description="Time per task of the schedule against the number of clients."
    )
    parser.add_argument("--rounds", type=int, default=1_000, help="server steps of 1,000 tasks each")
    rounds = parser.parse_args().rounds
    rows = measure(rounds)
    print(
        " ".join(
            f"{head:>11}" for head in ("clients", "in flight", "tasks", "wall s", "CPU s", "us/task", "ratio")
        )
    )
    for row in rows:
        print(" ".join(f"{value:>11}" for value in row.values()))
    unit = 1 if sys.platform == "darwin" else 1024  # bytes in one unit of ru_maxrss
    peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20)
    print(f"peak memory of all together: {peak} MiB")
    print(json.dumps({"buffer": BUFFER, "rows": rows, "ratio": rows[-1]["ratio"], "peak_mib": peak}))


if __name__ == "__main__":
    main()
