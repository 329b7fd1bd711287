"""Seeded faults of every kind that can be had without processes: nothing accepted is lost, nothing bad used.

A kill is an exception out of any call that touches the network or the disk, before it, after it or in the
middle of writing. What a loss of power would undo is not tried here.
"""

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from deploy_world import Deployment, Letter, ramdisk
from offbeat import Asynchronous, Synchronous, files
from offbeat.core import Task
from offbeat.deploy.protocol.transport import Reply, TransportError
from offbeat.deploy.server.journal import Journal
from offbeat.training.folder import RunFolder

pytestmark = pytest.mark.slow

CAMPAIGNS = 20
FAULTS = 500  # at least so many in all
DEADLINE = 20.0


class Killed(BaseException):
    """The server is gone."""


class Campaign:
    """One run, and everything that goes wrong with it."""

    def __init__(self, seed: int, place: Path) -> None:
        self.random = random = Random(seed)
        self.faults: Counter[str] = Counter()
        self.run = Deployment(
            place,
            ("ca2fl", "adamasfl", "fedbuff", "scaffold")[seed % 4],
            rounds=10,
            dispatch=random.choice([Asynchronous(4), Asynchronous(5, eager=False), Synchronous(3)]),
            max_staleness=random.choice([1, 1000]),
            terms={"deadline": DEADLINE, "grace": 4.0, "bind_names": False},
        )
        self.network, self.clock = self.run.network, self.run.clock
        self.network.random = Random(seed + 1)
        self.network.meddle, self.network.trouble = self.meddle, self.trouble
        self.accepted: dict[Task, bytes] = {}
        self.kills = 5
        self.fuse = self.length()
        self.away_until = 0.0
        self.later: list[tuple[float, Callable[[], None]]] = []  # what is still to happen, and when
        self.seen: list[Reply] = []  # honest uploads of before

    def length(self) -> int:
        """How many calls until the next kill."""
        return self.random.choice([self.random.randint(1, 60), self.random.randint(1, 600)])

    def burn(self) -> None:
        self.fuse -= 1
        if self.fuse == 0 and self.kills:
            self.kills -= 1
            self.faults["kill"] += 1
            raise Killed

    def trouble(self, call: str) -> None:
        for moment, happen in list(self.later):
            if self.clock.now >= moment:
                self.later.remove((moment, happen))
                happen()
        self.burn()
        if self.random.random() < 0.004:
            self.away_until = self.clock.now + self.random.uniform(0.0, 40.0)
            self.faults["unreachable"] += 1
        if self.clock.now < self.away_until:
            raise TransportError("the network is away")

    def meddle(self, letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind == "task":
            self.seen = [*self.seen[-20:], reply]
        if self.random.random() > 0.4:
            return [reply]
        kind = self.random.choice([name for name in dir(self) if name.startswith("do_")])
        self.faults[kind] += 1
        replies: list[Reply] = getattr(self, kind)(reply)
        return replies

    def do_drop(self, reply: Reply) -> list[Reply]:
        return []

    def do_delay(self, reply: Reply) -> list[Reply]:
        self.after(DEADLINE + 5, lambda: self.network.extra.append(reply))
        return []

    def do_answer_twice(self, reply: Reply) -> list[Reply]:
        return [reply, reply]

    def do_answer_again(self, reply: Reply) -> list[Reply]:
        self.after(self.random.uniform(1, 50), lambda: self.network.extra.append(reply))
        return [reply]

    def do_answer_with_an_older_upload(self, reply: Reply) -> list[Reply]:
        others = [old for old in self.seen if old.header != reply.header]
        if not others:
            return []
        old = self.random.choice(others)
        return [reply._replace(header=old.header, payload=old.payload)]

    def do_answer_as_another_node(self, reply: Reply) -> list[Reply]:
        return [reply._replace(node=reply.node + 1), reply]

    def do_answer_what_was_never_asked(self, reply: Reply) -> list[Reply]:
        return [reply._replace(message_id="m-1"), reply]

    def do_nan(self, reply: Reply) -> list[Reply]:
        bad = struct.pack("<d", self.random.choice([float("nan"), float("inf"), -float("inf")]))
        place = 8 * self.random.randrange(max(1, len(reply.payload) // 8))
        return [reply._replace(payload=reply.payload[:place] + bad + reply.payload[place + 8 :])]

    def do_truncate(self, reply: Reply) -> list[Reply]:
        return [
            reply._replace(payload=reply.payload[: -self.random.randint(1, 9)] if reply.payload else b"x")
        ]

    def do_lengthen(self, reply: Reply) -> list[Reply]:
        return [reply._replace(payload=reply.payload + bytes(self.random.choice([1, 8, 10**6])))]

    def do_other_shape(self, reply: Reply) -> list[Reply]:
        return [self.noted(reply, form=[["float64", [9, 2]]])]

    def do_other_dtype(self, reply: Reply) -> list[Reply]:
        return [self.noted(reply, form=[["float32", [36]]])]

    def do_other_run(self, reply: Reply) -> list[Reply]:
        return [self.noted(reply, run="0" * 32)]

    def do_future(self, reply: Reply) -> list[Reply]:
        task = json.loads(reply.header).get("task", [0, 0, 0])
        return [self.noted(reply, task=[task[0], task[1] + 1, task[2]])]

    def do_other_client(self, reply: Reply) -> list[Reply]:
        task = json.loads(reply.header).get("task", [0, 0, 0])
        return [self.noted(reply, task=[(task[0] + 1) % 5, *task[1:]])]

    def do_garbage(self, reply: Reply) -> list[Reply]:
        return [reply._replace(header=reply.header[: len(reply.header) // 2])]

    def do_forget(self, reply: Reply) -> list[Reply]:
        """A note that says the site has lost its memory; harmless where there was none."""
        return [self.noted(reply, memory="new")] if "memory" in reply.header else []

    def do_fail(self, reply: Reply) -> list[Reply]:
        return [Reply(reply.message_id, 1, "", b"", "code 2, it raised")]

    def do_raise(self, reply: Reply) -> list[Reply]:
        return [self.noted(reply, error="the site's own work failed.")]

    def do_leave(self, reply: Reply) -> list[Reply]:
        """The site is killed before its answer is out, and started again by another node."""
        site = self.network.leave(reply.node)
        site.close()
        client = int(site.name)
        self.after(self.random.uniform(0, 30), lambda: self.come(client))
        return []

    def do_flicker(self, reply: Reply) -> list[Reply]:
        self.network.hidden.add(reply.node)
        self.after(self.random.uniform(0, 8), lambda: self.network.hidden.discard(reply.node))
        return [reply]

    def come(self, client: int) -> None:
        self.network.join(self.run.site(client))

    def noted(self, reply: Reply, **changes: Any) -> Reply:
        return reply._replace(header=json.dumps(json.loads(reply.header) | changes))

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.later.append((self.clock.now + seconds, happen))

    def restart(self) -> None:
        """Another Flower run: sites may finish what they were sent, but nobody hears of it."""
        for letter in list(self.network.letters.values()):
            if letter.node in self.network.sites and self.random.random() < 0.5:
                self.network.answer(letter)
        self.network.letters.clear()
        self.network.extra.clear()
        self.fuse = self.length()
        self.clock.sleep(self.random.uniform(0, 100))


@pytest.fixture
def place() -> Iterator[Path]:
    with ramdisk() as folder:
        yield folder


def explode(campaign: Campaign, patch: pytest.MonkeyPatch) -> None:
    """Kills before, after and in the middle of all that is written."""
    replace, keep, drop, save = files.write_atomic, Journal.append, Journal.drop, RunFolder.save

    def replacing(path: Path, pieces: Iterable[bytes]) -> None:
        pieces = list(pieces)
        campaign.burn()
        try:
            campaign.burn()
        except Killed:
            whole = b"".join(pieces)
            path.with_name(path.name + files.PART_SUFFIX).write_bytes(whole[: len(whole) // 2])
            raise
        replace(path, pieces)
        if path.name.endswith(".upload"):
            task = Task(*map(int, path.stem.split("-")))
            assert task not in campaign.accepted
            campaign.accepted[task] = pieces[-1]
        campaign.burn()

    def keeping(journal: Journal, epoch: int, facts: dict[str, Any]) -> None:
        campaign.burn()
        try:
            campaign.burn()
        except Killed:
            line = json.dumps(facts | {"epoch": epoch}).encode()
            journal._file.write(line[: len(line) // 2])
            raise
        keep(journal, epoch, facts)
        campaign.burn()

    def dropping(journal: Journal, tasks: Iterable[Task]) -> None:
        campaign.burn()
        for task in list(tasks):
            drop(journal, [task])
            campaign.burn()

    def saving(folder: RunFolder, state: Any) -> None:
        campaign.burn()
        save(folder, state)
        campaign.burn()

    patch.setattr(files, "write_atomic", replacing)
    patch.setattr(Journal, "append", keeping)
    patch.setattr(Journal, "drop", dropping)
    patch.setattr(RunFolder, "save", saving)


def check(campaign: Campaign) -> None:
    run, accepted = campaign.run, campaign.accepted
    lines = run.trace()
    used = [Task(*task[:3]) for line in lines for task in line["tasks"]]
    dropped = [Task(*task) for line in lines for task in line["dropped"]]
    assert len(set(used + dropped)) == len(used + dropped)
    assert set(used + dropped) <= set(accepted)
    left = set(accepted) - set(used + dropped)  # the run had its last version when these came
    assert left <= run.files()
    assert len(left) <= 5
    for task in used:
        assert accepted[task] in campaign.network.honest[task]
    torch.testing.assert_close(run.model(), run.retold(), rtol=0, atol=1e-12)


def test_no_fault_loses_an_accepted_upload_or_lets_a_bad_one_in(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: Counter[str] = Counter()
    for seed in range(CAMPAIGNS):
        campaign = Campaign(seed, place / str(seed))
        with campaign.run.joined(), monkeypatch.context() as patch:
            explode(campaign, patch)
            resume = False
            while True:
                try:
                    campaign.run.serve(resume)
                    break
                except Killed:
                    resume = True
                    campaign.restart()
        check(campaign)
        faults += campaign.faults
    assert faults.total() >= FAULTS
    assert len(faults) >= 22
    assert faults["kill"] >= 2 * CAMPAIGNS
