"""The tables at the top of the pages and the picture of all claims are made from the records."""

import math
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from experiments.glance import HEAD, PICTURE, claims, pages, table
from experiments.reproduce.claims_figure import Claim, Point, draw

PAPERS = {"adamasfl", "fadas", "language", "momentum", "padamfed"}
ROOT = Path(__file__).parent.parent.parent


@cache
def found() -> tuple[Claim, ...]:
    return claims()


def test_every_page_begins_with_the_table_that_its_records_give() -> None:
    made = pages(found())
    assert {path.parent.name for path in made} == PAPERS
    for path, text in made.items():
        assert path.read_text() == text, f"run python -m experiments.glance --write for {path}"
        first = [line for line in text.splitlines() if line][2]
        assert first == f"| {' | '.join(HEAD)} |"


def test_the_picture_is_what_the_records_give_and_is_shown() -> None:
    assert PICTURE.read_text() == draw(found()), "run python -m experiments.glance --write"
    assert f"({PICTURE.name})" in (ROOT / "docs" / "results.md").read_text()


def test_the_picture_has_a_mark_for_every_point_inside_its_frame() -> None:
    root = ElementTree.fromstring(draw(found()))
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    name = "{http://www.w3.org/2000/svg}"
    circles, diamonds = root.findall(f"{name}circle"), root.findall(f"{name}polygon")
    points = [point for claim in found() for point in claim.points]
    told = sum(point.claimed is not None for point in points)
    legend = 3
    assert len(circles) + len(diamonds) == len(points) + told + legend
    assert len(diamonds) - 1 == sum(not point.agrees for point in points)
    assert all(0 < float(each.attrib["cx"]) < width for each in circles)
    assert all(0 < float(each.attrib["cy"]) < height for each in circles)


def test_the_figures_are_those_of_the_tables_below() -> None:
    by_words = {claim.words: claim for claim in found()}
    ahead = by_words["Table 2: FADAS is above FedBuff"]
    assert [round(point.measured, 1) for point in ahead.points] == [5.3, 3.6, 9.3]
    assert [point.claimed and round(point.claimed, 1) for point in ahead.points] == [33.4, 21.9, None]
    assert ahead.verdict == "yes"
    page = (ROOT / "experiments" / "fadas" / "README.md").read_text()
    assert "The gulf between FedBuff and FADAS in ResNet-18 is 5.3 and 3.6 points" in page
    steps = by_words["Table 2: MA needs fewer server steps to the best accuracy of tuned FedBuff"]
    assert (steps.agreeing, len(steps.points), steps.verdict) == (1, 10, "in 1 of 10")
    assert sum(math.isinf(point.measured) for point in steps.points) == 7
    assert (
        by_words["Fig. 1: AdaMasFL at its theorem's rates is above all methods tuned by grid"].verdict == "no"
    )


def test_a_point_agrees_by_its_sign_or_by_its_distance_from_the_paper() -> None:
    for claim in found():
        for point in claim.points:
            if "from the paper" not in claim.unit and "nearer" not in claim.words:
                assert point.agrees == (point.measured > 0), (claim.words, point)
            elif abs(point.measured) <= 3:
                assert point.agrees


@pytest.mark.parametrize(("agreeing", "verdict"), [(0, "no"), (1, "in 1 of 2"), (2, "yes")])
def test_a_verdict_counts_the_cases(agreeing: int, verdict: str) -> None:
    points = tuple(Point(str(n), 1.0, agrees=n < agreeing) for n in range(2))
    claim = Claim("fadas", "A claim", "points", points, "a reason")
    assert claim.verdict == verdict
    row = table("fadas", [claim]).splitlines()[-1]
    assert row == f"| A claim | 0 +1.0; 1 +1.0 (points) | **{verdict}**: a reason |"
    assert not re.search("fadas", table("momentum", [claim]))
