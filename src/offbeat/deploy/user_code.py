"""The user's own functions, imported by name: a site's data, model and losses."""

import hashlib
import sys
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from offbeat.data.population import Examples, check_examples
from offbeat.errors import InputError
from offbeat.nn.problem import Loss, cross_entropies
from offbeat.training.task import MakeModule, first_line, import_function, load_task, seeded_module

LoadData: TypeAlias = Callable[[str], Examples]  # from the site's name


class UserCode(NamedTuple):
    """The functions that a user provides for a site."""

    load: LoadData
    module: MakeModule
    losses: Loss


def import_user_code(
    data: str | None, module: str | None = None, losses: str | None = None, task: str | None = None
) -> UserCode:
    """Import a site's task or functions; model and losses are in the module of the data unless named."""
    if task is not None:
        if data or module or losses:
            raise InputError("--task has data, model and losses: leave out --data, --module and --losses.")
        loaded = load_task(task, option="--task")

        def make() -> nn.Module:
            seed = torch.initial_seed()  # the module is made after torch was seeded
            return load_task(task, seed, "--task").make_module(seed)

        return UserCode(loaded.site_examples, make, loaded.loss)
    if data is None:
        raise InputError("--task is missing: give package.module:function, which returns the task.")
    load = import_function(data, "--data")
    data_module = data.partition(":")[0]
    make_model = import_function(module or f"{data_module}:module", "--module")
    if losses is None and not hasattr(sys.modules[data_module], "losses"):
        return UserCode(load, make_model, cross_entropies)
    return UserCode(load, make_model, import_function(losses or f"{data_module}:losses", "--losses"))


def load_examples(load: LoadData, name: str) -> Examples:
    """Load a site's examples; any problem is raised as an `InputError`."""
    try:
        given = load(name)
    except Exception as error:
        raise InputError(f"the data of site '{name}' could not be loaded: {first_line(error)}") from error
    data = check_examples(given)
    if not data.total:
        raise InputError(f"the data of site '{name}' is empty: a site needs at least one example.")
    return data


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
