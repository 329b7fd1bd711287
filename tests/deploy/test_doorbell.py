"""A request for messages waits at the gateway until the server rings, and no message is given to nobody."""

import asyncio
import base64
import http.client
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from offbeat.deploy.flower.superlink import Gateway, RefusalLog, RequestLimits
from offbeat.deploy.network import (
    Doorbell,
    HttpLimits,
    bind_socket,
    http_server,
    running_in_thread,
    waits_for,
)

KEYS = b"the key of one site", b"the key of another"
HEADERS = {"flwr-public-key": base64.b64encode(KEYS[0]).decode()}
LIMITS = HttpLimits(connections=50, per_address=50, per_identity=16, head=5.0)


class SuperLink:
    """One that has a message for some nodes, by key, and gives it out once."""

    def __init__(self) -> None:
        self.messages: dict[bytes, bytes] = {}
        self.asked: list[bytes] = []
        self.status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        key = base64.b64decode(dict(scope["headers"]).get(b"flwr-public-key", b""))
        self.asked.append(key)
        content = self.messages.pop(key, b"")
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


class World:
    def __init__(self, superlink: SuperLink, bell: Doorbell, port: int) -> None:
        self.superlink, self.bell, self.port = superlink, bell, port
        self._pool = ThreadPoolExecutor(4)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def pull(self, key: bytes = KEYS[0]) -> tuple[int, bytes, float]:
        """The status, the message and the seconds of one request."""
        begun, line = time.monotonic(), self.connect()
        headers = {"flwr-public-key": base64.b64encode(key).decode()}
        line.request("POST", "/v1/fleet/pull-messages", b"x", headers)
        answer = line.getresponse()
        found = answer.status, answer.read(), time.monotonic() - begun
        line.close()
        return found

    def pull_meanwhile(self, **given: Any) -> "Future[tuple[int, bytes, float]]":
        """Begin a request; return once the SuperLink was asked for it."""
        before = len(self.superlink.asked)
        future = self._pool.submit(lambda: self.pull(**given))
        limit = time.monotonic() + 10
        while len(self.superlink.asked) == before:
            assert time.monotonic() < limit
            time.sleep(0.01)
        time.sleep(0.05)
        return future


def named(key: bytes) -> bytes:
    return waits_for(base64.b64encode(key))


@contextmanager
def running(superlink: SuperLink, wait: float = 10.0) -> Iterator[World]:
    ours, theirs = Doorbell.pair()
    app = Gateway(superlink, None, RefusalLog(print), theirs, RequestLimits(wait=wait))
    with (
        bind_socket("127.0.0.1", 0) as listener,
        running_in_thread(http_server(app, None, LIMITS), listener),
    ):
        yield World(superlink, ours, listener.getsockname()[1])
    ours.close()
    theirs.close()


@pytest.fixture
def world() -> Iterator[World]:
    with running(SuperLink()) as made:
        yield made


def test_a_request_waits_until_the_server_rings_for_its_node(world: World) -> None:
    pulled = world.pull_meanwhile()
    time.sleep(0.3)
    world.bell.ring(named(KEYS[1]))
    time.sleep(0.2)
    assert not pulled.done(), "it was answered although nothing came for it"
    world.superlink.messages[KEYS[0]] = b"a message"
    world.bell.ring(named(KEYS[0]))
    status, message, seconds = pulled.result(10)
    assert (status, message) == (200, b"a message")
    assert 0.4 < seconds < 5
    assert world.superlink.asked == [KEYS[0]] * 2


def test_a_message_that_is_there_is_given_at_once(world: World) -> None:
    world.superlink.messages[KEYS[0]] = b"a message"
    assert world.pull()[1] == b"a message"
    assert world.superlink.asked == [KEYS[0]]


def test_a_ring_before_the_request_is_not_forgotten() -> None:
    with running(SuperLink(), wait=2.0) as world:
        assert world.pull()[1] == b""
        world.superlink.messages[KEYS[0]] = b"a message"
        world.bell.ring(named(KEYS[0]))
        time.sleep(0.1)
        _, message, seconds = world.pull()
        assert message == b"a message"
        assert seconds < 1.5


def test_without_a_ring_the_superlink_is_asked_when_the_time_is_up() -> None:
    with running(SuperLink(), wait=0.5) as world:
        assert world.pull()[1] == b""
        world.superlink.messages[KEYS[0]] = b"a message"
        _, message, seconds = world.pull()
        assert message == b"a message"
        assert 0.5 <= seconds < 5


def test_a_ring_for_everybody_ends_no_request_that_there_is_no_message_for(world: World) -> None:
    pulled = world.pull_meanwhile()
    world.bell.ring()
    time.sleep(0.3)
    assert not pulled.done()
    world.superlink.status = 401
    world.bell.ring()
    assert pulled.result(10)[0] == 401


def test_a_long_request_is_not_kept(world: World) -> None:
    """So that what waits takes little memory."""
    line = world.connect()
    line.request("POST", "/v1/fleet/pull-messages", bytes(2**20), HEADERS)
    assert line.getresponse().status == 413
    assert world.superlink.asked == []
    line.close()


def test_a_refusal_of_the_superlink_is_passed_on_at_once(world: World) -> None:
    world.superlink.status = 401
    status, _, seconds = world.pull()
    assert status == 401
    assert seconds < 5


class Verifying(SuperLink):
    """One that takes a while to refuse a forged request."""

    def __init__(self) -> None:
        super().__init__()
        self.refusing = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (b"forged", b"1") not in scope["headers"]:
            await super().__call__(scope, receive, send)
            return
        self.refusing.set()
        await asyncio.sleep(0.5)
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def test_a_forged_request_for_messages_does_not_delay_those_of_the_site() -> None:
    superlink = Verifying()
    with running(superlink, wait=5.0) as world:
        superlink.messages[KEYS[0]] = b"a message"
        line = world.connect()
        line.request("POST", "/v1/fleet/pull-messages", b"x", HEADERS | {"forged": "1"})
        assert superlink.refusing.wait(10)
        _, message, seconds = world.pull()
        assert (message, seconds < 3) == (b"a message", True)
        assert line.getresponse().status == 401
        line.close()


def test_everybody_is_woken_when_the_superlink_was_started_again(world: World) -> None:
    pulled = [world.pull_meanwhile(key=key) for key in KEYS]
    world.superlink.status = 401
    world.bell.ring()
    assert [each.result(10)[0] for each in pulled] == [401, 401]


def test_a_message_is_not_given_to_a_client_that_has_gone(world: World) -> None:
    line = world.connect()
    line.request("POST", "/v1/fleet/pull-messages", b"x", HEADERS)
    time.sleep(0.3)
    line.close()
    time.sleep(0.3)
    world.superlink.messages[KEYS[0]] = b"a message"
    world.bell.ring(named(KEYS[0]))
    time.sleep(0.3)
    assert world.superlink.messages, "the message was given to nobody"
    assert world.pull()[1] == b"a message"


def test_an_upload_rings_at_the_server(world: World) -> None:
    world.bell.heard()
    line = world.connect()
    for name, rings in (("send-node-heartbeat", 0), ("push-messages", 0), ("push-object", 1)):
        line.request("POST", f"/v1/fleet/{name}", b"x")
        assert line.getresponse().read() == b""
        begun = time.monotonic()
        world.bell.wait(0.3 if not rings else 10)
        assert (time.monotonic() - begun < 0.2) == bool(rings), name
    line.close()


def test_a_ring_that_nobody_hears_does_not_block_and_is_made_up_for() -> None:
    ours, theirs = Doorbell.pair()
    for _ in range(2000):
        ours.ring(b"a")
    heard = theirs.heard()
    assert set(heard) == {b"a"}
    assert len(heard) < 2000
    ours.wait(0)
    assert theirs.heard() == [Doorbell.EVERYBODY], "who was meant by a lost ring is not known"
    ours.close()
    theirs.close()
