"""The explorations' tables from their records: printed, or with `--write` put between README.md's markers."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.reproduce.page import markdown, table_command
from experiments.reproduce.study import Table
from experiments.tuning_free import bench
from experiments.tuning_free.outcomes import described
from experiments.tuning_free.runs import recorded
from experiments.tuning_free.systems import FORM, HELD_OUT, OURS
from experiments.tuning_free.systems import SYSTEMS as BENCH

HERE = Path(__file__).parent
PAGE, RECORDS, THIRD = HERE / "README.md", HERE / "exploration.jsonl", HERE / "exploration3.jsonl"
FOURTH, FIFTH, SIXTH, SEVENTH, EIGHTH, NINTH, TENTH = (
    HERE / f"exploration{number}.json" for number in range(4, 11)
)
FIFTEENTH = HERE / "exploration15.jsonl"
EIGHTEENTH = HERE / "exploration18.jsonl"
Record = dict[str, Any]
Rows = dict[tuple[str, str], dict[tuple[Any, ...], Record]]  # by method and its words, and by setting

# Dirichlet, concurrency: of the CNN.
SETTINGS = ((0.5, 20), (0.5, 60), (0.5, 90), (0.1, 20), (0.1, 60))
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
# Dirichlet, none for Shakespeare, and concurrency: of larger models.
LARGER = ((0.5, 20), (0.5, 90), (0.1, 20), (0.1, 90), (None, 20), (None, 90))

_TIMES = {"walk": 0.14, "leap": 3.0, "noise": 1.0}  # the earlier form's, of which words are multiples
_BASE = "walk 0.14, leap 3, noise 1"
_WORDS = {
    "deg": "degree",
    "early False": "age averaged from the start",
    "horizon T": "noise by T",
    "sf True": "server falls",
    "lf True": "local falls",
    "most": "unit at most",
    "tensor True": "by tensor",
    "variates False": "no control variates",
    "trust 0": "no control variates",
}


def rows() -> Rows:
    """The first exploration."""
    found: Rows = {}
    for record in recorded(RECORDS):
        if record.keys() & {"data", "model", "buffer", "steps", "rounds", "seed", "delays"}:
            continue  # of another task
        setting = record["dirichlet"], record["concurrency"]
        found.setdefault((record["method"], _listed(record["words"])), {})[setting] = record
    return found


def systems() -> Rows:
    """The second exploration, of the small model."""
    found: Rows = {}
    for record in recorded(RECORDS):
        if record.get("pool") != 2 or "seed" in record:
            continue
        system = tuple(
            record.get(name, usual)
            for name, usual in (("rounds", 500), ("steps", 10), ("buffer", 10), ("concurrency", 0))
        )
        words = _listed(record["words"])
        found.setdefault((record["method"], words), {})[(*system, record["dirichlet"])] = record
    return found


def larger() -> Rows:
    """The third exploration, its words in plainer ones."""
    found: Rows = {}
    for record in recorded(THIRD):
        setting = record.get("dirichlet"), record["concurrency"]
        found.setdefault(_renamed(record["method"], record["words"]), {})[setting] = record
    return found


def _listed(words: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(words.items()))


def _renamed(method: str, words: dict[str, Any]) -> tuple[str, str]:
    given = {name: value for name, value in words.items() if name not in ("pace", "falls", "endless")}
    if method == "cadence":
        method = "without an end" if words.get("endless") else "with an end"
        given |= {name: times * given[name] for name, times in _TIMES.items() if name in given}
    elif method == "unit":
        method = "prototype"
    told = []
    for name, value in sorted(given.items()):
        text = f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        told.append(_WORDS.get(text) or f"{_WORDS.get(name, name)} {text.partition(' ')[2]}")
    return method, ", ".join(told) or _BASE


def shown(record: Record | None) -> str:
    """The last model's accuracy and the better of its averages."""
    if record is None:
        return "–"
    if record["failure"]:
        return "diverged"
    best = max(value for name, value in record.items() if name.startswith("average"))
    return f"{record['last']:.3f} / {best:.3f}"


def _table(found: Rows, settings: dict[tuple[Any, ...], str], least: int = 1) -> str:
    """One row for each variant that was tried on that many settings."""
    lines = tuple(
        (*name, *(shown(cells.get(setting)) for setting in settings))
        for name, cells in sorted(found.items())
        if sum(setting in cells for setting in settings) >= least
    )
    return markdown(Table(("method", "words", *settings.values()), lines))


def grouped(path: Path, varied: str) -> str:
    """A table for each group of systems."""
    found = json.loads(path.read_text())
    tables = []
    for group, columns in found["columns"].items():
        lines = tuple(
            (row["words"], *("–" if value is None else f"{value:.3f}" for value in row["accuracy"]))
            for row in found["rows"]
            if row["systems"] == group
        )
        tables.append(markdown(Table((varied, *columns), lines)))
    return "\n\n".join(tables)


def forms(form: int) -> list[tuple[dict[str, Any], dict[int, Record], dict[int, Record]]]:
    """Systems of the bench with the runs of a form and of the one before, by the seeds of both."""
    found = [
        each
        for each in recorded(bench.RECORDS) + recorded(FIFTEENTH) + recorded(EIGHTEENTH)
        if each["method"] == OURS[0]
    ]
    made = []
    for system in (*BENCH, *HELD_OUT):
        here = sorted(
            (each for each in found if bench.within(each, system)), key=lambda each: each.get("form", 1)
        )
        before = {each["seed"]: each for each in here if each.get("form", 1) < form}  # the latest of each
        now = {each["seed"]: each for each in here if each.get("form", 1) == form}
        shared = sorted(before.keys() & now.keys())
        if shared:
            made.append((system, {n: before[n] for n in shared}, {n: now[n] for n in shared}))
    return made


def _forms(form: int) -> str:
    lines, gains = [], []
    for system, before, now in forms(form):
        old, new = (100 * mean(each["last"] for each in runs.values()) for runs in (before, now))
        where = {runs[n]["device"] for runs in (before, now) for n in runs}
        told = ["before: on a GPU"] * (len(where) > 1) + [
            run["note"] for run in now.values() if "note" in run
        ]
        seeds = ", ".join(map(str, now)) + (f" ({'; '.join(told)})" if told else "")
        gains.append(new - old)
        lines.append((described(system)[0], seeds, f"{old:.1f}", f"{new:.1f}", f"{new - old:+.2f}"))
    lines.append((f"mean of {len(gains)}", "", "", "", f"{mean(gains):+.2f}"))
    return markdown(Table(("system", "seeds", "form before", "this form", "difference"), tuple(lines)))


def sections() -> dict[str, str]:
    """What stands after each marker, by its name."""
    small = {key: "T {}, K {}, S {}, {} at work, Dir({})".format(*key) for key in SYSTEMS}
    tasks = {key: "Shakespeare" if key[0] is None else f"Dir({key[0]})" for key in LARGER}
    return {
        "explored": _table(rows(), {(d, c): f"Dir({d}), {c} at work" for d, c in SETTINGS}),
        "explored small": _table(systems(), small, least=3),
        "explored third": _table(larger(), {key: f"{task}, {key[1]} at work" for key, task in tasks.items()}),
        "explored fourth": grouped(FOURTH, "gradients"),
        "explored fifth": grouped(FIFTH, "unit of length"),
        "explored sixth": grouped(SIXTH, "unit of length"),
        "explored seventh": grouped(SEVENTH, "steps whose direction was short"),
        "explored eighth": grouped(EIGHTH, "what differs"),
        "explored ninth": grouped(NINTH, "task, or what differs"),
        "explored tenth": grouped(TENTH, "what differs, or what was measured"),
        "explored fifteenth": _forms(7),
        "explored eighteenth": _forms(8),
        "explored nineteenth": _forms(FORM),
    }


if __name__ == "__main__":
    table_command(PAGE, sections)
