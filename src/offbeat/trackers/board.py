"""TensorBoard: event files in a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import InputError
from offbeat.folder import claim
from offbeat.trackers.place import Place
from offbeat.trackers.tracker import first_line, numbers


class Board:
    """A writer of event files; records up to `known` are in them already."""

    def __init__(self, writer: Any, known: int) -> None:
        self._writer = writer
        self._known = known

    def record(self, record: Mapping[str, Any]) -> None:
        version = int(record["version"])
        if version <= self._known:
            return
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def close(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


def check_tensorboard(folder: str) -> None:
    """Refuse where it is not installed, and what cannot be a folder."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise InputError(f"{folder} is a file: name a folder with --tensorboard.")
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise InputError("--tensorboard needs a package: pip install 'offbeat[tensorboard]'.") from None


def open_board(
    folder: str, name: str, settings: Mapping[str, Any], held: Place | None, since: int | None
) -> tuple[Board, Place]:
    """The run's own folder within `folder`; one that is held goes on after version `since`."""
    from torch.utils.tensorboard import SummaryWriter

    goes_on = held is not None and held.place == str(Path(folder).absolute())
    known = -1 if since is None or not goes_on else since
    try:
        run = held.run if held and goes_on else _free(Path(folder).absolute(), name).name
        path = Path(folder).absolute() / run
        # what was written after the checkpoint is computed again, so TensorBoard is told to drop it
        writer: Any = SummaryWriter(str(path), purge_step=known + 1 if goes_on else None)
        if not goes_on:
            writer.add_text("settings", f"```json\n{json.dumps(dict(settings), indent=1)}\n```")
    except OSError as error:
        reason = first_line(error)
        raise InputError(f"{folder} cannot be written to ({reason}): name another --tensorboard.") from None
    return Board(writer, known), Place(str(Path(folder).absolute()), run)


def _free(folder: Path, name: str) -> Path:
    """A folder of that name that nobody has; else the next number."""
    path = folder / name
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return claim(folder, name)
    return path
