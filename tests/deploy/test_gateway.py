"""The gate: sites come through, orders do not, and nobody can hold it up for long."""

import asyncio
import base64
import http.client
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.deploy import keys
from offbeat.deploy.flower import superlink
from offbeat.deploy.flower.commands import superlink_problem
from offbeat.deploy.flower.private_api import FleetClient, FlowerError
from offbeat.deploy.flower.site import SuperLinkAddress, connection_problem
from offbeat.deploy.flower.superlink import (
    ALLOWED_REQUESTS,
    Gateway,
    RefusalLog,
    RequestLimits,
    SiteKeys,
    use_renewed_certificate,
)
from offbeat.deploy.flower.supervisor import Backend
from offbeat.deploy.keys import Certificates, find_certificates
from offbeat.deploy.network import (
    Connection,
    ConnectionTable,
    Doorbell,
    HttpLimits,
    bind_socket,
    format_address,
    free_port,
    http_server,
    running_in_thread,
)

PUSH = "/v1/fleet/push-object"
QUICK = RequestLimits(grace=0.5, rate=1e6, response=2.0)
LINES = HttpLimits(connections=50, per_address=50, per_identity=50, head=0.5, linger=0.5)


class Upstream:
    """A SuperLink that says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.answer: bytes | None = None
        self.breaks = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append((scope["method"], scope["path"]))
        headers, body, more = dict(scope["headers"]), bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        told = {
            "path": scope["path"],
            "headers": [[name.decode(), text.decode()] for name, text in scope["headers"]],
            "sum": sum(body),
            "size": len(body),
        }
        answer = self.answer or json.dumps(told).encode()
        own = [(b"content-length", b"%d" % len(answer)), (b"flwr-said", b"so")]
        status = int(headers.get(b"wanted", b"200"))
        await send({"type": "http.response.start", "status": status, "headers": own})
        if self.breaks:
            half = answer[: len(answer) // 2]
            await send({"type": "http.response.body", "body": half, "more_body": True})
            raise RuntimeError("half an answer")
        await send({"type": "http.response.body", "body": answer})


def authority_of(certificates: Certificates) -> Path:
    return certificates.sites.parent / "ca.crt"


class World:
    """A gate and what is behind it."""

    def __init__(
        self, port: int, said: list[str], tally: RefusalLog, certificates: Certificates | None
    ) -> None:
        self.port, self.said, self.tally, self.certificates = port, said, tally, certificates

    def connect(self) -> http.client.HTTPConnection:
        if self.certificates is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        context = ssl.create_default_context(cafile=str(authority_of(self.certificates)))
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=context)

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        line = self.connect()
        try:
            line.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = line.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            line.close()

    def raw(self, *pieces: bytes, pause: float = 0.0, hang_up: bool = False) -> bytes:
        """All that is answered to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as line:
            with suppress(ConnectionError):
                for piece in pieces:
                    line.sendall(piece)
                    time.sleep(pause)
                if hang_up:
                    line.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionError):
                while data := line.recv(65536):
                    answer += data
            return answer


@contextmanager
def gate(
    upstream: Any,
    limits: RequestLimits = QUICK,
    certificates: Certificates | None = None,
    lines: HttpLimits = LINES,
    site_keys: SiteKeys | None = None,
) -> Iterator[World]:
    """In a thread of its own."""
    said: list[str] = []
    tally = RefusalLog(said.append)
    tls = None if certificates is None else certificates.tls
    bells = Doorbell.pair()
    app = Gateway(upstream, site_keys, tally, bells[0], limits)
    with (
        bind_socket("127.0.0.1", 0) as listener,
        running_in_thread(http_server(app, tls, lines, tally), listener),
    ):
        yield World(listener.getsockname()[1], said, tally, certificates)
    for bell in bells:
        bell.close()


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def world(upstream: Upstream) -> Iterator[World]:
    with gate(upstream) as made:
        yield made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("made") / "keys"
    keys.create_keys(folder, ["server.example"], ["a"], ["localhost"], 3)
    return find_certificates(folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flower's own dependencies
def test_all_that_sites_ask_for_passes_and_nothing_else_of_flowers() -> None:
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    fleet = {path.encode() for _, path in PROTOBUF_REQUEST_TYPES if path.startswith("/v1/fleet/")}
    unused = {f"/v1/fleet/{name}".encode() for name in ("unregister-node", "get-run", "get-fab")}
    assert unused <= fleet
    assert {(b"POST", path) for path in fleet - unused} | {(b"GET", b"/health")} == ALLOWED_REQUESTS


def test_a_request_passes_as_it_is(world: World, upstream: Upstream) -> None:
    body = bytes(range(256)) * 40
    proof = {
        "flwr_public_key": "QUJD=",
        "flwr_timestamp": "2026-01-01T00:00:00",
        "flwr_signature": "RUZH/+==",
    }
    status, answer, headers = world.ask("POST", PUSH, body, wanted="412", **proof)
    told = json.loads(answer)
    assert (status, headers["flwr-said"]) == (412, "so")
    assert (told["path"], told["sum"], told["size"]) == (PUSH, sum(body), len(body))
    got = {name.lower(): text for name, text in told["headers"]}
    assert {name.replace("_", "-"): text for name, text in proof.items()}.items() <= got.items()
    assert got["host"] == f"127.0.0.1:{world.port}"
    status, answer, _ = world.ask("GET", "/health")
    assert status == 200
    assert not {"transfer-encoding", "content-length"} & {
        name.lower() for name, _ in json.loads(answer)["headers"]
    }
    assert upstream.asked == [("POST", PUSH), ("GET", "/health")]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/register-node"),
        ("POST", "/v1/runtime/push-object"),
        ("POST", "/v1/fleet/unregister-node"),
        ("GET", "/docs"),
        ("GET", PUSH),
        ("PUT", PUSH),
        ("POST", "/health"),
        ("POST", "/v1/fleet/"),
        ("POST", "/v1/fleet/../control/start-run"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1/fleet/pull-messages/../../control/start-run"),
        ("POST", f"/{PUSH}"),
        ("POST", f"{PUSH}?a=b"),
        ("POST", f"{PUSH}/"),
        ("POST", f"http://server.example{PUSH}"),
        ("POST", "/V1/fleet/pull-messages"),
        ("CONNECT", "server.example:80"),
        ("OPTIONS", "*"),
    ],
)
def test_everything_else_is_refused(world: World, upstream: Upstream, method: str, path: str) -> None:
    length = b"content-length: 3\r\n" if method != "GET" else b""
    answer = world.raw(f"{method} {path} HTTP/1.1\r\nhost: a\r\n".encode() + length + b"\r\nabc")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"forwards only what sites need" in answer
    assert upstream.asked == []
    assert world.tally.counts == {"forbidden": 1}
    assert world.said[0].startswith(f"forbidden (1 so far): '{method} {path}"[:40])


def test_what_is_refused_is_counted_but_not_written_down_without_end(world: World) -> None:
    for _ in range(20):
        assert world.ask("POST", "/v1/control/start-run", b"x" * 5000)[0] == 403
    assert world.tally.counts == {"forbidden": 20}
    assert len(world.said) == 1


def test_lines_on_the_same_come_with_a_pause() -> None:
    said: list[str] = []
    times = iter([0.0, 0.0, 1.0, 9.0, 11.0, 11.0, 12.0, 12.0])
    tally = RefusalLog(said.append, lambda: next(times))
    for _ in range(4):
        tally("size", "a lot")
    tally("full", "many")
    assert said == ["size (1 so far): a lot", "size (4 so far): a lot", "full (1 so far): many"]


ORDER = b"POST /v1/control/start-run HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
HEAD = f"POST {PUSH} HTTP/1.1\r\nhost: a\r\n".encode()


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"content-length: 5\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n" + ORDER),
        (b"transfer-encoding: chunked\r\n", b"0\r\n\r\n" + ORDER),
        (b"transfer-encoding: gzip, chunked\r\n", b"0\r\n\r\n" + ORDER),
        (b"content-length: 5\r\ncontent-length: 6\r\n", b"abcdef" + ORDER),
        (b"content-length: +5\r\n", b"abcde" + ORDER),
        (b"content-length: -1\r\n", ORDER),
        (b"content-length: 5 \r\n x\r\n", b"abcde" + ORDER),
        (b"content-length : 5\r\n", b"abcde" + ORDER),
        (b"a: b\0c\r\ncontent-length: 0\r\n", ORDER),
        (b"", ORDER),
        (b"content-length: 0\r\n", ORDER),
        (b"content-length: 0\r\nupgrade: h2c\r\nconnection: upgrade\r\n", ORDER),
        (b"content-length: 0\r\nexpect: 100-continue\r\n", ORDER),
    ],
)
def test_no_order_is_smuggled_in_behind_something_else(
    world: World, upstream: Upstream, head: bytes, body: bytes
) -> None:
    answer = world.raw(HEAD + head + b"\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 ")
    assert set(upstream.asked) <= {("POST", PUSH)}
    final = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert int(final[9:12]) in {200, 400, 403, 411, 501}


def test_two_requests_in_one_go_are_two(world: World, upstream: Upstream) -> None:
    health = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    answer = world.raw(health + health + ORDER)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.count(b"HTTP/1.1 403") == 1
    assert upstream.asked == [("GET", "/health")] * 2


PASSED_TEXT = {(method.decode(), path.decode()) for method, path in ALLOWED_REQUESTS}


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[World, Upstream]]:
    server = Upstream()
    with gate(server) as made:
        yield made, server


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([b"", HEAD, b"POST ", b"GET /health HTTP/1.1\r\nhost: a\r\n", ORDER[:40]]),
    st.binary(max_size=300),
)
def test_noise_neither_passes_nor_harms(lasting: tuple[World, Upstream], first: bytes, rest: bytes) -> None:
    world, upstream = lasting
    world.raw(first + rest + b"\r\n\r\n", hang_up=True)
    assert set(upstream.asked) <= PASSED_TEXT
    assert world.ask("GET", "/health")[0] == 200


def test_a_body_that_comes_in_parts_arrives_whole(world: World) -> None:
    half = bytes(range(256)) * 2**15
    line = world.connect()
    line.putrequest("POST", PUSH)
    line.putheader("content-length", str(2 * len(half)))
    line.endheaders(half)
    time.sleep(0.1)
    line.send(half)
    told = json.loads(line.getresponse().read())
    line.close()
    assert (told["size"], told["sum"]) == (2 * len(half), 2 * sum(half))


def test_a_large_answer_comes_back_whole(world: World, upstream: Upstream) -> None:
    upstream.answer = bytes(range(256)) * 2**16
    assert world.ask("POST", PUSH, b"a")[1] == upstream.answer


def test_a_connection_carries_many_requests(world: World) -> None:
    line = world.connect()
    for number in range(20):
        line.request("POST", PUSH, b"a" * number)
        assert json.loads(line.getresponse().read())["size"] == number
    line.close()


def test_half_an_answer_is_not_taken_for_a_whole_one(world: World, upstream: Upstream) -> None:
    upstream.breaks = True
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        world.ask("POST", PUSH, b"a")


def test_a_superlink_that_does_not_answer_is_not_waited_for(upstream: Upstream) -> None:
    async def hang(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    with gate(hang, QUICK._replace(response=0.2)) as world:  # type: ignore[arg-type]
        status, answer, _ = world.ask("POST", PUSH, b"a" * 5 * 2**20)
        assert (status, json.loads(answer)) == (504, {"detail": "the request took too long."})


def test_a_request_that_is_too_long_is_refused_before_it_is_read(world: World, upstream: Upstream) -> None:
    for length in (QUICK.max_bytes + 1, 10**18):
        answer = world.raw(HEAD + b"content-length: %d\r\n\r\n" % length)
        assert answer.startswith(b"HTTP/1.1 413 ")
    assert upstream.asked == []


def test_a_head_without_end_is_refused(world: World) -> None:
    assert world.raw(HEAD + b"a: " + b"b" * 40_000)[:12] == b"HTTP/1.1 431"


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([b"POST ", *[b"/"] * 40], "slow"),
        ([HEAD, *[b"a: b\r\n"] * 40], "slow"),
        ([HEAD + b"content-length: 1000\r\n\r\n", *[b"x"] * 40], "slow"),
    ],
)
def test_a_request_that_drips_is_cut_off(world: World, pieces: list[bytes], kind: str) -> None:
    begun = time.monotonic()
    world.raw(*pieces, pause=0.1)
    assert time.monotonic() - begun < 3.0
    assert world.tally.counts == {kind: 1}


def test_a_connection_that_says_nothing_is_ended(world: World) -> None:
    begun = time.monotonic()
    assert world.raw() == b""
    assert 0.3 < time.monotonic() - begun < 3
    assert world.tally.counts == {}


@pytest.mark.slow
def test_an_answer_that_is_not_read_is_given_up(world: World, upstream: Upstream) -> None:
    upstream.answer = bytes(2**25)
    with socket.create_connection(("127.0.0.1", world.port), timeout=10) as line:
        line.sendall(HEAD + b"content-length: 0\r\n\r\n")
        limit = time.monotonic() + 10
        while "slow" not in world.tally.counts and time.monotonic() < limit:
            time.sleep(0.02)
    assert world.tally.counts == {"slow": 1}


def test_a_silent_connection_makes_room_for_another_of_its_address(upstream: Upstream) -> None:
    lines = LINES._replace(head=20.0, per_address=3)
    with gate(upstream, lines=lines) as world, ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", world.port), timeout=10))
            for _ in range(3)
        ]
        time.sleep(0.1)
        assert world.ask("GET", "/health")[0] == 200
        assert world.tally.counts == {"full": 1}
        assert silent[0].recv(1) == b"", "the one that came first is still there"
        silent[1].sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert silent[1].recv(1000).startswith(b"HTTP/1.1 200")


def test_a_connection_with_a_request_under_way_does_not_make_room(upstream: Upstream) -> None:
    lines = LINES._replace(head=20.0, per_address=1)
    slow = QUICK._replace(grace=20.0)
    with gate(upstream, slow, lines=lines) as world:
        line = world.connect()
        line.putrequest("POST", PUSH)
        line.putheader("content-length", str(2**21 + 1))
        line.endheaders(bytes(2**21))
        time.sleep(0.3)
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            world.ask("GET", "/health")
        line.send(b"a")
        assert json.loads(line.getresponse().read())["sum"] == ord("a")
        line.close()
        assert world.tally.counts == {"full": 1}


def test_a_few_addresses_cannot_occupy_every_connection() -> None:
    limits = LINES._replace(connections=6, per_address=5)
    table = ConnectionTable(limits)
    closed: list[Connection] = []

    def come(address: str) -> tuple[Connection, str | None]:
        connection = Connection(address, table)
        connection.close = lambda: closed.append(connection)
        return connection, table.admit(connection)

    crowd = [come("192.0.2.1")[0] for _ in range(5)]
    other, _ = come("192.0.2.2")
    outcomes = []
    for number in range(20):
        newcomer, outcome = come(f"198.51.100.{number}")
        outcomes.append(outcome)
        assert newcomer.identify(f"site {number}")
    assert outcomes == ["dropped", *[None] * 19]  # one that identifies itself leaves its place to the next
    for number in range(3):  # a newcomer costs the largest crowd a place, and nobody else
        come(f"203.0.113.{number}")
    assert closed == crowd[:3]
    assert other not in closed


@pytest.fixture(scope="module")
def identified(made: Certificates) -> Iterator[tuple[World, Upstream]]:
    server = Upstream()
    with gate(server, site_keys=SiteKeys(made.sites)) as world:
        yield world, server


def proof(key: Path, at: str | None = None, **changes: str) -> dict[str, str]:
    """The headers with which Flower's own client signs a request."""
    private = keys.load_site_key(key)
    timestamp = at or datetime.now(UTC).isoformat()
    pem = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = private.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256()))
    return {
        "flwr_public_key": base64.b64encode(pem).decode(),
        "flwr_timestamp": timestamp,
        "flwr_signature": base64.b64encode(signature).decode(),
    } | changes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flower's own dependencies
def test_flower_signs_as_the_gateway_verifies(made: Certificates) -> None:
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private = keys.load_site_key(made.sites / "a" / "key")
    sent = SimpleNamespace(request=httpx.Request("POST", "http://a/"))
    NodeAuthHttpInterceptor(private, private.public_key()).intercept(sent, lambda context: context.request)
    headers = {name.lower(): text for name, text in sent.request.headers.raw}
    assert SiteKeys(made.sites).identify(headers) == keys.fingerprint(private.public_key())
    assert (-SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE) == (
        superlink.MIN_AGE,
        superlink.MAX_AGE,
    )


def test_a_signed_request_passes(identified: tuple[World, Upstream], made: Certificates) -> None:
    world, _ = identified
    assert world.ask("POST", PUSH, b"abc", **proof(made.sites / "a" / "key"))[0] == 200


def at(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda good, other: {}, "needs the signature"),
        (lambda good, other: proof(other), "does not know this key"),
        (lambda good, other: proof(other, flwr_public_key=proof(good)["flwr_public_key"]), "does not belong"),
        (lambda good, other: proof(good, flwr_timestamp=at(-1)), "does not belong"),
        (lambda good, other: proof(good, at(-400)), "clock is 400 seconds behind"),
        (lambda good, other: proof(good, at(60)), "clock is 60 seconds ahead"),
        (lambda good, other: proof(good, flwr_timestamp="soon"), "needs the signature"),
        (lambda good, other: proof(good, "0001-01-01T00:00:00+23:00"), "seconds|signature"),
        (lambda good, other: proof(good, flwr_signature="x"), "needs the signature"),
        (lambda good, other: proof(good, flwr_signature="QUJD"), "does not belong"),
        (lambda good, other: proof(good, flwr_public_key="QUJD"), "does not know this key"),
        (lambda good, other: proof(good, flwr_public_key="?"), "does not know this key"),
    ],
)
def test_a_stranger_is_refused_before_a_byte_of_the_body_is_read(
    identified: tuple[World, Upstream],
    made: Certificates,
    tmp_path: Path,
    change: Callable[[Path, Path], dict[str, str]],
    sentence: str,
) -> None:
    world, upstream = identified
    keys.create_keys(tmp_path / "keys", ["127.0.0.1"], ["a"], ["localhost"], 3)
    before = len(upstream.asked)
    headers = change(made.sites / "a" / "key", tmp_path / "keys" / "sites" / "a" / "key")
    lines = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
    answer = world.raw(HEAD + lines.encode() + b"content-length: 15000000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert re.search(sentence, answer.decode())
    assert len(upstream.asked) == before


def test_a_header_that_comes_twice_does_not_make_one_site_another(
    identified: tuple[World, Upstream], made: Certificates, tmp_path: Path
) -> None:
    """What reads the first of two equal headers would see another key than the one that was verified."""
    world, upstream = identified
    keys.create_keys(tmp_path / "keys", ["127.0.0.1"], ["b"], ["localhost"], 3)
    victim = proof(tmp_path / "keys" / "sites" / "b" / "key")["flwr_public_key"]
    before = len(upstream.asked)
    own = proof(made.sites / "a" / "key")
    lines = [f"flwr-public-key: {victim}", *(f"{name.replace('_', '-')}: {own[name]}" for name in own)]
    answer = world.raw(HEAD + "\r\n".join(lines).encode() + b"\r\ncontent-length: 0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert len(upstream.asked) == before


def forms(pem: str) -> Iterator[str]:
    """Other texts of the same key, which Flower would take for other nodes."""
    head, *lines, tail, _ = pem.split("\n")
    yield pem + "\n"
    yield pem.rstrip("\n")
    yield pem.replace("\n", "\r\n")
    yield "\n" + pem
    yield "\n".join([head, "".join(lines), tail, ""])


def test_one_key_is_one_node(identified: tuple[World, Upstream], made: Certificates) -> None:
    world, upstream = identified
    before, own = len(upstream.asked), proof(made.sites / "a" / "key")
    pem = base64.b64decode(own["flwr_public_key"]).decode()
    for form in forms(pem):
        assert serialization.load_pem_public_key(form.encode()) is not None
        other = own | {"flwr_public_key": base64.b64encode(form.encode()).decode()}
        status, answer, _ = world.ask("POST", PUSH, b"abc", **other)
        assert (status, b"does not know this key" in answer) == (401, True)
    assert len(upstream.asked) == before


def test_a_request_that_is_kept_is_refused_once_its_key_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink, "_KEY_INTERVAL", 0.0)
    folder, asked = tmp_path / "keys", []
    keys.create_keys(folder, ["127.0.0.1"], ["a", "b"], ["localhost"], 3)

    async def without_messages(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    site_keys = SiteKeys(folder / "sites")
    with gate(without_messages, QUICK._replace(wait=1.0), site_keys=site_keys) as world:
        signed, found = proof(folder / "sites" / "a" / "key"), []
        pull = lambda: found.append(world.ask("POST", "/v1/fleet/pull-messages", b"x", **signed)[:2])  # noqa: E731
        thread = threading.Thread(target=pull)
        thread.start()
        limit = time.monotonic() + 10
        while not asked and time.monotonic() < limit:
            time.sleep(0.01)
        (folder / "sites" / "a" / "key.pub").unlink()
        thread.join()
    [(status, answer)] = found
    assert (status, b"does not know this key" in answer) == (401, True)
    assert len(asked) == 1


def test_keys_that_are_added_or_removed_count_soon(
    tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink, "_KEY_INTERVAL", 0.0)
    folder = tmp_path / "keys"
    keys.create_keys(folder, ["127.0.0.1"], ["a"], ["localhost"], 3)
    with gate(upstream, site_keys=SiteKeys(folder / "sites")) as world:
        keys.add_site_keys(folder, "b")
        assert world.ask("POST", PUSH, b"", **proof(folder / "sites" / "b" / "key"))[0] == 200
        for name in ("a", "b"):
            (folder / "sites" / name / "key.pub").unlink()
            assert world.ask("POST", PUSH, b"", **proof(folder / "sites" / name / "key"))[0] == 401


def test_a_key_is_revoked_also_while_the_file_of_another_is_damaged(
    tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink, "_KEY_INTERVAL", 0.0)
    folder = tmp_path / "keys"
    keys.create_keys(folder, ["127.0.0.1"], ["a", "b", "c"], ["localhost"], 3)
    with gate(upstream, site_keys=SiteKeys(folder / "sites")) as world:
        (folder / "sites" / "a" / "key.pub").write_bytes(b"half a k")
        (folder / "sites" / "b" / "key.pub").unlink()
        answers = {
            name: world.ask("POST", PUSH, b"", **proof(folder / "sites" / name / "key"))[0] for name in "abc"
        }
    assert answers == {"a": 401, "b": 401, "c": 200}


def test_one_key_has_only_so_many_connections(made: Certificates, upstream: Upstream) -> None:
    lines = LINES._replace(head=20.0, per_identity=2)
    with (
        gate(upstream, lines=lines, site_keys=SiteKeys(made.sites)) as world,
        ExitStack() as stack,
    ):
        signed = {name.replace("_", "-"): text for name, text in proof(made.sites / "a" / "key").items()}
        statuses = []
        for _ in range(3):
            line = stack.enter_context(closing(world.connect()))
            line.request("POST", PUSH, b"", signed)
            statuses.append(line.getresponse().status)
        assert statuses == [200, 200, 429]
        assert world.ask("GET", "/health")[0] == 200


def problem(link: SuperLinkAddress, made: Certificates) -> str:
    """What a site says that connects in this way."""
    client = FleetClient(*link, keys.load_site_key(made.sites / "a" / "key"))
    with closing(client), pytest.raises(FlowerError) as failure:
        client.register()
    return str(connection_problem(link, str(failure.value)))


def test_all_of_it_goes_over_tls(made: Certificates) -> None:
    body = bytes(range(256)) * 2**13
    with gate(Upstream(), certificates=made) as world:
        told = json.loads(world.ask("POST", PUSH, body)[1])
        assert (told["size"], told["sum"]) == (len(body), sum(body))
        assert world.ask("POST", "/v1/control/start-run", body[: 2**19])[0] == 403
        plain = SuperLinkAddress(format_address("127.0.0.1", world.port), None)
        assert "speaks TLS: give --certificate" in problem(plain, made)
        silent = socket.create_connection(("127.0.0.1", world.port), timeout=10)  # no word of TLS
        with silent as line:
            assert line.recv(1) == b""


def test_a_renewed_certificate_is_used_as_soon_as_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after one that cannot be used, as while the files are being copied, or if only one of them was."""
    monkeypatch.setattr(superlink, "_KEY_INTERVAL", 0.01)
    keys.create_keys(tmp_path / "keys", ["127.0.0.1"], ["a"], ["localhost"], 3)
    made = find_certificates(tmp_path / "keys")
    whole = made.tls.certificate.read_bytes()

    def present() -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
            context = ssl.create_default_context(cafile=str(authority_of(made)))
            with context.wrap_socket(line, server_hostname="127.0.0.1") as secure:
                found = secure.getpeercert(binary_form=True)
                assert found is not None
                return found

    class Renewing(Upstream):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                tasks.append(asyncio.ensure_future(use_renewed_certificate(server, made.tls)))
                for event in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{event}.complete"})
                tasks.pop().cancel()

    tasks: list[Any] = []
    server = http_server(Renewing(), made.tls, LINES)
    with bind_socket("127.0.0.1", 0) as listener, running_in_thread(server, listener):
        port = listener.getsockname()[1]
        first = present()
        for content in (b"", (tmp_path / "keys" / "helper.pem").read_bytes(), whole[:100]):
            made.tls.certificate.write_bytes(content)
            time.sleep(0.1)
            assert present() == first
        made.tls.certificate.write_bytes(whole)
        keys.renew_certificates(tmp_path / "keys", 30)
        limit = time.monotonic() + 10
        while present() == first:
            assert time.monotonic() < limit
        second = present()
        authority: Any = serialization.load_pem_private_key(
            (tmp_path / "keys" / "ca.key").read_bytes(), password=None
        )
        other = rsa.generate_private_key(65537, 2048)  # a key of another type
        own = keys._server_extensions(["127.0.0.1"])
        form = Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        made.tls.key.write_bytes(other.private_bytes(*form))
        made.tls.certificate.write_bytes(
            keys._certificate("offbeat server", other.public_key(), authority, 3, *own)
        )
        while present() == second:
            assert time.monotonic() < limit
        assert tasks, "what looks for certificates has ended"


def test_without_tls_it_says_so_to_whoever_wants_it(world: World, made: Certificates) -> None:
    link = SuperLinkAddress(format_address("127.0.0.1", world.port), authority_of(made))
    assert "does not speak TLS" in problem(link, made)


@pytest.mark.slow
def test_as_a_process_it_is_started_again_and_ends_with_whoever_started_it(
    made: Certificates, tmp_path: Path
) -> None:
    port = free_port()
    world = World(port, [], RefusalLog(print), made)
    with Backend(tmp_path, Path("serve.toml"), ("127.0.0.1", port), made) as backend:
        assert superlink_problem(backend.address) is None
        assert world.ask("GET", "/health")[0] == 200
        first = backend._superlink
        assert first is not None
        with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
            line.sendall(HEAD)
            time.sleep(0.2)
            first.process.kill()
            while first.is_alive():
                time.sleep(0.01)
            assert line.recv(1) == b""
        late: list[int] = []
        asker = threading.Thread(target=lambda: late.append(world.ask("GET", "/health")[0]))
        asker.start()
        backend.keep_alive()
        asker.join()
        assert late == [200]  # it waited at the socket
        key = made.sites / "a" / "key"
        assert world.ask("POST", PUSH, b"a")[0] == 401
        assert world.ask("POST", PUSH, b"", **proof(key), content_type="application/protobuf")[0] == 401
        assert world.ask("POST", "/v1/control/start-run", b"a")[0] == 403
        log = (tmp_path / "flower" / "superlink.log").read_text()
        assert "forbidden (1 so far): 'POST /v1/control/start-run' from 127.0.0.1" in log
        site = FleetClient(f"127.0.0.1:{port}", authority_of(made), keys.load_site_key(key))
        with closing(site):
            site.register()
            site.register()  # as after a restart of the site
            assert site.activate() != 0
        second = backend._superlink
        assert second is not None
        assert second.process.stdin is not None
        second.process.stdin.close()
        limit = time.monotonic() + 10
        while second.is_alive():
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert second.returncode == 0
