"""The folder of a run, as a report needs it."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat import settings
from offbeat.aggregate.terms import is_simulated
from offbeat.errors import InputError
from offbeat.report.digest import DamagedError, Digest, digest, reached
from offbeat.report.ending import Ending, read_ending
from offbeat.report.records import Records, columns

_PIECE = 1 << 16  # bytes that are read at once from the end of a file


@dataclass(frozen=True)
class Run:
    """One run."""

    label: str
    folder: Path
    settings: Mapping[str, Any]
    records: Records
    trace: Digest | None  # None: there is none, or no server step was taken yet
    whole: bool  # whether the trace's end, and so who was still at work there, is known
    ending: Ending

    @property
    def deployed(self) -> bool:
        """Whether its clients were sites with data of their own."""
        return "task" in self.settings

    @property
    def hides_sample(self) -> bool:
        """Whether the epsilon that was computed rests on nobody learning who took part."""
        return bool(self.settings.get("simulate_amplification"))

    @property
    def simulated(self) -> bool:
        """Whether its epsilon counts on amplification that does not hold, and so is no guarantee."""
        privacy = self.ending.privacy
        return self.hides_sample or (privacy is not None and is_simulated(privacy.terms))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs, each with a name of its own."""
    whole = [folder.resolve() for folder in folders]
    for place, folder in enumerate(whole):
        if folder in whole[:place]:
            raise InputError(f"{folders[place]} is named twice: name each run once.")
    return [_read(*each) for each in zip(folders, _labels(whole), strict=True)]


def _labels(folders: Sequence[Path]) -> list[str]:
    """The last part of each path; more of it where runs would go by the same name."""
    length = 1
    while True:
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
        length += 1


def _read(folder: Path, label: str) -> Run:
    if not (folder / "settings.json").is_file():
        raise InputError(_no_run(folder))
    known = settings.read(folder)
    clients, buffer = known.get("clients"), known.get("buffer")
    if type(clients) is not int or type(buffer) is not int or not 0 < clients < 2**31 or buffer < 1:
        raise InputError(f"the settings in {folder} are not of a run: name the folder of one.")
    if not (folder / "records.jsonl").is_file():
        raise _unbegun(folder)
    try:
        records = columns(_lines(folder / "records.jsonl"))
    except DamagedError as error:
        raise _damaged(folder / "records.jsonl", error) from None
    if not len(records["version"]):
        raise _unbegun(folder)
    ending = read_ending(folder)
    trace, whole = _trace(folder / "trace.jsonl", clients, buffer, ending, int(records["version"][-1]))
    return Run(label, folder, known, records, trace, whole, ending)


def _trace(
    path: Path, clients: int, buffer: int, ending: Ending, recorded: int
) -> tuple[Digest | None, bool]:
    last, size = _last_line(path) if path.is_file() else (b"", 0)
    if not last:
        return None, False
    try:
        end = reached(_parsed(last))
        if end.version < recorded:
            raise DamagedError(f"it ends at server step {end.version}, and there is a record of {recorded}")
        if end.version == 0:
            return None, False
        known = ending.flights is not None and ending.version == end.version
        flights = ending.flights or () if known else ()
        return digest(_lines(path, size), end, clients, buffer, flights), known
    except DamagedError as error:
        raise _damaged(path, error) from None


def _lines(path: Path, size: float = float("inf")) -> Iterator[dict[str, Any]]:
    """The whole lines among the first bytes; a run may be writing more."""
    with path.open("rb") as file:
        for text in file:
            size -= len(text)
            if not text.endswith(b"\n") or size < 0:
                return
            yield _parsed(text)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError("a line is not JSON") from None
    if not isinstance(line, dict):
        raise DamagedError("a line is no object")
    return line


def _last_line(path: Path) -> tuple[bytes, int]:
    """The last whole line, and where it ends; what a kill cut short is left out."""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        tail = b""
        while start and tail.count(b"\n") < 2:
            size = min(start, _PIECE + len(tail))
            start -= size
            file.seek(start)
            tail = file.read(size) + tail
    whole = tail[: tail.rfind(b"\n") + 1]
    return whole[whole.rfind(b"\n", 0, -1) + 1 :], start + len(whole)


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}: name the folder of a run."
    inside = sorted(path.parent.name for path in folder.glob("*/settings.json"))
    if inside:
        names = " ".join(str(folder / name) for name in inside[:5])
        return f"{folder} is not a run but holds some: name them, as in 'offbeat report {names}'."
    return f"{folder} is not the folder of a run: name one that 'offbeat run' wrote."


def _unbegun(folder: Path) -> InputError:
    return InputError(f"the run in {folder} is incomplete, it has no records yet: wait for its first one.")


def _damaged(path: Path, error: DamagedError) -> InputError:
    return InputError(f"{path} is damaged ({error}): put a whole copy in its place.")
