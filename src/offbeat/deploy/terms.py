"""What a session is told of the run, of sites and of the network between."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Terms:
    """Times are in seconds."""

    plan: dict[str, Any]  # what a site needs beyond its own code: it goes into every task's note
    clients: int
    deadline: float = 600.0  # for a task
    greeting: float = 120.0  # for a site to say who it is
    poll: float = 0.5  # between two looks
    refresh: float = 2.0  # between two looks at who is there
    grace: float = 10.0  # a node may be missing from the list, or a task wait to be sent
    patience: float = 600.0  # without the network, before the run ends, saved
    aside: float = 2.0  # a client that failed once; doubled with each failure in a row
    most_bytes: int | None = None  # of an upload; None: four times what it should be
    most_norm: float | None = None  # of an upload's field without a bound; None: by what is usual; 0: any
    bound: bool = False  # a site to its node for good: where nodes have keys
