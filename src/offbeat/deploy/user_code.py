"""The user's own functions, found by name: data, model and losses of a site."""

import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat.data.partition import LazyBlocks
from offbeat.data.population import Examples, Population, Steps
from offbeat.errors import InputError
from offbeat.nn.problem import Loss

LoadData: TypeAlias = Callable[[str], Examples]  # by the site's name
MakeModule: TypeAlias = Callable[[], nn.Module]


class UserCode(NamedTuple):
    """What a site brings itself."""

    load: LoadData
    module: MakeModule
    losses: Loss


def import_function(text: str, what: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; the current folder is searched too."""
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute):
        raise InputError(f"{what} '{text}' names no function: write it as package.module:function.")
    home = _import_module(name, what)
    try:
        found = getattr(home, attribute)
    except AttributeError:
        raise InputError(
            f"{what} '{text}' is not there: the module '{name}' has no '{attribute}'; "
            "write it, or name another function."
        ) from None
    if not callable(found):
        raise InputError(f"{what} '{text}' is a {type(found).__name__}, not a function: name a function.")
    function: Callable[..., Any] = found
    return function


def import_user_code(data: str, module: str | None = None, losses: str | None = None) -> UserCode:
    """A site's functions; the model and the losses are beside the data unless they are named."""
    load = import_function(data, "--data")
    home = data.partition(":")[0]
    make = import_function(module or f"{home}:module", "--module")
    if losses is None and not hasattr(sys.modules[home], "losses"):
        return UserCode(load, make, cross_entropies)
    return UserCode(load, make, import_function(losses or f"{home}:losses", "--losses"))


def cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss where none is named: the cross entropy of each example."""
    return cross_entropy(outputs, targets, reduction="none")


def load_examples(load: LoadData, name: str) -> Examples:
    """A site's examples, or one sentence on why there are none."""
    try:
        given = load(name)
    except Exception as error:
        raise InputError(f"the data of site '{name}' could not be loaded: {_first_line(error)}") from error
    data = Population(given, LazyBlocks(1, 1, 1), Steps(1, 1)).data  # or complains of what it is
    if not data.total:
        raise InputError(f"the data of site '{name}' is empty: a site needs at least one example.")
    return data


def make_module(make: MakeModule) -> nn.Module:
    """A site's model, or one sentence on why there is none."""
    try:
        module = make()
    except Exception as error:
        raise InputError(f"the model could not be made: {_first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"the model is a {type(module).__name__}: return a torch.nn.Module.")
    return module


def seeded_module(make: MakeModule, seed: int) -> nn.Module:
    """A module whose first weights follow from a seed, unless it takes them from elsewhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_module(make)


def frozen_weights_digest(module: nn.Module) -> str | None:
    """What tells weights that are not trained from others; they do not travel. None: all are trained."""
    kept = [(name, weight) for name, weight in module.named_parameters() if not weight.requires_grad]
    found = hashlib.sha256()
    for name, weight in kept:
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        found.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest() if kept else None


def prepare_module(module: nn.Module, make: MakeModule, seed: int, told: str | None) -> nn.Module:
    """A site's model, for a run of that seed; what is not trained in it must be as at the server."""
    if frozen_weights_digest(module) is not None:  # these do not travel, so they must follow from the seed
        module = seeded_module(make, seed)
    if frozen_weights_digest(module) != told:
        raise InputError(
            "the weights that are not trained are not the server's here: let both take them from copies of "
            "one file, or draw them from torch's generator."
        )
    return module


def _import_module(name: str, what: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(
                f"there is no module '{error.name}' for {what}: it was looked for in {here} "
                "and among installed packages."
            ) from None
        raise InputError(f"the module '{name}' of {what} cannot be imported: {_first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"the module '{name}' of {what} cannot be imported: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """An error's name and the first line of what it says."""
    lines = str(error).strip().splitlines()
    said = f": {lines[0]}" if lines else ""
    return f"{type(error).__name__}{said}".rstrip(".") + "."
