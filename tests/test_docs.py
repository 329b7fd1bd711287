"""What the documents show is what the program does: their Python runs, their commands parse."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.cli.options import parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "privacy.md"]


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


def test_the_recipe_for_an_algorithm_works_to_the_letter(tmp_path: Path) -> None:
    """In a copy of the project, the recipe's files and lines are put where it says, and tests follow."""
    for name in ("src", "tests", "docs", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for page in ROOT.iterdir():
        if page.is_file():
            shutil.copy(page, tmp_path)
    method, oracle = (code for where, code in blocks("python") if where.startswith("CONTRIBUTING.md"))
    entry, case = (code for _, code in blocks("py"))
    catalogue, cases = "src/offbeat/algorithms/catalogue.py", "tests/test_trajectories.py"
    recipe = (ROOT / "CONTRIBUTING.md").read_text()
    for place, code in (("src/offbeat/algorithms/signs.py", method), ("tests/oracles/signs.py", oracle)):
        assert f"`{place}`" in recipe
        (tmp_path / place).write_text(code)
    for place, fragment, opening in ((catalogue, entry, "    {\n"), (cases, case, "CASES = {\n")):
        assert f"`{place}`" in recipe
        imported, item = fragment.split("\n\n")
        text = (tmp_path / place).read_text()
        text = text.replace("\nfrom ", f"\n{imported}\nfrom ", 1).replace(opening, opening + item, 1)
        (tmp_path / place).write_text(text)
    tests = ["tests/test_house.py", "tests/test_trajectories.py", "-k", "house or signs"]
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


def test_links_within_the_project_lead_somewhere() -> None:
    pages = [*PAGES, ROOT / "docs" / "design.md"]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"(?:\]\(|src=\")(?!http|#)([^)\"#]+)", page.read_text())
    ]
    assert links
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
