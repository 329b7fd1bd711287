"""Client work at real sites, with a network between."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.aggregate.uploads import clients_read_staleness
from offbeat.core import AnyAlgorithm, Vector
from offbeat.deploy.attendance import Attendance
from offbeat.deploy.claims import Claims
from offbeat.deploy.exchange import Exchange
from offbeat.deploy.guests import Guests
from offbeat.deploy.intake import plain_intake
from offbeat.deploy.journal import Journal
from offbeat.deploy.lengths import Lengths
from offbeat.deploy.line import Line
from offbeat.deploy.post import Knows, Post
from offbeat.deploy.published import Published, limit_of
from offbeat.deploy.roster import Roster
from offbeat.deploy.session import Deployment
from offbeat.deploy.set_aside import SetAside
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
    Where there is a file `set_aside`, a resumed run does not use the uploads that wait in its buffer, once.
    """

    post: Post
    problem: Problem
    terms: Terms
    folder: Path
    told: Told = field(default_factory=Nobody)
    stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    set_aside: Path | None = None
    sites: Path | None = None  # has the public keys of sites, by name
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
        claims = None
        if terms.bound and self.sites is not None and isinstance(self.post, Knows):
            claims = Claims(self.sites, self.post)
        guests = Guests(roster, form_of((x, statistics)), terms, told, claims)
        published = Published(x, statistics)
        journal = Journal(self.folder / "journal")
        line = Line(self.clock, terms.patience, told)
        lengths = Lengths(terms.most_norm, float(x.double().norm()))
        exchange = Exchange(self.post, terms, line, guests, published, journal, lengths, told)
        asked = self.set_aside is not None and self.set_aside.exists()
        aside = SetAside(self.set_aside, journal, told) if self.set_aside and asked else None
        session = Deployment(terms, exchange, published, journal, self.stop, self.clock, self.sleep, aside)
        self.availability.follow(session.idle, terms.poll)
        return session


def most_bytes(algorithm: AnyAlgorithm, problem: Problem, terms: Terms) -> int:
    """The most that an upload may have; what fetches uploads need not take in more."""
    x, statistics = problem.initial()
    return max(limit_of(plain_intake(algorithm, x, statistics, version), terms) for version in (0, 1))
