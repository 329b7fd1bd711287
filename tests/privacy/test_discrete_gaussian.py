"""The discrete Gaussian sampler against the exact distribution, in the bulk, the tails and digit by digit."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy.stats import binom, chi2

from offbeat.errors import InputError
from offbeat.privacy import mechanism as module
from offbeat.privacy.mechanism import discrete_gaussian

KEY = bytes(range(32))
COUNT = 1_000_000


def exact(deviation: float) -> tuple[np.ndarray, np.ndarray]:
    """All values with a probability above 1e-40, and their probabilities, summed with 50 digits."""
    reach = math.ceil(14 * deviation) + 1
    with mpmath.workdps(50):
        weights = [
            mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * mpmath.mpf(deviation) ** 2)) for k in range(reach + 1)
        ]
        total = weights[0] + 2 * mpmath.fsum(weights[1:])
        half = [float(weight / total) for weight in weights]
    return np.arange(-reach, reach + 1), np.array([*half[:0:-1], *half])


@pytest.mark.parametrize("deviation", [0.3, 0.5, 1.0, 1.7, 4.0, 11.3])
def test_every_value_occurs_as_often_as_it_should(deviation: float) -> None:
    values, chances = exact(deviation)
    drawn = discrete_gaussian(KEY, b"bulk", deviation, COUNT)
    common = chances * COUNT >= 10
    counts = np.array([np.count_nonzero(drawn == value) for value in values[common]])
    expected = chances[common] * COUNT
    rest, rest_expected = COUNT - counts.sum(), COUNT - expected.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert chi2.sf(statistic, len(counts) - 1) > 1e-4
    assert abs(rest - rest_expected) <= 5 * math.sqrt(rest_expected) + 5


@pytest.mark.parametrize("deviation", [0.5, 1.0, 3.0, 40.0, 65_536.0 * 1.3])
def test_variance_and_tails_are_those_of_the_exact_distribution(deviation: float) -> None:
    drawn = discrete_gaussian(KEY, b"tails", deviation, COUNT)
    if deviation < 100:
        values, chances = exact(deviation)
        variance = float((chances * values.astype(float) ** 2).sum())
        fourth = float((chances * values.astype(float) ** 4).sum())
        tails = [(place, float(chances[np.abs(values) >= place * deviation].sum())) for place in (1, 2, 3, 4)]
    else:  # the sum over integers is the integral, to less than exp(-2 pi^2 sigma^2)
        variance, fourth = deviation**2, 3 * deviation**4
        tails = [
            (place, math.erfc((math.ceil(place * deviation) - 0.5) / deviation / math.sqrt(2)))
            for place in (1, 2, 3, 4)
        ]
    spread = math.sqrt((fourth - variance**2) / COUNT)
    assert abs(np.mean(drawn.astype(float) ** 2) - variance) < 4 * spread
    assert abs(drawn.mean()) < 4 * math.sqrt(variance / COUNT)
    for place, chance in tails:
        found = int(np.count_nonzero(np.abs(drawn) >= place * deviation))
        assert binom.cdf(found, COUNT, chance) > 1e-4
        assert binom.sf(found - 1, COUNT, chance) > 1e-4


def test_a_coin_of_floats_is_the_coin_of_exact_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding could decide, and here that is said of almost all, digits do; the draws are the same."""
    usual = discrete_gaussian(KEY, b"digits", 2.7, 3000)
    monkeypatch.setattr(module, "_RELATIVE_ERROR", 0.3)
    assert np.array_equal(discrete_gaussian(KEY, b"digits", 2.7, 3000), usual)


def test_the_tail_of_the_candidates_is_decided_by_digits_where_words_are_not_enough() -> None:
    thresholds = module._tail_thresholds()
    with mpmath.workdps(60):
        floors = [int(mpmath.floor(mpmath.exp(-n) * 2**64)) for n in range(1, len(thresholds) + 1)]
    assert thresholds.tolist() == floors
    digits = module._Bits(KEY, b"", b"")
    words = np.array([2**64 - 1, floors[0] + 1, floors[0] - 1, floors[1] - 1], dtype=np.uint64)
    assert module._tail_steps(words, digits).tolist() == [0, 0, 1, 2]
    undecided = np.full(4000, floors[0], dtype=np.uint64)
    with mpmath.workdps(60):
        share = float(mpmath.exp(-1) * 2**64 - floors[0])
    below = int((module._tail_steps(undecided, digits) == 1).sum())
    assert 1e-4 < binom.cdf(below, 4000, share) < 1 - 1e-4
    smallest = module._tail_steps(np.zeros(3000, dtype=np.uint64), digits)
    assert smallest.min() >= 44
    share = math.exp(-46) * 2**64  # of the numbers below 2^-64, those below exp(-46)
    assert 1e-4 < binom.cdf(int((smallest >= 46).sum()), 3000, share) < 1 - 1e-4


@pytest.mark.parametrize(("size", "steps"), [(20, 0), (14, 1), (3, 0)])
def test_a_coin_falls_by_the_first_bits_unless_they_are_those_of_its_chance(size: int, steps: int) -> None:
    """One number of 53 bits lies astride the chance; those next to it are decided without further digits."""
    deviation, width, count = 4.7, 3, 4000
    with mpmath.workdps(60):
        exponent = mpmath.mpf(size) ** 2 / (2 * mpmath.mpf(deviation) ** 2) - steps
        chance = mpmath.exp(-exponent - mpmath.mpf(deviation) ** 2 / (2 * 4**width)) * 2**53
        floor = int(mpmath.floor(chance))
        share = float(chance - floor)

    def accepted(word: int, times: int) -> list[bool]:
        sizes, words = np.full(times, size), np.full(times, word, dtype=np.uint64)
        digits = module._Bits(KEY, b"coin", b"")
        found: list[bool] = module._accepted(
            sizes, np.full(times, steps), words, deviation, width, digits
        ).tolist()
        return found

    assert accepted(floor - 1, 1) == [True]
    assert accepted(floor + 1, 1) == [False]
    below = sum(accepted(floor, count))
    assert 1e-4 < binom.cdf(below, count, share) < 1 - 1e-4


@pytest.mark.parametrize(
    ("exponent", "bits"),
    [(Fraction(0), 20), (Fraction(1, 3), 64), (Fraction(77, 10), 200), (Fraction(500), 900)],
)
def test_bounds_of_an_exponential_hold_it(exponent: Fraction, bits: int) -> None:
    low, high = module._exp_bounds(exponent, bits)
    with mpmath.workdps(400):
        found = mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator) * mpmath.mpf(2) ** bits
        assert low <= int(mpmath.floor(found)) <= high <= low + 1


@pytest.mark.parametrize("start", [3, 700])
def test_bounds_of_an_exponential_hold_it_where_it_is_as_near_to_an_integer_as_digits_tell(
    start: int,
) -> None:
    """The exponent has one digit more than the computation, which may end on either side of the integer."""
    bits = start + 1100
    size = len(str(start))
    decimals = bits * 302 // 1000 + 30 + 1
    with mpmath.workdps(decimals + 40):
        scaled = mpmath.exp(-mpmath.mpf(start)) * mpmath.mpf(2) ** bits
        for integer in range(int(scaled), int(scaled) + 30):
            exponent = bits * mpmath.log(2) - mpmath.log(integer)
            given = Fraction(int(mpmath.nint(exponent * mpmath.mpf(10) ** decimals)), 10**decimals)
            below = mpmath.mpf(given.numerator) / given.denominator > exponent
            low, high = module._exp_bounds(given, bits)
            assert len(str(int(given))) == size
            assert low <= (integer - 1 if below else integer) <= high


def test_draws_are_a_function_of_key_and_label() -> None:
    first = discrete_gaussian(KEY, b"a", 9.0, 500)
    assert np.array_equal(first, discrete_gaussian(KEY, b"a", 9.0, 500))
    assert np.array_equal(first[:100], discrete_gaussian(KEY, b"a", 9.0, 100))
    for key, label in ((KEY, b"b"), (KEY[::-1], b"a")):
        other = discrete_gaussian(key, label, 9.0, 500)
        assert abs(np.corrcoef(first, other)[0, 1]) < 4 / math.sqrt(500)
    assert discrete_gaussian(KEY, b"a", 9.0, 0).shape == (0,)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="cannot be drawn"):
            discrete_gaussian(KEY, b"a", wrong, 5)
