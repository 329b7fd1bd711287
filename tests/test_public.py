"""The public names: all there, each imported when it is asked for."""

import subprocess
import sys
from types import FunctionType

import pytest

import offbeat


@pytest.mark.parametrize("name", offbeat.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(offbeat, name) is not None
    assert name in dir(offbeat)


def test_every_name_has_one_home() -> None:
    homes = [name for names in offbeat._NAMES.values() for name in names]
    assert sorted([*homes, *offbeat._MODULES]) == sorted(offbeat.__all__)


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
    with pytest.raises(offbeat.InputError, match=r"is now offbeat\.nn\.language\.Classifier\."):
        from offbeat.language import Classifier  # noqa: F401
    with pytest.raises(offbeat.InputError, match=r"is now offbeat\.nn\.language\.load_tokenizer\."):
        from offbeat.language import tokenizer_in  # noqa: F401


def test_a_parameter_that_was_renamed_says_its_new_name() -> None:
    with pytest.raises(offbeat.InputError, match="train: the parameter limit is now max_staleness"):
        offbeat.train(None, None, limit=3)  # type: ignore[call-arg, arg-type]
    with pytest.raises(offbeat.InputError, match="Vectorised: the parameter how is now execution"):
        offbeat.Vectorised(None, None, how=None)  # type: ignore[call-arg, arg-type]
