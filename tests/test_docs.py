"""What the documents show is what the program does: their Python runs, their commands parse."""

import re
import shlex
from pathlib import Path

import pytest

from offbeat.cli.options import parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


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
    where: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code, where, "exec"), {"__name__": "__main__"})
    accuracies = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", capsys.readouterr().out)]
    assert bool(accuracies) == ("accuracy" in code)
    assert not accuracies or accuracies[-1] > 0.5  # ten classes: chance is 0.1


def test_the_readme_shows_how_to_train() -> None:
    assert any(where.startswith("README.md") and "offbeat.train(" in code for where, code in blocks("python"))


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
