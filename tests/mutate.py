"""Mutation testing: change one operator or constant of the source at a time and see whether the tests notice.

`python tests/mutate.py` draws mutants of the mathematical packages with a seed, runs on each the fast tests
that reach the mutated statement, and writes every outcome to `tests/mutations.json`, mutant by mutant: the
next call continues where the last one ended (`--minutes`). The draw depends on the text of a line alone, so
that other changes of the source change few mutants. Which tests reach which lines is measured once for each
test, with the package `coverage`, and kept in a folder for temporary files. `--again` repeats those
that survived, after tests were added or with more `--seconds` of tests. `--check` repeats those that were
caught, each with the recorded test alone. `--chosen` runs the mutants of `CHOSEN` alone. `--table` writes
`tests/mutations.md`, the score by package and the survivors. A mutant that survives is either a missing test
or changes nothing that can be observed; `REASONS` says why for each that stays.

Most of the time would go into imports. So all tests are collected once, and each mutant is a forked process
in which the mutated function is given its new code. A mutant that changes what happens on import, or that
survives, gets a process that imports the mutated package.
"""

import argparse
import ast
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypedDict

import pytest

from mutants import DRAWS, MISSED, PACKAGE, PACKAGES, Mutant, chosen, drawn, reason

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "tests" / "mutations.json"
REPORT = ROOT / "tests" / "mutations.md"
REACHED = Path(tempfile.gettempdir()) / "offbeat-mutants"  # which tests reach which lines
TIMEOUT = 20.0  # seconds for the tests of one mutant besides three times those they take without it
MAX_SECONDS = 20.0  # of tests for one mutant
MAX_PROCESSES = 24  # that the tests of one mutant may have started at a time
MAX_MEMORY = 6 << 30  # bytes of each of them
FIRST_CASES = 4  # of a test with parameters, before its other cases
MANY_CASES = 300  # of a test with parameters; of more, not all are used
CAUGHT = ("caught", "timeout")  # a mutant that makes the tests hang is noticed

# Without capture nothing is printed either, since the output of a forked process is closed.
PYTEST: tuple[str, ...] = ("-q", "--capture=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")
PYTEST += ("-m", "not slow", "-W", "ignore::pytest.PytestAssertRewriteWarning")
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

# The fast tests that are used: whole folders, and files of others.
TESTS: tuple[str, ...] = ("aggregate", "algorithms", "privacy", "schedule", "test_amplification.py")
for _folder, _names in {
    "cli": "tune",
    "data": "client_store lazy_partition partition population",
    "deploy": "client_registry cooldown deployed_session deployed_sum journal messages name_binding "
    "norm_guard partial_work retrying_transport secure_attacks secure_encode secure_summation "
    "timed_deployment upload_validation wire",
    "engines": "ahead engines",
    "nn": "problem",
    "training": "buffer_sum checkpoint folder loop personal replay resume standardise stopping",
}.items():
    TESTS += tuple(f"{_folder}/test_{_name}.py" for _name in _names.split())


class Measured(TypedDict):
    """What the tests of one file reach."""

    seconds: dict[str, float]  # of those that passed
    failed: list[str]
    lines: dict[str, dict[str, list[str]]]  # by path and text of the line


class Reached:
    """The fast tests that reach each line of the package, and how long they take.

    Lines are known by their text, so that a measurement stays useful while the source changes.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lines: dict[str, dict[str, set[str]]] = {}  # by path and text of the line
        self._reach: dict[str, Counter[str]] = {}  # by test: how many lines of each file

    def add(self, measured: Measured) -> None:
        """Take in the tests of one file."""
        self.seconds |= measured["seconds"]
        for path, lines in measured["lines"].items():
            own = self._lines.setdefault(path, {})
            for text, names in lines.items():
                passed = [name for name in names if name in measured["seconds"]]
                own.setdefault(text, set()).update(passed)
                for name in passed:
                    self._reach.setdefault(name, Counter())[path] += 1

    def tests(self, mutant: Mutant, most: float) -> list[str]:
        """The tests that reach the mutated statement, or else its function or its file, for so many seconds.

        Quick tests that reach little outside the mutated file come first, and a few cases of each test with
        parameters before its other cases.
        """
        paths = [path for path in self._lines if path == mutant.path or not (PACKAGE / path).exists()]
        lines = [self._lines[path] for path in paths]  # code may have moved from a file that is no more
        names: set[str] = set()
        for rows in _places(PACKAGE / mutant.path, mutant.row):
            names = names or {name for own in lines for row in rows for name in own.get(row, ())}
        names = names or {name for each in self._lines.get(mutant.path, {}).values() for name in each}

        def rank(name: str) -> float:
            share = self._reach[name][mutant.path] / self._reach[name].total()
            return (self.seconds[name] + 0.05) / (share + 0.01)

        cases: dict[str, list[str]] = {}
        for name in sorted(names):
            cases.setdefault(name.partition("[")[0], []).append(name)
        first = {name for each in cases.values() for name in _spread(each, FIRST_CASES)}
        found: list[str] = []
        total = 0.0
        for name in sorted(names, key=lambda name: (name not in first, rank(name), name)):
            if not found or total + self.seconds[name] <= most:
                total += self.seconds[name]
                found.append(name)
        return found


def _spread(cases: Sequence[str], count: int) -> list[str]:
    return sorted({cases[len(cases) * place // count] for place in range(count)})


def _places(path: Path, row: int) -> Iterator[list[str]]:
    """The texts of the lines of the statement of a row, or of its head; then those of its functions."""
    text = path.read_text()
    lines = [line.strip() for line in text.splitlines()]
    found: list[tuple[int, int, int]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= row <= (node.end_lineno or row):
            body: list[ast.stmt] = getattr(node, "body", [])
            whole = not body or isinstance(node, ast.FunctionDef)
            last = (node.end_lineno or row) if whole else max(node.lineno, body[0].lineno - 1)
            if row <= last and not isinstance(node, ast.ClassDef):
                found.append((last - node.lineno, node.lineno, last))
    for _, first, last in sorted(found):
        yield [line for line in lines[first - 1 : last] if line]


class Session:
    """A plugin of pytest that runs chosen tests in forked processes, after all tests have been collected."""

    def __init__(self, work: Callable[["Session"], None]) -> None:
        self._work = work
        self._items: dict[str, pytest.Item] = {}
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._work(self)
        return True

    def files(self) -> dict[Path, list[str]]:
        """The names of the tests that were collected, by file; of one with many cases two of each kind."""
        cases: dict[str, list[str]] = {}
        for name in self._items:
            cases.setdefault(name.partition("[")[0], []).append(name)
        found: dict[Path, list[str]] = {}
        for names in cases.values():
            kinds: dict[str, list[str]] = {}
            for name in names:
                kinds.setdefault(name.rsplit("-", 3)[0] if len(names) > MANY_CASES else name, []).append(name)
            for each in kinds.values():
                found.setdefault(self._items[each[0]].path, []).extend(_spread(each, 2))
        return found

    def missing(self, names: Iterable[str]) -> str:
        """The first of these tests that could not be collected."""
        return next((name for name in names if name not in self._items), "")

    def run(self, names: Iterable[str], watch: Callable[[str], object] = str) -> str:
        """Run tests until the first that fails, and return its name; only in a process that ends then."""
        items = [self._items[name] for name in names if name in self._items]
        self._failed.clear()
        for place, item in enumerate(items):
            watch(item.nodeid)
            following = items[place + 1] if place + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return self._failed[0]
        return ""

    def measure(self, names: Sequence[str]) -> Measured:
        """Run tests under coverage; only in a process that ends then."""
        import coverage

        watcher = coverage.Coverage(data_file=None, source=[str(PACKAGE)], config_file=False)
        watcher.set_option("run:disable_warnings", ["module-not-measured", "no-data-collected"])
        watcher.start()
        seconds: dict[str, float] = {}
        failed: list[str] = []
        for name in names:
            begin = time.monotonic()
            if self.run([name], watcher.switch_context):  # a test that fails says nothing of mutants
                failed.append(name)
            else:
                seconds[name] = round(time.monotonic() - begin, 3)
        watcher.stop()
        data = watcher.get_data()
        lines: dict[str, dict[str, list[str]]] = {}
        for file in data.measured_files():
            texts = Path(file).read_text().splitlines()
            own = lines.setdefault(str(Path(file).relative_to(PACKAGE)), {})
            for row, contexts in data.contexts_by_lineno(file).items():
                reached = set(own.get(texts[row - 1].strip(), ())) | set(contexts)
                own[texts[row - 1].strip()] = sorted(reached - {""})
        return Measured(seconds=seconds, failed=failed, lines=lines)


def measure(session: Session, deadline: float) -> Reached:
    """Which tests reach which lines: measured for tests that are new, and read for the others."""
    REACHED.mkdir(exist_ok=True)
    reached = Reached()
    for path, names in session.files().items():
        file = REACHED / f"{str(path.relative_to(ROOT)).replace('/', '-')}.json"
        known = Measured(seconds={}, failed=[], lines={})
        if file.exists():
            known = json.loads(file.read_text())
        new = [name for name in names if name not in known["seconds"] and name not in known["failed"]]
        if new and time.monotonic() < deadline:
            print(f"measuring {len(new)} tests of {path.relative_to(ROOT)}", flush=True)
            found = forked(partial(session.measure, new), ROOT, None, 600.0)
            if not isinstance(found, dict):
                raise SystemExit(f"the tests of {path} did not run: {found or 'their process ends'}")
            for name in found["failed"]:
                print(f"it fails without a mutant: {name}", flush=True)
            known["seconds"] |= found["seconds"]
            known["failed"] += found["failed"]
            for source, lines in found["lines"].items():
                own = known["lines"].setdefault(source, {})
                for text, reaching in lines.items():
                    own[text] = sorted({*own.get(text, ()), *reaching})
            file.write_text(json.dumps(known))
        there = {name: known["seconds"][name] for name in names if name in known["seconds"]}
        reached.add({**known, "seconds": there})  # some may have another name by now
    return reached


def forked(work: Callable[[], Any], folder: Path, copy: Path | None, seconds: float) -> Any:
    """What a function returns in a forked process without output.

    It is "timeout" where the process had to be ended, since it took too long or started too many others;
    "killed" where somebody else ended it; and None where it ended without an answer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        _hold_descendants()
        os.close(reader)
        os.chdir(ROOT)
        paths = [str(copy or PACKAGE.parent), str(ROOT), str(ROOT / "tests")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        if copy:
            os.environ |= {"TMPDIR": str(folder), "PYTEST_DEBUG_TEMPROOT": str(folder)}
            tempfile.tempdir = str(folder)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        try:
            answer = json.dumps(work()).encode()
            while answer:
                answer = answer[os.write(writer, answer) :]
        finally:
            os._exit(0)
    os.close(writer)
    answer = b""
    taken, late = 0.0, False
    while not late:
        begin = time.monotonic()
        if select.select([reader], [], [], 1.0)[0]:
            part = os.read(reader, 1 << 20)
            if not part:
                break
            answer += part
        taken += min(time.monotonic() - begin, 2.0)  # more is a pause of all processes, by whoever needs them
        late = taken > seconds or len(_descendants(child)) > MAX_PROCESSES
    os.close(reader)
    _end(child)
    status = os.waitpid(child, 0)[1]
    if late:
        return "timeout"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "killed"  # by a system without memory, not by what the process did
    return json.loads(answer) if answer else None


def _hold_descendants() -> None:
    """Let this process end with its parent, inherit orphans, and bound the memory of each process (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))


def _descendants(process: int) -> list[int]:
    """The running processes that a process has started, and those that they have started (Linux)."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found = list(children.get(process, ()))
    for each in found:  # which grows meanwhile
        found += children.get(each, ())
    return found


def _end(process: int) -> None:
    """End a process, its group and its descendants, also those that start meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP)
    while rest := _descendants(process):
        for each in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The functions of a module and of its classes, without those inside functions."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & inspect.CO_OPTIMIZED:
                yield each
            else:
                yield from _codes(each)


def _frame(code: CodeType) -> list[object]:
    """What a module does on import, without its functions."""
    found: list[object] = [code.co_code, code.co_names]
    for each in code.co_consts:
        if not isinstance(each, CodeType):
            found.append(repr(each))
        elif not each.co_flags & inspect.CO_OPTIMIZED:
            found += _frame(each)
    return found


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    yield old, new
    inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new)]
    if len(inner[0]) == len(inner[1]):
        for pair in zip(*inner, strict=True):
            yield from _pairs(*pair)


def replacements(mutant: Mutant) -> list[tuple[FunctionType, CodeType]]:
    """The functions in memory that a mutant changes, with their new code; none if it needs a new import."""
    path = PACKAGE / mutant.path
    old, new = (compile(text, path, "exec") for text in (path.read_text(), mutant.text()))
    if _frame(old) != _frame(new):
        return []
    changed = [pair for pair in zip(_codes(old), _codes(new), strict=True) if pair[0] != pair[1]]
    if len(changed) != 1:
        return []
    if any(len(each.co_freevars) != len(code.co_freevars) for each, code in _pairs(*changed[0])):
        return []
    codes = {(each.co_qualname, each.co_firstlineno): code for each, code in _pairs(*changed[0])}
    found: list[tuple[FunctionType, CodeType]] = []
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename == str(path):
            code = codes.get((each.__code__.co_qualname, each.__code__.co_firstlineno))
            if code is not None:
                found.append((each, code))
    outer = changed[0][0].co_qualname
    return found if any(each.__code__.co_qualname == outer for each, _ in found) else []


def outcome(
    mutant: Mutant, names: Sequence[str], seconds: dict[str, float], session: Session | None
) -> tuple[str, str]:
    """Run tests on a mutant: caught with the test that failed, survived, timeout, unclear, or unreached.

    With a session the mutated function gets its new code in a process that has collected the tests, and
    "import" says that this does not suffice. Without one the tests are collected on a copy of the package.
    A mutant is caught only if the same tests pass without it. A test that seems to hang is given more time by
    itself, so that a busy machine is not taken for a mutant that hangs.
    """
    if not names:
        return "unreached", ""
    limit = TIMEOUT + 3 * sum(seconds[name] for name in names)
    found, test = _attempt(mutant, names, limit, session)
    if found == "timeout":
        if test in names:
            found, test = _attempt(mutant, [test], 2 * TIMEOUT + 10 * seconds[test], session)
        if found == "survived":
            found, test = _attempt(mutant, names, 3 * limit, session)
    if found == "killed":
        return "unclear", "the system ended the process of the tests"
    if found in CAUGHT:
        until = names[: names.index(test) + 1] if test in names else names
        without, failed = _attempt(None, until, 3 * limit, session)
        if without != "survived":
            return "unclear", f"{failed or test} without the mutant: {without}"
    return found, test


def _attempt(
    mutant: Mutant | None, names: Sequence[str], limit: float, session: Session | None
) -> tuple[str, str]:
    """Run tests once, on a mutant or on the package as it is; the test is the first that fails or hangs."""
    changes = replacements(mutant) if mutant and session else []
    if mutant and session and not changes:
        return "import", ""
    with tempfile.TemporaryDirectory(prefix="mutant", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        copy = folder / "package"
        shutil.copytree(PACKAGE, copy / "offbeat")  # with its bytecode, which stays valid for other files
        if mutant:
            (copy / "offbeat" / mutant.path).write_text(mutant.text())
        running = folder / "running"

        def work() -> str:
            if session is None:
                return _collect_and_run(copy, names, running.write_text)
            for function, code in changes:
                function.__code__ = code
            return session.run(names, running.write_text)

        found = forked(work, folder, copy, limit)
        last = running.read_text() if running.exists() else ""
    if found is None:
        return "caught", last or "the process of the tests ends"
    if found in ("timeout", "killed"):
        return found, last
    return ("caught", found) if found else ("survived", "")


def _collect_and_run(copy: Path, names: Sequence[str], watch: Callable[[str], object]) -> str:
    """The first test that fails with the package of a folder, in a process that has not imported it."""
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    found = ["the package cannot be imported"]

    def work(session: Session) -> None:
        found[0] = session.missing(names) or session.run(names, watch)

    files = sorted({name.partition("::")[0] for name in names})
    pytest.main([*PYTEST, *files], plugins=[Session(work)])
    return found[0]


class Record(TypedDict):
    """One mutant in `mutations.json`."""

    target: str
    path: str
    before: str
    after: str
    first: str  # the outcome when it was first run
    outcome: str
    test: str  # that failed


def table(records: Sequence[Record]) -> str:
    """The score by package, at first and now."""
    lines = ["| package | mutants | caught at first | caught now | score | changes nothing | score without |"]
    lines.append("|---|---|---|---|---|---|---|")
    for target in (*PACKAGES, "all"):
        own = [each for each in records if target in ("all", each["target"])]
        if own:
            first, now = (sum(each[key] in CAUGHT for each in own) for key in ("first", "outcome"))
            same = sum(each["outcome"] not in CAUGHT and reason(each["after"]) is not None for each in own)
            scores = f"{100 * now / len(own):.1f} % | {same} | {100 * now / (len(own) - same):.1f} %"
            lines.append(f"| {target} | {len(own)} | {first} | {now} | {scores} |")
    return "\n".join(lines)


def survivors(records: Sequence[Record]) -> str:
    """Those that are not caught, with the reason."""
    lines = []
    for each in records:
        if each["outcome"] not in CAUGHT:
            why = reason(each["after"]) or "a test is missing"
            lines.append(f"- `{_key(each)}`: {why}.")
    return "\n".join(lines)


def page(records: Sequence[Record]) -> str:
    """The report."""
    own = {mutant.name for mutant in chosen()}
    missed = "\n".join(
        f"- `{_key(each)}`: `{each['test'] or each['outcome']}`" for each in records if _key(each) in own
    )
    return (
        "# Mutation testing\n\n`python tests/mutate.py --table` writes this page from `mutations.json`. Each "
        "mutant is one changed operator or constant, or a mistake that was made up; it is caught if one of "
        "the fast tests that reach its statement fails or hangs. "
        f"{len(records) - len(own)} mutants were drawn with the seeds {' and '.join(map(str, DRAWS))}, and "
        f"{len(own)} were chosen. "
        '"At first" is the outcome with the tests that there were when the mutant was drawn or chosen.\n\n'
        f"{table(records)}\n\n## Survivors\n\n{survivors(records)}\n\n## Chosen mistakes, and the test that "
        f"fails on each\n\n{missed}\n"
    )


def read_records(path: Path) -> dict[str, Record]:
    """What is recorded, by mutant."""
    if not path.exists():
        return {}
    return {_key(each): each for each in json.loads(path.read_text())}


def _still(known: dict[str, Record], mutants: dict[str, Mutant]) -> dict[str, Record]:
    """The records of these mutants; code that has moved to another file keeps its records."""
    moved = {
        (each["before"], each["after"]): each
        for each in known.values()
        if not (PACKAGE / each["path"]).exists() or _key(each) not in mutants
    }
    found: dict[str, Record] = {}
    for name, mutant in mutants.items():
        record = known.get(name) or moved.get((mutant.before.strip(), mutant.after.strip()))
        if record is not None:
            record["path"] = mutant.path
            found[name] = record
    return found


def _key(record: Record) -> str:
    return f"{record['path']}: {record['before']} -> {record['after']}"


def run_mutants(mutants: Sequence[Mutant], options: argparse.Namespace, known: dict[str, Record]) -> None:
    """Run mutants until there is no time left, and record each; in a process without the package."""
    deadline = time.monotonic() + 60 * options.minutes
    missed = {mutant.name for mutant in chosen(MISSED)}
    every = {mutant.name: mutant for mutant in chosen() + drawn()}

    def record(mutant: Mutant, found: str, test: str, begin: float) -> None:
        print(f"{time.monotonic() - begin:5.1f} s  {found:9} {mutant.name}  {test}", flush=True)
        if found == "unclear" or (options.tests and found not in CAUGHT):
            return  # another time, or other tests, may catch it
        known.update(_still(read_records(options.out), every))  # another process may write, too
        first = known[mutant.name]["first"] if mutant.name in known else found
        first = "survived" if mutant.name in missed else first
        known[mutant.name] = Record(
            target=mutant.target,
            path=mutant.path,
            before=mutant.before.strip(),
            after=mutant.after.strip(),
            first=first,
            outcome=found,
            test=test,
        )
        text = ",\n".join(json.dumps(each) for each in known.values())
        options.out.write_text(f"[\n{text}\n]\n")

    def work(session: Session) -> None:
        for mutant in mutants:
            module = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            importlib.import_module(f"offbeat.{module}")
        reached = measure(session, deadline)
        for place, mutant in enumerate(mutants):
            if time.monotonic() > deadline:
                break
            begin = time.monotonic()
            names = reached.tests(mutant, options.seconds)
            if options.check and known[mutant.name]["test"] in reached.seconds:
                names = [known[mutant.name]["test"]]
            seconds = {name: reached.seconds[name] for name in names}
            found, test = outcome(mutant, names, seconds, session)
            os.write(told, json.dumps([place, found, test, seconds, begin]).encode() + b"\n")
            os.read(go, 1)

    reader, told = os.pipe()
    go, reply = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.close(reply)
        code = 1
        try:
            folders = [str(ROOT / "tests" / name) for name in options.tests or TESTS]
            code = int(pytest.main([*PYTEST, *folders], plugins=[Session(work)]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(told)
    os.close(go)
    with os.fdopen(reader) as answers:
        for answer in answers:
            place, found, test, seconds, begin = json.loads(answer)
            if found == "import" or (found == "survived" and not options.tests):
                found, test = outcome(mutants[place], list(seconds), seconds, None)
            record(mutants[place], found, test, begin)
            os.write(reply, b" ")
    if status := os.waitpid(child, 0)[1]:
        raise SystemExit(f"the tests could not be collected (status {status}).")


def main() -> None:
    """Run mutants, or print what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chosen", action="store_true", help="only those of `CHOSEN`")
    parser.add_argument("--again", action="store_true", help="those that survived")
    parser.add_argument(
        "--check", action="store_true", help="those that were caught, with the test that caught each alone"
    )
    parser.add_argument("--table", action="store_true", help="write the report from the records")
    parser.add_argument("--of", default="", help="only mutants of files whose path begins so")
    parser.add_argument(
        "--tests", nargs="+", default=(), help="of these files alone; records what they catch"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after so many")
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS, help="of tests for one mutant")
    parser.add_argument("--out", type=Path, default=RECORDS)
    options = parser.parse_args()
    mutants = {mutant.name: mutant for mutant in chosen() + drawn()}
    known = _still(read_records(options.out), mutants)
    if options.table:
        REPORT.write_text(page(list(known.values())))
    else:
        os.environ |= {"OMP_NUM_THREADS": "1", "CI": "true"}
        for name in PRELOADED:
            importlib.import_module(name)  # once, before processes are forked
        wanted = chosen() if options.chosen else list(mutants.values())
        caught = {name for name, each in known.items() if each["outcome"] in CAUGHT}
        if options.check:
            wanted = [each for each in wanted if each.name in caught]
        else:
            done = caught if options.again else known.keys()
            wanted = [each for each in wanted if each.name not in done]
        run_mutants([each for each in wanted if each.path.startswith(options.of)], options, known)
    print(table(list(known.values())))
    print(f"{len(known)} of {len(mutants)} have been run.")


if __name__ == "__main__":
    main()
