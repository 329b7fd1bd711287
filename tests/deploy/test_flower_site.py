"""A site's own connection to a SuperLink, which is scripted here."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.deploy import keys
from offbeat.deploy.flower import site as connection
from offbeat.deploy.flower.content import Content, ContentObjects, from_objects
from offbeat.deploy.flower.private_api import FlowerError, PendingMessage, Refusal
from offbeat.deploy.flower.site import SiteConnection, SuperLinkAddress, answer_timeout
from offbeat.deploy.protocol.messages import RunEnd, encode_message
from offbeat.deploy.protocol.transport import Backoff
from offbeat.deploy.site.site import SiteOptions, site_folder
from offbeat.errors import InputError

LINK = SuperLinkAddress("127.0.0.1:23456", Path("ca.crt"))


class Site:
    """Answers tasks with their own payload, after what it is told to do."""

    max_message_bytes = 1000

    def __init__(self, key: Path) -> None:
        self.key, self._sign = keys.read_signer(key)
        self.refusal: str | None = None
        self.work: Callable[[str], None] = lambda header: None
        self.recalled: Callable[[], None] = lambda: None

    def answer(self, kind: str, header: str, payload: bytes) -> tuple[str, bytes]:
        if kind == "hello":
            self.refusal = header or None
        elif kind == "recall":
            self.recalled()
        else:
            self.work(header)
        return f"{kind} {header}", payload

    def sign(self, statement: bytes) -> bytes:
        return self._sign(statement)


class Reply:
    """An `OutgoingReply` that Flower does not have to know."""

    def __init__(self, to: PendingMessage, *objects: Any) -> None:
        self.to, self.content = to, from_objects(ContentObjects(*objects))


class Client:
    """A SuperLink: what it says to each call, and what it was sent."""

    heartbeat_interval = 30.0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.queue: list[tuple[str, Content]] = []
        self.late: dict[str, int] = {}  # how often the objects of a message are not there yet
        self.replies: dict[str, Content] = {}
        self.fails: dict[str, list[FlowerError]] = {}
        self.known = True
        self.kept: list[float] = []  # seconds that the gateway keeps a request for messages
        self.node, self.run = 77, 1  # both are others after a restart

    def restart(self) -> None:
        """Forget all nodes, runs and messages."""
        self.node, self.run = self.node + 1, self.run + 1

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if errors := self.fails.get(name):
            raise errors.pop(0)

    def register(self) -> None:
        self._call("register")

    def activate(self) -> int:
        self._call("activate")
        return self.node

    def deactivate(self, node: int) -> None:
        self._call(f"deactivate {node}")

    def heartbeat(self) -> bool:
        self._call("heartbeat")
        return self.known

    def pull(self) -> PendingMessage | None:
        self._call("pull")
        if self.kept:
            time.sleep(self.kept.pop(0))
            self.calls.append("answer")
        if not self.queue:
            return None
        kind, content = self.queue.pop(0)
        self.content = content
        about = SimpleNamespace(dst_node_id=self.node)
        return PendingMessage(f"{kind} {content.header}", self.run, kind, 30.0, ["an object"], about)

    def send(self, reply: Reply, seconds: float) -> None:
        self._call("send")
        self.replies[reply.to.message_id] = reply.content

    def pull_object(self, run_id: int, object_id: str) -> bytes | None:
        self._call("object")
        if run_id != self.run:
            raise FlowerError(Refusal.FAILED, "HTTP status 500")
        return b""


class Download:
    """One object that may come later than its message."""

    def __init__(self, message_id: str, object_ids: list[str], max_bytes: int) -> None:
        self._id = message_id

    def fetch(self, pull: Callable[[str], bytes | None], pool: object) -> Content | None:
        pull("an object")
        client = WORLD[0].client
        if client.late.get(self._id, 0):
            client.late[self._id] -= 1
            return None
        return client.content


class World:
    def __init__(self, folder: Path, key: Path, registered: bool = True, once: bool = False) -> None:
        WORLD[:] = [self]
        self.client, self.site = Client(), Site(key)
        self.said: list[str] = []
        self.restarts = 0
        self.enough: Callable[[], bool] = lambda: False
        options = SiteOptions("a", folder, "d:l", key=key if registered else None, once=once)
        given: Any = (self.site, self.client)
        self.connection = SiteConnection(
            *given, options, LINK, self.said.append, lambda: self.enough(), self._restart
        )

    def _restart(self) -> None:
        self.restarts += 1
        raise KeyboardInterrupt

    def run(self, enough: Callable[[], bool], seconds: float = 10.0) -> None:
        limit = time.monotonic() + seconds
        self.enough = lambda: enough() or time.monotonic() > limit
        self.connection.run()
        assert enough()


WORLD: list[World] = []


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MessageDownload", Download)
    monkeypatch.setattr(connection, "OutgoingReply", Reply)
    monkeypatch.setattr(connection, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(connection, "_STOP_POLL", 0.01)
    monkeypatch.setattr(connection, "_PULL_INTERVAL", 0.02)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return keys.create_site_key(tmp_path_factory.mktemp("made") / "key")


@pytest.fixture
def world(tmp_path: Path, key: Path) -> World:
    return World(tmp_path, key)


def test_a_task_is_done_signed_and_sent(world: World, key: Path) -> None:
    world.client.queue = [("train.task", Content("{}", b"model"))]
    world.run(lambda: bool(world.client.replies))
    [(message, content)] = world.client.replies.items()
    assert (content.header, content.payload) == ("task {}", b"model")
    public = keys.load_site_key(key).public_key()
    statement = keys.reply_statement(message, content.header, content.payload)
    assert keys.verify_signature(public, statement, content.signature)
    assert world.said == [f"connected to {LINK.address} as node 77."]
    assert world.client.calls[:2] == ["register", "activate"]
    assert world.client.calls[-1] == "deactivate 77"


def test_objects_that_the_superlink_does_not_have_yet_are_waited_for(world: World) -> None:
    world.client.queue = [("train.task", Content("{}", b"model"))]
    world.client.late = {"train.task {}": 3}
    world.run(lambda: bool(world.client.replies))
    assert world.client.calls.count("object") == 4


def test_the_node_of_a_process_that_was_killed_is_deactivated_first(world: World, tmp_path: Path) -> None:
    record = tmp_path / "node"
    record.write_text("5")
    world.client.fails = {"activate": [FlowerError(Refusal.NOT_ACTIVATED, "x")]}
    world.run(lambda: "pull" in world.client.calls)
    assert world.client.calls[:4] == ["register", "activate", "deactivate 5", "activate"]
    assert record.read_text() == "77"


def test_a_key_that_is_not_known_yet_is_tried_again(world: World) -> None:
    """The server may be starting, or its operator may register the key later."""
    world.client.fails = {"register": [FlowerError(Refusal.UNAUTHORIZED, "it does not know this key.")] * 2}
    world.run(lambda: "pull" in world.client.calls)
    assert len(world.said) == 2
    assert "refuses this site (it does not know this key); next attempt in" in world.said[0]
    assert world.said[1].startswith("connected")


def test_a_key_that_another_node_uses_is_tried_again(world: World, key: Path) -> None:
    world.client.fails = {"activate": [FlowerError(Refusal.NOT_ACTIVATED, "x")] * 2}
    world.run(lambda: "pull" in world.client.calls)
    assert f"another node is connected to the SuperLink at {LINK.address} with the key {key}" in world.said[0]
    assert world.said[1].startswith("connected")


def test_a_superlink_that_is_not_there_yet_is_waited_for(world: World) -> None:
    world.client.fails = {"activate": [FlowerError(Refusal.AWAY, "connection refused")] * 3}
    world.run(lambda: "pull" in world.client.calls)
    assert "cannot be reached; next attempt" in world.said[0]
    assert len(world.said) == 2


@pytest.mark.parametrize(
    ("refusal", "text", "sentence"),
    [
        (Refusal.AWAY, "[SSL: CERTIFICATE_VERIFY_FAILED] verify failed: no match (_ssl.c:1)", "is not valid"),
        (Refusal.AWAY, "[SSL: WRONG_VERSION_NUMBER]", "does not speak TLS"),
    ],
)
def test_what_only_a_person_can_change_ends_the_site(
    world: World, refusal: Refusal, text: str, sentence: str
) -> None:
    world.client.fails = {"activate": [FlowerError(refusal, text)]}
    with pytest.raises(InputError, match=sentence):
        world.connection.run()


def test_a_site_without_a_key_is_told_that_it_needs_one(tmp_path: Path, key: Path) -> None:
    world = World(tmp_path, key, registered=False)
    world.client.fails = {"register": [FlowerError(Refusal.UNAUTHORIZED, "x")]}
    with pytest.raises(InputError, match="accepts registered sites only: give --certificate and --key"):
        world.connection.run()


@pytest.mark.parametrize("connected", [True, False])
def test_a_connection_that_breaks_off_means_tls_only_to_a_site_that_was_never_connected(
    world: World, connected: bool
) -> None:
    world.connection._link = LINK._replace(authority=None)
    broken = FlowerError(Refusal.AWAY, "Server disconnected without sending a response.")
    if connected:
        world.client.fails = {"pull": [broken]}
        world.run(lambda: world.client.calls.count("pull") > 1)
        assert world.said[1:] == [
            f"the SuperLink at {LINK.address} cannot be reached; this site tries again."
        ]
    else:
        world.client.fails = {"register": [broken]}
        with pytest.raises(InputError, match="speaks TLS: give --certificate"):
            world.connection.run()


def test_an_answer_is_kept_while_the_superlink_is_away(world: World) -> None:
    world.client.queue = [("train.task", Content("{}", b"model"))]
    world.client.fails = {"send": [FlowerError(Refusal.AWAY, "x")] * 3}
    world.run(lambda: bool(world.client.replies))
    assert world.client.calls.count("send") == 4


def test_an_answer_to_a_run_that_is_over_is_dropped(world: World) -> None:
    world.client.queue = [("train.task", Content("1", b"")), ("train.task", Content("2", b""))]
    world.client.fails = {"send": [FlowerError(Refusal.RUN_ENDED, "x")]}
    world.run(lambda: bool(world.client.replies))
    assert list(world.client.replies) == ["train.task 2"]


def test_a_node_that_the_superlink_has_forgotten_connects_again(world: World) -> None:
    """At once, however long it was away before it forgot."""
    away = [FlowerError(Refusal.AWAY, "x")] * 4
    world.client.fails = {"pull": [*away, FlowerError(Refusal.UNAUTHORIZED, "x")]}
    world.run(lambda: world.client.calls.count("pull") == 6)
    assert world.client.calls.count("activate") == 2
    assert "has forgotten this site, as after a restart; next attempt in 0.0 s." in world.said[2]


def test_what_a_superlink_had_sent_before_it_was_restarted_is_not_asked_for(world: World) -> None:
    """It fails for a run that it does not know, whenever it is asked."""
    client = world.client
    client.queue = [("train.task", Content("of before", b"")), ("query.hello", Content("", b""))]
    client.fails = {"object": [FlowerError(Refusal.UNAUTHORIZED, "no such node")]}
    whole = client.pull_object

    def pull_object(run_id: int, object_id: str) -> bytes | None:
        if client.fails["object"]:
            client.restart()
        return whole(run_id, object_id)

    client.pull_object = pull_object  # type: ignore[method-assign]
    world.run(lambda: bool(client.replies))
    assert list(client.replies) == ["query.hello "]


def test_an_answer_to_a_superlink_that_was_restarted_is_dropped(world: World) -> None:
    client = world.client
    client.queue = [("train.task", Content("{}", b""))]

    def work(header: str) -> None:
        client.restart()
        client.queue = [("query.hello", Content("", b""))]
        client.fails = {"pull": [FlowerError(Refusal.UNAUTHORIZED, "no such node")]}
        limit = time.monotonic() + 5
        while not client.replies and time.monotonic() < limit:
            time.sleep(0.01)

    world.site.work = work
    world.run(lambda: bool(client.replies) and not world.connection.is_busy)
    assert list(client.replies) == ["query.hello "]


def test_a_site_answers_greetings_and_hears_that_it_was_refused(world: World) -> None:
    world.client.queue = [("query.hello", Content("", b"")), ("query.hello", Content("no place.", b""))]
    world.run(lambda: len(world.client.replies) == 2)
    assert world.said[1:] == ["the server refused this site: no place."]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("finished", [True, False])
def test_a_site_is_told_when_the_run_is_over(tmp_path: Path, key: Path, once: bool, finished: bool) -> None:
    world = World(tmp_path, key, once=once)
    ended = encode_message(RunEnd(finished, "it is over."))
    world.client.queue = [("query.end", Content(ended, b""))]
    pulls = 2 if once and finished else 5
    limit = time.monotonic() + 10
    world.enough = lambda: world.client.calls.count("pull") >= pulls or time.monotonic() > limit
    world.connection.run()
    waits = "" if once and finished else " This site waits for the next run."
    assert world.said[1] == f"it is over.{waits}"
    assert len(world.client.replies) == 1
    assert world.client.calls.count("pull") == (1 if once and finished else 5)


def test_a_task_that_hangs_is_ended_with_the_process(world: World) -> None:
    release = threading.Event()
    world.site.work = lambda header: release.wait(20) and None
    world.client.queue = [("train.task", Content('{"seconds": 0.1}', b""))]
    with pytest.raises(KeyboardInterrupt):
        world.connection.run()
    release.set()
    assert world.restarts == 1
    assert world.client.calls[-1] == "deactivate 77"
    assert "longer than it may" in world.said[-1]


def test_no_alarm_ends_a_site_that_signs_off_slowly_or_the_process_that_takes_its_place(world: World) -> None:
    release, alarms, sign_off = threading.Event(), [], world.client.deactivate

    def deactivate(node: int) -> None:
        alarms.append(signal.getitimer(signal.ITIMER_REAL))
        sign_off(node)

    world.client.deactivate = deactivate  # type: ignore[method-assign]
    world.site.work = lambda header: release.wait(20) and None
    world.client.queue = [("train.task", Content('{"seconds": 0.1}', b""))]
    try:
        with pytest.raises(KeyboardInterrupt):
            world.connection.run()
        assert alarms == [(0.0, 0.0)]
    finally:
        release.set()
        connection._set_alarm(0)


def test_heartbeats_and_messages_do_not_wait_for_the_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_HEARTBEAT_FRACTION", 0.001)
    release = threading.Event()
    world.site.work = lambda header: release.wait(20) and None
    world.client.queue = [("train.task", Content("1", b"")), ("query.hello", Content("", b""))]
    seen: list[str] = []

    def enough() -> bool:
        if "query.hello " in world.client.replies and world.client.calls.count("heartbeat") > 2:
            seen.extend(world.client.replies)
            release.set()
        return "train.task 1" in world.client.replies

    world.run(enough)
    assert "train.task 1" not in seen[:1]


def test_a_recall_reaches_the_site_while_it_works(world: World) -> None:
    recalled = threading.Event()
    world.site.work = lambda header: recalled.wait(20) and None
    world.site.recalled = recalled.set
    world.client.queue = [("train.task", Content("1", b"")), ("query.recall", Content("2", b""))]
    world.run(lambda: "train.task 1" in world.client.replies)
    assert list(world.client.replies) == ["query.recall 2", "train.task 1"]


def test_a_stop_does_not_wait_for_the_work(world: World) -> None:
    release = threading.Event()
    world.site.work = lambda header: release.wait(20) and None
    world.client.queue = [("train.task", Content("1", b""))]
    started = time.monotonic()
    world.run(lambda: "object" in world.client.calls)
    release.set()
    assert time.monotonic() - started < 5
    assert world.client.calls[-1] == "deactivate 77"
    connection._set_alarm(0)


def test_a_second_task_waits_for_the_first(world: World) -> None:
    done: list[str] = []
    release = threading.Event()

    def work(header: str) -> None:
        release.wait(20)
        done.append(header)

    world.site.work = work
    world.client.queue = [("train.task", Content(number, b"")) for number in "12"]

    def enough() -> bool:
        if world.client.calls.count("object") == 2:
            release.set()
        return len(world.client.replies) == 2

    world.run(enough)
    assert done == ["1", "2"]


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ('{"seconds": 5}', 5),
        ('{"seconds": 50}', 20),
        ('{"seconds": -1}', 20),
        ('{"seconds": true}', 20),
        ('{"seconds": NaN}', 20),
        ('{"seconds": "5"}', 20),
        ("[]", 20),
        ("", 20),
        ("[" * 100_000, 20),
    ],
)
def test_the_time_for_an_answer_is_the_headers_or_the_messages(header: str, wanted: float) -> None:
    assert answer_timeout(header, 20) == wanted


def test_without_a_folder_named_it_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert site_folder("clinic") == tmp_path / "offbeat" / "sites" / "clinic"


def test_pauses_double_up_to_a_limit_and_begin_anew() -> None:
    now = [0.0]
    backoff = Backoff(1.0, 5.0, lambda: now[0])
    assert backoff.due
    assert [backoff.fail() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert not backoff.due
    now[0] = 5.0
    assert backoff.due
    backoff.reset()
    assert backoff.fail() == 1.0


def test_a_gateway_that_answers_at_once_is_not_asked_without_a_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PULL_INTERVAL", 0.1)
    begun = time.monotonic()
    world.run(lambda: time.monotonic() - begun > 1)
    assert 5 < world.client.calls.count("pull") < 15


def test_a_heartbeat_that_is_due_waits_for_the_request_for_messages_but_not_for_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_HEARTBEAT_FRACTION", 0.001)
    monkeypatch.setattr(connection, "_HEARTBEAT_SLACK", 0.5)
    world.client.kept = [0.3, 3.0]
    world.run(lambda: world.client.calls.count("answer") == 2)
    first, second = [n for n, call in enumerate(world.client.calls) if call == "answer"]
    assert "heartbeat" not in world.client.calls[:first]
    assert "heartbeat" in world.client.calls[first:second]
    kept = world.client.calls[world.client.calls.index("pull", first) : second]
    assert "heartbeat" in kept
