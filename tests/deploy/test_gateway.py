"""The gate: sites come through, orders do not, and nobody can hold it up for long."""

import asyncio
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.deploy import keys
from offbeat.deploy.flower.commands import (
    Certificates,
    SuperLinkAddress,
    find_certificates,
    superlink_problem,
)
from offbeat.deploy.flower.supernode import _connection_problem
from offbeat.deploy.flower.supervisor import GatewayProcess
from offbeat.deploy.gateway import (
    ALLOWED_REQUESTS,
    ConnectionLimits,
    Gateway,
    RefusalLog,
    UpstreamAddress,
    server_context,
)
from offbeat.deploy.network import bind_socket, format_address, free_port

PULL = "/v1/fleet/pull-messages"
QUICK = ConnectionLimits(head=0.5, grace=0.5, rate=1e6, reach=2.0, answer=2.0, linger=0.5)


class Upstream(ThreadingHTTPServer):
    """A SuperLink that says what it was asked."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0, certificates: Certificates | None = None) -> None:
        super().__init__(("127.0.0.1", port), Echo)
        if certificates is not None:
            context = server_context(certificates.server, certificates.key)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.asked: list[tuple[str, str]] = []
        self.connections = 0
        self.begun = threading.Event()  # a megabyte of a body has come
        self.answer: bytes | None = None
        self.breaks = False
        self.lines: list[socket.socket] = []

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self.lines.append(request)
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def hang_up(self) -> None:
        """On all connections."""
        for line in self.lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *words: object) -> None: ...


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        self.server.asked.append((self.command, self.path))
        left, body = int(self.headers.get("content-length", 0)), bytearray()
        while len(body) < left:
            piece = self.rfile.read(min(65536, left - len(body)))
            if not piece:
                return
            body += piece
            if len(body) > 2**20:
                self.server.begun.set()
        told = {"path": self.path, "headers": list(self.headers.items()), "sum": sum(body), "size": len(body)}
        answer = self.server.answer or json.dumps(told).encode()
        self.send_response(int(self.headers.get("wanted", 200)))
        self.send_header("content-length", str(len(answer)))
        self.send_header("flwr-said", "so")
        self.end_headers()
        if self.server.breaks:
            self.wfile.write(answer[: len(answer) // 2])
            self.close_connection = True
            return
        self.wfile.write(answer)

    def log_message(self, *words: object) -> None: ...


class World:
    """A gate and what is behind it."""

    def __init__(
        self, port: int, said: list[str], tally: RefusalLog, certificates: Certificates | None
    ) -> None:
        self.port, self.said, self.tally, self.certificates = port, said, tally, certificates

    def connect(self) -> http.client.HTTPConnection:
        if self.certificates is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        context = ssl.create_default_context(cafile=str(self.certificates.authority))
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
    upstream: int,
    bounds: ConnectionLimits = QUICK,
    certificates: Certificates | None = None,
    authority: Path | None = None,
    most: tuple[int, int] = (50, 50),
) -> Iterator[World]:
    """In a thread of its own."""
    said: list[str] = []
    tally = RefusalLog(said.append)
    front = None if certificates is None else server_context(certificates.server, certificates.key)
    known = authority or (certificates and certificates.authority)
    back = None if known is None else ssl.create_default_context(cafile=str(known))
    loop = asyncio.new_event_loop()
    with bind_socket("127.0.0.1", 0) as listener:
        listener.listen()

        async def serve() -> None:
            task.append(asyncio.current_task())
            with suppress(asyncio.CancelledError):
                way = UpstreamAddress(format_address("127.0.0.1", upstream), back)
                await Gateway(way, front, tally, bounds, most).serve(listener)

        task: list[asyncio.Task[None] | None] = []
        runner = asyncio.Runner(loop_factory=lambda: loop)
        thread = threading.Thread(target=lambda: runner.run(serve()))
        thread.start()
        yield World(listener.getsockname()[1], said, tally, certificates)
        while not task:
            time.sleep(0.01)
        assert task[0] is not None
        loop.call_soon_threadsafe(task[0].cancel)
        thread.join(10)
        runner.close()


@contextmanager
def up(server: Upstream) -> Iterator[Upstream]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with up(Upstream()) as server:
        yield server


@pytest.fixture
def world(upstream: Upstream) -> Iterator[World]:
    with gate(upstream.server_port) as made:
        yield made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("made") / "keys"
    keys.create_keys(folder, ["server.example"], ["a"], ["localhost"], 3)
    return find_certificates(folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flower's own dependencies
def test_all_that_flowers_nodes_ask_for_passes_and_nothing_else() -> None:
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    fleet = {
        (method.encode(), path.encode())
        for method, path in PROTOBUF_REQUEST_TYPES
        if path.startswith("/v1/fleet/")
    }
    assert fleet | {(b"GET", b"/health")} == ALLOWED_REQUESTS


def test_a_request_passes_as_it_is(world: World, upstream: Upstream) -> None:
    body = bytes(range(256)) * 40
    proof = {
        "flwr_public_key": "QUJD=",
        "flwr_timestamp": "2026-01-01T00:00:00",
        "flwr_signature": "RUZH/+==",
    }
    status, answer, headers = world.ask("POST", PULL, body, wanted="412", **proof)
    told = json.loads(answer)
    assert (status, headers["flwr-said"]) == (412, "so")
    assert (told["path"], told["sum"], told["size"]) == (PULL, sum(body), len(body))
    got = {name.lower(): text for name, text in told["headers"]}
    assert {name.replace("_", "-"): text for name, text in proof.items()}.items() <= got.items()
    assert got["host"] == f"127.0.0.1:{world.port}"
    assert world.ask("GET", "/health")[0] == 200
    assert upstream.asked == [("POST", PULL), ("GET", "/health")]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/register-node"),
        ("POST", "/v1/runtime/push-object"),
        ("GET", "/docs"),
        ("GET", PULL),
        ("PUT", PULL),
        ("POST", "/health"),
        ("POST", "/v1/fleet/"),
        ("POST", "/v1/fleet/../control/start-run"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1/fleet/pull-messages/../../control/start-run"),
        ("POST", f"/{PULL}"),
        ("POST", f"{PULL}?a=b"),
        ("POST", f"{PULL}/"),
        ("POST", f"http://server.example{PULL}"),
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
HEAD = f"POST {PULL} HTTP/1.1\r\nhost: a\r\n".encode()


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
    assert set(upstream.asked) <= {("POST", PULL)}
    assert int(answer[9:12]) in {200, 400, 403, 411, 501}


def test_two_requests_in_one_go_are_two(world: World, upstream: Upstream) -> None:
    health = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    answer = world.raw(health + health + ORDER)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.count(b"HTTP/1.1 403") == 1
    assert upstream.asked == [("GET", "/health")] * 2


PASSED_TEXT = {(method.decode(), path.decode()) for method, path in ALLOWED_REQUESTS}


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[World, Upstream]]:
    with up(Upstream()) as server, gate(server.server_port) as made:
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


def test_whoever_asks_cannot_pass_for_another_address(world: World) -> None:
    claims = {"X_Forwarded_For": "192.0.2.7", "X_Forwarded_Proto": "https", "Forwarded": "for=192.0.2.7"}
    _, answer, _ = world.ask("POST", PULL, b"", **claims)
    told = [(name.lower(), text) for name, text in json.loads(answer)["headers"]]
    assert [pair for pair in told if "forwarded" in pair[0]] == [("x-forwarded-for", "127.0.0.1")]


def test_a_body_goes_on_while_it_comes(world: World, upstream: Upstream) -> None:
    half = bytes(range(256)) * 2**15
    line = world.connect()
    line.putrequest("POST", PULL)
    line.putheader("content-length", str(2 * len(half)))
    line.endheaders(half)
    assert upstream.begun.wait(10)  # it is not held back until it is whole
    line.send(half)
    told = json.loads(line.getresponse().read())
    line.close()
    assert (told["size"], told["sum"]) == (2 * len(half), 2 * sum(half))


def test_a_large_answer_comes_back_whole(world: World, upstream: Upstream) -> None:
    upstream.answer = bytes(range(256)) * 2**16
    assert world.ask("POST", PULL, b"a")[1] == upstream.answer


def test_a_connection_carries_many_requests_and_so_does_the_one_behind_it(
    world: World, upstream: Upstream
) -> None:
    line = world.connect()
    for number in range(20):
        line.request("POST", PULL, b"a" * number)
        assert json.loads(line.getresponse().read())["size"] == number
    line.close()
    assert upstream.connections == 1


def test_a_connection_behind_it_that_has_ended_is_replaced(world: World, upstream: Upstream) -> None:
    line = world.connect()
    for _ in range(2):
        line.request("POST", PULL, b"a", {"connection": "keep-alive"})
        answer = line.getresponse()
        assert answer.status == 200
        answer.read()
        upstream.hang_up()
        time.sleep(0.05)
    line.close()
    assert upstream.connections == 2


@pytest.mark.parametrize("secure", [False, True])
def test_a_superlink_that_is_away_is_a_502_until_it_is_back(secure: bool, made: Certificates) -> None:
    certificates = made if secure else None
    port = free_port()
    with gate(port, certificates=certificates) as world:
        status, answer, _ = world.ask("POST", PULL, b"a" * 5 * 2**20)
        assert (status, json.loads(answer)) == (502, {"detail": "the SuperLink is unreachable."})
        with up(Upstream(port, certificates)):
            assert world.ask("POST", PULL, b"a")[0] == 200
        assert world.ask("POST", PULL, b"a")[0] == 502
    assert world.tally.counts == {"away": 2}


def test_half_an_answer_is_not_taken_for_a_whole_one(world: World, upstream: Upstream) -> None:
    upstream.breaks = True
    with pytest.raises(ConnectionResetError):
        world.ask("POST", PULL, b"a")


def test_a_request_that_is_too_long_is_refused_before_it_is_read(world: World, upstream: Upstream) -> None:
    for length in (QUICK.most + 1, 10**18):
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


def test_one_address_has_only_so_many_connections(upstream: Upstream) -> None:
    slow = QUICK._replace(head=5.0)
    with gate(upstream.server_port, slow, most=(50, 3)) as world, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", world.port)))
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            world.ask("GET", "/health")
        assert world.tally.counts == {"full": 1}
        stack.close()
        limit = time.monotonic() + 5
        while True:
            with suppress(ConnectionError):
                assert world.ask("GET", "/health")[0] == 200
                break
            assert time.monotonic() < limit


def test_all_of_it_goes_over_tls(made: Certificates) -> None:
    body = bytes(range(256)) * 2**13
    with up(Upstream(certificates=made)) as server, gate(server.server_port, certificates=made) as world:
        told = json.loads(world.ask("POST", PULL, body)[1])
        assert (told["size"], told["sum"]) == (len(body), sum(body))
        assert world.ask("POST", "/v1/control/start-run", body[: 2**19])[0] == 403
        link = SuperLinkAddress(format_address("127.0.0.1", world.port), made.authority)
        assert superlink_problem(link) is None
        plain = link._replace(authority=None)
        assert "speaks TLS: give --certificate" in str(_connection_problem(plain, superlink_problem(plain)))
        silent = socket.create_connection(("127.0.0.1", world.port), timeout=10)  # no word of TLS
        with silent as line, pytest.raises(ConnectionResetError):
            line.recv(1)


def test_without_tls_it_says_so_to_whoever_wants_it(world: World, made: Certificates) -> None:
    link = SuperLinkAddress(format_address("127.0.0.1", world.port), made.authority)
    assert "does not speak TLS" in str(_connection_problem(link, superlink_problem(link)))


def test_a_superlink_that_another_authority_vouches_for_is_not_led_to(
    made: Certificates, tmp_path: Path
) -> None:
    keys.create_keys(tmp_path / "keys", ["127.0.0.1"], ["a"], ["localhost"], 3)
    other = find_certificates(tmp_path / "keys")
    with up(Upstream(certificates=other)) as server, gate(server.server_port, certificates=made) as world:
        assert world.ask("GET", "/health")[0] == 502
        assert server.asked == []


def test_as_a_process_it_is_started_again_and_ends_with_whoever_started_it(
    upstream: Upstream, made: Certificates, tmp_path: Path
) -> None:
    link = SuperLinkAddress(format_address("127.0.0.1", upstream.server_port), None)
    with bind_socket("127.0.0.1", 0) as listener:
        listener.listen()
        world = World(listener.getsockname()[1], [], RefusalLog(print), None)
        child = GatewayProcess(listener, tmp_path, None)
        try:
            child.forward_to(link)
            assert world.ask("GET", "/health")[0] == 200
            child.check_started()
            first = child._child
            assert first is not None
            with socket.create_connection(("127.0.0.1", world.port), timeout=10) as line:
                line.sendall(HEAD)
                time.sleep(0.2)
                first.process.kill()
                while first.is_alive():
                    time.sleep(0.01)
                with pytest.raises(ConnectionResetError):  # no end that TLS would take for a broken one
                    line.recv(1)
            late: list[int] = []
            asker = threading.Thread(target=lambda: late.append(world.ask("GET", "/health")[0]))
            asker.start()
            while asker.is_alive():
                child.keep_alive()
                time.sleep(0.02)
            assert late == [200]  # it waited at the socket
            assert world.ask("POST", "/v1/control/start-run", b"a")[0] == 403
            assert (
                "forbidden (1 so far): 'POST /v1/control/start-run' from 127.0.0.1" in child.log.read_text()
            )
            second = child._child
            assert second is not None
            assert second.process.stdin is not None
            second.process.stdin.close()
            limit = time.monotonic() + 10
            while second.is_alive():
                assert time.monotonic() < limit
                time.sleep(0.01)
            assert second.returncode == 0
        finally:
            child.stop()
