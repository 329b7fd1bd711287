"""The user's own functions, imported by name: a site's data, model and losses."""

import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from offbeat.data.partition import LazyBlocks
from offbeat.data.population import Examples, Population, Steps
from offbeat.errors import InputError
from offbeat.nn.problem import Loss, cross_entropies

LoadData: TypeAlias = Callable[[str], Examples]  # from the site's name
MakeModule: TypeAlias = Callable[[], nn.Module]


class UserCode(NamedTuple):
    """The functions that a user provides for a site."""

    load: LoadData
    module: MakeModule
    losses: Loss


def import_function(text: str, option: str) -> Callable[..., Any]:
    """Import the function that `package.module:function` names; the current folder is searched as well."""
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute):
        raise InputError(f"{option} '{text}' does not name a function: write package.module:function.")
    module = _import_module(name, option)
    try:
        found = getattr(module, attribute)
    except AttributeError:
        raise InputError(
            f"{option} '{text}' does not exist: the module '{name}' has no '{attribute}'; "
            "define it, or name another function."
        ) from None
    if not callable(found):
        raise InputError(f"{option} '{text}' is a {type(found).__name__}, not a function: name a function.")
    function: Callable[..., Any] = found
    return function


def import_user_code(data: str, module: str | None = None, losses: str | None = None) -> UserCode:
    """Import a site's functions; model and losses are in the module of the data unless they are named."""
    load = import_function(data, "--data")
    data_module = data.partition(":")[0]
    make = import_function(module or f"{data_module}:module", "--module")
    if losses is None and not hasattr(sys.modules[data_module], "losses"):
        return UserCode(load, make, cross_entropies)
    return UserCode(load, make, import_function(losses or f"{data_module}:losses", "--losses"))


def load_examples(load: LoadData, name: str) -> Examples:
    """Load a site's examples; any problem is raised as an `InputError`."""
    try:
        given = load(name)
    except Exception as error:
        raise InputError(f"the data of site '{name}' could not be loaded: {_first_line(error)}") from error
    data = Population(given, LazyBlocks(1, 1, 1), Steps(1, 1)).data  # raises if these are not examples
    if not data.total:
        raise InputError(f"the data of site '{name}' is empty: a site needs at least one example.")
    return data


def make_module(make: MakeModule) -> nn.Module:
    """Make a site's model; any problem is raised as an `InputError`."""
    try:
        module = make()
    except Exception as error:
        raise InputError(f"the model could not be created: {_first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"the model is a {type(module).__name__}: return a torch.nn.Module.")
    return module


def seeded_module(make: MakeModule, seed: int) -> nn.Module:
    """Make a module whose initial weights follow from a seed, unless it loads them from elsewhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_module(make)


def frozen_weights_digest(module: nn.Module) -> str | None:
    """Return a digest of the frozen weights, which are not sent; None if all weights are trained."""
    frozen = [(name, weight) for name, weight in module.named_parameters() if not weight.requires_grad]
    digest = hashlib.sha256()
    for name, weight in frozen:
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else None


def prepare_module(module: nn.Module, make: MakeModule, seed: int, frozen: str | None) -> nn.Module:
    """Return a site's model for a run; its frozen weights must have the digest `frozen` of the server's."""
    if frozen_weights_digest(module) is not None:  # these are not sent, so they must follow from the seed
        module = seeded_module(make, seed)
    if frozen_weights_digest(module) != frozen:
        raise InputError(
            "the frozen weights differ from the server's: load them from copies of one file on both, "
            "or draw them from torch's generator."
        )
    return module


def _import_module(name: str, option: str) -> Any:
    current = str(Path.cwd())
    if current not in sys.path:
        sys.path.insert(0, current)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(
                f"there is no module '{error.name}' for {option}: neither in {current} nor among the "
                "installed packages."
            ) from None
        raise InputError(
            f"the module '{name}' of {option} cannot be imported: {_first_line(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(
            f"the module '{name}' of {option} cannot be imported: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    message = f": {lines[0]}" if lines else ""
    return f"{type(error).__name__}{message}".rstrip(".") + "."
