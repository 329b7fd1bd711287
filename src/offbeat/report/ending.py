"""What a run's last checkpoint says of its end; nothing else of it is looked at, for some of it is secret."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat import checkpoint
from offbeat.aggregate.terms import corrected, corrected_end
from offbeat.errors import InputError
from offbeat.folder import FAILURE
from offbeat.privacy.accountant import Releases
from offbeat.report.digest import Flight


@dataclass(frozen=True)
class Privacy:
    """What was told about any one client."""

    epsilon: float | None  # None: at the end of a run that has not ended
    delta: float
    releases: int
    terms: str


@dataclass(frozen=True)
class Ending:
    """Where a run is."""

    version: int | None = None  # of the checkpoint
    ended: str | None = None  # why before the last version that was asked for
    privacy: Privacy | None = None
    flights: tuple[Flight, ...] | None = None  # tasks under way; None: it does not say
    unread: str | None = None  # why the checkpoint could not be read
    diverged: str | None = None  # why it went no further


def read_ending(folder: Path) -> Ending:
    """What there is to be read; a checkpoint may be missing, or be its owner's alone."""
    place, diverged = folder / "checkpoint" / "state.safetensors", _diverged(folder / FAILURE)
    if not place.exists():
        return Ending(unread="the run has no checkpoint", diverged=diverged)
    try:
        facts = checkpoint.load_facts(place)
    except InputError:
        return Ending(unread="the run's checkpoint cannot be read", diverged=diverged)
    version = facts.get("version")
    return Ending(
        version if isinstance(version, int) else None,
        *_outcome(facts),
        _flights(facts),
        diverged=diverged,
    )


def _diverged(place: Path) -> str | None:
    try:
        return str(json.loads(place.read_bytes())["diverged"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _outcome(facts: Mapping[str, Any]) -> tuple[str | None, Privacy | None]:
    try:
        ended, spent = facts["running"].get("outcome", (None, None))
        ended = None if ended is None else str(ended)
        if spent is not None:
            epsilon, delta, releases, terms = spent
            ended = corrected_end(ended, str(terms))
            return ended, Privacy(float(epsilon), float(delta), int(releases), corrected(str(terms)))
        ledger = facts["aggregate"].get("spent")
        if ledger is None:
            return ended, None
        terms = corrected(str(ledger["terms"]), [Releases(*each) for each in ledger.get("releases", ())])
        return ended, Privacy(None, float(ledger["delta"]), int(ledger["made"]), terms)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, None


def _flights(facts: Mapping[str, Any]) -> tuple[Flight, ...] | None:
    try:
        flights = facts["session"]["clock"]["flights"]
        return tuple(Flight(float(started), float(due)) for due, *_, started in flights)
    except (KeyError, TypeError, ValueError):
        return None
