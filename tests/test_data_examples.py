"""The example programs with data on the disk and with a Hugging Face data set run and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*words: str, folder: Path, source: str | None = None) -> subprocess.CompletedProcess[str]:
    program = [str(EXAMPLES / words[0])] if source is None else ["-c", source]
    limits = {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, *program, *words[1:]],
        cwd=folder,
        env=os.environ | limits,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def accuracy(text: str) -> float:
    (found,) = re.findall(r"accuracy (\d\.\d+)", text)
    return float(found)


def own_lines(name: str) -> int:
    """The lines of module and task, without what makes the data."""
    text = (EXAMPLES / name).read_text()
    body = text[
        text.index("class ") : text.index("def limit_memory" if name == "on_disk.py" else "def encode")
    ]
    return len([line for line in body.splitlines() if line.strip()])


@pytest.mark.parametrize("name", ["on_disk.py", "hugging_face.py"])
def test_a_task_takes_less_than_thirty_lines(name: str) -> None:
    assert own_lines(name) < 30


@pytest.mark.slow
def test_personal_heads_are_better_early_where_clients_have_few_classes(tmp_path: Path) -> None:
    done = run("personal.py", "--rounds", "16", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    means = {" ".join(row[:2]): float(row[3]) for row in rows if row[2] == "16"}
    assert means["personal heads"] > means["one model"] + 0.1


@pytest.mark.slow
def test_a_transformer_learns_from_a_hugging_face_data_set(tmp_path: Path) -> None:
    done = run("hugging_face.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert accuracy(done.stdout) > 0.9
    assert (tmp_path / "runs" / "cadence-reviews-1" / "clients.json").is_file()


@pytest.mark.slow
def test_a_network_learns_from_an_array_larger_than_its_memory(tmp_path: Path) -> None:
    assert run("on_disk.py", "make", ".", folder=tmp_path).returncode == 0
    size = (tmp_path / "images.npy").stat().st_size
    assert size > 1_000_000_000
    done = run("on_disk.py", "train", ".", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert accuracy(done.stdout) > 0.8
    # the limit binds: the same program fails if it reads the array into memory
    text = (EXAMPLES / "on_disk.py").read_text()
    assert 'mmap_mode="r"' in text
    failed = run(
        "on_disk.py", "train", ".", folder=tmp_path, source=text.replace('mmap_mode="r"', "mmap_mode=None")
    )
    assert failed.returncode == 1
    assert "Unable to allocate" in failed.stderr
