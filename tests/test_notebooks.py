"""The notebooks: they are kept with outputs and figures, run in Jupyter from top to bottom, and learn."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SECONDS = 120  # for one cell, on a machine that has much else to do


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"researcher", "hospitals", "privacy"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_outputs_and_figures(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(set(cell.metadata) == set() for cell in book.cells)
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    figures = [output for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert len(figures) >= 2
    assert _last_accuracy(outputs) > 0.7
    text = path.read_text()
    assert "\\u001b" not in text  # no colours or progress bars of a terminal
    assert "offbeat.cli" not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# What Jupyter's own client warns of is not ours to mend.
@pytest.mark.filterwarnings("default")
def test_a_notebook_runs_and_learns(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=SECONDS, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert _last_accuracy(outputs) > 0.7  # two or ten classes


def _last_accuracy(outputs: list[Any]) -> float:
    printed = "".join(output.get("text", "") for output in outputs)
    return float(re.findall(r"accuracy (\d\.\d+)", printed)[-1])
