"""The notebooks: they are kept without outputs, run in Jupyter from top to bottom, and learn."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SECONDS = 120  # for one cell, on a machine that has much else to do


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"quick_start", "your_own", "stragglers"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(set(cell.metadata) == set() for cell in book.cells)


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
    told = "".join(output.get("text", "") for output in outputs)
    accuracies = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", told)]
    assert accuracies
    assert accuracies[-1] > 0.7  # four or ten classes: chance is 0.25 at most
