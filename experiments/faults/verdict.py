"""Whether a run that went through faults has lost an accepted upload or used a bad one."""

from collections import Counter
from typing import Any

from world import World, read, replayed


def verdict(world: World) -> dict[str, Any]:
    """What its folder says; `missing` and `difference` must be nothing, and `bad` too."""
    events = world.events()
    accepted = {_task(event) for event in events if event["event"] == "accepted"}
    trace = read(world.folder / "trace.jsonl")
    used = [tuple(task[:3]) for line in trace for task in line["tasks"]]
    dropped = [tuple(task) for line in trace for task in line["dropped"]]
    waiting = {_named(path.name) for path in (world.folder / "journal").glob("*.upload")}
    aside = {_task(event) for event in events if event["event"] == "set_aside"}  # named, and copied
    reasons: Counter[str] = Counter()
    for event in events:
        if event["event"] == "rejected":
            reasons[event["reason"]] += event.get("times", 1)
    replay = replayed(world)
    return {
        "steps": trace[-1]["version"] if trace else None,
        "asked": world.rounds,
        "model": (world.folder / "model.safetensors").exists(),
        "accepted": len(accepted),
        "used": len(used),
        "used_twice": len(used) - len(set(used)),
        "dropped": len(dropped),
        "waiting": len(waiting - set(used)),
        "set_aside": len(aside),
        "missing": sorted(accepted - set(used) - set(dropped) - waiting - aside),
        "lost": sum(event["event"] == "lost" for event in events),
        "rejected": dict(sorted(reasons.items())),
        "difference": replay["difference"],
        "same": replay["same"],
        "surprises": world.surprises,
    }


def clean(found: dict[str, Any]) -> bool:
    """Nothing lost, nothing twice, a model, and the one that honest sites give."""
    complete = found["steps"] == found["asked"] and found["model"]
    return bool(complete and found["same"] and not found["missing"] and not found["used_twice"])


def _task(event: dict[str, Any]) -> tuple[int, int, int]:
    return event["client"], event["version"], event["visit"]


def _named(name: str) -> tuple[int, int, int]:
    client, version, visit = name.removesuffix(".upload").split("-")
    return int(client), int(version), int(visit)
