"""The ServerApp: what its run config means."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.server.run import ServeRequest
from offbeat.errors import InputError


@pytest.fixture
def ask_of(recwarn: pytest.WarningsRecorder) -> Callable[[Mapping[str, Any]], ServeRequest]:
    """Importing Flower warns of what it imports itself."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from offbeat.deploy.flower import server
    return server.request_from_config


def test_it_takes_what_the_command_gives(
    ask_of: Callable[[Mapping[str, Any]], ServeRequest], tmp_path: Path
) -> None:
    settings = tmp_path / "serve.toml"
    settings.touch()
    config = {
        "settings": str(settings),
        "folder": str(tmp_path / "run"),
        "resume": True,
        "authenticated": True,
    }
    assert ask_of(config) == ServeRequest(settings, tmp_path / "run", True, True)


def test_an_apps_own_settings_are_found_beside_it(
    ask_of: Callable[[Mapping[str, Any]], ServeRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, here = tmp_path / "app", tmp_path / "here"
    for folder in (app, here):
        folder.mkdir()
        (folder / "serve.toml").touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.path", [])
    assert ask_of({"settings": "serve.toml", "folder": ""}).settings == here / "serve.toml"
    monkeypatch.setattr("sys.path", [str(app)])
    asked = ask_of({"settings": "serve.toml", "folder": "", "resume": False})
    assert asked.settings == app / "serve.toml"
    assert asked.folder == here / "runs" / "serve-2"
    assert not asked.authenticated


def test_a_run_to_go_on_with_has_to_be_named(ask_of: Callable[[Mapping[str, Any]], ServeRequest]) -> None:
    with pytest.raises(InputError, match="resume needs the folder"):
        ask_of({"resume": True})


def test_the_app_can_be_made(ask_of: Callable[[Mapping[str, Any]], ServeRequest]) -> None:
    from offbeat.deploy.flower.server import server_app

    assert type(server_app()).__name__ == "ServerApp"
