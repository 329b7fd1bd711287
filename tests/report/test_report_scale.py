import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offbeat.report.chart import (
    BYTES,
    COUNT,
    PERCENT,
    PLAIN,
    SECONDS,
    Unit,
    UnitSize,
    format_number,
    linear_scale,
    log_scale,
)

NUMBERS = st.floats(-1e100, 1e100)
UNITS = st.sampled_from([PLAIN, COUNT, SECONDS, BYTES, PERCENT])


@given(NUMBERS, NUMBERS, UNITS, st.booleans())
def test_an_axis_holds_its_numbers_and_has_few_ticks(a: float, b: float, unit: Unit, snug: bool) -> None:
    low, high = min(a, b), max(a, b)
    axis = linear_scale(low, high, unit.size(max(abs(a), abs(b))), 5, snug=snug, whole=unit.whole)
    slack = 1e-5 * (axis.high - axis.low)
    assert axis.low < axis.high
    assert axis.low <= low + slack
    assert axis.high >= high - slack
    assert len(axis.ticks) <= 9
    for value, _ in axis.ticks:
        assert -1e-4 <= axis.position(value) <= 1 + 1e-4
    assert axis.position(axis.low) == 0
    assert axis.position(axis.high) == 1


@given(st.floats(0, 1), st.floats(0, 1e6))
def test_ticks_of_an_axis_have_different_names(low: float, span: float) -> None:
    axis = linear_scale(low, low + span, PLAIN.size(low + span), 5, snug=False)
    assert len(axis.ticks) > 1
    assert len({name for _, name in axis.ticks}) == len(axis.ticks)


@given(st.integers(0, 20), st.integers(0, 20))
def test_ticks_of_counts_are_whole(low: int, span: int) -> None:
    axis = linear_scale(low, low + span, COUNT.size(low + span), 5, snug=True, whole=True)
    assert all(value == round(value) for value, _ in axis.ticks)


def test_ticks_are_round_and_say_as_much_as_they_need() -> None:
    assert [name for _, name in linear_scale(0.07, 0.96, UnitSize(0, 1, ""), 5, snug=False).ticks] == [
        *("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")
    ]


@given(st.floats(-200, 200), st.floats(0, 30))
@example(0.0001, 0.0078125)  # an axis so narrow that a tick just beyond its end stood off the page
def test_an_axis_by_factors_holds_its_numbers_between_its_ends(power: float, wide: float) -> None:
    low = 10**power
    high = low * 10**wide
    axis = log_scale(low, high)
    assert axis.low <= low <= high <= axis.high
    for value in (low, high, *(value for value, _ in axis.ticks)):
        assert -0.01 <= axis.position(value) <= 1.01
    assert axis.position((axis.low**0.5) * axis.high**0.5) == pytest.approx(0.5)
    assert len({name for _, name in axis.ticks}) == len(axis.ticks)


def test_ticks_by_factors_are_ones_and_threes_of_few_decades() -> None:
    assert [name for _, name in log_scale(0.001, 0.3).ticks] == [
        "0.001",
        "0.003",
        "0.01",
        "0.03",
        "0.1",
        "0.3",
    ]
    assert [name for _, name in log_scale(1e-4, 1e4).ticks] == [f"{10.0**power:g}" for power in range(-4, 5)]
    assert log_scale(0.2, 0.2).low < 0.2 < log_scale(0.2, 0.2).high


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (SECONDS, 90, "90 s"),
        (SECONDS, 600, "10 min"),
        (SECONDS, 86_400 * 4, "4 d"),
        (BYTES, 77_340_000, "77.34 MB"),
        (COUNT, 2100, "2,100"),
        (COUNT, 2_500_000, "2.5 million"),
        (PERCENT, 0.125, "12.5 %"),
        (PLAIN, 0.94166, "0.9417"),
        (PLAIN, 0.0, "0"),
    ],
)
def test_a_number_is_said_in_its_unit(unit: Unit, value: float, text: str) -> None:
    assert unit.format(value) == text


def test_what_is_infinite_is_said_too() -> None:
    assert format_number(float("inf")) == "∞"
