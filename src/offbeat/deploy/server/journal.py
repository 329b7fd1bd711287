"""What a deployment must not lose between two checkpoints: accepted uploads, and where the flow was.

An upload is a file of its own, and that file's move into place is the moment of acceptance. What the
flow has come to is a line of JSON; the last of its epoch counts, and every checkpoint begins an epoch.

Uploads that were accepted and are not to be used after all, for they lead to no model.
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
from offbeat.deploy.protocol.wire import TensorSpecs
from offbeat.errors import InputError

_UPLOAD_SUFFIX = ".upload"
_MAX_LINES = 256  # that are kept before all but the last are let go


class AcceptedUpload(NamedTuple):
    """An accepted one; `form` is what the payload's bytes are."""

    task: Task
    arrived: float
    form: TensorSpecs
    payload: bytes


class Journal:
    """One folder, one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "kept.jsonl"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # single updates are for nobody else
            for part in folder.glob(f"*{files.PART_SUFFIX}"):
                part.unlink()
            self._path.touch()
            self._lines = self._whole()
        except OSError as error:
            raise files.unwritable(folder, error) from None
        # tasks whose upload is here; each later one has a larger number
        self.orders = {_task_of(path): _order_of(path) for path in folder.glob(f"*{_UPLOAD_SUFFIX}")}
        self.run = self._name()
        self._file = self._path.open("ab")

    @property
    def tasks(self) -> set[Task]:
        """Those whose upload is here."""
        return set(self.orders)

    def accept(self, upload: AcceptedUpload) -> None:
        """From here on it is not lost."""
        order = 1 + max(self.orders.values(), default=0)
        head = {
            "task": upload.task,
            "order": order,
            "arrived": upload.arrived,
            "form": upload.form,
            "checksum": zlib.crc32(upload.payload),
        }
        files.write_atomic(self._place(upload.task), [json.dumps(head).encode(), b"\n", upload.payload])
        self.orders[upload.task] = order

    def read(self, task: Task) -> AcceptedUpload:
        """One that was accepted."""
        path = self._place(task)
        try:
            with path.open("rb") as file:
                facts, payload = json.loads(file.readline()), file.read()
            if facts["checksum"] != zlib.crc32(payload) or Task(*facts["task"]) != task:
                raise ValueError("its contents have changed since it was written")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, error) from None
        form = tuple((name, tuple(shape)) for name, shape in facts["form"])
        return AcceptedUpload(task, facts["arrived"], form, payload)

    def drop(self, tasks: Iterable[Task]) -> None:
        """These have been used, and a checkpoint says so; or they never will be."""
        for task in tasks:
            self._place(task).unlink(missing_ok=True)
            self.orders.pop(task, None)

    def copy_aside(self, tasks: Iterable[Task]) -> None:
        """Keep these beyond their use, for a person to look at."""
        folder = self._folder / "set-aside"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for task in tasks:
                copy = folder / self._place(task).name
                copy.unlink(missing_ok=True)
                os.link(self._place(task), copy)
            files.fsync_dir(folder)
        except OSError as error:
            raise files.unwritable(folder, error) from None

    def keep(self, epoch: int, facts: dict[str, Any]) -> None:
        """One more line, on the disk when this is over."""
        line = json.dumps(facts | {"epoch": epoch}, separators=(",", ":")).encode() + b"\n"
        if self._lines >= _MAX_LINES:  # a step of so many arrivals loses most of them, and may go on doing so
            self._rewrite([*(self._last() | {epoch: line}).values()])
            return
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise files.unwritable(self._path, error) from None
        self._lines += 1

    def last(self, epoch: int) -> dict[str, Any] | None:
        """What was kept last in this epoch."""
        line = self._last().get(epoch)
        return None if line is None else json.loads(line)

    def cut(self, epoch: int) -> None:
        """A checkpoint is in its place: lines from before this epoch are needed no more."""
        if self._lines:
            self._rewrite([line for each, line in self._last().items() if each >= epoch])

    def close(self) -> None:
        self._file.close()

    def _last(self) -> dict[int, bytes]:
        """The last line of each epoch."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        return {json.loads(line)["epoch"]: line for line in lines}

    def _whole(self) -> int:
        """Take away a line that a kill cut short; how many there are."""
        data = self._path.read_bytes()
        os.truncate(self._path, data.rfind(b"\n") + 1)
        return data.count(b"\n")

    def _rewrite(self, lines: list[bytes]) -> None:
        self._file.close()
        files.write_atomic(self._path, lines)
        self._file = self._path.open("ab")
        self._lines = len(lines)

    def _place(self, task: Task) -> Path:
        return self._folder / f"{task.client}-{task.version}-{task.visit}{_UPLOAD_SUFFIX}"

    def _name(self) -> str:
        """The run's own name, so that nothing of another run is taken for its own."""
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
    return InputError(f"the accepted upload {path} cannot be read ({error}): put it back as it was.")


class SetAside:
    """What waits in the buffer of a resumed run; copies of it stay in the journal's folder."""

    def __init__(self, asked: Path, journal: Journal, told: Observer) -> None:
        """A file `asked` stands for the wish."""
        self._asked, self._journal, self._told = asked, journal, told

    def empty(self, flow: dict[str, Any]) -> dict[str, Any]:
        """The same flow with its buffer lost; whoever writes it down may then drop the uploads."""
        tasks = sorted(buffered_tasks(flow))
        if not tasks:
            return flow
        if "turns" in flow:
            raise InputError(
                "this run counts how often each site contributes, so none of it can be set aside: "
                "resume it without --set-aside, or begin another with lower rates."
            )
        self._journal.copy_aside(tasks)
        for task in tasks:
            self._told.set_aside(task.client, task)
        return _mark_lost(flow, tasks)

    def done(self) -> None:
        """It is written down: a server that is started again uses what has come since."""
        self._asked.unlink(missing_ok=True)


def buffered_tasks(flow: dict[str, Any]) -> set[Task]:
    """Tasks whose uploads are in the buffer."""
    return {Task(*arrival[:3]) for arrival in flow.get("buffer", {}).get("waiting", ())}


def _mark_lost(flow: dict[str, Any], tasks: Iterable[Task]) -> dict[str, Any]:
    started, consumed, dropped, lost = flow["counts"]
    buffer = flow["buffer"]
    gone = [list(task) for task in tasks]
    return flow | {
        "counts": [started, consumed, dropped, lost + len(gone)],
        "buffer": buffer | {"waiting": [], "lost": [*buffer["lost"], *gone]},
    }
