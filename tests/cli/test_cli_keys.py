"""`offbeat keys`: what it writes, what it tells, and what it refuses."""

import json
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from offbeat.cli import main

NEW = "keys --hosts localhost,127.0.0.1 --sites hospital-a,hospital-b"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_says_who_is_to_have_what(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{NEW} --out ours --helper-hosts helper.example")) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("ours: which files go where; certificates expire on ")
    for words in (
        "server ca.crt, server.pem",
        "helper helper.pem",
        "site hospital-b sites/hospital-b: its key",
    ):
        assert words in told
    assert "none ca.key" in told
    assert (here / "ours" / "sites" / "hospital-b" / "key").exists()
    assert [each.name for each in here.iterdir()] == ["ours"]


def test_a_program_is_told_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{NEW} --days 10 --json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == "keys"
    assert told["sites"] == ["hospital-a", "hospital-b"]
    left = datetime.fromisoformat(told["until"]) - datetime.now(UTC)
    assert abs(left - timedelta(days=10)) < timedelta(hours=1)


def test_a_site_is_added(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(NEW)) == 0
    capsys.readouterr()
    assert main(shlex.split("keys --add-site hospital-c")) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "server sites/hospital-c/key.pub" in told
    assert "helper sites/hospital-c/key.pub, beside those of the other sites; restart it" in told
    assert "site hospital-c sites/hospital-c: its key" in told
    assert "server.pem" not in told
    assert (here / "keys" / "sites" / "hospital-c" / "key").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("keys --sites a", "--hosts is missing"),
        ("keys --hosts localhost", "--sites is missing"),
        ("keys --hosts localhost --sites a,", "'' cannot be the name of a site"),
        ("keys --hosts localhost:80 --sites a", "'localhost:80' is not a host"),
        ("keys --hosts localhost --sites a --helper-hosts _", "'_' is not a host"),
        ("keys --hosts localhost --sites a --days 0", "cannot be valid for 0 days"),
        ("keys --hosts localhost --sites a --days soon", "'soon' is not a whole number"),
        ("keys --add-site a", "keys has no ca.crt"),
        ("keys --add-site a --hosts localhost", "--hosts is for new keys"),
        ("keys --add-site a --helper-hosts localhost", "--helper-hosts is for new keys"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_nothing_is_written(
    here: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(words)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert sentence in told.err
    assert len(told.err.splitlines()) == 1
    assert list(here.iterdir()) == []


def test_keys_are_never_written_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(NEW)) == 0
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert main(shlex.split(NEW)) == 2
    assert "keys already exists" in capsys.readouterr().err
    assert main(shlex.split("keys --add-site hospital-a")) == 2
    assert "'hospital-a' already has a key in keys" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


def test_a_site_is_revoked_and_certificates_are_renewed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(f"{NEW} --days 3")) == 0
    before = (here / "keys" / "server.pem").read_bytes()
    capsys.readouterr()
    assert main(["keys", "--revoke-site", "hospital-b"]) == 0
    assert capsys.readouterr().out.startswith("delete sites/hospital-b at the server")
    assert [path.name for path in (here / "keys" / "sites").iterdir()] == ["hospital-a"]
    assert main(["keys", "--renew", "--days", "20", "--json"]) == 0
    until = datetime.fromisoformat(json.loads(capsys.readouterr().out)["until"])
    assert timedelta(days=19) < until - datetime.now(UTC) < timedelta(days=21)
    assert (here / "keys" / "server.pem").read_bytes() != before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--renew --add-site c", "--add-site and --renew exclude each other"),
        ("--renew --hosts a", "--hosts is for new keys: leave it out with --renew"),
        ("--revoke-site a --days 3", "--days is for new keys: leave it out with --revoke-site"),
        ("--revoke-site nobody", "has no site 'nobody'"),
        ("--renew --out nothing", "has no authority to renew certificates with"),
    ],
)
def test_a_change_of_keys_that_cannot_be_made_is_one_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(NEW)) == 0
    capsys.readouterr()
    assert main(shlex.split(f"keys {words}")) == 2
    assert sentence in capsys.readouterr().err
