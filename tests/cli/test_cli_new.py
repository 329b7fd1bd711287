"""`offbeat new`: what it writes, what it tells, and what it refuses."""

import json
import shlex
from pathlib import Path

import pytest

from offbeat.cli import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_says_how_to_start_the_app(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "my-app"]) == 0
    told = capsys.readouterr().out
    assert "\n  cd my-app\n  offbeat serve serve.toml\n  offbeat join --superlink " in told
    assert "my_app/task.py" in told
    assert (here / "my-app" / "my_app" / "task.py").exists()
    assert [each.name for each in here.iterdir()] == ["my-app"]


def test_it_goes_where_it_is_told_to(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "my-app", "--folder", "a place", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == "a place/my-app"
    assert told["package"] == "my_app"
    assert all((here / told["folder"] / name).is_file() for name in told["files"])
    assert main(["new", "other", "--folder", "a place"]) == 0
    assert "cd 'a place/other'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("new", "the following arguments are required: NAME"),
        ("new My_App", "'My_App' cannot be the name of an app"),
        ("new ../up", "cannot be the name of an app"),
        ("new json", "'json' has another meaning"),
        ("new my-app other", "unexpected argument 'other'"),
        ("new my-app --folder there/file", "cannot be created"),
        ("new there", "there already exists"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_nothing_is_written(
    here: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "there").mkdir()
    (here / "there" / "file").write_text("")
    before = sorted(here.rglob("*"))
    assert main(shlex.split(words)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert sentence in told.err
    assert len(told.err.splitlines()) == 1
    assert sorted(here.rglob("*")) == before
