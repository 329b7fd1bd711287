"""Runs that stop at a deadline, between two server steps, and continue from a checkpoint."""

import hashlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.core import Vector
from offbeat.training import checkpoint
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.loop import Snapshot

# Version, time, client updates, accuracy and loss; the last model's accuracy, which differs from the first if
# models are averaged.
Row = tuple[int, float, int, float, float, float]

UNFINISHED = "unfinished"  # the folder of checkpoints, beside the records


class PausedError(Exception):
    """The deadline has passed; the run continues from its checkpoint."""


@dataclass
class Course:
    """What a run has given so far."""

    rows: list[Row] = field(default_factory=list)
    worst: list[int] = field(default_factory=list)  # of each buffer's stalest update
    dropped: int = 0
    average: Vector | None = None  # of models, where they are averaged
    seconds: float = 0.0  # before it was paused


@dataclass(frozen=True)
class Pause:
    """When runs stop before their end, and where they wait to be continued.

    Attributes:
        deadline: By `time.monotonic`, which all processes of a machine share.
        folder: Of the checkpoints of paused runs; None: runs are not paused.
    """

    deadline: float = math.inf
    folder: Path | None = None

    def due(self) -> bool:
        """Whether the deadline has passed."""
        return self.folder is not None and time.monotonic() >= self.deadline

    def take_up(self, key: str, device: str) -> tuple[Course, Checkpoint | None]:
        """Where the run of this key was paused, or its beginning."""
        path = self._file(key)
        if path is None or not path.exists():
            return Course(), None
        saved = checkpoint.load(path, device)
        kept = saved.facts["course"]
        rows: list[Row] = [tuple(row) for row in kept["rows"]]
        average = saved.tensors.get("course.average")
        return Course(rows, kept["worst"], kept["dropped"], average, kept["seconds"]), saved

    def keep(self, key: str, shot: Snapshot, course: Course) -> None:
        """Write the checkpoint from which the run of this key continues."""
        path = self._file(key)
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        facts, tensors = shot.checkpoint()
        told = {"rows": course.rows, "worst": course.worst, "dropped": course.dropped}
        average = {} if course.average is None else {"course.average": course.average}
        checkpoint.save(
            path, Checkpoint(facts | {"course": told | {"seconds": course.seconds}}, tensors | average)
        )
        shot.confirm()

    def drop(self, key: str) -> None:
        """Remove the checkpoint of a run that has ended."""
        path = self._file(key)
        if path is not None:
            path.unlink(missing_ok=True)

    def _file(self, key: str) -> Path | None:
        digest = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
        return None if self.folder is None else self.folder / f"{digest}.safetensors"
