"""Client work at real sites, with a network between."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.aggregate.uploads import clients_read_staleness
from offbeat.core import AnyAlgorithm, Vector
from offbeat.deploy.attendance import Attendance
from offbeat.deploy.exchange import Exchange
from offbeat.deploy.guests import Guests
from offbeat.deploy.intake import plain_intake
from offbeat.deploy.journal import Journal
from offbeat.deploy.line import Line
from offbeat.deploy.post import Post
from offbeat.deploy.published import Published, limit_of
from offbeat.deploy.roster import Roster
from offbeat.deploy.session import Deployment
from offbeat.deploy.terms import Terms
from offbeat.deploy.told import Nobody, Told
from offbeat.deploy.wire import form_of
from offbeat.errors import InputError
from offbeat.problem import Problem, Statistics
from offbeat.schedule.chance import Draws


@dataclass(frozen=True)
class Deployed:
    """One site is one client; what is accepted is written to `folder` before anything else is done with it.

    The loop above has to take a checkpoint after every server step and confirm it (`save_every=1`). When
    `stop` says so the session raises `Stopped` while it waits: all that was accepted is in the folder.
    """

    post: Post
    problem: Problem
    terms: Terms
    folder: Path
    told: Told = field(default_factory=Nobody)
    stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    availability: Attendance = field(default_factory=Attendance)  # follows whatever session was opened last

    @property
    def clients(self) -> int:
        return self.terms.clients

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Draws) -> Deployment:
        if clients_read_staleness(algorithm):
            raise InputError(
                f"the clients of {type(algorithm).__name__} look at how stale their task will be, "
                "which nobody knows before it is back: use another method, or the simulator."
            )
        x, statistics = self.problem.initial()
        terms, told = self.terms, self.told
        roster = Roster(self.folder / "roster.json", self.clients, terms.bound)
        guests = Guests(roster, form_of((x, statistics)), terms, told)
        published = Published(x, statistics)
        journal = Journal(self.folder / "journal")
        line = Line(self.clock, terms.patience, told)
        exchange = Exchange(self.post, terms, line, guests, published, journal, told)
        session = Deployment(terms, exchange, published, journal, self.stop, self.clock, self.sleep)
        self.availability.follow(session.idle, terms.poll)
        return session


def most_bytes(algorithm: AnyAlgorithm, problem: Problem, terms: Terms) -> int:
    """The most that an upload may have; what fetches uploads need not take in more."""
    x, statistics = problem.initial()
    return max(limit_of(plain_intake(algorithm, x, statistics, version), terms) for version in (0, 1))
