"""Drawings of what tuning costs."""

import re
import xml.etree.ElementTree as ElementTree

from experiments.reproduce.cost_figure import drawings
from experiments.reproduce.tuning_cost import Cost

from offbeat.report.chart import PERCENT, PLAIN

MADE = (
    Cost("free", "Dir(0.1)", (0.75,), tuned=False),
    Cost("tuned", "Dir(0.1)", (0.7, 0.8, 0.85)),
    Cost("missing", "Dir(0.1)", ()),
    Cost("tuned", "Dir(0.3)", (0.6, 0.9)),
)


def texts(drawing: str) -> list[str]:
    root = ElementTree.fromstring(drawing)
    return [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_each_column_has_a_drawing_that_names_its_methods_and_axes() -> None:
    files = drawings(MADE, "study-cost", PERCENT)
    assert list(files) == ["study-cost-1.svg", "study-cost-2.svg"]
    first = texts(files["study-cost-1.svg"])
    assert {"free", "tuned", "Dir(0.1): accuracy, %", "runs spent on the grid", "1", "2", "3"} <= set(first)
    assert "missing" not in first
    assert list(drawings(MADE[:2], "study-cost", PERCENT)) == ["study-cost.svg"]
    assert drawings((), "study-cost", PERCENT) == {}


def test_a_tuning_free_method_is_a_point_at_one_run() -> None:
    (drawing,) = drawings(MADE[:2], "x", PERCENT).values()
    assert re.findall(r"<title>(free: .*?|tuned: .*?)</title>", drawing) == [
        "free: 75 % at 1",
        "tuned: 70 % at 1",
        "tuned: 80 % at 2",
        "tuned: 85 % at 3",
    ]


def test_fractions_stay_fractions_where_the_table_has_them() -> None:
    (drawing,) = drawings(MADE[:2], "x", PLAIN).values()
    assert "accuracy" in texts(drawing)
    assert re.findall(r"<title>free: .*?</title>", drawing) == ["<title>free: 0.75 at 1</title>"]
    assert "%" not in "".join(texts(drawing))


def test_a_method_looks_the_same_in_all_columns() -> None:
    first, second = drawings(MADE, "x", PERCENT).values()
    looks = [re.findall(r'<path class="line (c\d)"', one)[-1] for one in (first, second)]
    assert looks == ["c1", "c1"]


def test_a_drawing_has_colours_for_light_and_dark_and_loads_nothing() -> None:
    (drawing,) = drawings(MADE[:2], "x", PERCENT).values()
    assert "@media (prefers-color-scheme:dark)" in drawing
    assert re.findall(r"(?:href|src|url\()[^>]*", drawing) == []
    assert drawings(MADE[:2], "x", PERCENT) == {"x.svg": drawing}
