"""A helper that is down, slow, wrong or somebody else."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from offbeat.deploy import keys
from offbeat.deploy.helper.client import HttpsHelperConnection
from offbeat.deploy.helper.protocol import read_token, write_answer
from offbeat.deploy.keys import read_signer, signed_statement
from offbeat.deploy.network import bind_socket, is_loopback
from offbeat.deploy.site.secure_encode import read_helper_key
from offbeat.errors import InputError
from offbeat.privacy.secure.encoding import make_report
from offbeat.privacy.secure.servers import SealedSeed, SumRequest
from offbeat.privacy.secure.terms import RefusedError, ReplayError, ShortBatchError
from secure_world import TOKEN, asked, new_desk, new_terms, served, tasks

TERMS = new_terms(b"run")
ONCE = tasks(1, 2, 3)


@dataclass
class Time:
    """Seconds that pass only by waiting; something may happen meanwhile."""

    now: float = 0.0
    pauses: list[float] = field(default_factory=list)
    then: Callable[[float], None] = lambda now: None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        self.then(self.now)


def free_port() -> int:
    with bind_socket("127.0.0.1", 0) as socket:
        return int(socket.getsockname()[1])


def test_a_helper_that_is_down_for_a_while_is_waited_for(tmp_path: Path) -> None:
    port, times = free_port(), Time()
    up = threading.Event()
    over = threading.Event()
    served_at: list[float] = []

    def serve() -> None:
        with served(new_desk(tmp_path / "store"), port=port):
            up.set()
            over.wait(30)

    thread = threading.Thread(target=serve)

    def return_after_a_minute(now: float) -> None:
        if now > 60 and not served_at:
            served_at.append(now)
            thread.start()
            up.wait(20)

    times.then = return_after_a_minute
    link = HttpsHelperConnection(f"http://127.0.0.1:{port}", TOKEN, clock=times.clock, sleep=times.sleep)
    try:
        link.under(TERMS).add(asked(ONCE, TERMS))
    finally:
        over.set()
        thread.join()
    assert served_at == [times.now]
    assert times.pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(times.pauses) <= 30


def test_when_patience_ends_it_says_so_in_one_sentence() -> None:
    times = Time()
    link = HttpsHelperConnection(
        f"http://127.0.0.1:{free_port()}", TOKEN, patience=100, clock=times.clock, sleep=times.sleep
    )
    with pytest.raises(
        InputError, match=r"has not answered for \d+ seconds .*: start it and resume"
    ) as caught:
        link.under(TERMS).add(asked(ONCE, TERMS))
    assert not isinstance(caught.value, RefusedError)
    assert 60 < times.now <= 100


def answering(monkeypatch: pytest.MonkeyPatch, *responses: httpx.Response | Exception) -> Time:
    """The network gives these answers, one after another."""
    rest = list(responses)

    def handle(request: httpx.Request) -> httpx.Response:
        response = rest.pop(0)
        if isinstance(response, Exception):
            raise response
        return httpx.Response(response.status_code, content=iter([response.content]))  # as it comes in

    whole = httpx.Client

    def client(**options: object) -> httpx.Client:
        options.pop("verify")
        return whole(transport=httpx.MockTransport(handle), **options)  # type: ignore[arg-type]

    monkeypatch.setattr("offbeat.deploy.helper.client.httpx.Client", client)
    return Time()


def test_errors_of_server_and_network_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    good = httpx.Response(200, content=write_answer(TERMS, np.arange(2, dtype=np.uint32)))
    bad = [httpx.Response(code) for code in (500, 502, 503, 408, 429)]
    broken = [httpx.ReadError("reset"), httpx.ConnectTimeout("slow"), httpx.RemoteProtocolError("half")]
    times = answering(monkeypatch, *bad, *broken, good)
    said: list[str] = []
    link = HttpsHelperConnection(
        "http://localhost:1",
        TOKEN,
        clock=times.clock,
        sleep=times.sleep,
        on_failure=said.append,
        on_recovery=lambda: said.append("back"),
    )
    total = link.under(TERMS).add(asked(ONCE, TERMS))
    assert len(said) == 9
    assert said[0] == "the helper at http://localhost:1 does not answer (status 500); the run waits for it"
    assert said[-1] == "back"
    assert total.tolist() == [0, 1]
    assert total.dtype == np.uint32
    assert total.flags.writeable
    assert len(times.pauses) == 8


@pytest.mark.parametrize(
    ("response", "sentence"),
    [
        (httpx.Response(401), "does not accept this token"),
        (httpx.Response(404), "not a helper of this version"),
        (httpx.Response(413), "not a helper of this version"),
        (httpx.Response(200, content=bytes(39)), "has 39 bytes, not 40"),
        (httpx.Response(200, content=bytes(41)), "longer than expected"),
        (httpx.Response(200, content=bytes(40)), "added other noise to a sum than the terms"),
        (httpx.Response(422, json={"refusal": "ShortBatchError", "sentence": "too few."}), "too few"),
        (httpx.Response(422, json={"refusal": "Other", "sentence": "no.", "tasks": 3}), r"no\."),
        (httpx.Response(409, content=b"{"), "the helper refused"),
    ],
)
def test_what_waiting_would_not_mend_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, response: httpx.Response, sentence: str
) -> None:
    times = answering(monkeypatch, response)
    link = HttpsHelperConnection("http://localhost:1", TOKEN, clock=times.clock, sleep=times.sleep)
    with pytest.raises(InputError, match=sentence) as caught:
        link.under(TERMS).add(asked(ONCE, TERMS))
    assert isinstance(caught.value, RefusedError) == (response.status_code in (409, 422))
    assert isinstance(caught.value, ShortBatchError) == (sentence == "too few")
    assert not times.pauses


@pytest.mark.parametrize(
    "facts",
    [b"", b"[]", b'{"key": "00", "signed": true}', b'{"key": 5}', json.dumps({"key": "0" * 64}).encode()],
)
def test_what_is_no_helper_is_told_apart(monkeypatch: pytest.MonkeyPatch, facts: bytes) -> None:
    answering(monkeypatch, httpx.Response(200, content=facts))
    with pytest.raises(InputError, match="is not a helper: check the address"):
        HttpsHelperConnection("http://localhost:1", TOKEN).known()


@pytest.mark.parametrize("url", ["", "helper", "ftp://localhost", "https://", "https:///add", "localhost:80"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="must be such as https://host:port"):
        HttpsHelperConnection(url, TOKEN)


def test_plain_text_stays_on_this_machine() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        HttpsHelperConnection(f"http://{host}:5", TOKEN)
    for host in ("192.0.2.1", "helper.example", "127.0.0.1.example", "0.0.0.0"):
        assert not is_loopback(host)
        with pytest.raises(InputError, match="is on another machine: use https"):
            HttpsHelperConnection(f"http://{host}:5", TOKEN)


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name the certificate of the helper's authority"):
        HttpsHelperConnection("https://localhost:1", TOKEN, tmp_path / "ca.crt")
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(InputError, match="is not the certificate of an authority"):
        HttpsHelperConnection("https://localhost:1", TOKEN, tmp_path / "ca.crt").known()
    with pytest.raises(InputError, match=r"the token .* cannot be read"):
        read_token(tmp_path / "token")
    for text in ("", "short", "two words of some length", "öööööööööööööööööö"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(InputError, match="token"):
            read_token(tmp_path / "token")


def test_a_link_does_not_show_its_token() -> None:
    assert TOKEN not in repr(HttpsHelperConnection("http://localhost:1", TOKEN))


def start(folder: Path, port: int) -> subprocess.Popen[str]:
    words = [
        *("helper", "--key", "own.key", "--store", "store", "--token", "keys/helper.token", "--json"),
        *("--certificate", "keys/helper.pem", "--certificate-key", "keys/helper.key"),
        *("--sites", "keys/sites", "--port", str(port), "--minimum", "2"),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat", *words], cwd=folder, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_helper_process_that_is_killed_and_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    """TLS, signatures and a real kill: a request that waits is answered by the helper's next life."""
    keys.create_keys(tmp_path / "keys", ["localhost"], ["a", "b", "c"], ["127.0.0.1"], 2)
    port = free_port()
    process = start(tmp_path, port)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told == {
            "url": f"https://127.0.0.1:{port}",
            "key": read_helper_key(tmp_path / "own.key.pub"),
            "signed": True,
        }
        link = HttpsHelperConnection(
            told["url"], read_token(tmp_path / "keys/helper.token"), tmp_path / "keys/ca.crt", patience=120
        )
        helper = link.under(TERMS)
        first, second = (_signed(visit, tmp_path / "keys/sites", link.known().key) for visit in range(2))
        before = helper.add(first)
        process.send_signal(signal.SIGKILL)
        process.wait()
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(helper.add(second)))
        waiting.start()
        time.sleep(0.2)
        process.stdout.close()
        process = start(tmp_path, port)
        waiting.join(100)
        assert len(answers) == 1
        assert np.array_equal(helper.add(first), before)
        with pytest.raises(ReplayError, match="added before"):
            helper.add(_signed(0, tmp_path / "keys/sites", link.known().key))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _signed(visit: int, folder: Path, key: bytes) -> SumRequest:
    public = X25519PublicKey.from_public_bytes(key)
    reports, signatures = [], []
    for task, name in zip(tasks(1, 2, 3, visit=visit), "abc", strict=True):
        made = make_report([torch.ones(2)], task, TERMS, public)
        reports.append(SealedSeed(task, made.sealed))
        signatures.append(read_signer(folder / name / "key")[1](signed_statement(TERMS, task, made.sealed)))
    return SumRequest(TERMS.run, 0, TERMS.length, tuple(reports), tuple(signatures))
