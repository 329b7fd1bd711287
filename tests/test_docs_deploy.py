"""The guide to deployment: its commands parse, its settings are read, its links lead somewhere."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from offbeat.cli.main import parse
from offbeat.deploy.config import ServeConfig

PAGE = Path(__file__).parent.parent / "docs" / "deploy.md"
TEXT = PAGE.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every call of `offbeat` that a shell block shows."""
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("offbeat ")]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_guide_parses(command: str) -> None:
    assert parse(shlex.split(command)[1:]).command == command.split()[1]


def test_the_guide_shows_every_command_of_a_deployment() -> None:
    assert {command.split()[1] for command in commands()} == {
        *("new", "serve", "join", "keys", "helper", "replay"),
    }


@pytest.mark.parametrize("block", blocks("toml"))
def test_settings_of_the_guide_are_read(block: str) -> None:
    """Each block adds to an app's settings, with sites enough for it."""
    given = {"task": {"function": "a:b"}, "training": {"clients": 10, "buffer": 5}} | tomllib.loads(block)
    plan = ServeConfig.of(given, Path())
    assert plan.code.function == "a:b"


def test_the_guide_names_every_table_and_key_of_the_settings() -> None:
    from offbeat.deploy import config

    rows = dict(re.findall(r"^\| `\[(\w+)\]` \| (.*) \|$", TEXT, re.MULTILINE))
    assert rows.keys() == config.TABLES.keys()
    for table, row in rows.items():
        known = set(config.table_keys(table)) - {"hand_out"}
        assert known <= set(re.findall(r"`(\w+)`", row)), table


def test_options_that_the_guide_mentions_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    mentioned = re.findall(r"`offbeat (\w+) (--[\w-]+)[^`]*`", TEXT)
    assert mentioned
    for command, option in mentioned:
        with pytest.raises(SystemExit):
            parse([command, "--help"])
        assert option in capsys.readouterr().out


def test_links_of_the_guide_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
