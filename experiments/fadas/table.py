"""What README.md shows of the four corners by server step: printed, or with `--write` put into it.

Device time ended before some runs did. `records/paused.jsonl` has what their checkpoints tell: accuracy
up to the server step at which they paused.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from experiments.reproduce.page import markdown, table_command
from experiments.reproduce.records import present_key, recorded
from experiments.reproduce.study import Cell, Table
from experiments.studies.fadas_authors import CORNERS, TABLE2

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
RECORDS, PAUSED = HERE / "records" / "full.jsonl", HERE / "records" / "paused.jsonl"
STEP = 50  # server steps between rows

Course = dict[int, float]  # accuracy in per cent by server step


def cells() -> dict[str, Cell]:
    """The runs of the table by the title of their column."""
    corners = {f"{cell.row}, {cell.column}": cell for cell in CORNERS.full.cells}
    (fedbuff,) = (cell for cell in TABLE2.full.cells if (cell.row, cell.column) == ("fedbuff", "Dir(0.1)"))
    return corners | {"FedBuff, BatchNorm, two epochs": fedbuff}


def courses() -> dict[str, Course]:
    """By title, of runs that ended or paused."""
    lines = map(json.loads, PAUSED.read_text().splitlines())
    found: dict[str, Course] = {
        present_key(line["key"]): _course(line["version"], line["accuracy"]) for line in lines
    }
    found |= {key: _course(curve.versions, curve.accuracies) for key, curve in recorded(RECORDS).items()}
    return {title: found[cell.key] for title, cell in cells().items() if cell.key in found}


def _course(versions: tuple[int, ...], accuracies: tuple[float, ...]) -> Course:
    return {version: 100 * value for version, value in zip(versions, accuracies, strict=True)}


def by_step(found: Mapping[str, Course]) -> Table:
    """Accuracy every few server steps."""
    last = max(version for course in found.values() for version in course)
    rows = [
        (str(step), *(f"{course[step]:.1f}" if step in course else "" for course in found.values()))
        for step in range(STEP, last + 1, STEP)
    ]
    return Table(("server step", *found), tuple(rows))


def tables() -> dict[str, str]:
    """By the name of their marker."""
    return {"corners by step": markdown(by_step(courses()))}


if __name__ == "__main__":
    table_command(PAGE, tables)
