"""What travels beside the bytes, as JSON text; who reads one trusts nothing of it."""

import json
import string
from typing import Any, NamedTuple, TypeAlias

from offbeat.core import Task
from offbeat.deploy import tame
from offbeat.deploy.rejections import Reason, Rejected
from offbeat.deploy.tame import malformed
from offbeat.deploy.wire import DTYPES, Form
from offbeat.errors import InputError

MOST_TEXT = 64 * 1024  # characters of a note
MOST_PLAN = 16 * 1024  # of the plan in one, and of what it says of secure sums
MOST_ERROR = 500
_MOST_CLIENTS = 2**31
_MOST_COUNT = 2**48  # of versions, visits, examples, and bytes
_MOST_SECONDS = 1e9
_MOST_SIDES = 16
_MEMORIES = ("none", "kept", "new")


class TaskNote(NamedTuple):
    """Down, with a task."""

    run: str
    task: Task
    start: bool  # the full-participation start: the site runs `warmup()` of the algorithm
    committed: int  # the client's last visit that the server has used for good; -1: none
    plan: dict[str, Any]
    seconds: float  # the deadline
    form: Form  # of the payload: leaves of (message, statistics)
    secure: dict[str, Any] | None


class UploadNote(NamedTuple):
    """Up, in answer to a task."""

    run: str
    task: Task
    form: Form
    memory: str  # "none": the method has none; "kept"; "new": the first visit, or it was lost
    seconds: float  # of work
    error: str | None  # why the site could not, in one sentence; then there is no payload


class HelloNote(NamedTuple):
    """Up, in answer to a hello."""

    name: str
    site: str  # 32 hexadecimal digits, made once in the site's folder
    examples: int
    form: Form  # of (parameters as a vector, statistics) of its model
    error: str | None
    key: str | None  # hexadecimal: the public key that it signs secure reports with


Note: TypeAlias = TaskNote | UploadNote | HelloNote


def write(note: Note) -> str:
    """As text that its reader will take; an error is brought to one line, and cut if it is long."""
    facts = note._asdict()
    if facts.get("error") is not None:
        facts["error"] = _one_line(facts["error"])
    try:
        text = json.dumps(facts, allow_nan=False, separators=(",", ":"))
        {TaskNote: read_task, UploadNote: read_upload, HelloNote: read_hello}[type(note)](text)
    except (Rejected, TypeError, ValueError) as error:
        raise InputError(f"a {type(note).__name__} cannot be sent: {error}") from None
    return text


def read_task(text: str) -> TaskNote:
    """What a server sent."""
    facts = _fields(text, TaskNote)
    task = _task(facts["task"])
    if type(facts["start"]) is not bool:
        raise malformed("start", "true or false", facts["start"])
    secure = facts["secure"]
    return TaskNote(
        run=tame.words("run", facts["run"], 100),
        task=task,
        start=facts["start"],
        committed=tame.whole("committed", facts["committed"], -1, task.visit),
        plan=tame.record("plan", facts["plan"], MOST_PLAN),
        seconds=_seconds(facts["seconds"]),
        form=_form(facts["form"]),
        secure=None if secure is None else tame.record("secure", secure, MOST_PLAN),
    )


def read_upload(text: str) -> UploadNote:
    """What a site sent in answer to a task."""
    facts = _fields(text, UploadNote)
    if facts["memory"] not in _MEMORIES:
        raise malformed("memory", "one of none, kept and new", facts["memory"])
    return UploadNote(
        run=tame.words("run", facts["run"], 100),
        task=_task(facts["task"]),
        form=_form(facts["form"]),
        memory=facts["memory"],
        seconds=_seconds(facts["seconds"]),
        error=_error(facts["error"]),
    )


def read_hello(text: str) -> HelloNote:
    """What a site sent in answer to a hello."""
    facts = _fields(text, HelloNote)
    key = facts["key"]
    return HelloNote(
        name=tame.words("name", facts["name"], 100),
        site=_hexadecimal("site", facts["site"], 32, 32),
        examples=tame.whole("examples", facts["examples"], 0, _MOST_COUNT),
        form=_form(facts["form"]),
        error=_error(facts["error"]),
        key=None if key is None else _hexadecimal("key", key, 2, 1024),
    )


def write_greeting(refused: str | None) -> str:
    """What a hello says: nothing, or why the last one led nowhere."""
    return "" if refused is None else json.dumps({"refused": _one_line(refused)})


def read_greeting(text: str) -> str | None:
    """Why a server turned this site away, if it did."""
    if not text:
        return None
    facts = tame.read(text, MOST_TEXT)
    if type(facts) is not dict or set(facts) != {"refused"}:
        raise malformed("content", "a refusal", facts)
    return tame.words("refused", facts["refused"], MOST_ERROR)


def _fields(text: str, kind: type[Note]) -> dict[str, Any]:
    """The facts of a note by name: all of them, and no others."""
    facts = tame.read(text, MOST_TEXT)
    if type(facts) is not dict:
        raise malformed("note", "an object", facts)
    for name in kind._fields:
        if name not in facts:
            raise Rejected(Reason.MALFORMED, f"the note has no field {name}.")
    for name in facts:
        if name not in kind._fields:
            raise malformed("name of each field", "a known one", name)
    return facts


def _task(value: Any) -> Task:
    if type(value) is not list or len(value) != 3:
        raise malformed("task", "a list of three numbers", value)
    client, version, visit = value
    return Task(
        tame.whole("client", client, 0, _MOST_CLIENTS),
        tame.whole("version", version, 0, _MOST_COUNT),
        tame.whole("visit", visit, 0, _MOST_COUNT),
    )


def _form(value: Any) -> Form:
    if type(value) is not list:
        raise malformed("form", "a list", value)
    return tuple(_leaf(one) for one in value)


def _leaf(value: Any) -> tuple[str, tuple[int, ...]]:
    if type(value) is not list or len(value) != 2:
        raise malformed("form of a tensor", "a list of dtype and shape", value)
    name, shape = value
    if type(name) is not str or name not in DTYPES:
        raise malformed("dtype", "a known one", name)
    if type(shape) is not list or len(shape) > _MOST_SIDES:
        raise malformed("shape", f"a list of at most {_MOST_SIDES} numbers", shape)
    size = DTYPES[name].itemsize
    for side in shape:
        # an empty side is left out: torch takes the product of the others all the same
        size *= max(1, tame.whole("side of a shape", side, 0, _MOST_COUNT))
    if size >= _MOST_COUNT:
        raise Rejected(Reason.MALFORMED, "the note has a shape that no memory could hold.")
    return name, tuple(shape)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST_SECONDS:
        raise malformed("seconds", f"a number between 0 and {_MOST_SECONDS:g}", value)
    return float(value)


def _error(value: Any) -> str | None:
    return None if value is None else tame.words("error", value, MOST_ERROR)


def _hexadecimal(what: str, value: Any, least: int, most: int) -> str:
    if type(value) is not str or not least <= len(value) <= most or len(value) % 2:
        raise malformed(what, "hexadecimal digits of the right number", value)
    if not set(value) <= set(string.hexdigits.lower()):
        raise malformed(what, "lower-case hexadecimal digits", value)
    return value


def _one_line(error: str) -> str:
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(error.split()))
    return (plain if len(plain) <= MOST_ERROR else f"{plain[: MOST_ERROR - 3]}...") or "it gave no reason."
