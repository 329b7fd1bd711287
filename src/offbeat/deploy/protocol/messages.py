"""Messages between the server and its sites: JSON headers that travel beside binary payloads.

The fields of a message are the keys of its JSON object. Whoever decodes a header trusts nothing in it.
"""

import json
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import Meta, Struct, structs

from offbeat.core import Task
from offbeat.deploy.protocol.strict_json import Rejected, convert, decode_json, malformed, quote
from offbeat.deploy.protocol.wire import DTYPES, TensorSpecs
from offbeat.errors import InputError

MAX_MESSAGE_CHARS = 64 * 1024
MAX_PLAN_CHARS = 16 * 1024  # of the plan, and of the terms of secure aggregation
MAX_ERROR_CHARS = 500
_MAX_CLIENTS = 2**31
_MAX_COUNT = 2**48  # of versions, visits, examples and bytes
_MAX_DIMENSIONS = 16

_Name = Annotated[str, Meta(min_length=1, max_length=100)]
_Error = Annotated[str, Meta(min_length=1, max_length=MAX_ERROR_CHARS)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class TaskMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """Server to client: a task."""

    run: _Name
    task: Task
    start: bool  # part of the full-participation start: the site runs `warmup()` of the algorithm
    committed: int  # the client's last visit whose upload is certain to be used; -1: none
    plan: dict[str, Any]
    seconds: _Seconds  # the deadline
    form: TensorSpecs  # of the payload: leaves of (message, statistics)
    secure: dict[str, Any] | None  # the terms of secure aggregation


class UploadMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """Client to server: the reply to a task."""

    run: _Name
    task: Task
    form: TensorSpecs
    memory: Literal["none", "kept", "new"]  # none: the method has none; new: the first visit, or it was lost
    seconds: _Seconds  # of local work
    error: _Error | None  # why the site failed, in one sentence; then there is no payload


class HelloReply(Struct, frozen=True, forbid_unknown_fields=True):
    """Client to server: the reply to a greeting."""

    name: _Name
    site: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]  # drawn once in the site's folder
    examples: Annotated[int, Meta(ge=0, lt=_MAX_COUNT)]
    form: TensorSpecs  # of (parameters as one vector, statistics) of its model
    error: _Error | None
    key: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{2}){1,512}\Z")] | None  # verifies its secure reports


class _Greeting(Struct, frozen=True, forbid_unknown_fields=True):
    refused: _Error


AnyMessage: TypeAlias = TaskMessage | UploadMessage | HelloReply
_Kind = TypeVar("_Kind", bound=Struct)


def encode_message(message: AnyMessage) -> str:
    """A header that its decoder accepts; an error is put on one line and shortened."""
    fields = structs.asdict(message)
    if fields.get("error") is not None:
        fields["error"] = _one_line(fields["error"])
    try:
        text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
        {TaskMessage: decode_task, UploadMessage: decode_upload, HelloReply: decode_hello}[type(message)](
            text
        )
    except (Rejected, TypeError, ValueError) as error:
        raise InputError(f"a {type(message).__name__} cannot be sent: {error}") from None
    return text


def decode_task(text: str) -> TaskMessage:
    """What a server sent."""
    message = _decode(text, TaskMessage)
    if not -1 <= message.committed < message.task.visit:
        raise malformed(f"the message's committed visit, {quote(message.committed)}, is out of range.")
    return message


def decode_upload(text: str) -> UploadMessage:
    """What a site sent in reply to a task."""
    return _decode(text, UploadMessage)


def decode_hello(text: str) -> HelloReply:
    """What a site sent in reply to a greeting."""
    return _decode(text, HelloReply)


def encode_greeting(refused: str | None) -> str:
    """The header of a greeting: empty, or why the site was refused last."""
    return "" if refused is None else json.dumps({"refused": _one_line(refused)})


def decode_greeting(text: str) -> str | None:
    """Why the server refused this site last, if it did."""
    return _decode(text, _Greeting).refused if text else None


_DECODERS = {TaskMessage: decode_task, UploadMessage: decode_upload, HelloReply: decode_hello}


def _decode(text: str, kind: type[_Kind]) -> _Kind:
    message = convert(decode_json(text, MAX_MESSAGE_CHARS), kind)
    for name, value in structs.asdict(message).items():
        if isinstance(value, str) and not value.isprintable():
            raise malformed(f"the message's {name} must be printable text, not {quote(value)}.")
        if isinstance(value, dict) and len(json.dumps(value, separators=(",", ":"))) > MAX_PLAN_CHARS:
            raise malformed(f"the message's {name} has more than {MAX_PLAN_CHARS} characters.")
        if isinstance(value, Task):
            _check_task(value)
        elif name == "form":
            for dtype, shape in value:
                _check_spec(dtype, shape)
    return message


def _check_task(task: Task) -> None:
    client, version, visit = task
    if not (0 <= client < _MAX_CLIENTS and 0 <= version < _MAX_COUNT and 0 <= visit < _MAX_COUNT):
        raise malformed("the message's task has a number that is out of range.")


def _check_spec(dtype: str, shape: tuple[int, ...]) -> None:
    if dtype not in DTYPES:
        raise malformed(f"the message has the unknown dtype {quote(dtype)}.")
    if len(shape) > _MAX_DIMENSIONS or any(not 0 <= size < _MAX_COUNT for size in shape):
        raise malformed("the message has a tensor shape that is out of range.")
    num_bytes = DTYPES[dtype].itemsize
    for size in shape:
        num_bytes *= max(1, size)  # torch multiplies the other dimensions of an empty tensor, too
    if num_bytes >= _MAX_COUNT:
        raise malformed("the message has a tensor shape that no memory could hold.")


def _one_line(error: str) -> str:
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(error.split()))
    short = plain if len(plain) <= MAX_ERROR_CHARS else f"{plain[: MAX_ERROR_CHARS - 3]}..."
    return short or "it gave no reason."
