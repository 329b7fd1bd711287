"""A note and its payload as the content of a Flower message, and back; shared by both ends."""

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

NOTE, PAYLOAD = "offbeat", "offbeat.payload"  # two records of one message cannot have the same name
_STYPE = "offbeat.bytes"


class RecordError(Exception):
    """A message's content is not what this project sends; the text is a sentence."""


def wrap(note: str, payload: bytes) -> Any:
    """The content of a message."""
    records: dict[str, Any] = {NOTE: ConfigRecord({"note": note})}
    if payload:
        # never as an array of NumPy's: reading one back would parse what a stranger sent
        array = Array(dtype="uint8", shape=(len(payload),), stype=_STYPE, data=bytes(payload))
        records[PAYLOAD] = ArrayRecord({"payload": array})
    return RecordDict(records)


def unwrap(content: Any, most: int | None = None) -> tuple[str, bytes]:
    """The note and the payload; nothing but them may be there."""
    if not set(content) <= {NOTE, PAYLOAD}:
        raise RecordError("the message holds records that offbeat does not send.")
    config, arrays = content.get(NOTE), content.get(PAYLOAD)
    if not isinstance(config, ConfigRecord) or set(config) != {"note"} or type(config["note"]) is not str:
        raise RecordError("the message has no note.")
    if arrays is None:
        return config["note"], b""
    if not isinstance(arrays, ArrayRecord) or set(arrays) != {"payload"}:
        raise RecordError("the message has something else in the place of its payload.")
    array = arrays["payload"]
    if array.stype != _STYPE or array.dtype != "uint8" or array.shape != (len(array.data),):
        raise RecordError("the payload of the message is not plain bytes.")
    if most is not None and len(array.data) > most:
        raise RecordError(f"the payload of the message has {len(array.data)} bytes, and {most} are allowed.")
    return config["note"], array.data
