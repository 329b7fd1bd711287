"""New lines of a file that another process writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Follow:
    """Each whole line once; a file that was cut back is read on from its new end."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._place = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """What has come since the last time."""
        try:
            size = self._path.stat().st_size
            self._place = min(self._place, size)
            if self._place == size:
                return
            with self._path.open("rb") as file:
                file.seek(self._place)
                data = file.read(size - self._place)
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.splitlines():
            try:
                read = json.loads(line)
            except ValueError:  # cut and written again while it was read
                continue
            if isinstance(read, dict):
                yield read
