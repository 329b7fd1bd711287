"""Federated optimisers, one file per paper, and the catalogue of all methods."""

from collections.abc import Callable, Mapping
from typing import Any

from offbeat.algorithms.registry import Catalogue, Cost, Method, Setting, as_method, discover
from offbeat.core import AnyAlgorithm
from offbeat.errors import InputError, unknown_name

__all__ = ["CATALOGUE", "Cost", "Method", "Setting", "build", "current_name", "find", "register"]

CATALOGUE = Catalogue(discover(__name__, __path__))
_FORMER = {method.former_name: name for name, method in CATALOGUE.own.items() if method.former_name}


def current_name(name: str) -> str:
    """The present name of a method; files of earlier versions may have its former name."""
    return _FORMER.get(name, name)


def find(name: str) -> Method:
    """The entry of that name."""
    if name in _FORMER:
        raise InputError(f"the algorithm '{name}' is now called '{_FORMER[name]}': use that name.")
    if name not in CATALOGUE:
        raise unknown_name("algorithm", name, CATALOGUE)
    return CATALOGUE[name]


def build(name: str, setting: Setting, given: Mapping[str, Any]) -> AnyAlgorithm:
    """A method by name, with some hyperparameters given.

    Args:
        name: The name of the method in `CATALOGUE`.
        setting: The quantities on which the rates of some papers' theorems depend.
        given: Hyperparameters by name; those left out have their defaults.
    """
    method = find(name)
    for key in given:
        if key not in method.parameters():
            raise unknown_name(f"parameter of {name}", key, method.parameters())
    return method.build(setting, **given)


def register(name: str, method: Method | Callable[..., AnyAlgorithm], **facts: Any) -> None:
    """Add a method to the catalogue, so that runs, comparisons and deployments find it by its name.

    A package can do the same without a call, by an entry point of the group `offbeat.algorithms`, whose name
    is that of the method.

    Args:
        name: A new name: lower-case letters, digits and hyphens.
        method: A class or function that makes the algorithm from its hyperparameters, or a `Method`.
        **facts: For a class or function, other fields of `Method`, such as `summary`, `dispatch` or `cost`.
    """
    if name in _FORMER:
        raise InputError(f"the name '{name}' belonged to '{_FORMER[name]}': choose another name.")
    CATALOGUE.add(name, as_method(name, method, **facts))
