"""Mutation testing: change one operator or constant of the source at a time and see whether the tests notice.

`python tests/mutate.py` draws mutants of the mathematical packages with a seed, runs the tests of the mutated
package on each, and writes every outcome to `tests/mutations.json`. `--chosen` runs the mutants of `CHOSEN`
alone, which are mistakes that the tests once missed. `--table` prints the score by package from the records.
A mutant that survives is either a missing test or changes nothing that can be observed; `REASONS` says why
for each survivor that stays.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "offbeat"
RECORDS = ROOT / "tests" / "mutations.json"
SEED = 22
TIMEOUT = 400.0  # seconds for the tests of one mutant; a mutant that hangs is not counted as caught

# What is mutated, how many mutants are drawn, and the tests that ought to notice.
TARGETS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "core": (10, ("core.py", "trees.py", "draws.py"), ("tests/algorithms", "tests/schedule", "tests/data")),
    "algorithms": (50, ("algorithms/*.py",), ("tests/algorithms",)),
    "aggregate": (25, ("aggregate/*.py",), ("tests/aggregate", "tests/privacy")),
    "schedule": (35, ("schedule/*.py",), ("tests/schedule", "tests/algorithms/test_trajectories.py")),
    "privacy": (30, ("privacy/*.py", "privacy/secure/*.py"), ("tests/privacy", "tests/aggregate")),
    "data": (0, (), ("tests/data/test_partition.py",)),
    "engines": (0, (), ("tests/engines/test_ahead.py",)),
    "training": (
        20,
        ("training/checkpoint.py", "training/loop.py", "training/replay.py"),
        ("tests/training", "tests/algorithms/test_trajectories.py", "tests/aggregate/test_private.py"),
    ),
}


class Mutant(NamedTuple):
    """One change of one line."""

    target: str
    path: str  # below the package
    line: int
    before: str  # of the line
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}: {self.before.strip()} -> {self.after.strip()}"


# Mistakes that passed the tests when they were first injected: path, text before, text after.
CHOSEN: tuple[tuple[str, str, str, str], ...] = (
    (
        "data",
        "data/partition.py",
        "zip(shares, counts, strict=True)]",
        "zip(shares[:1].repeat(len(counts), 0), counts)]",
    ),
    (
        "training",
        "training/loop.py",
        "[a + b for a, b in zip(self._start_sum, part, strict=True)] if",
        "part if",
    ),
    ("algorithms", "algorithms/scaffold.py", "total / batches.steps", "total / len(batches.items)"),
    ("privacy", "privacy/ledger.py", "before = (Releases(self.noise, 1),) if start else ()", "before = ()"),
    ("privacy", "privacy/ledger.py", "count + self._start >= self._max", "count + self._start > self._max"),
    ("schedule", "schedule/rng.py", "self.choices += count", "pass"),
    ("engines", "engines/simulation.py", "self._computed.pop(task, None)", "pass"),
    (
        "algorithms",
        "algorithms/fadas.py",
        "worst <= self.threshold else min(lr, lr / worst)",
        "worst < self.threshold else min(lr, lr / worst)",
    ),
    (
        "algorithms",
        "algorithms/fadas.py",
        "worst <= self.threshold else min(lr, 1 / worst)",
        "worst < self.threshold else min(lr, 1 / worst)",
    ),
)

# Survivors that no test can or need notice.
REASONS: dict[str, str] = {}

_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Pow: "*",
    ast.Mod: "//",
}
_SYMBOL: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-",
    ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Pow: "**", ast.Mod: "%",
    ast.And: "and", ast.Or: "or",
}  # fmt: skip


def _skipped(node: ast.AST) -> bool:
    """Whether a node is text alone: messages, imports, the catalogue."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Assign) and any(
        isinstance(each, ast.Name) and each.id in ("METHODS", "__all__") for each in node.targets
    )


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if _skipped(node):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _edits(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None, str, str]]:
    """Nodes between which, or in which, one text takes the place of another."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield left, right, _SYMBOL[type(op)], _COMPARE[type(op)]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            if not isinstance(left, ast.Constant) or not isinstance(left.value, str):
                yield left, right, _SYMBOL[type(op)], _BINARY[type(op)]
        case ast.BoolOp(op=op, values=[first, second, *_]):
            yield first, second, _SYMBOL[type(op)], "or" if isinstance(op, ast.And) else "and"
        case ast.UnaryOp(op=ast.Not()):
            yield node, None, "not ", ""
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield node, None, "-", ""
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield node, None, name, "max" if name == "min" else "min"
        case ast.Constant(value=bool() as value):
            yield node, None, str(value), str(not value)
        case ast.Constant(value=int() as value) if 0 <= value <= 64:
            yield node, None, str(value), str(value + 1)


def mutants_of(target: str, path: Path) -> Iterator[Mutant]:
    """Every mutant of a file that is one change on one line."""
    text = path.read_text()
    lines = text.splitlines()
    for node in _walk(ast.parse(text)):
        for first, second, before, after in _edits(node):
            row = first.end_lineno if second is not None else first.lineno  # type: ignore[attr-defined]
            line = lines[row - 1]
            if not line.isascii():
                continue
            begin = first.end_col_offset if second is not None else first.col_offset  # type: ignore[attr-defined]
            same_line = second is not None and second.lineno == row  # type: ignore[attr-defined]
            end = second.col_offset if same_line else len(line)  # type: ignore[union-attr]
            place = line.find(before, begin, end)
            if place < 0 or (second is None and place != begin):
                continue
            changed = line[:place] + after + line[place + len(before) :]
            yield Mutant(target, str(path.relative_to(PACKAGE)), row, line, changed)


def drawn(seed: int) -> list[Mutant]:
    """The mutants of every target, drawn with a seed."""
    found = []
    for target, (count, patterns, _) in TARGETS.items():
        paths = sorted(path for pattern in patterns for path in PACKAGE.glob(pattern))
        every = [mutant for path in paths for mutant in mutants_of(target, path)]
        found += random.Random(f"{seed} {target}").sample(every, min(count, len(every)))
    return found


def chosen() -> list[Mutant]:
    """The mutants of `CHOSEN`, which must each match one place of the source."""
    found = []
    for target, path, before, after in CHOSEN:
        lines = (PACKAGE / path).read_text().splitlines()
        rows = [row for row, line in enumerate(lines) if before in line]
        if len(rows) != 1:
            raise SystemExit(f"{path} has {len(rows)} lines with '{before}': choose the mutant anew.")
        line = lines[rows[0]]
        found.append(Mutant(target, path, rows[0] + 1, line, line.replace(before, after)))
    return found


def outcome(mutant: Mutant) -> str:
    """Run the tests of the mutated package: caught, survived, or timeout."""
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        copy = Path(folder) / "offbeat"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / mutant.path
        lines = path.read_text().splitlines(keepends=True)
        lines[mutant.line - 1] = mutant.after + "\n"
        path.write_text("".join(lines))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, str(ROOT), str(ROOT / "tests")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": folder,
        }
        tests = [str(ROOT / name) for name in TARGETS[mutant.target][2]]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return "timeout"
        return "survived" if done.returncode == 0 else "caught"


def table(records: Sequence[dict[str, str]]) -> str:
    """The score by package, and the survivors."""
    lines = ["| package | mutants | caught | score |", "|---|---|---|---|"]
    for target in (*TARGETS, "all"):
        own = [each for each in records if target in ("all", each["target"])]
        if own:
            caught = sum(each["outcome"] == "caught" for each in own)
            lines.append(f"| {target} | {len(own)} | {caught} | {100 * caught / len(own):.0f} % |")
    for each in records:
        if each["outcome"] != "caught":
            name = f"{each['path']}: {each['before']} -> {each['after']}"
            lines.append(
                f"- {each['outcome']}: `{name}`: {REASONS.get(name, 'no reason is known; a test is missing')}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run mutants, or print what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--chosen", action="store_true", help="only those that were once missed")
    parser.add_argument("--table", action="store_true", help="print the recorded score")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after so many")
    parser.add_argument("--out", type=Path, default=RECORDS)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.out.read_text())))
        return
    mutants = chosen() + ([] if options.chosen else drawn(SEED))
    deadline = time.monotonic() + 60 * options.minutes
    records = []

    def record(mutant: Mutant) -> dict[str, str] | None:
        if time.monotonic() > deadline:
            return None
        found = outcome(mutant)
        print(f"{found:8} {mutant.name}", flush=True)
        fields = {"before": mutant.before.strip(), "after": mutant.after.strip(), "outcome": found}
        return {"target": mutant.target, "path": mutant.path, **fields}

    with ThreadPoolExecutor(options.processes) as pool:
        records = [each for each in pool.map(record, mutants) if each is not None]
    options.out.write_text("[\n" + ",\n".join(json.dumps(each) for each in records) + "\n]\n")
    print(table(records))


if __name__ == "__main__":
    main()
