"""A checkpoint: the state of a run at one version as one file of tensors, with facts as JSON in its metadata.

The file is in the safetensors format, so nothing is unpickled. It contains a digest of its contents, and is
replaced atomically, so a complete checkpoint remains when the process is killed. If the clients' memory is in
a file of its own, the checkpoint contains only the positions in that file.
"""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offbeat.errors import InputError
from offbeat.files import disk_full, fsync_dir


class Checkpoint(NamedTuple):
    """Everything that is needed to resume a run."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


def save(path: Path | str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint and move it into place.

    Args:
        path: The file to write.
        checkpoint: What a snapshot's `checkpoint()` returned.
    """
    path = Path(path)
    tensors = {name: tensor.detach().contiguous() for name, tensor in checkpoint.tensors.items()}
    facts = json.dumps(checkpoint.facts)
    # safetensors writes to a random name first; in a folder of its own, leftovers can be removed
    part = path.parent / f".{path.name}.part" / path.name
    shutil.rmtree(part.parent, ignore_errors=True)
    part.parent.mkdir(parents=True)
    try:
        save_file(_unshared(tensors), part, metadata={"facts": facts, "digest": _digest(facts, tensors)})
    except SafetensorError as error:
        full = "No space left" in str(error) or disk_full(path.parent)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(part)) from error
    # secrets, such as the key of private noise, are readable by the owner only
    part.chmod(0o600 if checkpoint.facts.get("secret") else path.parent.stat().st_mode & 0o666)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    part.parent.rmdir()
    fsync_dir(path.parent)


def load(path: Path | str, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: The file to read.
        device: Where the tensors are put.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _digest(metadata["facts"], tensors) != metadata["digest"]:
            raise ValueError("its contents have changed since it was written")
        facts = json.loads(metadata["facts"])
    except FileNotFoundError:
        raise InputError(f"there is no checkpoint at {path}: name a file that was saved.") from None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, SafetensorError | OSError | ValueError) else "it is incomplete"
        raise InputError(
            f"the checkpoint {path} cannot be read ({reason}): remove it, and begin again from version 0."
        ) from None
    # Copy: a mapped file is aligned differently from memory, which can change the last bit of a sum.
    return Checkpoint(facts, {name: tensor.to(device, copy=True) for name, tensor in tensors.items()})


def load_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint, without its tensors; its digest is not checked."""
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
        if not isinstance(facts, dict):
            raise ValueError("its facts are not an object")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"the checkpoint {path} cannot be read ({error}): restore a good copy.") from None
    return facts


def _digest(facts: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy all but the first of tensors that share memory, which the format does not allow."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return result
