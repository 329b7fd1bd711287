"""What a site stores survives a kill, takes effect when the server says so, and is never made up."""

import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.deploy.site import storage
from offbeat.deploy.site.storage import SiteStorage
from offbeat.errors import InputError


def leaves(number: float) -> list[torch.Tensor]:
    return [torch.full((3,), float(number)), torch.tensor([float(number)], dtype=torch.float64)]


def number_of(found: list[torch.Tensor] | None) -> float | None:
    if found is None:
        return None
    assert [leaf.dtype for leaf in found] == [torch.float32, torch.float64]
    return float(found[0][0])


def test_a_site_is_the_same_one_ever_after(tmp_path: Path) -> None:
    first = SiteStorage(tmp_path / "a")
    assert len(first.site_id) == 32
    assert first.site_id != SiteStorage(tmp_path / "b").site_id
    first.close()
    assert SiteStorage(tmp_path / "a").site_id == first.site_id


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"site": 5}', '{"site": "xyz"}', '{"site": "AB"}'])
def test_a_damaged_name_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text(text)
    with pytest.raises(InputError, match=r"site\.json is damaged"):
        SiteStorage(tmp_path)


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_LOCK_TIMEOUT", 0.1)
    held = SiteStorage(tmp_path)
    with pytest.raises(InputError, match="in use"):
        SiteStorage(tmp_path)
    held.close()
    SiteStorage(tmp_path)


def test_a_process_that_is_killed_lets_go(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from offbeat.deploy.site.storage import SiteStorage; "
        "SiteStorage(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    SiteStorage(tmp_path)


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        SiteStorage(tmp_path / "file" / "folder")


def test_what_is_kept_is_for_its_owner_alone(tmp_path: Path) -> None:
    SiteStorage(tmp_path / "a").save("run", 0, 0, leaves(1))
    (path,) = (tmp_path / "a").glob("memory/run/*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


@settings(max_examples=20)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12))
def test_memory_is_that_of_the_last_visit_used(visits: list[tuple[bool, bool, bool]]) -> None:
    """Whatever is kept, used, told late, and however often the site is started again."""
    with tempfile.TemporaryDirectory() as folder:
        kept, told, used = SiteStorage(Path(folder)), -1, -1
        for visit, (uses, tells, restarts) in enumerate(visits):
            if tells:
                told = used
            wanted = None if told < 0 else float(told)
            assert number_of(kept.load("run", 3, told)) == wanted
            assert number_of(kept.load("run", 3, told)) == wanted
            kept.save("run", 3, visit, leaves(visit))
            if uses:
                used = visit
            if restarts:
                kept.close()
                kept = SiteStorage(Path(folder))
        kept.close()


def test_a_visit_that_is_done_again_replaces_what_it_left(tmp_path: Path) -> None:
    kept = SiteStorage(tmp_path)
    kept.save("run", 0, 0, leaves(1))
    kept.save("run", 0, 0, leaves(2))
    assert number_of(kept.load("run", 0, 0)) == 2


def test_what_can_no_longer_be_used_is_let_go(tmp_path: Path) -> None:
    kept = SiteStorage(tmp_path)
    for visit in range(3):
        kept.save("run", 0, visit, leaves(visit))
    kept.load("run", 0, 1)
    names = sorted(path.name for path in tmp_path.glob("memory/run/*"))
    assert names == ["memory.safetensors", "pending-2.safetensors"]


def test_only_some_visits_are_kept_for_later(tmp_path: Path) -> None:
    kept = SiteStorage(tmp_path)
    for visit in range(30):
        kept.save("run", 0, visit, leaves(visit))
    assert len([*tmp_path.glob("memory/run/pending-*")]) == 16
    assert number_of(kept.load("run", 0, 29)) == 29


def test_what_was_lost_is_new_and_not_older(tmp_path: Path) -> None:
    kept = SiteStorage(tmp_path)
    kept.save("run", 0, 0, leaves(0))
    assert number_of(kept.load("run", 0, 0)) == 0
    assert kept.load("run", 0, 4) is None  # visit 4 was used, and is not here
    kept.save("run", 0, 5, leaves(5))
    assert number_of(kept.load("run", 0, 5)) == 5


def test_a_server_that_went_back_is_told(tmp_path: Path) -> None:
    kept = SiteStorage(tmp_path)
    kept.save("run", 0, 5, leaves(5))
    kept.load("run", 0, 5)
    for committed in (3, -1):
        with pytest.raises(InputError, match=r"delete memory/run in the site's folder"):
            kept.load("run", 0, committed)


def test_a_site_that_becomes_another_client_is_told(tmp_path: Path) -> None:
    kept = SiteStorage(tmp_path)
    kept.save("run", 0, 0, leaves(0))
    with pytest.raises(InputError, match=r"client 0 .* client 1"):
        kept.load("run", 1, 0)


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_damage_is_said_and_nothing_is_made_up(damage: bytes | None, tmp_path: Path) -> None:
    kept = SiteStorage(tmp_path)
    kept.save("run", 0, 0, leaves(0))
    path = tmp_path / "memory" / "run" / "pending-0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    for _ in range(2):
        with pytest.raises(InputError, match="damaged"):
            kept.load("run", 0, 0)


@pytest.mark.parametrize("run", ["../../etc", ".", "..", "/", "a/b", "a" * 100, "ä", "-", " "])
def test_a_run_of_any_name_stays_in_the_folder(run: str, tmp_path: Path) -> None:
    kept = SiteStorage(tmp_path / "site")
    kept.save(run, 0, 0, leaves(7))
    assert number_of(kept.load(run, 0, 0)) == 7
    assert {path.name for path in tmp_path.iterdir()} == {"site"}
    (found,) = (tmp_path / "site").rglob("memory.safetensors")
    assert found.parent.parent == tmp_path / "site" / "memory"


def test_what_a_kill_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    kept = SiteStorage(tmp_path)
    part = tmp_path / "memory" / "run" / ".pending-0.safetensors.part"
    part.mkdir(parents=True)
    (part / "pending-0.safetensors").write_bytes(b"half")
    assert kept.load("run", 0, -1) is None
    kept.save("run", 0, 1, leaves(1))
    assert not part.exists()
