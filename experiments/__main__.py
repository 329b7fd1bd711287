"""Reproductions of papers' tables and figures, claimed beside measured: `python -m experiments NAME`."""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.reproduce.outcome import ComputeOptions, trial_of
from experiments.reproduce.page import aligned, cost, figures, marker, section, terms, written
from experiments.reproduce.pause import UNFINISHED, Pause
from experiments.reproduce.records import Curve, append, begin, check_place, recorded
from experiments.reproduce.study import Cell, Study, Version, summary_of
from experiments.reproduce.weights import FINE_TUNED, check_same_weights
from experiments.reproduce.workers import results
from experiments.studies.registry import STUDIES, find_study
from offbeat.cli.main import Parser, parse_options, run_program
from offbeat.cli.options import folder_name, number, whole_number
from offbeat.data import glue
from offbeat.errors import InputError
from offbeat.report.build import ReportPaths, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""

    def reproduce(words: Sequence[str]) -> int:
        parser = Parser(prog="python -m experiments", description=__doc__)
        add_options(parser)
        return reproduce_command(parse_options(parser, words))

    return run_program(reproduce, arguments)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `python -m experiments`."""
    command.add_argument(
        "name", nargs="?", metavar="NAME", help="of a study; without one, the studies are listed"
    )
    command.add_argument("--quick", action="store_true", help="minutes on two cores, on small data")
    command.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda [cpu]")
    command.add_argument("--execution", default="auto", metavar="NAME", help="as in 'offbeat run'")
    command.add_argument("--precision", metavar="NAME", help="as in 'offbeat run'")
    command.add_argument(
        "--data-dir", metavar="DIR", help="with a folder for each data set, such as DIR/mnist"
    )
    command.add_argument(
        "--weights",
        metavar="DIR",
        help="of a model to fine-tune and its tokenizer, for the studies on language",
    )
    command.add_argument("--processes", type=whole_number, default=2, metavar="N", help="runs at a time [2]")
    command.add_argument("--minutes", type=number, default=None, metavar="M", help="pause after so many")
    command.add_argument("--rounds", type=whole_number, metavar="T", help="fewer server steps, to try it out")
    command.add_argument(
        "--runs", type=whole_number, metavar="N", help="only the first so many, to try it out"
    )
    command.add_argument(
        "--out",
        type=folder_name,
        metavar="DIR",
        help="where the records are; default: experiments/PAPER/records",
    )
    command.add_argument("--table", action="store_true", help="run nothing, only show what is recorded")
    command.add_argument(
        "--write",
        metavar="PAGE",
        help="put the tables into a Markdown page with its markers, and figures beside it",
    )
    command.add_argument("--list", action="store_true", help="list the studies, as without a name")
    command.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def reproduce_command(given: argparse.Namespace) -> int:
    """List the studies, or run what a study lacks and show its table."""
    if given.name is None or given.list:
        return _list(given)
    study = find_study(given.name)
    _check(given, study)
    spot = ComputeOptions(given.device, given.execution, given.data_dir, given.weights)
    path = _path(given.out, study, given.quick)
    found = recorded(path)
    version = _version(study, given, found)
    check_same_weights((found[cell.key] for cell in version.cells if cell.key in found), given.weights)
    code, begun, left = 0, time.monotonic(), given.runs
    missing = _missing(version.cells, found)[:left]
    while missing and not given.table and code == 0:
        _check_cells(missing, spot)
        begin(path)
        deadline = math.inf if given.minutes is None else begun + 60 * given.minutes
        code = _run(missing, spot, path, given.processes, Pause(deadline, path.parent / UNFINISHED))
        found = recorded(path)
        version = _version(study, given, found)  # with cells that follow from these runs
        left = None if left is None else left - len(missing)
        missing = [] if time.monotonic() > deadline else _missing(version.cells, found)[:left]
    _show(given, study, version, found, path)
    return code


def _list(given: argparse.Namespace) -> int:
    if given.out is not None:
        check_place(Path(given.out))
    rows = []
    for study in STUDIES.values():
        row = summary_of(study)
        for quick in (False, True):
            held = recorded(_path(given.out, study, quick))
            version = (study.quick if quick else study.full).after(held)
            keys = {cell.key for cell in version.cells}
            name = "quick" if quick else "full"
            row[name] = {
                "runs": len(keys),
                "recorded": len(keys & held.keys()),
                "minutes": round(version.minutes),
            }
        rows.append(row)
    if given.json:
        print(json.dumps({"studies": rows}))
        return 0
    for row in rows:
        print(f"{row['name']}: {row['shows']} ({row['source']})")
        for name, machine in (("full", "an H200"), ("quick", "two cores")):
            one = row[name]
            print(
                f"  {name}: {one['recorded']} of {one['runs']} runs are recorded; about {one['minutes']} "
                f"minutes of {machine}"
            )
    print(
        "python -m experiments NAME --quick, "
        "or in full: python -m experiments NAME --device cuda --data-dir DIR"
    )
    return 0


def _check(given: argparse.Namespace, study: Study) -> None:
    for name in ("processes", "rounds", "runs"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} must be at least 1, not {value}.")
    if given.minutes is not None and not 0 < given.minutes < math.inf:
        raise InputError(f"--minutes must be above 0 and finite, not {given.minutes}.")
    if given.write is not None:
        page = Path(given.write)
        written(_read(page), marker(study, given.quick), "")  # or complains, before all the work
        for folder in (page.parent, page.resolve().parent):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise InputError(f"{folder} cannot be written to: name a page elsewhere.")
    if given.out is not None or not given.table:
        check_place(_path(given.out, study, given.quick).parent)


def _read(page: Path) -> str:
    """With line ends as they are."""
    try:
        return page.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        raise InputError(
            f"{page} is not a page: name a Markdown file that has the study's markers."
        ) from None


def _version(study: Study, given: argparse.Namespace, found: dict[str, Curve]) -> Version:
    """The study's cells as asked for: shortened, or in another precision."""
    version = (study.quick if given.quick else study.full).after(found)
    cells = tuple(cell.shortened(given.rounds) for cell in version.cells)
    if given.precision is not None:
        cells = tuple(
            dataclasses.replace(
                cell, experiment=dataclasses.replace(cell.experiment, precision=given.precision)
            )
            for cell in cells
        )
    return dataclasses.replace(version, cells=cells)


def _smaller(version: Version) -> str:
    """In what the quick version is smaller."""
    data = {str(cell.experiment.data) for cell in version.cells}
    if data <= set(glue.NAMES):
        given = any(cell.experiment.model == FINE_TUNED for cell in version.cells)
        return "; here from the weights of a small model" if given else "; here from random weights"
    return f"; here on {' and '.join(sorted(data))}"


def _path(out: str | None, study: Study, quick: bool) -> Path:
    folder = Path("experiments") / study.paper / "records" if out is None else Path(out)
    return folder / f"{'quick' if quick else 'full'}.jsonl"


def _missing(cells: tuple[Cell, ...], found: dict[str, Curve]) -> list[Cell]:
    """Each run once, though several places of a table may show it."""
    return list({cell.key: cell for cell in cells if cell.key not in found}.values())


def _check_cells(cells: list[Cell], spot: ComputeOptions) -> None:
    """Refuse here what no process could run; what has to be downloaded is, once."""
    for cell in {(cell.experiment.data, cell.writers): cell for cell in cells}.values():
        trial_of(cell, spot)


def _run(cells: list[Cell], spot: ComputeOptions, path: Path, processes: int, pause: Pause) -> int:
    """Run and record them; 1 if one could not be run."""
    begun, count, failed = time.monotonic(), 0, 0
    for cell, answer in results(cells, spot, processes, pause):
        count += 1
        words = f"[{time.monotonic() - begun:.0f} s, {count} of {len(cells)}] {cell.row}, {cell.column}"
        if isinstance(answer, str):
            failed += 1
            print(f"offbeat: {words} could not be run: {answer.strip()}", file=sys.stderr, flush=True)
            continue
        append(path, answer)
        end = answer["failure"] or f"{answer['accuracy'][-1]:.4f}"
        print(f"{words} ({cell.rates or 'by theorem'}): {end}", file=sys.stderr, flush=True)
    if count < len(cells):
        print(
            f"offbeat: the time is up and {len(cells) - count} runs are left: the same command goes on.",
            file=sys.stderr,
        )
    return min(failed, 1)


def _show(
    given: argparse.Namespace, study: Study, version: Version, found: dict[str, Curve], path: Path
) -> None:
    table = version.tabulate(version.cells, found)
    took = terms(study, version, found, given.quick, given.rounds)
    if given.write is not None:
        page, text = Path(given.write), section(study, version, found, given.quick, given.rounds)
        whole = written(_read(page), marker(study, given.quick), text)
        drawn = figures(study, version, found, given.quick)
        contents = {name: drawing.encode() for name, drawing in drawn.items()}
        write_report(ReportPaths(page.resolve(), page.parent), whole, contents, known=())
    spent = cost(version, found)
    if given.json:
        facts: dict[str, Any] = summary_of(study) | table._asdict()
        facts["cost"] = None if spent is None else spent._asdict()
        print(json.dumps(facts | {"terms": took, "records": str(path)}))
        return
    print(f"{study.source}: {study.shows}{_smaller(version) if given.quick else ''}\n")
    print(aligned(table))
    print()
    for note in (*table.notes, study.unknown, took):
        print(note)
    if spent is not None:
        print(f"\nthe cost of tuning\n\n{aligned(spent)}\n")
        for note in spent.notes:
            print(note)
    print(f"records: {path}")


if __name__ == "__main__":
    sys.exit(main())
