"""The epsilon of random allocation, against PLD_accounting's own composition and against simulation."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.random import Generator

from offbeat.errors import InputError
from offbeat.privacy.accountant import (
    PldAccountant,
    Releases,
    calibrate,
    epsilon_if_seen,
    gaussian_epsilon,
    stored_answers,
)

# Lower and upper bound of `PLD_accounting.gaussian_allocation_epsilon_configurable` 2.0 with the geometric
# convolution, cells of 0.03 to 0.1 and a tail of 1e-11, for noise, k contributions in t releases, and delta.
BOUNDS = {
    (1.0, 1, 100, 1e-6): (0.8434, 0.8707),
    (1.0, 4, 400, 1e-6): (1.2933, 1.3287),
    (0.7, 1, 50, 1e-5): (2.7959, 2.8075),
    (1.0, 10, 100, 1e-5): (6.0980, 6.1318),
    (1.5, 4, 80, 1e-6): (1.4942, 1.5155),
    (0.6, 4, 400, 1e-6): (5.8411, 5.8887),
}


@pytest.fixture(autouse=True)
def _own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))


def epsilon(noise: float, selected: int, releases: int, delta: float) -> float:
    slots = releases // selected
    assert slots * selected == releases
    return PldAccountant().epsilon([Releases(noise, selected, slots=slots)], delta)


@pytest.mark.slow
@pytest.mark.parametrize("setting", BOUNDS)
def test_epsilon_is_that_of_pld_accounting(setting: tuple[float, int, int, float]) -> None:
    lower, upper = BOUNDS[setting]
    found = epsilon(*setting)
    assert lower <= found
    assert found <= 1.02 * upper


def test_quick_settings_are_that_of_pld_accounting() -> None:
    setting = (1.0, 1, 100, 1e-6)
    assert BOUNDS[setting][0] <= epsilon(*setting) <= 1.02 * BOUNDS[setting][1]


def losses(noise: float, slots: int, times: int, count: int, rng: Generator, *, present: bool) -> np.ndarray:
    """Samples of the privacy loss of `times` allocations, present against absent, by the densities."""
    total = np.zeros(count)
    for _ in range(times):
        y = rng.normal(scale=noise, size=(count, slots))
        if present:
            y[:, 0] += 1.0  # by symmetry it does not matter which
        logs = y / noise**2 - 0.5 / noise**2
        total += np.log(np.exp(logs).mean(1))
    return total if present else -total


@pytest.mark.parametrize(("noise", "slots", "times"), [(1.0, 20, 3), (1.5, 10, 1), (0.7, 50, 2)])
@pytest.mark.parametrize("present", [True, False])
def test_simulated_losses_are_not_above_the_epsilon(
    noise: float, slots: int, times: int, present: bool
) -> None:
    # P(loss) and E[(1 - exp(eps - loss))+] by Monte Carlo, with five standard errors to spare.
    delta = 1e-2
    claimed = PldAccountant().epsilon([Releases(noise, times, slots=slots)], delta)
    found = losses(noise, slots, times, 60_000, np.random.default_rng(0), present=present)
    excess = np.maximum(0.0, -np.expm1(np.minimum(0.0, claimed - found)))
    spread = 5 * excess.std() / math.sqrt(len(excess))
    assert excess.mean() - spread <= delta
    if present:  # and an epsilon that is a tenth lower is caught
        lower = np.maximum(0.0, -np.expm1(np.minimum(0.0, 0.9 * claimed - found)))
        assert lower.mean() > delta


def test_one_slot_is_no_amplification_and_many_are_more_than_few() -> None:
    accountant = PldAccountant()
    alone = accountant.epsilon([Releases(1.0, 4, slots=1)], 1e-5)
    assert alone == pytest.approx(gaussian_epsilon(2.0, 1e-5))
    few, many = (accountant.epsilon([Releases(1.0, 4, slots=slots)], 1e-5) for slots in (5, 50))
    assert many < few < alone


def test_allocation_tells_no_more_than_poisson_sampling_at_the_same_rate() -> None:
    accountant = PldAccountant()
    allocated = accountant.epsilon([Releases(1.0, 4, slots=50)], 1e-6)
    poisson = accountant.epsilon([Releases(1.0, 200, rate=0.02)], 1e-6)
    assert 0.8 * poisson < allocated < poisson


def test_allocations_and_a_release_of_everybody_add_up() -> None:
    accountant = PldAccountant()
    start = Releases(2.0, 1)
    both = accountant.epsilon([start, Releases(1.0, 2, slots=20)], 1e-5)
    assert accountant.epsilon([Releases(1.0, 2, slots=20)], 1e-5) < both
    assert accountant.epsilon([start], 1e-5) < both
    assert both < gaussian_epsilon(math.hypot(0.5, math.sqrt(2)), 1e-5)


def test_who_sees_the_draws_sees_one_contribution_to_each_allocation() -> None:
    found = epsilon_if_seen([Releases(2.0, 1), Releases(1.0, 3, slots=20)], 1e-5)
    assert found == pytest.approx(gaussian_epsilon(math.hypot(0.5, math.sqrt(3)), 1e-5))


@pytest.mark.parametrize(("noise", "times", "rate"), [(1.0, 40, 0.1), (2.0, 400, 0.01), (0.7, 10, 0.5)])
def test_who_sees_the_draws_of_poisson_sampling_sees_a_binomial_number(
    noise: float, times: int, rate: float
) -> None:
    # By Balle and Wang's formula for each number of contributions, averaged over all of them.
    delta = 1e-5
    found = epsilon_if_seen([Releases(noise, times, rate=rate)], delta)
    total = 0.0
    for count in range(1, times + 1):
        chance = math.comb(times, count) * rate**count * (1 - rate) ** (times - count)
        shift = math.sqrt(count) / noise
        above, below = (math.erfc((found / shift - sign * shift / 2) / 2**0.5) / 2 for sign in (1, -1))
        total += chance * (above - math.exp(found) * below)
    assert total == pytest.approx(delta, rel=2e-3)
    assert total <= delta
    assert found > PldAccountant().epsilon([Releases(noise, times, rate=rate)], delta)


def test_noise_is_found_for_an_epsilon() -> None:
    noise = calibrate(2.0, 1e-5, 2, slots=10)
    assert PldAccountant().epsilon([Releases(noise, 2, slots=10)], 1e-5) <= 2.0
    assert PldAccountant().epsilon([Releases(0.97 * noise, 2, slots=10)], 1e-5) > 2.0


def test_answers_are_stored_and_damaged_ones_are_computed_again(tmp_path: Path) -> None:
    first = epsilon(1.5, 2, 10, 1e-5)
    file = tmp_path / "allocation.json"
    assert list(stored_answers().values()) == [first]
    held = json.loads(file.read_text())
    held["1"] = dict.fromkeys(held["1"], 77.0)
    file.write_text(json.dumps(held))
    assert epsilon(1.5, 2, 10, 1e-5) == 77.0  # the stored answer was used
    for damaged in ("", "[]", '{"1": 3}', '{"1": {"x": null}}', '{"0": {}}'):
        file.write_text(damaged)
        assert epsilon(1.5, 2, 10, 1e-5) == first
    file.unlink()
    tmp_path.chmod(0o500)
    try:
        assert epsilon(1.5, 2, 10, 1e-5) == first
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("releases", "sentence"),
    [
        (Releases(1.0, 2, 0.5, 10), "rate or slots"),
        (Releases(1.0, 2, None, -1), "cannot be added up"),
    ],
)
def test_releases_that_cannot_be_are_refused(releases: Releases, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        PldAccountant().epsilon([releases], 1e-5)
