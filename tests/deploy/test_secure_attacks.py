"""What a leader may try against a helper in order to learn one upload; none of it may work."""

import dataclasses
import hashlib
import json
import math
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from offbeat import Asynchronous, Equal, FedOpt
from offbeat.aggregate.mean import AggregationContext
from offbeat.aggregate.secure import RemoteSecure, RemoteSecureSum, Secure, read_noise, write_noise
from offbeat.core import Task
from offbeat.deploy.helper.protocol import read_answer, write_answer
from offbeat.deploy.helper.server import HelperService, open_key_and_store
from offbeat.deploy.helper.store import HelperStore
from offbeat.deploy.keys import create_keys, read_signer, read_site_keys, signed_statement
from offbeat.errors import InputError
from offbeat.privacy.secure.encoding import Report, decode, make_report
from offbeat.privacy.secure.servers import Leader, SealedSeed, SumRequest
from offbeat.privacy.secure.terms import (
    BindingError,
    HelperNoise,
    MessageError,
    ParticipationError,
    RefusedError,
    ReplayError,
    RunError,
    SecureTerms,
)
from secure_world import KEY, Nearby, new_desk, new_terms, tasks

SIZE = 50
TERMS = new_terms(b"run", SIZE, minimum=3)
UPLOADS = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[HelperService]:
    made = new_desk(tmp_path / "store")
    yield made
    made.close()


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def report(task: Task, terms: SecureTerms, message: bytes) -> Report:
    """The answer of a site: the same plan and the same model give the same update."""
    return make_report([UPLOADS[task.client]], task, terms, KEY.public_key(), None, message)


def total(desk: HelperService, terms: SecureTerms, those: Sequence[Task], message: bytes) -> np.ndarray:
    leader = Leader(terms, Nearby(desk).under(terms))
    for task in those:
        leader.take(report(task, terms, message))
    return decode(leader.total(those, 0), terms.unit).numpy()


def test_two_runs_of_one_plan_cannot_be_subtracted_from_each_other(desk: HelperService) -> None:
    """Run 1 over sites 0 to 5 less run 2 over sites 0 to 4 would be the update of site 5."""
    first, second = (new_terms(run, SIZE, minimum=5) for run in (b"first", b"second"))
    initial = digest("the plan and its initial model")
    everybody = total(desk, first, tasks(*range(6)), initial)
    np.testing.assert_allclose(everybody, UPLOADS.sum(0), atol=1e-4)
    with pytest.raises(RunError, match=r"another run has sent.*start a run with another seed"):
        total(desk, second, tasks(*range(5)), initial)
    total(desk, second, tasks(*range(5)), digest("another initial model"))


def test_a_second_run_of_one_plan_is_refused_as_soon_as_a_report_comes_in(desk: HelperService) -> None:
    first, second = (new_terms(run, SIZE, minimum=5) for run in (b"first", b"second"))
    initial = digest("initial")
    total(desk, first, tasks(*range(6)), initial)
    one = report(Task(0, 0, 0), second, initial)
    with pytest.raises(RunError, match="another run has sent"):
        Nearby(desk).under(second).examine(one.task, one.sealed, b"")


def test_sites_that_were_sent_different_models_are_not_summed(desk: HelperService) -> None:
    """All sites but one could be sent a model for which their updates vanish."""
    terms = new_terms(b"run", SIZE, minimum=5)
    leader = Leader(terms, Nearby(desk).under(terms))
    those = tasks(*range(6), version=3)
    for task in those:
        leader.take(report(task, terms, digest("real" if task.client == 2 else "void")))
    with pytest.raises(MessageError, match="answers another model or other settings") as caught:
        leader.total(those, 3)
    assert isinstance(caught.value, RefusedError)
    later = tasks(*range(6), version=4)
    assert total(desk, terms, [task._replace(version=0) for task in later], digest("x")).shape == (SIZE,)


def test_the_message_of_a_version_stays_the_same_over_sums(desk: HelperService) -> None:
    terms = new_terms(b"run", SIZE, minimum=3)
    near = Nearby(desk).under(terms)

    def ask(clients: Sequence[int], version: int, visit: int, message: str) -> None:
        leader = Leader(terms, near)
        those = tasks(*clients, version=version, visit=visit)
        for task in those:
            leader.take(report(task, terms, digest(message)))
        leader.total(those, version)

    ask([0, 1, 2], 5, 0, "five")
    with pytest.raises(MessageError, match="from version 5"):
        ask([3, 4, 5], 5, 0, "another five")
    ask([3, 4, 5], 5, 0, "five")
    ask([0, 1, 2], 6, 1, "five")  # a model may stay as it is
    ask([0, 1, 2], 0, 2, "the full-participation start")
    ask([0, 1, 2], 0, 3, "version 0")
    with pytest.raises(MessageError, match="from version 0"):
        ask([0, 1, 2], 0, 4, "a third message")


def opened(folder: Path) -> HelperService:
    """The helper as its command starts it."""
    key, store = open_key_and_store(folder / "key", folder / "store")
    return HelperService(key, store, minimum=2)


def ask_once(helper: HelperService, those: Sequence[Task], version: int = 0) -> None:
    """The same reports in every call: a leader may keep them."""
    sealed = KEPT.setdefault(tuple(those), tuple(_sealed(task, helper) for task in those))
    helper.add(TERMS, SumRequest(TERMS.run, version, SIZE, sealed))


KEPT: dict[tuple[Task, ...], tuple[SealedSeed, ...]] = {}


def _sealed(task: Task, helper: HelperService) -> SealedSeed:
    key = X25519PublicKey.from_public_bytes(helper.info.key)
    return SealedSeed(task, make_report([UPLOADS[task.client]], task, TERMS, key).sealed)


def test_a_store_that_was_restored_from_a_backup_is_noticed(tmp_path: Path) -> None:
    """It has forgotten what was summed since, and would sum reports again with one of them left out."""
    KEPT.clear()
    with closing(opened(tmp_path)) as helper:
        ask_once(helper, tasks(0, 1, 2, visit=0))
    shutil.copy(tmp_path / "store", tmp_path / "backup")
    with closing(opened(tmp_path)) as helper:
        assert helper.info.sums == 1
        ask_once(helper, tasks(0, 1, 2, 3, visit=1))
        ask_once(helper, tasks(0, 1, 2, 3, visit=1))  # the answer was lost: this is the same sum
        assert helper.info.sums == 2
    newest = (tmp_path / "store").read_bytes()
    shutil.copy(tmp_path / "backup", tmp_path / "store")
    with pytest.raises(InputError, match=r"knows of 1 sums, and this helper has given 2 away"):
        opened(tmp_path)
    (tmp_path / "store").write_bytes(newest)
    with closing(opened(tmp_path)) as helper, pytest.raises(ReplayError):
        ask_once(helper, tasks(0, 1, 2, visit=1))


def test_a_store_that_is_replaced_while_the_helper_runs_is_noticed(tmp_path: Path) -> None:
    KEPT.clear()
    with closing(opened(tmp_path)) as helper:
        ask_once(helper, tasks(0, 1, 2))
        with sqlite3.connect(tmp_path / "store") as other:
            other.execute("UPDATE sums SET count = 0")
            other.execute("DELETE FROM counted")
            other.execute("DELETE FROM answered")
        other.close()
        with pytest.raises(RunError, match="restored from a backup"):
            ask_once(helper, tasks(0, 1, 2))


def test_a_helper_that_was_killed_before_it_wrote_its_count_goes_on(tmp_path: Path) -> None:
    KEPT.clear()
    with closing(opened(tmp_path)) as helper:
        ask_once(helper, tasks(0, 1, 2))
    (tmp_path / "key.sums").write_text("0\n")
    with closing(opened(tmp_path)) as helper:
        assert helper.info.sums == 1
    assert (tmp_path / "key.sums").read_text() == "1\n"
    (tmp_path / "key.sums").write_text("many")
    with pytest.raises(InputError, match="cannot be read: restore it"):
        opened(tmp_path)


def test_a_leader_that_resumes_notices_a_helper_with_an_earlier_store(desk: HelperService) -> None:
    def begun() -> RemoteSecureSum:
        context = AggregationContext(
            FedOpt(0.1, 1.0), torch.zeros(3), Asynchronous(5), Equal(), 4, 50, 5, math.inf, 3
        )
        return RemoteSecure(Secure(2), b"run", Nearby(desk)).open(context)

    total(desk, new_terms(b"other", SIZE), tasks(0, 1, 2), digest("m"))
    first, second = begun(), begun()
    first.secure_encoding()
    saved = first.save()
    assert saved.facts["sums"] == 1
    second.load(saved)
    second.secure_encoding()
    third = begun()
    third.load(saved._replace(facts=saved.facts | {"sums": 2}))
    with pytest.raises(InputError, match="knows of 1 sums, and it had given 2 away before"):
        third.secure_encoding()


# --- noise from the helper

NOISE = HelperNoise(((SIZE, 3000.0),), max_participations=2, min_separation=2)
NOISED = dataclasses.replace(TERMS, noise=NOISE)


def noised_sum(
    desk: HelperService, terms: SecureTerms, those: Sequence[Task], version: int = 0, message: str = "m"
) -> np.ndarray:
    leader = Leader(terms, Nearby(desk).under(terms))
    for task in those:
        leader.take(report(task, terms, digest(f"{message} {task.version}")))
    return decode(leader.total(those, version), terms.unit).numpy()


def test_the_leader_sees_no_sum_without_noise_and_the_same_noise_for_a_repeated_request(
    desk: HelperService,
) -> None:
    those = tasks(0, 1, 2)
    sealed = tuple(SealedSeed(task, report(task, NOISED, digest("m")).sealed) for task in those)
    request = NOISED, SumRequest(NOISED.run, 0, SIZE, sealed)
    first = desk.add(*request)
    assert desk.add(*request) == first, "a lost answer must not be given with other noise"
    found = noised_sum(desk, dataclasses.replace(NOISED, run=b"another"), those)
    error = (found - UPLOADS[:3].sum(0).numpy()) * 2**16
    assert 0.6 * 3000 < error.std() < 1.5 * 3000


def test_two_noised_runs_of_one_plan_differ_by_more_than_the_update(desk: HelperService) -> None:
    """The message may be the same: what the leader learns is bounded by the noise of both."""
    first, second = (dataclasses.replace(NOISED, run=run) for run in (b"first", b"second"))
    difference = noised_sum(desk, first, tasks(*range(6))) - noised_sum(desk, second, tasks(*range(5)))
    noise = (difference - UPLOADS[5].numpy()) * 2**16
    assert 0.6 * math.sqrt(2) * 3000 < noise.std() < 1.5 * math.sqrt(2) * 3000


@pytest.mark.parametrize(
    "other",
    [
        None,
        NOISE._replace(fields=((SIZE, 1.0),)),
        NOISE._replace(max_participations=100),
        NOISE._replace(min_separation=1),
    ],
)
def test_a_leader_cannot_ask_for_less_noise_than_the_sites_were_told(
    desk: HelperService, other: HelperNoise | None
) -> None:
    those = tasks(0, 1, 2)
    sealed = tuple(SealedSeed(task, report(task, NOISED, digest("m")).sealed) for task in those)
    terms = dataclasses.replace(TERMS, noise=other)
    with pytest.raises(BindingError, match="does not open"):
        desk.add(terms, SumRequest(TERMS.run, 0, SIZE, sealed))


def test_noise_that_the_terms_do_not_know_is_refused_in_a_sentence(desk: HelperService) -> None:
    total = np.zeros(SIZE, np.uint32)
    assert read_answer(write_answer(NOISED, total), NOISED).shape == (SIZE,)
    for said, known in ((NOISED, TERMS), (TERMS, NOISED)):
        with pytest.raises(InputError, match="the helper added other noise to a sum than the terms"):
            read_answer(write_answer(said, total), known)
    with pytest.raises(InputError, match="the helper's sum has 3 bytes"):
        read_answer(b"abc", NOISED)


def test_a_client_contributes_no_more_often_than_the_noise_covers(desk: HelperService) -> None:
    def ask(version: int, clients: Sequence[int], visit: int) -> None:
        noised_sum(desk, NOISED, tasks(*clients, version=version, visit=visit), version)

    ask(0, [0, 1, 2], 0)
    with pytest.raises(ParticipationError, match="contributions 2 server steps apart"):
        ask(1, [2, 3, 4], 1)
    ask(2, [2, 3, 4], 1)
    with pytest.raises(ParticipationError, match="client 2 has contributed 2 times, as often as the noise"):
        ask(9, [2, 3, 5], 2)
    one = report(Task(2, 9, 2), NOISED, digest("m 9"))
    with pytest.raises(ParticipationError, match="as often as the noise"):
        Nearby(desk).under(NOISED).examine(one.task, one.sealed, b"")
    ask(9, [0, 1, 5], 2)


def test_a_site_contributes_no_more_often_in_all_runs_than_the_helper_allows(tmp_path: Path) -> None:
    """By its key: neither another run nor another number of the client resets the count."""
    create_keys(tmp_path / "keys", ["localhost"], ["a", "b", "c", "d"], ["127.0.0.1"], 2)
    sites = read_site_keys(tmp_path / "keys" / "sites")
    names = "abcd"
    signers = {name: read_signer(tmp_path / "keys" / "sites" / name / "key")[1] for name in names}
    store = HelperStore(tmp_path / "store", KEY.public_key().public_bytes_raw().hex())

    def ask(helper: HelperService, run: bytes, who: str, first: int = 0) -> None:
        terms = new_terms(run, SIZE, minimum=3)
        those = [Task(first + place, 0, 0) for place in range(len(who))]
        made = [
            make_report([UPLOADS[0]], task, terms, KEY.public_key(), None, digest(f"{run!r}")).sealed
            for task in those
        ]
        signatures = tuple(
            signers[name](signed_statement(terms, task, seed))
            for name, task, seed in zip(who, those, made, strict=True)
        )
        sealed = tuple(SealedSeed(task, seed) for task, seed in zip(those, made, strict=True))
        helper.add(terms, SumRequest(run, 0, SIZE, sealed, signatures))

    with closing(HelperService(KEY, store, sites, 2, max_participations=2)) as helper:
        ask(helper, b"first", "abc")
        ask(helper, b"second", "abc", first=1)
        with pytest.raises(
            ParticipationError, match="2 times in all runs, as often as this helper allows"
        ) as caught:
            ask(helper, b"third", "dcb")
        assert [task.client for task in caught.value.tasks] == [1]
        ask(HelperService(KEY, store, sites, 2, max_participations=3), b"third", "dcb")


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ([], "needs fields, max_participations"),
        ({"fields": []}, "needs fields, max_participations"),
        ({"fields": [], "max_participations": 1, "min_separation": 1}, "a length and a standard deviation"),
        ({"fields": [[3]], "max_participations": 1, "min_separation": 1}, "a length and a standard"),
        ({"fields": [[3, "1"]], "max_participations": 1, "min_separation": 1}, "a length and a standard"),
        ({"fields": [[True, 1.0]], "max_participations": 1, "min_separation": 1}, "a length and a standard"),
        ({"fields": [[3, 1.0]], "max_participations": 0, "min_separation": 1}, "whole numbers"),
        ({"fields": [[3, 1.0]], "max_participations": 1, "min_separation": 1.0}, "whole numbers"),
    ],
)
def test_noise_that_is_none_is_refused(told: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_noise(told)


@pytest.mark.parametrize(
    ("noise", "sentence"),
    [
        (NOISE._replace(fields=((SIZE - 1, 1.0),)), "not for sums of 50 numbers"),
        (NOISE._replace(fields=((SIZE, 0.0),)), "above 0 that fit into 32 bits"),
        (NOISE._replace(fields=((SIZE, math.nan),)), "above 0 that fit into 32 bits"),
        (NOISE._replace(fields=((SIZE, 2.0**30),)), "above 0 that fit into 32 bits"),
        (NOISE._replace(max_participations=0), "covers no participation"),
    ],
)
def test_terms_with_noise_that_cannot_be_are_refused(noise: HelperNoise, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        dataclasses.replace(TERMS, noise=noise)
    assert read_noise(json.loads(json.dumps(write_noise(NOISE)))) == NOISE
    assert write_noise(None) is read_noise(None) is None
