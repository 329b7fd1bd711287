"""A setting is written once: its option, key, check and documentation follow."""

import argparse
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli.main import main
from offbeat.cli.options import add_settings, option_name
from offbeat.data.client_store import MEMORY_BACKENDS
from offbeat.data.datasets import NAMES
from offbeat.deploy.config import ServeConfig, table_keys
from offbeat.engines.execution import EXECUTIONS
from offbeat.errors import InputError, naming_settings
from offbeat.nn import models
from offbeat.nn.problem import Precision
from offbeat.renamed import SETTINGS, VALUES
from offbeat.training import experiment
from offbeat.training.experiment import Experiment
from offbeat.training.schema import Interval, ValueKind, keys_of, setting, settings_of

DOCS = Path(__file__).parent.parent.parent / "docs"


def load_documentation() -> Any:
    spec = importlib.util.spec_from_file_location("settings_page", DOCS / "settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Longer(Experiment):
    """An experiment with one setting more."""

    warmup_steps: int | None = setting(
        None, "N", "server steps of warm-up", group="training", table="training", within="[1, 2^31)"
    )


def test_a_new_setting_is_written_once() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, "training", Longer)
    assert parser.parse_args(["--warmup-steps", "3"]).warmup_steps == 3
    assert "server steps of warm-up" in parser.format_help()
    assert keys_of(Longer, "training")["warmup_steps"].kind is ValueKind.INTEGER
    with pytest.raises(InputError, match=r"^warmup_steps must be at least 1 and below 2\^31, not 0\.$"):
        Longer(warmup_steps=0)
    with (
        naming_settings(option_name),
        pytest.raises(InputError, match=r"^--warmup-steps must be at least 1 and below 2\^31, not 0\.$"),
    ):
        Longer(warmup_steps=0)
    made = Longer(warmup_steps=3)
    assert Longer.from_settings(made.settings()) == made
    with pytest.raises(InputError, match="warmup_steps is 'many'"):
        Longer.from_settings(made.settings() | {"warmup_steps": "many"})
    assert "| `warmup_steps` | whole number, at least 1 and below 2^31 |" in load_documentation().page(Longer)


def test_the_page_on_settings_is_made_from_them() -> None:
    page = load_documentation()
    assert (DOCS / "settings.md").read_text() == page.page()


def test_the_choices_are_those_that_are_implemented() -> None:
    assert set(experiment.DATASETS) == set(NAMES)
    assert set(experiment.MODELS) == set(models.NAMES)
    assert set(experiment.EXECUTIONS) == set(EXECUTIONS)
    assert set(experiment.PRECISIONS) == {each.name.lower() for each in Precision}
    assert set(experiment.STORES) == set(MEMORY_BACKENDS)


@pytest.mark.parametrize(
    ("text", "words", "inside", "outside"),
    [
        ("[1, 2^31)", "at least 1 and below 2^31", [1, 2**31 - 1], [0, 2**31, math.nan]),
        ("(0, inf)", "above 0 and finite", [1e-300, 1e300], [0.0, math.inf, math.nan]),
        ("[0, inf]", "at least 0", [0, math.inf], [-1, math.nan]),
        ("(0, 1]", "above 0 and at most 1", [0.5, 1], [0, 1.1]),
    ],
)
def test_an_interval_says_what_is_inside(
    text: str, words: str, inside: list[float], outside: list[float]
) -> None:
    interval = Interval(text)
    assert str(interval) == words
    assert all(value in interval for value in inside)
    assert not any(value in interval for value in outside)


@pytest.mark.parametrize("former", sorted(set(SETTINGS) - {"amplified", "most_bytes", "most_norm", "bound"}))
def test_an_option_of_before_names_the_present_one(former: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"--{former.replace('_', '-')}", "1"]) == 2
    present = f"--{SETTINGS[former].replace('_', '-')}"
    assert capsys.readouterr().err == (f"offbeat: --{former.replace('_', '-')} is now called {present}.\n")
    assert SETTINGS[former] in settings_of(Experiment)


@pytest.mark.parametrize(
    ("setting", "former", "present"),
    [(setting, *each) for setting, values in VALUES.items() for each in values.items()],
)
def test_a_value_of_before_names_the_present_one(
    setting: str, former: str, present: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", f"--{setting}", former]) == 2
    assert capsys.readouterr().err == f"offbeat: --{setting} {former} is now called {present}.\n"
    settings = Experiment(**{setting: present}).settings()
    assert Experiment.from_settings(settings | {setting: former}).settings() == settings


@pytest.mark.parametrize(("table", "former"), [("training", "limit"), ("network", "most_norm")])
def test_a_key_of_before_names_the_present_one(table: str, former: str) -> None:
    given = {"task": {"function": "a:b"}, "training": {"clients": 4}}
    given[table] = given.get(table, {}) | {former: 1}
    with pytest.raises(InputError, match=rf"^{former} of \[{table}\] is now called {SETTINGS[former]}\.$"):
        ServeConfig.of(given, Path())
    assert SETTINGS[former] in table_keys(table)


def test_a_run_of_before_is_read_with_the_present_names() -> None:
    own = Experiment(max_staleness=4, eval_every=7, dispatch="round-refill", algorithm="fedcm").settings()
    former = {name: key for key, name in SETTINGS.items()}
    before = {former.get(name, name): value for name, value in own.items()}
    before |= {"dispatch": "rounds", "algorithm": "fedavg-m"}
    assert "limit" in before
    assert Experiment.from_settings(before).settings() == own


def test_reproduce_names_the_program_that_took_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "fadas-table2"]) == 2
    assert "this command is now 'python -m experiments'" in capsys.readouterr().err
