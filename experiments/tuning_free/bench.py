"""The bench: every system of systems.py under `cadence`, and under each competitor's grid.

A run that has a record in bench.jsonl is left out, so a bench that was cut short goes on. Once the grids are
recorded, the same command with `--wider` goes on around the best setting of each, until rates on every side
of it do worse. Ours run on three seeds; the best setting of each competitor runs on two seeds more, once all
that is recorded: the same command with `--finals`.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.tuning_free.runs import DEFAULT, NAMES, named, options, recorded, spread
from experiments.tuning_free.systems import HELD_OUT, PRINTED, SEEDS, SYSTEMS, TASKS, cells, whole
from experiments.tuning_free.widening import Rates, beyond

HERE = Path(__file__).parent
RECORDS = HERE / "bench.jsonl"
ADAPTIVE = "fadas-da"  # its server's rates are no multiples of a mean


def score(record: dict[str, Any]) -> float:
    """The best of a run's last model and its averages; nothing where it diverged."""
    if record["failure"]:
        return 0.0
    return max(float(record[name]) for name in ("last", "average 0.9", "average 0.98"))


def finals(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each competitor's best setting in each system, on the other seeds; where it fails there, the next."""
    for tried in _grids(found):
        sound = [pair for pair in tried if pair[1] is not None]
        if sound:
            best, _ = max(sound, key=lambda pair: pair[1])
            yield from (_cell(best) | {"seed": seed} for seed in SEEDS[1:])


def wider(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What encloses the best setting of each competitor in each system; more may follow from it."""
    for tried in _grids(found):
        like = tried[0][0]
        if like["method"] == PRINTED[0]:
            continue
        scores = {Rates(**record["words"]): worth or 0.0 for record, worth in tried}
        for rates in beyond(scores, like["method"] == ADAPTIVE):
            yield _cell(like) | {"words": rates._asdict()}


def _grids(found: list[dict[str, Any]]) -> Iterator[list[tuple[dict[str, Any], float | None]]]:
    """Each competitor's runs in each system on the first seed, and what they are worth.

    None: the setting diverged, there or on another seed.
    """
    found = list({named(record): record for record in found}.values())  # the later of two
    failed = {named(record | {"seed": SEEDS[0]}) for record in found if record["failure"]}
    for system in (*SYSTEMS, *HELD_OUT):
        grids: dict[str, list[tuple[dict[str, Any], float | None]]] = {}
        for record in found:
            if competes(record) and record["seed"] == SEEDS[0] and within(record, system):
                worth = None if named(record) in failed else score(record)
                grids.setdefault(record["method"], []).append((record, worth))
        yield from grids.values()


def _cell(record: dict[str, Any]) -> dict[str, Any]:
    """What was run, without what came of it."""
    return {name: value for name, value in record.items() if name in NAMES}


def competes(record: dict[str, Any]) -> bool:
    """Whether it is of a grid, or of what is run as printed."""
    return bool(record.get("falls")) or (record["method"], record["words"]) == PRINTED


def within(record: dict[str, Any], system: dict[str, Any]) -> bool:
    """Whether a record is of a system."""
    return all(
        record.get(name, DEFAULT.get(name)) == value
        for name, value in (DEFAULT | whole(system)).items()
        if name not in ("seed", "weights", "falls")
    )


def main() -> None:
    """What is not recorded yet."""
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), help="some of systems.py")
    parser.add_argument("--wider", action="store_true", help="only what encloses the best of each grid")
    parser.add_argument("--finals", action="store_true", help="only the other seeds of the best")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    while True:
        found = recorded(RECORDS)
        wanted = finals(found) if given.finals else wider(found) if given.wider else cells()
        chosen = [cell for cell in wanted if cell["task"] in given.tasks]
        spread(sorted(chosen, key=lambda cell: given.tasks.index(cell["task"])), RECORDS, given)
        given.minutes = (until - time.monotonic()) / 60
        if not given.wider or not chosen or given.minutes <= 0:
            return


if __name__ == "__main__":
    main()
