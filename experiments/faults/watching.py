"""What is seen of a run after a fault, in its events."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from world import World

PATIENCE = 240.0  # seconds for a run to go on


class Seen(NamedTuple):
    """What came of a fault."""

    words: str
    seconds: float | None  # until the run went on
    bad: bool = False  # something was accepted that should not have been
    stuck: bool = False  # the run did not go on


def first(lines: list[dict[str, Any]], since: float, key: str) -> dict[str, Any] | None:
    """The first line after a moment that has this key."""
    return next((line for line in lines if line["time"] > since and key in line), None)


def named(world: World, *names: str) -> list[dict[str, Any]]:
    """Events of these names."""
    return [event for event in world.events() if event["event"] in names]


def told_of(world: World, client: int | None, *names: str) -> list[dict[str, Any]]:
    """Those of one client; None: of all."""
    return [event for event in named(world, *names) if client is None or event.get("client") == client]


def of_task(world: World, client: int | None, begun: float) -> Seen:
    """What became of the task that a client had then."""
    names = "accepted", "lost", "sent"
    event = awaited(world, lambda: first(told_of(world, client, *names), begun, "visit"))
    if event is None:
        return nothing(world)
    if event["event"] == "accepted":
        return Seen("nothing was lost", event["time"] - begun)
    words = "the server was away" if event["event"] == "sent" else reason(world, client, event["time"])
    return Seen(words, accepted(world, client, event["time"], begun))


def fate(world: World, task: list[int], since: float) -> dict[str, Any] | None:
    """What became of an answer: accepted, lost, or its client was given something else meanwhile."""
    client, version, visit = task
    for event in told_of(world, client, "accepted", "lost", "sent"):
        if event["time"] < since - 1e-3:
            continue
        if event["event"] == "sent" or (event["version"], event["visit"]) == (version, visit):
            return event | {"reason": reason(world, client, event["time"])}
    return None


def in_words(event: dict[str, Any]) -> str:
    """As the table has it."""
    if event["event"] == "sent":
        return "the server was away"
    return "accepted" if is_bad(event) else str(event["reason"])


def is_bad(event: dict[str, Any]) -> bool:
    """Whether a bad answer was taken."""
    return bool(event["event"] == "accepted")


def reason(world: World, client: int | None, moment: float) -> str:
    """By the rejection that was told just before; one that is repeated in a minute is only counted."""
    near = [e for e in told_of(world, client, "rejected") if moment - 2 < e["time"] <= moment + 1e-3]
    return f"rejected: {near[-1]['reason']}" if near else "rejected, and counted"


def accepted(world: World, client: int | None, since: float, begun: float) -> float | None:
    """Seconds from the fault until an upload is accepted again."""
    event = awaited(world, lambda: first(told_of(world, client, "accepted"), since, "visit"))
    return None if event is None else event["time"] - begun


def awaited(world: World, ask: Callable[[], Any]) -> Any:
    """The first answer that is something; None where the run ends before, or it takes too long."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        answer = ask()
        if answer is not None:
            return answer
        if world.is_over():
            return ask()
        time.sleep(0.5)
    return None


def nothing(world: World) -> Seen:
    """Nothing came of it: the run is over, or it is stuck."""
    words = "the run ended first" if world.is_over() else f"nothing in {PATIENCE:.0f} s"
    return Seen(words, None, stuck=not world.is_over())
