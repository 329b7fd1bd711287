"""The site: it is built without a warning, holds every page and name, and loads nothing from elsewhere."""

import enum
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from filelock import FileLock

import offbeat

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md"))


class Links(HTMLParser):
    """What a page refers to, what it loads, and the places in it that can be referred to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        if tag == "a":
            self.links.append(given.get("href", "#"))
        else:
            self.loaded += [given[name] for name in ("src", "href") if name in given]
        self.places |= {given[name] for name in ("id", "name") if name in given}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as CI builds it, once for all processes that run tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "site"
    words = ["-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(folder)]
    with FileLock(f"{folder}.lock"):
        if not (folder / "built").exists():
            command = [sys.executable, "-m", "sphinx", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            (folder / "built").touch()
    return folder


def test_every_page_is_on_the_site_and_can_be_found_from_the_first(site: Path) -> None:
    shown = set(Links(site / "index.html").links)
    results = set(Links(site / "results.html").links)
    missing = [str(page) for page in PAGES if f"{page}.html" not in shown | results and str(page) != "index"]
    assert missing == []


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html")}
    lost = []
    for page, found in pages.items():
        for link in found.links + found.loaded:
            target, place = urldefrag(unquote(link))
            if re.match(r"\w+:", target):
                continue
            there = (page.parent / target.partition("?")[0]).resolve() if target else page
            nowhere = place and there in pages and place not in pages[there].places
            if not there.exists() or nowhere:
                lost.append((page.name, link))
    assert len(pages) > len(PAGES)
    assert lost == []


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    foreign = [
        (page.name, url) for page in pages for url in Links(page).loaded if re.match(r"(\w+:)?//", url)
    ]
    styles = [
        (sheet.name, url)
        for sheet in site.rglob("*.css")
        for url in re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^)\"']+)", sheet.read_text())
    ]
    assert pages
    assert foreign + styles == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    places = Links(site / "reference.html").places
    assert [
        name for name in offbeat.__all__ if not {f"offbeat.{name}", f"module-offbeat.{name}"} & places
    ] == []


def test_every_study_has_a_page() -> None:
    studies = {page.parent.name for page in ROOT.glob("experiments/*/README.md")}
    pages = {page.stem for page in (DOCS / "results").glob("*.md")}
    assert studies == pages  # docs/results/NAME.md is the two lines that include it


def test_parts_of_other_pages_that_are_included_are_there() -> None:
    """A marker that is gone would include the whole page, or nothing."""
    count = 0
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"^```{include} (.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            name, *options = block.splitlines()
            text = (page.parent / name).read_text()
            for option in (one for one in options if one != ":relative-images:"):
                marker = option.split(": ", 1)[1].strip('"')
                assert marker in text, f"{page.name}: {name} has no {marker!r}"
                count += 1
    assert count


FORMER = {"Participation": {"most", "apart"}, "Private": {"amplified"}}  # names that only say the present one
IN_MODULES = ("checkpoint.save", "checkpoint.load", "models.build", "models.default_model")


def callables() -> dict[str, Any]:
    """The functions and classes that a user calls; the settings of `Experiment` have a page of their own."""
    found = {name: getattr(offbeat, name) for name in offbeat.__all__ if name != "Experiment"}
    found |= {name: getattr(getattr(offbeat, name.split(".")[0]), name.split(".")[1]) for name in IN_MODULES}
    return {
        name: each
        for name, each in found.items()
        if (inspect.isfunction(each) or inspect.isclass(each))
        and not getattr(each, "_is_protocol", False)
        and not (inspect.isclass(each) and issubclass(each, enum.Enum | Exception))
    }


@pytest.mark.parametrize("name", callables())
def test_every_parameter_of_a_public_name_is_described(name: str) -> None:
    each = callables()[name]
    told, former = inspect.getdoc(each) or "", FORMER.get(name, set())
    parameters = [one for one in inspect.signature(each).parameters if not one.startswith("_")]
    assert [
        one for one in parameters if one not in former and not re.search(rf"^ +\**{one}: ", told, re.M)
    ] == []
