"""The tables of the fault campaign and of the harmed files, from their records.

python experiments/faults/table.py          shows them
python experiments/faults/table.py --write  puts them into README.md, from which docs/deploy.md includes them
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
TABLES = {  # the name of each table of a campaign on the page, and where its records are
    "fault campaign": HERE / "records",
    "fault campaign, sites in one process": HERE / "records-one-process",
}
FILES = HERE / "records-files" / "files.jsonl"


def load(folder: Path = HERE / "records") -> list[dict[str, Any]]:
    """Every line of every campaign."""
    paths = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def load_files() -> list[dict[str, Any]]:
    """What came of each file that was harmed, and how."""
    return [json.loads(line) for line in FILES.read_text().splitlines()]


def file_table(lines: list[dict[str, Any]]) -> str:
    """What came of each kind of harm, by file; several uploads are one row."""
    harms = list(dict.fromkeys(line["kind"].rpartition(" ")[2] for line in lines))
    rows = [f"| file | {' | '.join(harms)} | seconds, median |", f"|---|{'---|' * len(harms)}--:|"]
    for name in sorted({line["kind"].rpartition(" ")[0] for line in lines}):
        cells = []
        for harm in harms:
            seen = Counter(line["seen"] for line in lines if line["kind"] == f"{name} {harm}")
            cells.append(
                "; ".join(f"{words} ({count})" if len(seen) > 1 else words for words, count in seen.items())
            )
        times = [line["seconds"] for line in lines if line["kind"].startswith(f"{name} ")]
        rows.append(f"| `{name}` | {' | '.join(cells)} | {statistics.median(times):.1f} |")
    accepted, lost, same = (sum(line[name] for line in lines) for name in ("accepted", "lost", "same"))
    sentence = (
        f"{len(lines)} harms. {accepted} uploads were accepted in these runs, and {lost} lost without being "
        f"named; {same} of {len(lines)} runs ended with the model that a replay gives, bit for bit."
    )
    return "\n".join([*rows, "", sentence])


def table(lines: list[dict[str, Any]]) -> str:
    """What happened and how long it took, by kind; then what the runs came to."""
    faults = [line for line in lines if "kind" in line]
    runs = [line["verdict"] for line in lines if "verdict" in line]
    rows = ["| fault | times | what was seen | seconds until the run went on, median |", "|---|--:|---|--:|"]
    for kind in sorted({fault["kind"] for fault in faults}, key=_order):
        mine = [fault for fault in faults if fault["kind"] == kind]
        seen = Counter(_seen(fault) for fault in mine)
        words = "; ".join(
            f"{each} ({count})" if len(seen) > 1 else each for each, count in seen.most_common()
        )
        times = [fault["seconds"] for fault in mine if fault["seconds"] is not None]
        rows.append(f"| {kind} | {len(mine)} | {words} | {_median(times)} |")
    return "\n".join([*rows, "", _sentence(faults, runs)])


def written(page: str, made: str, name: str = "fault campaign") -> str:
    """The page with the table in its place."""
    begin, end = f"<!-- {name}: table -->", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    return f"{before}{begin}\n{made}\n{end}{after if found else rest}"


def _sentence(faults: list[dict[str, Any]], runs: list[dict[str, Any]]) -> str:
    def total(name: str) -> int:
        return sum(run[name] for run in runs)

    missing = sum(len(run["missing"]) for run in runs)
    rejected = sum(sum(run["rejected"].values()) for run in runs)
    bad = sum(fault["bad"] for fault in faults)
    whole = sum(run["model"] and run["steps"] == run["asked"] for run in runs)
    most = max(run["difference"] for run in runs)
    exact = "bit for bit" if most == 0 else f"to {most:.0e} of its norm"
    return (
        f"{len(faults)} faults in {len(runs)} runs of {total('steps')} server steps together. "
        f"{total('accepted')} uploads were accepted, and {missing} of them lost. "
        f"{rejected} answers or tasks came to nothing, and {bad} bad ones were accepted. "
        f"{whole} of {len(runs)} runs ended with their model; replayed with honest sites it is the same "
        f"{exact}."
    )


def _seen(fault: dict[str, Any]) -> str:
    """What was meant to follow did not, where no time is given, unless it is a refusal."""
    words: str = fault["seen"]
    if fault["seconds"] is None and not words.startswith(("refused", "rejected")):
        return "the run ended first"
    return words


def _median(times: list[float]) -> str:
    return f"{statistics.median(times):.0f}" if times else "–"


def _order(kind: str) -> tuple[int, str]:
    """Signals first, by whom they hit; then sites, answers, strangers."""
    if kind.startswith("SIG"):
        number, _, who = kind.partition(" of ")
        return 0, f"{who} {number}"
    if kind.startswith("the site's"):
        return 1, kind
    return (2, kind) if kind.startswith("answer") else (3, kind)


def main() -> None:
    """Show the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    tables = {name: table(load(folder)) for name, folder in TABLES.items()}
    for name, made in (tables | {"harmed files": file_table(load_files())}).items():
        if given.write:
            PAGE.write_text(written(PAGE.read_text(), made, name))
        else:
            print(f"{name}\n\n{made}\n")


if __name__ == "__main__":
    main()
