"""The optional packages, or one sentence on how to get them."""

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
