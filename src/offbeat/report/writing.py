"""The report in its place: figures and their numbers first, the page last, each whole or not at all."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import InputError


class Place(NamedTuple):
    """Where a report goes."""

    page: Path
    folder: Path  # of the figures


def place(out: Path) -> Place:
    """Refuse one that cannot be written to; nothing is written."""
    if out.suffix not in (".html", ".htm"):
        raise InputError(f"a report is an HTML page and '{out}' is not named like one: end -o in .html.")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}: make it first, or name another -o.")
    spot = Place(out, out.with_name(f"{out.stem}-files"))
    if out.is_dir():
        raise InputError(f"{out} is a folder: name another -o.")
    if spot.folder.exists() and not spot.folder.is_dir():
        raise InputError(f"{spot.folder} is a file, and figures would go to a folder there: name another -o.")
    for each in (out.parent, spot.folder):
        if each.exists() and not os.access(each, os.W_OK | os.X_OK):
            raise InputError(f"{each} cannot be written to: name another -o.")
    return spot


def write(spot: Place, page: str, contents: Mapping[str, bytes], known: Iterable[str]) -> None:
    """Put everything there; files by `known` names that an earlier report left and this one lacks go."""
    spot.folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        _put(spot.folder / name, content)
    for name in known:
        if name not in contents:
            (spot.folder / name).unlink(missing_ok=True)
    _put(spot.page, page.encode())


def _put(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
