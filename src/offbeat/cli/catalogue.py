"""`offbeat algorithms`: the catalogue, or one entry of it."""

import argparse
import json
from typing import Any

from offbeat.algorithms import CATALOGUE, find
from offbeat.cli import show

_NO_THEORY = "none usable"


def algorithms(given: argparse.Namespace) -> int:
    """List the methods, or show one."""
    names = [given.name] if given.name else sorted(CATALOGUE)
    described = {name: _describe(name) for name in names}
    if given.json:
        print(json.dumps(described[given.name] if given.name else described))
    elif given.name:
        _show_one(given.name, described[given.name])
    else:
        rows = [
            [name, each["protocol"], *each["vectors"].values(), each["summary"]]
            for name, each in described.items()
        ]
        columns = ["method", "protocol", *next(iter(described.values()))["vectors"], "what it does"]
        show.table("methods; what is sent down and up and what is kept is in model sizes", columns, rows)
        print("'offbeat algorithms NAME' shows a method's parameters.")
    return 0


def _describe(name: str) -> dict[str, Any]:
    entry = find(name)
    return {
        "summary": entry.summary,
        "paper": entry.paper,
        "protocol": entry.dispatch,
        "weights of stale updates": entry.weights,
        "staleness limit": entry.limit,
        "buffer": entry.buffer,
        "rates in theory": entry.theory or _NO_THEORY,
        "vectors": entry.vectors(),
        "parameters": {key: each.default for key, each in entry.parameters().items()},
        "parameters of private runs": dict(entry.private),
        "parameters of private runs without a clip": dict(entry.bare),
    }


def _show_one(name: str, described: dict[str, Any]) -> None:
    vectors, values = described.pop("vectors"), described.pop("parameters")
    private, buffer = described.pop("parameters of private runs"), described.pop("buffer")
    bare = described.pop("parameters of private runs without a clip")
    described["buffer"] = "any" if buffer is None else buffer
    tuned = described["rates in theory"] != _NO_THEORY
    words = {
        "down": "sent down",
        "up": "sent up",
        "client": "kept by a client",
        "server": "kept by the server",
    }
    sends = {f"{words[key]} (model sizes)": value for key, value in vectors.items()}
    show.pairs(name, described | sends)
    open_ = "from S, K and T" if tuned else "none"
    shown = {key: open_ if value is None else value for key, value in values.items()}
    show.pairs("parameters (--set NAME=VALUE) and their defaults", shown)
    for taken, unless in ((private, "that"), (bare, "that or --clip")):
        if taken:
            told = ", ".join(f"{key}={show.figure(value)}" for key, value in taken.items())
            print(f"Private runs take {told}, unless {unless} is given.")
    if tuned:
        print("S: updates per server step; K: local steps of a task; T: server steps.")
