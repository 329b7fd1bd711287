"""What a deployment must not lose between two checkpoints: accepted uploads, and the scheduler's state.

Each upload is a file of its own, and moving that file into place is the moment of acceptance. The scheduler's
state is a line of JSON; the last line of an epoch counts, and every checkpoint begins a new epoch. Everything
has a checksum. What is damaged or missing is an `InputError` that says how to continue.
"""

import json
import math
import os
import secrets
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from offbeat import files
from offbeat.core import Task
from offbeat.deploy.protocol.messages import TensorSpecs
from offbeat.errors import InputError

_UPLOAD_SUFFIX = ".upload"
_MISSING = b"missing\n"  # is not JSON
_MAX_LINES = 256  # before all but the last line of each epoch are removed


class AcceptedUpload(NamedTuple):
    """An upload that passed every check; `form` describes its payload."""

    task: Task
    arrived: float
    form: TensorSpecs
    payload: bytes
    steps: int | None = None  # that the site did, if its task ended early


class Journal:
    """A folder that one process writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "kept.jsonl"
        self._latest: dict[int, bytes] | None = None  # the last line of each epoch, once it was read
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # nobody else may read a client's update
            for part in folder.glob(f"*{files.PART_SUFFIX}"):
                part.unlink()
            if (folder / "run").exists() and not self._path.exists():
                self._path.write_bytes(_MISSING)  # so that a later start knows of it, too
            self._file = files.open_jsonl(self._path)
            self._lines = self._path.read_bytes().count(b"\n")
        except OSError as error:
            raise files.unwritable(folder, error) from None
        try:
            # The tasks whose upload is here, numbered in order of acceptance.
            self.orders = {_task_of(path): _order_of(path) for path in folder.glob(f"*{_UPLOAD_SUFFIX}")}
            self.newest = max(self.orders.values(), default=0)  # the order of the last upload of the run
            self.run = self._run_id()
        except InputError:
            self.close()
            raise

    @property
    def tasks(self) -> set[Task]:
        """The tasks whose upload is here."""
        return set(self.orders)

    def accept(self, upload: AcceptedUpload) -> None:
        """Write an upload to disk; it cannot be lost after this returns."""
        order = self.newest + 1
        header = {
            "task": upload.task,
            "order": order,
            "arrived": upload.arrived,
            "form": upload.form,
            "checksum": zlib.crc32(upload.payload),
        } | ({} if upload.steps is None else {"steps": upload.steps})
        files.write_atomic(
            self._upload_path(upload.task), [json.dumps(header).encode(), b"\n", upload.payload]
        )
        self.orders[upload.task] = self.newest = order

    def read(self, task: Task) -> AcceptedUpload:
        """An upload that was accepted."""
        path = self._upload_path(task)
        try:
            with path.open("rb") as file:
                facts, payload = json.loads(file.readline()), file.read()
            if facts["checksum"] != zlib.crc32(payload) or Task(*facts["task"]) != task:
                raise ValueError("its checksum does not match")
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
            raise InputError(
                f"the accepted upload {path} {problem}: restore it from a backup, or resume with --set-aside "
                "to continue without it."
            ) from None
        form = tuple((name, tuple(shape)) for name, shape in facts["form"])
        return AcceptedUpload(task, facts["arrived"], form, payload, facts.get("steps"))

    def damaged(self, tasks: Iterable[Task]) -> dict[Task, str]:
        """Of these accepted uploads, the ones that are missing or damaged, each with a sentence."""
        found = {}
        for task in sorted(tasks):
            try:
                self.read(task)
            except InputError as error:
                found[task] = str(error)
        return found

    def drop(self, tasks: Iterable[Task]) -> None:
        """Remove uploads that a checkpoint includes, or that will never be used."""
        for task in tasks:
            self._upload_path(task).unlink(missing_ok=True)
            self.orders.pop(task, None)

    def copy_aside(self, tasks: Iterable[Task]) -> None:
        """Keep copies of uploads that are not used, for a person to inspect."""
        folder = self._folder / "set-aside"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for task in tasks:
                upload = self._upload_path(task)
                if upload.exists():  # otherwise it was deleted, which is why it is left out
                    copy = folder / upload.name
                    copy.unlink(missing_ok=True)
                    os.link(upload, copy)
            files.fsync_dir(folder)
        except OSError as error:
            raise files.unwritable(folder, error) from None

    def append(self, epoch: int, facts: dict[str, Any]) -> None:
        """Write one more line; it is on disk when this returns."""
        line = (
            json.dumps(files.with_checksum(facts | {"epoch": epoch}), separators=(",", ":")).encode() + b"\n"
        )
        if self._lines >= _MAX_LINES:  # a step that loses most of its tasks may take any number of lines
            self._rewrite(self._last_lines() | {epoch: line})
            return
        try:
            self._file.write(line)
            os.fsync(self._file.fileno())
        except OSError as error:
            raise files.unwritable(self._path, error) from None
        self._lines += 1
        if self._latest is not None:
            self._latest[epoch] = line

    def last(self, epoch: int) -> dict[str, Any] | None:
        """The last line of this epoch."""
        line = self._last_lines().get(epoch)
        return None if line is None else files.without_checksum(json.loads(line))

    def epochs(self) -> set[int]:
        """The epochs that have a line."""
        return set(self._last_lines())

    def discard(self, *, before: float = -math.inf, after: float = math.inf) -> None:
        """Remove the lines of the epochs before or after this one."""
        if self._lines:
            kept = self._last_lines().items()
            self._rewrite({epoch: line for epoch, line in kept if before <= epoch <= after})

    def clear(self) -> None:
        """Remove all lines, whether they can be read or not."""
        self._rewrite({})

    def close(self) -> None:
        self._file.close()

    def _last_lines(self) -> dict[int, bytes]:
        """The last line of each epoch, which is read from the file once."""
        if self._latest is not None:
            return self._latest
        found = {}
        for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), 1):
            try:
                found[files.without_checksum(json.loads(line))["epoch"]] = line
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                problem = "was missing" if line == _MISSING else f"is damaged in line {number}"
                raise InputError(
                    f"the journal {self._path} {problem}: restore it from a backup, or resume with "
                    "--set-aside to continue from the last checkpoint without the uploads that were accepted "
                    "since."
                ) from None
        self._latest = found
        return found

    def _rewrite(self, latest: dict[int, bytes]) -> None:
        self._file.close()
        files.write_atomic(self._path, latest.values())
        self._file = files.open_jsonl(self._path)
        self._lines, self._latest = len(latest), latest

    def _upload_path(self, task: Task) -> Path:
        return self._folder / f"{task.client}-{task.version}-{task.visit}{_UPLOAD_SUFFIX}"

    def _run_id(self) -> str:
        """A random id, so that uploads of another run are recognised."""
        path = self._folder / "run"
        if not path.exists():
            if self.orders or self._lines:
                raise InputError(
                    f"{path} is missing, by which sites know this run: restore it from a backup."
                )
            drawn = secrets.token_hex(16).encode()
            files.write_atomic(path, [b"%s %08x" % (drawn, zlib.crc32(drawn))])
        run, _, checksum = path.read_bytes().partition(b" ")
        if len(run) != 32 or checksum != b"%08x" % zlib.crc32(run):
            raise InputError(f"{path} is damaged, by which sites know this run: restore it from a backup.")
        return run.decode()


def _task_of(path: Path) -> Task:
    try:
        client, version, visit = map(int, path.name.removesuffix(_UPLOAD_SUFFIX).split("-"))
    except ValueError:
        raise InputError(f"{path} is not an upload of this run: move it away.") from None
    return Task(client, version, visit)


def _order_of(path: Path) -> int:
    """The order of acceptance; 0 where the file is damaged, which `Journal.read` finds."""
    try:
        with path.open("rb") as file:
            return int(json.loads(file.readline())["order"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0


def buffered_tasks(state: dict[str, Any]) -> set[Task]:
    """The tasks whose uploads are in the buffer of a scheduler's state."""
    return {Task(*arrival[:3]) for arrival in state.get("buffer", {}).get("waiting", ())}


def without_buffered(state: dict[str, Any], tasks: Collection[Task]) -> dict[str, Any]:
    """A scheduler's state in which these uploads of its buffer are lost; once it is written they may be."""
    if not tasks:
        return state
    if "turns" in state:
        raise InputError(
            "this run limits how often each site contributes, so no upload can be set aside: "
            "resume it without --set-aside, or start another run with lower learning rates."
        )
    started, consumed, dropped, lost = state["counts"]
    buffer = state["buffer"]
    removed = [list(task) for task in sorted(tasks)]
    waiting = [arrival for arrival in buffer["waiting"] if list(arrival[:3]) not in removed]
    return state | {
        "counts": [started, consumed, dropped, lost + len(removed)],
        "buffer": buffer | {"waiting": waiting, "lost": [*buffer["lost"], *removed]},
    }
