"""What a helper keeps on disk: counted once, for good, whenever it is killed."""

import sqlite3
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core import Task
from offbeat.deploy.helper.server import HelperService
from offbeat.deploy.helper.store import HelperStore, RunTransaction, request_digest
from offbeat.errors import InputError
from offbeat.privacy.secure.servers import SealedSeed, SumRequest
from offbeat.privacy.secure.terms import LengthError, OverlapError, RefusedError, ReplayError, RunError
from secure_world import asked, made, new_desk, new_terms, tasks

TERMS = new_terms(b"run")


def test_what_a_page_was_told_is_there_after_it_and_in_another_process(tmp_path: Path) -> None:
    store, other = HelperStore(tmp_path / "store", "key"), HelperStore(tmp_path / "store", "key")
    with store.transaction(TERMS) as page:
        page.add(Task(1, 0, 5))
        page.mark_answered(b"digest")
        page.bind_signers({Task(1, 0, 5): "a"})
    with other.transaction(TERMS) as page:
        assert Task(1, 3, 5) in page  # a visit is a visit, whatever version it claims
        assert Task(1, 0, 4) not in page
        assert page.was_answered(b"digest")
        assert not page.was_answered(b"another")
        assert (page.signer(1), page.signer(2)) == ("a", None)
    with other.transaction(replace(TERMS, run=b"another")) as page:
        assert Task(1, 0, 5) not in page
        assert not page.was_answered(b"digest")
        assert page.signer(1) is None
    store.close()
    other.close()


def test_a_page_that_fails_was_never_begun(tmp_path: Path) -> None:
    store = HelperStore(tmp_path / "store", "key")

    def fail() -> None:
        with store.transaction(TERMS) as page:
            page.add(Task(1, 0, 5))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with store.transaction(replace(TERMS, minimum=2)) as page:  # its terms were not taken down either
        assert Task(1, 0, 5) not in page
    store.close()


def test_terms_cannot_change(tmp_path: Path) -> None:
    store = HelperStore(tmp_path / "store", "key")
    with store.transaction(TERMS):
        pass
    for other in (
        {"max_reports": 7},
        {"minimum": 2},
        {"bits": 15},
        {"weight_bits": 1},
        {"rule": "hinge:1:1"},
    ):
        with pytest.raises(RunError, match="under other terms"), store.transaction(replace(TERMS, **other)):  # type: ignore[arg-type]
            pass
    with (
        pytest.raises(LengthError, match="3 numbers, not the 2"),
        store.transaction(replace(TERMS, length=3)),
    ):
        pass
    store.close()


def test_a_store_goes_with_its_key(tmp_path: Path) -> None:
    HelperStore(tmp_path / "store", "first").close()
    store = HelperStore(
        tmp_path / "store", "second"
    )  # nothing was counted yet: as after a kill while it was made
    with store.transaction(TERMS):
        pass
    store.close()
    with pytest.raises(InputError, match="the store of a helper with another key"):
        HelperStore(tmp_path / "store", "first")
    HelperStore(tmp_path / "store", "second").close()


def test_a_file_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("something of value" * 100)
    with pytest.raises(InputError, match="cannot be used"):
        HelperStore(tmp_path / "text", "key")
    assert (tmp_path / "text").read_text() == "something of value" * 100
    base = sqlite3.connect(tmp_path / "base")
    base.execute("CREATE TABLE mine (a)")
    base.commit()
    base.close()
    with pytest.raises(InputError, match="is not the store of a helper"):
        HelperStore(tmp_path / "base", "key")
    with pytest.raises(InputError, match="cannot be used"):
        HelperStore(tmp_path / "none" / "store", "key")


def test_an_answer_that_was_lost_after_it_counted_is_given_again(tmp_path: Path) -> None:
    """Killed between the commit and the answer: only the store is left."""
    asking = TERMS, asked(tasks(1, 2, 3), TERMS)
    desk = new_desk(tmp_path / "store")
    lost = desk.add(*asking)
    desk.close()
    desk = new_desk(tmp_path / "store")
    assert desk.add(*asking) == lost
    with pytest.raises(ReplayError):
        desk.add(TERMS, asked(tasks(1, 2, 3), TERMS))
    desk.close()


@pytest.mark.parametrize("moment", ["add", "mark_answered", "bind_messages"])
def test_a_helper_that_is_killed_before_it_counted_has_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class KilledError(BaseException):
        pass

    def kill(*arguments: object) -> None:
        raise KilledError

    asking = TERMS, asked(tasks(1, 2, 3), TERMS)
    desk = new_desk(tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(RunTransaction, moment, kill)
        with pytest.raises(KilledError):
            desk.add(*asking)
    desk.close()
    desk = new_desk(tmp_path / "store")
    desk.add(TERMS, asked(tasks(1, 2, 4), TERMS))  # would overlap with what had counted
    desk.close()


def test_of_two_helpers_on_one_store_only_one_counts_a_report(tmp_path: Path) -> None:
    """Two processes, or two threads: the requests overlap, so one of them is refused."""
    desks = [new_desk(tmp_path / "store") for _ in range(2)]
    outcomes: list[str] = []

    def ask(desk: HelperService, request: SumRequest) -> None:
        try:
            desk.add(TERMS, request)
            outcomes.append("added")
        except OverlapError:
            outcomes.append("refused")

    for visit in range(5):
        requests = [asked(tasks(*who, visit=visit), TERMS) for who in ((1, 2, 3), (3, 4, 5))]
        threads = [threading.Thread(target=ask, args=pair) for pair in zip(desks, requests, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(outcomes) == ["added"] * 5 + ["refused"] * 5
    for desk in desks:
        desk.close()


@given(st.data())
def test_any_two_sums_are_of_disjoint_reports_or_of_the_same_request(data: st.DataObject) -> None:
    """Whatever is asked, with restarts in between: so no two sums differ by one report."""
    terms = new_terms(b"run", length=1, most=8, minimum=2)
    pool = {Task(c, 0, v): made(Task(c, 0, v), terms).sealed for c in range(4) for v in range(2)}
    name = st.builds(Task, st.integers(0, 3), st.just(0), st.integers(0, 1))
    given_away: dict[bytes, tuple[list[Task], bytes]] = {}
    batches = data.draw(st.lists(st.lists(name, max_size=5), max_size=10))
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches:
            desk = new_desk(Path(folder) / "store")
            request = SumRequest(b"run", 0, 1, tuple(SealedSeed(task, pool[task]) for task in batch))
            try:
                answer = desk.add(terms, request)
            except RefusedError:
                continue
            finally:
                desk.close()
            mark = request_digest(request, terms)
            if mark in given_away:
                assert given_away[mark] == (sorted(batch), answer)
            for other, (reports, _) in given_away.items():
                assert other == mark or not set(reports) & set(batch)
            assert len({task.client for task in batch}) >= 2
            given_away[mark] = (sorted(batch), answer)


def test_a_digest_tells_apart_all_that_a_sum_depends_on() -> None:
    request = asked(tasks(1, 2, 3), TERMS)
    others = [
        (request._replace(version=1), TERMS),
        (request._replace(reports=request.reports[:2]), TERMS),
        (asked(tasks(1, 2, 3), TERMS), TERMS),
        (request, replace(TERMS, run=b"ran")),
        (request, replace(TERMS, rule="hinge:1:1")),
        (request, replace(TERMS, bits=15)),
    ]
    found = {request_digest(request, TERMS), *(request_digest(*other) for other in others)}
    assert len(found) == len(others) + 1
    assert request_digest(request._replace(signatures=(b"x",) * 3), TERMS) == request_digest(request, TERMS)
    assert request_digest(request._replace(reports=request.reports[::-1]), TERMS) == request_digest(
        request, TERMS
    )


def test_a_commit_lasts_even_if_the_power_goes_just_after_it(tmp_path: Path) -> None:
    # SQLite's manual: it takes EXTRA where "the commit is followed closely by a power loss"
    store = HelperStore(tmp_path / "store", "key")
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (3,)
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    store.close()
