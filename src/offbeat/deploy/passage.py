"""One connection at the gate: each of its requests goes on to the SuperLink, or is refused."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import h11

from offbeat.deploy.ports import parse_address
from offbeat.deploy.rejections import quote
from offbeat.deploy.side import LostError, Side, opened

_FLEET = (
    *("register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat"),
    *("pull-messages", "push-messages", "get-run", "get-fab"),
    *("pull-object", "push-object", "confirm-message-received"),
)
# All that a SuperNode asks for, and how `offbeat join` looks whether anybody is there. Compared as it came:
# nothing is decoded or tidied up here that the SuperLink might read in another way.
PASSED = frozenset({(b"GET", b"/health"), *((b"POST", f"/v1/fleet/{name}".encode()) for name in _FLEET)})
_HOP = frozenset(
    {
        *(b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_ORIGIN = (b"forwarded", b"x-forwarded-")  # a SuperLink believes these of whoever comes by loopback
_FRESH = 2.0  # seconds that a way to the SuperLink may lie idle; after five the SuperLink ends it
_DISCARD = 1024 * 1024  # bytes of a refused request that are read, so that its sender sees the answer


class Bounds(NamedTuple):
    """What one connection may take up; times in seconds."""

    most: int = 32 * 1024 * 1024  # bytes of a request: Flower cuts what is large into pieces of 5 MiB
    head: float = 15.0  # to say what is wanted, also while nothing is
    grace: float = 30.0  # for a body, beyond what its bytes take at `rate`
    rate: float = 16 * 1024.0  # bytes per second
    reach: float = 10.0  # for a way to the SuperLink
    answer: float = 60.0  # for the SuperLink to answer
    linger: float = 2.0  # for a connection to end in order


class Way(NamedTuple):
    """To the SuperLink."""

    address: str
    context: ssl.SSLContext | None


class Passage:
    """From one connection to the SuperLink, request by request."""

    def __init__(
        self, front: Side, peer: str, way: Way, bounds: Bounds, note: Callable[[str, str], None]
    ) -> None:
        self._front, self._peer, self._way, self._bounds, self._note = front, peer, way, bounds, note
        self._back: Side | None = None
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
        except LostError as lost:
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
        if (request.method, request.target) not in PASSED:
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
            headers = [(name, value) for name, value in answer.headers if name not in _HOP]
            await front.send(h11.Response(status_code=answer.status_code, headers=headers))
            await self._pour(back, front)
        except TimeoutError:
            status, sentence = 504, "the request took too long."
            self._note("slow", f"a request from {self._peer} took too long")
        except LostError as lost:
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

    async def _reach(self) -> Side:
        """A way to the SuperLink: the last one, if it is fresh."""
        idle = asyncio.get_running_loop().time() - self._used
        if self._back is not None and idle < _FRESH and self._back.again():
            return self._back
        self._drop()
        host, port = parse_address(self._way.address)
        self._back = await opened(host, port, self._way.context, self._bounds.reach)
        return self._back

    def _to(self, request: Any) -> list[tuple[bytes, bytes]]:
        """What the SuperLink is told: all but what concerns the connection, and who asks."""
        kept = [
            (name, value)
            for name, value in request.headers
            if name not in _HOP and not name.startswith(_ORIGIN)
        ]
        return [*kept, (b"x-forwarded-for", self._peer.encode())]

    async def _pour(self, source: Side, sink: Side) -> None:
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

    async def _refuse(self, status: int, sentence: str, most: int = _DISCARD) -> None:
        """Say why, and end the connection: not before most bytes of the body, so that the sender sees it."""
        body = json.dumps({"detail": sentence}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        head = h11.Response(status_code=status, headers=[*headers, ("connection", "close")])
        with contextlib.suppress(TimeoutError, LostError):
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
