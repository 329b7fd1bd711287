"""Where what clients keep may live, and which of these places has room.

Without a choice the first of these that fits is taken: the GPU that computes, RAM, a file. It fits
the first two if it takes at most half of what is free: checkpoints copy it, and the work needs some.
A place that was named is taken if what is needed is free there. What is needed is counted for all
clients, though those that never come take nothing.
"""

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from offbeat import trees
from offbeat.errors import InputError, unknown
from offbeat.population.mapped import Filed, slot_size
from offbeat.population.memory import Held, Memories
from offbeat.population.room import free_device, free_ram
from offbeat.trees import Tree

_FILE = "memory"


@dataclass(frozen=True)
class InRam:
    """In the computer's memory."""


@dataclass(frozen=True)
class OnDevice:
    """In the memory of the device that computes."""


@dataclass(frozen=True)
class Mapped:
    """In a file in this folder; without one, in a temporary file that is gone with the run."""

    folder: Path | None = None


@dataclass(frozen=True)
class Anywhere:
    """Where it fits; if that is a file, in this folder or a temporary one."""

    folder: Path | None = None


Home: TypeAlias = InRam | OnDevice | Mapped | Anywhere

_NAMED: dict[str, Home] = {"auto": Anywhere(), "ram": InRam(), "device": OnDevice(), "mapped": Mapped()}
HOMES = tuple(_NAMED)


def parse_home(name: str) -> Home:
    """A home by the name it has on the command line."""
    if name not in _NAMED:
        raise unknown("memory", name, HOMES)
    return _NAMED[name]


def within(home: Home, folder: Path) -> Home:
    """The same, with its file in this folder unless it names one itself."""
    if isinstance(home, Mapped | Anywhere) and home.folder is None:
        return replace(home, folder=folder)
    return home


def make_memories(
    home: Home, initial: Tree, clients: int, device: torch.device, *, mapped: bool | None = None
) -> Memories:
    """Memory for so many clients; `mapped` says how the checkpoint to be loaded keeps it.

    Nothing is written yet, but what does not fit is refused.
    """
    need = clients * sum(leaf.nbytes for leaf in trees.leaves(initial))
    if not need:
        return Held(initial)
    place = _choose(home, need, device, mapped) if isinstance(home, Anywhere) else home
    if mapped is not None and mapped != isinstance(place, Mapped):
        kept, fit = ("in a file", "Mapped(folder)") if mapped else ("as tensors", "InRam()")
        raise InputError(f"this checkpoint keeps the clients' memory {kept}: resume it with memory={fit}.")
    match place:
        case InRam():
            _check(need, free_ram(), clients, "in RAM", "'--memory mapped'")
            return Held(initial, "cpu", device)
        case OnDevice():
            _check(need, free_device(device), clients, f"on {device}", "'--memory mapped'")
            return Held(initial, device, device)
        case Mapped(folder):
            path = folder / _FILE if folder else None
            slots = 2 if path else 1  # rows that the last checkpoint needs stand beside newer ones
            there = path.stat().st_blocks * 512 if path and path.exists() else 0
            need = slots * clients * slot_size(initial)
            _check(need, _free_disk(path) + there, clients, "on the disk", "a folder on a larger one")
            return Filed(initial, clients, path, device)


def _choose(
    home: Anywhere, need: int, device: torch.device, mapped: bool | None
) -> InRam | OnDevice | Mapped:
    if mapped:
        return Mapped(home.folder)
    if device.type != "cpu" and 2 * need <= free_device(device):
        return OnDevice()
    if mapped is False or 2 * need <= free_ram():
        return InRam()
    return Mapped(home.folder)


def _check(need: int, free: int, clients: int, where: str, instead: str) -> None:
    if need > free:
        raise InputError(
            f"what {clients:,} clients keep takes {_size(need)} {where} and {_size(free)} is free: "
            f"use {instead}, fewer clients or a smaller model."
        )


def _free_disk(path: Path | None) -> int:
    """Bytes that a file there may take, those it has already included."""
    if path is None:
        path = Path(tempfile.gettempdir()) / _FILE
    there = next(each for each in path.absolute().parents if each.exists())
    taken = path.stat().st_blocks * 512 if path.is_file() else 0
    return shutil.disk_usage(there).free + taken


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
