import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.server.validation import NormGuard, UploadNorms


def norms(norm: float, statistic: float = 1.0, kind: str = "Upload") -> UploadNorms:
    return UploadNorms(kind, {"delta": norm}, {"running_mean": statistic})


def knowing(count: int, norm: float = 2.0, most: float | None = None) -> NormGuard:
    lengths = NormGuard(most, model_norm=3.0)
    for _ in range(count):
        lengths.check(norms(norm))
        lengths.add(norms(norm))
    return lengths


def rejects(lengths: NormGuard, given: UploadNorms) -> bool:
    try:
        lengths.check(given)
    except Rejected as rejected:
        return rejected.reason is Reason.NORM
    return False


def test_before_one_is_known_only_what_is_far_from_any_model_is_rejected() -> None:
    lengths = knowing(0)
    assert not rejects(lengths, norms(4e6))
    assert rejects(lengths, norms(4.1e6))


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_before_ten_are_known_a_thousand_times_their_median_is_the_most(count: int) -> None:
    lengths = knowing(count)
    assert not rejects(lengths, norms(2000.0, statistic=1000.0))
    assert rejects(lengths, norms(2001.0))
    assert rejects(lengths, norms(2.0, statistic=1001.0))


def test_a_huge_first_one_does_not_let_another_in_once_an_honest_one_is_known() -> None:
    lengths = NormGuard(None, model_norm=3.0)
    for norm in (4e6, 2.0):
        lengths.check(norms(norm))
        lengths.add(norms(norm))
    assert rejects(lengths, norms(2001.0))


def test_zeros_at_first_do_not_keep_out_a_hundred_times_the_model() -> None:
    lengths = knowing(2, norm=0.0)
    assert not rejects(lengths, norms(400.0))
    assert rejects(lengths, norms(401.0))


def test_known_ones_never_raise_the_first_limit() -> None:
    assert rejects(knowing(1, norm=4e6), norms(4.1e6))


def test_from_ten_on_a_hundred_times_the_median_is_the_most() -> None:
    lengths = knowing(10)
    assert not rejects(lengths, norms(200.0))
    assert rejects(lengths, norms(201.0))
    assert rejects(lengths, norms(2.0, statistic=401.0))
    assert rejects(lengths, norms(float("inf")))
    assert rejects(lengths, norms(float("nan")))


def test_kinds_of_uploads_are_not_compared() -> None:
    assert not rejects(knowing(10), norms(1e5, kind="start Upload"))


def test_where_all_were_nothing_something_small_is_let_in() -> None:
    lengths = knowing(20, norm=0.0)
    assert not rejects(lengths, norms(0.04))
    assert rejects(lengths, norms(0.05))


def test_a_few_long_ones_do_not_raise_what_is_usual() -> None:
    lengths = knowing(10)
    for _ in range(9):
        lengths.add(norms(200.0))
    assert rejects(lengths, norms(201.0))


def test_only_recent_ones_count() -> None:
    lengths = knowing(100, norm=2.0)
    for _ in range(60):
        lengths.add(norms(100.0))
    assert not rejects(lengths, norms(1e4))
    assert len(lengths.save()["Upload.delta"]) == 100


def test_a_most_of_the_settings_takes_the_place_of_what_is_usual() -> None:
    lengths = knowing(20, norm=2.0, most=3.0)
    assert not rejects(lengths, norms(3.0))
    assert rejects(lengths, norms(3.1))
    assert not rejects(lengths, norms(3.0, statistic=30.0))  # which are no updates


def test_nobody_looks_where_it_is_switched_off() -> None:
    assert not rejects(knowing(20, most=0), norms(1e300, 1e300))


@given(st.lists(st.floats(0, 1e3), max_size=150), st.lists(st.floats(0, 1e3), max_size=20), st.floats(0, 1e6))
def test_a_resumed_run_judges_as_the_one_before_it_would_have(
    before: list[float], since: list[float], norm: float
) -> None:
    one = NormGuard(None, 1.0)
    for each in before:
        one.add(norms(each))
    other = NormGuard(None, 1.0)
    for each in since:
        other.add(norms(each))
    other.load(json.loads(json.dumps(one.save())))
    for each in since:
        one.add(norms(each))
    assert one.save() == other.save()
    assert rejects(one, norms(norm)) == rejects(other, norms(norm))


def test_the_sentence_says_what_to_do() -> None:
    with pytest.raises(Rejected, match=r"delta has norm 500, above 200: .* max_update_norm of \[network\]"):
        knowing(10).check(norms(500.0))
