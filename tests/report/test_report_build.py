import csv
import re
import shutil
import xml.etree.ElementTree as ET
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from offbeat.report.build import make_report
from report_world import make_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, one that loses work, and one that is private."""
    folder = tmp_path_factory.mktemp("making")
    make_run(folder / "plain")
    make_run(folder / "dropout", dropout=0.2, max_staleness=1)
    make_run(folder / "private", clip="0.5", noise=1.0, delta=1e-5, max_participations=8, noise_seed=1)
    return folder


def names(figure: Path) -> list[str | None]:
    """What is written at the ends of its lines."""
    return [each.text for each in ET.parse(figure).iter(f"{SVG}text") if each.get("class") == "name"]


def test_the_only_line_of_a_figure_is_named_where_the_page_has_more_runs(made: Path, tmp_path: Path) -> None:
    for run in ("plain", "dropout", "private"):
        shutil.copytree(made / run, tmp_path / run)
    for run in ("plain", "private"):
        (tmp_path / run / "trace.jsonl").unlink()
    runs = [tmp_path / run for run in ("plain", "dropout", "private")]
    folder = make_report(runs, tmp_path / "page.html").folder
    assert names(folder / "privacy.svg") == ["private"]
    for figure in ("staleness", "staleness-course", "concurrency", "arrivals", "wasted", "participation"):
        assert names(folder / f"{figure}.svg") == ["dropout"]
    page = (tmp_path / "page.html").read_text()
    assert len(re.findall(r'class="name"[^>]*>private<', page)) == 9


def test_a_page_of_one_run_does_not_name_it(made: Path, tmp_path: Path) -> None:
    folder = make_report([made / "private"], tmp_path / "page.html").folder
    assert names(folder / "privacy.svg") == names(folder / "staleness.svg") == []


def test_long_names_that_differ_in_their_middle_are_told_apart_in_all_figures(
    made: Path, tmp_path: Path
) -> None:
    long = "a-very-long-name-of-a-run-with-local-lr-0.001-and-buffer-{}-on-digits"
    runs = [shutil.copytree(made / "dropout", tmp_path / long.format(number)) for number in (1, 2)]
    figures = make_report(runs, tmp_path / "page.html").folder.glob("*.svg")
    (shown,) = {tuple(sorted(map(str, names(figure)))) for figure in figures}
    assert len(set(shown)) == 2
    assert [f"buffer-{number}" in name for number, name in enumerate(shown, 1)] == [True, True]


@pytest.mark.parametrize("name", ["a#b?c%41", "a:b\\c", "two words & more", "ä", "\udcff"])
def test_links_lead_to_the_files_whatever_the_page_is_named(made: Path, tmp_path: Path, name: str) -> None:
    report = make_report([made / "plain"], tmp_path / f"{name}.html")
    base = "file:///somewhere/page.html"
    linked = set()
    for address in re.findall(r'<a href="([^"]*)" download>', report.page.read_text()):
        parts = urlsplit(urljoin(base, unescape(address)))
        assert (parts.scheme, parts.query, parts.fragment) == ("file", "", "")
        linked.add(unquote(parts.path, errors="surrogateescape").removeprefix("/somewhere/"))
    assert linked == {f"{report.folder.name}/{file.name}" for file in report.folder.iterdir()}


def test_numbers_as_csv_say_their_units(made: Path, tmp_path: Path) -> None:
    folder = make_report([made / "dropout"], tmp_path / "page.html", with_fairness=True).folder
    heads = {}
    for file in folder.glob("*.csv"):
        run, *heads[file.stem] = next(csv.reader(file.read_text().splitlines()))
        assert run == "run"
    assert heads["accuracy-by-time"] == ["virtual time, s", "accuracy"]
    assert heads["loss-by-bytes"] == ["bytes sent and received, B", "loss"]
    assert heads["loss-by-steps"] == ["server steps", "loss"]
    assert heads["staleness"] == ["staleness, versions", "updates, fraction"]
    assert heads["arrivals"] == ["virtual time, s", "arrivals per s"]
    assert heads["participation"] == ["clients, fraction", "updates used"]
    assert heads["fairness"] == ["clients, fraction", "accuracy"]
