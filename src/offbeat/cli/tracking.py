"""The options of trackers, and how a run finds its own."""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offbeat.folder import Folder, read_lines
from offbeat.trackers.opening import check_trackers, open_trackers
from offbeat.trackers.place import Placed, Wanted, remember, remembered
from offbeat.trackers.tracker import Several

_FILE = "sqlite:///"


def add_tracking(command: argparse.ArgumentParser) -> None:
    """The options."""
    group = command.add_argument_group(
        "trackers", "the same records elsewhere, too; a resumed run goes on there"
    )
    group.add_argument("--tensorboard", metavar="DIR", default=None, help="event files, in a folder of DIR")
    group.add_argument("--wandb", metavar="PROJECT", default=None, help="Weights & Biases")
    group.add_argument("--mlflow", metavar="URI", default=None, help="MLflow: a server, or sqlite:///FILE")


def wanted(given: argparse.Namespace) -> Wanted:
    """What was asked for, and can be had here."""
    asked = Wanted(given.tensorboard, given.wandb, None if given.mlflow is None else _absolute(given.mlflow))
    check_trackers(asked)
    return asked


def begin(asked: Wanted, out: Path, settings: Mapping[str, Any]) -> tuple[Several, Placed]:
    """Those of a new run."""
    return open_trackers(asked, out.absolute().name, settings)


def go_on(asked: Wanted, folder: Folder, settings: Mapping[str, Any]) -> Several:
    """Those of a resumed run, told of what they do not know yet."""
    held = remembered(folder.path)
    tracker, placed = open_trackers(asked, folder.path.absolute().name, settings, held, folder.version)
    remember(folder.path, placed)
    for record in named(read_lines(folder.path, "records"), bool(settings.get("simulate_amplification"))):
        tracker.record(record)
    return tracker


def named(records: Iterable[dict[str, Any]], simulated: bool) -> Iterator[dict[str, Any]]:
    """Records of before with a name for a simulated epsilon that says what it is."""
    for record in records:
        if simulated and "epsilon" in record:
            yield {"simulated_epsilon" if name == "epsilon" else name: record[name] for name in record}
        else:
            yield record


def _absolute(uri: str) -> str:
    """A file by its full path: a run may be resumed from elsewhere."""
    if not uri.startswith(_FILE) or uri.startswith(f"{_FILE}/") or uri == _FILE:
        return uri
    return f"{_FILE}{Path(uri.removeprefix(_FILE)).absolute()}"
