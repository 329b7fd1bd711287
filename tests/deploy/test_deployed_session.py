"""The deployed session: the same model as a plain loop over its trace, whoever comes or goes."""

import gc
import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deploy_world import Deployment, Letter, ramdisk
from offbeat import Asynchronous, Examples, Problem, Sequential, Synchronous, trees
from offbeat.core import Task, traits_of
from offbeat.deploy.config import NetworkConfig
from offbeat.deploy.monitor.state import EventLog
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.messages import HelloReply, UploadMessage, byte_size, specs_of
from offbeat.deploy.protocol.strict_json import Reason
from offbeat.deploy.protocol.transport import Reply, TransportError
from offbeat.deploy.server import exchange
from offbeat.deploy.server.exchange import SessionConfig
from offbeat.deploy.server.session import DeployedSession as Session
from offbeat.deploy.server.session import StopRequested, max_upload_bytes
from offbeat.deploy.server.validation import plain_validator
from offbeat.deploy.site.site import Site
from offbeat.errors import InputError
from offbeat.schedule.dispatch import Phases
from offbeat.schedule.rng import KeyedRng
from offbeat.schedule.staleness import Polynomial
from offbeat.training import checkpoint
from offbeat.training.runner import Progress
from worlds import each, play


@pytest.fixture
def place() -> Iterator[Path]:
    with ramdisk() as folder:
        yield folder


def agree(run: Deployment) -> None:
    torch.testing.assert_close(run.model(), run.retold(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "dispatch", "options"),
    [
        ("fedbuff", Asynchronous(4), {"weights": Polynomial(0.5)}),
        ("fadas", Asynchronous(5, eager=False), {}),
        ("ca2fl", Asynchronous(5), {}),  # everybody is at work, so some come back twice within one buffer
        ("scaffold", Synchronous(3), {}),
        ("adamasfl", Asynchronous(4), {}),
        ("cadence", Asynchronous(4), {}),
        ("masfl", Asynchronous(4), {"max_staleness": 1}),
        ("mime", Phases(3), {}),
    ],
)
def test_sites_give_the_model_of_a_plain_loop_over_the_trace(
    place: Path, name: str, dispatch: Any, options: dict[str, Any]
) -> None:
    run = Deployment(place, name, dispatch=dispatch, **options)
    with run.joined():
        run.serve()
    agree(run)
    assert not run.log.reasons()
    last = {Task(*task[:3]) for task in run.trace()[-1]["tasks"]}  # which the checkpoint before needs
    assert not run.files() - {Task(*task[:3]) for task in flying(run)} - last


def flying(run: Deployment) -> list[list[int]]:
    facts = checkpoint.load(run.folder / "checkpoint" / "state.safetensors").facts
    found: list[list[int]] = facts["session"]["flying"]
    return found


def test_a_synchronous_run_gives_the_simulators_model_to_the_bit(place: Path) -> None:
    """Everybody in every step: then no delay can change who takes part."""
    run = Deployment(place, "scaffold", buffer=5, dispatch=Synchronous(5))
    run.network.random.uniform = lambda low, high: 1.0  # type: ignore[method-assign]
    with run.joined():
        run.serve()
    engine = Sequential(run.world.problem, run.population())
    shots = play(run.algorithm, engine, Synchronous(5), buffer=5, rounds=run.rounds)
    torch.testing.assert_close(run.model(), shots[-1].x, rtol=0, atol=1e-14)


def test_a_site_that_joins_late_is_given_tasks(place: Path) -> None:
    run = Deployment(place, rounds=10)
    late = run.site(4)
    for client in range(4):
        run.network.join(run.site(client))

    def trouble(call: str) -> None:
        if run.clock.now > 1010 and late not in run.network.sites.values():
            run.network.join(late)

    run.network.trouble = trouble
    run.serve()
    assert {task[0] for line in run.trace() for task in line["tasks"]} == set(range(5))
    agree(run)
    close(run)


def close(run: Deployment) -> None:
    for site in run.network.sites.values():
        site.close()


def test_the_run_waits_until_somebody_comes(place: Path) -> None:
    run = Deployment(place, clients=3)

    def trouble(call: str) -> None:
        if run.clock.now > 1300 and not run.network.sites:
            for client in range(3):
                run.network.join(run.site(client))

    run.dispatch = Asynchronous(3)
    run.network.trouble = trouble
    run.serve()
    assert run.trace()[0]["tasks"][0][3] > 290
    agree(run)
    close(run)


def test_a_site_that_joins_is_given_a_task_while_the_others_are_still_at_work(place: Path) -> None:
    run = Deployment(place, clients=3, rounds=2, buffer=2, dispatch=Asynchronous(3), terms={"deadline": 9e3})
    run.network.random.uniform = lambda low, high: 500.0  # type: ignore[method-assign]
    run.terms["greeting_timeout"] = 1e3
    late = run.site(2)
    for client in range(2):
        run.network.join(run.site(client))

    def trouble(call: str) -> None:
        if run.clock.now > 1600 and late not in run.network.sites.values():  # others work until 2000
            run.network.random.uniform = lambda low, high: 1.0  # type: ignore[method-assign]
            run.network.join(late)

    run.network.trouble = trouble
    run.serve()
    started = {task[0]: task[3] for line in reversed(run.trace()) for task in line["tasks"]}
    assert 600 < started[2] < 610
    agree(run)
    close(run)


@pytest.mark.parametrize(
    "dispatch", [Asynchronous(4), Asynchronous(5, eager=False), Synchronous(3), Phases(3)]
)
def test_fewer_sites_than_the_buffer_takes_do_the_work_all_the_same(place: Path, dispatch: Any) -> None:
    run = Deployment(place, "mime" if isinstance(dispatch, Phases) else "ca2fl", dispatch=dispatch)
    for client in range(2):
        run.network.join(run.site(client))
    run.serve()
    assert {task[0] for line in run.trace() for task in line["tasks"]} == {0, 1}
    assert run.clock.now < 1200
    agree(run)
    close(run)


def test_few_of_many_sites_are_kept_at_work(place: Path) -> None:
    run = Deployment(place, clients=1000, rounds=10, dispatch=Asynchronous(5))
    for client in range(5):
        run.network.join(run.site(client))
    run.serve()
    busiest = {task[0] for line in run.trace() for task in line["tasks"]}
    assert busiest == set(range(5))
    assert run.clock.now < 1030  # five at once, of 1.6 seconds each, and some for greeting
    close(run)


def test_a_site_that_comes_back_by_another_node_is_the_same_client_and_has_its_memory(place: Path) -> None:
    run = Deployment(place, "ca2fl", rounds=12, terms={"grace": 3.0})
    moved: list[int] = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind == "task" and len(moved) < 4:
            moved.append(letter.node)
            site = run.network.leave(letter.node)
            site.close()
            run.network.join(run.site(int(site.name)))
            return []
        return [reply]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    joined = run.log.those("joined")
    assert len({each["node"] for each in joined}) == len(joined) > 5
    assert len({(each["name"], each["client"]) for each in joined}) == 5
    agree(run)


def test_a_node_that_leaves_before_it_has_said_who_it_is_is_forgotten(place: Path) -> None:
    run = Deployment(place, terms={"grace": 10.0})
    silent = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.node == 6:
            run.network.hidden.add(6)
            silent.append(letter.kind)
            return []
        return [reply]

    run.network.meddle = meddle
    with run.joined():
        run.network.join(another(run, "x", "x"))
        run.serve()
    assert silent == ["hello"]
    assert {"node": 6, "client": None} in run.log.those("left")
    agree(run)


def test_a_node_that_leaves_loses_its_task_long_before_the_deadline(place: Path) -> None:
    run = Deployment(place, terms={"deadline": 5000.0, "grace": 10.0})

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind == "task" and not run.network.hidden:
            run.network.hidden.add(letter.node)
            return []
        return [reply]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    assert run.log.reasons() == [Reason.GONE]
    assert [each["node"] for each in run.log.those("rejected")] == list(run.network.hidden)
    assert run.clock.now < 1100
    agree(run)


def test_a_list_that_flickers_loses_nothing(place: Path) -> None:
    run = Deployment(place, terms={"grace": 10.0})
    run.network.trouble = lambda call: (
        run.network.hidden.clear()
        if int(run.clock.now) % 6 < 3
        else run.network.hidden.update(run.network.sites)
    )
    with run.joined():
        run.serve()
    assert not run.log.reasons()
    assert not run.log.count("left")
    agree(run)


def test_a_task_has_a_deadline_of_its_own(place: Path) -> None:
    run = Deployment(place, rounds=30, terms={"deadline": 30.0})
    silent: list[str] = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind == "task" and not silent:
            silent.append(letter.number)
            return []
        return [reply]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    assert run.log.reasons() == [Reason.LATE]
    agree(run)


def test_the_list_of_nodes_is_asked_for_every_two_seconds_and_not_at_every_look(place: Path) -> None:
    run = Deployment(place, terms={"poll": 0.5})
    times: dict[str, list[float]] = {"nodes": [], "pull": []}
    run.network.trouble = lambda call: times.setdefault(call, []).append(run.clock.now)
    with run.joined():
        run.serve()
    asked, looked = ([b - a for a, b in pairwise(times[call])] for call in ("nodes", "pull"))
    assert min(asked) >= 2.0
    assert max(asked) < 2.5
    assert min(looked) <= 0.5


def test_a_network_that_is_away_for_a_while_costs_time_alone(place: Path) -> None:
    run = Deployment(place, terms={"deadline": 20.0})

    def trouble(call: str) -> None:
        if 1008 < run.clock.now < 1308:  # far beyond the deadline of what is in flight
            raise TransportError("connection refused")

    run.network.trouble = trouble
    with run.joined():
        run.serve()
    assert run.log.count("unreachable") > 5
    assert run.log.count("reachable") == 1
    assert not run.log.reasons()
    assert run.clock.now > 1308
    agree(run)


def test_a_network_that_stays_away_ends_the_run_saved(place: Path) -> None:
    run = Deployment(place, rounds=12)
    away = True

    def trouble(call: str) -> None:
        if away and run.clock.now > 1012:
            raise TransportError("connection refused")

    run.network.trouble = trouble
    with run.joined():
        with pytest.raises(InputError, match="see the log of the SuperLink, then resume"):
            run.serve()
        away = False
        run.network.letters.clear()
        run.serve(resume=True)
    agree(run)


def bad(change: dict[str, Any] | bytes) -> Any:
    """Answers the first task so, and says which it was."""
    done: list[Letter] = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind != "task" or done:
            return [reply]
        done.append(letter)
        if isinstance(change, bytes):
            return [reply._replace(payload=change)]
        return [reply._replace(header=json.dumps(json.loads(reply.header) | change))]

    return meddle


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (bytes(10**6), Reason.SIZE),
        (b"", Reason.SIZE),
        ({"run": "1"}, Reason.RUN),
        ({"task": [0, 99, 0]}, Reason.VERSION),
        ({"task": [4, 0, 7]}, Reason.TASK),
        ({"form": [["float64", [17]]]}, Reason.FORM),
        ({"error": "the data is gone."}, Reason.FAILED),
        ({"colour": "blue"}, Reason.MALFORMED),
        (b"\xff" * 18 * 8, Reason.INFINITE),
    ],
    ids=lambda value: value.name if isinstance(value, Reason) else "",
)
def test_a_bad_upload_is_rejected_by_its_reason_and_loses_nothing_else(
    place: Path, change: Any, reason: Reason
) -> None:
    run = Deployment(place, "ca2fl", rounds=3)
    run.network.meddle = bad(change)
    with run.joined():
        run.serve()
    if reason is Reason.VERSION:  # of client 0, which need not have been the first to answer
        assert run.log.reasons() in ([Reason.VERSION], [Reason.TASK])
    else:
        assert run.log.reasons() == [reason]
    assert run.log.count("lost") == run.log.count("aside") == 1
    agree(run)


def test_an_upload_beyond_the_methods_own_bound_is_rejected(place: Path) -> None:
    run = Deployment(place, "adamasfl", rounds=3)
    assert traits_of(run.algorithm).bounds
    done: list[Letter] = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind != "task" or done:
            return [reply]
        done.append(letter)
        return [reply._replace(payload=struct.pack("<d", 1e9) * (len(reply.payload) // 8))]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    assert run.log.reasons() == [Reason.NORM]
    agree(run)


@pytest.mark.parametrize("name", ["fedbuff", "ca2fl", "scaffold", "mime"])
def test_an_upload_of_huge_numbers_is_rejected_whatever_the_method(place: Path, name: str) -> None:
    run = Deployment(place, name, rounds=4, dispatch=Phases(3) if name == "mime" else Asynchronous(4))

    bad: list[int] = []

    def huge(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind != "task" or letter.node not in (bad or [letter.node]):
            return [reply]
        bad[:] = [letter.node]
        return [reply._replace(payload=struct.pack("<d", 3e38) * (len(reply.payload) // 8))]

    run.network.meddle = huge
    with run.joined():
        run.serve()
    assert set(run.log.reasons()) == {Reason.NORM}
    agree(run)


def test_what_is_usual_in_a_run_is_known_after_a_resume(place: Path) -> None:
    run = Deployment(place, "fedbuff", rounds=10)
    changed: list[int] = []

    def longer(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind != "task" or changed:
            return [reply]
        changed.append(letter.node)
        numbers = struct.unpack(f"<{len(reply.payload) // 8}d", reply.payload)
        return [reply._replace(payload=struct.pack(f"<{len(numbers)}d", *(1e4 * each for each in numbers)))]

    with run.joined():
        with pytest.raises(StopRequested):
            run.serve(stop=lambda: run.log.count("accepted") > 14)
        run.network.letters.clear()
        run.network.meddle = longer  # which is nothing to the limit of a run that knows nothing
        run.serve(resume=True)
    assert run.log.reasons() == [Reason.NORM]
    agree(run)


@pytest.mark.parametrize("name", ["fedbuff", "ca2fl"])
def test_uploads_in_the_buffer_can_be_set_aside_once(place: Path, name: str) -> None:
    """A method whose clients remember goes on, too: what they know of is never told to be undone."""
    run = Deployment(place, name)
    asked, waits = place / "set-aside", [0]

    def stop() -> bool:
        kept = (run.folder / "journal" / "kept.jsonl").read_text().splitlines()
        line = json.loads(kept[-1]) if kept else {"flow": {}}
        waits[0] = len(line["flow"].get("buffer", {}).get("waiting", ()))
        return run.log.count("accepted") > 7 and waits[0] == 2

    with run.joined():
        with pytest.raises(StopRequested):
            run.serve(stop=stop)
        in_buffer = waits[0]
        asked.touch()
        run.network.letters.clear()
        with pytest.raises(StopRequested):
            run.serve(resume=True, stop=lambda: True, set_aside=asked)
        more = run.log.count("accepted") + 2  # which is before its next step
        with pytest.raises(StopRequested):
            run.serve(resume=True, stop=lambda: run.log.count("accepted") >= more, set_aside=asked)
        assert not asked.exists()
        run.network.letters.clear()
        run.serve(resume=True, set_aside=asked)
    aside = set(run.log.tasks("set_aside"))
    assert len(aside) == run.log.count("set_aside") == in_buffer == 2
    assert {path.stem for path in (run.folder / "journal" / "set-aside").iterdir()} == {
        f"{task.client}-{task.version}-{task.visit}" for task in aside
    }
    assert not aside & {Task(*task[:3]) for line in run.trace() for task in line["tasks"]}
    assert not run.log.reasons()
    if name == "fedbuff":
        agree(run)


def test_nothing_is_set_aside_in_the_start_of_everybody(place: Path) -> None:
    run = Deployment(place, "adamasfl")
    (place / "set-aside").touch()
    with run.joined(), pytest.raises(InputError, match="which needs the upload of every client"):
        run.serve(set_aside=place / "set-aside")


def test_of_messages_that_were_answered_the_oldest_is_forgotten_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_MAX_SETTLED", 3)
    run = Deployment(place)
    replies: list[Reply] = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind == "task":
            replies.append(reply)
            if len(replies) == 6:
                run.network.extra = replies[:5]
        return [reply]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    assert run.log.reasons() == [Reason.TASK] * 3 + [Reason.REPEATED] * 2  # six were answered
    agree(run)


def test_each_message_is_answered_once_by_the_node_it_went_to(place: Path) -> None:
    run = Deployment(place, rounds=3)
    done: list[int] = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind != "task" or done or run.log.count("joined") < 5:
            return [reply]
        done.append(1)
        other = next(node for node in run.network.sites if node != letter.node)
        stranger = reply._replace(node=99)
        return [reply._replace(node=other), stranger, reply._replace(message_id="m0"), reply, reply]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    assert run.log.reasons() == [Reason.TASK, Reason.TASK, Reason.TASK, Reason.REPEATED]
    clients = {each["node"]: each["client"] for each in run.log.those("joined")}
    refused = [(each["node"], each["client"]) for each in run.log.those("rejected")]
    assert refused == [(node, clients.get(node)) for node, _ in refused]
    assert [client is None for _, client in refused] == [False, True, False, False]
    assert not run.log.count("lost")
    agree(run)


def test_a_site_that_has_lost_its_memory_is_not_believed(place: Path) -> None:
    run = Deployment(place, "ca2fl", rounds=12)
    seen: set[int] = set()

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind == "task" and json.loads(letter.note)["committed"] >= 0 and len(seen) < 2:
            seen.add(letter.node)
            return [reply._replace(header=reply.header.replace('"kept"', '"new"'))]
        return [reply]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    assert set(run.log.reasons()) == {Reason.SETTINGS}
    assert "has lost its memory" in run.log.sentences()[0]
    agree(run)


def test_a_client_that_keeps_failing_is_left_alone_for_longer_each_time(place: Path) -> None:
    run = Deployment(place, rounds=40)
    first: list[int] = []

    def meddle(letter: Letter, reply: Reply) -> list[Reply]:
        if letter.kind == "task" and (not first or first[0] == letter.node):
            first[:] = [letter.node]
            return [Reply(letter.number, 1, "", b"", "code 2, KeyError: it raised")]
        return [reply]

    run.network.meddle = meddle
    with run.joined():
        run.serve()
    times = [each["seconds"] for each in run.log.those("aside")]
    assert len(times) >= 4
    assert times == [2.0 * 2**count for count in range(len(times))]
    assert "there is no upload: code 2, KeyError: it raised" in run.log.sentences()[0]
    agree(run)


def another(run: Deployment, name: str, folder: str, module: nn.Module | None = None) -> Site:
    data = run.world.population.data
    whole = Examples(*trees.map(lambda leaf: leaf[:5], tuple(data)))
    model = module or run.world.problem.module(*run.world.problem.initial())
    return Site(name, run.place / folder, lambda name: whole, lambda: model, each)


@pytest.mark.parametrize(
    ("guest", "sentence"),
    [
        (lambda run: another(run, "x", "x", nn.Linear(4, 3).double()), "15 float64, not 18 float64"),
        (lambda run: another(run, "x", "x", nn.Linear(5, 3)), "18 float32, not 18 float64"),
        (lambda run: another(run, "x", "x"), "the run already has its 5 sites"),
        (lambda run: another(run, "2", "x"), "2 is already connected through another node"),
    ],
)
def test_a_site_that_does_not_fit_is_turned_away_with_the_difference(
    place: Path, guest: Any, sentence: str
) -> None:
    run = Deployment(place)
    extra = guest(run)

    def trouble(call: str) -> None:
        if run.log.count("joined") == 5 and extra not in run.network.sites.values():
            run.network.join(extra)

    run.network.trouble = trouble
    with run.joined():
        run.serve()
    assert set(run.log.reasons()) == {Reason.SETTINGS}
    assert sentence in run.log.sentences()[0]
    assert run.log.count("rejected") == 1 or sentence in str(extra.refusal)  # it hears of it
    agree(run)


def test_a_stop_is_heeded_while_waiting_and_the_run_goes_on_later(place: Path) -> None:
    run = Deployment(place, rounds=6)
    with run.joined():
        with pytest.raises(StopRequested):
            run.serve(stop=lambda: run.clock.now > 1007)
        run.network.letters.clear()
        run.serve(resume=True)
    agree(run)


class Killed(BaseException):
    pass


def test_time_goes_on_after_a_resume_and_accepted_uploads_are_not_asked_for_again(place: Path) -> None:
    run = Deployment(place, rounds=4)

    def trouble(call: str) -> None:
        if call == "pulled" and run.log.count("accepted") >= 4 and run.files():
            raise Killed

    run.network.trouble = trouble
    with run.joined():
        with pytest.raises(Killed):
            run.serve()
        accepted = run.files()
        assert accepted
        stopped = run.clock.now - 1000
        run.clock.sleep(5000)
        run.network.letters.clear()
        run.network.trouble = lambda call: None
        before = run.log.count("sent")
        run.serve(resume=True)
    sent = run.log.tasks("sent")
    assert not accepted & set(sent[before:])
    times = [line["time"] for line in run.trace()]
    assert times == sorted(times)
    assert stopped <= times[-1] < stopped + 100
    agree(run)


def test_a_start_that_was_cut_off_keeps_what_it_has(place: Path) -> None:
    """With 24 clients the start is taken in two pieces, with a checkpoint between them."""
    run = Deployment(place, "adamasfl", clients=24, rounds=2, dispatch=Asynchronous(4))
    kills = iter(
        [9, 20, 24]
    )  # accepted uploads at which the server is killed; the last is in the first piece
    limit = next(kills)

    def trouble(call: str) -> None:
        if call == "pulled" and run.log.count("accepted") >= limit:
            raise Killed

    run.network.trouble = trouble
    with run.joined():
        for count in range(2):
            with pytest.raises(Killed):
                run.serve(resume=count > 0)
            limit = next(kills)
            run.network.letters.clear()
        limit = 10**9
        with pytest.MonkeyPatch.context() as patch:
            between(patch)
            with pytest.raises(Killed):
                run.serve(resume=True)
        before = run.log.count("sent")
        run.serve(resume=True)
    sent = run.log.tasks("sent")
    assert all(task.visit > 0 for task in sent[before:])  # nothing of the start was asked again
    used = {Task(*task[:3]) for line in run.trace() for task in line["tasks"]}
    assert run.log.count("accepted") == 24 + 2 * 3 + len(run.files() - used)
    agree(run)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_a_kill_between_a_checkpoint_and_its_confirmation_uses_nothing_twice(
    place: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal's lines are from before the checkpoint then, and its uploads have been used."""
    run = Deployment(place, "ca2fl", rounds=6)
    confirm, count = Session.confirm, [0]

    def confirming(session: Session) -> None:
        count[0] += 1
        if count[0] == version + 1:
            raise Killed
        confirm(session)

    monkeypatch.setattr(Session, "confirm", confirming)
    with run.joined():
        with pytest.raises(Killed):
            run.serve()
        run.network.letters.clear()
        run.serve(resume=True)
    used = [tuple(task[:3]) for line in run.trace() for task in line["tasks"]]
    assert len(set(used)) == len(used) == 6 * run.buffer
    agree(run)


def between(patch: pytest.MonkeyPatch) -> None:
    """A kill right after the checkpoint between the two pieces of a start was confirmed."""
    confirm = Session.confirm

    def confirming(session: Session) -> None:
        confirm(session)
        raise Killed

    patch.setattr(Session, "confirm", confirming)


def test_a_second_task_for_a_client_at_work_is_refused(place: Path) -> None:
    run = Deployment(place)
    session = run.engine().open(run.algorithm, 0, KeyedRng(0))
    session.start(Task(1, 0, 0))
    with pytest.raises(InputError, match="a second task at once"):
        session.start(Task(1, 0, 1))
    session.close()


def test_uploads_may_have_four_times_their_size(place: Path) -> None:
    run = Deployment(place)
    module = nn.Linear(1000, 300)
    problem = Problem(module, each)
    wanted = byte_size(plain_validator(run.algorithm, *problem.initial()).form)
    assert max_upload_bytes(run.algorithm, problem, SessionConfig({}, 5)) == 4 * wanted
    assert (
        max_upload_bytes(run.algorithm, problem, SessionConfig({}, 5, NetworkConfig(max_upload_bytes=77)))
        == 77
    )


class Parrots:
    """Sites that answer at once with zeros, so that two thousand updates are quick."""

    backlog: frozenset[str] = frozenset()

    def __init__(self, run: Deployment) -> None:
        self._run = run
        self._form = specs_of(run.world.problem.initial())
        self._upload = plain_validator(run.algorithm, *run.world.problem.initial()).form
        self._letters: dict[str, tuple[int, str, str]] = {}
        self._count = 0

    def nodes(self) -> frozenset[int]:
        return frozenset(range(1, self._run.clients + 1))

    def key(self, node: int) -> bytes:
        return b""

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        self._count += 1
        self._letters[str(self._count)] = (node, kind, header)
        return str(self._count)

    def pull(self, numbers: list[str]) -> list[Reply]:
        return [self._answer(number, *self._letters.pop(number)) for number in numbers]

    def _answer(self, number: str, node: int, kind: str, note: str) -> Reply:
        if kind == "hello":
            hello = HelloReply(f"site {node}", f"{node:032x}", 9, self._form, None, None)
            return Reply(number, node, messages.encode_message(hello), b"", None)
        asked = messages.decode_message(note, messages.TaskMessage)
        if self._count % 7 == 0:  # and some are bad
            return Reply(number, node, note, b"", None)
        upload = UploadMessage(asked.run, asked.task, self._upload, "none", 0.1, None)
        return Reply(number, node, messages.encode_message(upload), bytes(byte_size(self._upload)), None)


@pytest.mark.slow
def test_memory_stays_flat_over_two_thousand_updates(place: Path) -> None:
    """What the last part of the run allocates is let go again: an upload has 8 KB, and 600 come in it."""
    run = Deployment(place, "fedbuff", rounds=100, buffer=20, clients=40, dispatch=Asynchronous(40))
    run.world = run.world._replace(problem=Problem(nn.Linear(50, 20).double(), each))
    run.network = Parrots(run)  # type: ignore[assignment]
    run.log = EventLog(None, "run")  # type: ignore[assignment]
    sizes: list[int] = []

    def look(progress: Progress) -> None:
        if progress.version == 70:
            tracemalloc.start()
        if progress.version == 100:
            gc.collect()
            sizes.extend(tracemalloc.get_traced_memory())

    try:
        run.serve(look=look)
    finally:
        tracemalloc.stop()
    held, most = sizes
    assert held < 200_000
    assert most < 3_000_000


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def stopped(run: Deployment, accepted: int, *, new: bool = False) -> None:
    """Run until so many uploads were accepted, with one in the buffer, from a task of the newest version."""

    def stop() -> bool:
        lines = (run.folder / "journal" / "kept.jsonl").read_text().splitlines()
        line = json.loads(lines[-1]) if lines else {"flow": {}}
        waiting = [Task(*each[:3]).version for each in line["flow"].get("buffer", {}).get("waiting", ())]
        least = max(Task(*each[:3]).version for each in line["flying"] or [[0] * 3]) if new and lines else 0
        return run.log.count("accepted") >= accepted and max(waiting, default=-1) >= least

    with pytest.raises(StopRequested):
        run.serve(stop=stop)
    run.network.letters.clear()


@pytest.mark.parametrize("harm", [Path.unlink, flip])
def test_a_lost_checkpoint_costs_one_step_and_the_trace_still_gives_the_model(
    place: Path, harm: Callable[[Path], None]
) -> None:
    run = Deployment(place)
    with run.joined():
        stopped(run, 10)
        before = run.trace()
        harm(run.folder / "checkpoint" / "state.safetensors")
        run.serve(resume=True)
    agree(run)
    after = run.trace()
    assert after[: len(before)] == before  # the step since the earlier checkpoint is taken again, as it was
    assert not run.log.reasons()


@pytest.mark.parametrize("harm", [Path.unlink, flip, lambda path: path.write_bytes(b"")])
def test_an_upload_in_the_buffer_that_was_deleted_or_damaged_is_named(
    place: Path, harm: Callable[[Path], None]
) -> None:
    run, asked = Deployment(place, "fedbuff"), place / "set-aside"
    with run.joined():
        stopped(run, 10)
        line = json.loads((run.folder / "journal" / "kept.jsonl").read_text().splitlines()[-1])
        client, version, visit = line["flow"]["buffer"]["waiting"][0][:3]
        name = f"{client}-{version}-{visit}.upload"
        harm(run.folder / "journal" / name)
        with pytest.raises(
            InputError, match=rf"{name} (is missing|cannot be read .*): restore it from a backup"
        ):
            run.serve(resume=True)
        asked.touch()
        run.serve(resume=True, set_aside=asked)
    agree(run)
    assert run.log.tasks("set_aside") == [Task(client, version, visit)]
    lost = [tuple(task) for each in run.trace() for task in each["lost"]]
    assert (client, version, visit) in lost


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (Path.unlink, "kept.jsonl was missing"),
        (flip, "kept.jsonl is damaged in line"),
        (lambda path: path.write_bytes(b""), "lost its last lines"),
        (
            lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1])),
            "lost its last lines",
        ),
    ],
)
def test_a_journal_that_was_deleted_damaged_or_cut_is_noticed(
    place: Path, harm: Callable[[Path], None], sentence: str
) -> None:
    run = Deployment(place, "fedbuff", buffer=5, dispatch=Asynchronous(5))
    asked = place / "set-aside"
    with run.joined():
        stopped(run, 10, new=True)
        harm(run.folder / "journal" / "kept.jsonl")
        with pytest.raises(InputError, match=sentence):
            run.serve(resume=True)
        asked.touch()
        run.serve(resume=True, set_aside=asked)
    agree(run)
    assert run.log.count("set_aside")


@pytest.mark.parametrize("harm", [Path.unlink, flip, lambda path: path.write_bytes(b"")])
def test_the_id_of_a_run_is_not_made_up_again(place: Path, harm: Callable[[Path], None]) -> None:
    run = Deployment(place)
    with run.joined():
        stopped(run, 5)
        harm(run.folder / "journal" / "run")
        with pytest.raises(InputError, match="by which sites know this run: restore it"):
            run.serve(resume=True)


def test_the_time_limit_follows_the_durations_that_the_server_sees(tmp_path: Path) -> None:
    run = Deployment(tmp_path, name="fedbuff", rounds=20, terms={"deadline": "quantile:0.9:1.5"})
    limits = []
    push = run.network.push

    def watch(node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        if kind == "task":
            limits.append(timeout)
        return push(node, kind, header, payload, timeout)

    run.network.push = watch  # type: ignore[method-assign]
    with run.joined():
        run.serve()
    assert set(limits[:15]) == {600.0}
    assert all(limit < 20 for limit in limits[-10:])
    assert torch.allclose(run.model(), run.retold(), rtol=0, atol=1e-12)
