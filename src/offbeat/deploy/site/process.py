"""The process that holds a site with its data and model, and answers requests on a Unix socket one at a time.

It reports on standard output, in one line of JSON, that it is ready or why it cannot start, and ends when
its parent process closes standard input.
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
_FRAME_TIMEOUT = 60.0  # seconds to read a request or to write an answer: both ends are on one machine
_MAX_SECONDS = 1e8
_GRACE = 5.0  # seconds beyond a request's own time limit, during which the relay may kill this process


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the parent process ends; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    options = _parse_arguments(arguments)
    output = _claim_stdout()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        code = import_user_code(options.data, options.module, options.losses)
        site = Site(
            options.name,
            options.folder,
            code.load,
            code.module,
            code.losses,
            options.key,
            options.helper_key,
            options.minimum,
        )
        listener = listen_on(options.socket)
    except InputError as error:
        _print_json(output, {"error": str(error)})
        return 2
    report = {"ready": site.name, "site": site.site_id, "examples": site.examples, "pid": os.getpid()}
    _print_json(output, report)
    return serve_requests(listener, site, lambda reason: _print_json(output, {"refused": reason}))


def listen_on(path: Path) -> socket.socket:
    """Listen on a socket that only this user can reach, and write this process's PID beside it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(path.parent.stat().st_mode) & 0o077:
            raise InputError(f"other users can enter {path.parent}: use chmod 700, or name another socket.")
        if path.is_socket():
            path.unlink()  # this process holds the folder's lock, so nothing listens here any more
        listener.bind(str(path))
        path.chmod(0o600)
        relay.pid_file(path).write_text(str(os.getpid()))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise InputError(
            f"the socket {path} cannot be created ({reason}): name a shorter or another path."
        ) from None
    except BaseException:
        listener.close()
        raise
    return listener


def serve_requests(listener: socket.socket, site: Site, on_refused: Callable[[str], None]) -> NoReturn:
    """Answer requests forever; `on_refused` gets each new reason for which a server refused the site."""
    last_refusal = None
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                _answer_request(connection, site)
            except (FrameError, OSError) as error:  # the other end sees that the connection is closed
                logging.getLogger("offbeat").warning("a request was not answered: %r", error)
        if site.refusal is not None and site.refusal != last_refusal:
            on_refused(site.refusal)
        last_refusal = site.refusal


def _answer_request(connection: socket.socket, site: Site) -> None:
    head, payload = relay.receive_frame(connection, time.monotonic() + _FRAME_TIMEOUT)
    kind, header, seconds = (head.get(name) for name in ("kind", "note", "seconds"))
    if not (isinstance(kind, str) and isinstance(header, str) and isinstance(seconds, int | float)):
        raise FrameError("the header of a request lacks its kind, note or seconds")
    if not 0 < seconds <= _MAX_SECONDS:
        raise FrameError(f"a request allows {seconds} seconds")
    if _is_closed(connection):
        return
    with time_limit(seconds + _GRACE):
        answer, result = site.answer(kind, header, payload)
    relay.send_frame(connection, {"note": answer}, result, time.monotonic() + _FRAME_TIMEOUT)


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed the connection while it waited for its turn."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
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
    parser.add_argument("--minimum", type=int, help="the smallest number of clients in a secure sum")
    parser.add_argument("--socket", required=True, type=Path)
    return parser.parse_args(arguments)


def _claim_stdout() -> TextIO:
    """Return standard output for reports only; what user code prints goes to standard error."""
    sys.stdout.flush()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def _print_json(output: TextIO, facts: dict[str, Any]) -> None:
    output.write(json.dumps(facts) + "\n")
    output.flush()


def _exit_with_parent() -> None:
    while os.read(0, 1024):  # not through sys.stdin, whose lock would block an orderly exit
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
