"""A site in one process: it holds data and model, and talks to the SuperLink itself.

The main thread talks to the SuperLink, so that heartbeats, stop requests and time limits do not wait for the
work. A second thread does the tasks, one at a time, and a third one waits for messages. Nothing that the
SuperLink sends is executed, imported or unpickled: a message is a short header of JSON, which is validated,
and the bytes of tensors.
"""

import contextlib
import json
import logging
import os
import queue
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from offbeat.deploy.config import make_site_module
from offbeat.deploy.flower.commands import log_to
from offbeat.deploy.flower.content import (
    KINDS,
    PARALLEL_PULLS,
    Content,
    MessageDownload,
    to_objects,
)
from offbeat.deploy.flower.private_api import (
    FleetClient,
    FlowerError,
    OutgoingReply,
    PendingMessage,
    Refusal,
)
from offbeat.deploy.keys import create_site_key, load_site_key, reply_statement
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.strict_json import Rejected
from offbeat.deploy.protocol.transport import Backoff
from offbeat.deploy.site.site import Site, SiteOptions
from offbeat.errors import InputError
from offbeat.training.task import load_task

_FIRST_PAUSE, _MAX_PAUSE = 0.5, 10.0  # seconds between two attempts to connect
_PULL_INTERVAL = 1.0  # seconds at least between two requests for messages to which there is none
_STOP_POLL = 0.25  # seconds within which a request to stop is noticed
# A heartbeat that is due waits for the end of a request for messages, whose connection it can then use, and
# which the gateway keeps for 20 seconds.
_HEARTBEAT_FRACTION, _HEARTBEAT_SLACK = 0.4, 25.0  # of Flower's interval, and seconds
_OBJECT_TIMEOUT, _OBJECT_PAUSE = 60.0, 0.02  # seconds for the SuperLink to have all objects of a message
_GRACE = 5.0  # seconds after which a process that cannot restart itself is killed
_LOG = logging.getLogger("offbeat")
_T = TypeVar("_T")


class SuperLinkAddress(NamedTuple):
    """How a site reaches the SuperLink."""

    address: str  # host:port
    authority: Path | None  # the certificate of the authority to trust; None: without TLS


def run_site(
    options: SiteOptions,
    link: SuperLinkAddress,
    notify: Callable[[str], None],
    should_stop: Callable[[], bool],
    on_ready: Callable[[Site], None],
) -> bool:
    """Run a site until `should_stop()`; return whether its thread still works on a task."""
    options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log_to(options.folder / "site.log"):  # what may quote data
        # Without a registered key a site has one of its own, by which the server recognises its replies.
        key = options.key or create_site_key(options.folder / "key")
        task = load_task(options.task, option="--task")
        site = Site(
            options.name,
            options.folder,
            task.site_examples,
            partial(make_site_module, options.task),
            task.loss,
            key,
            options.helper_key,
            options.minimum,
            tuple(task.personal),
            test=task.site_test(options.name),
            metrics=task.metrics,
        )
        with contextlib.closing(site):
            on_ready(site)
            client = FleetClient(link.address, link.authority, load_site_key(key))
            with contextlib.closing(client):
                connection = SiteConnection(site, client, options, link, notify, should_stop, _restart)
                connection.run()
                return connection.is_busy


def _restart() -> None:
    """Replace this process by a new one with the same command: nothing else ends a thread that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Background(Generic[_T]):
    """A thread that makes one call at a time; nothing waits for it when the process ends."""

    def __init__(self, name: str, call: Callable[..., _T], wake: Callable[[], None]) -> None:
        self._call, self._wake = call, wake
        self._calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_T] = queue.SimpleQueue()
        self.is_busy = False  # until the result was taken
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self, *arguments: Any) -> None:
        """Make the call."""
        self.is_busy = True
        self._calls.put(arguments)

    def take(self) -> _T | None:
        """Return what it gave, once."""
        if self._results.empty():
            return None
        self.is_busy = False
        return self._results.get()

    def _run(self) -> None:
        while True:
            self._results.put(self._call(*self._calls.get()))
            self._wake()


class Worker:
    """Does one task at a time, in a thread."""

    def __init__(
        self, answer: Callable[[str, str, bytes], tuple[str, bytes]], wake: Callable[[], None]
    ) -> None:
        self._thread = Background("site-worker", answer, wake)
        self._started = self._deadline = 0.0
        self.task: PendingMessage | None = None

    def start(self, task: PendingMessage, content: Content) -> None:
        """Begin a task; its header or its message says how long it may take."""
        timeout = answer_timeout(content.header, task.ttl)
        self.task, self._started = task, time.monotonic()
        self._deadline = self._started + timeout
        _set_alarm(timeout + _GRACE)
        self._thread.start("task", content.header, content.payload)

    def take(self) -> tuple[PendingMessage, Content, float] | None:
        """Return the task, its answer and its seconds once it is done."""
        result, task = self._thread.take(), self.task
        if result is None or task is None:
            return None
        _set_alarm(0)
        self.task = None
        return task, Content(*result), time.monotonic() - self._started

    @property
    def is_late(self) -> bool:
        """Whether the task has taken longer than it may."""
        return self.task is not None and time.monotonic() > self._deadline


class Heard(NamedTuple):
    """What came of a request for messages."""

    node: int  # that asked
    begun: float
    message: PendingMessage | None
    error: FlowerError | None


def listen(pull: Callable[[], PendingMessage | None], node: int) -> Heard:
    """Ask for a message, for which the gateway waits."""
    begun = time.monotonic()
    try:
        return Heard(node, begun, pull(), None)
    except Exception as error:  # the response may be anything
        known = error if isinstance(error, FlowerError) else FlowerError(Refusal.OTHER, str(error))
        return Heard(node, begun, None, known)


def _set_alarm(seconds: float) -> None:
    """Have the system end this process then, for a task that blocks every thread; 0: not any more."""
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, seconds)  # the default action of SIGALRM ends the process


def answer_timeout(header: str, ttl: float) -> float:
    """Return how many seconds an answer may take: those in the header, and at most the message's TTL."""
    try:
        seconds = json.loads(header)["seconds"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ttl
    return min(float(seconds), ttl) if type(seconds) in (int, float) and seconds > 0 else ttl


class SiteConnection:
    """Keeps a site connected, and passes messages between the SuperLink and the site."""

    def __init__(
        self,
        site: Site,
        client: FleetClient,
        options: SiteOptions,
        link: SuperLinkAddress,
        notify: Callable[[str], None],
        should_stop: Callable[[], bool],
        restart: Callable[[], None],
    ) -> None:
        self._site, self._client, self._options, self._link = site, client, options, link
        self._notify, self._should_stop, self._restart = _without_repeats(notify), should_stop, restart
        self._node: int | None = None  # this node's ID while it is connected
        self._was_connected = False
        self._backoff = Backoff(_FIRST_PAUSE, _MAX_PAUSE)
        self._next_heartbeat = self._next_pull = 0.0
        self._news = threading.Event()  # a task is done, or a message came
        self._worker = Worker(site.answer, self._news.set)
        self._listener = Background("site-listener", partial(listen, client.pull), self._news.set)
        self._waiting: tuple[PendingMessage, Content] | None = None  # a task behind the one at work
        self._download: tuple[PendingMessage, MessageDownload, float] | None = None
        self._pool = ThreadPoolExecutor(PARALLEL_PULLS)
        self._refusal: str | None = None
        self._ended = False

    def run(self) -> None:
        """Serve until a stop is requested, or until the run is over if the site takes part only once."""
        try:
            while not self._should_stop() and not (self._ended and self._options.once):
                if self._worker.is_late:
                    self._give_up_process()
                self._step()
        finally:
            self._sign_off()
            self._pool.shutdown(wait=False)

    @property
    def is_busy(self) -> bool:
        """Whether a task is being worked on."""
        return self._worker.task is not None

    def _step(self) -> None:
        if not self._backoff.due:
            time.sleep(_STOP_POLL)
            return
        try:
            if self._node is None:
                self._connect()
            late = time.monotonic() - self._next_heartbeat
            if late >= (_HEARTBEAT_SLACK if self._listener.is_busy else 0.0):
                self._send_heartbeat()
            self._exchange()
        except FlowerError as error:
            self._handle_failure(error)

    def _exchange(self) -> None:
        """Send a finished answer, or take a message; otherwise wait."""
        self._news.clear()
        done, heard = self._worker.take(), None
        if done is not None:
            self._finish(*done)
        elif self._download is not None:
            self._fetch(*self._download)
        elif (heard := self._listener.take()) is not None:
            self._take_heard(heard)
        else:
            rest = self._next_pull - time.monotonic()
            if self._waiting is None and not self._listener.is_busy and rest <= 0:
                self._listener.start(self._node)
            self._news.wait(min(_STOP_POLL, rest) if rest > 0 else _STOP_POLL)

    def _finish(self, message: PendingMessage, answer: Content, seconds: float) -> None:
        """Begin the next task, if there is one, and send the answer to the last."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self._is_current(waiting[0]):
            self._worker.start(*waiting)
        if self._is_current(message):
            self._send(message, answer, seconds)

    def _is_current(self, message: PendingMessage) -> bool:
        """Whether a message is for the node that this site is now.

        A SuperLink that was restarted knows neither the node of before nor its messages.
        """
        return message.node == self._node

    def _take_heard(self, heard: Heard) -> None:
        if heard.error is not None:
            if heard.node == self._node:
                raise heard.error
            return  # this site has connected again since
        self._backoff.reset()
        message = heard.message
        if message is None:
            self._next_pull = heard.begun + _PULL_INTERVAL
            return
        download = MessageDownload(message.message_id, message.object_ids, self._site.max_message_bytes)
        self._fetch(message, download, time.monotonic() + min(_OBJECT_TIMEOUT, message.ttl))

    def _fetch(self, message: PendingMessage, download: MessageDownload, deadline: float) -> None:
        """Fetch what the SuperLink has of a message; its sender may still be sending."""
        self._download = None
        if not self._is_current(message):
            return
        try:
            content = download.fetch(
                lambda object_id: self._client.pull_object(message.run_id, object_id), self._pool
            )
        except FlowerError as error:
            if error.refusal is Refusal.RUN_ENDED:
                return
            if time.monotonic() < deadline:
                self._download = message, download, deadline
            raise
        except Exception as error:  # the bytes come from outside and may cause any error
            self._ignore(message, f"it cannot be read ({error})")
            return
        if content is not None:
            self._take(message, content)
        elif time.monotonic() > deadline:
            self._ignore(message, "its sender did not send all of it")
        else:
            self._download = message, download, deadline
            time.sleep(_OBJECT_PAUSE)

    def _ignore(self, message: PendingMessage, reason: str) -> None:
        _LOG.warning("the message %s is ignored: %s", message.message_id, reason)
        self._notify(f"a message of the server is ignored: {reason.rstrip('.')}.")

    def _take(self, message: PendingMessage, content: Content) -> None:
        kind = KINDS.get(message.kind, message.kind)
        if kind == "task":
            if self._worker.task is None:
                self._worker.start(message, content)
            else:
                self._waiting = message, content
            return
        if kind == "end":
            self._take_end(content.header)
        answer = Content("", b"") if kind == "end" else Content(*self._site.answer(kind, *content[:2]))
        self._send(message, answer, 0.0)
        if self._site.refusal is not None and self._site.refusal != self._refusal:
            self._notify(f"the server refused this site: {self._site.refusal}")
        self._refusal = self._site.refusal

    def _take_end(self, header: str) -> None:
        try:
            end = messages.decode_message(header, messages.RunEnd)
        except Rejected:  # from a server of another version
            end = messages.RunEnd(False, "the server has ended.")
        self._ended = end.finished
        again = "" if self._options.once and end.finished else " This site waits for the next run."
        self._notify(f"{end.sentence}{again}")

    def _send(self, message: PendingMessage, answer: Content, seconds: float) -> None:
        """Sign an answer and send it; if the SuperLink is away, try again while the message lives."""
        signature = self._site.sign(reply_statement(message.message_id, answer.header, answer.payload))
        reply = OutgoingReply(message, *to_objects(answer._replace(signature=signature)))
        deadline = time.monotonic() + message.ttl
        while True:
            try:
                self._client.send(reply, seconds)
                break
            except FlowerError as error:
                if error.refusal is Refusal.RUN_ENDED:
                    break
                if not error.is_away or time.monotonic() > deadline or self._should_stop():
                    raise
                self._notify(f"the answer to a task waits for the SuperLink at {self._link.address}.")
                time.sleep(_STOP_POLL)

    def _connect(self) -> None:
        """Activate the node; first the one of an earlier process is deactivated, if it may be active."""
        record = self._options.folder / "node"  # the ID of the last one
        self._client.register()
        try:
            node = self._client.activate()
        except FlowerError as error:
            if error.refusal is not Refusal.NOT_ACTIVATED:
                raise
            with contextlib.suppress(FlowerError, OSError, ValueError):
                self._client.deactivate(int(record.read_text()))
            node = self._client.activate()
        self._node, self._was_connected, self._ended = node, True, False
        self._backoff.reset()
        self._next_heartbeat = time.monotonic() + _HEARTBEAT_FRACTION * self._client.heartbeat_interval
        record.write_text(str(node))
        self._notify(f"connected to {self._link.address} as node {node}.")

    def _send_heartbeat(self) -> None:
        if not self._client.heartbeat():
            raise FlowerError(Refusal.UNAUTHORIZED, "the SuperLink does not know this node")
        interval = _HEARTBEAT_FRACTION * self._client.heartbeat_interval
        self._next_heartbeat = time.monotonic() + interval * random.uniform(0.8, 1.0)

    def _handle_failure(self, error: FlowerError) -> None:
        """Say what is wrong, and when it is tried again; what only the user can change is raised."""
        address, refusal = self._link.address, error.refusal
        needs_no_tls = self._was_connected and self._link.authority is None
        if error.is_away and not needs_no_tls and (problem := connection_problem(self._link, str(error))):
            if not self._was_connected:
                raise InputError(problem)
            reason = problem
        elif error.is_away:
            reason = f"the SuperLink at {address} cannot be reached"
            if self._node is not None:  # it may be restarting, and still count this node as connected
                self._backoff.fail()
                self._notify(f"{reason}; this site tries again.")
                return
        elif refusal is Refusal.UNAUTHORIZED and self._options.key is None and not self._was_connected:
            raise InputError(
                f"the SuperLink at {address} accepts registered sites only: give --certificate and --key."
            )
        elif refusal is Refusal.UNAUTHORIZED and self._node is not None:
            self._backoff.reset()  # it is there again
            reason = f"the SuperLink at {address} has forgotten this site, as after a restart"
        elif refusal is Refusal.NOT_ACTIVATED:
            own = self._options.key or "of this site"
            reason = f"another node is connected to the SuperLink at {address} with the key {own}"
        else:
            reason = f"the SuperLink at {address} refuses this site ({str(error).rstrip('.')})"
        self._node = None
        self._notify(f"{reason.rstrip('.')}; next attempt in {self._backoff.fail():.1f} s.")

    def _give_up_process(self) -> None:
        self._notify("a task took longer than it may: this site starts again.")
        _set_alarm(0)  # it would end this process while it signs off, or the one that takes its place
        self._sign_off()
        self._restart()

    def _sign_off(self) -> None:
        if self._node is not None:
            with contextlib.suppress(FlowerError):
                self._client.deactivate(self._node)
            self._node = None


def _without_repeats(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Drop a message that is equal to the one before it, apart from its numbers."""
    last = ""

    def notify_once(message: str) -> None:
        nonlocal last
        plain = re.sub(r"next attempt in [0-9.]+ s", "", message)
        if plain != last:
            last = plain
            notify(message)

    return notify_once


def connection_problem(link: SuperLinkAddress, problem: str) -> str | None:
    """Return what the user has to change to reach a SuperLink; None if it may only be down."""
    if "CERTIFICATE_VERIFY_FAILED" in problem:
        found = re.search(r"verify failed: (.*?)\.? \(_ssl", problem)
        return (
            f"the certificate of the SuperLink at {link.address} is not valid under {link.authority}"
            f"{f' ({found[1]})' if found else ''}: check both files and the address."
        )
    if "WRONG_VERSION_NUMBER" in problem or "RECORD_LAYER" in problem:
        return f"the SuperLink at {link.address} does not speak TLS: give --insecure, if that is intended."
    if link.authority is None and ("disconnected without" in problem or "reset by peer" in problem):
        return f"the SuperLink at {link.address} speaks TLS: give --certificate."
    return None
