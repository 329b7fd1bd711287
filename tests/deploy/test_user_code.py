"""A user's functions are imported by name, or one sentence says why not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offbeat.deploy.config import make_site_module
from offbeat.errors import InputError
from offbeat.training.task import import_function, load_task

TASK = """
import torch
value = 3
def load(name): return torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
def module(): return torch.nn.Linear(3, 2)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_in_the_current_folder_is_found(here: Path) -> None:
    (here / "clinic_a.py").write_text(TASK)
    assert import_function("clinic_a:load", "--task")("x")[0].shape == (2, 3)


def test_a_function_in_a_package_is_found(here: Path) -> None:
    (here / "clinic_b").mkdir()
    (here / "clinic_b" / "task.py").write_text(TASK)
    assert callable(import_function("clinic_b.task:module", "--task"))


@pytest.mark.parametrize("text", ["", "load", "clinic:", ":load", ":"])
def test_a_name_without_both_halves_is_refused(text: str, here: Path) -> None:
    with pytest.raises(InputError, match=r"package\.module:function"):
        import_function(text, "--task")


def test_a_module_that_is_not_there_is_named_with_the_folder(here: Path) -> None:
    with pytest.raises(InputError, match=r"no module 'clinic_c' for --task.*") as raised:
        import_function("clinic_c.task:load", "--task")
    assert str(here) in str(raised.value)


def test_a_module_that_needs_another_says_which(here: Path) -> None:
    (here / "clinic_d.py").write_text("import not_installed_anywhere")
    with pytest.raises(InputError, match=r"'clinic_d' of --task cannot be imported.*not_installed_anywhere"):
        import_function("clinic_d:load", "--task")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("raise ValueError('first\\nsecond')", "ValueError: first."),
        ("raise SystemExit(3)", "SystemExit: 3."),
        ("def (", "SyntaxError"),
        ("raise KeyError", "KeyError."),
    ],
)
def test_a_module_that_raises_says_its_first_line(text: str, word: str, here: Path) -> None:
    (here / "clinic_e.py").write_text(text)
    with pytest.raises(InputError, match=word) as raised:
        import_function("clinic_e:load", "--task")
    assert "\n" not in str(raised.value)
    assert "second" not in str(raised.value)


@pytest.mark.parametrize("name", ["..", ".x", "a..b", "a b", "a/b"])
def test_a_name_that_no_module_has_is_one_sentence(name: str, here: Path) -> None:
    with pytest.raises(InputError):
        import_function(f"{name}:load", "--task")


def test_a_function_that_is_missing_or_is_none_is_refused(here: Path) -> None:
    (here / "clinic_f.py").write_text(TASK)
    with pytest.raises(InputError, match="has no 'laod'"):
        import_function("clinic_f:laod", "--task")
    with pytest.raises(InputError, match="is an int, not a function"):
        import_function("clinic_f:value", "--task")


def test_a_site_has_the_data_the_model_and_the_loss_of_the_task(here: Path) -> None:
    (here / "clinic_g.py").write_text(
        "import offbeat\n" + TASK + "def losses(outputs, targets): return 5\n"
        "def task(): return offbeat.LearningTask(module=module, data=load, loss=losses)\n"
    )
    own = load_task("clinic_g:task")
    assert own.site_examples("a").inputs.shape == (2, 3)
    assert isinstance(make_site_module("clinic_g:task"), torch.nn.Linear)
    assert own.loss(None, None) == 5


def test_a_function_that_returns_no_task_is_refused(here: Path) -> None:
    (here / "clinic_h.py").write_text(TASK)
    with pytest.raises(InputError, match=r"^--task 'clinic_h:module' returned a value of type Linear"):
        load_task("clinic_h:module", option="--task")
