import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.report.trace import UniformBins

ENDS = st.floats(0.01, 1e6)
SHARES = st.lists(st.tuples(st.floats(0, 1.2), st.floats(0, 1.2)), max_size=20)


@given(ENDS, st.integers(1, 30), SHARES)
def test_presence_is_the_overlap_of_every_interval_with_every_stretch(
    end: float, count: int, shares: list[tuple[float, float]]
) -> None:
    bins = UniformBins(end, count)
    pairs = [(end * min(pair), end * max(pair)) for pair in shares]
    since, until = (np.array([pair[side] for pair in pairs], dtype=float) for side in (0, 1))
    expected = [
        sum(
            max(0.0, min(until, end * (n + 1) / count) - max(since, end * n / count))
            for since, until in pairs
        )
        for n in range(count)
    ]
    np.testing.assert_allclose(bins.overlap(since, until), expected, atol=1e-9 * end * (1 + len(pairs)))


@given(ENDS, st.integers(1, 30), st.lists(st.floats(-1, 3), max_size=20))
def test_every_number_is_in_one_stretch(end: float, count: int, shares: list[float]) -> None:
    tally = UniformBins(end, count).counts(end * np.array(shares, dtype=float))
    assert len(tally) == count
    assert tally.sum() == len(shares)


def test_numbers_far_outside_belong_to_the_ends() -> None:
    assert UniformBins(1.0, 3).counts(np.array([-1e300, 1e300])).tolist() == [1, 0, 1]


def test_a_number_is_in_the_stretch_that_holds_it() -> None:
    assert UniformBins(10.0, 5).counts(np.array([0.0, 1.9, 2.1, 9.9])).tolist() == [2, 1, 0, 0, 1]
