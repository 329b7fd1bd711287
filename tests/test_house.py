"""The project as a whole: what every file keeps to, whoever wrote it."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import offbeat

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "offbeat"
MODULES = sorted(SOURCE.rglob("*.py"))
ORACLES = sorted((ROOT / "tests" / "oracles").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = [str(path.relative_to(SOURCE)) for path in MODULES]
PACKAGES = [path for path in MODULES if path.name == "__init__.py"]
FOLDERS = ("src", "tests", "docs", "benchmarks", "experiments", "examples", ".ci")
TEXT = {"", ".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".ipynb", ".svg", ".html", ".css", ".yaml"}
FORMER_WORDS = {
    "veil",
    "tame",
    "keepsake",
    "nursery",
    "crew",
    "shelf",
    "Nobody",
    "intake",
    "passage",
    "guests",
}
OF_EACH_METHOD = {"State", "Message", "Memory", "Upload"}


def imported(path: Path) -> Iterator[str]:
    """The top-level names of what a file imports; its own package's as `.`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else str(node.module).split(".")[0]


def test_the_version_is_the_same_everywhere() -> None:
    assert offbeat.__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_a_module_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 640
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_a_module_is_named_after_what_it_holds(path: Path) -> None:
    assert not {path.stem, path.parent.name} & {"utils", "helpers", "common", "misc", "base", "internal"}


def test_there_are_few_modules_and_few_files_in_deploy() -> None:
    """There are at most 175 with the 26 of `algorithms`, where each new method adds one."""
    assert len([name for name in NAMES if not name.startswith("algorithms/")]) <= 149
    assert len([name for name in NAMES if name.startswith("deploy/")]) <= 40


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_a_module_uses_the_words_of_the_field(path: Path) -> None:
    """Names of the first versions, each of which has a word that readers of the literature know."""
    assert set(re.findall(r"[A-Za-z]+", path.read_text())) & FORMER_WORDS == set()


def test_every_public_class_has_a_name_of_its_own() -> None:
    """But for the four that each method defines in its own file, which are one idea."""
    places: dict[str, list[str]] = {}
    for path, name in zip(MODULES, NAMES, strict=True):
        apart = OF_EACH_METHOD if path.parent.name == "algorithms" else set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in apart and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", PACKAGES, ids=[path.parent.name for path in PACKAGES])
def test_a_package_says_in_a_sentence_what_is_in_it(path: Path) -> None:
    summary, *_ = str(ast.get_docstring(ast.parse(path.read_text()))).split("\n\n")
    assert len(summary.split()) >= 5
    assert summary.endswith(".")


def test_no_file_names_a_place_on_a_machine() -> None:
    """Apart from `/home/somebody`, which tests use as an example."""
    own = re.compile(r"(?<![\w.])/(?:work|root|mnt|Users|home/(?!somebody))\b/?\w")
    paths = [*ROOT.glob("[!.]*"), *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*")))]
    files = [path for path in paths if path.is_file() and path.suffix in TEXT]
    assert len(files) > 300
    assert [str(path.relative_to(ROOT)) for path in files if own.search(path.read_text())] == []


def test_the_licence_is_the_one_that_the_project_declares() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()


@pytest.mark.parametrize("ending", ["offbeat run", "python -m pytest -n auto"])
def test_ci_runs_the_readmes_own_command(ending: str) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    (pattern,) = (p for p in re.findall(r"\(readme '(.+)'\)", script) if p.endswith(f"{ending}$"))
    lines = (ROOT / "README.md").read_text().splitlines()
    (command,) = (line for line in lines if re.search(pattern, line))
    assert "-c constraints.txt" in command


def test_ci_is_a_script_that_bash_can_read() -> None:
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    wanted = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    names = {re.split(r"[><=\[]", one)[0] for one in wanted} - {"offbeat"}
    assert names <= pins.keys()


@pytest.mark.parametrize("path", ORACLES, ids=[path.stem for path in ORACLES])
def test_an_oracle_is_independent(path: Path) -> None:
    assert set(imported(path)) <= {".", "oracles", "numpy"} | sys.stdlib_module_names


def test_there_are_oracles_to_check() -> None:
    assert len(ORACLES) > 1


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parent.name == "schedule"], ids=lambda p: p.stem
)
def test_time_does_not_touch_tensors(path: Path) -> None:
    assert "torch" not in set(imported(path))


def test_the_design_names_every_module() -> None:
    """But for the methods, whose folder it names: to add one takes no change there."""
    tree = (ROOT / "docs" / "design.md").read_text()
    named = [name for name in NAMES if not name.startswith("algorithms/") and Path(name).stem != "__init__"]
    assert [name for name in named if Path(name).name not in tree] == []


# What could turn bytes from the network into code.
_LOADERS = {"pickle", "cloudpickle", "marshal", "dill", "shelve", "runpy", "importlib", "pkgutil", "joblib"}
_CALLS = {"exec", "eval", "compile", "__import__", "import_module", "resolve_name"}


def _ways_to_execute(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names if name.name.partition(".")[0] in _LOADERS}
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in _LOADERS:
                found.add(module)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _CALLS:
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                found.add("torch.load")
    return found - {"importlib.metadata"}


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if re.match(r"deploy/(site|protocol)/|deploy/flower/(site|content)\.py", name)],
)
def test_what_reads_messages_at_a_site_has_no_way_to_execute_them(name: str) -> None:
    """docs/deploy.md promises that nothing from the network is executed, imported or unpickled there."""
    assert not _ways_to_execute(ast.parse((SOURCE / name).read_text()))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from importlib import import_module",
        "eval(x)",
        "torch.load(x)",
        "a.import_module(x)",
    ],
)
def test_a_way_to_execute_is_found(line: str) -> None:
    assert _ways_to_execute(ast.parse(line))
