"""Malformed uploads by the thousand against all that stands between the network and the server's state.

Each is made from one good upload by a change that is certainly bad: it breaks the note, or what the note
claims, or the length or the numbers of the payload. A change that leaves a valid upload is not one of
them: another finite number in the payload is another upload, and a note may say other seconds of work.
Random changes of a note that come out so are told by Python's own reader of JSON, and not counted.
"""

import json
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import AdaMasFL, trees
from offbeat.algorithms.adamasfl import Upload
from offbeat.core import Task
from offbeat.deploy.protocol.messages import UploadMessage, encode_message, pack, specs_of
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.server.validation import plain_validator, validate_upload

RUN, TASK, SIZE = "0f3a", Task(client=2, version=7, visit=3), 40
STATISTICS = {"mean": torch.zeros(6), "batches": torch.tensor(0), "seen": torch.tensor([False, True])}
INTAKE = plain_validator(AdaMasFL(0.05, 0.1, 0.5), torch.zeros(SIZE), STATISTICS)
DESCENT = torch.full((SIZE,), 0.9 * SIZE**-0.5)
SHIFT = torch.linspace(-3, 3, SIZE)
LEAVES = trees.leaves((Upload(DESCENT, SHIFT), STATISTICS))
FORM = specs_of(LEAVES)
NOTE, PAYLOAD = encode_message(UploadMessage(RUN, TASK, FORM, "kept", 1.25, None)), pack(LEAVES)
FACTS: dict[str, Any] = json.loads(NOTE)
LIMIT = 4 * len(PAYLOAD)
ROOM = 2**29  # bytes of address space that all of it may take; what is claimed is more
CLAIM = 2**31
ODD = [
    None,
    True,
    False,
    -1,
    1.5,
    2**31,
    2**48,
    2**62,
    10**30,
    "",
    "x",
    "\ud800",
    "\0",
    [],
    [[]],
    {},
    {"a": 1},
]


class Bad(NamedTuple):
    note: str
    payload: bytes
    reasons: frozenset[Reason]


MALFORMED = frozenset({Reason.MALFORMED})
OF_A_NOTE = frozenset({Reason.MALFORMED, Reason.RUN, Reason.TASK, Reason.VERSION, Reason.FORM, Reason.FAILED})


def told(**changed: Any) -> str:
    return json.dumps(FACTS | changed)


def harmless(text: str) -> bool:
    """Whether a note still claims what the good one does."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return False
    free = {"seconds": 0, "memory": 0}
    return isinstance(facts, dict) and facts | free == FACTS | free


def note_cut(rng: random.Random) -> Bad:
    return Bad(NOTE[: rng.randrange(len(NOTE))], PAYLOAD, MALFORMED)


def note_mutated(rng: random.Random) -> Bad | None:
    characters = list(NOTE)
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        place = rng.randrange(len(characters))
        new = chr(rng.choice([rng.randrange(128), rng.randrange(128), rng.randrange(0x110000)]))
        match rng.randrange(4):
            case 0:
                characters[place] = new
            case 1:
                characters.insert(place, new)
            case 2:
                del characters[place]
            case _:
                other = rng.randrange(len(characters))
                characters[place], characters[other] = characters[other], characters[place]
    text = "".join(characters)
    return None if harmless(text) else Bad(text, PAYLOAD, OF_A_NOTE)


def note_spliced(rng: random.Random) -> Bad | None:
    first, last = sorted(rng.choices(range(len(NOTE)), k=2))
    text = NOTE[:first] + NOTE[last:] if rng.random() < 0.5 else NOTE[:last] + NOTE[first:]
    return None if harmless(text) else Bad(text, PAYLOAD, OF_A_NOTE)


def note_random(rng: random.Random) -> Bad:
    alphabet = rng.choice(['{}[]":,\\0123456789eE+-. nulltruefalse', "".join(map(chr, range(256))), "[{"])
    return Bad("".join(rng.choices(alphabet, k=rng.randrange(200))), PAYLOAD, MALFORMED)


def note_huge(rng: random.Random) -> Bad:
    size = 2 ** rng.randrange(10, 18)
    text = rng.choice(
        [
            "[" * size,
            '{"a":' * (size // 5),
            NOTE + " " * 2**16,
            told(run="1" * size),
            f'{NOTE[:-1]},"seconds":{"1" * size}}}',
            told(form=[["float32", [1] * (size // 2)]]),
        ]
    )
    return Bad(text, PAYLOAD, OF_A_NOTE)


def field_gone_or_new(rng: random.Random) -> Bad:
    name = rng.choice(list(FACTS))
    facts = {key: value for key, value in FACTS.items() if key != name}
    if rng.random() < 0.5:
        facts = FACTS | {rng.choice([name.upper(), f"{name} ", f"{name}\0", "__class__"]): FACTS[name]}
    return Bad(json.dumps(facts), PAYLOAD, MALFORMED)


def field_twice(rng: random.Random) -> Bad:
    name, value = rng.choice(list(FACTS.items()))
    return Bad(f"{{{json.dumps(name)}:{json.dumps(rng.choice([value, *ODD]))},{NOTE[1:]}", PAYLOAD, MALFORMED)


def field_odd(rng: random.Random) -> Bad | None:
    name, value = rng.choice(list(FACTS)), rng.choice(ODD)
    valid = [("seconds", 1.5), ("error", None)]
    return None if (name, value) in valid else Bad(told(**{name: value}), PAYLOAD, OF_A_NOTE)


def number_strange(rng: random.Random) -> Bad:
    """Numbers that JSON does not have, or that are another type's."""
    strange = ["NaN", "Infinity", "-Infinity", "1e999", "2.0", "2e0", "02", "0x2", "true", "+2", "2" * 400]
    return Bad(NOTE.replace("[2,7,3]", f"[{rng.choice(strange)},7,3]"), PAYLOAD, MALFORMED)


def other_run(rng: random.Random) -> Bad:
    return Bad(told(run=f"{rng.getrandbits(64):x}x"), PAYLOAD, frozenset({Reason.RUN}))


def other_task(rng: random.Random) -> Bad:
    task = list(TASK)
    place = rng.randrange(3)
    task[place] += rng.choice([-2, -1, 1, 2, 1000])
    reasons = {Reason.TASK, Reason.VERSION, Reason.MALFORMED}  # malformed where it is below 0
    return Bad(told(task=task), PAYLOAD, frozenset(reasons))


def other_form(rng: random.Random) -> Bad:
    """Forms of as many bytes, forms of other lengths, and claims that no machine could hold."""
    form: list[Any] = json.loads(json.dumps(FORM))
    place = rng.randrange(len(form))
    name, shape = form[place]
    huge = rng.choice([CLAIM, 2**40, 2**47, 2**62])
    form[place] = rng.choice(
        [
            ["float64" if name == "int64" else "int64", shape],
            ["complex64", shape],
            [name, [1, *shape]],
            [name, [huge]],
            [name, [huge, huge]],
            [name, [0, huge, huge]],
            [name, [huge] * 16],
            [name, [-1, *shape]],
            [huge, shape],
        ]
    )
    if rng.random() < 0.2:
        form = rng.choice([form[1:], form * 2, form * 200, [], [[form]]])
    return Bad(told(form=form), PAYLOAD, frozenset({Reason.FORM, Reason.MALFORMED}))


def failed(rng: random.Random) -> Bad:
    return Bad(told(error=rng.choice(["it broke.", "a" * 500])), PAYLOAD, frozenset({Reason.FAILED}))


def payload_resized(rng: random.Random) -> Bad:
    place = rng.randrange(len(PAYLOAD))
    payload = rng.choice(
        [
            PAYLOAD[:place],
            PAYLOAD[place + 1 :],
            PAYLOAD[:place] + rng.randbytes(rng.randrange(1, 9)) + PAYLOAD[place:],
            PAYLOAD * rng.randrange(2, 9),
            b"",
            bytes(rng.randrange(LIMIT + 1, 2**20)),
        ]
    )
    return Bad(NOTE, payload, frozenset({Reason.SIZE}))


def payload_not_finite(rng: random.Random) -> Bad:
    """The float32 of the payload are its first 80 numbers; any mantissa under a full exponent will do."""
    number = rng.choice([0x7F800000, 0xFF800000]) | rng.choice([0, 1, rng.getrandbits(23)])
    place = 4 * rng.randrange(2 * SIZE)
    payload = PAYLOAD[:place] + number.to_bytes(4, "little") + PAYLOAD[place + 4 :]
    return Bad(NOTE, payload, frozenset({Reason.INFINITE}))


def payload_too_long_a_step(rng: random.Random) -> Bad:
    factor = rng.choice([1.12, 2.0, 1e3, 1e30, 1e38])
    leaves = [factor * DESCENT, *LEAVES[1:]]
    return Bad(NOTE, pack(leaves), frozenset({Reason.NORM}))


def payload_no_truth(rng: random.Random) -> Bad:
    place = len(PAYLOAD) - rng.randrange(1, 3)  # the truth values are the last
    payload = PAYLOAD[:place] + bytes([rng.randrange(2, 256)]) + PAYLOAD[place + 1 :]
    return Bad(NOTE, payload, MALFORMED)


WAYS: dict[Callable[[random.Random], Bad | None], int] = {
    note_cut: 700,
    note_mutated: 4000,
    note_spliced: 700,
    note_random: 700,
    note_huge: 150,
    field_gone_or_new: 300,
    field_twice: 500,
    field_odd: 600,
    number_strange: 200,
    other_run: 300,
    other_task: 500,
    other_form: 1000,
    failed: 100,
    payload_resized: 1200,
    payload_not_finite: 1000,
    payload_too_long_a_step: 300,
    payload_no_truth: 300,
}


def attempt(bad: Bad) -> Reason:
    """The reason why it was rejected; anything but a rejection fails the test."""
    try:
        validate_upload(bad.note, bad.payload, TASK, RUN, INTAKE, LIMIT)
    except Rejected as rejected:
        assert rejected.sentence.isprintable()  # noqa: PT017
        assert len(rejected.sentence) <= (500 if rejected.reason is Reason.FAILED else 200)  # noqa: PT017
        return rejected.reason
    raise AssertionError(f"accepted: {bad.note[:500]!a}, {bad.payload!r}")


@pytest.fixture
def little_room() -> Iterator[None]:
    """No memory for what uploads claim to be, so that to allocate it fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def accept() -> None:
    _, leaves = validate_upload(NOTE, PAYLOAD, TASK, RUN, INTAKE, LIMIT)
    assert all(torch.equal(one, other) for one, other in zip(leaves, LEAVES, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("little_room")
def test_ten_thousand_malformed_uploads_are_rejected_and_nothing_of_a_claimed_size_is_allocated() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        torch.empty(CLAIM, dtype=torch.uint8)  # the measure works
    accept()
    seen: Counter[Reason] = Counter()
    for number, (way, count) in enumerate(WAYS.items()):
        rng = random.Random(number)
        made = [bad for _ in range(count) if (bad := way(rng)) is not None]
        assert len(made) > count // 2, way.__name__
        for bad in made:
            reason = attempt(bad)
            assert reason in bad.reasons, (way.__name__, reason, bad.note[:500])
            seen[reason] += 1
    accept()
    assert seen.total() >= 10_000
    assert seen.keys() == OF_A_NOTE | {Reason.SIZE, Reason.INFINITE, Reason.NORM}


@settings(max_examples=300)
@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")), st.binary(max_size=600))
def test_random_notes_and_payloads_are_rejected(note: str, payload: bytes) -> None:
    assert attempt(Bad(note, payload, MALFORMED)) in MALFORMED


@settings(max_examples=300)
@given(st.binary(max_size=600).filter(lambda raw: len(raw) != len(PAYLOAD)))
def test_random_payloads_of_another_length_are_rejected(payload: bytes) -> None:
    assert attempt(Bad(NOTE, payload, frozenset({Reason.SIZE}))) is Reason.SIZE


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(FACTS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    ),
)
def test_any_json_in_place_of_a_field_is_rejected_unless_the_note_is_as_good(name: str, value: Any) -> None:
    text = told(**{name: value})
    if not harmless(text):
        assert attempt(Bad(text, PAYLOAD, OF_A_NOTE)) in OF_A_NOTE
