"""Commands that train nothing start without PyTorch."""

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


@pytest.mark.parametrize("words", ["--help", "--version", "run --help", "compare --help"])
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
