"""The program as a process: what it loads, and what it does on terminals and streams of all kinds."""

import os
import subprocess
import sys

import pytest

CODE = """
import sys
from offbeat.__main__ import main
try:
    code = main()
except SystemExit as exit:
    code = exit.code or 0
print(code, sorted({"torch", "scipy", "numpy"} & sys.modules.keys()), file=sys.stderr)
"""


def loaded(words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words.split()], capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "words", ["--help", "--version", "-V", "help", "help run", "run --help", "compare --help"]
)
def test_help_loads_no_numerical_library(words: str) -> None:
    assert loaded(words) == "0 []"


@pytest.mark.parametrize(
    "words",
    [
        "algorithms",
        "algorithms cadence --json",
        "schedule --rounds 5",
        "advise --clients 10 --updates 50",
        "privacy --noise 1 --delta 1e-6 --max-participations 3",
        "privacy --epsilon 2 --delta 1e-7 --population 1e7 --cohort 5000 --rounds 2000",
    ],
)
def test_commands_that_train_nothing_do_not_load_torch(words: str) -> None:
    code, modules = loaded(words).split(" ", 1)
    assert code == "0"
    assert "torch" not in modules


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line of bash, in which `offbeat` is this one."""
    program = f'offbeat() {{ {sys.executable} -m offbeat "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def test_a_schedule_is_drawn_with_the_characters_that_the_terminal_has() -> None:
    command = "offbeat schedule --clients 30 --rounds 9"
    plain, rich = (shell(command, PYTHONIOENCODING=name).stdout for name in ("ascii", "utf-8"))
    assert "####" in plain
    assert rich.replace("█", "#") == plain


@pytest.mark.parametrize("redirect", ["| head -1", ">&- 2>&-"])
def test_a_closed_standard_output_is_not_an_error_with_a_traceback(redirect: str) -> None:
    done = shell(f"offbeat schedule --clients 30 --rounds 9 {redirect}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["offbeat algorithms", "offbeat schedule --clients 30 --rounds 9"])
def test_a_narrow_terminal_cuts_no_digits(command: str) -> None:
    narrow, wide = (shell(command, COLUMNS=width).stdout for width in ("40", "400"))
    assert "…" not in narrow + wide
    numbers = [line.split()[:6] for line in wide.splitlines() if line.startswith(("cadence ", "time "))]
    assert numbers
    assert all(words in [line.split()[:6] for line in narrow.splitlines()] for words in numbers)
