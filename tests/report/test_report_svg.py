import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.report.chart import Axis, Figure, Series
from offbeat.report.svg import HEIGHT, WIDTH, coinciding, draw, escape_text, spread_labels, standalone

YS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


def figure(*lines: Series, **more: Any) -> Figure:
    return Figure("f", "A & B", Axis("x"), Axis("y"), lines, **more)


def line(style: int, ys: list[float], label: str = "run", tops: list[float] | None = None) -> Series:
    top = None if tops is None else np.array(tops)
    return Series(style, label, np.arange(len(ys), dtype=float), np.array(ys), top)


@given(st.lists(YS, min_size=1, max_size=12), st.sampled_from([0.0, 1.0]))
def test_everything_is_drawn_inside_the_canvas(many: list[list[float]], stair: float) -> None:
    drawn = draw(figure(*(line(style, ys) for style, ys in enumerate(many)), stair=stair))
    root = ET.fromstring(drawn)
    for element in root.iter("path"):
        numbers = [float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", element.attrib["d"])]
        assert all(-5 <= x <= WIDTH + 5 for x in numbers[::2])
        if not stair:  # a stair stands on the ground, which need not be on its axis
            assert all(-5 <= y <= HEIGHT + 5 for y in numbers[1::2])


@given(st.text(max_size=30), st.text(max_size=30))
def test_names_from_outside_are_never_markup(one: str, other: str) -> None:
    drawn = draw(figure(line(0, [1.0, 2.0], one), line(1, [2.0, 1.0], other)))
    root = ET.fromstring(standalone(drawn))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "g", "style", "rect", "title", "path", "text"}


def test_text_shows_what_would_be_invisible_or_turn_the_line_round() -> None:
    assert escape_text("a\x00b\u202ec\ud800<") == "a\ufffdb\ufffdc\ufffd&lt;"


def test_each_run_is_named_at_the_end_of_its_line() -> None:
    drawn = draw(figure(line(0, [1.0, 5.0], "high"), line(1, [1.0, 2.0], "low")))
    names = {each.text: float(each.attrib["y"]) for each in ET.fromstring(drawn).iter("text")}
    assert names["high"] < names["low"]


def test_pieces_of_a_line_are_not_joined_and_have_one_name() -> None:
    later = Series(0, "broken", np.array([3.0, 4.0]), np.array([2.0, 3.0]))
    drawn = draw(figure(line(0, [1.0, 2.0], "broken"), later, line(1, [3.0, 1.0], "other")))
    root = ET.fromstring(drawn)
    assert [each.text for each in root.iter("text")].count("broken") == 1
    assert len([each for each in root.iter("path") if each.attrib["class"].startswith("line")]) == 3
    assert "broken ends at 3, other ends at 1." in root.attrib["aria-label"]


def test_a_single_run_needs_no_name() -> None:
    root = ET.fromstring(draw(figure(line(0, [1.0, 5.0], "alone"))))
    assert "alone" not in {each.text for each in root.iter("text")}


def test_a_single_line_is_named_where_other_figures_of_its_page_have_more() -> None:
    root = ET.fromstring(draw(figure(line(1, [1.0, 5.0], "other"), runs=("one", "other"))))
    assert [each.text for each in root.iter("text") if each.get("class") == "name"] == ["other"]
    root = ET.fromstring(draw(figure(line(0, [1.0, 5.0], "alone"), runs=("alone",))))
    assert "alone" not in {each.text for each in root.iter("text")}


def test_a_run_goes_by_the_same_name_in_all_figures_of_a_page() -> None:
    runs = tuple(f"a name that is much too long, with {number} in the middle of it" for number in range(3))
    alone_there, together = (
        [each.text for each in ET.fromstring(drawn).iter("text") if each.get("class") == "name"]
        for drawn in (
            draw(figure(line(1, [1.0, 2.0], runs[1]), runs=runs)),
            draw(figure(*(line(style, [1.0, 2.0], run) for style, run in enumerate(runs)), runs=runs)),
        )
    )
    assert len(set(together)) == 3
    assert alone_there == [together[1]]


def test_runs_differ_in_more_than_colour() -> None:
    root = ET.fromstring(
        draw(figure(*(line(style, [1.0, 2.0 + style], f"run {style}") for style in range(4))))
    )
    dashes = [
        each.attrib.get("stroke-dasharray") for each in root.iter("path") if "line" in each.attrib["class"]
    ]
    assert len(set(dashes)) == 4


def test_twelve_names_have_room() -> None:
    places = spread_labels([0.0] * 12, 15, 24, HEIGHT - 40)
    assert places[-1] - places[-2] == 15


def test_a_band_reaches_up_to_its_edge() -> None:
    root = ET.fromstring(draw(figure(line(0, [0.0, 0.0], tops=[4.0, 4.0]))))
    (band,) = (each.attrib["d"] for each in root.iter("path") if "band" in each.attrib["class"])
    ys = {float(pair.split(",")[1]) for pair in band.strip("MZ").split("L")}
    assert ys == {24.0, HEIGHT - 40.0}


def test_a_file_of_its_own_brings_its_colours_along() -> None:
    drawing = standalone(draw(figure(line(0, [1.0, 2.0]))))
    assert 'xmlns="http://www.w3.org/2000/svg"' in drawing
    assert "#0072b2" in drawing
    assert "var(" not in drawing


def test_numbers_that_are_all_the_same_are_drawn() -> None:
    ET.fromstring(draw(figure(line(0, [0.0]), line(1, [0.0]))))
    ET.fromstring(draw(figure(line(0, [7.5] * 3))))


def dashes(drawn: str) -> dict[str, tuple[str | None, str | None]]:
    lines = [each for each in ET.fromstring(drawn).iter("path") if "line" in each.attrib["class"]]
    return {
        each.attrib["class"]: (each.get("stroke-dasharray"), each.get("stroke-dashoffset")) for each in lines
    }


def test_lines_that_coincide_are_named_and_alternate_in_dashes() -> None:
    same = figure(line(0, [1, 2, 3], "a"), line(1, [1, 2, 3], "b"), line(2, [3, 2, 1], "c"))
    assert coinciding(same) == [("a", "b")]
    found = dashes(draw(same))
    assert found["line c0"] == ("9 9", "0")
    assert found["line c1"] == ("9 9", "-9")
    assert found["line c2"] == ("2 3", None)
    apart = figure(line(0, [1, 2, 3], "a"), line(1, [1, 2.1, 3], "b"))
    assert coinciding(apart) == []


def test_a_line_that_shares_only_a_short_part_does_not_coincide() -> None:
    short = Series(1, "b", np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    assert coinciding(figure(line(0, [0, 1, 2, 3, 4], "a"), short)) == []


def ticks(drawn: str) -> list[float]:
    texts = [each for each in ET.fromstring(drawn).iter("text") if each.get("text-anchor") == "end"]
    return [float(each.text or "") for each in texts]


def test_a_zoomed_axis_leaves_out_the_start_and_nothing_else() -> None:
    rising = line(0, [0.1, 0.8, *np.linspace(0.9, 0.92, 18)])
    whole, zoomed = (
        draw(Figure("f", "t", Axis("x"), Axis("y", zoom=zoom), (rising,))) for zoom in (False, True)
    )
    assert min(ticks(whole)) <= 0.1
    assert 0.85 <= min(ticks(zoomed)) <= 0.9
    assert max(ticks(zoomed)) >= 0.92
    late = line(1, [0.9] * 19 + [0.2])
    both = draw(Figure("f", "t", Axis("x"), Axis("y", zoom=True), (rising, late)))
    assert min(ticks(both)) <= 0.2


def test_what_a_zoomed_axis_leaves_out_is_clipped() -> None:
    rising = line(0, [0.1, 0.8, *np.linspace(0.9, 0.92, 18)])
    root = ET.fromstring(draw(Figure("f", "t", Axis("x"), Axis("y", zoom=True), (rising,))))
    (plot,) = (each for each in root.iter("svg") if each.get("class") == "plot")
    assert [each for each in plot.iter("path") if "line" in each.attrib["class"]]
    assert float(plot.attrib["y"]) + float(plot.attrib["height"]) <= HEIGHT - 40 + 5
