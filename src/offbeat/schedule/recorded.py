"""Delays that somebody measured."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from offbeat.errors import InputError
from offbeat.schedule.chance import Draws
from offbeat.schedule.wording import write


@dataclass(frozen=True)
class Recorded:
    """Durations from a text file, with or without a heading.

    One column: a pool that every client draws from. Two columns, client and seconds: each client
    repeats its own in order, and one without any draws from the pool of all.
    """

    path: str

    def __str__(self) -> str:
        return write("recorded", self.path)

    def bind(self, draws: Draws, population: int) -> Callable[[int, int, float], float]:
        own: dict[int, array[float]] = {}
        pool = array("d")
        for client, seconds in _rows(self.path):
            pool.append(seconds)
            if client is not None:
                own.setdefault(client, array("d")).append(seconds)
        if not pool:
            raise InputError(f"{self.path} holds no durations: give a file with one number on each line.")
        pool = array("d", sorted(pool))

        def seconds_of(client: int, visit: int, u: float) -> float:
            mine = own.get(client)
            return mine[visit % len(mine)] if mine else pool[int(u * len(pool))]

        return seconds_of


def _rows(path: str) -> Iterator[tuple[int | None, float]]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read the recorded delays in {path}: {reason}.") from None
    columns = 0
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if cells == [""]:
            continue
        if not columns:
            columns = len(cells)
            if not any(_is_number(cell) for cell in cells):
                continue  # a heading
        if len(cells) != columns or columns > 2:
            wanted = "seconds, or client and seconds" if columns > 2 else f"{columns} as above"
            raise InputError(f"{path}, line {number}: '{line}' has {len(cells)} columns: write {wanted}.")
        *clients, seconds = cells
        if not _is_number(seconds) or not isfinite(float(seconds)) or float(seconds) < 0:
            raise InputError(f"{path}, line {number}: '{seconds}' is not a finite number of at least 0.")
        if clients and not clients[0].isdecimal():
            raise InputError(f"{path}, line {number}: '{clients[0]}' is not a client: count from 0.")
        yield (int(clients[0]) if clients else None), float(seconds)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
