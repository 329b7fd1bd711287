"""The eleventh exploration shows what its records hold, and simulates the project's own Cadence."""

import argparse
import re
from pathlib import Path

import numpy as np
import pytest
from experiments.tuning_free import unit_rules, unit_table
from sklearn.datasets import load_digits

FOLDER = Path(unit_table.__file__).parent
SECTION = (FOLDER / "README.md").read_text().partition("## Eleventh exploration")[2]


def table(number: int) -> list[list[str]]:
    """The cells of one of the section's tables, without its head."""
    block = [part for part in SECTION.split("\n\n") if part.startswith("|")][number]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]]


def printed(draw: str, name: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """What the program prints of a set on a draw: mean, bounded mean, worst, systems failed, runs failed."""
    given = argparse.Namespace(
        records=FOLDER / "unit_rules.jsonl", draw=draw, set=name, words=[], systems=False
    )
    unit_table.show(given)
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [[row[1], row[2], row[3], row[5], row[6]] for row in rows]


def test_the_first_table_is_printed_from_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("first", "second", "third", "fourth", "fifth", "sixth")
    found = [row for name in sets for row in printed("development", name, capsys)]
    rows = table(0)
    assert len(rows) == 14
    assert [row for row in rows if row[1:] not in found] == []


def test_the_second_table_is_printed_from_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    fresh, another, short = (printed(draw, "final", capsys) for draw in ("fresh", "another", "short"))
    rows = table(1)
    assert len(rows) == 9
    for row in rows:
        assert row[1:4] in [[each[0], each[1], each[3]] for each in fresh], row
        assert row[4:7] in [[each[0], each[1], each[3]] for each in another], row
        assert row[7:9] in [[each[0], each[3]] for each in short], row


def test_the_two_known_failures_are_mended_by_as_much_as_the_page_says() -> None:
    rules, systems, best = unit_table.read(FOLDER / "unit_rules.jsonl")
    names = [unit_table.short_name(rule) for rule in rules["fifth"]]
    (steered,) = (
        n for n, name in enumerate(names) if name == "steered, few 3, gain 2, leap 8, evened 1, back -0.4"
    )
    some = {
        each["system"]: each for each in systems if (each["draw"], each["set"]) == ("development", "fifth")
    }
    ahead = [
        np.mean(some[name]["finals"][steered]) - np.mean(best["development", name]["finals"])
        for name in ("raw features", "large embedding")
    ]
    said = re.search(r"(\d\.\d) and (\d\.\d) points ahead of FedBuff", (FOLDER / "README.md").read_text())
    assert said is not None
    assert tuple(f"{value:.1f}" for value in ahead) == said.groups()


def test_the_simulation_takes_the_steps_of_cadence() -> None:
    digits = load_digits()
    stored = {"digits_x": digits.data.astype(np.float32), "digits_y": digits.target}
    assert unit_rules.check(stored) < 1e-12
