"""What a site keeps on its disk: who it is, and its client's memory of each run.

    site.json                           the site's number, made once
    memory/RUN/memory.safetensors       what the client has left with the last visit known to be used
    memory/RUN/pending-12.safetensors   what visit 12 left, should the server use it

A visit's memory is on the disk before its upload leaves, and takes effect when the server says that
the upload was used. Runs are never deleted here: whoever knows that a run is over may delete its folder.
"""

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout
from torch import Tensor

from offbeat.errors import InputError
from offbeat.files import fsync_dir, write_atomic
from offbeat.training import checkpoint
from offbeat.training.checkpoint import Checkpoint

_MAX_PENDING = 16  # visits of a run that may still turn out to be used
_LOCK_TIMEOUT = 5.0  # seconds for a process before this one to let go of the folder


class SiteStorage:
    """The folder of one site, held by one process until closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = _lock_folder(folder)
        try:
            self.site = _site_id(folder / "site.json")
        except BaseException:
            self.close()
            raise

    def begin(self, run: str, client: int, committed: int) -> list[Tensor] | None:
        """The memory after that visit, the last one that was used (-1: none); None: there is nothing yet."""
        place = self._place(run)
        memory = place / "memory.safetensors"
        waiting = _pending(place)
        if committed in waiting:
            waiting[committed].replace(memory)
            fsync_dir(place)
        for visit, path in waiting.items():
            if visit < committed:
                path.unlink()
        if not memory.exists():
            return None
        facts, tensors = self._read(memory, run)
        if facts["client"] != client:
            raise InputError(
                f"this site was client {facts['client']} of this run and is now called client {client}: "
                f"{self._remedy(run)}."
            )
        if facts["visit"] > committed:
            raise InputError(
                f"this site knows that its visit {facts['visit']} was used, and the server knows of "
                f"{committed if committed >= 0 else 'none'} at most: put the server's newer folder back, "
                f"or {self._remedy(run)}."
            )
        if facts["visit"] < committed:
            return None
        return [tensors[str(leaf)] for leaf in range(len(tensors))]

    def keep(self, run: str, client: int, visit: int, leaves: Sequence[Tensor]) -> None:
        """What a visit left, until the server says whether it was used."""
        place = self._place(run)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in place.glob(".*.part"):
            shutil.rmtree(part)  # a kill left it
        facts = {"client": client, "visit": visit, "secret": True}
        tensors = {str(number): leaf.cpu() for number, leaf in enumerate(leaves)}
        checkpoint.save(place / f"pending-{visit}.safetensors", Checkpoint(facts, tensors))
        waiting = _pending(place)
        for old in sorted(waiting)[:-_MAX_PENDING]:
            waiting[old].unlink()

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.release()

    def _place(self, run: str) -> Path:
        plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", run)
        return self._folder / "memory" / (run if plain else hashlib.sha256(run.encode()).hexdigest())

    def _read(self, path: Path, run: str) -> Checkpoint:
        try:
            found = checkpoint.load(path)
        except InputError as error:
            raise InputError(
                f"what this site kept of this run is damaged: put {path.name} back from a copy, "
                f"or {self._remedy(run)}."
            ) from error
        return found

    def _remedy(self, run: str) -> str:
        """Told without the whole path, which is nobody's business elsewhere."""
        return f"delete {self._place(run).relative_to(self._folder)} in the site's folder to begin with none"


def _lock_folder(folder: Path) -> FileLock:
    """The operating system lets go of it when the process ends, however it ends."""
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire(timeout=_LOCK_TIMEOUT)
    except Timeout:
        raise InputError(
            f"the site's folder {folder} is in use by another process: stop that one, "
            "or give each site a folder of its own."
        ) from None
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"the site's folder {folder} cannot be written to ({reason}): name another."
        ) from None
    return lock


def _site_id(path: Path) -> str:
    """The site's number, made if there is none."""
    if not path.exists():
        # from the system's own generator: no two sites may share it
        write_atomic(path, [json.dumps({"site": secrets.token_hex(16)}).encode()])
    try:
        site = json.loads(path.read_text())["site"]
    except (OSError, ValueError, KeyError, TypeError):
        site = None
    if type(site) is not str or not re.fullmatch("[0-9a-f]{32}", site):
        raise InputError(f"{path} is damaged: put it back from a copy, or delete it to join as a new site.")
    return site


def _pending(place: Path) -> dict[int, Path]:
    found = (re.fullmatch(r"pending-([0-9]+)\.safetensors", path.name) for path in place.glob("pending-*"))
    return {int(match[1]): place / match[0] for match in found if match}
