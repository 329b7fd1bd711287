"""The gate before a SuperLink: sites come through to what they need of it, nobody to anything else.

A SuperLink has one port for all, and takes orders from whoever reaches it: registers keys, and has code run
at the server and at every site. So it listens to its own machine alone, and this process to all others.
"""

import argparse
import asyncio
import collections
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from offbeat.deploy.passage import Bounds, Passage, Way
from offbeat.deploy.side import LostError, accepted

_ALL, _EACH = 400, 100  # connections, and those from one address; each takes up to two files
_PAUSE = 0.5  # seconds, where the system has no more to give
_OFTEN = 10.0  # seconds between two lines on the same
_LOG = logging.getLogger("offbeat.gate")


class Tally:
    """What did not pass, by kind: all of it counted, and written down now and then."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self.counts: collections.Counter[str] = collections.Counter()
        self._due: dict[str, float] = {}

    def __call__(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if self._clock() >= self._due.get(kind, 0.0):
            self._due[kind] = self._clock() + _OFTEN
            self._say(f"{kind} ({self.counts[kind]} so far): {what}")


class Gate:
    """Connections from anywhere to one SuperLink."""

    def __init__(
        self,
        way: Way,
        context: ssl.SSLContext | None,
        tally: Tally,
        bounds: Bounds = Bounds(),
        most: tuple[int, int] = (_ALL, _EACH),
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
                await asyncio.sleep(_PAUSE)
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
            front = await accepted(line, self._context, self._bounds.head)
            try:
                await Passage(front, peer, self._way, self._bounds, self._tally).run()
            finally:
                await front.close(self._bounds.linger)
        except LostError:
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
    parser = argparse.ArgumentParser(prog="python -m offbeat.deploy.gate", description=__doc__)
    parser.add_argument("--listener", required=True, type=int, metavar="N", help="the socket's number")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument("--authority", type=Path, metavar="FILE", help="vouches for the SuperLink")
    parser.add_argument("--certificate", type=Path, metavar="FILE")
    parser.add_argument("--key", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    secure = given.authority is not None
    way = Way(given.superlink, ssl.create_default_context(cafile=given.authority) if secure else None)
    context = server_context(given.certificate, given.key) if secure else None

    async def serve() -> NoReturn:
        asyncio.get_running_loop().add_reader(0, _end_with_parent)
        await Gate(way, context, Tally(_LOG.warning)).serve(socket.socket(fileno=given.listener))

    asyncio.run(serve())


def _end_with_parent() -> None:
    if not os.read(0, 1024):
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
