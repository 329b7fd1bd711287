"""Time per task of the schedule against the number of clients: a million tasks each, and no training.

    python benchmarks/schedule_scale.py [--rounds 1000]

Each population runs in a process of its own, so that each peak of memory is its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

from offbeat.schedule import Asynchronous, Clock, Flow, Tiers, simulate

BUFFER = 1_000
SIZES = ((10_000, 9_000), (20_000, 10_000), (100_000, 10_000), (1_000_000, 10_000))  # clients, concurrency
REFERENCE = 20_000  # the smallest population that leaves a choice at the concurrency of the largest


def measure(clients: int, concurrency: int, rounds: int) -> dict[str, float]:
    """One schedule from its construction to its summary."""
    begun = time.perf_counter()
    dispatch = Asynchronous(concurrency)
    draws = dispatch.source(seed=0)
    clock = Clock(Tiers("mild").bind(draws, clients), draws)
    summary = simulate(Flow(clock, dispatch, draws, clients, BUFFER), rounds)
    seconds = time.perf_counter() - begun
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return {
        "clients": clients,
        "concurrency": concurrency,
        "tasks": summary.consumed,
        "seconds": round(seconds, 2),
        "microseconds_per_task": round(seconds / summary.consumed * 1e6, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20),
    }


def main() -> None:
    """Print a table and, on the last line, the same as JSON."""
    parser = argparse.ArgumentParser(
        description="Time per task of the schedule against the number of clients."
    )
    parser.add_argument("--rounds", type=int, default=1_000, help="server steps of 1,000 tasks each")
    parser.add_argument(
        "--only", type=int, nargs=2, metavar=("CLIENTS", "CONCURRENCY"), help="one row, as JSON"
    )
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(*options.only, options.rounds)))
        return
    rows = []
    for clients, concurrency in SIZES:
        arguments = ["--rounds", str(options.rounds), "--only", str(clients), str(concurrency)]
        shown = subprocess.run(
            [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
        )
        rows.append(json.loads(shown.stdout))
    base = next(row["microseconds_per_task"] for row in rows if row["clients"] == REFERENCE)
    heads = ("clients", "in flight", "tasks", "seconds", "us/task", "ratio", "peak MiB")
    print(" ".join(f"{head:>9}" for head in heads))
    for row in rows:
        row["ratio"] = round(row["microseconds_per_task"] / base, 2)
        keys = ("clients", "concurrency", "tasks", "seconds", "microseconds_per_task", "ratio", "peak_mib")
        print(" ".join(f"{row[key]:>9}" for key in keys))
    print(json.dumps({"buffer": BUFFER, "rounds": options.rounds, "rows": rows, "ratio": rows[-1]["ratio"]}))


if __name__ == "__main__":
    main()
