"""Environment, configuration and app of Flower's commands."""

import tomllib
from pathlib import Path

import pytest

from offbeat.deploy.flower import commands
from offbeat.deploy.flower.commands import (
    SuperLinkAddress,
    find_command,
    flower_environment,
    write_flower_app,
    write_flower_home,
)
from offbeat.errors import InputError


def test_nothing_is_reported_unless_the_user_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK", "FLWR_HOME"):
        monkeypatch.delenv(name, raising=False)
    own = flower_environment(tmp_path)
    assert own["FLWR_TELEMETRY_ENABLED"] == "0"
    assert own["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert own["FLWR_HOME"] == str(tmp_path)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    assert flower_environment(tmp_path)["FLWR_TELEMETRY_ENABLED"] == "1"


def test_commands_start_each_other_from_where_we_are(tmp_path: Path) -> None:
    found = Path(find_command("flwr"))
    assert flower_environment(tmp_path)["PATH"].split(":")[0] == str(found.parent)


def test_a_missing_command_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.shutil, "which", lambda name, path=None: None)
    with pytest.raises(
        InputError, match=r"Flower's command flwr was not found: install 'offbeat\[deploy\]'\."
    ):
        find_command("flwr")


@pytest.mark.parametrize("authority", [None, Path("/keys with spaces/ca.crt")])
def test_the_connection_is_as_flower_reads_it(tmp_path: Path, authority: Path | None) -> None:
    write_flower_home(tmp_path / "home", SuperLinkAddress("127.0.0.1:8000", authority))
    read = tomllib.loads((tmp_path / "home" / "config.toml").read_text())["superlink"]
    how = {"insecure": True} if authority is None else {"root-certificates": str(authority)}
    assert read == {"default": "serve", "serve": {"address": "127.0.0.1:8000"} | how}


def test_the_app_is_told_what_it_declares_whatever_the_paths_are(tmp_path: Path) -> None:
    told = {"settings": 'a "b" \\ c\n', "folder": "d", "resume": True, "authenticated": False, "sites": ""}
    app, file = write_flower_app(tmp_path, told)
    assert tomllib.loads(file.read_text()) == told
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"].keys() == told.keys()
    assert project["project"]["dependencies"] == []
    for place in project["tool"]["flwr"]["app"]["components"].values():
        module, _, attribute = place.partition(":")
        text = (app / f"{module.replace('.', '/')}.py").read_text()
        assert f"{attribute} = " in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's own command line, of its dependencies
def test_flower_takes_the_app(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    app, _ = write_flower_app(tmp_path, {})
    _, warnings = load_and_validate(app / "pyproject.toml")
    assert warnings == []
    assert build_fab_from_disk(app)
