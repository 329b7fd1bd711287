"""Trackers get what the run's folder gets, once, and never stop a run."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli.main import main
from offbeat.errors import InputError, error_summary
from offbeat.trackers import (
    SafeTracker,
    TrackedRun,
    TrackedRuns,
    TrackerGroup,
    TrackerOptions,
    check_trackers,
    finite_numbers,
    flatten,
    load_tracked_runs,
    open_trackers,
    run_state,
    save_tracked_runs,
)
from offbeat.training.experiment import SAMPLE_FIELDS
from offbeat.training.folder import read_jsonl

RUN = ("run", "fedbuff", "--rounds", "6", "--eval-every", "2", "--clients", "20", "--concurrency", "10")
RECORD = {"version": 2, "time": 1.5, "accuracy": 0.25, "epsilon": None, "dropped": 0, "fine": True}

# SQLAlchemy 2.1 warns of what MLflow 3.17 asks of it; nothing here can change that.
quiet_mlflow = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Keeping:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.seen: list[Mapping[str, Any]] = []

    def record(self, record: Mapping[str, Any]) -> None:
        self.seen.append(record)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.seen.append(summary["last"])


def test_trackers_are_not_told_what_depends_on_a_secret_sample() -> None:
    record = {"version": 2, "accuracy": 0.5, **dict.fromkeys(SAMPLE_FIELDS, 7)}
    hidden, shown = Keeping(), Keeping()
    for tracker, secret in ((hidden, SAMPLE_FIELDS), (shown, frozenset())):
        group = TrackerGroup((tracker,), secret)
        group.record(record)
        group.close({"last": record})
    assert hidden.seen == 2 * [{"version": 2, "accuracy": 0.5}]
    assert shown.seen == 2 * [record]
    settings = {"tensorboard": None, "dispatch": "allocation", "clip": "0.5"}
    assert open_trackers(TrackerOptions(), "run", settings)[0].secret == SAMPLE_FIELDS
    assert not open_trackers(TrackerOptions(), "run", settings | {"clip": None})[0].secret
    assert not open_trackers(TrackerOptions(), "run", settings | {"dispatch": "poisson"})[0].secret


def test_every_field_of_a_record_is_public_or_known_to_depend_on_the_sample(tmp_path: Path) -> None:
    assert main([*RUN, "--out", str(tmp_path / "run")]) == 0
    (*_, last) = read_jsonl(tmp_path / "run", "records")
    assert last.keys() - SAMPLE_FIELDS == {"version", "time", "accuracy", "loss"}


class Failing:
    """A tracker that works so many times."""

    def __init__(self, good: int = 0) -> None:
        self.good = good
        self.calls = 0

    def record(self, record: Mapping[str, Any]) -> None:
        self.calls += 1
        if self.calls > self.good:
            raise ConnectionError("the line is dead.\nsecond line")

    def close(self, summary: Mapping[str, Any]) -> None:
        self.record(summary)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself shows of a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected(out: Path, name: str) -> list[tuple[int, float]]:
    return [(one["version"], pytest.approx(one[name], rel=1e-6)) for one in read_jsonl(out, "records")]


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield tmp_path / "wandb"
    import wandb

    wandb.teardown()


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows that a run kept offline would send, once its service, which writes behind, has ended."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()
    (path,) = folder.glob("*.wandb")
    rows = []
    for data in entries(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items})
    return rows


def entries(data: bytes) -> Iterator[bytes]:
    """A log of the kind that LevelDB writes, after 7 bytes of its own: blocks of pieces with headers."""
    place, whole, block = 7, b"", 32768
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block  # no header fits there
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def test_only_finite_numbers_are_drawn_and_the_version_is_their_place() -> None:
    found = finite_numbers(RECORD | {"loss": float("nan")})
    assert found == {"time": 1.5, "accuracy": 0.25, "dropped": 0.0}


def test_nested_settings_become_one_level() -> None:
    assert flatten({"a": 1, "b": {"c": None, "d": {"e": "f"}}}) == {"a": 1, "b.c": None, "b.d.e": "f"}


@pytest.mark.parametrize(
    ("summary", "word"),
    [
        ({"finished": True, "error": None, "ended": None}, "finished"),
        ({"finished": False, "error": None, "ended": "the budget is spent."}, "finished"),
        ({"finished": False, "error": None, "ended": None}, "stopped"),
        ({"finished": False, "error": "it diverged.", "ended": None}, "failed"),
    ],
)
def test_how_a_run_stands_follows_from_its_summary(summary: dict[str, Any], word: str) -> None:
    assert run_state(summary) == word


def test_a_tracker_that_fails_is_left_with_one_warning_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Failing(good=1), Failing(good=9)
    several = TrackerGroup((SafeTracker("Bad", bad), SafeTracker("Good", good)))
    with caplog.at_level(logging.WARNING, "offbeat"):
        for _ in range(4):
            several.record(RECORD)
        several.close({})
    assert (bad.calls, good.calls) == (2, 5)
    (warning,) = (one.getMessage() for one in caplog.records)
    assert warning.startswith("Bad failed and receives no more records (ConnectionError: the line is dead);")


def test_a_tracker_that_cannot_close_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    SafeTracker("Bad", Failing()).close({})
    assert len(caplog.records) == 1


def test_an_interrupt_is_not_a_failure_of_a_tracker() -> None:
    class Interrupted(Failing):
        def record(self, record: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SafeTracker("Bad", Interrupted()).record(RECORD)


def test_an_error_without_words_has_its_name() -> None:
    assert error_summary(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize(
    ("wanted", "module", "extra"),
    [
        (TrackerOptions(tensorboard="logs"), "torch.utils.tensorboard", "offbeat[tensorboard]"),
        (TrackerOptions(wandb="project"), "wandb", "offbeat[wandb]"),
        (TrackerOptions(mlflow="sqlite:///x.db"), "mlflow", "offbeat[mlflow]"),
    ],
)
def test_one_that_is_not_installed_is_one_sentence_with_its_extra(
    wanted: TrackerOptions, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # an import of it fails, as if it were absent
    with pytest.raises(InputError) as raised:
        check_trackers(wanted)
    assert f"pip install '{extra}'" in str(raised.value)


@pytest.mark.slow
def test_nothing_is_imported_that_was_not_asked_for(tmp_path: Path) -> None:
    code = (
        "import sys; from offbeat.cli.main import main; "
        f"code = main([*{RUN!r}, '--out', {str(tmp_path / 'run')!r}]); "
        "found = {'tensorboard', 'wandb', 'mlflow'} & set(sys.modules); "
        "sys.exit(code or (str(found) if found else 0))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


def test_a_missing_package_stops_a_run_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main([*RUN, "--wandb", "project"]) == 2
    assert "pip install 'offbeat[wandb]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--mlflow", "https://me:secret@host"], "must not hold a password"),
        (["--wandb", " "], "needs the name of a project"),
        (["--tensorboard", "file"], "is a file"),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_anything_is_written(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@quiet_mlflow
def test_a_store_that_cannot_be_opened_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, "--mlflow", "nowhere://x"]) == 2
    assert "nowhere://x could not be used" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


def test_tensorboard_shows_every_record_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main([*RUN, "--out", str(out), "--tensorboard", str(tmp_path / "logs")]) == 0
    shown = scalars(tmp_path / "logs" / "run")
    assert [version for version, _ in shown["accuracy"]] == [0, 2, 4, 6]
    for name in ("accuracy", "loss", "time", "bytes", "staleness_mean"):
        assert shown[name] == expected(out, name)
    assert "version" not in shown
    assert "epsilon" not in shown


def test_runs_of_the_same_name_get_folders_of_their_own(tmp_path: Path) -> None:
    logs = str(tmp_path / "logs")
    places = []
    for _ in range(3):
        tracker, placed = open_trackers(TrackerOptions(tensorboard=logs), "run", {})
        tracker.close({})
        places.append(placed.tensorboard)
    assert places == [TrackedRun(logs, "run"), TrackedRun(logs, "run-1"), TrackedRun(logs, "run-2")]


def test_tensorboard_shows_a_resumed_run_as_one_without_what_was_computed_twice(tmp_path: Path) -> None:
    wanted, logs = TrackerOptions(tensorboard=str(tmp_path / "logs")), tmp_path / "logs" / "run"
    first, placed = open_trackers(wanted, "run", {"seed": 0})
    for version in (0, 2, 4):
        first.record({"version": version, "accuracy": 0.1})
    first.close({})
    # resumed from a checkpoint at 2 without naming the tracker again; the folder's records come first
    second, again = open_trackers(TrackerOptions(), "run", {"seed": 0}, placed, since=2)
    for version in (0, 2, 4, 6):
        second.record({"version": version, "accuracy": 0.5})
    second.close({})
    assert again == placed
    assert scalars(logs)["accuracy"] == [
        (0, pytest.approx(0.1)),
        (2, pytest.approx(0.1)),
        (4, 0.5),
        (6, 0.5),
    ]


def test_a_run_that_is_resumed_goes_on_in_its_trackers_without_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offbeat import api as command

    out, logs = tmp_path / "run", tmp_path / "logs"
    original = command.run_experiment

    def stopped(*given: Any, **options: Any) -> Any:
        return original(*given, **options | {"stop": _after(3), "save_every": 1})

    monkeypatch.setattr(command, "run_experiment", stopped)
    assert main([*RUN, "--out", str(out), "--tensorboard", str(logs)]) != 0
    assert [version for version, _ in scalars(logs / "run")["accuracy"]] == [0, 2]
    monkeypatch.setattr(command, "run_experiment", original)
    assert main(["run", "--out", str(out), "--resume"]) == 0
    shown = scalars(logs / "run")
    assert [version for version, _ in shown["accuracy"]] == [0, 2, 4, 6]
    assert shown["accuracy"] == expected(out, "accuracy")


def _after(steps: int) -> Any:
    seen = iter(range(steps))
    return lambda: next(seen, None) is None


def test_a_tracker_named_only_on_resuming_is_told_of_the_beginning_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offbeat import api as command

    out, logs = tmp_path / "run", tmp_path / "logs"
    original = command.run_experiment
    monkeypatch.setattr(
        command, "run_experiment", lambda *given, **options: original(*given, **options | {"stop": _after(3)})
    )
    assert main([*RUN, "--out", str(out)]) != 0
    monkeypatch.setattr(command, "run_experiment", original)
    assert main(["run", "--out", str(out), "--resume", "--tensorboard", str(logs)]) == 0
    assert [version for version, _ in scalars(logs / "run")["accuracy"]] == [0, 2, 4, 6]


def test_a_tracker_that_fails_in_the_middle_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    calls = []

    def add_scalar(self: Any, name: str, value: float, version: int) -> None:
        calls.append(version)
        if version:
            raise OSError("the disk is full")

    monkeypatch.setattr(SummaryWriter, "add_scalar", add_scalar)
    out = tmp_path / "run"
    assert main([*RUN, "--out", str(out), "--tensorboard", str(tmp_path / "logs")]) == 0
    assert [record["version"] for record in read_jsonl(out, "records")] == [0, 2, 4, 6]
    assert sorted(set(calls)) == [0, 2]
    assert [one.getMessage() for one in caplog.records] == [
        "TensorBoard failed and receives no more records (OSError: the disk is full); "
        "the run and its folder are not affected."
    ]


@pytest.mark.slow
@quiet_mlflow
def test_mlflow_holds_every_record_setting_and_the_end_of_a_run(tmp_path: Path, store: str) -> None:
    from mlflow import MlflowClient

    out = tmp_path / "run"
    assert main([*RUN, "--out", str(out), "--mlflow", store]) == 0
    place = load_tracked_runs(out).mlflow
    assert place is not None
    client = MlflowClient(tracking_uri=store)
    run = client.get_run(place.run)
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm"] == "fedbuff"
    assert run.data.params["resolved.model_size"] == "4810"
    kept = client.get_metric_history(place.run, "accuracy")
    assert sorted((one.step, one.value) for one in kept) == expected(out, "accuracy")


@pytest.mark.slow
@quiet_mlflow
def test_mlflow_goes_on_with_the_same_run_and_takes_no_record_twice(store: str) -> None:
    from mlflow import MlflowClient

    first, placed = open_trackers(TrackerOptions(mlflow=store), "run", {"seed": 0})
    for version in (0, 2, 4):
        first.record({"version": version, "accuracy": version / 10})
    first.close({"finished": False})
    client = MlflowClient(tracking_uri=store)
    assert placed.mlflow is not None
    identity = placed.mlflow.run
    assert client.get_run(identity).info.status == "KILLED"
    second, again = open_trackers(TrackerOptions(mlflow=store), "run", {"seed": 0}, placed, since=2)
    assert again == placed
    assert client.get_run(identity).info.status == "RUNNING"
    for version in (0, 2, 4, 6):
        second.record({"version": version, "accuracy": 0.9})
    second.close({"error": "it diverged."})
    assert client.get_run(identity).info.status == "FAILED"
    kept = client.get_metric_history(identity, "accuracy")
    assert sorted((one.step, one.value) for one in kept) == [(0, 0.0), (2, 0.2), (4, 0.4), (6, 0.9)]


@quiet_mlflow
def test_a_store_that_was_held_and_is_gone_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = TrackedRuns(mlflow=TrackedRun(f"sqlite:///{tmp_path}/gone.db", "0" * 32))
    tracker, placed = open_trackers(TrackerOptions(), "run", {}, held, since=2)
    assert tracker == TrackerGroup()
    assert placed == held
    (warning,) = (one.getMessage() for one in caplog.records if one.name == "offbeat")
    assert warning.startswith("MLflow receives no records this time:")


@pytest.mark.slow
def test_weights_and_biases_gets_every_record_of_a_run(tmp_path: Path, offline: Path) -> None:
    out = tmp_path / "run"
    assert main([*RUN, "--out", str(out), "--wandb", "project"]) == 0
    (folder,) = offline.glob("offline-run-*")
    place = load_tracked_runs(out).wandb
    assert place is not None
    assert folder.name.endswith(place.run)
    rows = history(folder)
    assert [row["version"] for row in rows] == [0, 2, 4, 6]
    assert [(row["version"], row["accuracy"]) for row in rows] == expected(out, "accuracy")


def test_weights_and_biases_goes_on_after_the_checkpoint_where_it_is_offline(offline: Path) -> None:
    held = TrackedRuns(wandb=TrackedRun("project", "abcdef123456"))
    tracker, placed = open_trackers(TrackerOptions(wandb="project"), "run", {"seed": 0}, held, since=2)
    for version in (0, 2, 4):
        tracker.record({"version": version, "accuracy": 0.5})
    tracker.close({"finished": True, "best_accuracy": 0.5})
    assert placed == held
    (folder,) = offline.glob("offline-run-*-abcdef123456")
    assert [row["version"] for row in history(folder)] == [4]


def test_another_project_begins_another_run(offline: Path) -> None:
    held = TrackedRuns(wandb=TrackedRun("project", "abcdef123456"))
    tracker, placed = open_trackers(TrackerOptions(wandb="other"), "run", {}, held, since=2)
    tracker.record({"version": 0, "accuracy": 0.5})
    tracker.close({})
    assert placed.wandb is not None
    assert placed.wandb.place == "other"
    (folder,) = offline.glob(f"offline-run-*-{placed.wandb.run}")
    assert [row["version"] for row in history(folder)] == [0]


def test_a_service_that_does_not_let_us_in_is_one_sentence(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def refuse(**given: Any) -> Any:
        raise wandb.errors.UsageError("no API key configured. Use `wandb login`\nmore")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(InputError) as raised:
        open_trackers(TrackerOptions(wandb="project"), "run", {})
    assert str(raised.value).startswith("Weights & Biases could not be started (UsageError: no API key")
    assert "\n" not in str(raised.value)


def test_places_are_found_again_in_the_folder_of_a_run(tmp_path: Path) -> None:
    assert load_tracked_runs(tmp_path) == TrackedRuns()
    placed = TrackedRuns(tensorboard=TrackedRun("/logs", "run"), mlflow=TrackedRun("sqlite:////m.db", "1"))
    save_tracked_runs(tmp_path, placed)
    assert load_tracked_runs(tmp_path) == placed


def test_a_run_without_trackers_leaves_no_file_of_them(tmp_path: Path) -> None:
    save_tracked_runs(tmp_path, TrackedRuns())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", '{"tensorboard": 3}', '{"other": ["a", "b"]}', "[]"])
def test_a_file_of_trackers_that_cannot_be_read_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text(text)
    with pytest.raises(InputError, match="cannot be read"):
        load_tracked_runs(tmp_path)


@pytest.mark.parametrize(
    ("given", "kept"), [("sqlite:////x.db", "sqlite:////x.db"), ("http://host:5000", "http://host:5000")]
)
def test_an_address_stays_as_it_is(given: str, kept: str) -> None:
    from offbeat.cli.run import _absolute_uri

    assert _absolute_uri(given) == kept


def test_a_file_of_mlflow_is_kept_by_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offbeat.cli.run import _absolute_uri

    monkeypatch.chdir(tmp_path)
    assert _absolute_uri("sqlite:///runs/m.db") == f"sqlite:///{tmp_path}/runs/m.db"
