from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.report.svg import distinct_labels, shorten, spread_labels, text_width

PLACES = st.lists(st.floats(0, 200), min_size=1, max_size=12)


@given(PLACES)
def test_names_do_not_overlap_and_stay_inside(wanted: list[float]) -> None:
    places = spread_labels(wanted, 15, 0, 200)
    ordered = sorted(places)
    assert all(b - a >= 15 - 1e-6 for a, b in pairwise(ordered))
    assert ordered[0] >= -1e-6
    assert ordered[-1] <= 200 + 1e-6


@given(PLACES)
def test_names_keep_the_order_of_their_lines(wanted: list[float]) -> None:
    places = spread_labels(wanted, 15, 0, 200)
    for one, place in zip(wanted, places, strict=True):
        for other, beside in zip(wanted, places, strict=True):
            assert one >= other or place < beside


@given(st.lists(st.integers(0, 6), unique=True, min_size=1, max_size=7))
def test_names_that_have_room_stay_where_they_are(steps: list[int]) -> None:
    wanted = [25.0 * step + 10 for step in steps]
    assert spread_labels(wanted, 15, 0, 200) == wanted


def test_names_that_clash_move_as_little_as_they_can() -> None:
    assert spread_labels([100, 100], 10, 0, 200) == [95, 105]
    assert spread_labels([0, 0, 100], 10, 0, 200) == [0, 10, 100]


def test_where_there_is_no_room_the_gap_is_shared() -> None:
    assert spread_labels([3, 1, 2], 15, 0, 20) == pytest.approx([20, 0, 10])


@given(st.text(max_size=60), st.floats(60, 200))
def test_a_long_name_loses_its_middle(text: str, room: float) -> None:
    short = shorten(text, room)
    assert text_width(short) <= room
    assert short == text or (short[0], short[-1]) == (text[0], text[-1])
    assert (short == text) == (text_width(text) <= room)


def test_the_ends_by_which_names_differ_are_kept() -> None:
    assert shorten("momentum-approximation-fashion-12", 100).endswith("n-12")


@given(st.lists(st.text("ab1 (2)…", max_size=40), max_size=12), st.floats(100, 200))
def test_shortened_names_stay_different(texts: list[str], room: float) -> None:
    short = distinct_labels(texts, room)
    assert short.keys() == set(texts)
    assert len(set(short.values())) == len(short)
    for text, name in short.items():
        assert text_width(name) <= room
        assert name == text or text_width(text) > room


def test_names_that_would_be_shortened_alike_show_where_they_differ() -> None:
    long = "a-very-long-name-of-a-run-with-local-lr-0.001-and-buffer-{}-on-digits"
    texts = [long.format(number) for number in (1, 10)]
    assert list(distinct_labels(texts, 135).values()) == ["…-buffer-1-on-digits", "…buffer-10-on-digits"]
    assert distinct_labels([texts[0], "other"], 135)[texts[0]] == shorten(texts[0], 135)


def test_names_that_cannot_show_where_they_differ_are_numbered() -> None:
    texts = ["x" * 40 + middle + "x" * 40 for middle in ("a" + "y" * 40 + "b", "a" + "y" * 41 + "b", "c")]
    short = distinct_labels(["first", *texts], 135)
    assert [short[text][-4:] for text in texts] == [" (2)", " (3)", " (4)"]
