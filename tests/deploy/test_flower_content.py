"""Header, payload and signature survive Flower, and content that is not offbeat's is refused."""

import struct
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower imports
    from flwr.supercore.inflatable.inflatable_object import get_object_id
    from flwr.supercore.inflatable.inflatable_utils import validate_object_content

    from offbeat.deploy.flower.content import (
        Content,
        ContentError,
        ContentObjects,
        MessageDownload,
        from_objects,
        to_objects,
    )
    from offbeat.deploy.flower.private_api import object_id, wrap_object

LARGE = bytes(range(256)) * 50_000


@pytest.mark.parametrize("payload", [b"", b"x", bytes(2 * 1024 * 1024), LARGE, bytes(12 * 1024 * 1024)])
@pytest.mark.parametrize("signature", [b"", b"\x00\xff"])
def test_content_survives_flower(payload: bytes, signature: bytes) -> None:
    content = Content("a header ä", payload, signature)
    message = to_objects(content)
    for name, each in message.objects.items():
        assert name == get_object_id(each)
        validate_object_content(each)
    assert from_objects(message) == content


def test_a_message_with_a_short_payload_is_one_object() -> None:
    assert len(to_objects(Content("x", bytes(800_000), b"s")).objects) == 1


def test_two_messages_that_say_the_same_are_two_and_share_a_long_payload() -> None:
    one, other = (to_objects(Content("x", LARGE)) for _ in range(2))
    assert one.message_id != other.message_id
    assert set(one.objects) & set(other.objects) == set(one.objects) - {one.message_id}
    assert len(one.objects) == 5


def message(*bodies: bytes, names: list[str] | None = None) -> ContentObjects:
    """A message of objects that somebody made by hand; the first names the others."""
    others = {object_id(each): each for each in map(wrap_object, bodies[1:])}
    first = wrap_object(bodies[0], list(others) if names is None else names)
    return ContentObjects(object_id(first), {object_id(first): first, **others})


def fixed(header: int, signature: int) -> bytes:
    return struct.pack("<16sII", bytes(16), header, signature)


def part(number: int, data: bytes) -> bytes:
    return struct.pack("<Q", number) + data


PARTS = [fixed(1, 0) + b"x", part(0, b"ab"), part(1, b"cd")]


def test_parts_by_hand_are_as_offbeat_makes_them() -> None:
    assert from_objects(message(*PARTS)) == Content("x", b"abcd")


@pytest.mark.parametrize(
    "found",
    [
        message(b""),
        message(fixed(0, 0)[:-1]),
        message(fixed(5, 0) + b"x"),
        message(fixed(1, 9) + b"x"),
        message(fixed(2**32 - 1, 2**32 - 1) + b"x"),
        message(fixed(1, 0) + b"\xff"),
        message(PARTS[0] + b"more", *PARTS[1:]),
        message(PARTS[0], PARTS[2], PARTS[1]),
        message(PARTS[0], part(1, b"ab")),
        message(PARTS[0], b"short"),
        message(*PARTS, names=[]),
        message(*PARTS, names=["0" * 64]),
        message(*PARTS[:2], names=[object_id(wrap_object(PARTS[1]))] * 2),
        ContentObjects("a", {"a": b"no object"}),
        ContentObjects("a", {"a": b"Message  1\0a"}),
        ContentObjects("a", {"a": b"ArrayChunk  2\0a"}),
        ContentObjects("a", {"a": b"ArrayChunk  \xff\0a"}),
    ],
)
def test_content_that_is_not_ours_is_refused(found: ContentObjects) -> None:
    with pytest.raises(ContentError):
        from_objects(found)


def test_a_payload_above_the_limit_is_refused() -> None:
    assert from_objects(to_objects(Content("x", b"abc")), 3).payload == b"abc"
    with pytest.raises(ContentError, match="3 bytes; 2 are"):
        from_objects(to_objects(Content("x", b"abc")), 2)


def test_a_message_of_too_many_objects_is_not_fetched() -> None:
    asked: list[str] = []
    with ThreadPoolExecutor(1) as pool, pytest.raises(ContentError, match="has 4 objects"):
        MessageDownload("a", ["an object"] * 4, 4 * 2**20).fetch(asked.append, pool)
    assert asked == []
    with ThreadPoolExecutor(1) as pool:
        assert MessageDownload("a", ["an object"] * 3, 4 * 2**20).fetch(asked.append, pool) is None
    assert len(asked) == 3


def test_a_message_without_its_own_object_is_refused() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ContentError, match="no content"):
        MessageDownload("a", [], 1000).fetch(lambda object_id: b"", pool)


def test_objects_that_are_too_large_together_are_not_kept() -> None:
    asked: list[str] = []

    def pull(object_id: str) -> bytes:
        asked.append(object_id)
        return bytes(2**20)

    with ThreadPoolExecutor(1) as pool, pytest.raises(ContentError, match="more than 8388608 bytes"):
        MessageDownload("a", [str(number) for number in range(4)], 2**23).fetch(
            lambda object_id: pull(object_id) * 3, pool
        )
    assert len(asked) == 4
