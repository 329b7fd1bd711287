"""Messages between the server and its sites: a JSON header and a binary payload.

The fields of a message are the keys of its header. A payload is a tree of tensors as bytes, leaf after leaf,
in C order and little endian; the header has their dtypes and shapes. Whoever decodes a message trusts nothing
in it.
"""

import hashlib
import json
import math
import sys
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from msgspec import Meta, Struct, structs
from torch import Tensor

from offbeat import trees
from offbeat.core import Task
from offbeat.deploy.protocol.strict_json import Reason, Rejected, convert, decode_json, malformed, quote
from offbeat.errors import InputError
from offbeat.trees import Tree

MAX_MESSAGE_CHARS = 64 * 1024
MAX_PLAN_CHARS = 16 * 1024  # of the plan, and of the terms of secure aggregation
MAX_ERROR_CHARS = 500
_MAX_CLIENTS = 2**31
_MAX_COUNT = 2**48  # of versions, visits, examples and bytes
_MAX_DIMENSIONS = 16


TensorSpecs: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]  # such as ("float32", (3, 4)), for each leaf

DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
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
    work: _Seconds | None = None  # after which the site ends its work and sends what it has; None: never


class UploadMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """Client to server: the reply to a task."""

    run: _Name
    task: Task
    form: TensorSpecs
    memory: Literal["none", "kept", "new"]  # none: the method has none; new: the first visit, or it was lost
    seconds: _Seconds  # of local work
    error: _Error | None  # why the site failed, in one sentence; then there is no payload
    steps: Annotated[int, Meta(ge=1, lt=2**31)] | None = None  # that it did, if it ended early; None: all


class RecallMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """Server to client: end this task now, and send what there is of it."""

    run: _Name
    task: Task


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


class RunEnd(Struct, frozen=True, forbid_unknown_fields=True):
    """Server to client: the server ends."""

    finished: bool  # whether the run is over; otherwise it may be resumed
    sentence: _Error


AnyMessage: TypeAlias = TaskMessage | UploadMessage | RecallMessage | HelloReply | RunEnd
_OPTIONAL = ("work", "steps")  # are left out where they are None
_SENTENCES = ("error", "sentence")
_Kind = TypeVar("_Kind", bound=Struct)


def encode_message(message: AnyMessage) -> str:
    """A header that its decoder accepts; a sentence is put on one line and shortened."""
    fields = structs.asdict(message)
    fields = {name: each for name, each in fields.items() if each is not None or name not in _OPTIONAL}
    fields |= {name: one_line(fields[name]) for name in _SENTENCES if fields.get(name) is not None}
    try:
        text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
        decode_message(text, type(message))
    except (Rejected, TypeError, ValueError) as error:
        raise InputError(f"a {type(message).__name__} cannot be sent: {error}") from None
    return text


def encode_greeting(refused: str | None) -> str:
    """The header of a greeting: empty, or why the site was refused last."""
    return "" if refused is None else json.dumps({"refused": one_line(refused)})


def decode_greeting(text: str) -> str | None:
    """Why the server refused this site last, if it did."""
    return decode_message(text, _Greeting).refused if text else None


def decode_message(text: str, kind: type[_Kind]) -> _Kind:
    """A header of this kind that the other side sent, or `Rejected`."""
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
    if isinstance(message, TaskMessage) and not -1 <= message.committed < message.task.visit:
        raise malformed(f"the message's committed visit, {quote(message.committed)}, is out of range.")
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


def one_line(error: str) -> str:
    """An error on one line of printable text, shortened."""
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(error.split()))
    short = plain if len(plain) <= MAX_ERROR_CHARS else f"{plain[: MAX_ERROR_CHARS - 3]}..."
    return short or "it gave no reason."


def specs_of(tree: Tree) -> TensorSpecs:
    """The dtype and shape of each leaf."""
    return tuple((_dtype_name(leaf.dtype), tuple(leaf.shape)) for leaf in trees.leaves(tree))


def byte_size(specs: TensorSpecs) -> int:
    """The number of bytes of a payload with these specs."""
    return sum(DTYPES[name].itemsize * math.prod(shape) for name, shape in specs)


def pack(tree: Tree) -> bytes:
    """The bytes of the leaves, and nothing else."""
    specs_of(tree)  # raises for dtypes that cannot be sent
    return b"".join(_to_bytes(leaf.detach().cpu().contiguous()).data for leaf in trees.leaves(tree))


def message_digest(task: TaskMessage, payload: bytes) -> bytes:
    """What identifies a server's message for clients of one version: plan, kind of task, tensors."""
    head = json.dumps([task.plan, task.start, task.form], sort_keys=True)
    return hashlib.sha256(head.encode() + b"\0" + payload).digest()


def unpack(data: bytes | memoryview, specs: TensorSpecs) -> list[Tensor]:
    """The leaves, in memory of their own."""
    expected, actual = byte_size(specs), len(memoryview(data).cast("B"))
    if actual != expected:
        raise Rejected(Reason.SIZE, f"the payload has {actual} bytes, but its specs take {expected}.")
    result, start = [], 0
    for name, shape in specs:
        leaf = torch.empty(shape, dtype=DTYPES[name])
        source = np.frombuffer(data, np.uint8, leaf.nbytes, start) if leaf.nbytes else np.empty(0, np.uint8)
        if name == "bool" and leaf.nbytes and source.max() > 1:  # torch does not check the bytes of a bool
            raise malformed("the payload has a boolean that is neither 0 nor 1.")
        _raw_bytes(leaf)[:] = _swap_bytes(source, leaf.itemsize)
        result.append(leaf)
        start += leaf.nbytes
    return result


def describe_difference(actual: TensorSpecs, expected: TensorSpecs) -> str:
    """The first difference between two specs in words; empty if they are equal."""
    if actual == expected:
        return ""
    if len(actual) != len(expected):
        return f"{len(actual)} tensors, not {len(expected)}"
    number = next(n for n, (one, other) in enumerate(zip(actual, expected, strict=True)) if one != other)
    return f"tensor {number} is {_describe(*actual[number])}, not {_describe(*expected[number])}"


def is_finite(leaf: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity."""
    # A sum over either is not finite, and one pass is cheap; only a sum that overflows needs a second one.
    return bool(torch.isfinite(leaf.sum())) or bool(torch.isfinite(leaf).all())


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise InputError(f"tensors of {dtype} cannot be sent: use one of {', '.join(sorted(DTYPES))}.")
    return _NAMES[dtype]


def _describe(name: str, shape: tuple[int, ...]) -> str:
    sizes = " by ".join(str(size) for size in shape[:4]) or "one"
    return f"{sizes}{' by more' if len(shape) > 4 else ''} {name}"


def _raw_bytes(leaf: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    flat = leaf.as_strided((leaf.numel(),), (1,))  # a single number may have any stride, which view() refuses
    return flat.view(torch.uint8).numpy()


def _to_bytes(leaf: Tensor) -> np.ndarray:
    return np.ascontiguousarray(_swap_bytes(_raw_bytes(leaf), leaf.itemsize))


def _swap_bytes(raw: np.ndarray, size: int) -> np.ndarray:
    """Between the machine's byte order and little endian."""
    return raw if sys.byteorder == "little" else raw.reshape(-1, size)[:, ::-1].reshape(-1)
