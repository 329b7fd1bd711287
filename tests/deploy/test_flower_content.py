"""Header, payload and signature survive Flower, and content that is not offbeat's is refused."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower imports
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    from offbeat.deploy.flower.content import Content, ContentError, MessageDownload, from_records, to_records

CONFIG, ARRAYS = "offbeat", "offbeat.payload"


def through_flower(content: RecordDict) -> Any:
    """As it comes out at the other end of a network."""
    pieces = {name: each.deflate() for name, each in get_all_nested_objects(content).items()}
    return inflate_object_from_contents(content.object_id, pieces)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 50_000])
@pytest.mark.parametrize("signature", [b"", b"\x00\xff"])
def test_content_survives_flower(payload: bytes, signature: bytes) -> None:
    content = Content("a header ä", payload, signature)
    assert from_records(through_flower(to_records(content))) == content


HEADER = {CONFIG: ConfigRecord({"header": "x"})}
BYTES = Array(dtype="uint8", shape=(2,), stype="offbeat.bytes", data=b"ab")


@pytest.mark.parametrize(
    "records",
    [
        {},
        {ARRAYS: ArrayRecord({"payload": BYTES})},
        {CONFIG: MetricRecord({"header": 1})},
        {CONFIG: ConfigRecord({"header": 1})},
        {CONFIG: ConfigRecord({"signature": b"0"})},
        {CONFIG: ConfigRecord({"header": "x", "more": "y"})},
        {CONFIG: ConfigRecord({"header": "x", "signature": 1})},
        {CONFIG: ConfigRecord({"header": "x", "signature": "text"})},
        {CONFIG: ConfigRecord({"header": "x", "payload": "text"})},
        {
            CONFIG: ConfigRecord({"header": "x", "payload": b"ab"}),
            ARRAYS: ArrayRecord({"payload": BYTES}),
        },
        HEADER | {"other": ConfigRecord({})},
        HEADER | {ARRAYS: ConfigRecord({})},
        HEADER | {ARRAYS: ArrayRecord({})},
        HEADER | {ARRAYS: ArrayRecord({"payload": BYTES, "more": BYTES})},
        HEADER | {ARRAYS: ArrayRecord({"payload": Array("uint8", (3,), "offbeat.bytes", b"ab")})},
        HEADER | {ARRAYS: ArrayRecord({"payload": Array("int8", (2,), "offbeat.bytes", b"ab")})},
        HEADER | {ARRAYS: ArrayRecord({"payload": Array("uint8", (2,), "numpy.ndarray", b"ab")})},
    ],
)
def test_content_that_is_not_ours_is_refused(records: dict[str, Any]) -> None:
    with pytest.raises(ContentError):
        from_records(RecordDict(records))


def test_a_payload_above_the_limit_is_refused() -> None:
    assert from_records(to_records(Content("x", b"abc")), 3).payload == b"abc"
    with pytest.raises(ContentError, match="3 bytes; 2 are"):
        from_records(to_records(Content("x", b"abc")), 2)


def test_a_message_of_too_many_objects_is_not_fetched() -> None:
    MessageDownload("a", ["an object"] * 65, 2**20)
    with pytest.raises(ContentError, match="has 66 objects"):
        MessageDownload("a", ["an object"] * 66, 2**20)


def test_objects_that_are_too_large_together_are_not_kept() -> None:
    asked: list[str] = []

    def pull(object_id: str) -> bytes:
        asked.append(object_id)
        return bytes(200_000)

    with ThreadPoolExecutor(1) as pool, pytest.raises(ContentError, match="more than 1000 bytes"):
        MessageDownload("a", [str(number) for number in range(60)], 1000).fetch(pull, pool)
    assert len(asked) < 10
