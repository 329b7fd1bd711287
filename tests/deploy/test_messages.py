import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from offbeat.core import Task
from offbeat.deploy.protocol.messages import (
    DTYPES,
    MAX_ERROR_CHARS,
    MAX_MESSAGE_CHARS,
    MAX_PLAN_CHARS,
    HelloReply,
    RecallMessage,
    TaskMessage,
    UploadMessage,
    decode_greeting,
    decode_message,
    encode_greeting,
    encode_message,
)
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.errors import InputError

COUNTS = st.integers(0, 2**48 - 1)
FORMS = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 1000), max_size=3).map(tuple)),
    max_size=4,
).map(tuple)
LINES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=50)
SECONDS = st.floats(0, 1e9)
HEXADECIMAL = st.binary(min_size=16, max_size=16).map(bytes.hex)
PLANS = st.dictionaries(
    LINES,
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e300, 1e300) | LINES,
    max_size=5,
)
TASKS = st.builds(Task, st.integers(0, 2**31 - 1), COUNTS, COUNTS)
STEPS = st.none() | st.integers(1, 2**31 - 1)
KINDS = (TaskMessage, UploadMessage, RecallMessage, HelloReply)
NOTES = (
    st.builds(
        TaskMessage,
        LINES,
        TASKS,
        st.booleans(),
        st.just(-1),
        PLANS,
        SECONDS,
        FORMS,
        st.none() | PLANS,
        st.none() | SECONDS,
    )
    | st.builds(RecallMessage, LINES, TASKS)
    | st.builds(
        UploadMessage,
        LINES,
        TASKS,
        FORMS,
        st.sampled_from(["none", "kept", "new"]),
        SECONDS,
        st.none() | LINES,
        STEPS,
    )
    | st.builds(HelloReply, LINES, HEXADECIMAL, COUNTS, FORMS, st.none() | LINES, st.none() | HEXADECIMAL)
)
FORM = (("float32", (3, 4)), ("int64", ()))
GOOD = {
    TaskMessage: TaskMessage("r", Task(1, 2, 3), False, 2, {"seed": 0}, 60.0, FORM, {"length": 5}, 50.0),
    UploadMessage: UploadMessage("r", Task(1, 2, 3), FORM, "kept", 0.5, None, 2),
    RecallMessage: RecallMessage("r", Task(1, 2, 3)),
    HelloReply: HelloReply("hospital-a", "0123456789abcdef" * 2, 10, FORM, None, "00ff"),
}
DEEP: Any = 0
for _ in range(9):
    DEEP = [DEEP]

NOT_WHOLE = [True, 1.0, -2, 2**48, "1", None, [1]]
NOT_WORDS = ["", "a" * 101, "a\nb", "\ud800", "\u202e", 5, None, ["a"]]
NOT_FORM = [
    {},
    None,
    [["float32"]],
    [["float32", [1], 2]],
    [["float33", [1]]],
    [[["float32"], [1]]],
    [["float32", 3]],
    [["float32", {}]],
    [["float32", [-1]]],
    [["float32", [1.0]]],
    [["float32", [True]]],
    [["float32", [2**62]]],
    [["float32", [2**24, 2**24]]],
    [["float32", [0, 2**40, 2**40]]],
    [["float32", [1] * 17]],
]
NOT_TASK = [
    [1, 2],
    [1, 2, 3, 4],
    {"client": 1, "version": 2, "visit": 3},
    [2**31, 2, 3],
    *([1, odd, 3] for odd in NOT_WHOLE),
    *([1, 2, odd] for odd in NOT_WHOLE),
    *([odd, 2, 3] for odd in NOT_WHOLE),
]
NOT_RECORD = [[], None, "x", {"a": "b" * MAX_PLAN_CHARS}, {"a": DEEP}, {"a": 2**63}, {"\ud800": 1}]
ODD: dict[type, dict[str, list[Any]]] = {
    TaskMessage: {
        "run": NOT_WORDS,
        "task": NOT_TASK,
        "start": [0, 1, "true", None],
        "committed": [True, 1.0, -2, 3, "1", None],
        "plan": NOT_RECORD,
        "seconds": [True, -1, 1e10, "1", None, [1.0]],
        "form": NOT_FORM,
        "secure": [odd for odd in NOT_RECORD if odd is not None],
        "work": [True, -1, 1e10, "1", [1.0]],
    },
    RecallMessage: {"run": NOT_WORDS, "task": NOT_TASK},
    UploadMessage: {
        "run": NOT_WORDS,
        "task": NOT_TASK,
        "form": NOT_FORM,
        "memory": ["", "KEPT", None, 1, ["kept"], {}],
        "seconds": [True, -0.5, 1e10, "1", None],
        "error": ["", "a" * (MAX_ERROR_CHARS + 1), "a\r\nb", "\udfff", 5, False],
        "steps": [True, 1.0, 0, -1, 2**31, "1", [1]],
    },
    HelloReply: {
        "name": NOT_WORDS,
        "site": ["", "0" * 31, "0" * 33, "0" * 34, "g" * 32, "A" * 32, "\u0660" * 32, 5, None],
        "examples": NOT_WHOLE,
        "form": NOT_FORM,
        "error": ["", "a\n"],
        "key": ["", "0", "xy", "0" * 1026, 5, []],
    },
}
CASES = [
    pytest.param(kind, name, odd, id=f"{kind.__name__}-{name}-{number}")
    for kind, fields in ODD.items()
    for name, values in fields.items()
    for number, odd in enumerate(values)
]
EVERY = pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)


def facts(kind: type) -> dict[str, Any]:
    return json.loads(encode_message(GOOD[kind]))


def reject(kind: type, text: Any) -> str:
    with pytest.raises(Rejected) as rejected:
        decode_message(text, kind)
    assert rejected.value.reason is Reason.MALFORMED
    sentence = rejected.value.sentence
    assert sentence == str(rejected.value)
    assert sentence.isascii()
    assert sentence.isprintable()
    assert len(sentence) <= 200
    return sentence


@given(NOTES)
def test_a_note_that_is_written_can_be_read(note: Any) -> None:
    text = encode_message(note)
    back = decode_message(text, type(note))
    assert back == note
    assert encode_message(back) == text
    assert text.isascii()


@EVERY
def test_a_note_has_all_its_fields_and_no_others(kind: type) -> None:
    for name in kind.__struct_fields__:  # type: ignore[attr-defined]
        rest = {key: value for key, value in facts(kind).items() if key != name}
        if name in ("work", "steps"):  # of a task that ends early
            assert getattr(decode_message(json.dumps(rest), kind), name) is None
        else:
            assert name in reject(kind, json.dumps(rest))
    assert "`more`" in reject(kind, json.dumps(facts(kind) | {"more": 1}))


@pytest.mark.parametrize(("kind", "name", "odd"), CASES)
def test_an_odd_value_is_rejected(kind: type, name: str, odd: Any) -> None:
    reject(kind, json.dumps(facts(kind) | {name: odd}))


@EVERY
@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, "0x1", "01"]
)
def test_numbers_that_are_not_finite_and_of_64_bits_are_rejected(kind: type, number: str) -> None:
    for name in kind.__struct_fields__:  # type: ignore[attr-defined]
        text = json.dumps(facts(kind) | {name: 123454321}).replace("123454321", number)
        assert number in text
        reject(kind, text)


@pytest.mark.parametrize("number", ["NaN", "1e999", "9" * 19, "-" + "9" * 19])
def test_numbers_of_a_plan_are_finite_and_of_64_bits_too(number: str) -> None:
    text = json.dumps(facts(TaskMessage) | {"plan": {"a": [54321]}}).replace("54321", number)
    assert number in text
    reject(TaskMessage, text)


@EVERY
def test_a_key_that_is_there_twice_is_rejected(kind: type) -> None:
    for name, value in facts(kind).items():
        text = f"{encode_message(GOOD[kind])[:-1]},{json.dumps(name)}:{json.dumps(value)}}}"
        assert json.loads(text) == facts(kind)
        assert "twice" in reject(kind, text)


@EVERY
@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "5",
        '"a"',
        "[]",
        "{}",
        "{",
        "[" * MAX_MESSAGE_CHARS,
        '{"a":' * 13000,
        "[" * 500 + "]" * 500,
        "nul\0l",
        "\ufeff{}",
        "\ud800",
        "é",
        b"{}",
        None,
        5,
    ],
    ids=lambda text: ascii(text)[:8],
)
def test_text_that_is_no_note_is_rejected(kind: type, text: Any) -> None:
    reject(kind, text)


@EVERY
def test_a_long_note_is_rejected_before_it_is_read(kind: type) -> None:
    good = encode_message(GOOD[kind])
    decode_message(good + " " * (MAX_MESSAGE_CHARS - len(good)), kind)
    assert str(MAX_MESSAGE_CHARS) in reject(kind, good + " " * (MAX_MESSAGE_CHARS + 1 - len(good)))


@EVERY
def test_text_outside_ascii_is_rejected_though_it_would_be_json(kind: type) -> None:
    name = kind.__struct_fields__[0]  # type: ignore[attr-defined]
    spelt = json.dumps(facts(kind) | {name: "é"})
    decode_message(spelt, kind)
    reject(kind, json.dumps(facts(kind) | {name: "é"}, ensure_ascii=False))


def test_an_error_is_sent_on_one_line_and_cut() -> None:
    note = GOOD[UploadMessage]
    assert isinstance(note, UploadMessage)
    told = decode_message(
        encode_message(structs.replace(note, error="it\nbroke \x1b[31m\ud800")), UploadMessage
    )
    assert told.error == r"it broke \x1b[31m\ud800"
    assert (
        len(
            decode_message(encode_message(structs.replace(note, error="x" * 9999)), UploadMessage).error or ""
        )
        == MAX_ERROR_CHARS
    )
    assert (
        decode_message(encode_message(structs.replace(note, error=" \n")), UploadMessage).error
        == "it gave no reason."
    )


@pytest.mark.parametrize(
    "bad",
    [
        structs.replace(GOOD[TaskMessage], seconds=float("nan")),
        structs.replace(GOOD[TaskMessage], plan={"a": float("inf")}),
        structs.replace(GOOD[TaskMessage], plan={"a": {1, 2}}),
        structs.replace(GOOD[TaskMessage], plan={"a": "b" * MAX_PLAN_CHARS}),
        structs.replace(GOOD[UploadMessage], form=(("float32", (1, 2, 3)),) * 4000),
        structs.replace(GOOD[HelloReply], site="x"),
    ],
    ids=["nan", "infinity", "set", "long plan", "many tensors", "site"],
)
def test_a_note_that_its_reader_would_reject_is_not_sent(bad: Any) -> None:
    with pytest.raises(InputError, match="cannot be sent"):
        encode_message(bad)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_json_does_anything_but_be_read_or_rejected(value: Any) -> None:
    for kind in KINDS:
        for name in kind.__struct_fields__:
            text = json.dumps(facts(kind) | {name: value})
            try:
                note = decode_message(text, kind)
            except Rejected as rejected:
                assert rejected.reason is Reason.MALFORMED  # noqa: PT017
                assert len(rejected.sentence) <= 200  # noqa: PT017
            else:
                assert decode_message(encode_message(note), kind) == note


def test_a_hello_may_carry_why_the_last_one_led_nowhere() -> None:
    assert encode_greeting(None) == ""
    assert decode_greeting("") is None
    assert (
        decode_greeting(encode_greeting("there is\nno place \x1b for \xe9."))
        == "there is no place \\x1b for \xe9."
    )
    assert len(decode_greeting(encode_greeting("x" * 9999)) or "") == 500


@pytest.mark.parametrize(
    "text", ["x", "[]", "{}", '{"refused": 3}', '{"refused": ""}', '{"refused": "a", "b": 1}']
)
def test_a_greeting_that_is_something_else_is_rejected(text: str) -> None:
    with pytest.raises(Rejected):
        decode_greeting(text)
