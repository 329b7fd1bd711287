"""`offbeat report`, as a person types it."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from offbeat.cli import main
from report_world import change_settings, found, make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make_run(folder / "one")
    make_run(folder / "two", algorithm="fadas")
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("one", "two"):
        shutil.copytree(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_page_is_written_and_its_place_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = found(here / "one")
    assert main(["report", "one", "two", "-o", "page.html"]) == 0
    assert "written to page.html; figures and their numbers are in page-files" in capsys.readouterr().out
    assert (here / "page.html").is_file()
    assert (here / "page-files" / "accuracy-by-steps.csv").is_file()
    assert found(here / "one") == before


def test_a_program_gets_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "one", "--fairness", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["page"] == "report.html"
    assert answer["runs"] == ["one"]
    assert "fairness" in answer["figures"]
    assert answer["size"] == (here / "report.html").stat().st_size


def test_a_run_that_goes_on_can_be_looked_at(here: Path) -> None:
    change_settings(here / "one", rounds=100)
    assert main(["report", "one"]) == 0
    assert "at server step 8 of 100" in (here / "report.html").read_text()


@pytest.mark.parametrize("wrong", [{"clip": 1}, {"partition": 3}, {"seed": "x"}, {"delays": None}])
def test_damaged_settings_are_no_reason_to_give_up(here: Path, wrong: dict[str, object]) -> None:
    change_settings(here / "one", **wrong)
    assert main(["report", "one", "--fairness"]) == 0
    assert "the settings of this run are damaged (" in (here / "report.html").read_text()


def test_the_folder_of_now_has_a_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here / "one")
    assert main(["report", ".", "-o", "../page.html"]) == 0
    assert "<h1>one</h1>" in (here / "page.html").read_text()


BAD = {
    "report": "required: RUN",
    "report absent": "there is no folder absent: name the folder of a run.",
    "report one one": "one is named twice",
    "report .": "is not a run but contains runs: name them, as in 'offbeat report one two'",
    "report one -o page.txt": "does not end in .html: change -o",
    "report one -o page": "does not end in .html",
    "report one -o absent/page.html": "there is no folder absent: make it first",
    "report one -o folder.html": "folder.html is a folder: name another -o",
    "report one -o taken.html": "taken-files is a file",
    "report newer": "newer was written by a newer version of offbeat (9.0): use that one.",
    "report begun": "the run in begun has no records yet",
    "report one other": "one and other cannot be compared, since clients is 12 in one and 24 in the other",
    "report deep": "settings.json is damaged",
    "report one --roundz 3": "unknown option '--roundz'",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    here: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command != "report .":
        for name in ("newer", "begun", "other", "deep"):
            shutil.copytree(here / "one", here / name)
        change_settings(here / "newer", format=99, version="9.0")
        (here / "begun" / "records.jsonl").write_text("")
        change_settings(here / "other", clients=24)
        (here / "deep" / "settings.json").write_text("[" * 100_000)
    (here / "folder.html").mkdir()
    (here / "taken-files").write_text("")
    before = found(here)
    assert main(shlex.split(command)) == 2
    said = capsys.readouterr()
    assert BAD[command] in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert found(here) == before


def test_runs_are_shown_together_anyway_where_that_is_asked_for(here: Path) -> None:
    shutil.copytree(here / "one", here / "other")
    change_settings(here / "other", partition="iid")
    assert main(["report", "one", "other"]) == 2
    assert main(["report", "one", "other", "--anyway"]) == 0


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_to_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "closed").mkdir(mode=0o500)
    assert main(["report", "one", "-o", "closed/page.html"]) == 2
    assert "closed cannot be written to" in capsys.readouterr().err
