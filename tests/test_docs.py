"""What the documents show is what the program does: their Python runs, their commands parse.

The pages of the guide are run from top to bottom, commands too, and say what the commands answer.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli.main import main, parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "privacy.md"]
GUIDE = [
    ROOT / "docs" / f"{name}.md"
    for name in ("index", "train", "data", "cadence", "choose", "time", "private", "uploads", "runs")
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[tuple[str, str]]:
    """The fenced blocks in one language, each with where it begins."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [
        (f"{page.name}:{text[: match.start()].count(chr(10)) + 1}", match[1])
        for page, text in ((page, page.read_text()) for page in PAGES)
        for match in fence.finditer(text)
    ]


def commands() -> list[str]:
    """Every call of `offbeat` that a shell block shows."""
    lines = [line.partition("#")[0] for _, block in blocks("sh") for line in block.splitlines()]
    calls = [part.strip() for line in lines for part in line.split("&&")]
    return [call for call in calls if call.split()[:1] == ["offbeat"]]


@pytest.mark.parametrize(("where", "code"), blocks("python"), ids=[where for where, _ in blocks("python")])
def test_python_in_the_documents_runs_and_learns(
    where: str, code: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, where, "exec"), {"__name__": "__main__"})
    accuracies = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", capsys.readouterr().out)]
    assert bool(accuracies) == ("accuracy" in code)
    assert not accuracies or accuracies[-1] > 0.5  # ten classes: chance is 0.1


def test_the_readme_shows_how_to_train() -> None:
    assert any(where.startswith("README.md") and "offbeat.train(" in code for where, code in blocks("python"))


@pytest.mark.slow
def test_the_recipe_for_an_algorithm_works_to_the_letter(tmp_path: Path) -> None:
    """In a copy of the project, the recipe's two files are put where it says, and the tests find them."""
    for name in ("src", "tests", "docs", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for page in ROOT.iterdir():
        if page.is_file():
            shutil.copy(page, tmp_path)
    method, oracle = (code for where, code in blocks("python") if where.startswith("CONTRIBUTING.md"))
    recipe = (ROOT / "CONTRIBUTING.md").read_text()
    for place, code in (("src/offbeat/algorithms/signs.py", method), ("tests/oracles/signs.py", oracle)):
        assert f"`{place}`" in recipe
        (tmp_path / place).write_text(code)
    names = ("test_trajectories", "test_registry", "test_costs")
    tests = [
        *(f"tests/algorithms/{name}.py" for name in names),
        "tests/test_house.py",
        "-k",
        "house or signs or registry",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src"), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = [sys.executable, "-m", "offbeat", "algorithms", "signs"]
    told = subprocess.run(listed, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "a fixed length along each coordinate" in told.stdout


@pytest.mark.parametrize("command", commands())
def test_a_command_in_the_documents_parses(command: str) -> None:
    parser().parse_args(shlex.split(command)[1:])


def test_the_documents_show_commands() -> None:
    assert len(commands()) > 1


def plain(text: str) -> list[str]:
    """Its lines, without what nobody sees."""
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def run_commands(block: str, said: pytest.CaptureFixture[str]) -> str:
    """Run what a shell block shows, here; what it prints."""
    said.readouterr()
    for line in block.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line)
        assert program == "offbeat", f"{line!r} would not be tried: a page shows what a test can run"
        assert main(words) == 0, line
    return said.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_a_page_of_the_guide_runs_from_top_to_bottom(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python blocks are one program, commands run between them, and a text block is what came just before."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    told = ""
    seen = []
    for match in FENCE.finditer(text := page.read_text()):
        language, block = match.groups()
        where = f"{page.name}:{text[: match.start()].count(chr(10)) + 1}"
        seen.append(language)
        if language == "python":
            capsys.readouterr()
            exec(compile(block, where, "exec"), names)
            told = capsys.readouterr().out
            accuracies = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", told)]
            assert not accuracies or accuracies[-1] > 0.5, where  # ten classes: chance is 0.1
        elif language == "sh":
            told = run_commands(block, capsys)
        else:
            assert language == "text", f"{where}: who would try {language}?"
            assert plain(told) == plain(block), where
    assert {"python", "sh"} & set(seen)


def rows(page: Path, name: str) -> list[list[str]]:
    """The cells of a table of a page, below its heading."""
    table = page.read_text().partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("row", rows(ROOT / "docs" / "time.md", "schedules"), ids=lambda row: row[0])
def test_a_schedule_of_the_guide_is_as_it_says(row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words, *told = row
    assert main(["schedule", *shlex.split(words.strip("`")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == [
        f"{found['time_per_step']:.3f}",
        f"{found['staleness_mean']:.2f}",
        *(str(found[name]) for name in ("staleness_max", "dropped", "clients")),
    ]


def test_accuracies_that_the_guide_quotes_are_measured_ones() -> None:
    """Numbers of three digits and more in its sentences are numbers of the studies' tables."""
    prose = (ROOT / "docs" / "choose.md").read_text()
    quoted = set(re.findall(r"\b0\.\d{3,}\b", prose))
    studies = "".join(page.read_text() for page in ROOT.glob("experiments/*/README.md"))
    assert quoted
    assert quoted - set(re.findall(r"\b0\.\d{3,}\b", studies)) == set()


def test_links_within_the_project_lead_somewhere() -> None:
    pages = [*PAGES, *GUIDE, ROOT / "docs" / "design.md", ROOT / "docs" / "requests.md"]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"(?:\]\(|src=\")(?!http|#)([^)\"#]+)", page.read_text())
    ]
    assert links
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_every_request_has_an_answer_and_a_reason() -> None:
    found = re.findall(
        r"^\| (\d+) \| (.+) \| (\S+) \| (.+) \|$", (ROOT / "docs" / "requests.md").read_text(), re.M
    )
    assert [int(number) for number, *_ in found] == list(range(1, 77))
    assert {answer for _, _, answer, _ in found} <= {"yes", "partly", "no"}
    known = {action.option_strings[-1] for action in parser()._actions if action.option_strings}
    for name in ("run", "schedule", "join"):
        known |= set(subparsers()[name]._option_string_actions)
    for _, _, _, where in found:
        assert set(re.findall(r"(--[a-z-]+)", where)) <= known, where


def subparsers() -> dict[str, Any]:
    """The commands' own parsers."""
    choices: dict[str, Any] = next(action.choices for action in parser()._actions if action.choices)
    return choices


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program that makes the figures of the README."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("figure")


def test_the_figures_of_the_readme_show_the_stored_results(figure: Any) -> None:
    results = json.loads(figure.RESULTS.read_text())
    found = figure.drawings(results)
    assert set(found) == {"accuracy-over-time.svg", "accuracy-over-tuning.svg"}
    for name, text in found.items():
        assert (ROOT / "docs" / name).read_text() == text
        assert f'src="docs/{name}"' in (ROOT / "README.md").read_text()
    cadence = results["curves"]["cadence"][-1][1]
    best = figure.best_of([point[-1] for point in results["grids"]["fedbuff"]])
    assert best[2] < cadence <= best[3]  # "FedBuff needs four runs on average to match it"
    assert round(best[-1], 3) == 0.969


def test_the_expected_best_of_some_runs_is_that_of_all_choices(figure: Any) -> None:
    values = [0.3, 0.9, 0.1, 0.5]
    for count, value in enumerate(figure.best_of(values), 1):
        every = [max(chosen) for chosen in combinations(values, count)]
        assert value == pytest.approx(sum(every) / len(every))
