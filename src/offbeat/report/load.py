"""A run's records as columns of numbers.

What a run's last checkpoint says of its end; nothing else of it is looked at, for some of it is secret.

The folder of a run, as a report needs it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.errors import InputError
from offbeat.files import last_line
from offbeat.privacy.accountant import Releases
from offbeat.privacy.ledger import correct_statement, corrected_end, is_simulated
from offbeat.renamed import present_record
from offbeat.report.trace import (
    DamagedFileError,
    Floats,
    PendingTask,
    TraceSummary,
    summarise_trace,
    trace_end,
)
from offbeat.training import checkpoint, settings_file
from offbeat.training.folder import FAILURE_FILE

RECORD_COLUMNS = (
    "version",
    "time",
    "client_updates",
    "loss",
    "accuracy",
    "epsilon",
    "bytes",
    "dropped",
    "lost",
    "elapsed",
)
_REQUIRED_COLUMNS = ("version", "time", "client_updates")
_MAX_NUMBER = 1e150  # no run counts, or diverges, as far

Records = Mapping[str, Floats]  # NaN: not recorded


def read_columns(lines: Iterable[Any]) -> Records:
    """All records; a number that a run cannot have written is refused."""
    rows = []
    last = -1.0
    for line in lines:
        if not isinstance(line, Mapping):
            raise DamagedFileError("a line is no record")
        line = present_record(line)
        if "simulated_epsilon" in line:
            line["epsilon"] = line["simulated_epsilon"]
        row = [_number(line.get(name), name) for name in RECORD_COLUMNS]
        if any(math.isnan(row[RECORD_COLUMNS.index(name)]) for name in _REQUIRED_COLUMNS) or row[0] <= last:
            raise DamagedFileError("a line is no record, or out of order")
        last = row[0]
        rows.append(row)
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(RECORD_COLUMNS))
    return {name: table[:, place] for place, name in enumerate(RECORD_COLUMNS)}


def _number(value: Any, name: str) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not abs(value) < _MAX_NUMBER:
        raise DamagedFileError(f"a {name} is {str(value)[:40]!r}")
    return float(value)


@dataclass(frozen=True)
class PrivacySpent:
    """What was told about any one client."""

    epsilon: float | None  # None: at the end of a run that has not ended
    delta: float
    releases: int
    terms: str


@dataclass(frozen=True)
class RunEnding:
    """Where a run is."""

    version: int | None = None  # of the checkpoint
    ended: str | None = None  # why before the last version that was asked for
    privacy: PrivacySpent | None = None
    flights: tuple[PendingTask, ...] | None = None  # tasks under way; None: it does not say
    unread: str | None = None  # why the checkpoint could not be read
    diverged: str | None = None  # why it went no further


def read_ending(folder: Path) -> RunEnding:
    """What there is to be read; a checkpoint may be missing, or be its owner's alone."""
    place, diverged = folder / "checkpoint" / "state.safetensors", _diverged(folder / FAILURE_FILE)
    if not place.exists():
        return RunEnding(unread="the run has no checkpoint", diverged=diverged)
    try:
        facts = checkpoint.load_facts(place)
    except InputError:
        return RunEnding(unread="the run's checkpoint cannot be read", diverged=diverged)
    version = facts.get("version")
    return RunEnding(
        version if isinstance(version, int) else None,
        *_outcome(facts),
        _pending_tasks(facts),
        diverged=diverged,
    )


def _diverged(place: Path) -> str | None:
    try:
        return str(json.loads(place.read_bytes())["diverged"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _outcome(facts: Mapping[str, Any]) -> tuple[str | None, PrivacySpent | None]:
    try:
        ended, spent = facts["running"].get("outcome", (None, None))
        ended = None if ended is None else str(ended)
        if spent is not None:
            epsilon, delta, releases, terms = spent
            ended = corrected_end(ended, str(terms))
            return ended, PrivacySpent(
                float(epsilon), float(delta), int(releases), correct_statement(str(terms))
            )
        ledger = facts["aggregate"].get("spent")
        if ledger is None:
            return ended, None
        terms = correct_statement(
            str(ledger["terms"]), [Releases(*each) for each in ledger.get("releases", ())]
        )
        return ended, PrivacySpent(None, float(ledger["delta"]), int(ledger["made"]), terms)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, None


def _pending_tasks(facts: Mapping[str, Any]) -> tuple[PendingTask, ...] | None:
    try:
        flights = facts["session"]["clock"]["flights"]
        return tuple(PendingTask(float(started), float(due)) for due, *_, started in flights)
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Run:
    """One run."""

    label: str
    folder: Path
    settings: Mapping[str, Any]
    records: Records
    trace: TraceSummary | None  # None: there is none, or no server step was taken yet
    whole: bool  # whether the trace's end, and so who was still at work there, is known
    ending: RunEnding

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
        raise InputError(_no_run_sentence(folder))
    known = settings_file.read(folder)
    clients, buffer = known.get("clients"), known.get("buffer")
    if type(clients) is not int or type(buffer) is not int or not 0 < clients < 2**31 or buffer < 1:
        raise InputError(f"the settings in {folder} are not of a run: name the folder of one.")
    if not (folder / "records.jsonl").is_file():
        raise _no_records_error(folder)
    try:
        records = read_columns(_read_lines(folder / "records.jsonl"))
    except DamagedFileError as error:
        raise _damaged_error(folder / "records.jsonl", error) from None
    if not len(records["version"]):
        raise _no_records_error(folder)
    ending = read_ending(folder)
    trace, whole = _trace(folder / "trace.jsonl", clients, buffer, ending, int(records["version"][-1]))
    return Run(label, folder, known, records, trace, whole, ending)


def _trace(
    path: Path, clients: int, buffer: int, ending: RunEnding, recorded: int
) -> tuple[TraceSummary | None, bool]:
    last, size = last_line(path) if path.is_file() else (b"", 0)
    if not last:
        return None, False
    try:
        end = trace_end(_parse_line(last))
        if end.version < recorded:
            raise DamagedFileError(
                f"it ends at server step {end.version}, and there is a record of {recorded}"
            )
        if end.version == 0:
            return None, False
        known = ending.flights is not None and ending.version == end.version
        flights = ending.flights or () if known else ()
        return summarise_trace(_read_lines(path, size), end, clients, buffer, flights), known
    except DamagedFileError as error:
        raise _damaged_error(path, error) from None


def _read_lines(path: Path, size: float = float("inf")) -> Iterator[dict[str, Any]]:
    """The whole lines among the first bytes; a run may be writing more."""
    with path.open("rb") as file:
        for text in file:
            size -= len(text)
            if not text.endswith(b"\n") or size < 0:
                return
            yield _parse_line(text)


def _parse_line(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedFileError("a line is not JSON") from None
    if not isinstance(line, dict):
        raise DamagedFileError("a line is no object")
    return line


def _no_run_sentence(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}: name the folder of a run."
    inside = sorted(path.parent.name for path in folder.glob("*/settings.json"))
    if inside:
        names = " ".join(str(folder / name) for name in inside[:5])
        return f"{folder} is not a run but holds some: name them, as in 'offbeat report {names}'."
    return f"{folder} is not the folder of a run: name one that 'offbeat run' wrote."


def _no_records_error(folder: Path) -> InputError:
    return InputError(f"the run in {folder} is incomplete, it has no records yet: wait for its first one.")


def _damaged_error(path: Path, error: DamagedFileError) -> InputError:
    return InputError(f"{path} is damaged ({error}): put a whole copy in its place.")
