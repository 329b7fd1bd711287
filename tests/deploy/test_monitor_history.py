"""Series, bins and minutes that stay small."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from offbeat.deploy.monitor.state import DoublingHistogram, MinuteCounts, ThinnedSeries


@given(st.integers(0, 500), st.integers(3, 20))
def test_a_thinned_series_keeps_the_first_the_last_and_evenly_what_is_between(count: int, most: int) -> None:
    series: ThinnedSeries[int] = ThinnedSeries(most)
    for number in range(count):
        series.add(number)
    points = series.points()
    assert len(points) <= most
    assert points[:1] + points[-1:] == ([0, count - 1] if count else [])
    assert len({after - before for before, after in pairwise(points[:-1])}) <= 1


def test_a_short_series_is_whole() -> None:
    series: ThinnedSeries[int] = ThinnedSeries(10)
    for number in range(9):
        series.add(number)
    assert series.points() == list(range(9))


@given(st.lists(st.integers(0, 10_000)), st.sampled_from([1, 2, 5, 24]))
def test_bins_count_everything_where_it_belongs(values: list[int], count: int) -> None:
    bins = DoublingHistogram(count)
    for value in values:
        bins.add(value)
    assert len(bins.counts) == count
    for n, found in enumerate(bins.counts):
        assert found == sum(n * bins.width <= value < (n + 1) * bins.width for value in values)
    assert sum(bins.counts) == len(values)
    assert bins.most == max(values, default=0)
    assert bins.mean == (sum(values) / len(values) if values else None)


def test_quiet_minutes_are_there_and_old_ones_go() -> None:
    minutes = MinuteCounts(2, minutes=4)
    for kind, now in ((0, 0.0), (0, 59.0), (1, 61.0), (0, 185.0)):
        minutes.add(kind, now)
    assert minutes.counts(185.0) == [[2, 0, 0, 1], [0, 1, 0, 0]]
    assert minutes.counts(245.0) == [[0, 0, 1, 0], [1, 0, 0, 0]]
    assert minutes.counts(1e9) == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_clock_that_was_set_back_loses_no_arrival() -> None:
    minutes = MinuteCounts(1)
    minutes.add(0, 600.0)
    minutes.add(0, 0.0)
    assert minutes.counts(600.0) == [[2]]
