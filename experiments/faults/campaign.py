"""Real processes of a deployment under faults at random moments: is anything lost, is anything bad accepted?

    python experiments/faults/campaign.py --faults 100 --seed 0 --minutes 25 --out experiments/faults/records

Every kind comes, where there is room for all. Which faults come in which order and after which pauses follows
from the seed; whom they hit in which moment depends on the machine. A line is written for each fault, and one
for each run. The exit code is 1 where anything was lost, anything bad was accepted, or a run did not end with
its model.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from faults import Act, kinds
from verdict import clean, verdict
from world import ROGUES, World

from offbeat import draws

ROUNDS, SECURE_ROUNDS = 70, 12
_PAUSE, _SERVER_PAUSE = 3.0, 15.0  # seconds at most before a fault; without its server a run stands still
_ENDING = 600.0  # seconds for a run to end when no more faults come


class Fault(NamedTuple):
    """One to come; `befalls` says who may be its lane."""

    kind: str
    befalls: str
    act: Act
    pause: float  # before it, of the longest


def drawn(count: int, seed: int, skip: int = 0, *, secure: bool, words: Sequence[str] = ("",)) -> list[Fault]:
    """So many faults in an order that follows from the seed, after the first `skip`.

    Only kinds come whose name has one of these words.
    """
    chosen_kinds = [each for each in kinds() if any(word in each[0] for word in words)]
    pool = [each[:3] for each in chosen_kinds for _ in range(each[4] if secure else each[3])]
    rng = draws.generator(seed, "faults", int(secure))
    chosen = [
        pool[place] for _ in range(-(-(skip + count) // len(pool))) for place in rng.permutation(len(pool))
    ]
    pauses = rng.uniform(size=len(chosen)).tolist()
    faults = [Fault(kind, who, act, pause) for (kind, who, act), pause in zip(chosen, pauses, strict=True)]
    return faults[skip : skip + count]


def secure_count(count: int) -> int:
    """How many of them a run with secure sums gets; none where there are few."""
    every = sum(secure for *_, secure in kinds())
    return every if count >= 5 * every else 0


class Campaign:
    """Goes through its faults in one run after another."""

    def __init__(self, place: Path, out: Path, until: float, rounds: int) -> None:
        self._place, self._out, self._until, self._rounds = place, out, until, rounds
        self._begun = time.time()
        self._lock = threading.Lock()
        self._runs = 0
        self.failed = False

    def go(self, faults: list[Fault], *, secure: bool) -> None:
        """Until all have been tried or time is up; every run goes to its end."""
        left = {who: deque(f for f in faults if f.befalls == who) for who in {f.befalls for f in faults}}
        while any(left.values()) and time.monotonic() < self._until:
            self._runs += 1
            place = self._place / f"run-{self._runs}"
            place.mkdir(parents=True)
            world = World(place, SECURE_ROUNDS if secure else self._rounds, secure=secure)
            remains: list[str] = []
            try:
                world.begin()
                lanes = [("rogue", name) for name in ROGUES] + [("site", name) for name in world.sites]
                threads = [
                    threading.Thread(
                        target=self._lane, args=(world, left.get(who, deque()), name), daemon=True
                    )
                    for who, name in [*lanes, ("server", ""), ("helper", "")]
                ]
                for thread in threads:
                    thread.start()
                self._see_through(world, threads)
            finally:
                remains = world.end()
            found = verdict(world) | {"remains": remains, "secure": secure}
            self.failed |= not clean(found)
            self._write({"run": self._runs, "verdict": found})

    def _see_through(self, world: World, threads: list[threading.Thread]) -> None:
        """Until the run has ended; it is hurried by nobody, and given up if it stands still."""
        limit = self._until + _ENDING
        while not world.is_over() or any(thread.is_alive() for thread in threads):
            world.tend()
            if time.monotonic() > limit:
                raise TimeoutError(f"the run did not end: {world.processes['serve'].said[-2000:]}")
            time.sleep(1)

    def _lane(self, world: World, faults: "deque[Fault]", name: str) -> None:
        """One fault after another to one site, or to the server."""
        while not world.is_over() and time.monotonic() < self._until:
            if world.client(name) is None if name else not world.events():
                time.sleep(1)  # it has not begun
                continue
            try:
                fault = faults.popleft()
            except IndexError:
                return
            time.sleep(fault.pause * (_SERVER_PAUSE if fault.befalls == "server" else _PAUSE))
            if world.is_over():
                faults.appendleft(fault)
                return
            begun = time.time()
            try:
                words, seconds, bad, stuck = fault.act(world, name)
            except Exception as error:
                words, seconds, bad, stuck = f"the campaign itself failed: {error!r}", None, False, True
            self.failed |= bad or stuck
            facts: dict[str, Any] = {
                "run": self._runs,
                "time": round(begun - self._begun, 1),
                "kind": fault.kind,
                "seen": words,
                "seconds": None if seconds is None else round(seconds, 1),
                "bad": bad,
            }
            self._write(facts)

    def _write(self, facts: dict[str, Any]) -> None:
        with self._lock, self._out.open("a") as file:
            file.write(json.dumps(facts) + "\n")
            print(json.dumps(facts), flush=True)


def main() -> int:
    """All of it; where the processes worked is kept if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="so many, which another campaign has had")
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no more faults come")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="server steps of a run")
    parser.add_argument("--secure", type=int, help="so many of them in a run with secure sums")
    parser.add_argument("--kinds", nargs="+", default=("",), help="only those whose name has such a word")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the records")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("it was stopped"))
    given.out.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    secure = secure_count(given.faults) if given.secure is None else given.secure
    out = given.out / f"{given.seed}-{given.skip}-{given.faults - secure}-{secure}.jsonl"
    out.unlink(missing_ok=True)
    campaign = Campaign(place, out.absolute(), time.monotonic() + 60 * given.minutes, given.rounds)
    if secure:
        campaign.go(drawn(secure, given.seed, given.skip, secure=True), secure=True)
    main = drawn(given.faults - secure, given.seed, given.skip, secure=False, words=given.kinds)
    campaign.go(main, secure=False)
    if campaign.failed:
        print(f"something was not as it should be: see {place}", file=sys.stderr)
        return 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
