"""What travels beside the bytes, as JSON text; who reads one trusts nothing of it."""

import json
import string
from typing import Any, NamedTuple, TypeAlias

from offbeat.core import Task
from offbeat.deploy.protocol import strict_json
from offbeat.deploy.protocol.strict_json import Reason, Rejected, malformed
from offbeat.deploy.protocol.wire import DTYPES, TensorSpecs
from offbeat.errors import InputError

MAX_MESSAGE_CHARS = 64 * 1024  # characters of a note
MAX_PLAN_CHARS = 16 * 1024  # of the plan in one, and of what it says of secure sums
MAX_ERROR_CHARS = 500
_MAX_CLIENTS = 2**31
_MAX_COUNT = 2**48  # of versions, visits, examples, and bytes
_MAX_SECONDS = 1e9
_MAX_DIMENSIONS = 16
_MEMORIES = ("none", "kept", "new")


class TaskMessage(NamedTuple):
    """Down, with a task."""

    run: str
    task: Task
    start: bool  # the full-participation start: the site runs `warmup()` of the algorithm
    committed: int  # the client's last visit that the server has used for good; -1: none
    plan: dict[str, Any]
    seconds: float  # the deadline
    form: TensorSpecs  # of the payload: leaves of (message, statistics)
    secure: dict[str, Any] | None


class UploadMessage(NamedTuple):
    """Up, in answer to a task."""

    run: str
    task: Task
    form: TensorSpecs
    memory: str  # "none": the method has none; "kept"; "new": the first visit, or it was lost
    seconds: float  # of work
    error: str | None  # why the site could not, in one sentence; then there is no payload


class HelloReply(NamedTuple):
    """Up, in answer to a hello."""

    name: str
    site: str  # 32 hexadecimal digits, made once in the site's folder
    examples: int
    form: TensorSpecs  # of (parameters as a vector, statistics) of its model
    error: str | None
    key: str | None  # hexadecimal: the public key that it signs secure reports with


AnyMessage: TypeAlias = TaskMessage | UploadMessage | HelloReply


def encode_message(note: AnyMessage) -> str:
    """As text that its reader will take; an error is brought to one line, and cut if it is long."""
    facts = note._asdict()
    if facts.get("error") is not None:
        facts["error"] = _one_line(facts["error"])
    try:
        text = json.dumps(facts, allow_nan=False, separators=(",", ":"))
        {TaskMessage: decode_task, UploadMessage: decode_upload, HelloReply: decode_hello}[type(note)](text)
    except (Rejected, TypeError, ValueError) as error:
        raise InputError(f"a {type(note).__name__} cannot be sent: {error}") from None
    return text


def decode_task(text: str) -> TaskMessage:
    """What a server sent."""
    facts = _fields(text, TaskMessage)
    task = _task(facts["task"])
    if type(facts["start"]) is not bool:
        raise malformed("start", "true or false", facts["start"])
    secure = facts["secure"]
    return TaskMessage(
        run=strict_json.printable_text("run", facts["run"], 100),
        task=task,
        start=facts["start"],
        committed=strict_json.integer("committed", facts["committed"], -1, task.visit),
        plan=strict_json.json_object("plan", facts["plan"], MAX_PLAN_CHARS),
        seconds=_seconds(facts["seconds"]),
        form=_tensor_specs(facts["form"]),
        secure=None if secure is None else strict_json.json_object("secure", secure, MAX_PLAN_CHARS),
    )


def decode_upload(text: str) -> UploadMessage:
    """What a site sent in answer to a task."""
    facts = _fields(text, UploadMessage)
    if facts["memory"] not in _MEMORIES:
        raise malformed("memory", "one of none, kept and new", facts["memory"])
    return UploadMessage(
        run=strict_json.printable_text("run", facts["run"], 100),
        task=_task(facts["task"]),
        form=_tensor_specs(facts["form"]),
        memory=facts["memory"],
        seconds=_seconds(facts["seconds"]),
        error=_error(facts["error"]),
    )


def decode_hello(text: str) -> HelloReply:
    """What a site sent in answer to a hello."""
    facts = _fields(text, HelloReply)
    key = facts["key"]
    return HelloReply(
        name=strict_json.printable_text("name", facts["name"], 100),
        site=_hexadecimal("site", facts["site"], 32, 32),
        examples=strict_json.integer("examples", facts["examples"], 0, _MAX_COUNT),
        form=_tensor_specs(facts["form"]),
        error=_error(facts["error"]),
        key=None if key is None else _hexadecimal("key", key, 2, 1024),
    )


def encode_greeting(refused: str | None) -> str:
    """What a hello says: nothing, or why the last one led nowhere."""
    return "" if refused is None else json.dumps({"refused": _one_line(refused)})


def decode_greeting(text: str) -> str | None:
    """Why a server turned this site away, if it did."""
    if not text:
        return None
    facts = strict_json.decode_json(text, MAX_MESSAGE_CHARS)
    if type(facts) is not dict or set(facts) != {"refused"}:
        raise malformed("content", "a refusal", facts)
    return strict_json.printable_text("refused", facts["refused"], MAX_ERROR_CHARS)


def _fields(text: str, kind: type[AnyMessage]) -> dict[str, Any]:
    """The facts of a note by name: all of them, and no others."""
    facts = strict_json.decode_json(text, MAX_MESSAGE_CHARS)
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
        strict_json.integer("client", client, 0, _MAX_CLIENTS),
        strict_json.integer("version", version, 0, _MAX_COUNT),
        strict_json.integer("visit", visit, 0, _MAX_COUNT),
    )


def _tensor_specs(value: Any) -> TensorSpecs:
    if type(value) is not list:
        raise malformed("form", "a list", value)
    return tuple(_tensor_spec(one) for one in value)


def _tensor_spec(value: Any) -> tuple[str, tuple[int, ...]]:
    if type(value) is not list or len(value) != 2:
        raise malformed("form of a tensor", "a list of dtype and shape", value)
    name, shape = value
    if type(name) is not str or name not in DTYPES:
        raise malformed("dtype", "a known one", name)
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS:
        raise malformed("shape", f"a list of at most {_MAX_DIMENSIONS} numbers", shape)
    size = DTYPES[name].itemsize
    for side in shape:
        # an empty side is left out: torch takes the product of the others all the same
        size *= max(1, strict_json.integer("side of a shape", side, 0, _MAX_COUNT))
    if size >= _MAX_COUNT:
        raise Rejected(Reason.MALFORMED, "the note has a shape that no memory could hold.")
    return name, tuple(shape)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MAX_SECONDS:
        raise malformed("seconds", f"a number between 0 and {_MAX_SECONDS:g}", value)
    return float(value)


def _error(value: Any) -> str | None:
    return None if value is None else strict_json.printable_text("error", value, MAX_ERROR_CHARS)


def _hexadecimal(what: str, value: Any, least: int, most: int) -> str:
    if type(value) is not str or not least <= len(value) <= most or len(value) % 2:
        raise malformed(what, "hexadecimal digits of the right number", value)
    if not set(value) <= set(string.hexdigits.lower()):
        raise malformed(what, "lower-case hexadecimal digits", value)
    return value


def _one_line(error: str) -> str:
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(error.split()))
    return (
        plain if len(plain) <= MAX_ERROR_CHARS else f"{plain[: MAX_ERROR_CHARS - 3]}..."
    ) or "it gave no reason."
