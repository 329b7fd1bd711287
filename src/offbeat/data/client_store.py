"""What clients store between visits: tensors in RAM or on a device, or a file far larger than RAM.

Unless a backend is named, the first that fits is used: the GPU that computes, RAM, a file. The first two
fit if at most half of the free memory is needed, since checkpoints copy the store and the work needs
memory, too. A named backend is used if it has enough free memory. The need is counted for all clients,
though clients that never take part use none.

The file is an array of slots; a table in RAM says which slot holds which client's memory. Rows are read
and written one at a time, by plain reads and writes, since pages of a memory mapping would count as
resident memory. A checkpoint holds only the table. What a checkpoint refers to is never overwritten while
it may still be needed: a client's first write after `save` goes to a new slot, and its former slot is used
again only when a newer checkpoint is on the disk (`confirm`). Rows are on the disk before `save` returns
the table that refers to them. So the rows of the last checkpoint are complete whenever a run is killed, and
the file has at most two slots for each client. A slot is whole pages, so that writing one never touches a
neighbour. A checksum for each row detects a row that is not the one that was written.
"""

import os
import shutil
import sys
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from offbeat import trees
from offbeat.errors import InputError, setting_name, unknown_name
from offbeat.trees import Tree


class ClientStore(Protocol):
    """The memory of each client; a client that never wrote has the initial one."""

    @property
    def mapped(self) -> bool:
        """Whether the memory is in a file that checkpoints refer to."""
        ...

    def read(self, client: int) -> Tree:
        """The memory of a client."""
        ...

    def write(self, clients: Sequence[int], stacked: Tree) -> None:
        """Store the memories that accepted tasks computed."""
        ...

    def save(self) -> tuple[list[int], list[Tensor]]:
        """The clients that wrote, and columns with a row for each from which `load` restores their memory."""
        ...

    def confirm(self) -> None:
        """The result of the last `save` is on the disk, and nothing older will be loaded again."""
        ...

    def load(self, clients: Sequence[int], columns: Sequence[Tensor]) -> None:
        """Restore what `save` returned."""
        ...


class TensorStore:
    """Tensors in RAM or on a device; every checkpoint has all of them."""

    mapped = False

    def __init__(
        self, initial: Tree, home: torch.device | str = "cpu", device: torch.device | str = "cpu"
    ) -> None:
        self._shape = trees.structure(initial)
        self._initial = trees.leaves(initial)
        self._home = home
        self._device = device  # to which memory is moved when it is read
        self._rows: dict[int, list[Tensor]] = {}

    def read(self, client: int) -> Tree:
        leaves = self._rows.get(client, self._initial)
        return trees.unflatten(self._shape, [leaf.to(self._device) for leaf in leaves])

    def write(self, clients: Sequence[int], stacked: Tree) -> None:
        self._put(clients, trees.leaves(stacked))

    def save(self) -> tuple[list[int], list[Tensor]]:
        clients = sorted(self._rows)
        rows = [self._rows[client] for client in clients]
        return clients, [torch.stack(column) for column in zip(*rows, strict=True)]

    def confirm(self) -> None:
        pass

    def load(self, clients: Sequence[int], columns: Sequence[Tensor]) -> None:
        self._rows = {}
        self._put(clients, columns)

    def _put(self, clients: Sequence[int], columns: Sequence[Tensor]) -> None:
        if columns:
            for row, client in enumerate(clients):
                self._rows[client] = [column[row].to(self._home, copy=True) for column in columns]


_PAGE = 4096


class FileStore:
    """Rows in a file; without a path, in a temporary file that is deleted with the run."""

    mapped = True

    def __init__(
        self, initial: Tree, clients: int, path: Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._shape = trees.structure(initial)
        self._initial = [leaf.to(device) for leaf in trees.leaves(initial)]
        self._path = path
        self._device = device
        self._stride = slot_size(initial)
        self._slots = np.full(clients, -1, np.int32)
        self._sums = np.zeros(clients, np.uint32)
        self._fixed = np.zeros(clients, bool)  # whether a saved table refers to the client's slot
        self._end = 0  # slots in the file
        self._free: list[int] = []
        self._retired: list[int] = []  # slots that only older tables refer to
        self._replaced: list[int] = []  # slots that the last table refers to and that were replaced since
        self._open: FileIO | None = None

    def read(self, client: int) -> Tree:
        if self._slots[client] < 0:
            return trees.unflatten(self._shape, self._initial)
        leaves = [torch.empty_like(leaf, device="cpu") for leaf in self._initial]
        file = self._file()
        file.seek(int(self._slots[client]) * self._stride)
        whole = all(_read_into(file, _as_bytes(leaf)) for leaf in leaves)
        if not whole or _checksum(leaves) != self._sums[client]:
            raise InputError(
                f"the memory of client {client} in {self._name} is not what was written there: "
                "let no other run use the file, and start the run again."
            )
        return trees.unflatten(self._shape, [leaf.to(self._device) for leaf in leaves])

    def write(self, clients: Sequence[int], stacked: Tree) -> None:
        columns = [column.cpu() for column in trees.leaves(stacked)]
        file = self._file()
        for index, client in enumerate(clients):
            row = [column[index].contiguous() for column in columns]
            slot = self._slot_for(client)
            file.seek(slot * self._stride)
            for leaf in row:
                _write_all(file, _as_bytes(leaf))
            self._sums[client] = _checksum(row)

    def save(self) -> tuple[list[int], list[Tensor]]:
        if self._path is None:
            raise InputError(
                "client memory is in a temporary file, which a checkpoint cannot refer to: "
                "give it a folder, as in memory=Mapped(folder)."
            )
        if self._open:
            os.fsync(self._open.fileno())
        clients = np.flatnonzero(self._slots >= 0)
        self._fixed[clients] = True
        self._retired += self._replaced
        self._replaced = []
        table = self._slots[clients], self._sums[clients].astype(np.int64)
        return clients.tolist(), [torch.from_numpy(column) for column in table]

    def confirm(self) -> None:
        self._free += self._retired
        self._retired = []

    def load(self, clients: Sequence[int], columns: Sequence[Tensor]) -> None:
        rows = list(clients)
        slots, sums = (column.numpy() for column in columns)
        end = int(slots.max(initial=-1)) + 1
        if end:
            self._open = self._reopened(end)
        self._slots[:] = -1
        self._slots[rows] = slots
        self._sums[rows] = sums
        self._fixed = self._slots >= 0
        self._end = end
        self._free = np.setdiff1d(np.arange(end), slots).tolist()
        self._retired, self._replaced = [], []

    def _slot_for(self, client: int) -> int:
        """The slot to write to: never one that a table refers to."""
        slot = int(self._slots[client])
        if slot >= 0 and not self._fixed[client]:
            return slot
        if slot >= 0:
            self._replaced.append(slot)
        if not self._free:
            self._free.append(self._end)
            self._end += 1
        self._slots[client] = slot = self._free.pop()
        self._fixed[client] = False
        return slot

    def _file(self) -> FileIO:
        """The file, which is created unless a checkpoint was loaded."""
        if self._open is None:
            if self._path is None:
                number, name = tempfile.mkstemp(prefix="offbeat-")
                self._open = FileIO(number, "r+")
                Path(name).unlink()  # it exists until it is closed, so a kill leaves nothing behind
            else:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._open = FileIO(self._path, "w+")
            weakref.finalize(self, self._open.close)
        return self._open

    def _reopened(self, slots: int) -> FileIO:
        if not self._path or not self._path.exists() or self._path.stat().st_size < self._needed(slots):
            raise InputError(
                f"{self._name}, which has the client memory of the checkpoint, is missing or truncated: "
                "restore it, or start the run again."
            )
        file = FileIO(self._path, "r+")
        weakref.finalize(self, file.close)
        return file

    def _needed(self, slots: int) -> int:
        """The bytes of this number of slots; the padding of the last one is never written."""
        return (slots - 1) * self._stride + sum(leaf.nbytes for leaf in self._initial)

    @property
    def _name(self) -> str:
        return str(self._path or "the temporary file")


def slot_size(initial: Tree) -> int:
    """The bytes of one client in the file: whole pages."""
    return -(-sum(leaf.nbytes for leaf in trees.leaves(initial)) // _PAGE) * _PAGE


def _as_bytes(leaf: Tensor) -> memoryview:
    view: memoryview = leaf.detach().reshape(-1).view(torch.uint8).numpy().data
    return view


def _checksum(row: Sequence[Tensor]) -> int:
    value = 0
    for leaf in row:
        value = zlib.crc32(_as_bytes(leaf), value)
    return value


def _read_into(file: FileIO, buffer: memoryview) -> bool:
    """Fill the buffer; return whether the file had enough bytes."""
    while buffer:
        count = file.readinto(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


def _write_all(file: FileIO, buffer: memoryview) -> None:
    while buffer:
        buffer = buffer[file.write(buffer) :]


def free_ram() -> int:
    """Available RAM in bytes, within the container's limit if there is one."""
    available = _read_number(Path("/proc/meminfo"), "MemAvailable:")
    free = _physical_ram() if available is None else available * 1024
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"), "")
    used = _read_number(Path("/sys/fs/cgroup/memory.stat"), "anon ")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def free_device_memory(device: torch.device) -> int:
    """Available memory of the device in bytes."""
    if device.type != "cuda":
        return free_ram()
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def _read_number(path: Path, start: str) -> int | None:
    """The number after `start` in a file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    words = (line.removeprefix(start).split()[0] for line in lines if line.startswith(start))
    return next((int(word) for word in words if word.isdecimal()), None)


def _physical_ram() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize


_STORE_FILE = "memory"


@dataclass(frozen=True)
class InRam:
    """In the computer's memory."""


@dataclass(frozen=True)
class OnDevice:
    """In the memory of the device that computes."""


@dataclass(frozen=True)
class Mapped:
    """In a file in this folder; without one, in a temporary file that is deleted with the run.

    Attributes:
        folder: Where the file is put; None: a temporary file.
    """

    folder: Path | None = None


@dataclass(frozen=True)
class Anywhere:
    """The first backend that fits; a file is in this folder, or temporary.

    Attributes:
        folder: Where a file is put if memory does not suffice; None: a temporary file.
    """

    folder: Path | None = None


MemoryBackend: TypeAlias = InRam | OnDevice | Mapped | Anywhere

_BACKENDS: dict[str, MemoryBackend] = {
    "auto": Anywhere(),
    "ram": InRam(),
    "device": OnDevice(),
    "mapped": Mapped(),
}
MEMORY_BACKENDS = tuple(_BACKENDS)


def parse_memory_backend(name: str) -> MemoryBackend:
    """A memory backend by its name in settings."""
    if name not in _BACKENDS:
        raise unknown_name("memory", name, MEMORY_BACKENDS)
    return _BACKENDS[name]


def with_folder(home: MemoryBackend, folder: Path) -> MemoryBackend:
    """The backend with its file in this folder, unless it has a folder already."""
    if isinstance(home, Mapped | Anywhere) and home.folder is None:
        return replace(home, folder=folder)
    return home


def make_client_store(
    home: MemoryBackend, initial: Tree, clients: int, device: torch.device, *, mapped: bool | None = None
) -> ClientStore:
    """A store for this number of clients; `mapped` says whether the checkpoint to load has it in a file.

    Nothing is written yet, but `InputError` is raised if the memory does not fit.
    """
    need = clients * sum(leaf.nbytes for leaf in trees.leaves(initial))
    if not need:
        return TensorStore(initial)
    backend = _choose_backend(home, need, device, mapped) if isinstance(home, Anywhere) else home
    if mapped is not None and mapped != isinstance(backend, Mapped):
        kept, fit = ("in a file", "Mapped(folder)") if mapped else ("as tensors", "InRam()")
        raise InputError(f"this checkpoint keeps the clients' memory {kept}: resume it with memory={fit}.")
    match backend:
        case InRam():
            _check_space(need, free_ram(), clients, "in RAM", f"{setting_name('memory')} mapped")
            return TensorStore(initial, "cpu", device)
        case OnDevice():
            _check_space(
                need, free_device_memory(device), clients, f"on {device}", f"{setting_name('memory')} mapped"
            )
            return TensorStore(initial, device, device)
        case Mapped(folder):
            path = folder / _STORE_FILE if folder else None
            slots = 2 if path else 1  # rows of the last checkpoint and newer ones
            need = slots * clients * slot_size(initial)
            _check_space(need, _free_disk(path), clients, "on the disk", "a folder on a larger one")
            return FileStore(initial, clients, path, device)


def _choose_backend(
    home: Anywhere, need: int, device: torch.device, mapped: bool | None
) -> InRam | OnDevice | Mapped:
    if mapped:
        return Mapped(home.folder)
    if device.type != "cpu" and 2 * need <= free_device_memory(device):
        return OnDevice()
    if mapped is False or 2 * need <= free_ram():
        return InRam()
    return Mapped(home.folder)


def _check_space(need: int, free: int, clients: int, where: str, instead: str) -> None:
    if need > free:
        raise InputError(
            f"the memory of {clients:,} clients takes {_format_bytes(need)} {where}, "
            f"but {_format_bytes(free)} is free: "
            f"use {instead}, fewer clients or a smaller model."
        )


def _free_disk(path: Path | None) -> int:
    """The bytes that a file at this path may have, including its present size."""
    if path is None:
        path = Path(tempfile.gettempdir()) / _STORE_FILE
    folder = next(each for each in path.absolute().parents if each.exists())
    taken = path.stat().st_blocks * 512 if path.is_file() else 0
    return shutil.disk_usage(folder).free + taken


def _format_bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
