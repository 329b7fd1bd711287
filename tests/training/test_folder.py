import json
import os
import threading

import pytest
import torch

from offbeat.errors import InputError
from offbeat.training import settings_file
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.folder import RunFolder, check_free, claim_folder, read_jsonl

SETTINGS = {"algorithm": "fedavg", "rounds": 3, "parameters": {"local_lr": 0.1}}


def state(version: int) -> Checkpoint:
    return Checkpoint({"version": version}, {"x": torch.tensor([float(version)])})


def fill(folder: RunFolder, versions: range) -> None:
    for version in versions:
        folder.append("records", {"version": version})
        folder.append("trace", {"version": version, "tasks": [[version]]})


def versions(path, name: str) -> list[int]:
    return [line["version"] for line in read_jsonl(path, name)]


def test_a_resumed_run_has_what_its_checkpoint_knew_and_nothing_after(tmp_path):
    with RunFolder.begin(tmp_path / "a", SETTINGS) as folder:
        assert folder.version is None
        fill(folder, range(2))
        folder.save(state(1))
        assert folder.version == 1
        fill(folder, range(2, 5))
    with (tmp_path / "a" / "records.jsonl").open("ab") as file:
        file.write(b'{"version": 5, "ti')
    assert versions(tmp_path / "a", "records") == [0, 1, 2, 3, 4]  # the torn line is left out
    with RunFolder.resume(tmp_path / "a", SETTINGS) as folder:
        assert folder.version == 1
        assert torch.equal(folder.resumed.tensors["x"], torch.tensor([1.0]))
        fill(folder, range(2, 4))
    for name in ("records", "trace"):
        assert versions(tmp_path / "a", name) == [0, 1, 2, 3]


def test_a_run_without_a_checkpoint_begins_again_from_nothing(tmp_path):
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        fill(folder, range(3))
    with RunFolder.resume(tmp_path, SETTINGS) as folder:
        assert folder.resumed is None
        fill(folder, range(1))
    assert versions(tmp_path, "records") == versions(tmp_path, "trace") == [0]


def test_lines_are_on_the_disk_before_the_checkpoint_that_counts_them(tmp_path, monkeypatch):
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        fill(folder, range(2))

        def look(path, saved):
            for name, length in saved.facts["lengths"].items():
                assert (tmp_path / f"{name}.jsonl").stat().st_size == length > 0

        monkeypatch.setattr("offbeat.training.checkpoint.save", look)
        folder.save(state(1))


@pytest.mark.parametrize("name", ["records", "trace"])
def test_lines_that_went_missing_are_noticed(tmp_path, name):
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        fill(folder, range(2))
        folder.save(state(1))
    file = tmp_path / f"{name}.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{name}.jsonl is shorter than when the checkpoint was taken"):
        RunFolder.resume(tmp_path, SETTINGS)


def test_a_number_that_json_does_not_have_is_never_written(tmp_path):
    with RunFolder.begin(tmp_path, SETTINGS) as folder, pytest.raises(ValueError, match="not JSON compliant"):
        folder.append("records", {"loss": float("nan")})


def test_one_run_at_a_time_and_a_failed_start_lets_go(tmp_path):
    with RunFolder.begin(tmp_path, SETTINGS):
        with pytest.raises(InputError, match="in use by another run"):
            RunFolder.resume(tmp_path, SETTINGS)
        with pytest.raises(InputError, match="in use by another run"):
            check_free(tmp_path)
    with pytest.raises(InputError, match="holds a run already"):
        RunFolder.begin(tmp_path, SETTINGS)
    with RunFolder.resume(tmp_path, SETTINGS):
        pass


def test_asking_whether_a_place_is_free_writes_nothing(tmp_path):
    check_free(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["records.jsonl", "trace.jsonl", "checkpoint", "failure.json"])
def test_files_of_somebody_else_are_not_written_over(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(InputError, match=f"has a '{name}' that is not of a run"):
        RunFolder.begin(tmp_path, SETTINGS)
    assert (tmp_path / name).read_text() == "precious"


def test_claims_made_at_the_same_time_are_different(tmp_path):
    claimed = []
    threads = [
        threading.Thread(target=lambda: claimed.extend(claim_folder(tmp_path, "run") for _ in range(10)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name for path in claimed} == {f"run-{number}" for number in range(1, 41)}


def test_settings_are_read_back_with_version_and_commit(tmp_path):
    settings_file.write(tmp_path, SETTINGS)
    known = settings_file.read(tmp_path)
    assert {name: known[name] for name in SETTINGS} == SETTINGS
    assert known.keys() - SETTINGS.keys() == {"version", "commit", "format"}
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_settings_are_on_the_disk_before_they_are_in_their_place(tmp_path, monkeypatch):
    synced = []

    def sync(number):
        assert (tmp_path / "settings.json").exists() == bool(synced)  # the file first, then its folder
        synced.append(os.fstat(number).st_size)

    monkeypatch.setattr("os.fsync", sync)
    settings_file.write(tmp_path, SETTINGS)
    assert synced[0] == (tmp_path / "settings.json").stat().st_size
    assert len(synced) == 2


def test_the_differences_between_settings_are_named(tmp_path):
    settings_file.write(tmp_path, SETTINGS)
    settings_file.compare(tmp_path, SETTINGS)
    other = {"algorithm": "fedadam", "rounds": 4, "parameters": {"beta1": 0.5}}
    with pytest.raises(InputError) as caught:
        settings_file.compare(tmp_path, other)
    for difference in (
        "algorithm was fedavg and is now fedadam",
        "rounds was 3 and is now 4",
        "parameters.local_lr was 0.1 and is now not set",
        "parameters.beta1 was not set and is now 0.5",
    ):
        assert difference in str(caught.value)


def test_going_on_with_other_code_is_worth_a_warning(tmp_path, caplog):
    settings_file.write(tmp_path, SETTINGS)
    settings_file.compare(tmp_path, SETTINGS)
    assert not caplog.records
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": "0.0.1"}))
    settings_file.compare(tmp_path, SETTINGS)
    assert "was begun by version 0.0.1" in caplog.text


def test_a_line_is_taken_back_with_the_state_before_it(tmp_path):
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        fill(folder, range(4))
        folder.save(state(3))
    with RunFolder.resume(tmp_path, SETTINGS) as folder:
        folder.take_back("records", folder.resumed)
        assert versions(tmp_path, "records") == [0, 1, 2]
        folder.append("records", {"version": 9})
    with RunFolder.resume(tmp_path, SETTINGS) as folder:  # as after a kill: nothing was saved since
        assert folder.version == 3
        assert versions(tmp_path, "records") == [0, 1, 2]
        assert versions(tmp_path, "trace") == [0, 1, 2, 3]


def test_a_kill_while_a_line_is_taken_back_leaves_a_whole_run(tmp_path, monkeypatch):
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        fill(folder, range(4))
        folder.save(state(3))
    with RunFolder.resume(tmp_path, SETTINGS) as folder, monkeypatch.context() as patch:
        patch.setattr("offbeat.training.folder._open_truncated", lambda path, length: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            folder.take_back("records", folder.resumed)
    with RunFolder.resume(tmp_path, SETTINGS):
        assert versions(tmp_path, "records") == [0, 1, 2]


def test_a_later_end_is_all_that_changes_in_the_settings(tmp_path):
    with RunFolder.begin(tmp_path, SETTINGS):
        before = settings_file.read(tmp_path)
    settings_file.lengthen(tmp_path, 8)
    assert settings_file.read(tmp_path) == before | {"rounds": 8}
