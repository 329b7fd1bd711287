"""Timed releases over sites: by a real clock, on whatever arrived in time, and late means dropped."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from deploy_world import Deployment, Letter, ramdisk
from offbeat import Private, RandomAllocation, TimedPoisson
from offbeat.algorithms.fedopt import FedOpt
from offbeat.core import Task
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.protocol.strict_json import Reason
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.server.session import StopRequested
from offbeat.errors import InputError
from offbeat.schedule.dispatch import Dispatch
from offbeat.training import checkpoint
from offbeat.training.runner import Progress

PERIOD = 6.0
ALLOCATION = RandomAllocation(PERIOD, 4, lead=4)
TIMED = [ALLOCATION, TimedPoisson(PERIOD, 0.5)]


@pytest.fixture
def place() -> Iterator[Path]:
    with ramdisk() as folder:
        yield folder


class SameDelay(Random):
    """Every answer takes as long."""

    def uniform(self, a: float, b: float) -> float:
        return 2.0


def deployment(place: Path, dispatch: Dispatch = ALLOCATION, **options: Any) -> Deployment:
    return Deployment(place, "fedbuff", clients=8, buffer=2, rounds=12, dispatch=dispatch, **options)


@pytest.mark.parametrize("dispatch", TIMED)
def test_releases_are_made_by_the_clock_of_what_arrived_in_time(place: Path, dispatch: Dispatch) -> None:
    run = deployment(place, dispatch)
    begun = []
    with run.joined():
        run.serve(look=lambda progress: begun.append(run.clock.now))
    torch.testing.assert_close(run.model(), run.retold(), rtol=0, atol=1e-12)
    times = [line["time"] for line in run.trace()]
    assert times == pytest.approx([times[0] + PERIOD * step for step in range(12)], abs=0.02)
    tasks = [task for line in run.trace() for task in line["tasks"]]
    assert len(tasks) > 12
    for line in run.trace():
        assert all(arrived <= line["time"] for *_, arrived in line["tasks"])
    visited = {(client, line["version"]) for line in run.trace() for client, *_ in line["tasks"]}
    assert len(visited) == len(tasks)


def test_a_site_is_given_nine_tenths_of_the_time_until_its_release(place: Path) -> None:
    run = deployment(place, TimedPoisson(PERIOD, 0.5), terms={"deadline": 1000.0})
    push, shares = run.network.push, []

    def watched(node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        if kind == "task":
            shares.append(json.loads(header)["seconds"] / timeout)
        return push(node, kind, header, payload, timeout)

    run.network.push = watched  # type: ignore[method-assign]
    with run.joined():
        run.serve()
    assert len(shares) > 12
    assert shares == pytest.approx([0.9] * len(shares))


def test_a_site_contributes_once_to_an_epoch(place: Path) -> None:
    run = deployment(place)
    with run.joined():
        run.serve()
    seen = [(client, (line["version"] - 1) // 4) for line in run.trace() for client, *_ in line["tasks"]]
    assert len(set(seen)) == len(seen)


def slow_site(run: Deployment, node: int, seconds: float) -> None:
    """The answers of one site take so long, and what it does meanwhile does not matter."""
    push = run.network.push

    def later(to: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        number = push(to, kind, header, payload, timeout)
        if to == node and kind == "task":
            run.network.letters[number].due = run.clock.now + seconds
        return number

    run.network.push = later  # type: ignore[method-assign]


def test_a_late_upload_is_dropped_and_never_moved_to_a_later_release(place: Path) -> None:
    run = deployment(place, RandomAllocation(PERIOD, 4, lead=1))
    with run.joined():
        slow_site(run, 1, 1.5 * PERIOD)
        run.serve()
    late = next(
        client
        for client, site in json.loads((run.folder / "roster.json").read_text()).items()
        if isinstance(site, dict) and site["name"] == "0"
    )
    assert all(str(client) != late for line in run.trace() for client, *_ in line["tasks"])
    assert Reason.LATE in run.log.reasons()
    torch.testing.assert_close(run.model(), run.retold(), rtol=0, atol=1e-12)


def others(run: Deployment, *, silent: bool) -> list[list[list[float]]]:
    """What all sites but the first contribute, where that one answers or does not."""
    run.network.random = SameDelay()

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        return [] if silent and letter.kind == "task" and letter.node == 1 else [reply]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    return [[task[:3] for task in sorted(line["tasks"]) if task[0] != 0] for line in run.trace()]


@pytest.mark.parametrize("dispatch", TIMED)
def test_other_sites_contribute_the_same_whether_one_answers_or_not(place: Path, dispatch: Dispatch) -> None:
    # This is what the proof rests on.
    there = others(deployment(place / "there", dispatch), silent=False)
    assert others(deployment(place / "silent", dispatch), silent=True) == there
    assert sum(map(len, there)) > 12


def test_sites_are_told_to_answer_before_the_release(place: Path) -> None:
    run = deployment(place)
    seconds = []
    run.network.meddle = lambda letter, reply: (
        seconds.append(json.loads(letter.note)["seconds"]) if letter.kind == "task" else None,
        [reply],
    )[1]
    with run.joined():
        run.serve()
    assert seconds
    assert all(0 < each <= 0.9 * 4 * PERIOD for each in seconds)


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_run_that_was_killed_goes_on_with_the_same_clock_and_draws(place: Path, at: int) -> None:
    run = deployment(place, aggregate=private())
    stop: list[bool] = []

    def look(progress: Progress) -> None:
        if progress.version == at:
            stop.append(True)

    with run.joined():
        calls = iter(range(100))
        with pytest.raises(StopRequested):
            run.serve(look=look, stop=lambda: bool(stop) and next(calls) > 2)
        drawn = secret(run)
        run.clock.sleep(1000.0)  # while the server is away its clock stands still
        run.serve(resume=True)
        assert secret(run) == drawn
    times = [line["time"] for line in run.trace()]
    assert times == pytest.approx([times[0] + PERIOD * step for step in range(12)], abs=0.02)
    seen = [(client, (line["version"] - 1) // 4) for line in run.trace() for client, *_ in line["tasks"]]
    assert len(set(seen)) == len(seen)
    tasks = {Task(*map(int, task[:3])) for line in run.trace() for task in line["tasks"]}
    assert len(tasks) > 8


def private(**options: Any) -> Private:
    return Private.of(FedOpt(0.1, 1.0), 0.5, 1.0, 1e-5, **options)


def secret(run: Deployment) -> int:
    facts = checkpoint.load(run.folder / "checkpoint" / "state.safetensors").facts
    found: int = facts["flow"]["draws"]["secret"]
    return found


def test_a_private_run_tells_two_epsilons_and_draws_by_a_secret(place: Path) -> None:
    run = deployment(place, aggregate=private())
    last: list[Progress] = []
    with run.joined():
        run.serve(look=last.append)
    outcome = last[-1].outcome
    assert outcome is not None
    assert outcome.spent is not None
    assert outcome.spent.unamplified is not None
    assert 0 < outcome.spent.epsilon < outcome.spent.unamplified
    assert secret(run) > 2**200


def test_the_clock_starts_when_a_nominal_cohort_of_sites_is_there(place: Path) -> None:
    run = deployment(place)
    with run.joined():
        run.network.hidden = set(range(2, 9))
        sleep = run.clock.sleep

        def arrive(seconds: float) -> None:
            sleep(seconds)
            if run.clock.now > 1100.0:
                run.network.hidden = set()

        run.serve(sleep=arrive)
    assert run.trace()[0]["time"] > 100.0 + PERIOD


TRAINING = {"clients": 100, "buffer": 5, "dispatch": "allocation", "release_period": 60.0}
PRIVACY = {"clip": 1.0, "noise": 1.0, "delta": 1e-6}


def settings(**tables: Any) -> ServeConfig:
    training = TRAINING | tables.pop("training", {})
    given = {"task": {"function": "somewhere:task"}, "training": training, "privacy": PRIVACY} | tables
    return ServeConfig.of(given, Path())


def test_serve_toml_takes_timed_releases() -> None:
    made = settings(training={"lead": 3}).experiment
    assert (made.dispatch, made.release_period, made.lead) == ("allocation", 60.0, 3)
    assert settings(watch={"port": 8000}).page.port == 8000


def test_the_settings_in_the_guide_are_read() -> None:
    text = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    made = ServeConfig.of({"task": {"function": "a:b"}} | tomllib.loads(block), Path()).experiment
    assert made.dispatch == "allocation"
    assert made.clip == "0.5"


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"training": {"release_period": 0.0}}, "release_period"),
        (
            {"training": {"local_epochs": 1, "examples": 100}},
            "with local_epochs the time on a device tells how many examples a client has",
        ),
        ({"network": {"deadline": "quantile:0.9"}}, "lets other clients decide whether a client is late"),
        ({"watch": {"port": 8000, "host": "0.0.0.0"}}, "the live page tells who was drawn"),
        ({"privacy": PRIVACY | {"max_participations": 3}}, "itself draws how often a client contributes"),
    ],
)
def test_what_breaks_an_assumption_is_one_sentence(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        settings(**tables)
    assert "\n" not in str(error.value)
