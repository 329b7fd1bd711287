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


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_only_the_owner_can_read_who_contributed_to_a_private_run(tmp_path):
    private = SETTINGS | {"clip": "1.0"}
    names = ("records.jsonl", "trace.jsonl")

    def modes(path):
        return {(path / name).stat().st_mode & 0o777 for name in names}

    with RunFolder.begin(tmp_path / "private", private) as folder:
        fill(folder, range(2))
        assert modes(folder.path) == {0o600}
        folder.save(state(1))
    for name in names:  # as an earlier version left them
        (tmp_path / "private" / name).chmod(0o644)
    with RunFolder.resume(tmp_path / "private", private) as folder:
        assert modes(folder.path) == {0o600}
        folder.take_back("records", folder.resumed)
        assert modes(folder.path) == {0o600}
    with RunFolder.begin(tmp_path / "plain", SETTINGS) as folder:
        assert modes(folder.path) == {0o666 & ~_umask()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_run_without_a_checkpoint_and_without_a_step_begins_again_from_nothing(tmp_path):
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        fill(folder, range(1))
    with RunFolder.resume(tmp_path, SETTINGS) as folder:
        assert folder.resumed is None
        fill(folder, range(1))
    assert versions(tmp_path, "records") == versions(tmp_path, "trace") == [0]


def two_checkpoints(path, settings=SETTINGS):
    with RunFolder.begin(path, settings) as folder:
        for version in range(3):
            fill(folder, [version])
            folder.save(state(version))
        fill(folder, [3])


HARMS = {
    "deleted": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "emptied": lambda path: path.write_bytes(b""),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_run_continues_from_the_checkpoint_before_a_lost_one_and_says_so(tmp_path, harm, caplog):
    two_checkpoints(tmp_path)
    HARMS[harm](tmp_path / "checkpoint" / "state.safetensors")
    with RunFolder.resume(tmp_path, SETTINGS) as folder:
        assert folder.resumed.facts["version"] == folder.version == 1
        assert "continues from the checkpoint before it, of version 1" in folder.notice
        assert folder.notice in caplog.text
    assert versions(tmp_path, "records") == versions(tmp_path, "trace") == [0, 1]


@pytest.mark.parametrize("harm", HARMS)
def test_a_run_that_lost_both_checkpoints_does_not_begin_again_silently(tmp_path, harm):
    two_checkpoints(tmp_path)
    for name in ("state", "previous"):
        HARMS[harm](tmp_path / "checkpoint" / f"{name}.safetensors")
    with pytest.raises(InputError, match=r"no earlier one that can be read: restore it from a backup"):
        RunFolder.resume(tmp_path, SETTINGS)
    assert versions(tmp_path, "trace") == [0, 1, 2, 3]


def test_a_private_run_does_not_go_back(tmp_path):
    """It would release other sums with the noise that it used before."""
    private = SETTINGS | {"clip": 1.0}
    two_checkpoints(tmp_path, private)
    HARMS["flipped"](tmp_path / "checkpoint" / "state.safetensors")
    with pytest.raises(InputError, match="counts what this private run has released"):
        RunFolder.resume(tmp_path, private)


@pytest.mark.parametrize("name", ["records", "trace"])
def test_lines_that_were_changed_are_noticed(tmp_path, name):
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        fill(folder, range(2))
        folder.save(state(1))
    file = tmp_path / f"{name}.jsonl"
    file.write_bytes(file.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(InputError, match=f"{name}.jsonl has changed since the checkpoint was taken"):
        RunFolder.resume(tmp_path, SETTINGS)


def test_settings_that_were_changed_are_noticed(tmp_path):
    settings_file.write(tmp_path, SETTINGS | {"resolved": {"noise": 1.25}})
    file = tmp_path / "settings.json"
    file.write_text(file.read_text().replace("1.25", "0.25"))
    with pytest.raises(InputError, match="damaged or was edited"):
        settings_file.read(tmp_path, verify=True)


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
    with pytest.raises(InputError, match="already contains a run"):
        RunFolder.begin(tmp_path, SETTINGS)
    with RunFolder.resume(tmp_path, SETTINGS):
        pass


def test_asking_whether_a_place_is_free_writes_nothing(tmp_path):
    check_free(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["records.jsonl", "trace.jsonl", "checkpoint", "failure.json"])
def test_files_of_somebody_else_are_not_written_over(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(InputError, match=f"contains a '{name}' but no settings of a run"):
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


def test_a_run_from_before_a_setting_existed_has_its_default(tmp_path):
    settings_file.write(tmp_path, SETTINGS)
    settings_file.compare(tmp_path, SETTINGS | {"noise_source": "server"})
    with pytest.raises(InputError, match="noise_source was server and is now helper"):
        settings_file.compare(tmp_path, SETTINGS | {"noise_source": "helper"})


def test_going_on_with_other_code_is_worth_a_warning(tmp_path, caplog):
    settings_file.write(tmp_path, SETTINGS)
    settings_file.compare(tmp_path, SETTINGS)
    assert not caplog.records
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings_file.read(tmp_path) | {"version": "0.0.1"}))
    settings_file.compare(tmp_path, SETTINGS)
    assert "was started by 0.0.1" in caplog.text


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
        patch.setattr(
            "offbeat.training.folder._open_truncated", lambda path, length, mode: pytest.fail("killed")
        )
        with pytest.raises(pytest.fail.Exception):
            folder.take_back("records", folder.resumed)
    with RunFolder.resume(tmp_path, SETTINGS):
        assert versions(tmp_path, "records") == [0, 1, 2]


def test_a_later_end_is_all_that_changes_in_the_settings(tmp_path):
    with RunFolder.begin(tmp_path, SETTINGS):
        before = settings_file.read(tmp_path)
    settings_file.revise(tmp_path, rounds=8)
    assert settings_file.read(tmp_path) == before | {"rounds": 8}
