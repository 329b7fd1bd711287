"""Fixed point, shares, and what a single server can tell from what it is given."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chi2_contingency

from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.privacy.secure.encoding import (
    CHUNK,
    SEALED_BYTES,
    Residues,
    decode,
    encode,
    expand_seed,
    make_report,
    subtract_share,
    unseal,
)
from offbeat.privacy.secure.servers import Helper, Leader, SealedSeed, SumRequest
from offbeat.privacy.secure.terms import HelperNoise, LengthError, SecureTerms, WeightError
from oracles.fixed_point import fixed_point_sum

TERMS = SecureTerms(b"run", 3, max_reports=10, minimum=2)
KEY = X25519PrivateKey.generate()


def fading(staleness: int) -> float:
    return float(1 / (1 + staleness))


def secure_sum(
    uploads: Sequence[torch.Tensor], tasks: Sequence[Task], version: int, terms: SecureTerms
) -> Residues:
    helper = Helper(terms, KEY)
    leader = Leader(terms, helper)
    for upload, task in zip(uploads, tasks, strict=True):
        leader.take(make_report([upload], task, terms, helper.public_key))
    return leader.total(tasks, version)


COHORTS = 200  # in each of 50 examples


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 4), min_size=4, max_size=5),  # of any ages, these hide each other like two
    st.integers(1, 5),
    st.sampled_from([4, 16, 22]),
    st.sampled_from([0, 8]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**32 - 1),
)
def test_the_sums_of_10000_random_cohorts_are_the_plain_fixed_point_sums(
    ages: list[int], length: int, bits: int, weight_bits: int, dtype: torch.dtype, seed: int
) -> None:
    size = len(ages)
    terms = SecureTerms(b"run", length, size, minimum=2, bits=bits, weight_bits=weight_bits, weigh=fading)
    rng = np.random.default_rng(seed)
    scale = terms.largest * 10.0 ** rng.integers(-5, 1, (size, COHORTS, 1))
    numbers = rng.uniform(-1, 1, (size, COHORTS, length)) * scale
    numbers[:, ::7] = rng.choice([-1, 1], (COHORTS // 7 + 1, 1)) * terms.largest  # as far as it goes
    uploads = torch.from_numpy(numbers).to(dtype)
    uploads[uploads.double().abs() > terms.largest] = 0  # rounded up to float32
    helper = Helper(terms, KEY)
    leader = Leader(terms, helper)
    sums = []
    for visit in range(COHORTS):
        tasks = [Task(client, 4 - age, visit) for client, age in enumerate(ages)]
        for task in tasks:
            leader.take(make_report([uploads[task.client, visit]], task, terms, helper.public_key))
        sums.append(leader.total(tasks, 4))
    weights = [max(1, round(2**weight_bits / (1 + age))) for age in ages]
    plain = fixed_point_sum(list(uploads.double().reshape(size, -1).numpy()), weights, bits)
    found = decode(np.concatenate(sums), terms.unit).numpy()
    assert np.array_equal(found, plain / 2**weight_bits)


@given(st.integers(2, 40), st.integers(1, 24), st.integers(0, 8))
def test_no_sum_of_the_largest_values_overflows(most: int, bits: int, weight_bits: int) -> None:
    terms = SecureTerms(b"run", 1, most, 2, bits, weight_bits)
    assert most * 2**weight_bits * terms.max_units < 2**31 <= most * 2**weight_bits * (terms.max_units + 1)
    for sign in (1.0, -1.0):
        uploads = [torch.tensor([sign * terms.largest], dtype=torch.float64)] * most
        total = decode(secure_sum(uploads, [Task(c, 0, 0) for c in range(most)], 0, terms), terms.unit)
        assert total.item() == sign * most * terms.largest


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3276.85, -3276.85])
def test_a_value_that_could_make_a_sum_overflow_is_refused_at_the_client(value: float) -> None:
    assert TERMS.largest < 3276.85
    with pytest.raises(InputError, match=r"client 4 has a value of size .* holds 3276\.8 a coordinate: clip"):
        make_report([torch.tensor([0.0, value, 0.0])], Task(4, 0, 0), TERMS, KEY.public_key())


def test_an_upload_of_another_length_is_refused_at_the_client() -> None:
    with pytest.raises(LengthError, match="visit 2 of client 4 has 2 numbers, not the 3 agreed on"):
        make_report([torch.zeros(2)], Task(4, 0, 2), TERMS, KEY.public_key())


def test_an_upload_may_come_in_parts_longer_than_a_piece() -> None:
    parts = [torch.arange(CHUNK + 7) / 64, torch.zeros(0), -torch.arange(5) / 2]
    terms = SecureTerms(b"run", CHUNK + 12, max_reports=2, minimum=2)
    helper = Helper(terms, KEY)
    leader = Leader(terms, helper)
    for client in range(2):
        leader.take(make_report(parts, Task(client, 0, 0), terms, helper.public_key))
    total = decode(leader.total([Task(0, 0, 0), Task(1, 0, 0)], 0), terms.unit)
    assert torch.equal(total, 2 * torch.cat(parts).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_at_random_is_unbiased_and_goes_to_a_neighbour(dtype: torch.dtype) -> None:
    values = torch.full((100_000,), -0.3 / 16, dtype=dtype)
    out = np.empty(len(values), np.uint32)
    encode(values, 4, out, torch.Generator().manual_seed(5))
    units = torch.from_numpy(out.view(np.int32)).double()
    assert set(units.tolist()) == {-1.0, 0.0}
    assert abs(units.mean().item() + 0.3) < 5 * math.sqrt(0.3 * 0.7 / len(values))
    again = np.empty_like(out)
    encode(values, 4, again, torch.Generator().manual_seed(5))
    assert np.array_equal(out, again)


def test_rounding_at_random_leaves_alone_what_needs_none() -> None:
    values = torch.tensor([0.0, 0.25, -0.75, 2.0])
    out = np.empty(4, np.uint32)
    encode(values, 2, out, torch.Generator().manual_seed(1))
    assert out.view(np.int32).tolist() == [0, 1, -3, 8]


def test_a_stream_is_aes_in_counter_mode_whatever_its_length() -> None:
    """The first block, of a zero key, is H in test case 1 of the GCM specification (McGrew and Viega)."""
    (_, first), *_ = ((place, numbers.copy()) for place, numbers in expand_seed(bytes(16), 4))
    assert first.tobytes().hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e"
    long = np.concatenate([numbers.copy() for _, numbers in expand_seed(bytes(16), 2 * CHUNK + 1)])
    assert len(long) == 2 * CHUNK + 1
    assert np.array_equal(long[:4], first)
    assert len(np.unique(long)) > 2 * CHUNK - 20  # pieces do not repeat


def test_every_report_has_a_seed_of_its_own_and_96_sealed_bytes() -> None:
    reports = [make_report([torch.zeros(3)], Task(0, 0, 0), TERMS, KEY.public_key()) for _ in range(20)]
    assert len({made.sealed for made in reports}) == 20
    assert {len(made.sealed) for made in reports} == {SEALED_BYTES} == {96}
    assert len({unseal(made.sealed, made.task, TERMS, KEY) for made in reports}) == 20


def test_weights_are_public_whole_numbers_found_from_the_version() -> None:
    terms = SecureTerms(b"run", 1, 10, 2, weight_bits=8, weigh=fading)
    assert [terms.weight(Task(0, 5, 0), version) for version in (5, 6, 7, 5 + 10**6)] == [256, 128, 85, 1]
    assert TERMS.weight(Task(0, 0, 0), 9) == 1
    with pytest.raises(WeightError, match="started from version 5, which is after version 4"):
        terms.weight(Task(0, 5, 0), 4)


@pytest.mark.parametrize("weight", [0.0, -0.5, 1.5, math.nan])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    terms = SecureTerms(b"run", 1, 10, 2, weight_bits=8, weigh=lambda staleness: weight)
    with pytest.raises(WeightError, match="above 0 and at most 1"):
        terms.weight(Task(0, 0, 0), 0)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"run": b""}, "a run needs a name of 1 to 255 bytes"),
        ({"length": 0}, "there is nothing to sum"),
        ({"minimum": 1}, "a secure sum of 1 clients hides nobody"),
        ({"max_reports": 4}, "at most 4 reports in a sum can never be 5 clients"),
        ({"bits": 31}, "1 to 30 fractional bits, not 31"),
        ({"bits": 0}, "1 to 30 fractional bits, not 0"),
        ({"weight_bits": 17}, "0 to 16 bits, not 17"),
        ({"max_reports": 2**31}, "leave no room in 32 bits"),
    ],
)
def test_terms_that_cannot_work_are_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SecureTerms(**{"run": b"run", "length": 1, "max_reports": 10} | wrong)  # type: ignore[arg-type]


def test_terms_at_the_edge_work() -> None:
    assert SecureTerms(b"run", 1, max_reports=2**31 - 1).max_units == 1
    one = HelperNoise(((1, 50.0),), max_participations=1, min_separation=1)
    assert SecureTerms(b"run", 1, 10, noise=one).max_units == (2**31 - 1 - 600) // 10  # 12 deviations of room
    for fields in (((0, 5.0), (1, 5.0)), ((2, 5.0),), ()):
        with pytest.raises(InputError, match="not for sums of 1 numbers"):
            SecureTerms(b"run", 1, 10, noise=one._replace(fields=fields))


def test_a_binding_tells_apart_all_that_a_seed_is_good_for() -> None:
    terms, task = SecureTerms(b"run", 3, 10), Task(1, 2, 3)
    others = [
        SecureTerms(b"ran", 3, 10).binding(task),
        SecureTerms(b"run2", 3, 10).binding(task),
        SecureTerms(b"run", 4, 10).binding(task),
        SecureTerms(b"run", 3, 11).binding(task),
        SecureTerms(b"run", 3, 10, minimum=6).binding(task),
        SecureTerms(b"run", 3, 10, bits=15).binding(task),
        SecureTerms(b"run", 3, 10, weight_bits=1).binding(task),
        SecureTerms(b"run", 3, 10, rule="ab").binding(task),
        SecureTerms(b"run", 3, 10, clipping="ab").binding(task),
        SecureTerms(b"run", 3, 10, rule="a", clipping="b").binding(task),
        *(
            SecureTerms(b"run", 3, 10, noise=HelperNoise(*noise)).binding(task)
            for noise in ((((3, 5.0),), 1, 1), (((3, 6.0),), 1, 1), (((3, 5.0),), 2, 1), (((3, 5.0),), 1, 2))
        ),
        *(terms.binding(other) for other in (Task(2, 2, 3), Task(1, 3, 3), Task(1, 2, 4))),
    ]
    assert len({terms.binding(task), *others}) == len(others) + 1


# What the leader alone sees is its share. Two inputs as different as can be: all zero, and a large ramp.
LENGTH = 200_000
INPUTS = (np.zeros(LENGTH, np.uint32), np.arange(LENGTH, dtype=np.uint32) * np.uint32(9973))
SEEDS = (bytes(range(16)), bytes(range(16, 32)))


def shares(split: Callable[[Residues, bytes], None]) -> list[Residues]:
    found = [encoded.copy() for encoded in INPUTS]
    for share, seed in zip(found, SEEDS, strict=True):
        split(share, seed)
    return found


def tells_apart(views: Sequence[Residues]) -> bool:
    """Whether any byte of a share is not uniform, differs between inputs, or goes with its input's byte."""
    limit = 1e-6
    for byte in range(4):
        counts = [np.bincount((view >> (8 * byte)).astype(np.uint8), minlength=256) for view in views]
        for count in counts:
            if chi2.sf(((count - LENGTH / 256) ** 2 / (LENGTH / 256)).sum(), 255) < limit:
                return True
        if chi2_contingency(np.array(counts)).pvalue < limit:
            return True
        own = (INPUTS[1] >> (8 * byte)).astype(np.uint8) >> 4
        pairs = np.zeros((16, 16))
        np.add.at(pairs, (own, (views[1] >> (8 * byte)).astype(np.uint8) >> 4), 1)
        if chi2_contingency(pairs[pairs.any(1)]).pvalue < limit:
            return True
    return False


def test_the_leaders_share_alone_does_not_tell_two_inputs_apart() -> None:
    assert not tells_apart(shares(subtract_share))


def narrow(residues: Residues, seed: bytes) -> None:
    """A mask of 24 bits leaves the top of a number in sight."""
    for place, numbers in expand_seed(seed, len(residues)):
        residues[place] -= numbers & np.uint32(0xFFFFFF)


def repeated(residues: Residues, seed: bytes) -> None:
    """One block of mask for all numbers."""
    for _, numbers in expand_seed(seed, 4):
        residues -= np.resize(numbers, len(residues))


def at_times(residues: Residues, seed: bytes) -> None:
    """One number in twenty goes out as it is."""
    for place, numbers in expand_seed(seed, len(residues)):
        numbers[::20] = 0
        residues[place] -= numbers


@pytest.mark.parametrize("broken", [narrow, repeated, at_times, lambda residues, seed: None])
def test_a_broken_way_to_split_is_caught(broken: Callable[[Residues, bytes], None]) -> None:
    assert tells_apart(shares(broken))


def test_what_the_helper_sees_does_not_depend_on_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same seed it is given the same seed, in as many bytes, and adds the same."""
    monkeypatch.setattr("offbeat.privacy.secure.encoding.secrets.token_bytes", lambda count: SEEDS[0][:count])
    task, other = Task(0, 0, 0), Task(1, 0, 0)
    answers = []
    for values in (torch.zeros(3), torch.tensor([5.0, -3000.0, 0.1])):
        made = [make_report([values], one, TERMS, KEY.public_key()) for one in (task, other)]
        assert [unseal(one.sealed, one.task, TERMS, KEY) for one in made] == [SEEDS[0]] * 2
        assert {len(one.sealed) for one in made} == {SEALED_BYTES}
        sealed = tuple(SealedSeed(one.task, one.sealed) for one in made)
        answers.append(Helper(TERMS, KEY).add(SumRequest(b"run", 0, 3, sealed)))
    assert np.array_equal(*answers)


def test_two_reports_of_one_upload_have_nothing_in_common() -> None:
    upload = torch.linspace(-3, 3, 3000)
    terms = SecureTerms(b"run", 3000, max_reports=10)
    first, second = (make_report([upload], Task(0, 0, 0), terms, KEY.public_key()).share for _ in range(2))
    assert (first == second).sum() < 10
    assert len(np.unique(first - second)) > 2990
