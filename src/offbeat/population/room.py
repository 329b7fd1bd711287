"""How much memory is free."""

import os
import sys
from pathlib import Path

import torch


def free_ram() -> int:
    """Bytes of RAM that can be had, as far as the system says: within a container's limit, if it has one."""
    there = _line(Path("/proc/meminfo"), "MemAvailable:")
    free = _physical() if there is None else there * 1024
    limit = _line(Path("/sys/fs/cgroup/memory.max"), "")
    used = _line(Path("/sys/fs/cgroup/memory.stat"), "anon ")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def free_device(device: torch.device) -> int:
    """Bytes that can be had where tensors of this device live."""
    if device.type != "cuda":
        return free_ram()
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def _line(path: Path, start: str) -> int | None:
    """The number after this word."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    words = (line.removeprefix(start).split()[0] for line in lines if line.startswith(start))
    return next((int(word) for word in words if word.isdecimal()), None)


def _physical() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize
