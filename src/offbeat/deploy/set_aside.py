"""Uploads that were accepted and are not to be used after all, for they lead to no model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offbeat.core import Task
from offbeat.deploy.journal import Journal
from offbeat.deploy.told import Told
from offbeat.errors import InputError


class SetAside:
    """What waits in the buffer of a resumed run; copies of it stay in the journal's folder."""

    def __init__(self, asked: Path, journal: Journal, told: Told) -> None:
        """A file `asked` stands for the wish."""
        self._asked, self._journal, self._told = asked, journal, told

    def empty(self, flow: dict[str, Any]) -> dict[str, Any]:
        """The same flow with its buffer lost; whoever writes it down may then drop the uploads."""
        tasks = sorted(waiting(flow))
        if not tasks:
            return flow
        if "turns" in flow:
            raise InputError(
                "this run counts how often each site contributes, so none of it can be set aside: "
                "resume it without --set-aside, or begin another with lower rates."
            )
        self._journal.copy_aside(tasks)
        for task in tasks:
            self._told.set_aside(task.client, task)
        return _lost(flow, tasks)

    def done(self) -> None:
        """It is written down: a server that is started again uses what has come since."""
        self._asked.unlink(missing_ok=True)


def waiting(flow: dict[str, Any]) -> set[Task]:
    """Tasks whose uploads are in the buffer."""
    return {Task(*arrival[:3]) for arrival in flow.get("buffer", {}).get("waiting", ())}


def _lost(flow: dict[str, Any], tasks: Iterable[Task]) -> dict[str, Any]:
    started, consumed, dropped, lost = flow["counts"]
    buffer = flow["buffer"]
    gone = [list(task) for task in tasks]
    return flow | {
        "counts": [started, consumed, dropped, lost + len(gone)],
        "buffer": buffer | {"waiting": [], "lost": [*buffer["lost"], *gone]},
    }
