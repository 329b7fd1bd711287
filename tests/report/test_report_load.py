import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import InputError
from offbeat.report.load import read_runs
from report_world import change_settings, lines, make_run, write_lines


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("reading") / "run")


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_is_read_as_it_was_written(run: Path) -> None:
    (read,) = read_runs([run])
    records = lines(run, "records")
    assert read.label == "run"
    for name in ("version", "time", "client_updates", "accuracy", "loss", "bytes"):
        assert read.records[name].tolist() == [record[name] for record in records]
    assert np.isnan(read.records["epsilon"]).all()
    assert read.trace is not None
    assert read.trace.versions == 8
    assert (read.ending.version, read.ending.ended, read.ending.privacy) == (8, None, None)


def test_a_last_line_that_a_kill_cut_short_is_left_out(run: Path) -> None:
    for name in ("records", "trace"):
        path = run / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[:-7])
    (read,) = read_runs([run])
    assert read.trace is not None
    assert (read.trace.versions, read.records["version"][-1]) == (7, 6)
    assert not read.whole  # the checkpoint is of another version


@pytest.mark.parametrize("left", [1, 3, 7])
def test_a_trace_that_ends_before_the_records_is_damaged(run: Path, left: int) -> None:
    write_lines(run, "trace", lines(run, "trace")[:left])
    with pytest.raises(
        InputError, match=f"trace.jsonl is damaged .it ends at server step {left}, .* of 8.: replace"
    ):
        read_runs([run])


def test_long_lines_are_found_at_the_end_of_a_trace(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.files._TAIL_BYTES", 16)
    (read,) = read_runs([run])
    assert read.trace is not None
    assert read.trace.versions == 8


def test_what_is_missing_is_not_known(run: Path) -> None:
    (run / "trace.jsonl").unlink()
    shutil.rmtree(run / "checkpoint")
    write_lines(run, "records", [{"version": 0, "time": 0.0, "client_updates": 0}])
    (read,) = read_runs([run])
    assert read.trace is None
    assert read.ending.unread == "the run has no checkpoint"
    assert np.isnan(read.records["accuracy"]).all()


def test_a_checkpoint_that_cannot_be_read_does_not_matter_much(run: Path) -> None:
    (run / "checkpoint" / "state.safetensors").write_bytes(b"nothing")
    (read,) = read_runs([run])
    assert read.ending.unread == "the run's checkpoint cannot be read"


def test_folders_of_the_first_format_do_not_name_it(run: Path) -> None:
    settings = json.loads((run / "settings.json").read_text())
    assert settings.pop("format") == 1
    (run / "settings.json").write_text(json.dumps(settings))
    read_runs([run])


def test_runs_that_go_by_the_same_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    for place in ("a", "b"):
        shutil.copytree(run, tmp_path / place / "run")
    assert [each.label for each in read_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])] == [
        *("a/run", "b/run")
    ]


def bad(run: Path, kind: str) -> Path:
    match kind:
        case "absent":
            return run.parent / "absent"
        case "file":
            return run / "settings.json"
        case "empty":
            return make_empty(run)
        case "parent":
            return run.parent
        case "newer":
            change_settings(run, format=2, version="9.0.0")
        case "other":
            (run / "settings.json").write_text('{"name": "something else"}')
        case "damaged":
            (run / "settings.json").write_text("{")
        case "no records":
            (run / "records.jsonl").unlink()
        case "empty records":
            (run / "records.jsonl").write_text("")
        case "half a record":
            (run / "records.jsonl").write_text('{"version": 0')
        case "bad record":
            (run / "records.jsonl").write_text(
                '{"version": 0, "time": 0, "client_updates": 0, "loss": "low"}\n'
            )
        case "no record":
            (run / "records.jsonl").write_text('{"loss": 1.0}\n')
        case "list":
            (run / "records.jsonl").write_text("[]\n")
        case "bad trace":
            (run / "trace.jsonl").write_text("what?\n" + (run / "trace.jsonl").read_text())
        case "bad end":
            (run / "trace.jsonl").write_text((run / "trace.jsonl").read_text() + "what?\n")
    return run


def make_empty(run: Path) -> Path:
    (run.parent / "empty").mkdir()
    return run.parent / "empty"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("absent", "there is no folder .*absent: name the folder of a run"),
        ("file", "there is no folder"),
        ("empty", "is not the folder of a run: name a folder that 'offbeat run' wrote"),
        ("parent", "is not a run but contains runs: name them, as in 'offbeat report .*run'"),
        ("newer", r"written by a newer version of offbeat \(9.0.0\): use that one"),
        ("other", "are not those of a run: name the folder of a run"),
        ("damaged", "settings.json is damaged"),
        ("no records", "has no records yet: wait for its first one"),
        ("empty records", "has no records yet"),
        ("half a record", "has no records yet"),
        ("bad record", r"records.jsonl is damaged \(a loss is 'low'\): replace it with an intact copy"),
        ("no record", "records.jsonl is damaged"),
        ("list", "records.jsonl is damaged"),
        ("bad trace", r"trace.jsonl is damaged \(a line is not JSON\)"),
        ("bad end", r"trace.jsonl is damaged \(a line is not JSON\)"),
    ],
)
def test_what_is_not_a_whole_run_is_refused_in_a_sentence(run: Path, kind: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read_runs([bad(run, kind)])
    assert "\n" not in str(caught.value)


def test_a_run_is_named_once(run: Path) -> None:
    with pytest.raises(InputError, match="is named twice: name each run once"):
        read_runs([run, run.parent / "run" / ".." / "run"])
