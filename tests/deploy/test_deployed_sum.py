"""Uploads that are added to the sum as they arrive: the same model, after whatever happened to the server."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy_world import Deployment, ramdisk
from offbeat import Asynchronous, Median, Participation, Private
from offbeat.core import Task
from offbeat.deploy.server.journal import Journal
from offbeat.deploy.server.session import DeployedSession, StopRequested
from offbeat.engines.engine import ClientUpdates
from offbeat.schedule.dispatch import TimedPoisson
from offbeat.schedule.staleness import Polynomial
from worlds import CLASSES, FEATURES

PARAMETERS = (FEATURES + 1) * CLASSES
BUFFER = 5


@pytest.fixture
def place() -> Iterator[Path]:
    with ramdisk() as folder:
        yield folder


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many uploads are read at once, and how many were accepted by then; two are added at a time."""
    monkeypatch.setattr("offbeat.aggregate.mean._ADDED", 2 * PARAMETERS + 1)
    sizes: list[tuple[int, int]] = []
    whole = DeployedSession.gather

    def gather(self: DeployedSession, tasks: Sequence[Task], version: int) -> ClientUpdates:
        sizes.append((len(tasks), self._journal.newest))
        return whole(self, tasks, version)

    monkeypatch.setattr(DeployedSession, "gather", gather)
    return sizes


def private() -> Private:
    often = Participation(max_participations=40, min_separation=1)
    return Private((("delta", 0.5),), 0.3, 1e-5, participation=often, noise_seed=3)


PROMPT = {"poll": 0.02}  # an upload is taken when it comes, as where a bell rings
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("fedbuff", {"weights": Polynomial(0.5)}),
    ("ca2fl", {}),
    ("padamfed-vr", {}),
    ("fedbuff", {"aggregate": private()}),
]


@pytest.mark.parametrize(("name", "options"), RUNS)
def test_a_server_that_was_stopped_with_half_a_buffer_added_goes_on_to_the_bit(
    place: Path, gathered: list[tuple[int, int]], name: str, options: dict[str, Any]
) -> None:
    run = Deployment(place, name, buffer=BUFFER, clients=8, dispatch=Asynchronous(7), terms=PROMPT, **options)
    stops = iter([13, 21, 28])
    stop = next(stops)
    with run.joined():
        with pytest.raises(StopRequested):
            run.serve(stop=lambda: run.log.count("accepted") >= stop)
        for each in stops:
            with pytest.raises(StopRequested):
                run.serve(resume=True, stop=lambda each=each: run.log.count("accepted") >= each)  # type: ignore[misc]
        run.serve(resume=True)
    assert max(size for size, _ in gathered) <= 2
    assert torch.equal(run.model(), run.simulated())


def test_uploads_are_added_while_the_buffer_is_being_filled(
    place: Path, gathered: list[tuple[int, int]]
) -> None:
    run = Deployment(place, "fedbuff", buffer=BUFFER, dispatch=Asynchronous(5), rounds=3, terms=PROMPT)
    with run.joined():
        run.serve()
    sizes, accepted = zip(*gathered, strict=True)
    assert sizes == (2, 2, 1) * 3
    for step in range(3):
        first, second, third = accepted[3 * step : 3 * step + 3]
        assert first < second < third, "a piece is added when it is there, not when the buffer is full"


def test_a_release_by_a_clock_adds_what_has_arrived_for_it(
    place: Path, gathered: list[tuple[int, int]]
) -> None:
    run = Deployment(place, "fedbuff", buffer=4, clients=8, dispatch=TimedPoisson(8.0, 0.6), rounds=4)
    with run.joined():
        run.serve()
    tasks = [len(line["tasks"]) for line in run.trace()]
    assert max(tasks) > 2
    assert sum(size for size, _ in gathered) == sum(tasks)
    assert max(size for size, _ in gathered) <= 2
    assert torch.equal(run.model(), run.simulated())


def test_a_median_reads_all_uploads_of_a_buffer_at_once(place: Path, gathered: list[tuple[int, int]]) -> None:
    run = Deployment(place, "fedbuff", buffer=BUFFER, dispatch=Asynchronous(5), rounds=3, aggregate=Median())
    with run.joined():
        run.serve()
    assert [size for size, _ in gathered] == [BUFFER] * 3


def test_a_resumed_server_reads_all_uploads_of_its_buffer_again(
    place: Path, gathered: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose piece was added before it was stopped, with their checksums."""
    run = Deployment(place, "fedbuff", buffer=BUFFER, clients=8, dispatch=Asynchronous(7), terms=PROMPT)
    with run.joined():
        with pytest.raises(StopRequested):
            run.serve(stop=lambda: run.log.count("accepted") >= 9)
        gathered.clear()
        read: list[Task] = []
        whole = Journal.read

        def watched(self: Journal, task: Task) -> Any:
            read.append(task)
            return whole(self, task)

        monkeypatch.setattr(Journal, "read", watched)
        run.serve(resume=True)
    used = [Task(*task[:3]) for task in run.trace()[1]["tasks"]]
    assert set(used) <= set(read)
    assert torch.equal(run.model(), run.simulated())
