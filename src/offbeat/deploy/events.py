"""What happens in a deployment, a line each: for programs in events.jsonl, for people through logging.

Nothing here is needed to go on with a run: where the file cannot be written, the run goes on without.
"""

import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

_LONGEST = 200  # characters of text from outside
_WINDOW = 60.0  # seconds in which what is repeated is only counted
_TAIL = 1 << 16  # bytes, more than any line has
_KEYS = 256  # repetitions that are counted at a time


def plain(text: str, longest: int = _LONGEST) -> str:
    """Text from outside, shortened, with whatever could steer a terminal or a reader's eye written out."""
    short = text if len(text) <= longest else text[: longest - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def stamp(now: float) -> str:
    """A moment as ISO 8601, in UTC."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Repeated(NamedTuple):
    since: float
    times: int  # not yet told
    event: str
    fields: dict[str, Any]  # of the last one


class Events:
    """The log of one run; `folder` None keeps no file."""

    def __init__(self, folder: Path | None, run: str, now: Callable[[], float] = time.time) -> None:
        self._run = plain(run)
        self._now = now
        self._file = None if folder is None else _continued(folder / "events.jsonl")
        self._repeated: OrderedDict[Hashable, _Repeated] = OrderedDict()  # oldest first

    def tell(self, event: str, sentence: str | None = None, /, **fields: Any) -> None:
        """One line; with a sentence it is for people, too."""
        self._settle()
        self._write(event, sentence, fields)

    def tell_once(self, key: Hashable, event: str, sentence: str, /, **fields: Any) -> None:
        """One line the first time in a minute; what follows under the same key is counted, and told then."""
        self._settle()
        known = self._repeated.get(key)
        if known is not None:
            self._repeated[key] = known._replace(times=known.times + 1, fields=fields)
            return
        while len(self._repeated) >= _KEYS:
            self._tell_times(self._repeated.popitem(last=False)[1])
        self._repeated[key] = _Repeated(self._now(), 0, event, fields)
        self._write(event, sentence, fields)

    def close(self) -> None:
        """Tell what was only counted, and let go of the file."""
        while self._repeated:
            self._tell_times(self._repeated.popitem(last=False)[1])
        if self._file is not None:
            self._file.close()
            self._file = None

    def _settle(self) -> None:
        now = self._now()
        while self._repeated and not now - next(iter(self._repeated.values())).since < _WINDOW:
            self._tell_times(self._repeated.popitem(last=False)[1])

    def _tell_times(self, known: _Repeated) -> None:
        if known.times:
            sentence = f"{known.event} again, {known.times} times since {stamp(known.since)}"
            self._write(known.event, sentence, known.fields | {"times": known.times})

    def _write(self, event: str, sentence: str | None, fields: dict[str, Any]) -> None:
        safe = {name: _safe(value) for name, value in fields.items()}
        if sentence is not None:
            log.info("%s", plain(sentence, 2 * _LONGEST))
        if self._file is None:
            return
        line = {"time": stamp(self._now()), "event": event, "run": self._run, **safe}
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        except OSError as error:
            log.warning("events.jsonl cannot be written (%s): the run goes on without it.", error.strerror)
            self._file.close()
            self._file = None


def _safe(value: Any) -> Any:
    """A field as JSON has it: no number without a place there, no text at length."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_safe(each) for each in value]
    return value


def _continued(path: Path) -> FileIO | None:
    """The file, open for writing after its last whole line."""
    try:
        file = path.open("a+b", buffering=0)  # what is written is there, whoever dies next
        end = file.seek(0, 2)
        begin = file.seek(max(0, end - _TAIL))
        tail = file.read(end - begin)
        if tail and not tail.endswith(b"\n"):
            file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
        file.seek(0, 2)
    except OSError as error:
        log.warning("%s cannot be written (%s): the run goes on without it.", path, error.strerror)
        return None
    return file
