"""Tasks that were started and of which nothing has come back."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.core import Task

_RECENT = 256  # answered messages that are remembered


@dataclass
class Flight:
    """One of them; it has a number and a node once it was sent."""

    task: Task
    started: float
    sure: bool  # of the full-participation start: must not get lost
    number: str | None = None
    node: int | None = None
    sent: float = 0.0


class Flights:
    """One for each client at most."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self._numbers: dict[str, Flight] = {}
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._answered: set[str] = set()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def __contains__(self, client: int) -> bool:
        return client in self._flights

    @property
    def numbers(self) -> list[str]:
        """The messages that wait for an answer."""
        return list(self._numbers)

    def add(self, flight: Flight) -> None:
        self._flights[flight.task.client] = flight

    def send(self, flight: Flight, number: str, node: int, now: float) -> None:
        """It is on its way."""
        flight.number, flight.node, flight.sent = number, node, now
        self._numbers[number] = flight

    def find(self, number: str) -> Flight | None:
        """The one that a message was sent for."""
        return self._numbers.get(number)

    def knew(self, number: str) -> bool:
        """Whether a message with this number was sent, and is settled."""
        return number in self._answered

    def end(self, flight: Flight) -> None:
        """Something came back of it, or never will."""
        del self._flights[flight.task.client]
        if flight.number is not None:
            del self._numbers[flight.number]
            if len(self._recent) == _RECENT:
                self._answered.discard(self._recent[0])
            self._recent.append(flight.number)
            self._answered.add(flight.number)
