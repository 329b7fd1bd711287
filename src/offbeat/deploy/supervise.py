"""Sees a deployed run through: whatever dies on the way is started again, as long as there is progress."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offbeat.deploy.flower_commands import FlowerError
from offbeat.deploy.follow import Follow
from offbeat.deploy.outcome import (
    STOP,
    Outcome,
    forget_outcome,
    forget_server,
    is_running,
    read_outcome,
    read_server,
)

_LOOK = 0.25  # seconds between two looks
_TRIES = 20  # in a row without progress
_LONGEST = 30.0  # seconds of pause before another try
_BEGIN = 60.0  # seconds for a server to show itself, before Flower is asked
_ASK = 30.0  # seconds between two such questions
_SAVE = 120.0  # seconds for a server to save and end


class Flower(Protocol):
    """What carries the run."""

    @property
    def ours(self) -> bool:
        """Whether it ends with us, and the server with it."""
        ...

    def tend(self) -> None:
        """Bring back what was started here and has died; may fail with a `FlowerError`."""
        ...

    def submit(self, *, resume: bool) -> str:
        """Have the server started; the run's number. May fail with a `FlowerError`."""
        ...

    def is_over(self, run: str) -> bool: ...

    def stop(self, run: str) -> None: ...


class Seen(Protocol):
    """Who is shown what happens."""

    def record(self, record: dict[str, Any]) -> None: ...

    def event(self, event: dict[str, Any]) -> None: ...

    def say(self, sentence: str) -> None: ...


@dataclass
class Supervisor:
    """Of the run in one folder."""

    folder: Path
    flower: Flower
    seen: Seen
    stop: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._records = Follow(self.folder / "records.jsonl", from_end=True)
        self._events = Follow(self.folder / "events.jsonl", from_end=True)
        self._shown = -1  # the last version whose record was shown

    def watch(self) -> Outcome:
        """Until the run ends, is stopped, or cannot be brought to go on."""
        (self.folder / STOP).unlink(missing_ok=True)
        tries, reached = 0, self._progress()
        while True:
            why = None
            try:
                outcome = self._attempt()
            except FlowerError as error:
                outcome, why = None, str(error)
            self._show()
            if outcome is not None:
                return outcome
            if self.stop():
                return Outcome(None, stopped=True)
            before, reached = reached, self._progress()
            tries = 1 if reached != before else tries + 1
            lost = "the server ended without a word" if why is None else f"Flower could not be asked ({why})"
            if tries > _TRIES:
                return Outcome(None, error=f"{lost}, {_TRIES} times in a row; see the logs in {self.folder}.")
            pause = min(_LONGEST, 2.0 ** (tries - 1))
            self.seen.say(f"{lost}; the run goes on in {pause:.0f} s from what was saved.")
            self._pause(pause)
            if self.stop():
                return Outcome(None, stopped=True)

    def _attempt(self) -> Outcome | None:
        """One server, from its start to its end; None if it left no word."""
        forget_outcome(self.folder)
        forget_server(self.folder)
        self.flower.tend()
        run = self.flower.submit(resume=(self.folder / "settings.json").exists())
        try:
            outcome = self._follow(run)
        except KeyboardInterrupt:
            if not self.flower.ours:
                self._end(run)
            raise
        except FlowerError:
            self._end(run)  # or it goes on beside the next one
            raise
        if outcome is None:
            self._end(run)
        return outcome

    def _follow(self, run: str) -> Outcome | None:
        ask, asked = self.clock() + _BEGIN, None
        while True:
            self.flower.tend()
            self._show()
            server = read_server(self.folder)
            gone = server is not None and not is_running(server)
            outcome = read_outcome(self.folder)  # after the look at the server, which writes it last of all
            if outcome is not None or gone:
                return outcome
            now = self.clock()
            if asked is None and self.stop():
                (self.folder / STOP).touch()
                asked = now
            if asked is not None and now - asked > (_SAVE if server else _BEGIN):
                self.seen.say("the server did not answer to a stop: it is ended as it is.")
                return None
            if server is None and now > ask:
                if self.flower.is_over(run):
                    return None
                ask = now + _ASK
            self.sleep(_LOOK)

    def _end(self, run: str) -> None:
        """So that sites do not work on for a server that is gone."""
        with contextlib.suppress(FlowerError):  # it ended by itself, or its SuperLink is away
            self.flower.stop(run)

    def _pause(self, seconds: float) -> None:
        until = self.clock() + seconds
        while self.clock() < until and not self.stop():
            self.sleep(_LOOK)

    def _show(self) -> None:
        for event in self._events.new():
            self.seen.event(event)
        for record in self._records.new():
            if record["version"] > self._shown:  # one that was cut off is written again
                self._shown = record["version"]
                self.seen.record(record)

    def _progress(self) -> tuple[int, ...]:
        """Differs once anything more was saved or accepted."""
        places = (self.folder / "checkpoint" / "state.safetensors", self.folder / "journal")
        return tuple(place.stat().st_mtime_ns if place.exists() else 0 for place in places)
