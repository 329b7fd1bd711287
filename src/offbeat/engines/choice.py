"""Which way of computing was the fastest before, on this device, for this model: a small file."""

import hashlib
import json
import os
from pathlib import Path

import torch

from offbeat.core import AnyAlgorithm
from offbeat.problem import Problem


def place() -> Path | None:
    """The file, by OFFBEAT_CACHE or among the user's caches; None where OFFBEAT_CACHE is empty."""
    own = os.environ.get("OFFBEAT_CACHE")
    if own is not None:
        return Path(own) / "choices.json" if own else None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return None
    return caches / "offbeat" / "choices.json"


def describe(algorithm: AnyAlgorithm, problem: Problem, shape: tuple[int, ...]) -> str:
    """What the answer depends on, as a key."""
    device = torch.cuda.get_device_name(problem.device) if problem.device.type == "cuda" else "cpu"
    facts = [
        device,
        torch.__version__,
        type(algorithm).__name__,
        problem.precision.name,
        *map(str, shape),
        repr(problem),
    ]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=12).hexdigest()


def recall(key: str) -> str | None:
    """The answer of an earlier trial, if there was one."""
    known = _read(place())
    answer = known.get(key)
    return answer if isinstance(answer, str) else None


def remember(key: str, answer: str) -> None:
    """Keep an answer; a cache that cannot be written is no reason to stop."""
    path = place()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(_read(path) | {key: answer}, indent=1))
        part.replace(path)
    except OSError:
        pass


def _read(path: Path | None) -> dict[str, object]:
    try:
        known = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
