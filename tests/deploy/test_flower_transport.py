"""Flower as a transport: its own messages, over a SuperLink made of dictionaries."""

import base64
import dataclasses
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

from offbeat.deploy.flower import private_api
from offbeat.deploy.keys import reply_statement
from offbeat.deploy.network import waits_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower imports
    from flwr.proto.error_pb2 import Error
    from flwr.proto.message_pb2 import Message, PullObjectResponse, PushObjectResponse
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.proto.runtime_pb2 import GetNodesResponse, PullAppMessagesResponse, PushAppMessagesResponse

    from offbeat.deploy.flower.content import Content, ContentObjects, from_objects, to_objects
    from offbeat.deploy.flower.private_api import (
        OutgoingReply,
        PendingMessage,
        ServerTask,
        object_id,
        wrap_object,
    )
    from offbeat.deploy.flower.server import FlowerTransport
    from offbeat.deploy.protocol.transport import Reply, TransportClosedError, TransportError

NODE, OTHER = 2**63 + 11, 5
RUNG: list[bytes] = []  # for whom
BELL: Any = SimpleNamespace(ring=RUNG.append)
KEYS = {node: ec.generate_private_key(ec.SECP384R1()) for node in (NODE, OTHER)}


def pem(node: int) -> bytes:
    return KEYS[node].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def sign(node: int, statement: bytes) -> bytes:
    """As a site does it: both numbers of the signature, 48 bytes each."""
    numbers = decode_dss_signature(KEYS[node].sign(statement, ec.ECDSA(hashes.SHA384())))
    return b"".join(number.to_bytes(48, "big") for number in numbers)


@dataclasses.dataclass
class Sent:
    """A message to a node, and its objects."""

    message: Message
    names: list[str]
    objects: dict[str, bytes] = dataclasses.field(default_factory=dict)


class Link:
    """What a SuperLink knows: messages to nodes, and answers, in objects each."""

    def __init__(self) -> None:
        self.sent: dict[str, Sent] = {}
        self.answers: dict[str, Any] = {}
        self.objects: dict[str, bytes] = {}
        self.deleted: list[str] = []
        self.gone: set[str] = set()  # messages that it has deleted
        self.accepts = True
        self.fails: Callable[[str], None] = lambda call: None

    def GetNodes(self, request: Any) -> Any:  # noqa: N802 - Flower's own name
        self.fails("nodes")
        return GetNodesResponse(nodes=[NodeInfo(node_id=node, public_key=pem(node)) for node in KEYS])

    def PushMessages(self, request: Any) -> Any:  # noqa: N802
        self.fails("push")
        [message], [tree] = request.messages_list, request.message_object_trees
        number = message.metadata.message_id
        assert tree.object_id == number
        names = [number, *(each.object_id for each in tree.children)]
        if self.accepts:
            self.sent[number] = Sent(message, names)
        missing = [name for name in names if name not in self.objects]
        return PushAppMessagesResponse(
            message_ids=[number if self.accepts else ""], objects_to_push=missing, session_id="a"
        )

    def PushObject(self, request: Any) -> Any:  # noqa: N802
        self.fails("object")
        assert request.session_id == "a"
        assert object_id(request.object_content) == request.object_id
        self.objects[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        self.fails("pull")
        if set(request.message_ids) & self.gone:
            answer = httpx.Response(500, request=httpx.Request("POST", "http://x"))
            raise httpx.HTTPStatusError("500", request=answer.request, response=answer)
        found = [self.answers.pop(number) for number in request.message_ids if number in self.answers]
        return PullAppMessagesResponse(
            messages_list=[proto for proto, _ in found], message_object_trees=[tree for _, tree in found]
        )

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        self.fails("piece")
        content = self.objects.get(request.object_id)
        if content is None:
            return PullObjectResponse(object_found=False)
        return PullObjectResponse(object_found=True, object_available=bool(content), object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.deleted.append(request.message_object_id)

    def read(self, number: str) -> Content:
        """What a message to a node says."""
        names = self.sent[number].names
        return from_objects(ContentObjects(number, {name: self.objects[name] for name in names}))

    def answer(
        self,
        number: str,
        content: Content | Error | ContentObjects,
        change: Callable[[dict[str, bytes]], None] | None = None,
    ) -> None:
        """As a site does: the message, the tree of its objects, and the objects."""
        about = self.sent[number].message.metadata
        if isinstance(content, Content) and not content.signature:
            statement = reply_statement(number, content.header, content.payload)
            content = content._replace(signature=sign(about.dst_node_id, statement))
        pending = PendingMessage(number, about.run_id, about.message_type, about.ttl, [], about)
        error = content if isinstance(content, Error) else None
        made = to_objects(content) if isinstance(content, Content) else content
        reply = OutgoingReply(pending, *(("e" * 64, {"e" * 64: b""}) if isinstance(made, Error) else made))
        if error is not None:
            reply.message.ClearField("content")
            reply.message.error.CopyFrom(error)
        tree = private_api._object_tree(reply.objects)
        objects = dict(reply.objects)
        if change is not None:
            change(objects)
        self.objects |= objects
        self.answers[number] = (reply.message, tree)


def make(max_bytes: int = 10_000) -> tuple[Link, FlowerTransport]:
    link = Link()
    transport = FlowerTransport(ServerTask(link, 7, 1), BELL, max_bytes)
    transport.nodes()
    return link, transport


def test_a_task_goes_out_and_its_upload_comes_back() -> None:
    link, transport = make(max_bytes=20_000_000)
    assert transport.nodes() == {NODE, 5}
    payload = bytes(range(256)) * 60_000  # in several pieces, some of them the same
    number = transport.push(NODE, "task", "the note", payload, 33.0)
    about = link.sent[number].message.metadata
    assert (about.message_type, about.dst_node_id, about.run_id) == ("train.task", NODE, 7)
    assert about.ttl > 33.0, "Flower must not delete a message before the server gives it up"
    assert link.read(number) == Content("the note", payload)
    assert transport.pull([number]) == []
    link.answer(number, Content("the answer", payload))
    assert transport.pull([number]) == [Reply(number, NODE, "the answer", payload, None)]
    assert transport.pull([]) == []
    transport._deletions.shutdown()
    assert len(link.deleted) == 2, "the objects of the task and of its answer stay in the SuperLink"
    assert link.deleted[1] == number


def test_a_hello_has_no_payload() -> None:
    link, transport = make()
    number = transport.push(5, "hello", "", b"", 9.0)
    assert link.sent[number].message.metadata.message_type == "query.hello"
    link.answer(number, Content("it is me", b""))
    assert transport.pull([number]) == [Reply(number, 5, "it is me", b"", None)]


def test_an_upload_whose_pieces_are_still_on_their_way_is_not_waited_for() -> None:
    link, transport = make()
    slow, quick = (transport.push(NODE, "task", note, b"", 9.0) for note in ("a", "b"))
    held: dict[str, bytes] = {}

    def hold(pieces: dict[str, bytes]) -> None:
        held.update(pieces)
        pieces.update(dict.fromkeys(pieces, b""))

    link.answer(slow, Content("slow", b"1"), hold)
    link.answer(quick, Content("quick", b"2"))
    assert [reply.header for reply in transport.pull([slow, quick])] == ["quick"]
    assert transport.pull([slow]) == []
    link.objects |= held
    assert [reply.header for reply in transport.pull([slow])] == ["slow"]


def test_no_more_replies_are_fetched_at_a_time_than_memory_is_meant_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.deploy.flower.server._MAX_PULLED", 1_500)
    link, transport = make()
    numbers = [transport.push(NODE, "task", note, b"", 9.0) for note in "abcde"]
    for number in numbers:
        link.answer(number, Content(number, bytes(1_000)))
    found = []
    for expected in (2, 2, 1, 0):
        some = transport.pull([number for number in numbers if number not in found])
        assert len(some) == expected
        found += [reply.header for reply in some]
        assert transport.backlog == set(numbers) - set(found)
    assert found == numbers, "the others come next, in their order"


def test_what_nobody_asks_for_any_more_is_let_go() -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    link.answer(number, Content("slow", b"1"), lambda pieces: pieces.update(dict.fromkeys(pieces, b"")))
    assert transport.pull([number]) == []
    assert transport.pull([]) == []
    assert not transport._arriving
    transport._deletions.shutdown()
    assert len(link.deleted) == 2


def test_an_error_is_told_in_the_networks_words() -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    link.answer(number, Error(code=2, reason="ValueError: no such file"))
    assert transport.pull([number]) == [Reply(number, NODE, "", b"", "code 2, ValueError: no such file")]


def garble(pieces: dict[str, bytes]) -> None:
    for name in pieces:
        pieces[name] = b"\xff\x00" + pieces[name]


def cut(pieces: dict[str, bytes]) -> None:
    for name in pieces:
        pieces[name] = pieces[name][:-1]


def lose(pieces: dict[str, bytes]) -> None:
    del pieces[list(pieces)[-1]]


def swap(pieces: dict[str, bytes]) -> None:
    """A part of the payload where the message itself should be."""
    first, *_, last = pieces
    pieces[first] = pieces[last]


def by_hand(body: bytes) -> ContentObjects:
    wrapped = wrap_object(body)
    return ContentObjects(object_id(wrapped), {object_id(wrapped): wrapped})


LARGE = bytes(range(256)) * 20_000  # in parts


@pytest.mark.parametrize(
    ("content", "change"),
    [
        (Content("x", bytes(6_000_000)), None),
        (Content("x", bytes(60_000_000)), None),
        (Content("x", b"1" * 200), garble),
        (Content("x", b"1" * 200), cut),
        (Content("x", LARGE), lose),
        (Content("x", LARGE), swap),
        (Content("x", LARGE), cut),
        (by_hand(b""), None),
        (by_hand(b"no header"), None),
    ],
)
def test_whatever_else_an_answer_is_it_is_told_as_an_error_and_spoils_no_other(
    content: Any, change: Any
) -> None:
    link, transport = make(max_bytes=5_500_000)
    first, bad, last = (transport.push(NODE, "task", note, b"", 9.0) for note in "abc")
    link.answer(first, Content("first", b"1"))
    link.answer(last, Content("last", b"3"))
    link.answer(bad, content, change)
    replies = {reply.message_id: reply for reply in transport.pull([first, bad, last])}
    assert replies[first].header == "first"
    assert replies[last].header == "last"
    told = replies[bad]
    assert (told.node, told.header, told.payload) == (NODE, "", b"")
    assert told.error is not None
    assert told.error.startswith(("the reply cannot be read: ", "the message has "))
    transport._deletions.shutdown()
    assert len(link.deleted) == 3, "what a site sent stays in the SuperLink"


def test_a_reply_to_something_else_is_left_out() -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    other = transport.push(NODE, "task", "b", b"", 9.0)
    link.answer(other, Content("x", b""))
    link.answers = {number: link.answers[other]}
    assert transport.pull([number]) == []


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), RuntimeError("odd"), ValueError("odder")])
@pytest.mark.parametrize("call", ["nodes", "push", "object", "pull", "piece"])
def test_a_link_that_fails_is_a_post_error_and_nothing_is_lost(call: str, error: Exception) -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    link.answer(number, Content("x", b"1"))

    def fails(now: str) -> None:
        if now == call:
            raise error

    link.fails = fails
    calls = dict.fromkeys(("push", "object"), lambda: transport.push(NODE, "task", "b", b"", 9.0))
    calls["nodes"] = transport.nodes  # type: ignore[assignment]
    with pytest.raises(TransportError, match=str(error)):
        calls.get(call, lambda: transport.pull([number]))()
    link.fails = lambda now: None
    assert [reply.header for reply in transport.pull([number])] == ["x"]


def test_what_has_come_is_given_even_if_the_link_fails_over_the_next() -> None:
    link, transport = make()
    numbers = [transport.push(NODE, "task", note, b"", 9.0) for note in "ab"]
    for number in numbers:
        link.answer(number, Content(f"to {number}", b"1"))

    pieces: list[str] = []

    def fails(now: str) -> None:
        pieces.extend([now] if now == "piece" else [])
        if len(pieces) > 1:
            raise httpx.ReadTimeout("slow")

    link.fails = fails
    first = transport.pull(numbers)
    assert len(first) == 1
    link.fails = lambda now: None
    rest = transport.pull([number for number in numbers if number != first[0].message_id])
    assert sorted(reply.message_id for reply in first + rest) == sorted(numbers)


@pytest.mark.parametrize("status", [401, 403])
def test_a_run_that_flower_has_ended_is_closed_for_good(status: int) -> None:
    """403: it has ended. 401: the SuperLink was started again, and knows nothing of it."""
    link, transport = make()

    def fails(now: str) -> None:
        answer = httpx.Response(status, request=httpx.Request("POST", "http://x"))
        raise httpx.HTTPStatusError("refused", request=answer.request, response=answer)

    link.fails = fails
    with pytest.raises(TransportClosedError, match="Flower has ended the run"):
        transport.nodes()


def test_a_message_that_is_not_taken_is_a_post_error() -> None:
    link, transport = make()
    link.accepts = False
    with pytest.raises(TransportError, match="accepted no message for node 5"):
        transport.push(5, "task", "a", b"", 9.0)


def test_a_message_that_the_superlink_has_deleted_does_not_hide_the_others() -> None:
    link, transport = make()
    first, gone, last = (transport.push(NODE, "task", note, b"", 9.0) for note in "abc")
    link.answer(first, Content("first", b"1"))
    link.answer(last, Content("last", b"3"))
    link.gone = {gone}
    replies = {reply.message_id: reply for reply in transport.pull([first, gone, last])}
    assert (replies[first].header, replies[last].header) == ("first", "last")
    assert replies[gone].error == "the SuperLink does not have the message any more"


def test_a_superlink_that_fails_at_everything_is_away() -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)

    def fails(now: str) -> None:
        answer = httpx.Response(500, request=httpx.Request("POST", "http://x"))
        raise httpx.HTTPStatusError("500", request=answer.request, response=answer)

    link.fails = fails
    with pytest.raises(TransportError, match="HTTP status 500"):
        transport.pull([number])


def test_a_long_model_is_sent_to_the_superlink_once() -> None:
    link, transport = make()
    transport.push(NODE, "task", "a", LARGE, 9.0)
    before = set(link.objects)
    number = transport.push(OTHER, "task", "b", LARGE, 9.0)
    assert set(link.objects) - before == {number}
    assert link.read(number) == Content("b", LARGE)


def test_the_gateway_is_told_for_which_node_there_is_a_message() -> None:
    _, transport = make()
    RUNG.clear()
    transport.push(NODE, "task", "a", b"", 9.0)
    header = base64.b64encode(pem(NODE))  # of the requests of that node
    assert [waits_for(header)] == RUNG


def test_it_knows_by_which_key_a_node_came() -> None:
    transport = FlowerTransport(ServerTask(Link(), 7, 1), BELL)
    assert transport.key(NODE) == b""
    transport.nodes()
    assert (transport.key(NODE), transport.key(5), transport.key(6)) == (pem(NODE), pem(5), b"")


@pytest.mark.parametrize("fault", ["another's key", "another message", "another header", "no signature"])
def test_a_keyed_site_cannot_answer_for_another(fault: str) -> None:
    """Flower does not compare the node that sends a reply with the node that the reply names."""
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    statement = reply_statement(
        "other" if fault == "another message" else number,
        "other" if fault == "another header" else "x",
        b"1",
    )
    signature = sign(OTHER if fault == "another's key" else NODE, statement)
    link.answer(number, Content("x", b"1", b"none" if fault == "no signature" else signature))
    [reply] = transport.pull([number])
    assert (reply.node, reply.error, reply.authentic) == (NODE, None, False)


def test_the_signature_of_the_node_itself_is_accepted() -> None:
    link, transport = make()
    number = transport.push(NODE, "task", "a", b"", 9.0)
    link.answer(number, Content("x", b"1"))
    assert [reply.authentic for reply in transport.pull([number])] == [True]
