"""The environment of Flower's commands."""

from pathlib import Path

import pytest

from offbeat.deploy.flower import commands
from offbeat.deploy.flower.commands import find_command, flower_environment
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
