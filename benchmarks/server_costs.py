"""What the server itself does for each task and each upload, without clients and without a network.

    OMP_NUM_THREADS=1 python benchmarks/server_costs.py [--size 1000000] [--device cuda] [--turns 9] [--quick]

Processor time of one thread, the least of several turns. For a task: to choose a client, send the
task off and take it back (virtual clock, 10^6 clients, 10^5 tasks in flight), and the resident memory
of one in flight. For a number of an upload: to see that it is finite and to add it to the sum. For a
number of the model: the server's step, FedBuff's and FADAS's. docs/scale.md starts from these. With
`--device cuda` the uploads and the model are on the GPU and their cost is time, the schedule's is as before.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from offbeat.aggregate.mean import FiniteCheck, PlainSum
from offbeat.algorithms import Setting, build
from offbeat.algorithms.fedopt import Upload
from offbeat.core import Task
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Tiers
from offbeat.schedule.dispatch import Asynchronous
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.staleness import Equal
from offbeat.training.loop import describe_cohort

METHODS = ("fedbuff", "fadas")


def least(work: Callable[[], object], turns: int, device: str = "cpu") -> float:
    """Seconds of the fastest turn: of the processor, or until a GPU is done."""
    found = []
    for _ in range(turns):
        begun = now(device)
        work()
        found.append(now(device) - begun)
    return min(found)


def now(device: str) -> float:
    """Seconds, by the clock that counts there."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def schedule(clients: int, flying: int, buffer: int, turns: int) -> tuple[float, float]:
    """Seconds of one task, and bytes of one in flight."""
    dispatch = Asynchronous(flying)
    draws = dispatch.source(seed=0)
    flow = Scheduler(Clock(Tiers("mild").bind(draws, clients), draws), dispatch, draws, clients, buffer)
    before = resident()
    flow.fill(0)
    held = resident() - before
    versions = iter(range(1, turns + 1))
    return least(lambda: flow.fill(next(versions)), turns) / buffer, held / flying


def resident() -> float:
    """Bytes of this process in RAM; NaN where the system does not tell."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else float("nan")


def uploads(size: int, buffer: int, turns: int, device: str) -> dict[str, float]:
    """Seconds for one number."""
    torch.manual_seed(0)
    stack = torch.randn(buffer, size, device=device)
    tasks = tuple(Task(client, 0, 0) for client in range(buffer))
    cohort = describe_cohort(tasks, 0, buffer, Equal())
    found = {
        "check": least(lambda: check(stack, tasks), turns, device) / stack.numel(),
        "sum": least(lambda: PlainSum().total(stack, tasks, cohort), turns, device) / stack.numel(),
    }
    for name in METHODS:
        method = build(name, Setting(buffer, 1, 100), {})
        state, mean = method.init(stack[0]), Upload(stack[0], ())
        found[name] = least(lambda m=method, s=state, u=mean: m.step(s, u, cohort), turns, device) / size
    return found


def check(stack: torch.Tensor, tasks: tuple[Task, ...]) -> None:
    """As a server step does."""
    step = FiniteCheck(1)
    step.add_uploads(stack, tasks)
    step.check_uploads()


def main() -> None:
    """Print a table and, on the last line, the same as JSON."""
    parser = argparse.ArgumentParser(description="What the server does for each task and each upload.")
    parser.add_argument("--size", type=int, default=1_000_000, help="numbers of a model")
    parser.add_argument("--buffer", type=int, default=100)
    parser.add_argument("--device", default="cpu", help="where uploads and the model are")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small and few, to see that it runs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    clients, flying, buffer = 1_000_000, 100_000, 1_000
    if given.quick:
        given.size, given.buffer, given.turns = 1_000, 10, 2
        clients, flying, buffer = 10_000, 1_000, 100
    task, held = schedule(clients, flying, buffer, given.turns)
    costs = uploads(given.size, given.buffer, given.turns, given.device)
    size = f"{given.size:,} numbers, buffer {given.buffer}, {given.device}"
    print(f"{size}, one thread, the least of {given.turns} turns")
    print(f"a task, scheduled      {1e6 * task:10.2f} us")
    print(f"a task, in flight      {held:10.0f} bytes")
    for name, seconds in costs.items():
        whole = seconds * given.size * (1 if name in METHODS else given.buffer)
        print(f"{name:<22} {1e9 * seconds:10.3f} ns a number, {1e3 * whole:8.3f} ms a server step")
    nanoseconds = {name: 1e9 * seconds for name, seconds in costs.items()}
    print(json.dumps({"task_us": 1e6 * task, "flight_bytes": held, "ns_a_number": nanoseconds}))


if __name__ == "__main__":
    main()
