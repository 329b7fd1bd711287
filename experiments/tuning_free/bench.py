"""The bench: every system of systems.py under `cadence`, and under each competitor's grid.

A run that has a record in bench.jsonl is left out, so a bench that was cut short goes on. Ours run on three
seeds; the best setting of all competitors of each system runs on two seeds more, once all their others
are recorded: the same command with `--finals`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runs import DEFAULT, NAMES, named, options, recorded, spread
from systems import HELD_OUT, PRINTED, SEEDS, SYSTEMS, TASKS, cells, whole

HERE = Path(__file__).parent
RECORDS = HERE / "bench.jsonl"
FINALISTS = 1


def score(record: dict[str, Any]) -> float:
    """The best of a run's last model and its averages; nothing where it diverged."""
    if record["failure"]:
        return 0.0
    return max(float(record[name]) for name in ("last", "average 0.9", "average 0.98"))


def finals(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The best setting of competitors in each system, on the other seeds; where it fails there, the next."""
    found = list({named(record): record for record in found}.values())  # the later of two
    failed = {named(record | {"seed": SEEDS[0]}) for record in found if record["failure"]}
    for system in (*SYSTEMS, *HELD_OUT):
        tried = [record for record in found if competes(record) and within(record, system)]
        tried = [record for record in tried if record["seed"] == SEEDS[0] and named(record) not in failed]
        for record in sorted(tried, key=score, reverse=True)[:FINALISTS]:
            yield from (
                {name: value for name, value in record.items() if name in NAMES} | {"seed": seed}
                for seed in SEEDS[1:]
            )


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
    parser.add_argument("--finals", action="store_true", help="only the other seeds of the best")
    given = parser.parse_args()
    found = recorded(RECORDS)
    wanted = finals(found) if given.finals else cells()
    chosen = [cell for cell in wanted if cell["task"] in given.tasks]
    spread(sorted(chosen, key=lambda cell: given.tasks.index(cell["task"])), RECORDS, given)


if __name__ == "__main__":
    main()
