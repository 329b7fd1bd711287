"""Mutation testing: change one operator or constant of the source at a time and see whether the tests notice.

`python tests/mutate.py` draws mutants of the mathematical packages with a seed, runs on each the fast tests
that reach the mutated statement, and writes every outcome to `tests/mutations.json`, mutant by mutant: the
next call continues where the last one ended (`--minutes`). Which tests reach which lines is measured once,
with the package `coverage`, and kept in a folder for temporary files. `--again` repeats those that survived,
after tests were added or with more `--seconds` of tests. `--chosen` runs the mutants of `CHOSEN` alone, which
are mistakes that the tests once missed. `--table` writes `tests/mutations.md`, the score by package and the
survivors. A mutant that survives is either a missing test or changes nothing that can be observed; `REASONS`
says why for each that stays.
"""

import argparse
import ast
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "offbeat"
RECORDS = ROOT / "tests" / "mutations.json"
REPORT = ROOT / "tests" / "mutations.md"
REACHED = Path(tempfile.gettempdir()) / "offbeat-mutants"  # which tests reach which lines
SEED = 22
TIMEOUT = 240.0  # seconds for the tests of one mutant; a mutant that makes them hang is caught
MAX_SECONDS = 20.0  # of tests for one mutant, the quickest first
MAX_CASES = 4  # of a test with parameters
FIRST_SECONDS = 5.0  # of those that are run before the others

PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
PRELOADED = (
    "torch.func",
    "hypothesis",
    "cryptography.hazmat.primitives.asymmetric.x25519",
    "msgspec",
    "optree",
    "safetensors.torch",
    "scipy.stats",
    "sklearn.datasets",
)

# What is mutated, how many mutants are drawn, and the files that have them.
TARGETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "core": (10, ("core.py", "trees.py", "draws.py")),
    "algorithms": (50, ("algorithms/*.py",)),
    "aggregate": (25, ("aggregate/*.py",)),
    "schedule": (35, ("schedule/*.py",)),
    "privacy": (30, ("privacy/*.py", "privacy/secure/*.py")),
    "data": (0, ()),
    "engines": (0, ()),
    "training": (20, ("training/checkpoint.py", "training/loop.py", "training/replay.py")),
}
TESTS = ("aggregate", "algorithms", "data", "engines", "nn", "privacy", "schedule", "training")


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
    ("engines", "engines/simulation.py", "self._ranks.forget(tasks)", "return self._ranks.forget(tasks)"),
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
REASONS: dict[str, str] = {
    "training/loop.py: if not isinstance(weights, Equal) and trees.leaves(algorithm.memory(torch.zeros(1))):"
    " -> if not isinstance(weights, Equal) and trees.leaves(algorithm.memory(torch.zeros(2))):": (
        "whether clients keep memory does not depend on the size of the model"
    ),
    "aggregate/uploads.py: moved = algorithm.step(state, nothing, Cohort(0, 10, (0, 0), (1.0, 1.0))).x"
    " -> moved = algorithm.step(state, nothing, Cohort(0, 10, (1, 0), (1.0, 1.0))).x": (
        "the staleness of a mean of zero moves no model"
    ),
}

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
    for target, (count, patterns) in TARGETS.items():
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


class Reached:
    """The fast tests that reach each line of the package, and how long they take."""

    def __init__(self, lines: dict[str, dict[str, list[str]]], seconds: dict[str, float]) -> None:
        self._lines, self._seconds = lines, seconds
        self._by_function: dict[str, list[str]] = {}
        for name in seconds:
            self._by_function.setdefault(_function(name), []).append(name)

    @classmethod
    def measure(cls) -> "Reached":
        """Run the tests once under coverage, or read what was measured before."""
        REACHED.mkdir(exist_ok=True)
        found = REACHED / "reached.json"
        if not found.exists():
            _measure(found)
        return cls(**json.loads(found.read_text()))

    def tests(self, mutant: Mutant, most: float) -> list[str]:
        """The tests that reach the mutated statement; those that reach its file if it runs on import.

        The quickest come first, for so many seconds.
        """
        lines = self._lines.get(mutant.path, {})
        first, last = _statement(PACKAGE / mutant.path, mutant.line)
        names = {name for row in range(first, last + 1) for name in lines.get(str(row), ())}
        names = names or {name for each in lines.values() for name in each}
        return self._quickest(self._cases(names, mutant), most)

    def closest(self, mutant: Mutant, most: float) -> list[str]:
        """Those of the two files that are most about the mutated statement, which are collected at once."""
        tests = self.tests(mutant, math.inf)
        own, every = (Counter(_file(name) for name in each) for each in (tests, self._seconds))
        files = sorted(own, key=lambda file: (-own[file] / every[file], file))[:2]
        return self._quickest([name for name in tests if _file(name) in files], most)

    def _cases(self, functions: Iterable[str], mutant: Mutant) -> list[str]:
        """The cases of tests; of many, those of the methods of the mutated file, or a few."""
        words = _methods(PACKAGE / mutant.path)
        found = []
        for function in functions:
            cases = sorted(self._by_function.get(function, ()))
            if len(cases) > MAX_CASES:
                own = [name for name in cases if any(word in name for word in words)]
                kinds: dict[str, list[str]] = {}
                for name in own:
                    kinds.setdefault(name.rsplit("-", 3)[0], []).append(name)
                cases = [name for each in kinds.values() for name in _spread(each)] or _spread(cases)
            found += cases
        return found

    def _quickest(self, names: Iterable[str], most: float) -> list[str]:
        chosen, total = [], 0.0
        for name in sorted(names, key=lambda name: (self._seconds.get(name, 0.0), name)):
            total += self._seconds.get(name, 0.0)
            if chosen and total > most:
                break
            chosen.append(name)
        return chosen


def _spread(cases: Sequence[str]) -> list[str]:
    return sorted({cases[len(cases) * place // MAX_CASES] for place in range(MAX_CASES)})


def _methods(path: Path) -> set[str]:
    """The names in the catalogue of the methods of a file."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="METHODS")], value=ast.Dict(keys=keys)):
                return {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return {path.stem} if path.parent.name == "algorithms" else set()


def _function(name: str) -> str:
    return name.partition("[")[0]


def _file(name: str) -> str:
    return _function(name).rpartition(".")[0]


def _measure(found: Path) -> None:
    import coverage

    data, times = REACHED / "coverage", REACHED / "times.xml"
    settings = REACHED / "rc"
    settings.write_text("[run]\ndynamic_context = test_function\n")
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={data}"]
    command += [f"--source={PACKAGE}", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={times}"]
    subprocess.run([*command, *(str(ROOT / "tests" / name) for name in TESTS)], cwd=ROOT, check=False)
    seconds: dict[str, float] = {}
    failed = set()
    for case in ElementTree.parse(times).iter("testcase"):
        name = f"{case.attrib['classname']}.{case.attrib['name']}".removeprefix("tests.")
        seconds[name] = float(case.attrib["time"])
        if any(case.find(kind) is not None for kind in ("failure", "error", "skipped")):
            failed.add(name)
    seconds = {name: time for name, time in seconds.items() if name not in failed}  # says nothing of mutants
    measured = coverage.CoverageData(str(data))
    measured.read()
    known = {".".join(each.split(".")[-2:]): each for each in map(_function, seconds)}
    lines: dict[str, dict[str, list[str]]] = {}
    for file in measured.measured_files():
        contexts = measured.contexts_by_lineno(file)
        lines[str(Path(file).relative_to(PACKAGE))] = {
            str(row): sorted(
                {known[name] for each in names if (name := ".".join(each.split(".")[-2:])) in known}
            )
            for row, names in contexts.items()
        }
    found.write_text(json.dumps({"lines": lines, "seconds": seconds}))


def _statement(path: Path, line: int) -> tuple[int, int]:
    """The first and the last line of the innermost statement of a line, or of its head."""
    best = (line, line)
    size = math.inf
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        last = max(last, node.lineno)
        if node.lineno <= line <= last and last - node.lineno < size:
            best, size = (node.lineno, last), last - node.lineno
    return best


def _node_id(name: str) -> str:
    """The test `folder.file.function` as pytest names it."""
    *folders, function = _function(name).split(".")
    return f"{ROOT / 'tests' / Path(*folders)}.py::{function}{name.removeprefix(_function(name))}"


def outcome(mutant: Mutant, reached: Reached, most: float) -> str:
    """Run the tests that reach the mutant: caught, survived, timeout, or unreached.

    A few close ones come first, since a mutant is mostly caught by them.
    """
    tests, first = reached.tests(mutant, most), reached.closest(mutant, FIRST_SECONDS)
    rest = [name for name in tests if name not in first]
    found = "unreached"
    for names in (first, rest):
        if names and found in ("unreached", "survived"):
            found = _outcome_of(mutant, [_node_id(name) for name in names])
    return found


def _outcome_of(mutant: Mutant, tests: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        copy = Path(folder) / "offbeat"
        shutil.copytree(PACKAGE, copy)  # with its bytecode, which stays valid for other files
        path = copy / mutant.path
        lines = path.read_text().splitlines(keepends=True)
        lines[mutant.line - 1] = mutant.after + "\n"
        path.write_text("".join(lines))
        child = multiprocessing.get_context("fork").Process(target=_run_tests, args=(folder, tests))
        child.start()
        child.join(TIMEOUT)
        if child.exitcode is None:
            os.killpg(child.pid or 0, signal.SIGKILL)
            child.join()
            return "timeout"
        if child.exitcode not in (0, 1, 2):  # 2: the mutant cannot be imported
            raise SystemExit(f"the tests of {mutant.name} did not run (exit code {child.exitcode}).")
        return "survived" if child.exitcode == 0 else "caught"


def _run_tests(folder: str, tests: Sequence[str]) -> None:
    """Run tests on the package in a folder, in a process that has torch imported already."""
    os.setsid()
    os.chdir(ROOT)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": os.pathsep.join([folder, str(ROOT), str(ROOT / "tests")]), "CI": "true"}
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": folder}
    tempfile.tempdir = folder
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import pytest

    code = 3
    try:
        code = int(pytest.main([*PYTEST, *tests]))
    finally:
        os._exit(code)


def check_tests(mutants: Sequence[Mutant], reached: Reached) -> None:
    """Make sure, once, that tests pass on the source as it is: of one mutant of each package."""
    source = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))).hexdigest()
    checked = REACHED / "checked"
    if checked.exists() and checked.read_text() == source:
        return
    for mutant in {mutant.target: mutant for mutant in mutants}.values():
        if outcome(mutant._replace(after=mutant.before), reached, 1.0) != "survived":
            raise SystemExit(f"the tests of {mutant.path} fail without a mutant: measure them again.")
    checked.write_text(source)


def table(records: Sequence[dict[str, str]]) -> str:
    """The score by package, and the survivors; a mutant that makes the tests hang is noticed."""
    lines = ["| package | mutants | caught | score |", "|---|---|---|---|"]
    for target in (*TARGETS, "all"):
        own = [each for each in records if target in ("all", each["target"])]
        if own:
            caught = sum(each["outcome"] in ("caught", "timeout") for each in own)
            lines.append(f"| {target} | {len(own)} | {caught} | {100 * caught / len(own):.1f} % |")
    lines.append("")
    for each in records:
        if each["outcome"] not in ("caught", "timeout"):
            name = f"{each['path']}: {each['before']} -> {each['after']}"
            lines.append(f"- `{name}`: {REASONS.get(name, 'no reason is known; a test is missing')}")
    return "\n".join(lines)


def page(records: Sequence[dict[str, str]]) -> str:
    """The report."""
    return (
        "# Mutation testing\n\n`python tests/mutate.py --table` writes this page from `mutations.json`. Each "
        "mutant is one changed operator or constant; a mutant is caught if one of the fast tests that reach "
        f"its statement fails or hangs. Those of the seed {SEED}, and {len(CHOSEN)} mistakes that the tests "
        f"once missed. {len(records)} of {len(CHOSEN) + len(drawn(SEED))} have been run, in a random order "
        f"over the packages:\n\n{table(records)}\n"
    )


def read_records(path: Path) -> dict[str, dict[str, str]]:
    """What is recorded, by mutant."""
    if not path.exists():
        return {}
    return {_key(each): each for each in json.loads(path.read_text())}


def _key(record: dict[str, str]) -> str:
    return f"{record['path']}: {record['before']} -> {record['after']}"


def main() -> None:
    """Run mutants, or print what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chosen", action="store_true", help="only those that were once missed")
    parser.add_argument("--again", action="store_true", help="those that survived")
    parser.add_argument("--table", action="store_true", help="write the report from the records")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after so many")
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS, help="of tests for one mutant")
    parser.add_argument("--out", type=Path, default=RECORDS)
    options = parser.parse_args()
    known = read_records(options.out)
    if options.table:
        REPORT.write_text(page(list(known.values())))
        print(table(list(known.values())))
        return
    reached = Reached.measure()
    for name in PRELOADED:
        importlib.import_module(name)  # once, before processes are forked
    others = [] if options.chosen else drawn(SEED)
    random.Random(SEED).shuffle(others)  # so that what has run is a sample of all packages
    mutants = chosen() + others
    check_tests(mutants, reached)
    deadline = time.monotonic() + 60 * options.minutes
    for mutant in mutants:
        again = options.again and known.get(mutant.name, {}).get("outcome") in ("survived", "unreached")
        if time.monotonic() > deadline or (mutant.name in known and not again):
            continue
        found = outcome(mutant, reached, options.seconds)
        print(f"{found:9} {mutant.name}", flush=True)
        fields = {"before": mutant.before.strip(), "after": mutant.after.strip(), "outcome": found}
        known[mutant.name] = {"target": mutant.target, "path": mutant.path, **fields}
        text = ",\n".join(json.dumps(each) for each in known.values())
        options.out.write_text(f"[\n{text}\n]\n")
    print(table(list(known.values())))


if __name__ == "__main__":
    main()
