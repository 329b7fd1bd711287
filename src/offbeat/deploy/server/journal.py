"""What a deployment must not lose between two checkpoints: accepted uploads, and the scheduler's state.

Each upload is a file of its own, and moving that file into place is the moment of acceptance. The scheduler's
state is a line of JSON; the last line of an epoch counts, and every checkpoint begins a new epoch.
"""

import json
import os
import secrets
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from offbeat import files
from offbeat.core import Task
from offbeat.deploy.monitor.observer import Observer
from offbeat.deploy.protocol.messages import TensorSpecs
from offbeat.errors import InputError

_UPLOAD_SUFFIX = ".upload"
_MAX_LINES = 256  # before all but the last line of each epoch are removed


class AcceptedUpload(NamedTuple):
    """An upload that passed every check; `form` describes its payload."""

    task: Task
    arrived: float
    form: TensorSpecs
    payload: bytes


class Journal:
    """A folder that one process writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "kept.jsonl"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # nobody else may read a client's update
            for part in folder.glob(f"*{files.PART_SUFFIX}"):
                part.unlink()
            self._file = files.open_jsonl(self._path)
            self._lines = self._path.read_bytes().count(b"\n")
        except OSError as error:
            raise files.unwritable(folder, error) from None
        # The tasks whose upload is here, numbered in order of acceptance.
        self.orders = {_task_of(path): _order_of(path) for path in folder.glob(f"*{_UPLOAD_SUFFIX}")}
        self.run = self._run_id()

    @property
    def tasks(self) -> set[Task]:
        """The tasks whose upload is here."""
        return set(self.orders)

    def accept(self, upload: AcceptedUpload) -> None:
        """Write an upload to disk; it cannot be lost after this returns."""
        order = 1 + max(self.orders.values(), default=0)
        header = {
            "task": upload.task,
            "order": order,
            "arrived": upload.arrived,
            "form": upload.form,
            "checksum": zlib.crc32(upload.payload),
        }
        files.write_atomic(
            self._upload_path(upload.task), [json.dumps(header).encode(), b"\n", upload.payload]
        )
        self.orders[upload.task] = order

    def read(self, task: Task) -> AcceptedUpload:
        """An upload that was accepted."""
        path = self._upload_path(task)
        try:
            with path.open("rb") as file:
                facts, payload = json.loads(file.readline()), file.read()
            if facts["checksum"] != zlib.crc32(payload) or Task(*facts["task"]) != task:
                raise ValueError("its checksum does not match")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, error) from None
        form = tuple((name, tuple(shape)) for name, shape in facts["form"])
        return AcceptedUpload(task, facts["arrived"], form, payload)

    def drop(self, tasks: Iterable[Task]) -> None:
        """Remove uploads that a checkpoint includes, or that will never be used."""
        for task in tasks:
            self._upload_path(task).unlink(missing_ok=True)
            self.orders.pop(task, None)

    def copy_aside(self, tasks: Iterable[Task]) -> None:
        """Keep copies of these uploads for a person to inspect."""
        folder = self._folder / "set-aside"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for task in tasks:
                copy = folder / self._upload_path(task).name
                copy.unlink(missing_ok=True)
                os.link(self._upload_path(task), copy)
            files.fsync_dir(folder)
        except OSError as error:
            raise files.unwritable(folder, error) from None

    def append(self, epoch: int, facts: dict[str, Any]) -> None:
        """Write one more line; it is on disk when this returns."""
        line = json.dumps(facts | {"epoch": epoch}, separators=(",", ":")).encode() + b"\n"
        if self._lines >= _MAX_LINES:  # a step that loses most of its tasks may take any number of lines
            self._rewrite([*(self._last_lines() | {epoch: line}).values()])
            return
        try:
            self._file.write(line)
            os.fsync(self._file.fileno())
        except OSError as error:
            raise files.unwritable(self._path, error) from None
        self._lines += 1

    def last(self, epoch: int) -> dict[str, Any] | None:
        """The last line of this epoch."""
        line = self._last_lines().get(epoch)
        return None if line is None else json.loads(line)

    def discard_before(self, epoch: int) -> None:
        """Remove the lines of earlier epochs, which a checkpoint has made superfluous."""
        if self._lines:
            self._rewrite([line for each, line in self._last_lines().items() if each >= epoch])

    def close(self) -> None:
        self._file.close()

    def _last_lines(self) -> dict[int, bytes]:
        """The last line of each epoch."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        return {json.loads(line)["epoch"]: line for line in lines}

    def _rewrite(self, lines: list[bytes]) -> None:
        self._file.close()
        files.write_atomic(self._path, lines)
        self._file = files.open_jsonl(self._path)
        self._lines = len(lines)

    def _upload_path(self, task: Task) -> Path:
        return self._folder / f"{task.client}-{task.version}-{task.visit}{_UPLOAD_SUFFIX}"

    def _run_id(self) -> str:
        """A random id, so that uploads of another run are recognised."""
        path = self._folder / "run"
        if not path.exists():
            files.write_atomic(path, [secrets.token_hex(16).encode()])
        return path.read_text()


def _task_of(path: Path) -> Task:
    client, version, visit = path.name.removesuffix(_UPLOAD_SUFFIX).split("-")
    return Task(int(client), int(version), int(visit))


def _order_of(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return int(json.loads(file.readline())["order"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"the accepted upload {path} cannot be read ({error}): restore it.")


class SetAside:
    """Resumes a run without the uploads in its buffer, because they made the model diverge.

    It was requested by a file at `request`. Copies of the uploads stay in the journal's folder.
    """

    def __init__(self, request: Path, journal: Journal, observer: Observer) -> None:
        self._request, self._journal, self._observer = request, journal, observer

    def empty(self, state: dict[str, Any]) -> dict[str, Any]:
        """The scheduler's state with an empty buffer; once it is written the uploads may be dropped."""
        tasks = sorted(buffered_tasks(state))
        if not tasks:
            return state
        if "turns" in state:
            raise InputError(
                "this run limits how often each site contributes, so no upload can be set aside: "
                "resume it without --set-aside, or start another run with lower learning rates."
            )
        self._journal.copy_aside(tasks)
        for task in tasks:
            self._observer.set_aside(task.client, task)
        return _mark_lost(state, tasks)

    def done(self) -> None:
        """The new state is on disk: if the server is restarted, it uses what has arrived since."""
        self._request.unlink(missing_ok=True)


def buffered_tasks(state: dict[str, Any]) -> set[Task]:
    """The tasks whose uploads are in the buffer of a scheduler's state."""
    return {Task(*arrival[:3]) for arrival in state.get("buffer", {}).get("waiting", ())}


def _mark_lost(state: dict[str, Any], tasks: Iterable[Task]) -> dict[str, Any]:
    started, consumed, dropped, lost = state["counts"]
    buffer = state["buffer"]
    removed = [list(task) for task in tasks]
    return state | {
        "counts": [started, consumed, dropped, lost + len(removed)],
        "buffer": buffer | {"waiting": [], "lost": [*buffer["lost"], *removed]},
    }
