"""A helper behind HTTP, and requests that try to get more from it than it should give."""

import contextlib
import http.client
import json
import secrets
import socket
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from offbeat.core import Task
from offbeat.deploy import keys
from offbeat.deploy.helper.client import HttpsHelperConnection
from offbeat.deploy.helper.protocol import (
    MAX_REQUEST_BYTES,
    MAX_SUM_LENGTH,
    read_request,
    write_request,
)
from offbeat.deploy.helper.server import open_key_and_store
from offbeat.deploy.keys import read_signer, read_site_keys, signed_statement
from offbeat.deploy.network import TlsFiles, bind_socket, tls_context
from offbeat.errors import InputError
from offbeat.privacy.secure.encoding import decode, make_report
from offbeat.privacy.secure.servers import Leader, SealedSeed, SumRequest
from offbeat.privacy.secure.terms import (
    BindingError,
    LengthError,
    LongBatchError,
    MalformedError,
    OverlapError,
    RefusedError,
    ReplayError,
    RunError,
    SecureTerms,
    ShortBatchError,
    SignatureError,
    WeightError,
)
from offbeat.schedule.staleness import Polynomial
from secure_world import KEY, TOKEN, asked, made, new_desk, new_terms, served, tasks

ONCE = tasks(1, 2, 3)
Change = Callable[[SumRequest, SecureTerms], tuple[SumRequest, SecureTerms]]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(new_desk(tmp_path_factory.mktemp("helper") / "store")) as where:
        yield where


@pytest.fixture
def terms() -> SecureTerms:
    """Of a run that nobody has heard of."""
    return new_terms(secrets.token_bytes(16))


def link(url: str, **others: object) -> HttpsHelperConnection:
    return HttpsHelperConnection(url, TOKEN, patience=0, **others)  # type: ignore[arg-type]


def with_seed(request: SumRequest, seed: bytes) -> SumRequest:
    first, *rest = request.reports
    return request._replace(reports=(SealedSeed(first.task, seed), *rest))


REFUSED: dict[str, tuple[type[RefusedError], str, Change]] = {
    "no report": (ShortBatchError, "at least 3 distinct clients, not 0", lambda r, t: (asked([], t), t)),
    "too few": (
        ShortBatchError,
        "at least 3 distinct clients, not 2",
        lambda r, t: (asked(tasks(1, 2), t), t),
    ),
    "one client often": (
        ShortBatchError,
        "distinct clients, not 2",
        lambda r, t: (asked([*tasks(1, 2), Task(2, 0, 1), Task(2, 0, 2)], t), t),
    ),
    "too many": (LongBatchError, "might overflow", lambda r, t: (asked(tasks(*range(7)), t), t)),
    "twice in a batch": (
        ReplayError,
        "visit 0 of client 2 is named twice",
        lambda r, t: (r._replace(reports=(*r.reports, r.reports[1])), t),
    ),
    "a seed of another task": (
        BindingError,
        "visit 0 of client 1 does not open",
        lambda r, t: (with_seed(r, made(Task(4, 0, 0), t).sealed), t),
    ),
    "a seed of another run": (
        BindingError,
        "does not open",
        lambda r, t: (with_seed(r, made(Task(1, 0, 0), replace(t, run=b"ran")).sealed), t),
    ),
    "a seed under other weights": (
        BindingError,
        "does not open",
        lambda r, t: (with_seed(r, made(Task(1, 0, 0), replace(t, rule="hinge:9:0")).sealed), t),
    ),
    "a seed under other bounds": (
        BindingError,
        "does not open",
        lambda r, t: (with_seed(r, made(Task(1, 0, 0), replace(t, clipping="ab" * 32)).sealed), t),
    ),
    "bounds that are none": (
        MalformedError,
        "clipping",
        lambda r, t: (r, replace(t, clipping="x")),
    ),
    "a seed that nobody sealed": (BindingError, "does not open", lambda r, t: (with_seed(r, bytes(96)), t)),
    "a short seed": (MalformedError, "does not have 96 bytes", lambda r, t: (with_seed(r, bytes(95)), t)),
    "terms that hide nobody": (
        MalformedError,
        "hides nobody",
        lambda r, t: (r, _unchecked(replace(t), minimum=1)),
    ),
    "endless numbers": (
        MalformedError,
        "are too long",
        lambda r, t: (r, replace(t, length=MAX_SUM_LENGTH + 1)),
    ),
}


def _unchecked(terms: SecureTerms, **others: int) -> SecureTerms:
    """Terms that would refuse to be made."""
    for name, value in others.items():
        object.__setattr__(terms, name, value)
    return terms


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_has_its_type_and_changes_nothing(case: str, url: str, terms: SecureTerms) -> None:
    kind, sentence, change = REFUSED[case]
    good = asked(ONCE, terms)
    request, other = change(good, terms)
    with pytest.raises(kind, match=sentence) as caught:
        link(url).under(other).add(request)
    assert type(caught.value) is kind
    link(url).under(terms).add(good)  # what was refused did not count, nor did its terms


def test_a_report_from_the_future_is_refused_by_either_side(url: str, terms: SecureTerms) -> None:
    request = asked(tasks(1, 2, 3, version=5), terms)
    with pytest.raises(WeightError, match="after version 0"):
        link(url).under(terms).add(request)
    body = write_request(terms, request._replace(version=5))
    with pytest.raises(WeightError, match="after version 0"):
        read_request(body.replace(b'"version":5', b'"version":0'))


def test_weights_that_leader_and_helper_find_differently_are_refused() -> None:
    terms = replace(new_terms(b"run", weight_bits=8), weigh=Polynomial(0.5), rule="polynomial:0.5")
    body = write_request(terms, asked(ONCE, terms))
    assert read_request(body)[1].reports[0].task == ONCE[0]
    with pytest.raises(WeightError, match="compute different weights"):
        read_request(body.replace(b"[256,256,256]", b"[256,255,256]"))


def test_what_was_added_is_not_added_again_even_after_a_restart(tmp_path: Path) -> None:
    terms = new_terms(b"run")
    first = asked(ONCE, terms)
    refused: list[tuple[type[RefusedError], str, SumRequest, SecureTerms]] = [
        (ReplayError, "all of this batch was added before", asked(ONCE, terms), terms),
        (ReplayError, "all of this batch", first._replace(reports=first.reports[:2]), terms),
        (ReplayError, "all of this batch", first._replace(version=1), terms),
        (OverlapError, "of this batch was added before", asked(tasks(3, 4, 5), terms), terms),
        (
            LengthError,
            "3 numbers, not the 2 agreed on",
            asked(tasks(4, 5, 6), terms),
            replace(terms, length=3),
        ),
        (RunError, "under other terms", asked(tasks(4, 5, 6), terms), replace(terms, minimum=2)),
        (RunError, "under other terms", asked(tasks(4, 5, 6), terms), replace(terms, max_reports=100)),
    ]
    answers = []
    for _ in range(2):
        with served(new_desk(tmp_path / "store")) as where:
            # word for word the same question tells nothing new, and its answer may have been lost
            answers += [link(where).under(terms).add(first) for _ in range(2)]
            for kind, sentence, request, other in refused:
                with pytest.raises(kind, match=sentence):
                    link(where).under(other).add(request)
    assert all(np.array_equal(answers[0], answer) for answer in answers)
    with served(new_desk(tmp_path / "store")) as where:
        link(where).under(terms).add(asked(tasks(4, 5, 6), terms))


def test_the_sums_of_ten_random_cohorts_are_exact(url: str) -> None:
    rng = np.random.default_rng(7)
    for _ in range(10):
        count, length = int(rng.integers(2, 8)), int(rng.integers(1, 400))
        weighs = Polynomial(float(rng.integers(0, 3)) / 2)
        terms = SecureTerms(secrets.token_bytes(9), length, count, 2, 16, 8, weighs, str(weighs))
        leader = Leader(terms, link(url).under(terms))
        batch = [Task(client, int(rng.integers(0, 5)), client) for client in range(count)]
        uploads = rng.integers(-(2**17), 2**17, (count, length)) / 2**16
        for task, upload in zip(batch, uploads, strict=True):
            leader.take(make_report([torch.from_numpy(upload)], task, terms, KEY.public_key()))
        total = decode(leader.total(batch, 5), terms.unit).numpy()
        weights = [max(1, round(256 * weighs(5 - task.version))) for task in batch]
        assert np.array_equal(total, np.array(weights) @ uploads / 256)


def test_only_who_shows_the_token_is_served(url: str, terms: SecureTerms) -> None:
    with pytest.raises(InputError, match="does not accept this token"):
        HttpsHelperConnection(url, "another-token-of-some-length", patience=0).under(terms).add(
            asked(ONCE, terms)
        )
    for shown in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN} "[:-2]}):
        assert httpx.post(f"{url}/add", content=b"x", headers=shown).status_code == 401
    assert httpx.get(f"{url}/key").json() == {
        "key": KEY.public_key().public_bytes_raw().hex(),
        "signed": False,
        "minimum": 2,
        "sums": httpx.get(f"{url}/key").json()["sums"],
    }


def test_what_is_too_long_is_not_read(url: str) -> None:
    shown = {"Authorization": f"Bearer {TOKEN}"}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/add")
    for name, value in (shown | {"Content-Length": str(MAX_REQUEST_BYTES + 1)}).items():
        connection.putheader(name, value)
    connection.endheaders()  # the answer comes before a byte of it
    assert connection.getresponse().status == 413
    connection.close()
    endless = httpx.post(f"{url}/add", headers=shown, content=iter([b"x"]))  # says no length
    assert endless.status_code == 411
    assert httpx.get(f"{url}/add").status_code == 405
    assert httpx.get(f"{url}/other").status_code == 404


def test_what_is_longer_than_it_said_is_not_read_to_its_end(url: str) -> None:
    place = url.removeprefix("http://").split(":")
    with socket.create_connection((place[0], int(place[1])), 20) as line:
        head = f"POST /add HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 10\r\n"
        line.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n20\r\n{'x' * 32}\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 413")  # there is no last chunk to wait for


def test_strangers_that_say_nothing_do_not_keep_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.deploy.helper.server._IDLE_TIMEOUT", 2.0)
    with served(new_desk(tmp_path / "store")) as url, contextlib.ExitStack() as stack:
        place = url.removeprefix("http://").split(":")
        silent = [
            stack.enter_context(socket.create_connection((place[0], int(place[1])), 20)) for _ in range(40)
        ]
        assert httpx.get(f"{url}/key").status_code == 200  # at once: the oldest silent ones make room
        silent[-1].sendall(b"GET /key HTTP/1.1\r\nHost: x\r\n\r\n")
        assert silent[-1].recv(100).startswith(b"HTTP/1.1")
        silent[-1].sendall(b"G")  # begins to ask once more, and leaves it at that
        for line in silent:
            with contextlib.suppress(ConnectionResetError):  # hung up on with a letter unread
                while line.recv(1000):
                    pass
        assert httpx.get(f"{url}/key").status_code == 200


@pytest.mark.parametrize(
    "error", [sqlite3.OperationalError("database or disk is full"), OSError(28, "No space")]
)
def test_a_helper_whose_disk_is_full_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, terms: SecureTerms
) -> None:
    desk = new_desk(tmp_path / "store")

    def full(*asked: object) -> bytes:
        raise error

    monkeypatch.setattr(desk, "add", full)
    with served(desk) as url:
        body = write_request(terms, asked(ONCE, terms))
        answer = httpx.post(f"{url}/add", content=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, answer.json()) == (507, {"sentence": "the helper's disk is full."})


GOOD = write_request(new_terms(b"run"), asked(ONCE, new_terms(b"run")))


def changed(**others: object) -> bytes:
    """A request whose head says something else."""
    end = 4 + int.from_bytes(GOOD[:4], "little")
    text = json.dumps(json.loads(GOOD[4:end]) | others).encode()
    return len(text).to_bytes(4, "little") + text + GOOD[end:]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff\xff\xff",
        GOOD[:50],
        GOOD[:-1],
        GOOD + b"x",
        b"\x02\0\0\0[]",
        b"\x01\0\0\0{",
        (1 << 17).to_bytes(4, "little") + b"[" * (1 << 17),
        changed(length="2"),
        changed(length=2.0),
        changed(length=True),
        changed(length=0),
        changed(bits=31),
        changed(most=1 << 40),
        changed(run=""),
        changed(run="zz"),
        changed(run=7),
        changed(weights="constant:1"),
        changed(weights="fading"),
        changed(weights="polynomial:.5"),
        changed(weights="polynomial:1e999"),
        changed(weights="x" * 1000),
        changed(version=-1),
        changed(version=1 << 63),
        changed(version=None),
        changed(tasks=[]),
        changed(tasks=None),
        changed(tasks=[[1, 0], [2, 0], [3, 0]]),
        changed(tasks=[[1, 0, 0], [2, 0, 0], [3, 0, -1]]),
        changed(tasks=[[1, 0, 0], [2, 0, 0], [3, 0, 1 << 62]]),
        changed(tasks=[[1, 0, 0], [2, 0, 0], [3, 0, True]]),
        changed(counts=[1, 1]),
        changed(counts={}),
        changed(signed=True),
        changed(signed=0),
        changed(more=1),
    ],
)
def test_what_is_no_request_is_refused_as_malformed(data: bytes) -> None:
    read_request(GOOD)
    with pytest.raises(MalformedError):
        read_request(data)


# --- sites that sign


@pytest.fixture(scope="module")
def site_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    keys.create_keys(folder, ["localhost"], ["a", "b", "c", "d"], ["localhost", "127.0.0.1"], 2)
    return folder


def signed(batch: list[Task], names: str, terms: SecureTerms, folder: Path) -> SumRequest:
    request = asked(batch, terms)
    signers = [read_signer(folder / "sites" / name / "key")[1] for name in names]
    signatures = tuple(
        sign(signed_statement(terms, task, seed))
        for sign, (task, seed) in zip(signers, request.reports, strict=True)
    )
    return request._replace(signatures=signatures)


def test_with_public_keys_only_what_sites_signed_is_added(
    site_keys: Path, tmp_path: Path, terms: SecureTerms
) -> None:
    desk = new_desk(tmp_path / "store", read_site_keys(site_keys / "sites"))
    good = signed(ONCE, "abc", terms, site_keys)
    stranger = ec.generate_private_key(ec.SECP384R1()).public_key()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "x.pub").write_bytes(stranger.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    with served(desk) as where:
        helper = link(where).under(terms)
        assert link(where).known().signed
        swapped = (good.signatures[1], good.signatures[0], good.signatures[2])
        flipped = (bytes([good.signatures[0][0] ^ 1]) + good.signatures[0][1:], *good.signatures[1:])
        for signatures in ((), swapped, flipped, (bytes(96), *good.signatures[1:])):
            with pytest.raises(SignatureError, match="is not signed by a known site") as caught:
                helper.add(good._replace(signatures=signatures))
            assert caught.value.tasks[0] in ONCE
        with pytest.raises(SignatureError, match="signed by a site that is another client"):
            helper.add(signed(ONCE, "aba", terms, site_keys))  # one site as two clients
        helper.add(good)
        with pytest.raises(SignatureError, match="is not signed by the site of its client"):
            helper.add(signed(tasks(1, 2, 3, visit=1), "dbc", terms, site_keys))
        with pytest.raises(SignatureError, match="another client"):
            helper.add(signed(tasks(4, 2, 3, visit=1), "abc", terms, site_keys))
        helper.add(signed(tasks(1, 2, 3, visit=1), "abc", terms, site_keys))
        other = replace(terms, run=b"another run")  # where clients have other numbers
        helper = link(where).under(other)
        helper.add(signed(ONCE, "dab", other, site_keys))
    fewer = new_desk(tmp_path / "store", read_site_keys(tmp_path / "s"))  # their keys are taken away
    with served(fewer) as where, pytest.raises(SignatureError, match="by the site of its client"):
        link(where).under(terms).add(signed(tasks(1, 2, 3, visit=2), "abc", terms, site_keys))


def test_a_helper_has_a_minimum_of_its_own(tmp_path: Path, terms: SecureTerms) -> None:
    request = asked(ONCE, terms)
    with served(new_desk(tmp_path / "store", minimum=4)) as where:
        assert link(where).known().minimum == 4
        helper = link(where).under(terms)
        with pytest.raises(RunError, match="at least 4 clients, and the sums of this run may be of 3"):
            helper.add(request)
        with pytest.raises(RunError, match="at least 4 clients"):
            helper.examine(*request.reports[0], b"")
    with served(new_desk(tmp_path / "store", minimum=3)) as where:
        link(where).under(terms).add(request)  # which the refusal did not count


def test_a_report_can_be_examined_without_being_counted(
    site_keys: Path, tmp_path: Path, terms: SecureTerms
) -> None:
    desk = new_desk(tmp_path / "store", read_site_keys(site_keys / "sites"))
    good = signed(ONCE, "abc", terms, site_keys)
    with served(desk) as where:
        helper = link(where).under(terms)
        for (task, seed), signature in zip(good.reports, good.signatures, strict=True):
            for _ in range(2):
                helper.examine(task, seed, signature)
        with pytest.raises(SignatureError):
            helper.examine(ONCE[0], good.reports[0].seed, b"")
        with pytest.raises(SignatureError):
            helper.examine(ONCE[0], good.reports[0].seed, good.signatures[1])
        bad = b"\0" + good.reports[0].seed[1:]
        sign = read_signer(site_keys / "sites" / "a" / "key")[1]
        with pytest.raises(BindingError):
            helper.examine(ONCE[0], bad, sign(signed_statement(terms, ONCE[0], bad)))
        helper.add(good)


# --- files


def test_a_helper_with_a_certificate_is_believed_and_one_without_is_not(
    site_keys: Path, tmp_path: Path, terms: SecureTerms
) -> None:
    tls = TlsFiles(site_keys / "helper.pem", site_keys / "helper.key")
    tls_context(tls)
    keys.create_keys(tmp_path / "others", ["localhost"], ["a"], ["elsewhere.example"], 2)
    with served(new_desk(tmp_path / "store"), tls) as where:
        trusting = link(where, certificate=site_keys / "ca.crt")
        trusting.under(terms).add(asked(ONCE, terms))
        for authority in (tmp_path / "others" / "ca.crt", None):
            with pytest.raises(InputError, match="was not accepted: check it"):
                link(where, certificate=authority).known()
        named = where.replace("127.0.0.1", "localhost")
        assert link(named, certificate=site_keys / "ca.crt").known() == trusting.known()
    only = TlsFiles(
        tmp_path / "others" / "helper.pem", tmp_path / "others" / "helper.key"
    )  # not of this address
    with (
        served(new_desk(tmp_path / "second"), only) as where,
        pytest.raises(InputError, match="was not accepted"),
    ):
        link(where, certificate=tmp_path / "others" / "ca.crt").known()


def test_certificates_that_cannot_work_are_one_sentence(site_keys: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        tls_context(TlsFiles(tmp_path / "helper.pem", tmp_path / "helper.key"))
    for pair in (
        TlsFiles(site_keys / "helper.pem", site_keys / "server.key"),
        TlsFiles(site_keys / "helper.key", site_keys / "helper.key"),
        TlsFiles(site_keys / "helper.token", site_keys / "helper.key"),
    ):
        with pytest.raises(InputError, match="are not a certificate and its key"):
            tls_context(pair)


def test_a_port_in_use_is_one_sentence() -> None:
    with (
        bind_socket("127.0.0.1", 0) as socket,
        pytest.raises(InputError, match=r"port \d+ of 127\.0\.0\.1 is in use"),
    ):
        bind_socket("127.0.0.1", socket.getsockname()[1])
    with pytest.raises(InputError, match=r"cannot be used \(unknown host\)"):
        bind_socket("no such host", 80)


def test_key_and_store_are_made_together_and_stay_together(tmp_path: Path) -> None:
    key, store = open_key_and_store(tmp_path / "key", tmp_path / "store")
    store.close()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600
    public = key.public_key().public_bytes_raw().hex()
    assert (tmp_path / "key.pub").read_text().strip() == public
    again, store = open_key_and_store(tmp_path / "key", tmp_path / "store")
    store.close()
    assert again.private_bytes_raw() == key.private_bytes_raw()
    with pytest.raises(InputError, match=r"exists but .* does not"):
        open_key_and_store(tmp_path / "key", tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(InputError, match="other users can read"):
        open_key_and_store(tmp_path / "key", tmp_path / "store")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "key").write_text("no key")
    with pytest.raises(InputError, match="is not a helper's private key"):
        open_key_and_store(tmp_path / "key", tmp_path / "store")
    with pytest.raises(InputError, match=r"cannot be (written|used)"):
        open_key_and_store(tmp_path / "none" / "key", tmp_path / "other")


@pytest.mark.parametrize("text", ["no key", "ssh-ed25519 AAAA", ""])
def test_what_is_no_public_key_of_a_site_is_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="holds 0 public keys"):
        read_site_keys(tmp_path)
    (tmp_path / "a.pub").write_text(text)
    with pytest.raises(InputError, match="is not an OpenSSH public key of the curve P-384"):
        read_site_keys(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        read_site_keys(tmp_path / "none")


def test_one_key_for_two_sites_is_refused(site_keys: Path, tmp_path: Path) -> None:
    for name in ("a.pub", "b.pub"):
        (tmp_path / name).write_bytes((site_keys / "sites" / "a" / "key.pub").read_bytes())
    with pytest.raises(InputError, match="appears twice"):
        read_site_keys(tmp_path)
