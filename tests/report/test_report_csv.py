import csv
import io

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.report.chart import BYTES, COUNT, PERCENT, SECONDS, Axis, Figure, Series, figure_csv, thin_points

YS = st.lists(st.floats(-100, 100), min_size=1, max_size=3000)


def line(label: str, ys: list[float], tops: list[float] | None = None) -> Series:
    return Series(
        0, label, np.arange(len(ys), dtype=float), np.array(ys), None if tops is None else np.array(tops)
    )


@given(YS)
def test_a_thinned_line_keeps_its_ends_and_its_extremes(values: list[float]) -> None:
    ys = np.array(values)
    kept = list(thin_points(np.arange(len(ys), dtype=float), ys))
    assert kept == sorted(set(kept))
    assert len(kept) <= 245
    assert (kept[0], kept[-1]) == (0, len(ys) - 1)
    assert ys[kept].min() == ys.min()
    assert ys[kept].max() == ys.max()


def test_a_short_line_is_left_as_it_is() -> None:
    assert list(thin_points(np.arange(5.0), np.zeros(5))) == [0, 1, 2, 3, 4]


def test_the_table_has_every_point() -> None:
    ys = [0.123456789, *([1.0] * 999)]
    figure = Figure("f", "F", Axis("x, of all"), Axis("y"), (line("a", ys), line('b"c', [2.0])))
    rows = list(csv.reader(io.StringIO(figure_csv(figure))))
    assert rows[0] == ["run", "x, of all", "y"]
    assert rows[1] == ["a", "0", "0.123456789"]
    assert rows[-1] == ['b"c', "0", "2"]
    assert len(rows) == 1 + 1000 + 1


def test_the_table_has_the_upper_edge_of_a_band() -> None:
    figure = Figure("f", "F", Axis("x"), Axis("y"), (line("a", [1.0], [3.0]),))
    assert figure_csv(figure) == "run,x,y,at most\na,0,1,3\n"


def test_the_table_is_in_base_units_and_says_which() -> None:
    far = line("a", [0.5], [25e9])
    figure = Figure("f", "F", Axis("time", SECONDS), Axis("sent", BYTES), (far,))
    assert figure_csv(figure) == 'run,"time, s","sent, B","at most, B"\na,0,0.5,25000000000\n'
    figure = Figure("f", "F", Axis("steps", COUNT), Axis("clients", PERCENT), (line("a", [0.5]),))
    assert figure_csv(figure) == 'run,steps,"clients, fraction"\na,0,0.5\n'


def test_a_name_is_no_formula_in_the_table() -> None:
    figure = Figure("f", "F", Axis("x"), Axis("y"), (line("=1+1", [1.0]),))
    assert figure_csv(figure).splitlines()[1].startswith("'=1+1,")
