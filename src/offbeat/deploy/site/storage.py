"""What a site keeps on disk: its ID, and its client's memory of each run.

    site.json                           the site's ID, generated once
    helper.pub                          the public key of the only helper that the site trusts, if any
    memory/RUN/memory.safetensors       the memory after the last visit that the server is known to have used
    memory/RUN/pending-12.safetensors   the memory after visit 12, in case the server uses that visit

The memory of a visit is on disk before its upload is sent, and takes effect when the server reports that
it used the upload. Nothing here deletes a run: its folder may be deleted by hand once the run is over.
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

_MAX_PENDING = 16  # visits of a run that the server may still use
_LOCK_TIMEOUT = 5.0  # seconds for an earlier process to release the folder


class SiteStorage:
    """The folder of one site, locked by one process until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = _lock_folder(folder)
        try:
            self.site_id = _site_id(folder / "site.json")
        except BaseException:
            self.close()
            raise

    def pin_helper(self, given: str | None) -> str | None:
        """Keep the helper's key that the site was given, and return the one that it keeps from now on."""
        path = self._folder / "helper.pub"
        try:
            pinned = path.read_text("ascii").strip()
        except FileNotFoundError:
            if given is not None:
                write_atomic(path, f"{given}\n".encode())
            return given
        except (OSError, UnicodeError):
            pinned = ""
        if given not in (None, pinned):
            raise InputError(
                f"this site was given another helper's key before, which is in {path}: give that one, "
                "or delete the file if the helper really has a new key."
            )
        if not re.fullmatch("[0-9a-f]{64}", pinned):
            raise InputError(f"{path} is damaged: delete it and join with --helper-key again.")
        return pinned

    def note_evaluation(self, line: str) -> None:
        """Add a line to what the site knows of its own model."""
        with (self._folder / "evaluations.jsonl").open("a", encoding="ascii") as file:
            file.write(f"{line}\n")

    def load(self, run: str, client: int, committed: int) -> list[Tensor] | None:
        """Return the memory after visit `committed`, the last that was used (-1: none), if there is any."""
        folder = self._run_folder(run)
        memory = folder / "memory.safetensors"
        pending = _pending(folder)
        if committed in pending:
            pending[committed].replace(memory)
            fsync_dir(folder)
        for visit, path in pending.items():
            if visit < committed:
                path.unlink()
        if not memory.exists():
            return None
        facts, tensors = self._read(memory, run)
        if facts["client"] != client:
            raise InputError(
                f"this site was client {facts['client']} of this run, and the server now calls it client "
                f"{client}: {self._remedy(run)}."
            )
        if facts["visit"] > committed:
            raise InputError(
                f"the server used visit {facts['visit']} of this site, but its folder knows of "
                f"{committed if committed >= 0 else 'none'} at most: restore the server's newer folder, "
                f"or {self._remedy(run)}."
            )
        if facts["visit"] < committed:
            return None
        return [tensors[str(leaf)] for leaf in range(len(tensors))]

    def save(self, run: str, client: int, visit: int, leaves: Sequence[Tensor]) -> None:
        """Keep the memory after a visit until the server reports whether it used the visit."""
        folder = self._run_folder(run)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in folder.glob(".*.part"):
            shutil.rmtree(part)  # left by a process that was killed
        facts = {"client": client, "visit": visit, "secret": True}
        tensors = {str(number): leaf.cpu() for number, leaf in enumerate(leaves)}
        checkpoint.save(folder / f"pending-{visit}.safetensors", Checkpoint(facts, tensors))
        pending = _pending(folder)
        for old in sorted(pending)[:-_MAX_PENDING]:
            pending[old].unlink()

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()

    def _run_folder(self, run: str) -> Path:
        is_plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", run)
        return self._folder / "memory" / (run if is_plain else hashlib.sha256(run.encode()).hexdigest())

    def _read(self, path: Path, run: str) -> Checkpoint:
        try:
            return checkpoint.load(path)
        except InputError as error:
            raise InputError(
                f"this site's memory of this run is damaged: restore {path.name} from a backup, "
                f"or {self._remedy(run)}."
            ) from error

    def _remedy(self, run: str) -> str:
        """Say how to start over, without the absolute path, which is not sent to the server."""
        folder = self._run_folder(run).relative_to(self._folder)
        return f"delete {folder} in the site's folder to start without memory"


def _lock_folder(folder: Path) -> FileLock:
    """Lock the folder; the operating system releases the lock however the process ends."""
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire(timeout=_LOCK_TIMEOUT)
    except Timeout:
        raise InputError(
            f"the site's folder {folder} is in use by another process: stop that process, "
            "or give each site a folder of its own."
        ) from None
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"the site's folder {folder} cannot be written ({reason}): name another.") from None
    return lock


def _site_id(path: Path) -> str:
    """Return the site's ID, which is generated if there is none."""
    if not path.exists():
        # From the operating system's generator, because no two sites may share it.
        write_atomic(path, [json.dumps({"site": secrets.token_hex(16)}).encode()])
    try:
        site_id = json.loads(path.read_text())["site"]
    except (OSError, ValueError, KeyError, TypeError):
        site_id = None
    if type(site_id) is not str or not re.fullmatch("[0-9a-f]{32}", site_id):
        raise InputError(f"{path} is damaged: restore it from a backup, or delete it to join as a new site.")
    return site_id


def _pending(folder: Path) -> dict[int, Path]:
    found = (re.fullmatch(r"pending-([0-9]+)\.safetensors", path.name) for path in folder.glob("pending-*"))
    return {int(match[1]): folder / match[0] for match in found if match}
