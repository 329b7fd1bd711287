"""The user's own task at a site, imported by name: its data, model and loss."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from offbeat.data.population import Examples, check_examples
from offbeat.errors import InputError
from offbeat.nn.problem import Loss
from offbeat.training.task import MakeModule, first_line, load_task, seeded_module

LoadData: TypeAlias = Callable[[str], Examples]  # from the site's name


class UserCode(NamedTuple):
    """What a site needs of the user's task."""

    load: LoadData
    module: MakeModule
    losses: Loss
    personal: tuple[str, ...] = ()  # layers that stay at the site


def import_user_code(task: str) -> UserCode:
    """The task that the function `package.module:function` returns, as a site needs it."""
    loaded = load_task(task, option="--task")

    def make() -> nn.Module:
        seed = torch.initial_seed()  # the module is made after torch was seeded
        return load_task(task, seed, "--task").make_module(seed)

    return UserCode(loaded.site_examples, make, loaded.loss, tuple(loaded.personal))


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


def prepare_module(
    module: nn.Module, make: MakeModule, seed: int, frozen: str | None, personal: bool = False
) -> nn.Module:
    """Return a site's model for a run; its frozen weights must have the digest `frozen` of the server's."""
    # frozen weights and personal layers are not sent, so they must follow from the seed
    if personal or frozen_weights_digest(module) is not None:
        module = seeded_module(make, seed)
    if frozen_weights_digest(module) != frozen:
        raise InputError(
            "the frozen weights differ from the server's: load them from copies of one file on both, "
            "or draw them from torch's generator."
        )
    return module
