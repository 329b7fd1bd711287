"""Laws of delay: their distributions, their text, and files of recorded ones."""

from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from offbeat.errors import InputError
from offbeat.schedule.delays import TIER_RANGES, Delay, Recorded, parse_delay
from offbeat.schedule.rng import FadasScriptRng, KeyedRng, tier_probabilities

LAWS = {
    "uniform:1:3": stats.uniform(1, 2),
    "half-normal:2": stats.halfnorm(scale=2),
    "exponential:0.5": stats.expon(scale=0.5),
    "log-normal:0.5:0.25": stats.lognorm(0.25, scale=np.exp(0.5)),
}


def many(law: Delay, seed: int = 0, count: int = 2000, population: int = 2000) -> list[float]:
    draws = KeyedRng(seed)
    seconds = law.bind(draws, population)
    return [seconds(client, 0, draws.duration(client, 0)) for client in range(count)]


@pytest.mark.parametrize("text", LAWS)
def test_durations_follow_their_law(text: str) -> None:
    assert stats.kstest(many(parse_delay(text)), LAWS[text].cdf).pvalue > 1e-3


@pytest.mark.parametrize("text", LAWS)
def test_a_law_is_the_inverse_of_its_distribution(text: str) -> None:
    seconds = parse_delay(text).bind(KeyedRng(0), 1)
    for u in (0.001, 0.25, 0.5, 0.9, 0.999999):
        assert seconds(0, 0, u) == pytest.approx(LAWS[text].ppf(u), rel=1e-9)


@pytest.mark.parametrize("text", [*LAWS, "constant:2", "tiers:mild", "tiers:large", "log-normal:0:0"])
@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_a_law_are_finite_and_not_negative(text: str, u: float) -> None:
    duration = parse_delay(text).bind(KeyedRng(0), 1)(0, 0, u)
    assert np.isfinite(duration)
    assert duration >= 0


@pytest.mark.parametrize(
    "text",
    [
        *LAWS,
        "constant:0",
        "constant:1",
        "tiers:mild",
        "tiers:large:0.5",
        "log-normal:-1:0.1",
        "recorded:a:b.csv",
    ],
)
def test_a_law_and_its_text_are_one(text: str) -> None:
    assert str(parse_delay(text)) == text
    assert parse_delay(str(parse_delay(text))) == parse_delay(text)


# Monte Carlo over Dirichlet(3g, 2g, g) by an independent program, to three digits.
CHANCES = {
    0.1: (0.510, 0.329, 0.160),
    0.3: (0.542, 0.320, 0.139),
    0.5: (0.572, 0.311, 0.117),
    1.0: (0.637, 0.285, 0.079),
    2.0: (0.719, 0.242, 0.039),
    5.0: (0.841, 0.154, 0.006),
}


@pytest.mark.parametrize("gamma", CHANCES)
def test_tiers_have_the_chances_of_the_largest_entry_of_a_dirichlet_vector(gamma: float) -> None:
    assert tier_probabilities(gamma) == pytest.approx(CHANCES[gamma], abs=2.5e-3)
    vectors = np.random.default_rng(0).dirichlet([3 * gamma, 2 * gamma, gamma], size=200_000)
    sampled = np.bincount(vectors.argmax(axis=1), minlength=3) / 200_000
    assert tier_probabilities(gamma) == pytest.approx(sampled, abs=5e-3)


@cache
def last_to_finish(stages: tuple[int, ...]) -> list[Fraction]:
    """Who is last in a race where each needs some exponential stages: each running one is next alike."""
    running = [runner for runner, left in enumerate(stages) if left]
    if len(running) == 1:
        return [Fraction(runner == running[0]) for runner in range(len(stages))]
    total = [Fraction(0)] * len(stages)
    for runner in running:
        after = last_to_finish((*stages[:runner], stages[runner] - 1, *stages[runner + 1 :]))
        total = [old + new / len(running) for old, new in zip(total, after, strict=True)]
    return total


@pytest.mark.parametrize("gamma", [1, 2])
def test_tiers_are_exact_where_gamma_variables_are_sums_of_exponentials(gamma: int) -> None:
    exact = [float(chance) for chance in last_to_finish((3 * gamma, 2 * gamma, gamma))]
    assert tier_probabilities(gamma) == pytest.approx(exact, abs=1e-10)


def test_a_vanishing_gamma_gives_the_ratio_of_the_concentrations() -> None:
    assert tier_probabilities(1e-6) == pytest.approx((1 / 2, 1 / 3, 1 / 6), abs=1e-6)


@pytest.mark.parametrize("kind", ["mild", "large"])
@pytest.mark.parametrize("source", [KeyedRng, FadasScriptRng])
def test_a_client_stays_in_its_tier(kind: str, source: type[KeyedRng] | type[FadasScriptRng]) -> None:
    seconds = parse_delay(f"tiers:{kind}").bind(source(3), 40)
    lows = [low for low, _ in TIER_RANGES[kind]]
    tiers = [lows.index(seconds(client, 0, 0.0)) for client in range(40)]
    assert len(set(tiers)) > 1
    for client, tier in enumerate(tiers):
        low, high = TIER_RANGES[kind][tier]
        assert seconds(client, 9, 0.5) == (low + high) / 2


@pytest.mark.parametrize(("kind", "slow"), [("mild", (5, 8)), ("large", (50, 80))])
def test_the_ranges_of_tiers_are_the_papers(kind: str, slow: tuple[float, float]) -> None:
    """Of 10 to 20, 30 to 50, and 50 to 80 or 500 to 800 seconds, in units of ten (FADAS, section 5)."""
    seconds = parse_delay(f"tiers:{kind}").bind(KeyedRng(3), 200)
    ends = {(seconds(client, 0, 0.0), round(seconds(client, 0, 1 - 1e-12), 6)) for client in range(200)}
    assert ends == {(1, 2), (3, 5), slow}


def test_tiers_occur_as_often_as_they_should() -> None:
    tier = KeyedRng(1).tiers(1.0, 20_000)
    shares = np.bincount([tier(client) for client in range(20_000)], minlength=3) / 20_000
    assert shares == pytest.approx(tier_probabilities(1.0), abs=0.015)


def test_one_column_is_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool.txt"
    path.write_text("seconds\n3\n\n1\n2.5\n")
    durations = many(parse_delay(f"recorded:{path}"))
    assert set(durations) == {1.0, 2.5, 3.0}
    assert min(durations.count(value) for value in (1.0, 2.5, 3.0)) > 500


def test_two_columns_are_each_clients_own_durations_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("client,seconds\n0,3\n2,8\n0, 1\n")
    seconds = parse_delay(f"recorded:{path}").bind(KeyedRng(0), 3)
    assert [seconds(0, visit, 0.9) for visit in range(4)] == [3, 1, 3, 1]
    assert [seconds(2, visit, 0.1) for visit in range(2)] == [8, 8]
    assert [seconds(1, 0, u) for u in (0.0, 0.5, 0.9)] == [1, 3, 8]


@pytest.mark.parametrize(
    "given", [[3.0, 1.0, 8.0], (3, 1, 8), np.array([3.0, 1.0, 8.0])], ids=["list", "tuple", "array"]
)
def test_recorded_seconds_may_be_given_as_values(given: Any) -> None:
    seconds = Recorded(given).bind(KeyedRng(0), 3)
    assert [seconds(1, 0, u) for u in (0.0, 0.5, 0.9)] == [1, 3, 8]
    assert hash(Recorded(given)) == hash(Recorded([3, 1, 8]))


def test_recorded_seconds_may_be_given_by_client() -> None:
    seconds = Recorded({0: [3, 1], 2: [8]}).bind(KeyedRng(0), 3)
    assert [seconds(0, visit, 0.9) for visit in range(4)] == [3, 1, 3, 1]
    assert [seconds(1, 0, u) for u in (0.0, 0.5, 0.9)] == [1, 3, 8]
    with pytest.raises(InputError, match="the record of delays holds no durations"):
        Recorded([]).bind(KeyedRng(0), 3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("1\n-2\n", "line 2.*'-2'"),
        ("1\nnan\n", "line 2.*'nan'"),
        ("1\ntwo\n", "line 2.*'two'"),
        ("0,1\n2\n", "line 2.*columns"),
        ("0,1,2\n", "line 1.*columns"),
        ("client,seconds\n-1,2\n", "line 2.*'-1'"),
        ("client,seconds\n0.5,2\n", "line 2.*'0.5'"),
        ("seconds\n", "no durations"),
        ("", "no durations"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"bad\.csv.*{complaint}"):
        parse_delay(f"recorded:{path}").bind(KeyedRng(0), 3)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.csv"):
        parse_delay(f"recorded:{tmp_path / 'gone.csv'}").bind(KeyedRng(0), 3)
    (tmp_path / "raw").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not text"):
        parse_delay(f"recorded:{tmp_path / 'raw'}").bind(KeyedRng(0), 3)
