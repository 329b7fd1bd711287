"""The tables of README.md from exploration.jsonl: printed, or with `--write` put between their markers."""

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE, RECORDS = HERE / "README.md", HERE / "exploration.jsonl"
SETTINGS = ((0.5, 20), (0.5, 60), (0.5, 90), (0.1, 20), (0.1, 60))
START, SMALL, END = "<!-- explored -->\n", "<!-- explored small -->\n", "<!-- end -->"
# Rounds, local steps, buffer, concurrency, Dirichlet: of the small model.
SYSTEMS = (
    (100, 10, 10, 20, 0.3),
    (300, 2, 10, 20, 0.3),
    (300, 40, 10, 20, 0.3),
    (150, 10, 30, 60, 0.3),
    (300, 10, 10, 20, 0.5),
    (300, 10, 10, 90, 0.5),
    (300, 10, 10, 20, 0.1),
    (500, 10, 2, 20, 0.3),
)


def rows() -> dict[tuple[str, str], dict[tuple[float, int], dict[str, Any]]]:
    """Records by method and its words, and by setting."""
    found: dict[tuple[str, str], dict[tuple[float, int], dict[str, Any]]] = {}
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        if record.keys() & {"data", "model", "buffer", "steps", "rounds", "seed", "delays"}:
            continue  # of another task
        words = ", ".join(f"{name} {value}" for name, value in sorted(record["words"].items()))
        found.setdefault((record["method"], words), {})[record["dirichlet"], record["concurrency"]] = record
    return found


def systems() -> dict[tuple[str, str], dict[tuple[float, ...], dict[str, Any]]]:
    """Records of the small model by method and its words, and by system."""
    found: dict[tuple[str, str], dict[tuple[float, ...], dict[str, Any]]] = {}
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        if record.get("pool") != 2 or "seed" in record:
            continue
        words = ", ".join(f"{name} {value}" for name, value in sorted(record["words"].items()))
        system = tuple(
            record.get(name, usual)
            for name, usual in (("rounds", 500), ("steps", 10), ("buffer", 10), ("concurrency", 0))
        )
        found.setdefault((record["method"], words), {})[(*system, record["dirichlet"])] = record
    return found


def small() -> str:
    """One row for each variant that was tried on most systems."""
    head = ["method", "words"]
    head += [f"T {t}, K {k}, S {s}, {c} at work, Dir({d})" for t, k, s, c, d in SYSTEMS]
    lines = [head, ["---"] * len(head)]
    lines += [
        [*name, *(shown(cells.get(system)) for system in SYSTEMS)]
        for name, cells in sorted(systems().items())
        if sum(system in cells for system in SYSTEMS) >= 3
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(record: dict[str, Any] | None) -> str:
    """The last model's accuracy and the better of its averages."""
    if record is None:
        return "–"
    if record["failure"]:
        return "diverged"
    best = max(value for name, value in record.items() if name.startswith("average"))
    return f"{record['last']:.3f} / {best:.3f}"


def table() -> str:
    """One row for each variant."""
    head = ["method", "words", *(f"Dir({d}), {c} at work" for d, c in SETTINGS)]
    lines = [head, ["---"] * len(head)]
    lines += [
        [*name, *(shown(cells.get(setting)) for setting in SETTINGS)]
        for name, cells in sorted(rows().items())
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written(page: str, made: str, start: str = START) -> str:
    """The page with the table between its markers."""
    before, _, rest = page.partition(start)
    return f"{before}{start}\n{made}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print it, or put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(written(written(PAGE.read_text(), table()), small(), SMALL))
    else:
        print(f"{table()}\n\n{small()}")


if __name__ == "__main__":
    main()
