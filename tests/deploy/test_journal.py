"""What was accepted is there after a restart; what was not whole is not."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy_world import ramdisk
from offbeat.core import Task
from offbeat.deploy.server.journal import AcceptedUpload, Journal
from offbeat.deploy.server.run import lock_run_folder
from offbeat.errors import InputError

FORM = (("float64", (3,)), ("int64", ()))


def upload(client: int = 0, visit: int = 0, payload: bytes = bytes(32)) -> AcceptedUpload:
    return AcceptedUpload(Task(client, 5, visit), 12.5, FORM, payload)


def again(journal: Journal, folder: Path) -> Journal:
    journal.close()
    return Journal(folder)


def test_an_accepted_upload_is_read_back_after_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    one = upload(payload=bytes(range(10)) + b"\n\n" + bytes(20))
    journal.accept(one)
    journal = again(journal, tmp_path)
    assert journal.tasks == {one.task}
    assert journal.read(one.task) == one
    journal.drop([one.task, Task(9, 9, 9)])
    journal = again(journal, tmp_path)
    assert not journal.tasks
    journal.close()


def test_what_was_being_written_was_never_accepted(tmp_path: Path) -> None:
    (tmp_path / "0-5-0.upload.part").write_bytes(b"half")
    journal = Journal(tmp_path)
    assert not journal.tasks
    assert not list(tmp_path.glob("*.part"))
    journal.close()


@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "other"])
def test_a_damaged_upload_is_one_sentence(tmp_path: Path, harm: str) -> None:
    journal = Journal(tmp_path)
    journal.accept(upload(payload=b"x" * 32))
    path = tmp_path / "0-5-0.upload"
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    elif harm == "other":
        journal.accept(upload(client=1))
        path.write_bytes((tmp_path / "1-5-0.upload").read_bytes())
    else:
        path.write_bytes(data[:-1] if harm == "cut" else data[:-1] + b"y")
    with pytest.raises(InputError, match="restore it"):
        journal.read(Task(0, 5, 0))
    journal.close()


def test_the_run_has_one_name_for_good(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    name = journal.run
    journal = again(journal, tmp_path / "a")
    other = Journal(tmp_path / "b")
    assert journal.run == name != other.run
    journal.close()
    other.close()


# an epoch's line, a restart after so many bytes of the last line, or a cut before an epoch
Step = tuple[str, int]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), st.integers(1, 3)),
            st.tuples(st.just("torn"), st.integers(0, 40)),
            st.tuples(st.just("cut"), st.integers(1, 3)),
        ),
        max_size=40,
    )
)
def test_the_last_whole_line_of_an_epoch_counts(steps: list[Step]) -> None:
    with ramdisk() as folder:
        play(folder, steps)


def play(folder: Path, steps: list[Step]) -> None:
    journal = Journal(folder)
    known: dict[int, dict[str, Any]] = {}
    for count, (step, number) in enumerate(steps):
        if step == "keep":
            journal.append(number, {"count": count})
            known[number] = {"count": count, "epoch": number}
        elif step == "torn":
            journal.close()
            with (folder / "kept.jsonl").open("ab") as file:
                file.write(b'{"count": 99, "epoch": 1, "and": "so on and so on"'[:number])
            journal = Journal(folder)
        else:
            journal.discard(before=number)
            known = {epoch: line for epoch, line in known.items() if epoch >= number}
        for epoch in (1, 2, 3):
            assert journal.last(epoch) == known.get(epoch)
    journal.close()


def test_lines_do_not_pile_up() -> None:
    with ramdisk() as folder:
        journal = Journal(folder)
        journal.append(1, {"count": -1})
        for count in range(2000):
            journal.append(2, {"count": count})
        assert (folder / "kept.jsonl").read_bytes().count(b"\n") <= 300
        assert journal.last(1) == {"count": -1, "epoch": 1}
        assert journal.last(2) == {"count": 1999, "epoch": 2}
        journal.close()


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="because the disk is full: free some space"):
        journal.accept(upload())
    with pytest.raises(InputError, match="because the disk is full: free some space"):
        journal.append(1, {})
    monkeypatch.undo()
    journal = again(journal, tmp_path)
    assert not journal.tasks
    journal.close()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        Journal(tmp_path / "file" / "journal")


def test_updates_are_for_the_eyes_of_their_owner_alone(tmp_path: Path) -> None:
    Journal(tmp_path / "run" / "journal").close()
    assert (tmp_path / "run" / "journal").stat().st_mode & 0o077 == 0
    with lock_run_folder(tmp_path / "run"):
        assert (tmp_path / "run" / "flower").stat().st_mode & 0o077 == 0
