"""A whole run at one version, as one file: tensors, and facts as JSON in the file's metadata.

The file is safetensors, so nothing is ever unpickled, and it is replaced atomically: a kill at any
moment leaves the last whole one.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offbeat.errors import InputError


class Checkpoint(NamedTuple):
    """All that is needed to go on; no generator is among it, since draws have no state."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write, then move into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    tensors = {name: tensor.detach().contiguous() for name, tensor in checkpoint.tensors.items()}
    save_file(_unshared(tensors), part, metadata={"facts": json.dumps(checkpoint.facts)})
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)


def load(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read one back."""
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise InputError(f"there is no checkpoint at {path}: start the run without --resume.") from None
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(
            f"the checkpoint {path} cannot be read ({error}): remove it and start again."
        ) from None
    return Checkpoint(facts, tensors)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The format refuses tensors that share memory: copy all but the first of those."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return result
