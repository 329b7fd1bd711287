"""Flower's grid as a transport: real Flower messages, over a SuperLink made of dictionaries."""

import json
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from offbeat.deploy.keys import reply_statement

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower imports
    from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.proto.message_pb2 import PullObjectResponse
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_id,
        get_object_tree,
    )
    from flwr.supercore.run import RunNotRunningException
    from flwr.supercore.task_identity import TaskIdentity

    from offbeat.deploy.flower.content import Content, from_records
    from offbeat.deploy.flower.content import to_records as content_records
    from offbeat.deploy.flower.server import FlowerTransport
    from offbeat.deploy.protocol.transport import KeyedTransport, Reply, TransportClosedError, TransportError
    from offbeat.errors import InputError

NODE, OTHER = 2**63 + 11, 5
KEYS = {node: ec.generate_private_key(ec.SECP384R1()) for node in (NODE, OTHER)}


def to_records(header: str, payload: bytes) -> RecordDict:
    """Content without a signature."""
    return content_records(Content(header, payload))


def pem(node: int) -> bytes:
    return KEYS[node].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def sign(node: int, statement: bytes) -> bytes:
    """As a site does it: both numbers of the signature, 48 bytes each."""
    numbers = decode_dss_signature(KEYS[node].sign(statement, ec.ECDSA(hashes.SHA384())))
    return b"".join(number.to_bytes(48, "big") for number in numbers)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that Flower started for a ServerApp."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Link:
    """What a SuperLink knows: messages to nodes, and answers, as a tree of pieces each."""

    def __init__(self) -> None:
        self.run = SimpleNamespace(run_id=7)
        self.node = None
        self._retry_invoker = SimpleNamespace(max_time=None)
        self._runtime_client = self
        self.sent: dict[str, Message] = {}
        self.answers: dict[str, Any] = {}
        self.pieces: dict[str, bytes] = {}
        self.confirmed: list[str] = []
        self.signs = True
        self.fails: Callable[[str], None] = lambda call: None

    def get_nodes(self) -> list[NodeInfo]:
        self.fails("nodes")
        return [NodeInfo(node_id=node, public_key=pem(node)) for node in KEYS]

    def push_messages(self, messages: list[Message]) -> list[str]:
        self.fails("push")
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            self.sent[message.object_id] = message
        return [message.object_id for message in messages]

    def PullMessages(self, request: Any) -> Any:  # noqa: N802 - Flower's own name
        self.fails("pull")
        found = [self.answers.pop(number) for number in request.message_ids if number in self.answers]
        return PullAppMessagesResponse(
            messages_list=[proto for proto, _ in found], message_object_trees=[tree for _, tree in found]
        )

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        self.fails("piece")
        content = self.pieces.get(request.object_id)
        if content is None:
            return PullObjectResponse(object_found=False)
        return PullObjectResponse(object_found=True, object_available=bool(content), object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.fails("confirm")
        self.confirmed.append(request.message_object_id)

    def answer(
        self, number: str, content: Any, change: Callable[[dict[str, bytes]], None] | None = None
    ) -> None:
        """As a SuperNode does: the message, the tree of its pieces, and the pieces."""
        asked = self.sent[number]
        if isinstance(content, RecordDict) and "offbeat" in content and self.signs:
            told = content["offbeat"].get("header")
            if type(told) is str and set(content["offbeat"]) <= {"header", "payload"}:
                arrays = content.get("offbeat.payload")
                payload = content["offbeat"].get("payload", b"") if arrays is None else arrays["payload"].data
                signed = sign(asked.metadata.dst_node_id, reply_statement(number, told, payload))
                content["offbeat"]["signature"] = signed
        reply = Message(content, reply_to=asked)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        pieces = {name: each.deflate() for name, each in get_all_nested_objects(reply).items()}
        if change is not None:
            change(pieces)
        self.pieces |= pieces
        self.answers[number] = (message_to_proto(remove_content_from_message(reply)), get_object_tree(reply))


def make(max_bytes: int = 10_000) -> tuple[Link, FlowerTransport]:
    link = Link()
    transport = FlowerTransport(link, max_bytes)
    transport.nodes()
    return link, transport


def test_a_task_goes_out_and_its_upload_comes_back() -> None:
    link, transport = make(max_bytes=20_000_000)
    assert transport.nodes() == {NODE, 5}
    payload = bytes(range(256)) * 60_000  # in several pieces, some of them the same
    number = transport.push(NODE, "task", "the note", payload, 33.0)
    sent = link.sent[number]
    assert (sent.metadata.message_type, sent.metadata.dst_node_id, sent.metadata.ttl) == (
        "train.task",
        NODE,
        33.0,
    )
    assert from_records(sent.content) == Content("the note", payload)
    assert transport.pull([number]) == []
    link.answer(number, to_records("the answer", payload))
    assert transport.pull([number]) == [Reply(number, NODE, "the answer", payload, None)]
    assert len(link.confirmed) == 1
    assert transport.pull([number]) == []


def test_a_hello_has_no_payload() -> None:
    link, transport = make()
    number = transport.push(5, "hello", "", b"", 9.0)
    assert link.sent[number].metadata.message_type == "query.hello"
    link.answer(number, to_records("it is me", b""))
    assert transport.pull([number]) == [Reply(number, 5, "it is me", b"", None)]


def test_an_upload_whose_pieces_are_still_on_their_way_is_not_waited_for() -> None:
    link, transport = make()
    slow, quick = (transport.push(NODE, "task", note, b"", 9.0) for note in ("a", "b"))
    held: dict[str, bytes] = {}

    def hold(pieces: dict[str, bytes]) -> None:
        name = list(pieces)[-1]
        held[name], pieces[name] = pieces[name], b""

    link.answer(slow, to_records("slow", b"1"), hold)
    link.answer(quick, to_records("quick", b"2"))
    assert [reply.header for reply in transport.pull([slow, quick])] == ["quick"]
    assert transport.pull([slow]) == []
    link.pieces |= held
    assert [reply.header for reply in transport.pull([slow])] == ["slow"]


def test_what_nobody_asks_for_any_more_is_let_go() -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    link.answer(number, to_records("slow", b"1"), lambda pieces: pieces.update(dict.fromkeys(pieces, b"")))
    assert transport.pull([number]) == []
    assert transport.pull([]) == []
    assert not transport._arriving


def test_an_error_is_told_in_the_networks_words() -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    link.answer(number, Error(2, "ValueError: no such file"))
    assert transport.pull([number]) == [Reply(number, NODE, "", b"", "code 2, ValueError: no such file")]


def chunks(pieces: dict[str, bytes]) -> list[str]:
    return [name for name, content in pieces.items() if content.startswith(b"ArrayChunk")]


def bomb(pieces: dict[str, bytes]) -> None:
    """One small piece, named so often that together they would fill any memory."""
    for name, content in pieces.items():
        if content.startswith(b"Array "):
            head, _, body = content.partition(b"\x00")
            facts = json.loads(body) | {"arraychunk_ids": [0] * 100_000}
            text = json.dumps(facts).encode()
            kind, children, _ = head.decode().split(" ")
            pieces[name] = f"{kind} {children} {len(text)}".encode() + b"\x00" + text


def garble(pieces: dict[str, bytes]) -> None:
    for name in pieces:
        pieces[name] = b"\xff\x00" + pieces[name]


def cut(pieces: dict[str, bytes]) -> None:
    for name in pieces:
        pieces[name] = pieces[name][:-1]


def lose(pieces: dict[str, bytes]) -> None:
    for name in chunks(pieces):
        del pieces[name]


def swap(pieces: dict[str, bytes]) -> None:
    """A chunk where the message itself should be."""
    [chunk] = chunks(pieces)
    for name in pieces:
        pieces[name] = pieces[chunk]


def arrays(**changes: Any) -> Any:
    facts = {"dtype": "uint8", "shape": (4,), "stype": "offbeat.bytes", "data": b"1234"} | changes
    records = {
        "offbeat": ConfigRecord({"header": "x"}),
        "offbeat.payload": ArrayRecord({"payload": Array(**facts)}),
    }
    return RecordDict(records)


@pytest.mark.parametrize(
    ("content", "change"),
    [
        (to_records("x", b"1" * 400_000), None),
        (to_records("x", b"1" * 3_000_000), None),
        (arrays(), bomb),
        (to_records("x", b"1" * 200), garble),
        (to_records("x", b"1" * 200), cut),
        (arrays(), lose),
        (arrays(), swap),
        (RecordDict({}), None),
        (RecordDict({"offbeat": MetricRecord({"header": 1})}), None),
        (RecordDict({"offbeat": ConfigRecord({"header": 1})}), None),
        (RecordDict({"offbeat": ConfigRecord({"header": "x", "more": "y"})}), None),
        (RecordDict({"offbeat": ConfigRecord({"header": "x"}), "more": ConfigRecord({})}), None),
        (arrays(stype="numpy.ndarray"), None),
        (arrays(dtype="float32"), None),
        (arrays(shape=(5,)), None),
    ],
)
def test_whatever_else_an_answer_is_it_is_told_as_an_error_and_spoils_no_other(
    content: Any, change: Any
) -> None:
    link, transport = make()
    first, bad, last = (transport.push(NODE, "task", note, b"", 9.0) for note in "abc")
    link.answer(first, to_records("first", b"1"))
    link.answer(last, to_records("last", b"3"))
    link.answer(bad, content, change)
    replies = {reply.message_id: reply for reply in transport.pull([first, bad, last])}
    assert replies[first].header == "first"
    assert replies[last].header == "last"
    told = replies[bad]
    assert (told.node, told.header, told.payload) == (NODE, "", b"")
    assert told.error is not None
    assert told.error.startswith("the reply cannot be read: ")
    assert len(link.confirmed) == 3


def test_a_reply_to_something_else_is_left_out() -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    other = transport.push(NODE, "task", "b", b"", 9.0)
    link.answer(other, to_records("x", b""))
    link.answers = {number: link.answers[other]}
    assert transport.pull([number]) == []


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), RuntimeError("odd"), ValueError("odder")])
@pytest.mark.parametrize("call", ["nodes", "push", "pull", "piece", "confirm"])
def test_a_link_that_fails_is_a_post_error_and_nothing_is_lost(call: str, error: Exception) -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    link.answer(number, to_records("x", b"1"))

    def fails(now: str) -> None:
        if now == call:
            raise error

    link.fails = fails
    calls = {"nodes": transport.nodes, "push": lambda: transport.push(NODE, "task", "b", b"", 9.0)}
    with pytest.raises(TransportError, match=f"{type(error).__name__}: {error}"):
        calls.get(call, lambda: transport.pull([number]))()
    link.fails = lambda now: None
    assert [reply.header for reply in transport.pull([number])] == ["x"]


def test_what_has_come_is_given_even_if_the_link_fails_over_the_next() -> None:
    link, transport = make()
    numbers = [transport.push(NODE, "task", note, b"", 9.0) for note in "ab"]
    for number in numbers:
        link.answer(number, to_records(f"to {number}", b"1"))

    def fails(now: str) -> None:
        if now == "piece" and link.confirmed:
            raise httpx.ReadTimeout("slow")

    link.fails = fails
    first = transport.pull(numbers)
    assert len(first) == 1
    link.fails = lambda now: None
    rest = transport.pull([number for number in numbers if number != first[0].message_id])
    assert sorted(reply.message_id for reply in first + rest) == sorted(numbers)


def test_a_run_that_flower_has_ended_is_closed_for_good() -> None:
    link, transport = make()

    def fails(now: str) -> None:
        raise RunNotRunningException

    link.fails = fails
    with pytest.raises(TransportClosedError, match="Flower has ended the run"):
        transport.nodes()


@pytest.mark.parametrize("taken", [[], [""], [None]])
def test_a_message_that_is_not_taken_is_a_post_error(taken: list[Any]) -> None:
    link, transport = make()
    link.push_messages = lambda messages: taken  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="accepted no message for node 5"):
        transport.push(5, "task", "a", b"", 9.0)


def test_calls_do_not_try_for_ever() -> None:
    link, _ = make()
    assert link._retry_invoker.max_time == 10.0


def test_a_simulation_is_refused() -> None:
    with pytest.raises(InputError, match="run this on a SuperLink"):
        FlowerTransport(object())


def test_pieces_have_the_numbers_that_flower_gives_them() -> None:
    """What `_check_sizes` takes apart is as Flower puts it together."""
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    link.answer(number, arrays())
    assert all(get_object_id(content) == name for name, content in link.pieces.items())
    [array] = [content for content in link.pieces.values() if content.startswith(b"Array ")]
    assert json.loads(array.partition(b"\x00")[2])["arraychunk_ids"] == [0]


def test_it_knows_by_which_key_a_node_came() -> None:
    transport = FlowerTransport(Link())
    assert transport.key(NODE) == b""
    transport.nodes()
    assert (transport.key(NODE), transport.key(5), transport.key(6)) == (pem(NODE), pem(5), b"")
    assert isinstance(transport, KeyedTransport)


@pytest.mark.parametrize("fault", ["another's key", "another message", "another header", "no signature"])
def test_a_keyed_site_cannot_answer_for_another(fault: str) -> None:
    """Flower does not compare the node that sends a reply with the node that the reply names."""
    link, transport = make()
    link.signs = False
    number = transport.push(NODE, "task", "a", b"", 9.0)
    statement = reply_statement(
        "other" if fault == "another message" else number,
        "other" if fault == "another header" else "x",
        b"1",
    )
    signature = sign(OTHER if fault == "another's key" else NODE, statement)
    link.answer(number, content_records(Content("x", b"1", b"" if fault == "no signature" else signature)))
    [reply] = transport.pull([number])
    assert (reply.node, reply.error, reply.authentic) == (NODE, None, False)


def test_the_signature_of_the_node_itself_is_accepted() -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    link.answer(number, to_records("x", b"1"))
    assert [reply.authentic for reply in transport.pull([number])] == [True]
