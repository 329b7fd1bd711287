"""The runs that are compared with oracles: each oracle's file has its own, in `CASES`, by name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, NamedTuple

from oracles.replay import Vector

RATES = {"local_lr": 0.2, "server_lr": 0.5}
ADAPTIVE = {"local_lr": 0.2, "server_lr": 0.03}
MOMENTUM = {"local_lr": 0.2, "server_lr": 0.3, "beta": 0.4}
SYSTEM = (3, 3, 8)  # S, K and T of the runs
LATE = frozenset({"asynchronous everybody"})


class Case(NamedTuple):
    """One method of the catalogue with its parameters, and an oracle with its own."""

    method: str
    given: Mapping[str, Any]
    oracle: Callable[..., list[Vector]]
    known: Mapping[str, Any]
    weights: str = "constant"  # of stale updates
    prompt: bool = False  # whether the method is defined without staleness alone
    two_phases: bool = False  # whether two server steps make one round
    max_staleness: float = float("inf")
    only: frozenset[str] = frozenset()  # dispatches that are enough for this case; none: all
    work: frozenset[str] = frozenset({"steps", "epochs"})  # equal numbers of local steps, and unequal ones
    tolerance: float = 1e-10
    settings: Mapping[str, Any] = MappingProxyType({})  # of the run: local optimiser, schedules, weight decay

    def meets(self, dispatch: str) -> bool:
        """Whether the case is tried under this dispatch."""
        if self.two_phases or dispatch == "phases":
            return self.two_phases and dispatch == "phases"
        return dispatch == "synchronous" if self.prompt else not self.only or dispatch in self.only


def load_cases() -> dict[str, Case]:
    """The cases of all oracles."""
    found: dict[str, Case] = {}
    for module in iter_modules([str(Path(__file__).parent)]):
        cases = getattr(import_module(f"oracles.{module.name}"), "CASES", {})
        assert not found.keys() & cases.keys()
        found |= cases
    return found
