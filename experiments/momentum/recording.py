"""Files of records, one line each, whole after a kill at any moment."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def recorded(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a records file; one that a kill cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def append(path: Path, record: dict[str, Any]) -> None:
    """One more line, on the disk when this returns."""
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
