"""Flower's messages reach the site and come back, with a process of its own or without."""

import json
import socket
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy_world import site_plan
from offbeat import Examples
from offbeat.core import Task
from offbeat.deploy.protocol.messages import (
    TaskMessage,
    byte_size,
    decode_hello,
    decode_upload,
    encode_message,
)
from offbeat.deploy.site import relay
from offbeat.deploy.site.relay import SOCKET_VARIABLE

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower imports
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Message,
        Metadata,
        MetricRecord,
        RecordDict,
    )
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    from offbeat.deploy.flower.client import (
        HEADER_RECORD,
        PAYLOAD_RECORD,
        RecordError,
        SiteSetupError,
        answer_timeout,
        client_app,
        from_records,
        to_records,
    )


def through_flower(content: RecordDict) -> Any:
    """As it comes out at the other end of a network."""
    pieces = {name: each.deflate() for name, each in get_all_nested_objects(content).items()}
    return inflate_object_from_contents(content.object_id, pieces)


def message(kind: str, note: str, payload: bytes = b"", ttl: float = 30.0) -> Any:
    about = Metadata(
        run_id=1,
        message_id="a message",
        src_node_id=1,
        dst_node_id=5,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=ttl,
        message_type=kind,
    )
    return Message(through_flower(to_records(note, payload)), metadata=about)


def context(**config: str) -> Any:
    return Context(run_id=1, node_id=5, node_config=config, state=RecordDict(), run_config={})


def load(name: str) -> Examples:
    return Examples(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))


def module() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 50_000])
def test_notes_and_payloads_survive_flower(payload: bytes) -> None:
    assert from_records(through_flower(to_records("a note ä", payload))) == ("a note ä", payload)


NOTES = {HEADER_RECORD: ConfigRecord({"note": "x"})}
BYTES = Array(dtype="uint8", shape=(2,), stype="offbeat.bytes", data=b"ab")


@pytest.mark.parametrize(
    "records",
    [
        {},
        {PAYLOAD_RECORD: ArrayRecord({"payload": BYTES})},
        {HEADER_RECORD: MetricRecord({"note": 1})},
        {HEADER_RECORD: ConfigRecord({"note": 1})},
        {HEADER_RECORD: ConfigRecord({"note": "x", "more": "y"})},
        NOTES | {"other": ConfigRecord({})},
        NOTES | {PAYLOAD_RECORD: ConfigRecord({})},
        NOTES | {PAYLOAD_RECORD: ArrayRecord({})},
        NOTES | {PAYLOAD_RECORD: ArrayRecord({"payload": BYTES, "more": BYTES})},
        NOTES | {PAYLOAD_RECORD: ArrayRecord({"payload": Array("uint8", (3,), "offbeat.bytes", b"ab")})},
        NOTES | {PAYLOAD_RECORD: ArrayRecord({"payload": Array("int8", (2,), "offbeat.bytes", b"ab")})},
        NOTES | {PAYLOAD_RECORD: ArrayRecord({"payload": Array("uint8", (2,), "numpy.ndarray", b"ab")})},
    ],
)
def test_content_that_is_not_ours_is_refused(records: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        from_records(RecordDict(records))


def test_a_payload_above_the_limit_is_refused() -> None:
    assert from_records(to_records("x", b"abc"), 3)[1] == b"abc"
    with pytest.raises(RecordError, match="3 bytes; 2 are"):
        from_records(to_records("x", b"abc"), 2)


def test_without_a_resident_the_work_is_done_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    app = client_app(load, module)
    here = context(name="clinic", folder=str(tmp_path))
    hello = decode_hello(from_records(app(message("query.hello", "{}"), here).content)[0])
    assert (hello.name, hello.examples) == ("clinic", 4)
    plan = site_plan()
    note = encode_message(TaskMessage("run", Task(0, 0, 0), False, -1, plan, 30.0, hello.form, None))
    reply = app(message("train.task", note, bytes(byte_size(hello.form))), here)
    text, payload = from_records(through_flower(reply.content))
    assert decode_upload(text).error is None
    assert len(payload) == 4 * 8
    # the folder was let go of in between, and the site is the same one
    assert decode_hello(from_records(app(message("query.hello", "{}"), here).content)[0]).site == hello.site


def test_without_a_folder_named_it_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    client_app(load, module)(message("query.hello", "{}"), context(name="clinic"))
    assert (tmp_path / "offbeat" / "sites" / "clinic" / "site.json").exists()


def test_with_neither_resident_nor_functions_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    with pytest.raises(SiteSetupError, match="offbeat join"):
        client_app()(message("query.hello", "{}"), context())


def test_why_a_site_cannot_be_set_up_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)

    def failing(name: str) -> Examples:
        raise KeyError("patient 17")

    with pytest.raises(SiteSetupError) as raised:
        client_app(failing, module)(message("query.hello", "{}"), context(folder=str(tmp_path)))
    assert "17" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert "patient 17" in caplog.text


def test_a_resident_is_asked_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    monkeypatch.setenv(SOCKET_VARIABLE, str(path))
    heard: list[Any] = []

    def serve(listener: socket.socket) -> None:
        line, _ = listener.accept()
        with line:
            heard.append(relay.receive_frame(line, time.monotonic() + 10))
            relay.send_frame(line, {"note": "back"}, b"up", time.monotonic() + 10)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        note = json.dumps({"seconds": 7.5})
        reply = client_app()(message("train.task", note, b"down"), context())
        thread.join()
    assert heard == [({"kind": "task", "note": note, "seconds": 7.5}, b"down")]
    assert from_records(reply.content) == ("back", b"up")
    assert reply.metadata.reply_to_message_id == "a message"


@pytest.mark.parametrize(
    ("note", "wanted"),
    [
        ('{"seconds": 5}', 5),
        ('{"seconds": 50}', 20),
        ('{"seconds": -1}', 20),
        ('{"seconds": true}', 20),
        ('{"seconds": NaN}', 20),
        ('{"seconds": "5"}', 20),
        ("[]", 20),
        ("", 20),
        ("[" * 100_000, 20),
    ],
)
def test_the_time_for_an_answer_is_the_notes_or_the_messages(note: str, wanted: float) -> None:
    assert answer_timeout(note, 20) == wanted
