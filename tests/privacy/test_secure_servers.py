"""The helper, and whoever tries to get more from it than it should give."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.privacy.secure.encoding import Report, decode, make_report
from offbeat.privacy.secure.servers import (
    Helper,
    Leader,
    SealedSeed,
    SeenReportRanges,
    SumRequest,
    add_noise,
    effective_cohort,
)
from offbeat.privacy.secure.terms import (
    BindingError,
    HelperNoise,
    LengthError,
    LongBatchError,
    MalformedError,
    OverlapError,
    RefusedError,
    ReplayError,
    RunError,
    SecureTerms,
    ShortBatchError,
    WeightError,
)
from offbeat.schedule.staleness import Polynomial

TERMS = SecureTerms(b"run", 2, max_reports=6, minimum=3)
KEY = X25519PrivateKey.generate()


def made(task: Task, value: float = 1.0, terms: SecureTerms = TERMS) -> Report:
    return make_report([torch.full((terms.length,), value)], task, terms, KEY.public_key())


def tasks(*clients: int, version: int = 0, visit: int = 0) -> list[Task]:
    return [Task(client, version, visit) for client in clients]


def asked(batch: list[Task], terms: SecureTerms = TERMS) -> SumRequest:
    sealed = tuple(SealedSeed(task, made(task, terms=terms).sealed) for task in batch)
    return SumRequest(terms.run, 0, terms.length, sealed)


def refuses(helper: Helper, request: SumRequest, kind: type[RefusedError], sentence: str) -> None:
    """With just that type, and without a trace in what it has counted."""
    before = helper.save()
    with pytest.raises(kind, match=sentence) as caught:
        helper.add(request)
    assert type(caught.value) is kind
    assert isinstance(caught.value, InputError)
    assert helper.save() == before


def test_a_batch_that_comes_again_is_refused() -> None:
    helper = Helper(TERMS, KEY)
    helper.add(asked(tasks(1, 2, 3)))
    refuses(helper, asked(tasks(1, 2, 3)), ReplayError, "all of this batch was added before")


def test_a_part_of_a_batch_that_comes_again_is_refused() -> None:
    helper = Helper(TERMS, KEY)
    helper.add(asked(tasks(1, 2, 3, 4)))
    refuses(helper, asked(tasks(1, 2, 3)), ReplayError, "all of this batch was added before")


def test_a_report_that_is_named_twice_in_a_batch_is_refused() -> None:
    request = asked([*tasks(1, 2, 3), Task(2, 0, 0)])
    refuses(Helper(TERMS, KEY), request, ReplayError, "visit 0 of client 2 is named twice")


def test_a_visit_that_was_sealed_for_two_versions_counts_once() -> None:
    request = asked([*tasks(1, 2, 3), Task(2, 1, 0)])._replace(version=1)
    refuses(Helper(TERMS, KEY), request, ReplayError, "visit 0 of client 2 is named twice")


@pytest.mark.parametrize("second", [tasks(1, 2, 4), tasks(1, 2, 3, 4), tasks(3, 4, 5, 6)])
def test_a_batch_that_overlaps_with_one_before_is_refused(second: list[Task]) -> None:
    helper = Helper(TERMS, KEY)
    helper.add(asked(tasks(1, 2, 3)))
    refuses(helper, asked(second), OverlapError, "of this batch was added before")


@pytest.mark.parametrize("batch", [[], tasks(1), tasks(1, 2), [*tasks(1, 2), Task(2, 0, 1), Task(2, 0, 2)]])
def test_too_few_distinct_clients_are_refused(batch: list[Task]) -> None:
    sentence = "at least 3 distinct clients, not [012]: wait for more"
    refuses(Helper(TERMS, KEY), asked(batch), ShortBatchError, sentence)


def test_more_reports_than_were_agreed_on_are_refused() -> None:
    refuses(Helper(TERMS, KEY), asked(tasks(*range(7))), LongBatchError, "might overflow: ask for at most 6")


@pytest.mark.parametrize(
    "other",
    [
        Task(4, 0, 0),
        Task(3, 1, 0),
        Task(3, 0, 1),
        replace(TERMS, run=b"ran"),
        replace(TERMS, length=3),
        replace(TERMS, bits=15),
        replace(TERMS, clipping="other bounds"),
    ],
)
def test_a_seed_that_was_sealed_for_something_else_is_refused(other: Task | SecureTerms) -> None:
    task, terms = (other, TERMS) if isinstance(other, Task) else (Task(3, 0, 0), other)
    stolen = SealedSeed(Task(3, 0, 0), made(task, terms=terms).sealed)
    request = asked(tasks(1, 2))
    request = request._replace(reports=(*request.reports, stolen))
    refuses(Helper(TERMS, KEY), request, BindingError, "the seed given for visit 0 of client 3 does not open")


def test_a_seed_that_was_sealed_to_another_helper_is_refused() -> None:
    another = Helper(TERMS, X25519PrivateKey.generate())
    refuses(another, asked(tasks(1, 2, 3)), BindingError, "does not open")


@given(st.integers(0, 95), st.integers(1, 255))
def test_a_seed_that_was_changed_on_its_way_is_refused_and_its_report_is_named(place: int, flip: int) -> None:
    request = asked(tasks(1, 2, 3))
    task, seed = request.reports[1]
    changed = seed[:place] + bytes([seed[place] ^ flip]) + seed[place + 1 :]
    request = request._replace(reports=(request.reports[0], SealedSeed(task, changed), request.reports[2]))
    with pytest.raises(BindingError) as caught:
        Helper(TERMS, KEY).add(request)
    assert caught.value.tasks == (task,)


@pytest.mark.parametrize("seed", [b"", bytes(95), bytes(97)])
def test_what_is_no_sealed_seed_is_refused(seed: bytes) -> None:
    request = asked(tasks(1, 2, 3))
    request = request._replace(reports=(*request.reports[:2], SealedSeed(Task(3, 0, 0), seed)))
    refuses(Helper(TERMS, KEY), request, MalformedError, "not 96 sealed bytes")


def test_96_bytes_that_nobody_sealed_are_refused() -> None:
    request = asked(tasks(1, 2, 3))
    request = request._replace(reports=(*request.reports[:2], SealedSeed(Task(3, 0, 0), bytes(96))))
    refuses(Helper(TERMS, KEY), request, BindingError, "does not open")


@pytest.mark.parametrize("task", [Task(-1, 0, 0), Task(1, -1, 0), Task(1, 0, -1), Task(1, 0, 2**63)])
def test_what_names_no_report_is_refused(task: Task) -> None:
    request = asked(tasks(1, 2, 3))
    request = request._replace(reports=(*request.reports[:2], SealedSeed(task, bytes(96))))
    refuses(Helper(TERMS, KEY), request, MalformedError, "does not name a report")


def test_another_run_and_another_length_are_refused() -> None:
    helper = Helper(TERMS, KEY)
    refuses(helper, asked(tasks(1, 2, 3))._replace(run=b"ran"), RunError, "another run")
    refuses(helper, asked(tasks(1, 2, 3))._replace(length=3), LengthError, "3 numbers, not the 2 agreed on")


def test_a_report_from_the_future_and_a_weight_out_of_range_are_refused() -> None:
    refuses(Helper(TERMS, KEY), asked(tasks(1, 2, 3, version=1)), WeightError, "after version 0")
    heavy = replace(TERMS, weigh=lambda staleness: 2.0)
    refuses(Helper(heavy, KEY), asked(tasks(1, 2, 3)), WeightError, "has weight 2")


SLOW = replace(TERMS, bits=8, weight_bits=14, weigh=Polynomial(0.5))


def test_a_report_that_outweighs_the_others_is_refused_whatever_their_number() -> None:
    """Else a leader that makes up versions would find one upload in a sum of many."""
    steep = replace(TERMS, bits=8, weight_bits=14, weigh=Polynomial(9.0))
    batch = [*tasks(1, 2, 3, 4, 5), Task(6, 5, 0)]
    request = asked(batch, steep)._replace(version=5)
    assert [steep.weight(task, 5) for task in batch] == [1, 1, 1, 1, 1, 1 << 14]
    sentence = "hide each other like 1 clients of equal weight, and the helper wants 3"
    refuses(Helper(steep, KEY), request, ShortBatchError, sentence)
    twice = [*tasks(1, 2, 3), Task(6, 5, 0), Task(6, 5, 1)]
    refuses(Helper(steep, KEY), asked(twice, steep)._replace(version=5), ShortBatchError, sentence)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 255)), min_size=3, max_size=6, unique=True))
def test_a_sum_needs_an_effective_cohort_of_the_minimum(reports: list[tuple[int, int]]) -> None:
    """By (sum w)^2 / sum w^2, with the weight of a client that reports twice counted once."""
    batch = [Task(client, 255 - age, visit) for visit, (client, age) in enumerate(reports)]
    whole = np.zeros(5, dtype=np.int64)
    for client, age in reports:
        whole[client] += round(2**14 / np.sqrt(1 + age))
    request = asked(batch, SLOW)._replace(version=255)
    if whole.sum() ** 2 >= 3 * (whole**2).sum():
        Helper(SLOW, KEY).add(request)
    else:
        refuses(Helper(SLOW, KEY), request, ShortBatchError, "distinct clients|hide each other like")


def test_an_effective_cohort_is_at_most_the_number_of_clients() -> None:
    assert effective_cohort(tasks(1, 2, 3), [7, 7, 7]) == 3
    assert effective_cohort([*tasks(1, 2), Task(2, 0, 1)], [2, 1, 1]) == 2
    assert effective_cohort(tasks(1, 2, 3, 4, 5), [256, 16, 16, 16, 16]) == Fraction(320**2, 256**2 + 4 * 256)


def test_a_stale_report_is_added_beside_enough_others_and_does_not_count_as_one() -> None:
    stale = Task(9, 0, 0)
    sentence = "like 2.12 clients"
    few, many = ([stale, *tasks(*range(count), version=256)] for count in (2, 3))
    refuses(Helper(SLOW, KEY), asked(few, SLOW)._replace(version=256), ShortBatchError, sentence)
    Helper(SLOW, KEY).add(asked(many, SLOW)._replace(version=256))


def test_after_a_refusal_the_others_can_be_summed_without_the_report_at_fault() -> None:
    leader = Leader(TERMS, Helper(TERMS, KEY))
    batch = tasks(1, 2, 3, 4)
    for task in batch[:3]:
        leader.take(made(task, task.client))
    leader.take(made(batch[3])._replace(sealed=bytes(96)))
    with pytest.raises(BindingError) as caught:
        leader.total(batch, 0)
    assert caught.value.tasks == (batch[3],)
    leader.forget(caught.value.tasks)
    assert decode(leader.total(batch[:3], 0), TERMS.unit).tolist() == [6.0, 6.0]


def test_a_client_with_two_visits_in_a_batch_adds_both() -> None:
    leader = Leader(TERMS, Helper(TERMS, KEY))
    batch = [*tasks(1, 2, 3, 4), Task(3, 0, 1)]
    for task in batch:
        leader.take(made(task, 0.5))
    assert decode(leader.total(batch, 0), TERMS.unit).tolist() == [2.5, 2.5]


def test_the_leader_refuses_what_it_cannot_add() -> None:
    leader = Leader(TERMS, Helper(TERMS, KEY))
    good = made(Task(1, 0, 0))
    with pytest.raises(LengthError, match=r"has shape \(3,\), not \(2,\)"):
        leader.take(good._replace(share=np.zeros(3, np.uint32)))
    with pytest.raises(MalformedError, match="is float64, not uint32"):
        leader.take(good._replace(share=np.zeros(2)))  # type: ignore[arg-type]
    with pytest.raises(MalformedError, match="not 96 sealed bytes"):
        leader.take(good._replace(sealed=b"seed"))
    leader.take(good)
    with pytest.raises(ReplayError, match="visit 0 of client 1 has reported already"):
        leader.take(good)
    with pytest.raises(MalformedError, match="visit 0 of client 2 has not reported"):
        leader.total(tasks(1, 2, 3), 0)


def test_the_fields_of_a_sum_get_noise_of_their_own() -> None:
    """If two had the same, their difference would be free of noise."""
    noise = HelperNoise(((500, 40.0), (500, 40.0)), max_participations=1, min_separation=1)
    first, second = (
        add_noise(np.zeros(1000, np.uint32), noise, b"key", b"sum").astype(np.int32).reshape(2, 500)
    )
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(500)
    assert (first - second).std() == pytest.approx(40 * np.sqrt(2), rel=0.2)


def test_a_helper_that_was_saved_as_json_and_loaded_remembers() -> None:
    helper = Helper(TERMS, KEY)
    helper.add(asked(tasks(1, 2, 3)))
    after = Helper(TERMS, KEY)
    after.add(asked(tasks(7, 8, 9)))
    after.load(json.loads(json.dumps(helper.save())))
    refuses(after, asked(tasks(1, 2, 3)), ReplayError, "added before")
    refuses(after, asked(tasks(7, 8, 9)), ReplayError, "added before")
    after.add(asked(tasks(1, 2, 3, visit=1)))


@given(st.data())
def test_any_two_sums_of_a_helper_are_of_disjoint_reports_and_enough_clients(data: st.DataObject) -> None:
    """So that no two of them differ by one report, whatever is asked for, and however often."""
    terms = SecureTerms(b"run", 1, max_reports=8, minimum=2)
    name = st.builds(Task, st.integers(0, 3), st.just(0), st.integers(0, 2))
    pool = {Task(c, 0, v): made(Task(c, 0, v), terms=terms).sealed for c in range(4) for v in range(3)}
    helper, given_away = Helper(terms, KEY), []
    for batch in data.draw(st.lists(st.lists(name, max_size=6), max_size=12)):
        try:
            helper.add(SumRequest(b"run", 0, 1, tuple(SealedSeed(task, pool[task]) for task in batch)))
        except RefusedError:
            continue
        given_away.append(set(batch))
    for place, one in enumerate(given_away):
        assert len({task.client for task in one}) >= 2
        assert all(one.isdisjoint(other) for other in given_away[:place])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=30), st.integers(0, 30))
def test_what_is_counted_is_a_set_in_ranges_that_survives_saving(
    reports: list[tuple[int, int]], cut: int
) -> None:
    first, second = SeenReportRanges(), SeenReportRanges()
    for place, (client, visit) in enumerate(reports):
        (first if place < cut else second).add(Task(client, 0, visit))
    first.load(json.loads(json.dumps(second.save())))
    found = {(c, v) for c in range(3) for v in range(14) if Task(c, 0, v) in first}
    assert found == set(reports)
    ranges = sum((client, visit - 1) not in found for client, visit in found)
    assert len(first.save()["bounds"]) == 2 * ranges


def test_a_client_that_always_counts_takes_one_range() -> None:
    counted = SeenReportRanges()
    for visit in range(1000):
        counted.add(Task(5, 0, visit))
    assert counted.save() == {"clients": [5], "sizes": [2], "bounds": [0, 1000]}
