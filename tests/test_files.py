"""A folder is there whole or not at all."""

from pathlib import Path

import pytest

from offbeat.errors import InputError
from offbeat.files import atomic_dir, write_new


def test_a_folder_appears_when_it_is_full(tmp_path: Path) -> None:
    place = tmp_path / "new" / "folder"
    with atomic_dir(place, 0o750) as part:
        write_new(part / "deep" / "file", b"text")
        assert not place.exists()
    assert (place / "deep" / "file").read_bytes() == b"text"
    assert place.stat().st_mode & 0o777 == 0o750
    assert [each.name for each in place.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_stays_of_a_folder_that_was_not_filled(tmp_path: Path, error: type[BaseException]) -> None:
    def fill() -> None:
        with atomic_dir(tmp_path / "folder", 0o700) as part:
            write_new(part / "file", b"half")
            raise error

    with pytest.raises(error):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    for name in ("folder", "empty"):
        (tmp_path / name).mkdir()
    for name in ("file", "folder/file"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("folder", "empty", "file", "dangling"):
        with pytest.raises(InputError, match=f"{name} already exists"), atomic_dir(tmp_path / name, 0o700):
            pass
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "folder/file").read_text() == (tmp_path / "file").read_text() == "mine"


def test_whoever_was_quicker_keeps_the_place(tmp_path: Path) -> None:
    place = tmp_path / "folder"
    with pytest.raises(InputError, match="already exists"), atomic_dir(place, 0o700):
        write_new(place / "file", b"theirs")
    assert (place / "file").read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [place]


def test_a_place_that_cannot_be_written_to_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="cannot be created"),
        atomic_dir(tmp_path / "file" / "folder", 0o700),
    ):
        pass


def test_a_secret_file_is_its_owners_alone(tmp_path: Path) -> None:
    write_new(tmp_path / "secret", b"", secret=True)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "secret", b"another", secret=True)
