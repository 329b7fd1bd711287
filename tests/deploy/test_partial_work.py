"""Tasks that end early at sites, by a time limit or a recall: less work, and the model of the simulator."""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from deploy_world import Deployment, Letter, ramdisk, site_plan
from offbeat import Asynchronous, Examples, Participation, Private, Secure, Synchronous
from offbeat.aggregate.mean import Mean
from offbeat.aggregate.secure import RemoteSecure
from offbeat.core import Task
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.messages import RecallMessage, TaskMessage, pack, specs_of
from offbeat.deploy.protocol.strict_json import Reason
from offbeat.deploy.protocol.transport import Reply, TransportError
from offbeat.deploy.server.session import StopRequested
from offbeat.deploy.site.site import Site
from offbeat.errors import InputError
from offbeat.training import checkpoint
from secure_world import Nearby, new_desk
from worlds import make_world

STEPS = 6


@pytest.fixture
def place() -> Iterator[Path]:
    with ramdisk() as folder:
        yield folder


def ticking(seconds: float) -> Callable[[], float]:
    """A clock on which so much passes from each look to the next, which is a step of a task."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds
        return now

    return clock


def deployment(place: Path, name: str = "fedbuff", **options: Any) -> Deployment:
    """Of 18 s for the work of a task, in which site 0 can do one step, site 1 three, and the others all."""
    terms = {"deadline": 20.0, "partial_work": True} | options.pop("terms", {})
    clocks = {0: ticking(30.0), 1: ticking(5.0), 2: ticking(0.1), 3: ticking(0.1), 4: ticking(0.1)}
    return Deployment(place, name, steps=STEPS, site_clocks=clocks, terms=terms, **options)


def steps_by_site(run: Deployment) -> dict[int, set[int | None]]:
    """How many steps the tasks of each site had; None: all."""
    roster = json.loads((run.folder / "roster.json").read_text())
    found: dict[int, set[int | None]] = {}
    for line in run.trace():
        for task, steps in zip(line["tasks"], line.get("steps") or [None] * len(line["tasks"]), strict=True):
            found.setdefault(int(roster[str(task[0])]["name"]), set()).add(steps)
    return found


def private() -> Private:
    often = Participation(max_participations=40, min_separation=1)
    return Private((("delta", 0.5),), 0.3, 1e-5, participation=often, noise_seed=3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedbuff", {}),
        ("fednova", {}),
        ("cadence", {}),
        ("ca2fl", {}),
        ("fedbuff", {"compress": "topk:0.3"}),
        ("fedbuff", {"aggregate": private()}),
    ],
)
def test_a_site_sends_before_the_time_limit_what_it_has_and_the_trace_gives_the_model(
    place: Path, name: str, options: dict[str, Any]
) -> None:
    run = deployment(place, name, **options)
    with run.joined():
        run.serve()
    assert steps_by_site(run) == {0: {1}, 1: {3}, 2: {None}, 3: {None}, 4: {None}}
    assert torch.equal(run.model(), run.simulated())
    assert not run.log.reasons()


def test_secure_sums_are_of_what_was_done(place: Path) -> None:
    desk = new_desk(place / "store")
    aggregate = Mean(RemoteSecure(Secure(3), b"run", Nearby(desk)))
    run = deployment(place, "fednova", aggregate=aggregate, dispatch=Synchronous(3))
    with contextlib.closing(desk), run.joined():
        for site in run.network.sites.values():
            site._helper, site._minimum = desk.info.key.hex(), 3
        run.serve()
    assert set.union(*steps_by_site(run).values()) == {1, 3, None}
    assert not run.log.reasons()
    run.aggregate = Mean(Secure(3))  # in one process, which rounds alike
    assert torch.equal(run.model(), run.simulated())


def test_without_partial_work_nothing_ends_early(place: Path) -> None:
    run = deployment(place, terms={"partial_work": False})
    with run.joined():
        run.serve()
    assert set.union(*steps_by_site(run).values()) == {None}
    assert all("steps" not in line for line in run.trace())


def test_a_method_that_divides_by_the_steps_is_given_those_that_were_done(place: Path) -> None:
    """As if every task had as few steps in a simulation: only then the two are the same to the bit."""
    run, other = deployment(place, "fednova"), deployment(place / "b", "fednova", terms={"deadline": 1e6})
    for each in (run, other):
        with each.joined():
            each.serve()
    assert torch.equal(other.model(), other.simulated())
    assert not torch.equal(run.model(), other.model())


def enough(run: Deployment, accepted: int) -> bool:
    return run.log.count("accepted") >= accepted


def test_a_server_that_was_stopped_in_the_middle_of_a_buffer_knows_the_steps_of_what_it_accepted(
    place: Path,
) -> None:
    run = deployment(place, "fednova", buffer=4)
    with run.joined():
        for number, accepted in enumerate((6, 11, 15)):
            with pytest.raises(StopRequested):
                run.serve(bool(number), stop=partial(enough, run, accepted))
        run.serve(resume=True)
    assert {1, 3, None} == set.union(*steps_by_site(run).values())
    assert torch.equal(run.model(), run.simulated())


def test_the_start_of_all_clients_is_never_cut_short(place: Path) -> None:
    run = deployment(place, "padamfed-vr")
    with run.joined():
        run.serve()
    start, *others = run.trace()
    assert start["version"] == 0
    assert "steps" not in start
    assert any("steps" in line for line in others)
    assert torch.equal(run.model(), run.simulated())


def test_a_slow_network_leaves_less_time_for_the_work(place: Path) -> None:
    """What a client's upload took beside its work is left free twice, the next time."""
    run, told = deployment(place, clients=4, dispatch=Asynchronous(4)), {}
    run.site_clocks = dict.fromkeys(range(4), ticking(0.01))
    run.network.random.uniform = lambda low, high: 4.0  # type: ignore[method-assign]

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind == "task":
            asked = messages.decode_message(letter.note, messages.TaskMessage)
            told.setdefault(asked.task.client, []).append(asked.work)
        return [reply]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    for first, *others in told.values():
        assert first == pytest.approx(18.0)  # nine tenths
        assert all(10.0 < work < 13.0 for work in others)  # 20 less twice 4 and a poll


def test_tasks_that_were_cut_short_count_as_longer_for_a_limit_by_a_quantile(place: Path) -> None:
    run = deployment(place, rounds=12)
    kept: list[list[Any]] = []
    with run.joined():
        run.terms["deadline"] = "quantile:0.5"
        run.network.meddle = lambda letter, reply: [cut_to_one(letter, reply)]
        run.serve(look=lambda progress: kept.append(seen_durations(run)))
    assert len(kept[-1]) >= 20
    assert all(given_up == 1.0 for _, given_up in kept[-1])


def seen_durations(run: Deployment) -> list[Any]:
    facts = checkpoint.load(run.folder / "checkpoint" / "state.safetensors").facts
    found: list[Any] = facts["session"].get("deadline", [])
    return found


def cut_to_one(letter: Letter, reply: Reply) -> Reply:
    """Whatever a site did, it says that it ended early."""
    if letter.kind != "task":
        return reply
    upload = structs.replace(messages.decode_message(reply.header, messages.UploadMessage), steps=1)
    return reply._replace(header=messages.encode_message(upload))


def test_an_upload_that_has_arrived_and_waits_to_be_fetched_is_not_late(place: Path) -> None:
    run = Deployment(place, "fedbuff", terms={"deadline": 10.0}, rounds=3)
    pull, network = run.network.pull, run.network

    def one_at_a_time(message_ids: list[str]) -> list[Reply]:
        """Which takes longer than a task may."""
        tasks = [each for each in message_ids if network.letters[each].kind == "task"]
        if tasks:
            network.clock.sleep(12.0)
        network.backlog = frozenset(tasks[1:])
        return pull([each for each in message_ids if each not in tasks[1:]])

    network.pull = one_at_a_time  # type: ignore[method-assign, assignment]
    with run.joined():
        run.serve()
    assert not run.log.reasons()


def recalled_run(place: Path, recall: bool) -> Deployment:
    """Site 0 takes 60 s for a task, in which the others do many, and after two versions it is too late."""
    run = Deployment(
        place,
        "fednova",
        rounds=14,
        max_staleness=2,
        steps=STEPS,
        terms={"deadline": 200.0, "recall_stale": recall},
    )
    push = run.network.push

    def slow(node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        number = push(node, kind, header, payload, timeout)
        if node == 1 and kind == "task":
            run.network.letters[number].due = run.clock.now + 60.0
        return number

    run.network.push = slow  # type: ignore[method-assign]
    return run


def test_a_task_that_is_about_to_be_too_stale_is_recalled_and_used(place: Path) -> None:
    run = recalled_run(place, recall=True)
    with run.joined():
        run.serve()
    recalled = run.log.tasks("recalled")
    used = {Task(*task[:3]) for line in run.trace() for task in line["tasks"]}
    assert len(recalled) >= 2
    assert set(recalled[:-1]) <= used  # the last one may come after the end
    assert not any(line["dropped"] for line in run.trace())
    assert steps_by_site(run)[0] == {1}  # in memory a site begins when it is recalled
    assert torch.equal(run.model(), run.simulated())
    assert not run.log.reasons()
    without = recalled_run(place / "b", recall=False)
    with without.joined():
        without.serve()
    assert not without.log.count("recalled")
    assert 0 not in steps_by_site(without)


def test_a_recall_is_sent_again_if_the_network_was_away(place: Path) -> None:
    run, failed = recalled_run(place, recall=True), []
    push = run.network.push

    def away(node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        if kind == "recall" and len(failed) < 2:
            failed.append(run.clock.now)
            raise TransportError("away")
        return push(node, kind, header, payload, timeout)

    run.network.push = away  # type: ignore[method-assign]
    with run.joined():
        run.serve()
    assert len(failed) == 2
    assert run.log.count("recalled") >= 1
    assert torch.equal(run.model(), run.simulated())


@pytest.mark.parametrize(
    ("terms", "steps", "sentence"),
    [
        ({"partial_work": False}, 2, "ended after 2 steps, which nobody asked for"),
        ({"partial_work": True}, STEPS, f"after {STEPS} steps, and it has {STEPS}"),
        ({"partial_work": True}, 10**6, "and it has"),
    ],
)
def test_steps_that_no_honest_site_would_tell_are_rejected(
    place: Path, terms: dict[str, Any], steps: int, sentence: str
) -> None:
    run = Deployment(place, "fedbuff", steps=STEPS, terms=terms)

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind != "task" or run.log.count("rejected"):
            return [reply]
        lie = structs.replace(messages.decode_message(reply.header, messages.UploadMessage), steps=steps)
        return [reply._replace(header=messages.encode_message(lie))]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    assert run.log.reasons() == [Reason.RANGE]
    assert sentence in run.log.sentences()[0]
    assert torch.equal(run.model(), run.simulated())


def lone_site(place: Path, clock: Callable[[], float]) -> Site:
    world = make_world(clients=1)
    module = world.problem.module(*world.problem.initial())
    return Site("a", place, lambda name: Examples(*world.population.data), lambda: module, clock=clock)


def asked(visit: int = 0, **options: Any) -> tuple[TaskMessage, bytes]:
    x, statistics = make_world(clients=1).problem.initial()
    plan = site_plan(work=["steps", STEPS, 2], clients=1)
    form = specs_of((x, statistics))
    task = TaskMessage("run-1", Task(0, 0, visit), False, -1, plan, 60.0, form, None, **options)
    return task, pack((x, statistics))


def answered(site: Site, task: TaskMessage, payload: bytes) -> messages.UploadMessage:
    return messages.decode_message(
        site.answer("task", messages.encode_message(task), payload)[0], messages.UploadMessage
    )


@pytest.mark.parametrize(
    ("recall", "steps"),
    [
        (RecallMessage("run-1", Task(0, 0, 0)), 3),
        (RecallMessage("run-2", Task(0, 0, 0)), None),
        (RecallMessage("run-1", Task(0, 0, 1)), None),
    ],
)
def test_a_site_ends_the_task_that_is_recalled_between_two_steps_and_no_other(
    place: Path, recall: RecallMessage, steps: int | None
) -> None:
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        if looks == 3:  # when the task began, and after its first two steps
            site.answer("recall", messages.encode_message(recall), b"")
        return float(looks)

    site = lone_site(place, clock)
    task, payload = asked()
    assert answered(site, task, payload).steps == steps
    site.close()


@pytest.mark.parametrize(
    "header",
    ["", "{}", "[]", '{"run": "run-1", "task": [0, 0]}', '{"run": "run-1", "task": [0, 0, 0], "x": 1}'],
)
def test_a_recall_that_cannot_be_read_ends_nothing(place: Path, header: str) -> None:
    site = lone_site(place, ticking(1.0))
    assert site.answer("recall", header, b"") == ("", b"")
    assert answered(site, *asked()).steps is None
    site.close()


def test_a_task_without_limit_is_done_whole_and_one_without_time_does_a_step(place: Path) -> None:
    site = lone_site(place, ticking(1e6))
    assert answered(site, *asked()).steps is None
    assert answered(site, *asked(visit=1, work=0.0)).steps == 1
    assert answered(site, *asked(visit=2, work=1e9)).steps is None
    site.close()


def config(tmp_path: Path, network: str, training: str = "", privacy: str = "") -> ServeConfig:
    text = (
        f'[task]\nfunction = "a:b"\n[training]\nalgorithm = "fedbuff"\nclients = 5\nrounds = 4\n'
        f"local_steps = 3\n{training}\n[network]\n{network}\n{privacy}\n"
    )
    path = tmp_path / "serve.toml"
    path.write_text(text)
    return ServeConfig.read(path)


def test_settings(tmp_path: Path) -> None:
    given = config(tmp_path, "partial_work = true\nrecall_stale = true", "max_staleness = 4")
    assert (given.network.partial_work, given.network.recall_stale) == (True, True)
    plain = config(tmp_path, "")
    assert (plain.network.partial_work, plain.network.recall_stale) == (False, False)
    with pytest.raises(InputError, match=r"give max_staleness of \[training\], too"):
        config(tmp_path, "recall_stale = true")
    with pytest.raises(InputError, match=r"'partial_work', which belongs to \[network\]: move it there"):
        config(tmp_path, "", "partial_work = true")
    with pytest.raises(InputError, match="partial_work of"):
        config(tmp_path, 'partial_work = "yes"')
    timed = 'dispatch = "timed-poisson"\nrelease_period = 60.0\nmax_staleness = 4'
    with pytest.raises(InputError, match="under timed releases nothing that a site is asked for"):
        config(tmp_path, "recall_stale = true", timed)
