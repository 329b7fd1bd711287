"""The public names: all there, each imported when it is asked for."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import offbeat


@pytest.mark.parametrize("name", offbeat.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(offbeat, name) is not None
    assert name in dir(offbeat)


def test_every_name_is_imported_from_one_module() -> None:
    stub = ast.parse(Path(offbeat.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    assert len(names) == len(set(names)) > 60
    assert sorted(names) == offbeat.__all__
    assert all(alias.asname == alias.name for node in imports for alias in node.names)


def test_a_name_that_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match="module 'offbeat' has no attribute 'trian'"):
        offbeat.trian  # noqa: B018


def test_functions_stay_functions_though_modules_share_their_names() -> None:
    code = (
        "import offbeat.training.evaluate; from offbeat.training.loop import train; import offbeat; "
        "from offbeat import evaluate, checkpoint; "
        "print(type(offbeat.train).__name__, type(evaluate).__name__, checkpoint.__name__, "
        "offbeat.train is train)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "function function offbeat.training.checkpoint True\n"
    assert isinstance(offbeat.train, FunctionType)


def test_the_package_itself_does_not_import_torch() -> None:
    code = "import sys, offbeat; print(offbeat.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{offbeat.__version__} False\n"


def test_a_name_that_has_moved_says_where_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"offbeat\.language is now offbeat\.nn\.language"):
        from offbeat.language import Classifier  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="tokenizer_in is now load_tokenizer"):
        from offbeat.language import tokenizer_in  # noqa: F401


@pytest.mark.parametrize(
    ("name", "command"),
    [("flower_client", "join"), ("flower.client", "join"), ("flower_server", "serve")],
)
def test_a_flower_app_of_an_earlier_version_is_told_the_command(name: str, command: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"offbeat.deploy.{name}")
    said = str(caught.value)
    assert said.startswith(f"the module offbeat.deploy.{name} is gone")
    assert said.endswith(f"with 'offbeat {command}'.")


def test_a_module_that_never_existed_is_reported_as_python_does() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'offbeat\.languages'"):
        importlib.import_module("offbeat.languages")


def test_a_parameter_that_was_renamed_says_its_new_name() -> None:
    with pytest.raises(offbeat.InputError, match="train: the parameter limit is now max_staleness"):
        offbeat.train(None, None, limit=3)  # type: ignore[call-arg, arg-type]
    with pytest.raises(offbeat.InputError, match="Vectorised: the parameter how is now execution"):
        offbeat.Vectorised(None, None, how=None)  # type: ignore[call-arg, arg-type]
