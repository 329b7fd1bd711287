"""A connection and what HTTP makes of it; what one end of it may say, the other end has to read alike.

One connection at the gate: each of its requests goes on to the SuperLink, or is refused.

The gate before a SuperLink: sites come through to what they need of it, nobody to anything else.

A SuperLink has one port for all, and takes orders from whoever reaches it: registers keys, and has code run
at the server and at every site. So it listens to its own machine alone, and this process to all others.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import logging
import os
import socket
import ssl
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import h11

from offbeat.deploy.network import parse_address
from offbeat.deploy.protocol.strict_json import quote

CHUNK_BYTES = 256 * 1024  # bytes that are held at a time
_MAX_HEADER_BYTES = 16 * 1024  # bytes of a head


class ConnectionLostError(Exception):
    """A connection has ended, or speaks no HTTP: then there is a status to say so with."""

    def __init__(self, side: "HttpConnection | None", status: int | None = None) -> None:
        super().__init__()
        self.side, self.status = side, status


class HttpConnection:
    """One of the two connections that a message passes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, role: Any) -> None:
        self._reader, self.writer = reader, writer
        self._http = h11.Connection(role, max_incomplete_event_size=_MAX_HEADER_BYTES)
        self._cut = False

    @property
    def waits(self) -> bool:
        """Whether something was begun that has not come to its end."""
        return bool(self._http.trailing_data[0])

    async def next(self) -> Any:
        """The next thing that was said."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(CHUNK_BYTES))
        except OSError:
            raise ConnectionLostError(self) from None
        except h11.RemoteProtocolError as error:
            raise ConnectionLostError(self, error.error_status_hint) from None
        return event

    async def answer(self) -> Any:
        """The head of the answer."""
        while isinstance(event := await self.next(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise ConnectionLostError(self)
        return event

    async def send(self, event: Any) -> None:
        """Say something, and wait until most of it is gone."""
        try:
            self.writer.write(self._http.send(event) or b"")
            await self.writer.drain()
        except (OSError, h11.LocalProtocolError):
            raise ConnectionLostError(self) from None

    def again(self) -> bool:
        """Make it ready for another message, if it can carry one."""
        if self._reader.at_eof() or not self._http.our_state is self._http.their_state is h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def close(self, seconds: float) -> None:
        """End it in order, if it is not cut and the other end has it so."""
        if not self._cut:
            _set_linger(self.writer.get_extra_info("socket"), reset=False)
        self.writer.close()
        try:
            async with asyncio.timeout(seconds):
                await self.writer.wait_closed()
        except OSError:  # also a TimeoutError
            self.writer.transport.abort()

    def cut(self) -> None:
        """End it at once, so that what was begun is not taken for whole."""
        self._cut = True
        self.writer.transport.abort()


async def accept_connection(
    line: socket.socket, context: ssl.SSLContext | None, seconds: float
) -> HttpConnection:
    """The side of whoever came; however this process ends, they see a reset.

    A plain end in the middle of TLS looks like broken TLS, after which Flower's nodes do not try again.
    """
    _set_linger(line, reset=True)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(CHUNK_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    limits = {} if context is None else {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": seconds}
    try:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, line, ssl=context, **limits)
    except OSError:
        raise ConnectionLostError(None) from None
    return HttpConnection(reader, asyncio.StreamWriter(transport, protocol, reader, loop), h11.SERVER)


def _set_linger(line: Any, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))


async def open_connection(
    host: str, port: int, context: ssl.SSLContext | None, seconds: float
) -> HttpConnection:
    """The side of whoever is gone to."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=CHUNK_BYTES)
    except OSError:  # also a TimeoutError
        raise ConnectionLostError(None) from None
    return HttpConnection(reader, writer, h11.CLIENT)


_FLEET_METHODS = (
    *("register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat"),
    *("pull-messages", "push-messages", "get-run", "get-fab"),
    *("pull-object", "push-object", "confirm-message-received"),
)
# All that a SuperNode asks for, and how `offbeat join` looks whether anybody is there. Compared as it came:
# nothing is decoded or tidied up here that the SuperLink might read in another way.
ALLOWED_REQUESTS = frozenset(
    {(b"GET", b"/health"), *((b"POST", f"/v1/fleet/{name}".encode()) for name in _FLEET_METHODS)}
)
_HOP_BY_HOP_HEADERS = frozenset(
    {
        *(b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_ORIGIN_HEADERS = (b"forwarded", b"x-forwarded-")  # a SuperLink believes these of whoever comes by loopback
_KEEP_ALIVE = 2.0  # seconds that a way to the SuperLink may lie idle; after five the SuperLink ends it
_MAX_DISCARD = 1024 * 1024  # bytes of a refused request that are read, so that its sender sees the answer


class ConnectionLimits(NamedTuple):
    """What one connection may take up; times in seconds."""

    most: int = 32 * 1024 * 1024  # bytes of a request: Flower cuts what is large into pieces of 5 MiB
    head: float = 15.0  # to say what is wanted, also while nothing is
    grace: float = 30.0  # for a body, beyond what its bytes take at `rate`
    rate: float = 16 * 1024.0  # bytes per second
    reach: float = 10.0  # for a way to the SuperLink
    answer: float = 60.0  # for the SuperLink to answer
    linger: float = 2.0  # for a connection to end in order


class UpstreamAddress(NamedTuple):
    """To the SuperLink."""

    address: str
    context: ssl.SSLContext | None


class ProxyConnection:
    """From one connection to the SuperLink, request by request."""

    def __init__(
        self,
        front: HttpConnection,
        peer: str,
        way: UpstreamAddress,
        bounds: ConnectionLimits,
        note: Callable[[str, str], None],
    ) -> None:
        self._front, self._peer, self._way, self._bounds, self._note = front, peer, way, bounds, note
        self._back: HttpConnection | None = None
        self._used = 0.0  # when the way to the SuperLink was last used

    async def run(self) -> None:
        """Until the connection ends, lies idle, or asks for what is refused."""
        try:
            while await self._one():
                pass
        finally:
            self._drop()

    async def _one(self) -> bool:
        """One request; whether there may be another."""
        try:
            async with asyncio.timeout(self._bounds.head):
                request = await self._front.next()
        except TimeoutError:
            if self._front.waits:
                self._note("slow", f"a request from {self._peer} did not come to its end")
            return False
        except ConnectionLostError as lost:
            if lost.status is not None:
                self._note("malformed", f"what {self._peer} sent is not HTTP/1.1")
                await self._refuse(lost.status, "this is not HTTP/1.1")
            return False
        if not isinstance(request, h11.Request):
            return False
        if why := self._reason(request):
            await self._refuse(*why)
            return False
        return await self._pass(request)

    def _reason(self, request: Any) -> tuple[int, str] | None:
        """Why a request goes no further: status and sentence."""
        named = dict(request.headers)
        if (request.method, request.target) not in ALLOWED_REQUESTS:
            wanted = b"%s %s" % (request.method, request.target)
            self._note("forbidden", f"{quote(wanted.decode('latin-1'))} from {self._peer}")
            return 403, "the gate of 'offbeat serve' passes on what sites need, and nothing else."
        length = named.get(b"content-length", b"0" if request.method == b"GET" else None)
        if length is None or b"transfer-encoding" in named:
            self._note("malformed", f"a request from {self._peer} does not say how long it is")
            return 411, "a request must say how long it is."
        if int(length) > self._bounds.most:
            self._note("size", f"a request of {int(length)} bytes from {self._peer}")
            return 413, f"a request has at most {self._bounds.most} bytes."
        return None

    async def _pass(self, request: Any) -> bool:
        front, begun = self._front, False
        try:
            back = await self._reach()
            await back.send(
                h11.Request(method=request.method, target=request.target, headers=self._to(request))
            )
            await self._pour(front, back)
            async with asyncio.timeout(self._bounds.answer):
                answer = await back.answer()
            begun = True
            headers = [(name, value) for name, value in answer.headers if name not in _HOP_BY_HOP_HEADERS]
            await front.send(h11.Response(status_code=answer.status_code, headers=headers))
            await self._pour(back, front)
        except TimeoutError:
            status, sentence = 504, "the request took too long."
            self._note("slow", f"a request from {self._peer} took too long")
        except ConnectionLostError as lost:
            if lost.side is front:
                status, sentence = lost.status or 400, "the request broke off."
            else:
                status, sentence = 502, "the SuperLink is away."
                self._note("away", f"the SuperLink at {self._way.address} is away")
        else:
            self._used = asyncio.get_running_loop().time()
            return front.again()
        self._drop()
        if begun:
            front.cut()
        else:
            await self._refuse(status, sentence, self._bounds.most)
        return False

    async def _reach(self) -> HttpConnection:
        """A way to the SuperLink: the last one, if it is fresh."""
        idle = asyncio.get_running_loop().time() - self._used
        if self._back is not None and idle < _KEEP_ALIVE and self._back.again():
            return self._back
        self._drop()
        host, port = parse_address(self._way.address)
        self._back = await open_connection(host, port, self._way.context, self._bounds.reach)
        return self._back

    def _to(self, request: Any) -> list[tuple[bytes, bytes]]:
        """What the SuperLink is told: all but what concerns the connection, and who asks."""
        kept = [
            (name, value)
            for name, value in request.headers
            if name not in _HOP_BY_HOP_HEADERS and not name.startswith(_ORIGIN_HEADERS)
        ]
        return [*kept, (b"x-forwarded-for", self._peer.encode())]

    async def _pour(self, source: HttpConnection, sink: HttpConnection) -> None:
        """The body, piece by piece."""
        async with self._pace() as paced:
            while isinstance(event := await source.next(), h11.Data):
                await sink.send(event)
                paced(len(event.data))
            await sink.send(h11.EndOfMessage())

    @asynccontextmanager
    async def _pace(self) -> AsyncIterator[Callable[[int], None]]:
        """What is inside may take as long as the bytes allow of which it tells."""
        bounds, until = self._bounds, asyncio.get_running_loop().time() + self._bounds.grace
        async with asyncio.timeout_at(until) as limit:

            def paced(size: int) -> None:
                nonlocal until
                until += size / bounds.rate
                limit.reschedule(until)

            yield paced

    async def _refuse(self, status: int, sentence: str, most: int = _MAX_DISCARD) -> None:
        """Say why, and end the connection: not before most bytes of the body, so that the sender sees it."""
        body = json.dumps({"detail": sentence}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        head = h11.Response(status_code=status, headers=[*headers, ("connection", "close")])
        with contextlib.suppress(TimeoutError, ConnectionLostError):
            async with self._pace() as paced:
                for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                    await self._front.send(event)
                while most > 0 and isinstance(event := await self._front.next(), h11.Data):
                    most -= len(event.data)
                    paced(len(event.data))

    def _drop(self) -> None:
        if self._back is not None:
            self._back.writer.close()
            self._back = None


_MAX_CONNECTIONS, _MAX_PER_ADDRESS = (
    400,
    100,
)  # connections, and those from one address; each takes up to two files
_ACCEPT_PAUSE = 0.5  # seconds, where the system has no more to give
_LOG_INTERVAL = 10.0  # seconds between two lines on the same
_LOG = logging.getLogger("offbeat.gate")


class RefusalLog:
    """What did not pass, by kind: all of it counted, and written down now and then."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self.counts: collections.Counter[str] = collections.Counter()
        self._due: dict[str, float] = {}

    def __call__(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if self._clock() >= self._due.get(kind, 0.0):
            self._due[kind] = self._clock() + _LOG_INTERVAL
            self._say(f"{kind} ({self.counts[kind]} so far): {what}")


class Gateway:
    """Connections from anywhere to one SuperLink."""

    def __init__(
        self,
        way: UpstreamAddress,
        context: ssl.SSLContext | None,
        tally: RefusalLog,
        bounds: ConnectionLimits = ConnectionLimits(),
        most: tuple[int, int] = (_MAX_CONNECTIONS, _MAX_PER_ADDRESS),
    ) -> None:
        self._way, self._context, self._tally, self._bounds = way, context, tally, bounds
        self._all, self._each = most
        self._open: collections.Counter[str] = collections.Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> NoReturn:
        """For ever."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                line, address = await loop.sock_accept(listener)
            except ConnectionError:
                continue
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            peer = str(address[0])
            if self._open.total() >= self._all or self._open[peer] >= self._each:
                self._tally("full", f"{peer} has {self._open[peer]} connections, all {self._open.total()}")
                line.close()
                continue
            self._open[peer] += 1
            task = loop.create_task(self._let_in(line, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _let_in(self, line: socket.socket, peer: str) -> None:
        try:
            front = await accept_connection(line, self._context, self._bounds.head)
            try:
                await ProxyConnection(front, peer, self._way, self._bounds, self._tally).run()
            finally:
                await front.close(self._bounds.linger)
        except ConnectionLostError:
            self._tally("malformed", f"{peer} did not come to terms on TLS")
        except Exception:
            _LOG.exception("a connection from %s failed", peer)
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """To prove ourselves with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Serve on a socket that was handed down, until whoever started this is gone."""
    parser = argparse.ArgumentParser(prog="python -m offbeat.deploy.gateway", description=__doc__)
    parser.add_argument("--listener", required=True, type=int, metavar="N", help="the socket's number")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument("--authority", type=Path, metavar="FILE", help="vouches for the SuperLink")
    parser.add_argument("--certificate", type=Path, metavar="FILE")
    parser.add_argument("--key", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    secure = given.authority is not None
    way = UpstreamAddress(
        given.superlink, ssl.create_default_context(cafile=given.authority) if secure else None
    )
    context = server_context(given.certificate, given.key) if secure else None

    async def serve() -> NoReturn:
        asyncio.get_running_loop().add_reader(0, _end_with_parent)
        await Gateway(way, context, RefusalLog(_LOG.warning)).serve(socket.socket(fileno=given.listener))

    asyncio.run(serve())


def _end_with_parent() -> None:
    if not os.read(0, 1024):
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
