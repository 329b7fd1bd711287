"""Runs the cells of the grid, several processes at a time, and appends a line to a records file for each.

    python experiments/momentum/run.py --device cuda --data-dir DIR --processes 14 --out OUT --minutes 7
    python experiments/momentum/run.py --quick

DIR holds the folders fashion-mnist and shakespeare. What OUT already holds is not run again, so a run that
was cut short goes on where it was. `--quick` is the same comparison on digits, on the CPU.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from recording import append, recorded
from settings import FULL, PLANS, QUICK, Cell, Plan, grid

from offbeat import DivergedError, Examples, InputError, Source, accuracy, ema, evaluate, load, train
from offbeat.experiment import Experiment
from offbeat.trial import prepare

_TRIES = 2  # of a cell whose process dies


@dataclass(frozen=True)
class Place:
    """Where cells run, and whether in full."""

    device: str = "cpu"
    how: str = "auto"
    data_dir: str | None = None
    rounds: int | None = None  # None: as planned


def planned(cell: Cell, place: Place) -> Plan:
    """A cell's plan, cut short if that was asked for."""
    plan = PLANS[cell.data]
    if place.rounds is None:
        return plan
    return dataclasses.replace(plan, rounds=place.rounds, every=min(plan.every, place.rounds))


def experiment(cell: Cell, place: Place) -> Experiment:
    """A cell's, at that place."""
    plan = planned(cell, place)
    folder = None if plan.data == "digits" else str(Path(place.data_dir or ".") / plan.data)
    return dataclasses.replace(plan.experiment(cell), device=place.device, how=place.how, data_dir=folder)


def outcome(cell: Cell, place: Place) -> dict[str, Any]:
    """The record of one cell: accuracy of the last model and of the averaged one, every few versions."""
    made = experiment(cell, place)
    trial = prepare(made, _source(made.data, made.data_dir, PLANS[cell.data].tested))
    shots = train(
        trial.algorithm,
        trial.engine,
        dispatch=trial.dispatch,
        buffer=made.buffer,
        rounds=made.rounds,
        weights=trial.weights,
        limit=trial.limit,
        aggregate=trial.aggregate,
        seed=made.seed,
    )
    begun, average, failure = time.monotonic(), None, None
    versions, last, averaged = list[int](), list[float](), list[float]()
    ages = updates = dropped = 0
    try:
        for shot in shots:
            average = shot.x if average is None else ema(average, shot.x, made.average or 0.0)
            if shot.cohort:
                ages, updates = ages + sum(shot.cohort.staleness), updates + made.buffer
            dropped = shot.counts.dropped
            if shot.version % made.every and shot.version != made.rounds:
                continue
            versions.append(shot.version)
            for scores, x in ((last, shot.x), (averaged, average)):
                found = evaluate(trial.problem, x, trial.test, {"accuracy": accuracy})
                scores.append(round(found["accuracy"], 5))
            _check_parent()
    except DivergedError as error:
        failure = str(error)
    return {
        "cell": dataclasses.asdict(cell),
        "plan": dataclasses.asdict(planned(cell, place)),
        "version": versions,
        "last": last,
        "average": averaged,
        "failure": failure,
        "staleness": round(ages / updates, 3) if updates else None,
        "dropped": dropped,
        "rounds": made.rounds,
        "device": torch.device(made.device).type,
        "seconds": round(time.monotonic() - begun, 1),
    }


def serve(connection: Connection, place: Place) -> None:
    """In a process of its own: run cells until none comes or nobody is left to send one."""
    torch.set_num_threads(1)
    while True:
        try:
            cell = connection.recv()
        except EOFError:
            return
        try:
            connection.send(outcome(cell, place))
        except InputError as error:
            connection.send(str(error))
        except Exception:
            connection.send(traceback.format_exc())


@cache
def _source(data: str, folder: str | None, tested: int) -> Source:
    source = load(data, folder, download=False)
    inputs, targets = source.test
    every = max(1, len(targets) // tested)
    return source._replace(test=Examples(inputs[::every], targets[::every]))


def _check_parent() -> None:
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


@dataclass
class Worker:
    """A process and what it is at."""

    process: SpawnProcess
    connection: Connection
    cell: Cell | None = None


def results(
    cells: Iterable[Cell], place: Place, processes: int, deadline: float
) -> Iterator[tuple[Cell, dict[str, Any] | str]]:
    """Each cell with its record, or with what went wrong, in the order they end; none after the deadline."""
    waiting, tries = list(cells), dict[Cell, int]()
    workers = [_start(place) for _ in range(min(processes, len(waiting)))]
    try:
        while True:
            for worker in workers:
                if worker.cell is None and waiting:
                    worker.cell = waiting.pop(0)
                    worker.connection.send(worker.cell)
            busy = {worker.connection: worker for worker in workers if worker.cell is not None}
            left = deadline - time.monotonic()
            if not busy or left <= 0:
                return
            for connection in wait(list(busy), timeout=min(left, 60)):
                worker = busy[connection]  # type: ignore[index]
                cell, worker.cell = worker.cell, None
                assert cell is not None
                try:
                    answer = worker.connection.recv()
                except (EOFError, ConnectionError):
                    tries[cell] = tries.get(cell, 0) + 1
                    workers[workers.index(worker)] = _start(place)
                    if tries[cell] < _TRIES:
                        waiting.insert(0, cell)
                        continue
                    answer = f"its process died {_TRIES} times"
                yield cell, answer
    finally:
        for worker in workers:
            worker.process.kill()


def _start(place: Place) -> Worker:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, place), daemon=True)
    process.start()
    there.close()  # so that its end is noticed here
    return Worker(process, here)


def _same(record: dict[str, Any], plan: Plan) -> bool:
    """Whether it was made by this plan; the first records only tell their rounds."""
    now = json.loads(json.dumps(dataclasses.asdict(plan)))
    return bool(record.get("plan", now) == now and record["rounds"] == plan.rounds)


def main() -> int:
    """Run what is missing; 1 if a cell could not be run."""
    given = _parser().parse_args()
    parts = QUICK if given.quick else FULL
    name = "quick.jsonl" if given.quick else "{}.jsonl"
    files = {plan.name: given.out / name.format(plan.name) for plan, _ in parts}
    wanted = [cell for cell in grid(parts) if given.plan in (None, cell.data)]
    given.out.mkdir(parents=True, exist_ok=True)
    place = Place(given.device, given.how, given.data_dir, given.rounds)
    found = [(Cell(**one["cell"]), one) for path in files.values() for one in recorded(path)]
    done = {cell for cell, one in found if _same(one, planned(cell, place))}
    missing = [cell for cell in wanted if cell not in done][: given.cells]
    begun, failed, count = time.monotonic(), 0, 0
    print(f"{len(done)} cells are recorded, {len(missing)} are to run", flush=True)
    for cell, answer in results(missing, place, given.processes, begun + 60 * given.minutes):
        count += 1
        clock = f"[{time.monotonic() - begun:5.0f} s, {count}/{len(missing)}] {cell}:"
        if isinstance(answer, str):
            failed += 1
            print(clock, answer, flush=True)
            continue
        append(files[cell.data], answer)
        best = max(answer["average"], default=0.0)
        print(clock, answer["failure"] or f"best {best:.4f}", f"({answer['seconds']} s)", flush=True)
    if count < len(missing):
        print(f"the time is up: {len(missing) - count} cells are left; the same command goes on", flush=True)
    return min(failed, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run FedBuff with momentum against momentum approximation.")
    parser.add_argument("--quick", action="store_true", help="digits, on the CPU, into quick.jsonl")
    parser.add_argument("--plan", choices=PLANS, help="only this one of settings.py")
    parser.add_argument("--data-dir", help="the folder with fashion-mnist and shakespeare")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--how", default="auto", help="how a GPU computes, as in `offbeat run --how`")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600, help="stop after so many")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder of the records")
    parser.add_argument("--rounds", type=int, help="server steps, to try it out")
    parser.add_argument("--cells", type=int, help="run only the first so many, to try it out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
