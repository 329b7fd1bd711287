"""The process that holds a site, its data and its model, and answers on a socket: one request at a time.

It says on standard output, in one line of JSON, that it is ready or why it cannot be, and ends when
the process that started it goes away.
"""

import argparse
import json
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from offbeat.deploy.site import relay
from offbeat.deploy.site.relay import FrameError, time_limit
from offbeat.deploy.site.site import Site
from offbeat.deploy.user_code import import_user_code
from offbeat.errors import InputError

_BACKLOG = 8
_FRAME_TIMEOUT = (
    60.0  # seconds for a request to be read or an answer to be written: both ends are on one machine
)
_MAX_SECONDS = 1e8
_GRACE = 5.0  # seconds beyond a request's own, in which its asker may end this process


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until nobody is there any more; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    words = _parse_arguments(arguments)
    out = _claim_stdout()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        own = import_user_code(words.data, words.module, words.losses)
        trust = words.key, words.helper_key, words.minimum
        site = Site(words.name, words.folder, own.load, own.module, own.losses, *trust)
        listener = listen_on(words.socket)
    except InputError as error:
        _print_json(out, {"error": str(error)})
        return 2
    _print_json(out, {"ready": site.name, "site": site.site, "examples": site.examples, "pid": os.getpid()})
    return serve_requests(listener, site, lambda sentence: _print_json(out, {"refused": sentence}))


def listen_on(path: Path) -> socket.socket:
    """A socket that its owner alone can reach, and beside it the number of this process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(path.parent.stat().st_mode) & 0o077:
            raise InputError(f"others can enter {path.parent}: take that right away, or name another socket.")
        if path.is_socket():
            path.unlink()  # the folder's lock is ours, so nobody listens here any more
        listener.bind(str(path))
        path.chmod(0o600)
        relay.pid_file(path).write_text(str(os.getpid()))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise InputError(
            f"the socket {path} cannot be made ({error.strerror or error}): name a shorter or another path."
        ) from None
    except BaseException:
        listener.close()
        raise
    return listener


def serve_requests(listener: socket.socket, site: Site, refused: Callable[[str], None]) -> NoReturn:
    """Answer for ever; `refused` is told once why a server turned the site away."""
    known = None
    while True:
        line, _ = listener.accept()
        with line:
            try:
                _answer_request(line, site)
            except (FrameError, OSError) as error:  # the asker sees the line end
                logging.getLogger("offbeat").warning("a request was not answered: %r", error)
        if site.refused is not None and site.refused != known:
            refused(site.refused)
        known = site.refused


def _answer_request(line: socket.socket, site: Site) -> None:
    head, payload = relay.receive_frame(line, time.monotonic() + _FRAME_TIMEOUT)
    kind, note, seconds = (head.get(name) for name in ("kind", "note", "seconds"))
    if not (isinstance(kind, str) and isinstance(note, str) and isinstance(seconds, int | float)):
        raise FrameError("the head of a request lacks its kind, note or seconds")
    if not 0 < seconds <= _MAX_SECONDS:
        raise FrameError(f"a request allows {seconds} seconds")
    if _hung_up(line):
        return
    with time_limit(seconds + _GRACE):
        answer, result = site.answer(kind, note, payload)
    relay.send_frame(line, {"note": answer}, result, time.monotonic() + _FRAME_TIMEOUT)


def _hung_up(line: socket.socket) -> bool:
    """Whether the asker has hung up while it waited for its turn."""
    line.setblocking(False)
    try:
        return line.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m offbeat.deploy.site.process", description=__doc__)
    parser.add_argument("--data", required=True, metavar="PACKAGE.MODULE:FUNCTION")
    parser.add_argument("--module", metavar="PACKAGE.MODULE:FUNCTION")
    parser.add_argument("--losses", metavar="PACKAGE.MODULE:FUNCTION")
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--key", type=Path, help="the site's private key")
    parser.add_argument("--helper-key", type=Path, help="the public key of the only helper to trust")
    parser.add_argument("--minimum", type=int, help="the fewest clients in a secure sum to take part in")
    parser.add_argument("--socket", required=True, type=Path)
    return parser.parse_args(arguments)


def _claim_stdout() -> TextIO:
    """Standard output for our lines alone; what a loader prints goes where errors go."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _print_json(out: TextIO, facts: dict[str, Any]) -> None:
    out.write(json.dumps(facts) + "\n")
    out.flush()


def _exit_with_parent() -> None:
    while os.read(0, 1024):  # not by sys.stdin, whose lock would be in the way of an orderly end
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
