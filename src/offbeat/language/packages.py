"""The optional packages without their chatter, or one sentence on how to get them."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from offbeat.errors import InputError


def package(name: str) -> Any:
    """A package of the extra `language`."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"transformers need the package {error.name}: install it with pip install 'offbeat[language]'."
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """A stretch without progress bars and advice of `transformers`, which then speaks as it did before."""
    voice = package("transformers.utils.logging")
    level, bars = voice.get_verbosity(), voice.is_progress_bar_enabled()
    voice.set_verbosity_error()
    voice.disable_progress_bar()
    try:
        yield
    finally:
        voice.set_verbosity(level)
        if bars:
            voice.enable_progress_bar()
