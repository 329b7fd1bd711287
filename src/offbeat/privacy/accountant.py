"""Privacy accounting: the epsilon of releases, and the noise or the number of releases for an epsilon.

Everything holds between runs that differ by one client, added or removed. Releases with a `rate` are
amplified by Poisson sampling, which requires that each client is drawn for each release with that
probability, independently and in secret, and that the sum of all drawn clients is released. Those with
`slots` are amplified by random allocation: each is a group of `slots` Gaussian releases, to one of which the
client contributes, drawn uniformly and in secret. A buffer of fixed size meets neither: if a client is
absent, another takes its place. The other releases are those that one client contributes to.

Without amplification the epsilon is exact (Balle and Wang 2018, theorem 8): k releases of noise multiplier
`noise` to which a client contributes are one Gaussian release, whose sensitivity divided by its standard
deviation, the `shift`, is sqrt(k) / noise.
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from typing import Any, NamedTuple, Protocol

from scipy.optimize import brentq
from scipy.special import log_ndtr

from offbeat.errors import InputError, unknown_name
from offbeat.files import cache_root, replace_file


def gaussian_log_delta(shift: float, epsilon: float) -> float:
    """The logarithm of the least delta at this epsilon."""
    if shift == 0:
        return -math.inf
    above = float(log_ndtr(shift / 2 - epsilon / shift))
    below = epsilon + float(log_ndtr(-shift / 2 - epsilon / shift))
    # Far out in the tail both are the same number.
    return above + math.log(-math.expm1(below - above)) if below < above else -math.inf


def gaussian_epsilon(shift: float, delta: float) -> float:
    """The least epsilon at this delta, rounded up."""
    if math.isinf(shift):
        return math.inf
    target = math.log(delta)
    if gaussian_log_delta(shift, 0.0) <= target:
        return 0.0
    # delta is at most the first of its two terms, and a Gaussian's tail at most exp(-x^2 / 2).
    ceiling = shift**2 / 2 + shift * math.sqrt(-2 * target)
    root = brentq(
        lambda epsilon: max(gaussian_log_delta(shift, epsilon), -1e6) - target, 0.0, ceiling, xtol=1e-13
    )
    return float(root) * (1 + 1e-12) + 1e-12


def largest_within(
    value: Callable[[int], float], bound: float, start: int, stride: int, least: int, most: int
) -> int:
    """The largest integer from `least` to `most` whose value, which rises, is within the bound.

    The result is `least` - 1 if no value is; any other result was evaluated. `start` is a first guess.
    """
    low, high = least - 1, most + 1  # within the bound or out of range; above the bound or out of range
    below, above = -inf, inf  # their values

    def narrow(guess: int) -> bool:
        nonlocal low, high, below, above
        if low < guess < high:
            found = value(guess)
            if found <= bound:
                low, below = guess, found
                return True
            high, above = guess, found
        return guess <= low

    guess = min(max(start, least), most)
    rising = narrow(guess)
    while high - low > 1 and (low < least or high > most):  # until it lies between two values
        guess = min(guess + stride, most) if rising else max(guess - stride, least)
        narrow(guess)
        stride *= 2
    while high - low > 1:
        width = high - low
        if isfinite(below) and isfinite(above):
            guess = low + int(width * (bound - below) / (above - below))
            # If the interpolation was a good guess, its neighbour ends the search.
            narrow(guess + 1 if narrow(guess) else guess - 1)
        if high - low > width // 2:
            narrow((low + high) // 2)
    return low


_MAX_RELEASES = 10**6  # releases whose loss distributions are added up within seconds


class Releases(NamedTuple):
    """`times` Gaussian releases whose standard deviation is `noise` times the sensitivity."""

    noise: float
    times: int
    rate: float | None = None  # of Poisson sampling; None: no sampling
    slots: int | None = None  # of random allocation, to one of which the client contributes; None: none


class Accountant(Protocol):
    """A way to compose releases; its epsilon is never too small."""

    @property
    def name(self) -> str: ...

    def epsilon(self, releases: Sequence[Releases], delta: float) -> float:
        """The epsilon of the composition."""
        ...

    def rougher(self) -> "Accountant | None":
        """A faster accountant with similar results, to start a search with; None: there is none."""
        ...


@dataclass(frozen=True)
class PldAccountant:
    """Privacy loss distributions, discretised pessimistically; exact where nothing is amplified."""

    cells: int = 100_000  # of a release's loss distribution, at most

    @property
    def name(self) -> str:
        return "pld"

    def epsilon(self, releases: Sequence[Releases], delta: float) -> float:
        check_delta(delta)
        shift, sampled = _split_amplified(releases)
        if not sampled or math.isinf(shift):
            return gaussian_epsilon(shift, delta)
        times = sum(each.times for each in sampled)
        if times > _MAX_RELEASES:
            raise InputError(
                f"the pld accountant adds up at most {_MAX_RELEASES:,} releases where sampling "
                "amplifies: use rdp."
            )
        # A bound on the rounding of Fourier transforms: several times the error against the closed form.
        rounding = 1e-12 + 1e-16 * times
        if delta < 100 * rounding:
            raise InputError(
                f"delta {delta:g} is too small for the pld accountant, which counts to {100 * rounding:.2g} "
                f"with {times:,} releases where sampling "
                "amplifies: use rdp."
            )
        from dp_accounting.pld.privacy_loss_distribution import (  # seconds to import
            from_gaussian_mechanism,
        )

        def composed(each: Releases) -> Any:
            if each.slots is not None:
                return allocation_pld(each.noise, each.slots, interval).self_compose(each.times)
            sampling = 1.0 if each.rate is None else each.rate
            made = from_gaussian_mechanism(
                each.noise, value_discretization_interval=interval, sampling_prob=sampling
            )
            return made.self_compose(each.times)

        allocated = all(each.slots is not None for each in sampled)
        key = (
            f"{'fine' if self.cells > 10_000 else 'rough'} {shift!r} {delta!r} {[tuple(s) for s in sampled]}"
        )
        if allocated and (known := stored_answers().get(key)) is not None:
            return known
        interval = self._interval(sampled)
        parts = [*sampled, *([Releases(1 / shift, 1)] if shift else [])]
        total = composed(parts[0])
        for each in parts[1:]:
            total = total.compose(composed(each))
        epsilon = float(total.get_epsilon_for_delta(delta - rounding))
        if allocated:
            plain = math.hypot(shift, *(math.sqrt(each.times) / each.noise for each in sampled))
            epsilon = min(epsilon, gaussian_epsilon(plain, delta))
            store_answer(key, epsilon)
        return epsilon

    def rougher(self) -> "PldAccountant | None":
        return PldAccountant(10_000) if self.cells > 10_000 else None

    def _interval(self, sampled: Sequence[Releases]) -> float:
        """A cell size that resolves the bulk of the losses, about rate / noise, if the cells suffice."""
        allocated = [each for each in sampled if each.slots is not None]
        if allocated:
            coarser = 1.0 if self.cells > 10_000 else 8.0
            return coarser * min(allocation_interval(each.noise, each.slots or 1) for each in allocated)
        bulk = min((each.rate or 1.0) / each.noise for each in sampled)
        span = max(0.5 / each.noise**2 + 10 / each.noise for each in sampled)
        whole = sum(each.times * min(0.5, each.rate or 1.0) / each.noise**2 for each in sampled)
        return max(min(1e-3, bulk / 10), span / self.cells, whole / 1e9)


_ANSWERS = "allocation.json"
_MAX_ANSWERS = 2_000


def stored_answers() -> dict[str, float]:
    """Epsilons of random allocation that were computed before; each can take a minute."""
    try:
        held = json.loads((cache_root() / _ANSWERS).read_bytes())
        return {str(key): float(value) for key, value in held[_ALLOCATION_VERSION].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def store_answer(key: str, epsilon: float) -> None:
    """Store an answer; if that is not possible, it is computed again next time."""
    answers = dict(list(stored_answers().items())[-_MAX_ANSWERS:]) | {key: epsilon}
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        replace_file(cache_root() / _ANSWERS, json.dumps({_ALLOCATION_VERSION: answers}).encode())
    except OSError:
        pass


_ALLOCATION_VERSION = "1"  # to be changed with the computation, so that stored answers are not used
_FFT_NOISE = 0.9  # the least noise for which a linear grid suffices; below, the grid is geometric


def allocation_interval(noise: float, slots: int) -> float:
    """The cell size for the loss of one allocation; smaller cells hardly lower epsilon.

    On the linear grid each of the `slots` summands is rounded up by a cell, so a cell is a small part of the
    standard deviation of the loss divided by the number of slots.
    """
    if noise < _FFT_NOISE:
        return 0.02 / noise
    return 0.06 * math.sqrt(math.expm1(noise**-2) / slots) / slots


@lru_cache(maxsize=32)
def allocation_pld(noise: float, slots: int, interval: float) -> Any:
    """The privacy loss distribution of one Gaussian contribution to one of `slots` releases.

    An upper bound by PLD_accounting (Feldman and Shenfeld, arXiv 2602.17284), as a value of dp-accounting.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # it is quicker with numba, which it does not need
        import PLD_accounting as allocation
    fft = allocation.ConvolutionMethod.FFT if noise >= _FFT_NOISE else allocation.ConvolutionMethod.GEOM
    config = allocation.AllocationSchemeConfig(
        loss_discretization=interval,
        tail_truncation=1e-11,
        max_grid_fft=40_000_000,
        convolution_method=fft,
    )
    parameters = allocation.PrivacyParams(sigma=noise, num_steps=slots)
    return allocation.gaussian_allocation_pld(params=parameters, config=config)


@dataclass(frozen=True)
class RdpAccountant:
    """Rényi divergences at many orders: quicker, and looser."""

    @property
    def name(self) -> str:
        return "rdp"

    def epsilon(self, releases: Sequence[Releases], delta: float) -> float:
        check_delta(delta)
        shift, sampled = _split_amplified(releases)
        if math.isinf(shift):
            return math.inf
        from dp_accounting import dp_event  # seconds to import
        from dp_accounting.rdp import RdpAccountant

        if any(each.slots is not None for each in sampled):
            raise InputError("the rdp accountant does not count random allocation: use pld.")
        accountant = RdpAccountant()
        if shift:
            accountant.compose(dp_event.GaussianDpEvent(1 / shift))
        for noise, count, rate, _ in sampled:
            event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
            accountant.compose(event, count)
        return float(accountant.get_epsilon(delta)) if shift or sampled else 0.0

    def rougher(self) -> None:
        return None


_TAIL = 1e-3  # the part of delta for improbable numbers of contributions, which are not computed


def epsilon_if_seen(releases: Sequence[Releases], delta: float) -> float:
    """The epsilon against those who see which releases a client contributed to, so without amplification.

    It depends on the distribution of the draws, not on the draws themselves, which are secret: a client
    contributes once to each allocation, and under Poisson sampling a binomial number of times, over which
    delta is averaged.
    """
    check_delta(delta)
    shift, sampled = _split_amplified(releases)
    if math.isinf(shift):
        return math.inf
    for each in sampled:
        if each.slots is not None:
            shift = math.hypot(shift, math.sqrt(each.times) / each.noise)
    drawn = [each for each in sampled if each.slots is None]
    if not drawn:
        return gaussian_epsilon(shift, delta)
    if len(drawn) > 1:
        raise InputError("Poisson sampling of two kinds is not added up without amplification: use one.")
    from scipy.stats import binom  # slow to import

    noise, times, rate, _ = drawn[0]
    low, high = (int(binom.ppf(part, times, rate)) for part in (0.5, 1 - _TAIL * delta / 2))
    chances = {count: float(binom.pmf(count, times, rate)) for count in range(low + 1, high + 1)}
    chances[low] = float(binom.cdf(low, times, rate))  # of as many or fewer, which reveal no more
    left = float(binom.sf(high, times, rate))

    def log_delta(epsilon: float) -> float:
        total = left + sum(
            chance * math.exp(gaussian_log_delta(math.hypot(shift, math.sqrt(count) / noise), epsilon))
            for count, chance in chances.items()
        )
        return math.log(total) if total else -1e6

    ceiling = gaussian_epsilon(math.hypot(shift, math.sqrt(high) / noise), delta * (1 - _TAIL))
    if log_delta(0.0) <= math.log(delta):
        return 0.0
    return float(brentq(lambda epsilon: log_delta(epsilon) - math.log(delta), 0.0, ceiling)) * (1 + 1e-9)


def calibrate(
    epsilon: float,
    delta: float,
    count: int,
    rate: float | None = None,
    accountant: Accountant = PldAccountant(),
    slots: int | None = None,
) -> float:
    """The least noise multiplier for `count` releases, with an error of 0.1 %; 1e-6 without amplification.

    Args:
        epsilon: The epsilon to stay below.
        delta: The delta of the guarantee.
        count: The number of releases of a client's data.
        rate: The probability with which a client is sampled, under Poisson sampling.
        accountant: How epsilon is computed.
        slots: The releases of an epoch, under random allocation.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    if count < 1:
        raise InputError(f"noise for {count} releases cannot be found: give at least 1.")
    amplified = rate is not None or slots is not None
    grain = 1e-3 if amplified else 1e-6

    def noise(index: int) -> float:
        return math.exp(-grain * index)

    def spent(index: int) -> float:
        return accountant.epsilon([Releases(noise(index), count, rate, slots)], delta)

    rougher = accountant.rougher() if amplified else None
    if slots is not None:  # Poisson sampling at the same rate needs about the same noise
        start = calibrate(epsilon, delta, count * slots, 1 / slots, PldAccountant(10_000))
    elif rougher:
        start = calibrate(epsilon, delta, count, rate, rougher)
    elif rate:
        # The limit for many releases, shift^2 = rate^2 count (exp(1 / noise^2) - 1), with a margin.
        start = 1.5 / math.sqrt(math.log1p(1 / (calibrate(epsilon, delta, 1) ** 2 * rate**2 * count)))
    else:
        start = 1.0
    far = int(25 / grain)  # noise between 1e-11 and 1e11
    found = largest_within(spent, epsilon, -math.ceil(math.log(start) / grain), 10, -far, far)
    if found < -far:
        raise InputError(
            f"no noise brings epsilon down to {epsilon:g} by the {accountant.name} accountant: "
            "raise epsilon or delta."
        )
    return noise(found)


def max_releases(
    epsilon: float,
    delta: float,
    noise: float,
    rate: float | None = None,
    accountant: Accountant = PldAccountant(),
    most: int = _MAX_RELEASES,
    before: Sequence[Releases] = (),
    slots: int | None = None,
) -> int:
    """The number of releases, at most `most`, that fit the budget after those that were made `before`."""
    check_epsilon(epsilon)

    def spent(count: int) -> float:
        return accountant.epsilon([*before, Releases(noise, count, rate, slots)], delta)

    rougher = None if rate is None else accountant.rougher()
    if rougher:
        start = max_releases(epsilon, delta, noise, rate, rougher, most, before)
    else:
        start = most if 1 <= most <= 10**5 and spent(most) <= epsilon else 1
    return largest_within(spent, epsilon, start, max(1, start // 100), 1, most)


def round_up(noise: float, digits: int = 4) -> float:
    """The noise rounded up to a number of significant digits."""
    unit = 10.0 ** (math.floor(math.log10(noise)) + 1 - digits)
    return float(f"{math.ceil(noise / unit) * unit:.{digits}g}")


def check_epsilon(epsilon: float) -> None:
    """Reject an epsilon that is not positive and finite."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InputError(f"epsilon is {epsilon:g}: give a finite number above 0.")


def check_delta(delta: float) -> None:
    """Reject a delta outside (0, 1)."""
    if not 0 < delta < 1:
        raise InputError(f"delta is {delta:g}: give a number between 0 and 1, such as 1e-7.")


def _split_amplified(releases: Sequence[Releases]) -> tuple[float, list[Releases]]:
    """The shift of all releases without amplification, and the amplified releases."""
    shift, sampled = 0.0, []
    for each in releases:
        noise, count, rate, slots = each
        if not noise >= 0 or count < 0 or not (rate is None or 0 <= rate <= 1) or (slots or 1) < 1:
            raise InputError(
                f"{count} releases of noise {noise:g} at rate {rate} cannot be added up: "
                "no number may be negative and the rate at most 1."
            )
        if slots is not None and rate is not None:
            raise InputError("a release is either Poisson-sampled or allocated: give a rate or slots.")
        if count == 0 or rate == 0 or math.isinf(noise):
            continue
        if noise == 0:
            shift = math.inf
        elif rate == 1 or (rate is None and slots in (None, 1)):
            shift = math.hypot(shift, math.sqrt(count) / noise)
        else:
            sampled.append(each)
    return shift, sampled


def parse_accountant(text: str) -> Accountant:
    """The accountant of a name, `pld` or `rdp`."""
    for accountant in (PldAccountant(), RdpAccountant()):
        if text == accountant.name:
            return accountant
    raise unknown_name("accountant", text, ("pld", "rdp"))
