"""A connection and what HTTP makes of it; what one end of it may say, the other end has to read alike."""

import asyncio
import contextlib
import socket
import ssl
import struct
from typing import Any

import h11

PIECE = 256 * 1024  # bytes that are held at a time
_HEAD = 16 * 1024  # bytes of a head


class LostError(Exception):
    """A connection has ended, or speaks no HTTP: then there is a status to say so with."""

    def __init__(self, side: "Side | None", status: int | None = None) -> None:
        super().__init__()
        self.side, self.status = side, status


class Side:
    """One of the two connections that a message passes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, role: Any) -> None:
        self._reader, self.writer = reader, writer
        self._http = h11.Connection(role, max_incomplete_event_size=_HEAD)
        self._cut = False

    @property
    def waits(self) -> bool:
        """Whether something was begun that has not come to its end."""
        return bool(self._http.trailing_data[0])

    async def next(self) -> Any:
        """The next thing that was said."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(PIECE))
        except OSError:
            raise LostError(self) from None
        except h11.RemoteProtocolError as error:
            raise LostError(self, error.error_status_hint) from None
        return event

    async def answer(self) -> Any:
        """The head of the answer."""
        while isinstance(event := await self.next(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise LostError(self)
        return event

    async def send(self, event: Any) -> None:
        """Say something, and wait until most of it is gone."""
        try:
            self.writer.write(self._http.send(event) or b"")
            await self.writer.drain()
        except (OSError, h11.LocalProtocolError):
            raise LostError(self) from None

    def again(self) -> bool:
        """Make it ready for another message, if it can carry one."""
        if self._reader.at_eof() or not self._http.our_state is self._http.their_state is h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def close(self, seconds: float) -> None:
        """End it in order, if it is not cut and the other end has it so."""
        if not self._cut:
            _end_by(self.writer.get_extra_info("socket"), reset=False)
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


async def accepted(line: socket.socket, context: ssl.SSLContext | None, seconds: float) -> Side:
    """The side of whoever came; however this process ends, they see a reset.

    A plain end in the middle of TLS looks like broken TLS, after which Flower's nodes do not try again.
    """
    _end_by(line, reset=True)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(PIECE)
    protocol = asyncio.StreamReaderProtocol(reader)
    limits = {} if context is None else {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": seconds}
    try:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, line, ssl=context, **limits)
    except OSError:
        raise LostError(None) from None
    return Side(reader, asyncio.StreamWriter(transport, protocol, reader, loop), h11.SERVER)


def _end_by(line: Any, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))


async def opened(host: str, port: int, context: ssl.SSLContext | None, seconds: float) -> Side:
    """The side of whoever is gone to."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=PIECE)
    except OSError:  # also a TimeoutError
        raise LostError(None) from None
    return Side(reader, writer, h11.CLIENT)
